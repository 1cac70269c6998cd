"""Why a Dagster run failed, as its log says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from agentmesh_dagster.records import Json

_KINDS: Final = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE}
_MAX_LENGTH: Final = 500
_PROCESS_DIED: Final = (None, "ChildProcessCrashException")
"""The exceptions that Dagster names where it has only seen a step's process or task end."""


@dataclass(frozen=True, kw_only=True)
class RunFailure:
    """The first failure in a Dagster run's log that says why."""

    text: str
    """Its first line."""
    is_worker_lost: bool = False
    """Whether Dagster knows no more than that a process ended."""
    error: Mapping[str, Json] | None = None
    """AgentMesh's error, with which the step failed; None where it was another one's."""


def first_failure(instance: dg.DagsterInstance, dagster_run_id: str) -> RunFailure | None:
    """Why a Dagster run failed; None where its log does not say, as where its worker was killed."""
    for entry in instance.all_logs(dagster_run_id, of_type=_KINDS):
        # Two events with two shapes: a step's failure may carry the words that it was raised with.
        data: Any = entry.dagster_event.event_specific_data if entry.dagster_event else None
        raised: Any = getattr(data, "user_failure_data", None)
        error: Any = getattr(data, "error", None)
        while error is not None and error.cause is not None:
            error = error.cause
        text = (raised.description if raised else None) or (error.message if error else None)
        if text:
            return RunFailure(
                text=str(text).strip().splitlines()[0][:_MAX_LENGTH],
                is_worker_lost=raised is None and getattr(error, "cls_name", None) in _PROCESS_DIED,
                error=_own_error(raised.metadata) if raised else None,
            )
    return None


def _own_error(metadata: Mapping[str, Any]) -> Mapping[str, Json] | None:
    """The error that the op's host put beside its failure."""
    shown = metadata.get("error")
    problem: Any = shown.value if isinstance(shown, dg.JsonMetadataValue) else None
    return problem
