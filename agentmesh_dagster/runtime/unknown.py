"""What follows when a call that must not be repeated was cut off, or its answer lost: it may have taken effect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Entry, Json, Step, StepStatus, Wait, WaitKind
from agentmesh_dagster.runtime.waiting import closed_wait, new_wait
from agentmesh_dagster.specs.decisions import FAIL, HAPPENED, REPEAT, UNKNOWN_OPTIONS
from agentmesh_dagster.specs.fields import as_object

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.journalled import StepAsk
    from agentmesh_dagster.runtime.session import RunSession


_CODE: Final = "step-unknown"
_UNANSWERED: Final = ("tool-timeout", "tool-read", "tool-connect")


@dataclass(frozen=True)
class Told:
    """A person said that the call took effect, and what it answered."""

    output: Json


async def settle_cut_off(session: RunSession, ask: StepAsk, known: Step) -> Told | None:
    """Follows `on_unknown` for a step that is `running` or `unknown` and must not simply run again.

    Args:
        session: The run's.
        ask: The step.
        known: Its row. One that is `unknown` may have the error by which its answer was lost.

    Returns:
        What it answered, as a person says; None where it is to run again.

    Raises:
        NodeError: It is not repeated (code `step-unknown`).
        Suspended: A person is asked.
    """
    if ask.on_unknown == "retry":
        return None
    error = NodeError(
        f"step {known.key!r} {_what_happened(known)}, and may or may not have taken effect; it is not declared "
        "idempotent, so it is not repeated: look at the other side, then start a new run, or declare the tool "
        "'idempotent: true'",
        code=_CODE,
        path=known.key,
    )
    if known.status is not StepStatus.UNKNOWN:
        problem = error.to_json()
        row = replace(known, status=StepStatus.UNKNOWN, error=problem, dagster_run_id=session.dagster_run_id)
        event = session.event("step.unknown", known.key, {"error": problem})
        await session.record(Entry(step=row, events=(event,)))
    if ask.on_unknown == "fail" or not ask.may_wait:
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


def _what_happened(known: Step) -> str:
    error = as_object(known.error) or {}
    if error.get("code") in (None, _CODE):
        return "was cut off while it ran"
    what = "got no answer" if error["code"] in _UNANSWERED else "got no answer that can be used"
    return f"{what} ({error['message']})"


def _decision(wait: Wait) -> str:
    answer: Json = wait.answer
    return FAIL if answer is None else answer["decision"]


def _question(session: RunSession, ask: StepAsk, known: Step, label: str) -> Wait:
    wait = new_wait(session, WaitKind.UNKNOWN, known.key, ask.node_key, label)
    return replace(
        wait,
        title=f"Did {known.key} take effect?",
        body=(
            f"The step `{known.key}` {_what_happened(known)}, and must not happen twice. Look at the other side. "
            f"`{HAPPENED}`: it took effect (its output goes with the decision); `{REPEAT}`: it did not, call it "
            f"again; `{FAIL}`: let the node fail."
        ),
        data={"input": known.input, "started_at": known.started_at.isoformat() if known.started_at else None},
        options=UNKNOWN_OPTIONS,
        form_schema={} if ask.answer_schema is None else ask.answer_schema,
        notify=list(ask.notify) or None,
    )
