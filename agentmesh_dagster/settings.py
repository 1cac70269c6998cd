"""Where a project's things are: its folder, its database, its `DAGSTER_HOME`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agentmesh_dagster.constants import (
    DEFAULT_PROJECT,
    ENV_CAPTURE_CONTENT,
    ENV_DATABASE_URL,
    ENV_PROJECT,
)
from agentmesh_dagster.errors import DefinitionError

STATE_FOLDER = ".agentmesh"
WORKSPACE_FILE = "workspace.yaml"
DATABASE_FILE = "agentmesh.db"


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` (default: the working directory) with a `workspace.yaml`, or `start`."""
    here = (start or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / WORKSPACE_FILE).is_file()), here)


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for their owner alone; only `.agentmesh` is changed later.

    Raises:
        OSError: It cannot be made.
    """
    if not folder.is_dir():
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir(mode=0o700, exist_ok=True)
    elif folder.name == STATE_FOLDER and folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)


def dagster_home(root: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """`$DAGSTER_HOME`, or `.agentmesh/` of the project."""
    home = environ.get("DAGSTER_HOME")
    return Path(home).expanduser().absolute() if home else root / STATE_FOLDER


def database_url(root: Path, environ: Mapping[str, str] = os.environ) -> str:
    """`$AGENTMESH_DATABASE_URL`, or SQLite in `$DAGSTER_HOME` or `.agentmesh/` of the project."""
    return environ.get(ENV_DATABASE_URL) or f"sqlite:///{dagster_home(root, environ) / DATABASE_FILE}"


def project_slug(environ: Mapping[str, str] = os.environ) -> str:
    """`$AGENTMESH_PROJECT`, or `default`."""
    return environ.get(ENV_PROJECT) or DEFAULT_PROJECT


def captures_content(environ: Mapping[str, str] = os.environ) -> bool:
    """False where `$AGENTMESH_CAPTURE_CONTENT` is `false`.

    Raises:
        DefinitionError: It is neither `true` nor `false` (code `bad-environment`).
    """
    stated = environ.get(ENV_CAPTURE_CONTENT) or "true"
    if stated.lower() not in ("true", "false"):
        raise DefinitionError(
            f"{ENV_CAPTURE_CONTENT} is {stated!r}: write 'true' or 'false'", code="bad-environment"
        )
    return stated.lower() == "true"
