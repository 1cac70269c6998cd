"""How a step waits while no worker does: it raises `Suspended`, and its wait's row asks for a continuation later.

The body of a node runs again from its start when something that it waited for has come; that is answered then from the
wait's row, as finished calls are from theirs. A node that waits for something else stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from agentmesh_dagster.errors import NodeError, TimeOver
from agentmesh_dagster.records import Json, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.approvals import ApprovalPolicy

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.session import RunSession


class Suspended(BaseException):
    """A step waits.

    Not an `Exception`, as a cancellation is none: a function's own `except Exception` must let it pass.
    """

    def __init__(self, waits: Sequence[Wait], superseded: Sequence[str] = ()) -> None:
        super().__init__(", ".join(wait.step_key for wait in waits))
        self.waits = tuple(waits)
        """What it waits for; opened with the row of the node, where they are new."""
        self.superseded = tuple(superseded)
        """Ids of earlier waits that nobody needs to decide any more."""


def new_wait(session: RunSession, kind: WaitKind, step_key: str, node_key: str, label: str = "") -> Wait:
    """A wait with the facts that all kinds share."""
    clock = session.environment.clock
    return Wait(
        id=clock.new_id(),
        project=session.run.project,
        run_id=session.run.id,
        step_key=step_key,
        label=label,
        kind=kind,
        node_id=node_key,
        launcher=session.run.triggered_by,
        created_at=clock.now(),
    )


def with_policy(wait: Wait, policy: ApprovalPolicy, notify: Sequence[Json]) -> Wait:
    """The wait under the rules of a gate.

    Raises:
        NodeError: The launcher may not decide, and nobody knows who launched the run (code `launcher-unknown`).
    """
    if policy.separation and not wait.launcher:
        raise NodeError(
            f"gate {wait.step_key!r} keeps the run's launcher from deciding, and nobody knows who that is: launch with "
            "the tag user=<name>, or without 'separation'",
            code="launcher-unknown",
            path=wait.step_key,
        )

    def after(seconds: float | None) -> timedelta | None:
        return None if seconds is None else timedelta(seconds=seconds)

    timeout, remind, escalate = map(after, (policy.timeout, policy.remind_after, policy.escalate_after))
    began = wait.created_at
    return replace(
        wait,
        assignees=tuple(policy.assignees),
        required=policy.required,
        ordered=policy.ordered,
        separation=policy.separation,
        on_timeout=policy.on_timeout,
        timeout_data=policy.timeout_data,
        deadline_at=began + timeout if timeout else None,
        remind_at=began + remind if remind else None,
        escalate_at=began + escalate if escalate else None,
        escalate_to=tuple(policy.escalate_to),
        notify=list(notify) or None,
    )


def closed_wait(
    session: RunSession, wait: Wait, is_spent: Callable[[Wait], bool], superseded: Sequence[str] = ()
) -> Wait:
    """The wait under the key and label of `wait`, once it is closed.

    Args:
        session: The run's.
        wait: As it is to be opened, where there is none yet.
        is_spent: Whether a closed one is no answer any more: then it is asked anew, under the label with a number.
        superseded: Ids of open waits that nobody needs to decide any more.

    Raises:
        Suspended: It is open.
    """
    for generation in itertools.count(1):
        label = wait.label if generation == 1 else f"{wait.label}#{generation}"
        known = session.wait(wait.step_key, label)
        if known is None:
            raise Suspended([replace(wait, label=label)], superseded)
        if known.status is WaitStatus.OPEN:
            raise Suspended([known], superseded)
        if not is_spent(known):
            return known
    raise AssertionError("there is always a next number")


def timed_out(wait: Wait) -> NodeError:
    """The error of a gate whose time is up, where `on_timeout` is `fail`."""
    answer: Json = wait.answer
    return TimeOver(
        f"{wait.step_key!r} was not decided until {deadline_text(wait)} (on_timeout: {wait.on_timeout})"
        + (f": {comment}" if (comment := answer.get("comment")) else ""),
        code="gate-timeout",
        path=wait.step_key,
    )


def deadline_text(wait: Wait) -> str:
    return wait.deadline_at.isoformat(timespec="seconds") if wait.deadline_at else "its deadline"
