"""Where a value of a normalised document stands in the document as its author wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.specs.problems import child_path

_SEGMENT: Final = re.compile(r"\.?[^.\[]+|\[[^\]]*\]")


@dataclass(frozen=True)
class Renames:
    """Keys that were respelled in place: the new path, and the key as it was written."""

    keys: Mapping[str, str]

    def before(self, path: str) -> str:
        """The path before this step."""
        new = old = ""
        for segment in _SEGMENT.findall(path):
            new += segment
            if new in self.keys:
                old = child_path(old, self.keys[new])
            else:
                old += segment if old else segment.removeprefix(".")
        return old


@dataclass(frozen=True)
class Moves:
    """Values that were moved: the new path, and the path before."""

    places: Mapping[str, str]

    def before(self, path: str) -> str:
        """The path before this step."""
        segments: list[str] = _SEGMENT.findall(path)
        for count in range(len(segments), 0, -1):
            found = self.places.get("".join(segments[:count]))
            if found is not None:
                return found + "".join(segments[count:])
        return path


@dataclass(frozen=True)
class Origin:
    """How a document came to be: from which place in the author's text, through which steps."""

    base: str = ""
    steps: tuple[Renames | Moves, ...] = ()

    def author_path(self, path: str) -> str:
        """The author's path of a path in the normalised document."""
        for step in reversed(self.steps):
            path = step.before(path)
        if not self.base or not path:
            return self.base or path
        return self.base + (path if path.startswith("[") else f".{path}")
