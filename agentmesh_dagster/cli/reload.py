"""Tells a running Dagster webserver that the jobs changed, or the person how to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from agentmesh_dagster.constants import ENV_DAGSTER_URL
from agentmesh_dagster.settings import WORKSPACE_FILE

_JOB_KINDS = ("workflow",)
"""What changes the jobs of the code location when it is published; agents and tools are part of those."""


def reload_jobs(root: Path, kinds: Iterable[str], *, quiet: bool, is_changed: bool = True) -> bool | None:
    """Has the webserver of AGENTMESH_DAGSTER_URL load the code location anew.

    What was published stays so when that fails: it is said on stderr, with what to do.

    Args:
        root: The project's folder.
        kinds: What was changed; agents and tools alone change no job.
        quiet: Says nothing where all went well, for `--json`.
        is_changed: Whether something was changed just now. The webserver may be behind all the same, and is told.

    Returns:
        Whether it was reloaded; None where no webserver is known, or no job changed.
    """
    if not set(kinds) & set(_JOB_KINDS):
        return None
    url = os.environ.get(ENV_DAGSTER_URL)
    if not url:
        if not quiet and is_changed:
            click.echo(
                f"to see it in Dagster: reload the code location in the Dagster UI, or set {ENV_DAGSTER_URL} "
                "and this is done for you"
            )
        return None
    from agentmesh_dagster.orchestration.webserver import WebserverError, reload_code_location

    try:
        reload_code_location(url, location_name(root))
    except WebserverError as error:
        click.echo(f"warning: {error.message}", err=True)
        click.echo(
            "the change is stored; reload the code location in the Dagster UI once the webserver runs",
            err=True,
        )
        return False
    if not quiet:
        click.echo(f"reloaded the code location at {url}")
    return True


def location_name(root: Path) -> str:
    """The name of the project's code location in Dagster, as `workspace.yaml` gives it."""
    import yaml

    from agentmesh_dagster.orchestration.webserver import LOCATION

    try:
        content: Any = yaml.safe_load((root / WORKSPACE_FILE).read_text(encoding="utf-8"))
        target = next(entry["python_file"] for entry in content["load_from"] if "python_file" in entry)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, StopIteration):
        # No workspace here, or one of another form: then the webserver says whether it knows the usual name.
        return LOCATION
    path: Any = target if isinstance(target, str) else target.get("relative_path", "")
    named: Any = None if isinstance(target, str) else target.get("location_name")
    return str(named or Path(str(path)).name)
