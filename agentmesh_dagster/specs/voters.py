"""Who may vote at an approval, in whose place, and who may delegate a vote to whom: pure, as `decisions` is.

Each person who may vote has one place. Whoever votes uses one place, and nobody votes twice:

- A place belongs to an assignee, to a member of a group among them, or, once `escalate_at` has passed, to somebody in
  `escalate_to`.
- A person whose place is not used may delegate it, also before their turn. Until the delegate has used it, that person
  may delegate it to somebody else, or take it back, and may not vote before that.
- The delegate may vote for as long as the delegator could. The vote counts as the delegator's: for the quorum, and for
  whose turn it is.
- Whoever has a place of their own, or holds one already, gets no second one; a delegated place is not passed on.
- With `separation` the run's launcher may neither vote, nor delegate, nor be a delegate.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from agentmesh_dagster.constants import GROUP_PREFIX
from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Delegation, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.fields import as_object

Groups = Mapping[str, Sequence[str]]
"""Group to its members; one that is missing has none."""

_MAX_NAME: Final = 200
_CLOSED: Final = {
    "sibling": "another gate of the run was decided, and closed it",
    "run": "its run is over",
    "superseded": "what it was asked for no longer stands",
    "timeout": "its time ran out",
    "timer": "its moment has come",
    "event": "its event has come",
}


def delegate(wait: Wait, votes: Sequence[Vote], delegation: Delegation, groups: Groups) -> Wait:
    """The approval with a vote delegated, or taken back where somebody delegates it to themselves.

    Args:
        wait: The approval.
        votes: Those accepted before, the oldest first.
        delegation: The delegation to weigh; `delegation.at` is the present moment.
        groups: Members of the project's groups.

    Raises:
        ApprovalError: The delegation is refused: `no-approval`, `already-decided`, `gate-closed`, `already-voted`,
            `separation`, `not-assignee`, `delegated` (a delegated vote is not passed on), or `bad-delegate`.
    """
    by, to, at = delegation.by, delegation.to, delegation.at
    require_approval(wait)
    require_open(wait, at)
    others = tuple(other for other in wait.delegations if not is_same_name(other.by, by))
    # As before an earlier delegation, and out of turn.
    place = place_of(replace(wait, delegations=others, ordered=False), votes, by, at, groups)
    if not wait.assignees:
        raise refusal(wait, "bad-delegate", "anybody may decide, so that nobody needs to delegate")
    if place != by:
        raise refusal(
            wait,
            "delegated",
            f"{by} may vote for {place}, and cannot pass that on; {place} may delegate to somebody else",
        )
    if is_same_name(to, by):
        if len(others) == len(wait.delegations):
            raise refusal(wait, "bad-delegate", f"{by} has not delegated this vote; name somebody else")
        return replace(wait, delegations=others)
    _require_name(wait, to, "bad-delegate")
    _require_delegate(wait, votes, delegation, groups)
    return replace(wait, delegations=(*others, delegation))


def place_of(wait: Wait, votes: Sequence[Vote], by: str, at: datetime, groups: Groups) -> str:
    """The person in whose place somebody may vote now: their own name, or that of who delegated the vote to them.

    Raises:
        ApprovalError: They may not: `not-assignee`, `already-voted`, `separation`, `delegated` or `not-your-turn`.
    """
    _require_name(wait, by, "not-assignee")
    _require_unused(wait, votes, by)
    if wait.separation and is_same_name(by, wait.launcher):
        raise refusal(wait, "separation", f"{by} launched the run and may not decide on it")
    if not wait.assignees:
        return by
    for delegation in wait.delegations:
        if is_same_name(delegation.by, by):
            raise refusal(
                wait,
                "delegated",
                f"{by} has delegated this vote to {delegation.to}; to take it back, delegate it to {by}",
            )
    stand_ins = people(_escalated(wait, at), groups)
    entitled = people(wait.assignees, groups) | stand_ins
    delegators = (delegation.by for delegation in wait.delegations if delegation.to == by)
    places = [person for person in (by, *delegators) if person in entitled]
    if not places:
        shown = _shown(entries(wait, at))
        raise refusal(wait, "not-assignee", f"{by} may not decide; those who may: {shown}")
    if not wait.ordered:
        return places[0]
    turn = len(votes)
    if turn >= len(wait.assignees):
        raise refusal(wait, "not-your-turn", "everybody listed has voted")
    entry = wait.assignees[turn]
    in_turn = [person for person in places if person in _members(entry, groups) or person in stand_ins]
    if not in_turn:
        raise refusal(wait, "not-your-turn", f"it is not the turn of {by}, but of {entry}")
    return in_turn[0]


def person_may(
    wait: Wait, person: str, groups: Groups, at: datetime, votes: Sequence[Vote] = ()
) -> ApprovalError | None:
    """Why a person may not vote on an approval now, or None where they may."""
    try:
        require_open(wait, at)
        place_of(wait, votes, person, at, groups)
    except ApprovalError as refused:
        return refused
    return None


def people(names: Iterable[str], groups: Groups) -> frozenset[str]:
    """The distinct people that names and groups stand for."""
    return frozenset(person for name in names for person in _members(name, groups))


def entries(wait: Wait, at: datetime) -> tuple[str, ...]:
    """The names and groups of those who may vote by a moment."""
    return tuple(dict.fromkeys((*wait.assignees, *_escalated(wait, at))))


def require_approval(wait: Wait) -> None:
    """Refuses what people do not decide.

    Raises:
        ApprovalError: `no-approval`, saying what it waits for.
    """
    if not wait.kind.is_approval:
        raise refusal(wait, "no-approval", f"nobody decides it: it waits for {_waits_for(wait)}")


def require_open(wait: Wait, at: datetime) -> None:
    """Refuses what comes to a wait that is closed, or whose deadline has passed at `at`.

    Raises:
        ApprovalError: `already-decided`, saying by whom and when, or `gate-closed`, saying why.
    """
    if wait.status is WaitStatus.DECIDED:
        answer = as_object(wait.answer) or {}
        raise refusal(
            wait, "already-decided", f"already decided{decided_by(answer)} at {_when(wait, answer)}", answer
        )
    if wait.status is not WaitStatus.OPEN:
        why = _CLOSED.get(wait.closed_by, "it is closed")
        when = f" at {_when(wait, {})}" if wait.decided_at is not None else ""
        raise refusal(wait, "gate-closed", f"closed{when}: {why}")
    if wait.deadline_at is not None and wait.deadline_at <= at:
        raise refusal(
            wait, "gate-closed", f"its time ran out at {wait.deadline_at.isoformat(timespec='seconds')}"
        )


def decided_by(answer: Mapping[str, Any]) -> str:
    """` by dora for anna`; empty for an answer that names nobody."""
    if not answer.get("by"):
        return ""
    return f" by {answer['by']}" + (f" for {answer['for']}" if answer.get("for") else "")


def is_same_name(one: str, other: str) -> bool:
    """Whether two names are one person's: case, white space and Unicode's compatible forms do not tell people apart."""
    return normalized(one) == normalized(other)


def normalized(name: str) -> str:
    """A name as it is compared."""
    # Twice: folding the case of a compatible form may give another one.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(folded.split())


def refusal(wait: Wait, code: str, why: str, detail: Mapping[str, Any] | None = None) -> ApprovalError:
    """The error that says why something was refused at a wait."""
    shown = {key: value for key, value in (detail or {}).items() if key in ("issues", "by", "at", "decision")}
    return ApprovalError(
        f"{wait.step_key!r}: {why}", code=code, path=wait.step_key, context={"approval": wait.id, **shown}
    )


def _require_name(wait: Wait, name: str, code: str) -> None:
    if not name.strip() or len(name) > _MAX_NAME or not name.isprintable():
        raise refusal(wait, code, f"a vote needs the voter's name, at most {_MAX_NAME} characters")
    if name != name.strip():
        raise refusal(wait, code, f"the voter's name {name!r} begins or ends with a space; remove it")


def _require_unused(wait: Wait, votes: Sequence[Vote], by: str) -> None:
    """Refuses somebody who has voted, or in whose place a delegate has."""
    for vote in votes:
        when = vote.at.isoformat(timespec="seconds")
        if is_same_name(vote.by, by):
            raise refusal(wait, "already-voted", f"{by} has voted already, at {when}")
        if vote.delegator and is_same_name(vote.delegator, by):
            raise refusal(wait, "already-voted", f"{vote.by} has voted for {by} already, at {when}")


def _require_delegate(wait: Wait, votes: Sequence[Vote], delegation: Delegation, groups: Groups) -> None:
    """Refuses a delegate who would vote twice, or may not vote at all."""
    to = delegation.to
    if to.startswith(GROUP_PREFIX):
        raise refusal(wait, "bad-delegate", f"{to} is a group; name one person")
    if wait.separation and is_same_name(to, wait.launcher):
        raise refusal(wait, "separation", f"{to} launched the run and may not decide on it")
    for vote in votes:
        if is_same_name(vote.by, to):
            raise refusal(wait, "bad-delegate", f"{to} has voted already, and votes once; name somebody else")
    if any(is_same_name(person, to) for person in people(entries(wait, delegation.at), groups)):
        raise refusal(
            wait, "bad-delegate", f"{to} may decide anyhow, and votes once; name somebody who may not"
        )
    for other in wait.delegations:
        if is_same_name(other.to, to):
            raise refusal(
                wait, "bad-delegate", f"{to} votes for {other.by} already, and once; name somebody else"
            )
        if is_same_name(other.by, to):
            raise refusal(
                wait, "bad-delegate", f"{to} has delegated their own vote to {other.to}; name somebody else"
            )


def _members(entry: str, groups: Groups) -> Sequence[str]:
    if entry.startswith(GROUP_PREFIX):
        return groups.get(entry.removeprefix(GROUP_PREFIX), ())
    return (entry,)


def _escalated(wait: Wait, at: datetime) -> tuple[str, ...]:
    """Those who may vote too by now; `escalate_at` is emptied by whoever tells them."""
    return wait.escalate_to if wait.escalate_at is None or wait.escalate_at <= at else ()


def _shown(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _waits_for(wait: Wait) -> str:
    if wait.kind is WaitKind.TIMER:
        return "a moment"
    return (
        "data: 'agentmesh runs resume'" if wait.kind is WaitKind.SUSPEND else f"the event {wait.event_name!r}"
    )


def _when(wait: Wait, answer: Mapping[str, Any]) -> str:
    if wait.decided_at is not None:
        return wait.decided_at.isoformat(timespec="seconds")
    return str(answer.get("at", "some time"))
