"""How a run ends: what `agentmesh_finish` decides from the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Json, RunStatus, Step, StepStatus, WaitStatus
from agentmesh_dagster.runtime.level_end import first_failure, never_run, settled_rows, workflow_output
from agentmesh_dagster.runtime.routing import NodeState
from agentmesh_dagster.runtime.session import RunSession


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run stands after all its ops: `succeeded` with an output, `failed` with an error, or `waiting`."""

    status: RunStatus
    output: Json = None
    error: Json = None
    waits_at: tuple[str, ...] = ()
    """The steps that wait."""


async def finish_run(session: RunSession) -> RunEnd:
    """Writes the rows of skipped nodes, decides how the run ended, and writes that."""
    rows, states = await settled_rows(session, session.scope)
    end = decide_end(session, rows, states)
    if end.waits_at:
        # Of all step processes, and down to the gates themselves.
        waits = await session.environment.journal.waits(session.run.id)
        keys = {wait.step_key: None for wait in waits if wait.status is WaitStatus.OPEN}
        end = replace(end, waits_at=tuple(keys) or end.waits_at)
    await session.end(end.status, output=end.output, error=end.error)
    return end


def decide_end(session: RunSession, rows: Mapping[str, Step], states: Mapping[str, NodeState]) -> RunEnd:
    """How the run ended, from its rows."""
    failure = first_failure(rows, session.run.started_at)
    if failure is not None:
        return RunEnd(status=RunStatus.FAILED, error=failure)
    waiting = tuple(name for name, row in rows.items() if row.status is StepStatus.WAITING)
    if waiting:
        return RunEnd(status=RunStatus.WAITING, waits_at=waiting)
    undone = [name for name, state in states.items() if state in (NodeState.READY, NodeState.UNDECIDED)]
    try:
        if undone:
            raise never_run(undone)
        output = workflow_output(session.scope, rows, session.environment.node_types)
    except NodeError as error:
        return RunEnd(status=RunStatus.FAILED, error=error.to_json())
    return RunEnd(status=RunStatus.SUCCEEDED, output=output)
