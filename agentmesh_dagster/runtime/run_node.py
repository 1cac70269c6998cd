"""Runs one node: decides whether it runs, prepares it, runs it with retries and time-outs, records where it leads.

Dagster's ops and the graph walker call `run_node` and nothing else, so that a graph gives the same journal under both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentmesh_dagster.constants import HANDLE_ERROR
from agentmesh_dagster.deadline import finishes
from agentmesh_dagster.errors import AgentMeshError, NodeError, NodeTimeout, ReplayError, RunRefused
from agentmesh_dagster.records import Json, Step, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.how_to_decide import how_to_decide
from agentmesh_dagster.runtime.journalled import (
    StepAnswer,
    StepAsk,
    StepProgress,
    begun_step,
    journalled_step,
)
from agentmesh_dagster.runtime.level_end import collect_level, record_skipped
from agentmesh_dagster.runtime.level_walk import walk_level
from agentmesh_dagster.runtime.nodes.base import (
    AnyNodeType,
    LevelEnd,
    NodeCall,
    NodeResult,
    Preparation,
    Say,
)
from agentmesh_dagster.runtime.routing import NodeState, is_live, live_edges, settle, state_after
from agentmesh_dagster.runtime.row_buffer import RowBuffer
from agentmesh_dagster.runtime.scope import Level, ParsedNode, Scope, names_after, names_before
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.specs.expressions import evaluate, render
from agentmesh_dagster.specs.graph import Edge
from agentmesh_dagster.specs.nodes import NodeConfig, WorkflowConfig
from agentmesh_dagster.specs.schema import validate_value


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


async def run_node(
    session: RunSession, scope: Scope, node_id: str, say: Say, *, collect: bool = False
) -> NodeOutcome:
    """Runs a node of a level, or replays it.

    Args:
        session: The process's work on the run.
        scope: The pass through the level.
        node_id: The node.
        say: Takes the lines of the readable step log; must not block.
        collect: It is a container that `begin_node` has begun, and whose levels other ops have run: what became of
            them is read from their rows.

    Raises:
        Exception: What made the node fail, where `on_error` is `fail`; the row says `failed` then.
    """
    while True:
        work = await _prepared(session, scope, node_id, say, collect=collect)
        if isinstance(work, NodeOutcome):
            return work
        known = session.waits_of(work.key)
        row, replayed = await work.run()
        if row.status is not StepStatus.WAITING:
            return NodeOutcome(state=NodeState.FINISHED, row=row, replayed=replayed)
        if not await _was_answered_at_once(session, row.key, known):
            waits = _told_waits(session, work, row, say)
            return NodeOutcome(state=NodeState.UNDECIDED, row=row, waits=waits)


async def begin_node(session: RunSession, scope: Scope, node_id: str, say: Say) -> NodeOutcome:
    """Begins a container whose levels other ops run, and which `run_node` ends with `collect`.

    Returns:
        In state `READY`, its levels may begin; in any other, nothing in it is to run now.

    Raises:
        Exception: Its config cannot be rendered, or the run has had its steps; the row says `failed` then.
    """
    work = await _prepared(session, scope, node_id, say, collect=True)
    if isinstance(work, NodeOutcome):
        return work
    known = session.known_row(work.key)
    if known is not None and known.is_finished:
        row, replayed = await work.run()
        return NodeOutcome(state=NodeState.FINISHED, row=row, replayed=replayed)
    row = await work.begin()
    return NodeOutcome(state=NodeState.FINISHED if row.is_finished else NodeState.READY, row=row)


async def _prepared(
    session: RunSession, scope: Scope, node_id: str, say: Say, *, collect: bool
) -> _NodeWork | NodeOutcome:
    """The work on a node that is to run, or what became of one that is not."""
    graph = scope.graph
    above = graph.ancestors[node_id]
    known = await session.node_rows(scope, above)
    if scope.is_shared:
        state = settle(graph, known, [*above, node_id])[node_id]
    else:
        # The walker comes to a node when all before it are decided.
        state = state_after(graph, node_id, known)
    if state is NodeState.UNDECIDED:
        return NodeOutcome(state=NodeState.UNDECIDED)
    node = scope.level.node(node_id, session.environment.node_types)
    if state is NodeState.SKIPPED:
        row = session.known_row(scope.key(node_id))
        if row is None or not row.is_finished:
            row = await record_skipped(session, scope, node_id)
        return NodeOutcome(state=NodeState.SKIPPED, row=row)
    finished = {name: row for name, row in known.items() if row.is_finished}
    unfit: AgentMeshError | None = None
    try:
        await node.type.load(node.config, session)
    except AgentMeshError as error:
        unfit = error
    return _NodeWork(session, scope, node, finished, say, collect=collect, unfit=unfit)


async def _was_answered_at_once(session: RunSession, key: str, known: Collection[Wait]) -> bool:
    """Whether a wait that a node has just opened is closed already: by an event that was kept for it."""
    before = {wait.id for wait in known}
    opened = (wait for wait in session.waits_of(key) if wait.id not in before)
    return any(wait.kind is WaitKind.EVENT for wait in opened) and bool(await session.unused_waits(key))


def _told_waits(session: RunSession, work: _NodeWork, row: Step, say: Say) -> tuple[Wait, ...]:
    """What a node that waits is waiting for; the log says it where the node itself does."""
    is_container = work.config.is_container
    found = session.waits_under(row.key) if is_container else session.waits_of(row.key)
    waits = tuple(wait for wait in found if wait.status is WaitStatus.OPEN)
    for wait in () if is_container else waits:
        say(f"{row.key} waits, and no worker with it: " + " | ".join(how_to_decide(wait)))
    return waits


class _NodeWork:
    """One node with what its phases share."""

    def __init__(
        self,
        session: RunSession,
        scope: Scope,
        node: ParsedNode,
        finished: Mapping[str, Step],
        say: Say,
        *,
        collect: bool,
        unfit: AgentMeshError | None,
    ) -> None:
        self.session = session
        self.say = say
        self.scope = scope
        self.node = node.spec
        self.type: AnyNodeType = node.type
        self.config: NodeConfig = node.config
        self.key = scope.key(self.node.id)
        self.collect = collect
        known = session.known_row(self.key)
        self.has_waited = known is not None and known.status is StepStatus.WAITING
        self.worked_s = (known.duration_ms or 0) / 1000 if known is not None and self.has_waited else 0.0
        """How long it worked before it waited."""
        self.unfit = unfit
        try:
            self.names = names_before(scope, self.node.id, finished)
        except AgentMeshError as error:
            self.unfit = error
            self.names = names_before(scope, self.node.id, finished, with_state=False)
        self.preparation = Preparation(
            node=self.node,
            names=self.names,
            scope=scope,
            session=session,
            say=say,
            rows=finished,
            attached=frozenset(edge.handle for edge in scope.graph.outgoing[self.node.id]),
        )
        self.request: Json = None
        try:
            if unfit is None:
                self.request = self.type.request(self.config, self.preparation)
        except AgentMeshError as error:
            self.unfit = self.unfit or error
        incoming = scope.graph.incoming[self.node.id]
        identity = scope.level.identity(self.node.id, session.environment.node_types)
        self.ask = StepAsk(
            key=self.key,
            kind="node",
            node_id=self.node.id,
            node_type=self.node.type,
            node_name=self.node.name,
            parent_key=scope.owner_key,
            predecessor_keys=tuple(scope.key(edge.source) for edge in incoming if is_live(edge, finished)),
            request=self.request,
            shown=None if self.unfit is not None else self.type.read(self.config, self.preparation),
            definition_hash=session.run.definition_hash,
            node_hash=identity.hash,
            entity=identity.entity,
            idempotent=True,
            announce=not self.type.is_pure and not collect,
            node_key=self.key,
            is_light=self.type.is_pure,
            is_begun=collect,
            has_events=scope.is_shared or not self.type.is_pure,
            buffer=scope.buffer,
            may_wait=not scope.is_closing,
            waits_alone=not self.config.is_container,
            keeps_time=self.node.timeout_s is not None or _has_own_time(self.config, scope.level),
        )

    async def begin(self) -> Step:
        """Writes that the node is running; where it cannot be, that it failed."""
        if self.unfit is not None or not self._may_begin():
            row, _ = await self.run()
            return row
        return await begun_step(self.session, self.ask)

    async def run(self) -> tuple[Step, bool]:
        """Asks the journalled step."""

        async def work(progress: StepProgress) -> StepAnswer:
            buffer = self.scope.buffer
            if buffer is None and self.config.is_container and not self.collect:
                buffer = RowBuffer(self.session)

            async def run_level(scope: Scope) -> LevelEnd:
                if buffer is None:
                    return await collect_level(self.session, scope)
                say = _silent if scope.is_quiet else self.say
                return await walk_level(self.session, scope.walked(buffer), say, run_node)

            call = NodeCall(
                preparation=self.preparation,
                key=self.key,
                request=self.request,
                run_level=run_level,
                buffer=buffer,
                has_waited=self.has_waited,
            )
            try:
                if not self._may_begin():
                    raise self._too_many()
                if self.unfit is not None:
                    raise self.unfit
                return self._succeeded(await self._attempts(call, progress))
            except Exception as error:  # noqa: BLE001 - whatever a node raises, on_error may handle
                return self._handled(error)
            finally:
                if buffer is not None and buffer is not self.scope.buffer:
                    await buffer.flush()

        return await journalled_step(self.session, self.ask, work)

    def _may_begin(self) -> bool:
        return not self.scope.level.is_workflow or self.session.begin_node(self.scope, self.node.id)

    def _too_many(self) -> NodeError:
        bound = self.scope.level.workflow.settings.max_steps
        return NodeError(
            f"the run has run {bound} nodes, as many as settings.max_steps allows: raise it or mend the workflow",
            code="max-steps",
            path=self.key,
        )

    async def _attempts(self, call: NodeCall, progress: StepProgress) -> NodeResult:
        """The node's body, as often as `retry` allows."""
        retry = self.node.retry
        attempts = retry.max_attempts if retry else 1
        while True:
            call.begin_attempt(progress.attempt)
            try:
                return await self._one_attempt(call)
            except Exception as error:
                if call.start_over(cut_off=isinstance(error, NodeTimeout)):
                    continue
                if retry is None or progress.tries >= attempts or not self._is_worth_retrying(error):
                    raise
                delay_s = retry.delay_before_s(progress.tries + 1)
                problem = self.session.error_json(error)
                failed = f"{self.key}: attempt {progress.tries} of {attempts} failed"
                self.say(f"{failed}, next in {delay_s:g} s: {problem['message']}")
                payload = {"attempt": progress.attempt, "delay_s": delay_s, "error": problem}
                await self.session.record_event("step.retrying", self.key, payload)
                await asyncio.sleep(delay_s)
                progress.begin_anew(self.session.environment.clock.monotonic_s())

    def _is_worth_retrying(self, error: Exception) -> bool:
        """Whether another attempt may end otherwise: our errors know it, foreign ones get the benefit of the doubt."""
        if not isinstance(error, AgentMeshError):
            return True
        return error.retryable or (error.answer_lost and self.node.on_unknown == "retry")

    async def _one_attempt(self, call: NodeCall) -> NodeResult:
        timeout_s = self.node.timeout_s
        if timeout_s is None and not self.config.is_container:
            timeout_s = self.scope.level.workflow.settings.node_timeout_s
        if timeout_s is None:
            return await self.type.run(self.config, call)
        # The time of an attempt goes on where it waited.
        left_s = max(0.0, timeout_s - self.worked_s) if call.goes_on else timeout_s
        body = asyncio.ensure_future(self.type.run(self.config, call))
        if not await finishes(body, left_s):
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
            routing_decision=self._route(chosen, StepStatus.SUCCEEDED, result_output, None, result),
            child_run_id=result.child_run_id,
        )

    def _handled(self, error: Exception) -> StepAnswer:
        """A failure that the workflow handles is an answer; any other goes on as the error that it is."""
        if self.node.on_error == "fail" or isinstance(error, ReplayError | RunRefused):
            raise error
        problem = self.session.error_json(error)
        self.say(f"{self.key}: failed, handled by on_error: {self.node.on_error}: {problem['message']}")
        chosen: set[str | None] = {HANDLE_ERROR} if self.node.on_error == "route" else {None}
        try:
            routing = self._route(chosen, StepStatus.FAILED, None, problem, NodeResult())
        except AgentMeshError as also:
            raise NodeError(
                f"{problem['message']} (handled by on_error: {self.node.on_error}, but then: {also.message})",
                code=problem["code"],
                path=self.key,
                context={"error": problem, "then": self.session.error_json(also)},
            ) from error
        return StepAnswer(status=StepStatus.FAILED, error=problem, routing_decision=routing)

    def _route(
        self, chosen: set[str | None], status: StepStatus, output: Json, error: Json, result: NodeResult
    ) -> dict[str, Any]:
        """The routing decision: handles, live edges, state writes, and a container's counts."""
        decision: dict[str, Any] = {"handles": sorted(h for h in chosen if h is not None), "edges": []}
        if result.counts:
            decision["counts"] = dict(result.counts)
        outgoing = self.scope.graph.outgoing[self.node.id]
        if self.scope.level.is_workflow and not self.config.is_end and _ends_here(chosen, outgoing):
            decision["ends"] = True
        conditional = any(edge.condition for edge in outgoing)
        written = dict(result.state)
        if self.node.set or conditional:
            row = Step(
                run_id=self.session.run.id,
                key=self.key,
                node_id=self.node.id,
                node_type=self.node.type,
                status=status,
                output=output,
                error=error,
            )
            names = names_after(self.scope, self.names, self.node.id, row, written)
            if self.node.set:
                own = self._state_writes(names)
                rules = self.scope.level.state
                written = rules.joined(written, own)
                names = {**names, "context": rules.joined(names["context"], own)}
            for edge in outgoing:
                where = f"edges[{edge.number}].condition"
                if edge.handle in chosen and (
                    edge.condition is None or evaluate(edge.condition, names, where=where)
                ):
                    decision["edges"].append(edge.number)
        else:
            decision["edges"] = [edge.number for edge in outgoing if edge.handle in chosen]
        if written:
            decision["set"] = written
        return decision

    def _state_writes(self, names: Mapping[str, Json]) -> dict[str, Json]:
        """What the node's `set` writes, as it is kept."""
        rules = self.scope.level.state
        schema: Mapping[str, Any] = rules.schema or {}
        properties: dict[str, Any] = schema.get("properties", {})
        written: dict[str, Json] = {}
        for key, template in self.node.set.items():
            where = f"node {self.node.id!r}, set.{key}"
            value = rules.delta(key, self.session.redact(render(template, names, where=where)))
            stands = rules.joined(names["context"], {key: value})[key]
            if key in properties and (issues := validate_value({**schema, "required": []}, {key: stands})):
                lines = "; ".join(f"{issue.path}: {issue.message}" for issue in issues)
                raise NodeError(
                    f"{where}: does not fit the state_schema: {lines}", code="state", path=self.key
                )
            written[key] = value
        return written


def _ends_here(chosen: set[str | None], outgoing: Sequence[Edge]) -> bool:
    """Whether some way that a node chose has no edge, be its condition true or not: the way ends with the node."""
    attached = {edge.handle for edge in outgoing}
    named = chosen - {None}
    if None in chosen and (None in attached or not named):
        return None not in attached
    return not named <= attached


def _silent(_line: str) -> None:
    return


def _has_own_time(config: NodeConfig, level: Level) -> bool:
    """Whether a node calls a workflow with a bound on its time."""
    if not isinstance(config, WorkflowConfig) or config.async_:
        return False
    return level.called(config.workflow).workflow.settings.timeout_s is not None
