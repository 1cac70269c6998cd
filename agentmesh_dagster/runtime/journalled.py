"""Replay or record: the one rule under every node, model call and tool call.

A step whose key has a finished row is answered from the row, and nothing runs. A step whose row is `running` was cut
off by an earlier attempt: it runs again where that does no harm, and becomes `unknown` where it might. So does a call
that must not be repeated and whose answer was lost. (The idea, a stored answer per call position, is the one of durable
execution engines such as DBOS and Temporal.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentmesh_dagster.errors import AgentMeshError, NodeError, ReplayError, RunRefused, StoreError
from agentmesh_dagster.faults import fault_point
from agentmesh_dagster.records import Entry, Event, Json, Step, StepStatus, WaitStatus
from agentmesh_dagster.runtime.excerpts import answered, asked
from agentmesh_dagster.runtime.unknown import settle_cut_off
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.closure import content_hash

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.row_buffer import RowBuffer
    from agentmesh_dagster.runtime.session import RunSession

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepAsk:
    """What is asked of a step, before it runs."""

    key: str
    kind: str
    node_id: str
    node_type: str
    node_name: str = ""
    parent_key: str | None = None
    predecessor_keys: tuple[str, ...] = ()
    request: Json
    """The rendered input, which the fingerprint covers; the row keeps it redacted."""
    shown: Json = None
    """What the row keeps as the input instead, where the request is the answer already: what the step read."""
    definition_hash: str
    """Of all that the run may reach; rows of earlier releases were hashed with it."""
    node_hash: str = ""
    """Of the node in which the step stands, with all that it refers to."""
    entity: tuple[str, str] | None = None
    """Kind and slug of the agent, tool or workflow that the step is about."""
    idempotent: bool
    """Whether it may run again after it was cut off."""
    announce: bool
    """Whether a `running` row is written first; pure and instant steps do without."""
    node_key: str = ""
    """The key of the node in which the step stands; its own where it is one."""
    on_unknown: str = "human"
    """What follows when it must not run again and was cut off: `human`, `retry` or `fail`."""
    answer_schema: Json = None
    """What the output of a step that was cut off must fit, where a person says it."""
    notify: Sequence[Json] = ()
    """Who is told when people must say."""
    iteration_index: int | None = None
    is_light: bool = False
    """Whether its row may wait for the next commit: to run it again costs and changes nothing."""
    is_begun: bool = False
    """Whether an op before this one has begun it, in the same Dagster run."""
    has_events: bool = True
    """Whether its begin and end are events of their own."""
    buffer: RowBuffer | None = None
    """Where rows of a walked level wait; None: each is written at once."""
    opens_waits: bool = True
    """Whether what it waits for is opened with its row; else, with that of the node in which it stands."""
    may_wait: bool = True
    """Whether it may wait at all: not in what follows the end of a workflow."""
    waits_alone: bool = False
    """Whether it goes on only for answers to its own waits; a container goes on for what is in it, too."""
    keeps_time: bool = False
    """Whether its row says how long it has worked each time that it waits: there is a bound on that."""

    @property
    def fingerprint(self) -> str:
        """A hash of what is asked. With `node_hash` it tells whether a finished row is the answer."""
        return content_hash([self.node_type, self.kind, self.request])

    def is_answered_by(self, row: Step) -> bool:
        """Whether a finished row of this key was asked the same of the same node."""
        if not row.node_hash:
            # An earlier release wrote it, with one hash for both.
            old = [self.node_type, self.kind, self.request, self.definition_hash]
            return row.fingerprint == content_hash(old)
        return row.node_hash == self.node_hash and row.fingerprint == self.fingerprint


@dataclass(frozen=True, kw_only=True)
class StepAnswer:
    """What a step came to."""

    output: Json = None
    status: StepStatus = StepStatus.SUCCEEDED
    error: Json = None
    routing_decision: Json = None
    model_used: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    child_run_id: str | None = None


@dataclass
class StepProgress:
    """The attempt that is under way; the step's own retries move it on."""

    attempt: int
    began_s: float
    """When the attempt began, or went on in this Dagster run, by the monotonic clock."""
    worked_ms: int = 0
    """How long the attempt worked before it waited, in earlier Dagster runs."""
    tries: int = 1
    """Which of the attempts that the step's `retry` allows it is; after a wait they are counted anew."""

    def begin_anew(self, now_s: float) -> None:
        """Begins a further attempt."""
        self.attempt += 1
        self.tries += 1
        self.began_s, self.worked_ms = now_s, 0


