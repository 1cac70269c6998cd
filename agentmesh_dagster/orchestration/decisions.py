"""Deciding, answering and telling what runs wait for: what the commands, the job `agentmesh_decide` and Python share.

The rules stand in `specs.decisions`; the store holds every call to them, and records what it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.errors import AgentMeshError, ApprovalError
from agentmesh_dagster.records import Delegation, Delivery, Json, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.voters import people, person_may

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

APPROVALS: Final = tuple(kind for kind in WaitKind if kind.is_approval)


class ProjectStore(Protocol):
    """A project in a database: an `AgentMesh`, or what stands for one."""

    @property
    def project(self) -> str:
        """Its slug."""
        ...

    def store(self) -> Store:
        """Its database."""
        ...


def list_approvals(
    agentmesh: ProjectStore,
    *,
    run_id: str | None = None,
    status: WaitStatus | None = WaitStatus.OPEN,
    assignee: str | None = None,
    limit: int = 50,
) -> list[Wait]:
    """The approvals of a project, the oldest first.

    Args:
        agentmesh: Database and project.
        run_id: Those of one run.
        status: Those that stand so; None: all.
        assignee: Those that this person may decide, as a delegate too; of closed ones, those of which they were an
            assignee or a delegate.
        limit: At most so many.
    """
    store = agentmesh.store()
    found = store.waits.list(
        agentmesh.project,
        run_id=run_id,
        kinds=APPROVALS,
        statuses=None if status is None else [status],
        limit=limit if assignee is None else None,
    )
    if assignee is None:
        return found
    groups, now = store.groups.all(agentmesh.project), SystemClock().now()
    return [wait for wait in found if _concerns(store, wait, assignee, groups, now)][:limit]


def _concerns(
    store: Store, wait: Wait, person: str, groups: Mapping[str, Sequence[str]], now: datetime
) -> bool:
    if wait.status is not WaitStatus.OPEN:
        delegates = (delegation.to for delegation in wait.delegations)
        return not wait.assignees or person in people(
            (*wait.assignees, *wait.escalate_to, *delegates), groups
        )
    votes = store.waits.votes(wait.id) if wait.required > 1 else ()
    return person_may(wait, person, groups, now, votes) is None


def decide_approval(
    agentmesh: ProjectStore,
    approval_id: str,
    decision: str | Sequence[str] | None,
    *,
    by: str,
    data: Json = None,
    comment: str = "",
    binding: str | None = None,
) -> Wait:
    """Votes on an approval, or answers a suspension.

    The run goes on once a gate sensor sees the decision, or with `agentmesh runs resume`.

    Args:
        agentmesh: Database and project.
        approval_id: Its id, or 6 and more of the first characters.
        decision: `approved`, `rejected`, an option, or several where the approval allows that; None for a suspension.
        by: Who decides.
        data: What the form asks for; of a suspension the data that it waits for.
        comment: For the journal and the audit.
        binding: Hash of the call that is approved: refused where it is another one now.

    Returns:
        The approval as it stands now; still open where more people must agree.

    Raises:
        ApprovalError: The decision is refused, and the refusal recorded; see there for the codes.
    """
    waits = agentmesh.store().waits
    chosen = decision if decision is None or isinstance(decision, str) else list(decision)
    vote = Vote(by=by, decision=chosen, data=data, comment=comment, at=SystemClock().now())
    return waits.decide(agentmesh.project, approval_id, vote, binding=binding)


def delegate_approval(
    agentmesh: ProjectStore, approval_id: str, to: str, *, by: str, comment: str = ""
) -> Wait:
    """Delegates a vote on an approval: another person may decide in the place of an assignee, who may not meanwhile.

    Delegating again replaces the delegate; delegating to oneself takes the vote back. Both end when the delegate has
    voted.

    Args:
        agentmesh: Database and project.
        approval_id: Its id, or 6 and more of the first characters.
        to: Who may decide instead: nobody who may decide anyhow, or who decides for somebody else already.
        by: Who delegates: somebody who may decide, and has not.
        comment: Why; for the audit and those who look at the approval.

    Returns:
        The approval with its delegations.

    Raises:
        ApprovalError: The delegation is refused, and the refusal recorded; see there for the codes.
    """
    delegation = Delegation(by=by, to=to, comment=comment, at=SystemClock().now())
    return agentmesh.store().waits.delegate(agentmesh.project, approval_id, delegation)


def resume_suspended(
    agentmesh: ProjectStore, run_id: str, label: str, data: Json, *, by: str, step_key: str | None = None
) -> Wait:
    """Answers a `suspend(...)`: the step goes on with the data when its run does.

    Args:
        agentmesh: Database and project.
        run_id: The run.
        label: Of the suspension; empty where it has none.
        data: What it waits for.
        by: Who answers.
        step_key: The step, where several steps are suspended under this label.

    Raises:
        ApprovalError: Nothing is suspended so (`no-approval`), several steps are (`ambiguous-approval`), the data does
            not fit (`form`), or it was answered already.
    """
    waits = agentmesh.store().waits
    every = waits.list(agentmesh.project, run_id=run_id, kinds=[WaitKind.SUSPEND], limit=None)
    found = [wait for wait in every if wait.label == label and step_key in (None, wait.step_key)]
    still_open = [wait for wait in found if wait.status is WaitStatus.OPEN]
    if len(still_open) > 1:
        steps = ", ".join(repr(wait.step_key) for wait in still_open)
        raise ApprovalError(
            f"several steps of run {run_id!r} are suspended under the label {label!r}: {steps}; say which "
            "one (`--step KEY`)",
            code="ambiguous-approval",
            context={"steps": [wait.step_key for wait in still_open]},
        )
    if not found:
        others = [wait for wait in every if wait.status is WaitStatus.OPEN]
        shown = "; ".join(f"step {wait.step_key!r}, label {wait.label!r}" for wait in others)
        raise ApprovalError(
            f"run {run_id!r} is not suspended under the label {label!r}"
            + (f" in step {step_key!r}" if step_key is not None else "")
            + (f"; it is in {shown}" if shown else ", nor under any other"),
            code="no-approval",
            context={"suspended": [{"step": wait.step_key, "label": wait.label} for wait in others]},
        )
    # One that is closed is asked for too: the store says who answered it, and records the refusal.
    wait = (still_open or found)[-1]
    vote = Vote(by=by, decision=None, data=data, at=SystemClock().now())
    return waits.decide(agentmesh.project, wait.id, vote)


def send_event(
    agentmesh: ProjectStore,
    name: str,
    key: str = "",
    data: Json = None,
    *,
    by: str = "",
    event_id: str | None = None,
    keep_s: float | None = None,
) -> Delivery:
    """Sends a named event to all runs of a project that wait for it with this key.

    Where none does, it is kept for the first one that will.

    Args:
        agentmesh: Database and project.
        name: What `webhook` nodes call `event`.
        key: The correlation key.
        data: The payload: the node's output.
        by: Who sends it.
        event_id: The sender's own id: an event that is sent twice is delivered once.
        keep_s: For how many seconds it is kept; None: as long as the store has it, a week.

    Raises:
        StoreError: Too many events are kept already (code `events-full`).
    """
    waits = agentmesh.store().waits
    kept = {} if keep_s is None else {"keep_s": keep_s}
    return waits.send_event(agentmesh.project, name, key, data, by=by, event_id=event_id, **kept)


def issue_lines(error: AgentMeshError) -> list[str]:
    """What is wrong with the data of a refused decision, one line for each place; nothing for other errors."""
    issues: list[dict[str, str]] = error.context.get("issues", []) if isinstance(error, ApprovalError) else []
    return [f"{issue['path']}: {issue['message']}" for issue in issues]
