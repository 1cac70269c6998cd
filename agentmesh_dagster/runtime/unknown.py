"""What follows when a call that must not be repeated was cut off: nobody here knows whether it took effect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Entry, Json, Step, StepStatus, Wait, WaitKind
from agentmesh_dagster.runtime.waiting import closed_wait, new_wait
from agentmesh_dagster.specs.decisions import FAIL, HAPPENED, REPEAT, UNKNOWN_OPTIONS

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.journalled import StepAsk
    from agentmesh_dagster.runtime.session import RunSession


@dataclass(frozen=True)
class Told:
    """A person said that the call took effect, and what it answered."""

    output: Json


async def settle_cut_off(session: RunSession, ask: StepAsk, known: Step) -> Told | None:
    """Follows `on_unknown` for a step that is `running` or `unknown` and must not simply run again.

    Args:
        session: The run's.
        ask: The step.
        known: Its row.

    Returns:
        What it answered, as a person says; None where it is to run again.

    Raises:
        NodeError: It is not repeated (code `step-unknown`).
        Suspended: A person is asked.
    """
    if ask.on_unknown == "retry":
        return None
    error = NodeError(
        f"step {known.key!r} was cut off while it ran, and may or may not have taken effect; it is not declared "
        "idempotent, so it is not repeated: look at the other side, then start a new run, or declare the tool "
        "'idempotent: true'",
        code="step-unknown",
        path=known.key,
    )
    if known.status is not StepStatus.UNKNOWN:
        problem = error.to_json()
        row = replace(known, status=StepStatus.UNKNOWN, error=problem, dagster_run_id=session.dagster_run_id)
        event = session.event("step.unknown", known.key, {"error": problem})
        await session.record(Entry(step=row, events=(event,)))
    if ask.on_unknown == "fail":
        raise error

    def is_spent(wait: Wait) -> bool:
        # It failed the node in an earlier Dagster run; whoever retries that is asked again.
        return _decision(wait) == FAIL and session.was_used_before(wait)

    # A call that is repeated may be cut off again, which is another question.
    question = _question(session, ask, known, f"unknown-{known.attempt}")
    closed = closed_wait(session, question, is_spent)
    decision = _decision(closed)
    if decision == FAIL:
        raise error
    return None if decision == REPEAT else Told(closed.answer["data"])


def _decision(wait: Wait) -> str:
    answer: Json = wait.answer
    return FAIL if answer is None else answer["decision"]


def _question(session: RunSession, ask: StepAsk, known: Step, label: str) -> Wait:
    wait = new_wait(session, WaitKind.UNKNOWN, known.key, ask.node_key, label)
    return replace(
        wait,
        title=f"Did {known.key} take effect?",
        body=(
            f"The step `{known.key}` was cut off while it ran, and must not happen twice. Look at the other side. "
            f"`{HAPPENED}`: it took effect (its output goes with the decision); `{REPEAT}`: it did not, call it "
            f"again; `{FAIL}`: let the node fail."
        ),
        data={"input": known.input, "started_at": known.started_at.isoformat() if known.started_at else None},
        options=UNKNOWN_OPTIONS,
        form_schema={} if ask.answer_schema is None else ask.answer_schema,
        notify=list(ask.notify) or None,
    )
