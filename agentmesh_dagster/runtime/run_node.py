"""Runs one node: decides whether it runs, prepares it, runs it with retries and time-outs, records where it leads.

Dagster's ops and the graph walker call `run_node` and nothing else, so that a graph gives the same journal under both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentmesh_dagster.constants import HANDLE_ERROR
from agentmesh_dagster.errors import AgentMeshError, NodeError, NodeTimeout, ReplayError, RunRefused
from agentmesh_dagster.records import Json, Step, StepStatus, Wait, WaitStatus
from agentmesh_dagster.runtime.how_to_decide import how_to_decide
from agentmesh_dagster.runtime.journalled import StepAnswer, StepAsk, StepProgress, journalled_step
from agentmesh_dagster.runtime.nodes.base import AnyNodeType, NodeCall, NodeResult, Preparation, Say
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.routing import EdgeState, NodeState, edge_state, live_edges, settle
from agentmesh_dagster.runtime.scope import Scope, names_after, names_before
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.expressions import evaluate, render
from agentmesh_dagster.specs.nodes import NodeConfig
from agentmesh_dagster.specs.schema import validate_value

CLEANUP_S = 5.0
"""How long the clean-up of a node that was cut off may take before it is left behind."""


@dataclass(frozen=True, kw_only=True)
class NodeOutcome:
    """What became of a node."""

    state: NodeState
    """`FINISHED`, `SKIPPED`, or `UNDECIDED`: something before it has not finished, and no row was written."""
    row: Step | None = None
    """The node's row; with `UNDECIDED`, that of a node which waits."""
    replayed: bool = False
    waits: tuple[Wait, ...] = ()
    """What a node that waits is waiting for."""

    @property
    def live_edges(self) -> frozenset[int]:
        """The numbers of the outgoing edges that carry the run on."""
        return live_edges(self.row) if self.row is not None else frozenset()


async def run_node(session: RunSession, scope: Scope, node_id: str, say: Say) -> NodeOutcome:
    """Runs a node of a level, or replays it.

    Args:
        session: The process's work on the run.
        scope: The level.
        node_id: The node.
        say: Takes the lines of the readable step log; must not block.

    Raises:
        Exception: What made the node fail, where `on_error` is `fail`; the row says `failed` then.
    """
    graph = scope.graph
    above = graph.ancestors[node_id]
    known = await session.node_rows(scope, above)
    states = settle(graph, known, [*above, node_id])
    node = graph.nodes[node_id]
    if states[node_id] is NodeState.UNDECIDED:
        return NodeOutcome(state=NodeState.UNDECIDED)
    if states[node_id] is NodeState.SKIPPED:
        row = await record_skipped(session, scope, node)
        return NodeOutcome(state=NodeState.SKIPPED, row=row)
    finished = {name: row for name, row in known.items() if row.is_finished}
    work = _NodeWork(session, scope, node, finished, states, say)
    row, replayed = await work.run()
    if row.status is StepStatus.WAITING:
        waits = tuple(w for w in session.waits_of(row.key) if w.status is WaitStatus.OPEN)
        for wait in waits:
            say(f"{row.key} waits, and no worker with it: " + " | ".join(how_to_decide(wait)))
        return NodeOutcome(state=NodeState.UNDECIDED, row=row, waits=waits)
    return NodeOutcome(state=NodeState.FINISHED, row=row, replayed=replayed)


async def record_skipped(session: RunSession, scope: Scope, node: NodeSpec) -> Step:
    """Writes the row of a node that the run goes past."""
    now = session.environment.clock.now()
    row = Step(
        run_id=session.run.id,
        key=scope.key(node.id),
        node_id=node.id,
        node_type=node.type,
        node_name=node.name,
        status=StepStatus.SKIPPED,
        queued_at=now,
        finished_at=now,
        duration_ms=0,
        dagster_run_id=session.dagster_run_id,
    )
    await session.record(row, [session.event("step.skipped", row.key)])
    return row