_EVENTS = {
    "llm": ("agent.request", "agent.response", "agent.response"),
    "tool": ("tool.request", "tool.response", "tool.response"),
}
_NODE_EVENTS = ("step.started", "step.completed", "step.failed")
_NOTED_MS = 1000
"""A step that waits on after so much work says how long it has worked by now."""
_PARTS = ("item", "iteration", "branch")
"""Kinds whose begin is no event: their nodes' are."""
_LEVEL_OWNERS = ("node", "item", "iteration", "branch")
"""Kinds that run again where they were cut off, and that other steps may stand under."""


async def journalled_step(
    session: RunSession,
    ask: StepAsk,
    call: Callable[[StepProgress], Awaitable[StepAnswer]],
) -> tuple[Step, bool]:
    """Answers a step from its finished row, or runs it and records the answer.

    Returns:
        The finished row, and whether it was replayed; of a node that waits, its row in status `waiting`.

    Raises:
        ReplayError: The finished row answers something else (code `fingerprint`).
        NodeError: The step was cut off, or its answer lost, and must not be repeated (code `step-unknown`).
        Suspended: A step inside a node waits.
        Exception: What `call` raised, after the row says `failed`.
    """
    known = await session.row(ask.key)
    if known is not None and known.is_finished:
        if not ask.is_answered_by(known):
            raise ReplayError(
                f"step {ask.key!r} was finished with other input than it is now asked with; the run's definition or "
                "input has changed: start a new run",
                code="fingerprint",
                path=ask.key,
            )
        return known, True
    is_node = ask.kind == "node"
    buffer = ask.buffer
    clock = session.environment.clock
    now = clock.now()
    # What another op of this Dagster run has begun goes on, as what has waited does: neither is a further attempt.
    goes_on = known is not None and (
        known.status is StepStatus.WAITING
        or (
            ask.is_begun
            and known.status is StepStatus.RUNNING
            and known.dagster_run_id == session.dagster_run_id
        )
    )
    # Whatever became of the node before: an unconsumed answer would trigger continuations forever.
    used = await session.unused_waits(ask.key) if is_node and known is not None else ()
    has_waited = known is not None and known.status is StepStatus.WAITING
    if known is not None and has_waited and ask.waits_alone:
        open_waits = session.open_waits(ask.key)
        if open_waits and not used and not session.has_new_answer(ask.key):
            # The run goes on for something else: what it did before it waited is not done again.
            if is_node:
                return known, False
            raise Suspended(open_waits)
    began = clock.monotonic_s()
    progress = StepProgress(1 if known is None else known.attempt + (0 if goes_on else 1), began)
    started_at = (known.started_at if known is not None and goes_on else None) or now
    # A row is made where one is written, and not changed: thousands of steps go through here.
    shared = _shared_fields(session, ask)
    shared |= {"queued_at": known.queued_at if known else now, "started_at": started_at}
    if known is not None and goes_on:
        progress.worked_ms = known.duration_ms or 0
    settled: StepAnswer | None = None
    if known is not None and not ask.idempotent and known.status in (StepStatus.RUNNING, StepStatus.UNKNOWN):
        told = await settle_cut_off(session, ask, known)
        settled = StepAnswer(output=told.output) if told is not None else None
    started, completed, failed = _EVENTS.get(ask.kind, _NODE_EVENTS)
    # What waits on says nothing again: a run may wait at a thousand places, and go on after each answer.
    waits_on = has_waited and not used and not ask.waits_alone
    waiting: list[Event] = []
    is_told = not waits_on and not (has_waited and not is_node) and not (ask.is_begun and goes_on)
    if ask.has_events and ask.kind not in _PARTS and is_told:
        payload: dict[str, Json] = {"attempt": progress.attempt, "node_type": ask.node_type}
        if ask.kind in _EVENTS and session.environment.captures_content:
            payload |= asked(ask.kind, shared["input"])
        waiting.append(session.event(started, ask.key, payload))
    announcement: Entry | None = None
    if ask.announce and settled is None and not waits_on:
        row = Step(
            **shared,
            attempt=progress.attempt,
            status=StepStatus.RUNNING,
            duration_ms=progress.worked_ms or None,
        )
        announcement = Entry(step=row, events=tuple(waiting), used=tuple(used))
        waiting = []
    is_called = False

    async def announce(entry: Entry) -> None:
        if buffer is None:
            await session.record(entry)
        elif is_node and not entry.used:
            await buffer.begin(entry)
        elif ask.idempotent and not entry.used:
            buffer.add(entry)
        else:
            # A call that must not be made twice is on record before it is made.
            await buffer.write_with(entry)

    async def write(entry: Entry) -> None:
        await (session.record(entry) if buffer is None else buffer.write_with(entry))

    def worked_s() -> float:
        """How long this Dagster run has worked on it."""
        if not ask.is_begun or known is None:
            return clock.monotonic_s() - began
        # Another op has begun it, maybe in another process: there is nothing but the clock on the wall.
        return (clock.now() - max(started_at, session.run.resumed_at or started_at)).total_seconds()

    # What has waited worked before, in earlier Dagster runs; the time between them is not working time.
    before_ms = progress.worked_ms

    def ended(status: StepStatus, answer: StepAnswer) -> Step:
        finished_at = clock.now()
        return Step(
            **shared,
            attempt=progress.attempt,
            status=status,
            output=session.redact(answer.output),
            error=answer.error,
            routing_decision=answer.routing_decision,
            child_run_id=answer.child_run_id,
            model_used=answer.model_used,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            cost_usd=answer.cost_usd,
            finished_at=finished_at,
            duration_ms=before_ms + max(0, round(worked_s() * 1000)),
        )

    try:
        if announcement is not None:
            await announce(announcement)
            used = ()
        is_called = True
        if settled is not None:
            answer = settled
        elif ask.kind in _EVENTS:
            fault_point(f"{ask.kind}.call.before")
            answer = await call(progress)
            fault_point(f"{ask.kind}.call.after")
        else:
            answer = await _unwaiting(ask, call(progress))
    except Suspended as suspended:
        stretch_s = worked_s() if ask.is_begun else clock.monotonic_s() - progress.began_s
        stretch_ms = max(0, round(stretch_s * 1000))
        row = Step(
            **shared,
            attempt=progress.attempt,
            status=StepStatus.WAITING,
            duration_ms=progress.worked_ms + stretch_ms,
        )
        is_unchanged = (
            known is not None
            and waits_on
            and known.attempt == row.attempt
            and stretch_ms < (1 if ask.keeps_time else _NOTED_MS)
        )
        new = [wait for wait in suspended.waits if session.wait(wait.step_key, wait.label) is None]
        opened = new if is_node or ask.opens_waits else []
        if known is None or not is_unchanged or opened or suspended.superseded:
            if is_node and (not waits_on or opened):
                waiting.append(_waiting_event(session, row, suspended))
            await write(
                Entry(
                    step=row,
                    events=tuple(waiting),
                    opened=tuple(opened),
                    # What was answered meanwhile is taken up, and what was not is closed.
                    used=(*used, *suspended.superseded),
                    superseded=suspended.superseded,
                )
            )
            known = row
        if not is_node:
            raise
        return known, False
    except asyncio.CancelledError:
        status = StepStatus.UNKNOWN if is_called and not ask.idempotent else StepStatus.CANCELED
        try:
            await asyncio.shield(write(Entry(step=ended(status, StepAnswer()), events=tuple(waiting))))
        except (StoreError, RunRefused) as error:
            # The cancellation goes on; a row that still says `running` reads as cut off, which it is.
            _log.warning("step %s was canceled, and its row could not say so: %s", ask.key, error)
        raise
    except Exception as error:
        problem = session.error_json(error)
        is_lost = not ask.idempotent and isinstance(error, AgentMeshError) and error.answer_lost
        status = StepStatus.UNKNOWN if is_lost else StepStatus.FAILED
        row = ended(status, StepAnswer(error=problem))
        if ask.has_events:
            waiting.append(session.event("step.unknown" if is_lost else failed, ask.key, {"error": problem}))
        await write(Entry(step=row, events=tuple(waiting), used=tuple(used)))
        told = await settle_cut_off(session, ask, row) if is_lost else None
        if told is None:
            raise
        answer, waiting, used = StepAnswer(output=told.output), [], ()
    row = ended(answer.status, answer)
    last = {StepStatus.SUCCEEDED: completed, StepStatus.SKIPPED: "step.skipped"}.get(row.status, failed)
    if ask.has_events:
        payload = _ended_payload(row)
        if ask.kind in _EVENTS and row.error is None and session.environment.captures_content:
            payload |= answered(ask.kind, row.output)
        waiting.append(session.event(last, ask.key, payload))
    # What is finished never runs again: with its row, all that was waited for in it is taken up or called off.
    left: tuple[str, ...] = ()
    if row.is_finished and session.has_any_under(ask.key):
        left = session.unsettled_waits(ask.key)
        await _end_below(session, ask.key, write)
    entry = Entry(step=row, events=tuple(waiting), used=(*used, *left), superseded=left)
    may_wait = ask.is_light or (is_node and row.is_finished)
    if buffer is not None and may_wait and not left and not used:
        buffer.add(entry, is_call=not ask.is_light)
    else:
        await write(entry)
    return row, False


