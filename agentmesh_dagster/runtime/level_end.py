"""What a pass through a level came to, from the rows of its nodes: the same whether a walker ran them or ops did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Entry, Json, Step, StepStatus, WaitStatus
from agentmesh_dagster.runtime.nodes.base import AnyNodeType, LevelEnd
from agentmesh_dagster.runtime.routing import NodeState, live_edges, settle
from agentmesh_dagster.runtime.scope import Scope, writes_of
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.schema import validate_value

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.session import RunSession

_RETRYABLE: Final = ("timeout", "unexpected")
"""Codes of errors that another attempt may do without, and whose rows do not say so."""
_NOT_ENDED = (StepStatus.PENDING, StepStatus.WAITING)


class StepFailed(NodeError):
    """A step failed, in another op; its error is the one that its row keeps."""

    def __init__(self, stored: Mapping[str, Json]) -> None:
        super().__init__(str(stored["message"]), code=str(stored["code"]), path=stored.get("path"))
        self._stored = dict(stored)

    @property
    def retryable(self) -> bool:
        """As the error itself said, where the row has kept that."""
        context = as_object(self._stored.get("context")) or {}
        return bool(context.get("retryable", self.code in _RETRYABLE))

    def to_json(self) -> dict[str, Json]:
        """The error as the row keeps it."""
        return self._stored


def level_end(scope: Scope, rows: Mapping[str, Step], types: Mapping[str, AnyNodeType]) -> LevelEnd:
    """The end of a pass, all of whose nodes are finished.

    Of a body: the output of its only sink that ran, or of several `{node id: output}`, or nothing. Of a workflow: its
    run's output.

    Raises:
        NodeError: A workflow reached no end (code `no-end`), or its output does not fit (`run-output`); or the state
            was written in conflict (`state-conflict`).
    """
    if scope.level.is_workflow:
        # Its state ends with it.
        return LevelEnd(output=workflow_output(scope, rows, types))
    graph = scope.graph
    ran = [name for name in graph.sinks if rows[name].status is not StepStatus.SKIPPED]
    written = writes_of(scope, rows, graph.order, f"what comes after {scope.owner_key!r}")
    return LevelEnd(output=_of_several(ran, rows), state=written)


def workflow_output(scope: Scope, rows: Mapping[str, Step], types: Mapping[str, AnyNodeType]) -> Json:
    """The output of a workflow's own level, all of whose nodes are finished; null where it ended without an end node.

    Raises:
        NodeError: It reached no end (code `no-end`), or the output does not fit its schema (`run-output`).
    """
    graph = scope.graph
    ended = [
        name
        for name in graph.order
        if types[graph.nodes[name].type].config_model.is_end and rows[name].status is StepStatus.SUCCEEDED
    ]
    if not ended and not any(_has_ended(rows[name]) for name in graph.order):
        raise _no_end(graph, rows)
    output = _of_several(ended, rows)
    schema = scope.level.workflow.output_schema
    if schema is not None and (issues := validate_value(schema, output)):
        lines = "\n".join(f"{issue.path}: {issue.message}" for issue in issues)
        whose = f"{scope.owner_key!r}: the output of the workflow" if scope.owner_key else "the run's output"
        raise NodeError(f"{whose} does not fit the workflow's output_schema:\n{lines}", code="run-output")
    return output


def first_failure(rows: Mapping[str, Step], began: datetime | None) -> dict[str, Json] | None:
    """The error of the first step that failed and was not handled, or None.

    Args:
        rows: Rows of a level, in which nothing is at work any more.
        began: When the run began.
    """
    failed = [row for row in rows.values() if not row.is_finished and row.status not in _NOT_ENDED]
    if not failed:
        return None
    first = min(failed, key=lambda row: (row.finished_at is None, row.started_at or began, row.key))
    return (
        first.error
        or NodeError(
            f"step {first.key!r} did not finish: it is {first.status.value}",
            code="unfinished",
            path=first.key,
        ).to_json()
    )


def never_run(names: list[str]) -> NodeError:
    """The error of a level whose nodes were left alone, though nothing kept them from running."""
    return NodeError(f"these nodes were never run: {', '.join(names)}", code="unfinished")


async def settled_rows(session: RunSession, scope: Scope) -> tuple[dict[str, Step], dict[str, NodeState]]:
    """The rows of a level whose nodes are ops, and where its nodes stand; writes those of nodes that are skipped."""
    rows = await session.node_rows(scope, scope.graph.order)
    states = settle(scope.graph, rows)
    skipped = [name for name, state in states.items() if state is NodeState.SKIPPED]
    # Together, so that they share a commit.
    written = await asyncio.gather(*(_skipped(session, scope, name) for name in skipped))
    rows.update(zip(skipped, written, strict=True))
    return rows, states


async def collect_level(session: RunSession, scope: Scope) -> LevelEnd:
    """What became of a level whose nodes are ops, all of which have been run as far as they could.

    Raises:
        StepFailed: A node failed.
        NodeError: As `level_end`, or a node was never run (code `unfinished`).
        Suspended: A node waits.
    """
    rows, states = await settled_rows(session, scope)
    failure = first_failure(rows, session.run.started_at)
    if failure is not None:
        raise StepFailed(failure)
    if any(row.status is StepStatus.WAITING for row in rows.values()):
        waits = session.waits_under(scope.owner_key or "")
        raise Suspended([wait for wait in waits if wait.status is WaitStatus.OPEN])
    undone = [name for name, state in states.items() if state in (NodeState.READY, NodeState.UNDECIDED)]
    if undone:
        raise never_run(undone)
    return level_end(scope, rows, session.environment.node_types)


async def _skipped(session: RunSession, scope: Scope, node_id: str) -> Step:
    row = skipped_row(session, scope, node_id)
    await session.record(Entry(step=row, events=(session.event("step.skipped", row.key),)))
    return row


def skipped_row(session: RunSession, scope: Scope, node_id: str) -> Step:
    """The row of a node that the run goes past; its predecessors are the nodes that did not lead to it."""
    node = scope.graph.nodes[node_id]
    now = session.environment.clock.now()
    return Step(
        run_id=session.run.id,
        key=scope.key(node.id),
        node_id=node.id,
        node_type=node.type,
        node_name=node.name,
        parent_key=scope.owner_key,
        predecessor_keys=tuple(
            dict.fromkeys(scope.key(edge.source) for edge in scope.graph.incoming[node_id])
        ),
        status=StepStatus.SKIPPED,
        queued_at=now,
        finished_at=now,
        duration_ms=0,
        dagster_run_id=session.dagster_run_id,
    )


async def record_skipped(session: RunSession, scope: Scope, node_id: str) -> Step:
    """Writes the row of a node that the run goes past."""
    if scope.buffer is None:
        return await _skipped(session, scope, node_id)
    row = skipped_row(session, scope, node_id)
    scope.buffer.add(Entry(step=row))
    return row


def _has_ended(row: Step) -> bool:
    """Whether a way that the node chose has no edge, and so ends with it."""
    decision: Mapping[str, Json] = row.routing_decision or {}
    return bool(decision.get("ends"))


def _of_several(names: list[str], rows: Mapping[str, Step]) -> Json:
    if len(names) == 1:
        return rows[names[0]].output
    return {name: rows[name].output for name in names} or None


def _no_end(graph: Graph, rows: Mapping[str, Step]) -> NodeError:
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