class _NodeWork:
    """One node with what its phases share."""

    def __init__(
        self,
        session: RunSession,
        scope: Scope,
        node: NodeSpec,
        finished: Mapping[str, Step],
        states: Mapping[str, NodeState],
        say: Say,
    ) -> None:
        self.session = session
        self.say = say
        self.scope = scope
        self.node = node
        self.key = scope.key(node.id)
        self.type: AnyNodeType = node_type_of(node, session.environment.node_types)
        self.config: NodeConfig = self.type.parse(node)
        self.names = names_before(scope, session.run, node.id, finished)
        self.predecessors = tuple(
            scope.key(edge.source)
            for edge in scope.graph.incoming[node.id]
            if edge_state(edge, finished, states) is EdgeState.LIVE
        )

    async def run(self) -> tuple[Step, bool]:
        """Prepares the node and asks the journalled step."""
        preparation = Preparation(
            node=self.node,
            names=self.names,
            session=self.session,
            say=self.say,
            attached=frozenset(edge.handle for edge in self.scope.graph.outgoing[self.node.id]),
        )
        unfit: AgentMeshError | None = None
        request: Json = None
        try:
            request = self.type.request(self.config, preparation)
        except AgentMeshError as error:
            unfit = error
        ask = StepAsk(
            key=self.key,
            kind="node",
            node_id=self.node.id,
            node_type=self.node.type,
            node_name=self.node.name,
            predecessor_keys=self.predecessors,
            request=request,
            definition_hash=self.session.run.definition_hash,
            idempotent=True,
            announce=not self.type.is_pure,
            node_key=self.key,
        )
        call = NodeCall(preparation=preparation, key=self.key, request=request)

        async def work(progress: StepProgress) -> StepAnswer:
            self._check_bound()
            try:
                if unfit is not None:
                    raise unfit
                return self._succeeded(await self._attempts(call, progress))
            except Exception as error:  # noqa: BLE001 - whatever a node raises, on_error may handle
                return self._handled(error)

        return await journalled_step(self.session, ask, work)

    def _check_bound(self) -> None:
        bound = self.session.pinned.workflow.settings.max_steps
        if not self.scope.prefix and not self.session.begin_node(self.key, bound):
            raise NodeError(
                f"the run has run {bound} nodes, as many as settings.max_steps allows: raise it or mend the workflow",
                code="max-steps",
                path=self.key,
            )

    async def _attempts(self, call: NodeCall, progress: StepProgress) -> NodeResult:
        """The node's body, as often as `retry` allows."""
        retry = self.node.retry
        attempts = retry.max_attempts if retry else 1
        number = 1
        while True:
            try:
                return await self._one_attempt(call)
            except Exception as error:
                if call.start_over(cut_off=isinstance(error, NodeTimeout)):
                    continue
                if retry is None or number == attempts or not _worth_retrying(error):
                    raise
                delay_s = retry.delay_before_s(number + 1)
                problem = self.session.error_json(error)
                self.say(
                    f"{self.key}: attempt {number} of {attempts} failed, next in {delay_s:g} s: {problem['message']}"
                )
                payload = {"attempt": progress.attempt, "delay_s": delay_s, "error": problem}
                event = self.session.event("step.retrying", self.key, payload)
                await self.session.environment.journal.record_events([event])
                await asyncio.sleep(delay_s)
                progress.attempt += 1
                number += 1

    async def _one_attempt(self, call: NodeCall) -> NodeResult:
        timeout_s = self.node.timeout_s or self.session.pinned.workflow.settings.node_timeout_s
        if timeout_s is None:
            return await self.type.run(self.config, call)
        body = asyncio.ensure_future(self.type.run(self.config, call))
        if not await _finishes(body, timeout_s):
            raise NodeTimeout(
                f"node {self.key!r} took longer than its timeout_s = {timeout_s:g} and was cut off",
                path=self.key,
            )
        return body.result()

    def _succeeded(self, result: NodeResult) -> StepAnswer:
        if result.status is StepStatus.SKIPPED:
            return StepAnswer(status=StepStatus.SKIPPED)
        result_output = self.session.redact(result.output)
        chosen: set[str | None] = set(result.handles)
        if self.config.has_default_handle and result.takes_default:
            chosen.add(None)
        return StepAnswer(
            output=result_output,
            routing_decision=self._route(chosen, StepStatus.SUCCEEDED, result_output, None),
        )

    def _handled(self, error: Exception) -> StepAnswer:
        """A failure that the workflow handles is an answer; any other goes on as the error that it is."""
        if self.node.on_error == "fail" or isinstance(error, ReplayError | RunRefused):
            raise error
        problem = self.session.error_json(error)
        self.say(f"{self.key}: failed, handled by on_error: {self.node.on_error}: {problem['message']}")
        chosen: set[str | None] = {HANDLE_ERROR} if self.node.on_error == "route" else {None}
        try:
            routing = self._route(chosen, StepStatus.FAILED, None, problem)
        except AgentMeshError as also:
            raise NodeError(
                f"{problem['message']} (handled by on_error: {self.node.on_error}, but then: {also.message})",
                code=problem["code"],
                path=self.key,
                context={"error": problem, "then": self.session.error_json(also)},
            ) from error
        return StepAnswer(status=StepStatus.FAILED, error=problem, routing_decision=routing)

    def _route(
        self, chosen: set[str | None], status: StepStatus, output: Json, error: Json
    ) -> dict[str, Any]:
        """The routing decision: handles, live edges, state writes."""
        row = Step(
            run_id=self.session.run.id,
            key=self.key,
            node_id=self.node.id,
            node_type=self.node.type,
            status=status,
            output=output,
            error=error,
        )
        decision: dict[str, Any] = {"handles": sorted(h for h in chosen if h is not None), "edges": []}
        outgoing = self.scope.graph.outgoing[self.node.id]
        conditional = any(edge.condition for edge in outgoing)
        if not self.node.set and not conditional:
            decision["edges"] = [edge.number for edge in outgoing if edge.handle in chosen]
            return decision
        names = names_after(self.names, self.node.id, row)
        if self.node.set:
            decision["set"] = self._state_writes(names)
            names = {**names, "context": {**names["context"], **decision["set"]}}
        for edge in outgoing:
            where = f"edges[{edge.number}].condition"
            if edge.handle in chosen and (
                edge.condition is None or evaluate(edge.condition, names, where=where)
            ):
                decision["edges"].append(edge.number)
        return decision

    def _state_writes(self, names: Mapping[str, Json]) -> dict[str, Json]:
        schema: dict[str, Any] = self.session.pinned.workflow.state_schema or {}
        properties: dict[str, Any] = schema.get("properties", {})
        written: dict[str, Json] = {}
        for key, template in self.node.set.items():
            where = f"node {self.node.id!r}, set.{key}"
            value = self.session.redact(render(template, names, where=where))
            if key in properties and (issues := validate_value({**schema, "required": []}, {key: value})):
                lines = "; ".join(f"{issue.path}: {issue.message}" for issue in issues)
                raise NodeError(
                    f"{where}: does not fit the state_schema: {lines}", code="state", path=self.key
                )
            written[key] = value
        return written


async def _finishes(body: asyncio.Future[NodeResult], timeout_s: float) -> bool:
    """Waits for a body; at the time-out, or when the waiting itself is cancelled, the body is cancelled and awaited."""
    try:
        done, _pending = await asyncio.wait([body], timeout=timeout_s)
        return bool(done)
    finally:
        if not body.done():
            body.cancel()
            # Bounded: a body may swallow its cancellation, and the time-out holds all the same.
            await asyncio.wait([body], timeout=CLEANUP_S)


def _worth_retrying(error: Exception) -> bool:
    """Whether another attempt may end otherwise: our errors know it, foreign ones get the benefit of the doubt."""
    return error.retryable if isinstance(error, AgentMeshError) else True