async def _unwaiting(ask: StepAsk, answering: Awaitable[StepAnswer]) -> StepAnswer:
    """Awaits an answer; of a step that may not wait, to wait is to fail."""
    try:
        return await answering
    except Suspended:
        if ask.may_wait:
            raise
        raise NodeError(
            f"step {ask.key!r} would wait, and nothing waits in 'on_failure' and 'finally': move it into the workflow, "
            "or into one that is started with 'async: true'",
            code="finalizer-waits",
            path=ask.key,
        ) from None


async def call_off(session: RunSession, key: str, buffer: RowBuffer | None) -> None:
    """Ends the steps that wait under a part which has failed, while its node goes on without it."""
    await _end_below(session, key, session.record if buffer is None else buffer.write_with)


async def _end_below(session: RunSession, key: str, write: Callable[[Entry], Awaitable[None]]) -> None:
    """Writes of the steps that wait, or were cut off, under a step which ends that nobody needs them any more."""
    now = session.environment.clock.now()
    for row in list(session.rows_under(key)):
        if row.status in (StepStatus.WAITING, StepStatus.RUNNING):
            is_call_at_work = row.status is StepStatus.RUNNING and row.kind not in _LEVEL_OWNERS
            ended = replace(
                row,
                # Nobody knows whether a call that was cut off took effect.
                status=StepStatus.UNKNOWN if is_call_at_work else StepStatus.CANCELED,
                finished_at=now,
                # An earlier Dagster run may have begun it, and this one says so.
                dagster_run_id=session.dagster_run_id,
            )
            await write(Entry(step=ended))


