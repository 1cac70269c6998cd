"""What is said of a run whose Dagster runs are not in this Dagster instance: of another one, or deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import dagster as dg

from agentmesh_dagster.errors import NodeError, RunRefused
from agentmesh_dagster.orchestration.run_tags import last_working
from agentmesh_dagster.records import Run

MISSING: Final = "dagster-run-missing"


def is_history_missing(instance: dg.DagsterInstance, dagster_run_ids: Sequence[str]) -> bool:
    """Whether those of a run's Dagster runs that worked on it are not here."""
    return last_working(instance, dagster_run_ids) is None and any(
        instance.get_run_by_id(each) is None for each in dagster_run_ids
    )


def missing_history(run_id: str, *, kind: str = "workflow", slug: str, is_final: bool) -> str:
    """Says that the Dagster runs of a run are missing, and what to do.

    Args:
        run_id: The run.
        kind: Of its definition.
        slug: Of its definition.
        is_final: Whether the run has ended.
    """
    end = "" if is_final else f"`agentmesh runs cancel {run_id[:8]}` ends it, and "
    return (
        f"the Dagster runs of run {run_id!r} are not in this Dagster instance. Set DAGSTER_HOME to the one that ran "
        f"it. If they were deleted there, the run cannot go on: {end}`agentmesh run {kind} {slug}` starts a new one "
        f"(`agentmesh runs show {run_id[:8]}` shows the input)"
    )


def refuse_missing(instance: dg.DagsterInstance, run: Run) -> None:
    """Refuses to continue a run whose Dagster runs are missing.

    Raises:
        RunRefused: They are (code `dagster-run-missing`).
    """
    if is_history_missing(instance, run.dagster_run_ids):
        message = missing_history(run.id, kind=run.kind, slug=run.slug, is_final=run.status.is_final)
        raise RunRefused(message, code=MISSING)


def missing_error() -> NodeError:
    """The error of a run that ends because its Dagster runs are missing and nobody works on it."""
    return NodeError(
        "the run did not finish: nobody works on it, and its Dagster runs are not in the Dagster instance of the "
        "daemon; they were deleted, or DAGSTER_HOME names another instance",
        code=MISSING,
    )
