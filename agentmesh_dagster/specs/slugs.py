"""What slugs look like, the generated ones, and references to documents (`triage`, `triage@3`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.specs.base import NODE_ID_PATTERN, SLUG_PATTERN

MAX_SLUG: Final = 100
GENERATED_KINDS: Final = frozenset(("agent", "tool"))
"""Kinds that may be written inline in a node."""

_REFERENCE: Final = re.compile(r"(?P<slug>[^@]*)(?:@(?P<version>[1-9][0-9]{0,8}))?\Z")


def generated_slug(workflow: str, *place: str) -> str:
    """The slug of an agent or tool that was written inline in a node; no author can choose one of this form.

    Args:
        workflow: The workflow's slug.
        place: The node's id, after the ids and names of the containers and branches around it.
    """
    return "__".join((workflow, *place))


def is_slug(slug: str, kind: str) -> bool:
    """Whether a slug is well-formed: by the pattern, or for inline kinds one that `generated_slug` makes."""
    if SLUG_PATTERN.match(slug):
        return True
    workflow, *place = slug.split("__")
    return bool(
        place
        and kind in GENERATED_KINDS
        and len(slug) <= MAX_SLUG
        and SLUG_PATTERN.match(workflow)
        and all(NODE_ID_PATTERN.match(part) for part in place)
    )


@dataclass(frozen=True)
class SlugReference:
    """A reference as written: a slug, and the version where one is pinned."""

    slug: str
    version: int | None = None


def parse_reference(text: str, kind: str) -> SlugReference | None:
    """Reads `slug` or `slug@N`; None where it is neither. Tools may be one of a group: `refunds.pay`."""
    found = _REFERENCE.match(text)
    if found is None:
        return None
    parts = found["slug"].split(".") if kind == "tool" else [found["slug"]]
    if not all(is_slug(part, kind) for part in parts):
        return None
    return SlugReference(found["slug"], int(found["version"]) if found["version"] else None)