def _shared_fields(session: RunSession, ask: StepAsk) -> dict[str, Any]:
    """What all rows of a step have in common."""
    entity_kind, entity_slug = ask.entity or (None, None)
    return {
        "run_id": session.run.id,
        "key": ask.key,
        "node_id": ask.node_id,
        "node_type": ask.node_type,
        "node_name": ask.node_name,
        "kind": ask.kind,
        "parent_key": ask.parent_key,
        "predecessor_keys": ask.predecessor_keys,
        "iteration_index": ask.iteration_index,
        "input": session.redact(ask.request if ask.shown is None else ask.shown),
        "fingerprint": ask.fingerprint,
        "node_hash": ask.node_hash,
        "entity_kind": entity_kind,
        "entity_slug": entity_slug,
        "dagster_run_id": session.dagster_run_id,
    }


def _ended_payload(row: Step) -> dict[str, Json]:
    payload: dict[str, Json] = {"status": row.status.value, "duration_ms": row.duration_ms}
    if row.error is not None:
        payload["error"] = row.error
    if row.model_used is not None:
        payload |= {
            "model": row.model_used,
            "input_tokens": row.input_tokens,
            "output_tokens": row.output_tokens,
            "cost_usd": row.cost_usd,
        }
    return payload


async def begun_step(session: RunSession, ask: StepAsk) -> Step:
    """Writes that a node runs, whose answer another op will ask `journalled_step` for (`is_begun`).

    One that waited stays so: what is in it may have to wait on.
    """
    known = session.known_row(ask.key)
    if known is not None and known.status is StepStatus.WAITING:
        return known
    now = session.environment.clock.now()
    row = Step(
        **_shared_fields(session, ask),
        attempt=1 if known is None else known.attempt + 1,
        status=StepStatus.RUNNING,
        queued_at=known.queued_at if known else now,
        started_at=now,
    )
    payload = {"attempt": row.attempt, "node_type": ask.node_type}
    await session.record(Entry(step=row, events=(session.event("step.started", ask.key, payload),)))
    return row


def _waiting_event(session: RunSession, row: Step, suspended: Suspended) -> Event:
    waits = suspended.waits
    by_people = any(wait.kind.is_approval for wait in waits)
    payload = {
        "waits": [
            {"id": wait.id, "kind": wait.kind.value, "step_key": wait.step_key, "label": wait.label}
            for wait in waits
            if wait.status is WaitStatus.OPEN
        ]
    }
    return session.event("step.waiting_human" if by_people else "step.waiting", row.key, payload)
