"""How a run ends: what `agentmesh_finish` decides from the rows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Json, RunStatus, Step, StepStatus
from agentmesh_dagster.runtime.routing import NodeState, live_edges, settle
from agentmesh_dagster.runtime.run_node import record_skipped
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.schema import validate_value


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run stands after all its ops: `succeeded` with an output, `failed` with an error, or `waiting`."""

    status: RunStatus
    output: Json = None
    error: Json = None
    waits_at: tuple[str, ...] = ()
    """The nodes that wait."""


async def finish_run(session: RunSession) -> RunEnd:
    """Writes the rows of skipped nodes, decides how the run ended, and writes that."""
    scope = session.scope
    rows = await session.node_rows(scope, scope.graph.order)
    states = settle(scope.graph, rows)
    skipped = [name for name, state in states.items() if state is NodeState.SKIPPED]
    # Together, so that they share a commit.
    written = await asyncio.gather(
        *(record_skipped(session, scope, scope.graph.nodes[name]) for name in skipped)
    )
    rows.update(zip(skipped, written, strict=True))
    end = decide_end(session, rows, states)
    await session.end(end.status, output=end.output, error=end.error)
    return end


def decide_end(session: RunSession, rows: dict[str, Step], states: dict[str, NodeState]) -> RunEnd:
    """How the run ended, from its rows."""
    graph = session.scope.graph
    waiting = tuple(name for name, row in rows.items() if row.status is StepStatus.WAITING)
    undone_statuses = (StepStatus.PENDING, StepStatus.WAITING)
    failed = [row for row in rows.values() if not row.is_finished and row.status not in undone_statuses]
    if failed:
        first = min(
            failed,
            key=lambda row: (row.finished_at is None, row.started_at or session.run.started_at, row.key),
        )
        error = (
            first.error
            or NodeError(
                f"step {first.key!r} did not finish: it is {first.status.value}",
                code="unfinished",
                path=first.key,
            ).to_json()
        )
        return RunEnd(status=RunStatus.FAILED, error=error)
    if waiting:
        return RunEnd(status=RunStatus.WAITING, waits_at=waiting)
    undone = [name for name, state in states.items() if state in (NodeState.READY, NodeState.UNDECIDED)]
    if undone:
        error = NodeError(f"these nodes were never run: {', '.join(undone)}", code="unfinished")
        return RunEnd(status=RunStatus.FAILED, error=error.to_json())
    types = session.environment.node_types
    ended = [
        name
        for name in graph.order
        if types[graph.nodes[name].type].config_model.is_end and rows[name].status is StepStatus.SUCCEEDED
    ]
    if not ended:
        return RunEnd(status=RunStatus.FAILED, error=_no_end(graph, rows).to_json())
    output = rows[ended[0]].output if len(ended) == 1 else {name: rows[name].output for name in ended}
    schema = session.pinned.workflow.output_schema
    if schema is not None and (issues := validate_value(schema, output)):
        lines = "\n".join(f"{issue.path}: {issue.message}" for issue in issues)
        error = NodeError(
            f"the run's output does not fit the workflow's output_schema:\n{lines}", code="run-output"
        )
        return RunEnd(status=RunStatus.FAILED, error=error.to_json())
    return RunEnd(status=RunStatus.SUCCEEDED, output=output)


def _no_end(graph: Graph, rows: dict[str, Step]) -> NodeError:
    """Names the nodes that ran and led nowhere."""
    stuck = [
        name
        for name in graph.order
        if rows[name].status is not StepStatus.SKIPPED and graph.outgoing[name] and not live_edges(rows[name])
    ]
    decisions: dict[str, Json] = {name: rows[name].routing_decision or {} for name in stuck}
    places = ", ".join(
        f"{name!r} (chose {handles})" if (handles := decisions[name].get("handles")) else repr(name)
        for name in stuck
    )
    return NodeError(
        f"the run reached no end node; it stopped after {places}, none of whose edges was live: add a default branch "
        "or an edge without a condition",
        code="no-end",
        context={"stopped_after": stuck},
    )
