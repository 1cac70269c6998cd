"""Who may vote at an approval, in whose place, and to whom a vote may be delegated."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from test_decisions import GROUPS, T0, vote, wait

from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Delegation, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.decisions import timeout_answer, weigh
from agentmesh_dagster.specs.voters import delegate, person_may

AT = T0 + timedelta(minutes=1)


def given(gate: Wait, by: str, to: str, votes: list[Vote] | None = None, groups: Any = GROUPS) -> Wait:
    return delegate(gate, votes or [], Delegation(by=by, to=to, at=AT), groups)


def refused(gate: Wait, by: str, to: str, votes: list[Vote] | None = None) -> ApprovalError:
    with pytest.raises(ApprovalError) as caught:
        given(gate, by, to, votes)
    return caught.value


def why_not(gate: Wait, person: str, votes: list[Vote] | None = None, groups: Any = GROUPS) -> str | None:
    """The code with which a vote of that person is refused."""
    refusal = person_may(gate, person, groups, AT, votes or [])
    return None if refusal is None else refusal.code


def test_a_delegate_votes_in_the_delegators_place_and_the_delegator_does_not() -> None:
    gate = given(wait(assignees=("anna", "group:legal")), "carl", "dora")
    assert (why_not(gate, "dora"), why_not(gate, "carl"), why_not(gate, "anna")) == (None, "delegated", None)
    answer: Any = weigh(gate, [], vote("dora"), GROUPS).answer
    assert (answer["decision"], answer["by"], answer["for"]) == ("approved", "dora", "carl")
    # One who votes in a place of their own is named alone.
    own: Any = weigh(gate, [], vote("anna"), GROUPS).answer
    assert "for" not in own
    # The delegate's right ends with the delegator's.
    assert why_not(gate, "dora", groups={"legal": ("bob",)}) == "not-assignee"
    closed = replace(gate, status=WaitStatus.DECIDED, answer=answer, decided_at=AT)
    with pytest.raises(ApprovalError, match="already decided by dora for carl at"):
        weigh(closed, [], vote("anna"), GROUPS)


def test_a_vote_is_taken_back_or_delegated_to_another_until_it_is_given() -> None:
    gate = given(wait(assignees=("anna", "bob"), required=2), "anna", "dora")
    other = given(gate, "anna", "eve")
    assert [(each.by, each.to) for each in other.delegations] == [("anna", "eve")]
    assert (why_not(other, "dora"), why_not(other, "eve")) == ("not-assignee", None)
    back = given(other, "anna", "anna")
    assert back.delegations == ()
    assert (why_not(back, "eve"), why_not(back, "anna")) == ("not-assignee", None)
    voted = weigh(gate, [], vote("dora"), GROUPS).vote
    for to in ("eve", "anna"):
        error = refused(gate, "anna", to, [voted])
        assert (error.code, "dora has voted for anna" in error.message) == ("already-voted", True)
    assert why_not(gate, "anna", [voted]) == "already-voted"
    assert refused(back, "anna", "anna").code == "bad-delegate"


@pytest.mark.parametrize("by", ["dora", "Anna", "", " anna", "x" * 201])
def test_only_who_may_vote_delegates(by: str) -> None:
    assert refused(wait(assignees=("anna",)), by, "eve").code == "not-assignee"


def test_who_has_voted_does_not_delegate() -> None:
    gate = wait(assignees=("anna", "bob"), required=2)
    assert refused(gate, "anna", "eve", [vote("anna")]).code == "already-voted"


def test_a_closed_gate_and_what_nobody_decides_take_no_delegation() -> None:
    gate = wait(assignees=("anna",))
    closed = replace(gate, status=WaitStatus.CANCELED, closed_by="run", decided_at=T0)
    assert refused(closed, "anna", "eve").code == "gate-closed"
    assert refused(replace(gate, deadline_at=T0), "anna", "eve").code == "gate-closed"
    assert refused(replace(gate, kind=WaitKind.TIMER), "anna", "eve").code == "no-approval"
    assert refused(wait(), "anna", "eve").code == "bad-delegate"


def test_those_it_is_escalated_to_delegate_from_then_on() -> None:
    gate = wait(assignees=("anna",), escalate_to=("zoe",), escalate_at=AT)
    assert why_not(given(gate, "zoe", "dora"), "dora") is None
    later = replace(gate, escalate_at=AT + timedelta(minutes=1))
    assert refused(later, "zoe", "dora").code == "not-assignee"


# Nobody votes twice -----------------------------------------------------------------------------------------


def test_nobody_gets_two_votes() -> None:
    gate = given(wait(assignees=("anna", "bob", "group:legal"), required=2), "anna", "dora")
    voted = [weigh(gate, [], vote("carl"), GROUPS).vote]
    for by, to, words in (
        ("bob", "carl", "has voted already"),
        ("bob", "CARL", "has voted already"),
        ("bob", "dora", "votes for anna already"),
        ("bob", "Dora", "votes for anna already"),
        ("bob", "anna", "may decide anyhow"),
        ("anna", "bob", "may decide anyhow"),
        ("anna", "\uff42\uff4f\uff42", "may decide anyhow"),
        ("anna", "dora", "votes for anna already"),
    ):
        error = refused(gate, by, to, voted)
        assert (error.code, words in error.message) == ("bad-delegate", True), (by, to, error.message)
    for to in ("", " eve", "a\nb", "x" * 201, "group:legal"):
        assert refused(gate, "bob", to).code == "bad-delegate"


def test_a_delegated_vote_is_not_passed_on() -> None:
    gate = given(wait(assignees=("anna", "bob")), "anna", "dora")
    for to in ("eve", "anna", "dora"):
        error = refused(gate, "dora", to)
        assert (error.code, "anna may delegate to somebody else" in error.message) == ("delegated", True)


def test_a_delegate_who_becomes_an_assignee_still_votes_once() -> None:
    gate = given(wait(assignees=("anna", "group:legal"), required=2), "anna", "dora")
    groups = {"legal": ("carl", "dora")}
    first = weigh(gate, [], vote("dora"), groups)
    # In their own place: then the other one is free again, to be taken back.
    assert (first.vote.delegator, first.answer) == ("", None)
    assert why_not(gate, "dora", [first.vote], groups) == "already-voted"
    back = given(gate, "anna", "anna", [first.vote], groups)
    assert weigh(back, [first.vote], vote("anna"), groups).answer is not None
    # And who delegated, and left the group, is nobody's delegate.
    gone = given(wait(assignees=("anna", "group:legal")), "carl", "eve")
    with pytest.raises(ApprovalError, match="carl has delegated their own vote to eve"):
        given(gone, "anna", "carl", groups={"legal": ("bob",)})


def test_the_quorum_counts_places() -> None:
    gate = given(wait(assignees=("anna", "bob", "carl"), required=2), "anna", "dora")
    first = weigh(gate, [], vote("dora"), GROUPS)
    assert (first.answer, first.vote.delegator) == (None, "anna")
    done: Any = weigh(gate, [first.vote], vote("bob"), GROUPS).answer
    assert (done["by"], [(each["by"], each.get("for")) for each in done["votes"]]) == (
        "bob",
        [("dora", "anna"), ("bob", None)],
    )
    # Of three places one is left after a rejection by each, and no quorum in reach.
    against = weigh(gate, [], vote("dora", "rejected"), GROUPS)
    assert against.answer is None
    last: Any = weigh(gate, [against.vote], vote("bob", "rejected"), GROUPS).answer
    assert last["decision"] == "rejected"
    kept = timeout_answer(gate, AT, [first.vote])
    assert [(each["by"], each["for"]) for each in kept["votes"]] == [("dora", "anna")]


def test_all_of_all_is_rejected_by_a_delegate() -> None:
    gate = given(wait(assignees=("anna", "bob"), required=2), "anna", "dora")
    answer: Any = weigh(gate, [], vote("dora", "rejected"), GROUPS).answer
    assert (answer["decision"], answer["by"], answer["for"]) == ("rejected", "dora", "anna")


def test_a_delegate_votes_when_it_is_the_delegators_turn() -> None:
    gate = wait(assignees=("anna", "group:legal"), required=2, ordered=True)
    gate = given(gate, "carl", "dora")
    assert why_not(gate, "dora") == "not-your-turn"
    first = weigh(gate, [], vote("anna"), GROUPS).vote
    assert (why_not(gate, "dora", [first]), why_not(gate, "carl", [first])) == (None, "delegated")
    answer: Any = weigh(gate, [first], vote("dora"), GROUPS).answer
    assert (answer["by"], answer["for"]) == ("dora", "carl")


# Separation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["anna", "Anna", "\uff21\uff2e\uff2e\uff21"])
def test_the_launcher_neither_delegates_nor_is_a_delegate(launcher: str) -> None:
    gate = wait(assignees=("anna", "bob"), separation=True, launcher=launcher)
    assert refused(gate, "anna", "dora").code == "separation"
    outside = wait(assignees=("bob",), separation=True, launcher=launcher)
    for to in ("anna", "ANNA"):
        assert refused(outside, "bob", to).code == "separation"
    assert why_not(given(outside, "bob", "dora"), "dora") is None
