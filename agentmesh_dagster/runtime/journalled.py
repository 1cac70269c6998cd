"""Replay or record: the one rule under every node, model call and tool call.

A step whose key has a finished row is answered from the row, and nothing runs. A step whose row is `running` was cut
off by an earlier attempt: it runs again where that does no harm, and becomes `unknown` where it might. (The idea, a
stored answer per call position, is the one of durable execution engines such as DBOS and Temporal.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from agentmesh_dagster.errors import ReplayError, RunRefused, StoreError
from agentmesh_dagster.faults import fault_point
from agentmesh_dagster.records import Event, Json, Step, StepStatus, WaitStatus
from agentmesh_dagster.runtime.unknown import settle_cut_off
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.closure import content_hash

if TYPE_CHECKING:
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
    """The rendered input; the row keeps it redacted."""
    definition_hash: str
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

    @property
    def fingerprint(self) -> str:
        """A hash of what was asked: a replay under another fingerprint is refused."""
        return content_hash([self.node_type, self.kind, self.request, self.definition_hash])


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


@dataclass
class StepProgress:
    """The attempt that is under way; the step's own retries move it on."""

    attempt: int


_EVENTS = {
    "llm": ("agent.request", "agent.response", "agent.response"),
    "tool": ("tool.request", "tool.response", "tool.response"),
}
_NODE_EVENTS = ("step.started", "step.completed", "step.failed")


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
        NodeError: The step was cut off and must not be repeated (code `step-unknown`).
        Suspended: A step inside a node waits.
        Exception: What `call` raised, after the row says `failed`.
    """
    fingerprint = ask.fingerprint
    known = await session.row(ask.key)
    if known is not None and known.is_finished:
        if known.fingerprint != fingerprint:
            raise ReplayError(
                f"step {ask.key!r} was finished with other input than it is now asked with; the run's definition or "
                "input has changed: start a new run",
                code="fingerprint",
                path=ask.key,
            )
        return known, True
    is_node = ask.kind == "node"
    clock = session.environment.clock
    now = clock.now()
    has_waited = known is not None and known.status is StepStatus.WAITING
    # Whatever became of the node before: an answer that nobody takes up asks for a continuation for ever.
    used = await session.unused_waits(ask.key) if is_node and known is not None else ()
    row = Step(
        run_id=session.run.id,
        key=ask.key,
        node_id=ask.node_id,
        node_type=ask.node_type,
        node_name=ask.node_name,
        kind=ask.kind,
        parent_key=ask.parent_key,
        predecessor_keys=ask.predecessor_keys,
        # To go on after a wait is no further attempt.
        attempt=1 if known is None else known.attempt + (0 if has_waited else 1),
        status=StepStatus.RUNNING,
        input=session.redact(ask.request),
        fingerprint=fingerprint,
        queued_at=known.queued_at if known else now,
        started_at=(known.started_at if known is not None and has_waited else None) or now,
        dagster_run_id=session.dagster_run_id,
    )
    settled: StepAnswer | None = None
    if known is not None and not ask.idempotent and known.status in (StepStatus.RUNNING, StepStatus.UNKNOWN):
        told = await settle_cut_off(session, ask, known)
        settled = StepAnswer(output=told.output) if told is not None else None
    started, completed, failed = _EVENTS.get(ask.kind, _NODE_EVENTS)
    first = session.event(started, ask.key, {"attempt": row.attempt, "node_type": ask.node_type})
    if ask.announce and settled is None:
        await session.record(row, [first], used=used)
        used = ()
        waiting: list[Event] = []
    else:
        waiting = [first]
    began = clock.monotonic_s()
    progress = StepProgress(row.attempt)

    def ended(status: StepStatus, answer: StepAnswer) -> Step:
        return replace(
            row,
            attempt=progress.attempt,
            status=status,
            output=session.redact(answer.output),
            error=answer.error,
            routing_decision=answer.routing_decision,
            model_used=answer.model_used,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            cost_usd=answer.cost_usd,
            finished_at=clock.now(),
            duration_ms=round((clock.monotonic_s() - began) * 1000)
            if not has_waited
            else _since(row, clock.now()),
        )

    try:
        if settled is not None:
            answer = settled
        elif ask.kind in _EVENTS:
            fault_point(f"{ask.kind}.call.before")
            answer = await call(progress)
            fault_point(f"{ask.kind}.call.after")
        else:
            answer = await call(progress)
    except Suspended as suspended:
        row = replace(row, attempt=progress.attempt, status=StepStatus.WAITING)
        if not is_node:
            await session.record(row, waiting)
            raise
        waiting.append(_waiting_event(session, row, suspended))
        await session.record(
            row,
            waiting,
            opened=[wait for wait in suspended.waits if session.wait(wait.step_key, wait.label) is None],
            used=used,
            superseded=suspended.superseded,
        )
        return row, False
    except asyncio.CancelledError:
        status = StepStatus.CANCELED if ask.idempotent else StepStatus.UNKNOWN
        try:
            await asyncio.shield(session.record(ended(status, StepAnswer()), waiting))
        except (StoreError, RunRefused) as error:
            # The cancellation goes on; a row that still says `running` reads as cut off, which it is.
            _log.warning("step %s was canceled, and its row could not say so: %s", ask.key, error)
        raise
    except Exception as error:
        problem = session.error_json(error)
        row = ended(StepStatus.FAILED, StepAnswer(error=problem))
        await session.record(row, [*waiting, session.event(failed, ask.key, {"error": problem})], used=used)
        raise
    row = ended(answer.status, answer)
    last = {StepStatus.SUCCEEDED: completed, StepStatus.SKIPPED: "step.skipped"}.get(row.status, failed)
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
    # A node that is finished never runs again: with its row, all that it waited for is taken up or called off.
    left = session.unsettled_waits(ask.key) if is_node and row.is_finished else ()
    await session.record(
        row, [*waiting, session.event(last, ask.key, payload)], used=[*used, *left], superseded=left
    )
    return row, False


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


def _since(row: Step, now: datetime) -> int:
    """Milliseconds since a step began that has waited meanwhile: no process was there to measure them."""
    return round((now - (row.started_at or now)).total_seconds() * 1000)
