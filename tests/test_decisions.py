"""Who may decide an approval, what a decision may say, and which vote closes it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.decisions import (
    Verdict,
    check_received,
    received_answer,
    require_binding,
    timeout_answer,
    weigh,
)
from agentmesh_dagster.specs.voters import people, person_may, require_open

Json = Any

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
GROUPS = {"finance": ("anna", "bob"), "legal": ("bob", "carl"), "empty": ()}
NOTE = {
    "type": "object",
    "required": ["amount"],
    "properties": {
        "amount": {"type": "integer", "minimum": 1},
        "note": {"type": "string", "default": "none"},
    },
    "additionalProperties": False,
}


def wait(**changes: Json) -> Wait:
    base = Wait(
        id="w-1", project="default", run_id="r-1", step_key="review", kind=WaitKind.HUMAN, created_at=T0
    )
    return replace(base, **changes)


def vote(by: str, decision: Json = "approved", *, minute: int = 1, **fields: Json) -> Vote:
    return Vote(by=by, decision=decision, at=T0 + timedelta(minutes=minute), **fields)


def decide(gate: Wait, *votes: Vote, groups: Json = GROUPS) -> Verdict:
    """Votes one after the other; the last one's verdict. All before it must leave the gate open."""
    kept: list[Vote] = []
    for given_vote in votes[:-1]:
        verdict = weigh(gate, kept, given_vote, groups)
        assert verdict.answer is None
        kept.append(verdict.vote)
    return weigh(gate, kept, votes[-1], groups)


def refusal(gate: Wait, *votes: Vote) -> ApprovalError:
    with pytest.raises(ApprovalError) as caught:
        decide(gate, *votes)
    return caught.value


# One vote ---------------------------------------------------------------------------------------------------


def test_the_first_decision_closes() -> None:
    assert decide(wait(), vote("anna", comment="fine", data={"a": 1})).answer == {
        "decision": "approved",
        "data": {"a": 1},
        "by": "anna",
        "at": "2026-03-01T12:01:00+00:00",
        "comment": "fine",
    }
    gate = wait(assignees=("anna", "bob"))
    assert decide(gate, vote("bob", "rejected")).answer["decision"] == "rejected"


def test_a_decided_gate_says_by_whom_and_when() -> None:
    answer = decide(wait(), vote("anna")).answer
    gate = wait(
        status=WaitStatus.DECIDED, closed_by="decision", answer=answer, decided_at=T0 + timedelta(minutes=1)
    )
    error = refusal(gate, vote("bob"))
    assert error.code == "already-decided"
    assert "already decided by anna at 2026-03-01T12:01:00+00:00" in error.message
    assert error.context["by"] == "anna"
    assert error.path == "review"


@pytest.mark.parametrize(
    ("closed_by", "words"),
    [
        ("sibling", "another gate"),
        ("run", "its run is over"),
        ("superseded", "no longer stands"),
        ("timeout", "time ran out"),
    ],
)
def test_a_closed_gate_says_why(closed_by: str, words: str) -> None:
    status = WaitStatus.EXPIRED if closed_by == "timeout" else WaitStatus.CANCELED
    error = refusal(wait(status=status, closed_by=closed_by, decided_at=T0), vote("anna"))
    assert (error.code, words in error.message) == ("gate-closed", True)


def test_a_decision_after_the_deadline_is_refused_before_anything_has_settled_it() -> None:
    gate = wait(deadline_at=T0 + timedelta(minutes=5))
    assert decide(gate, vote("anna", minute=4)).answer is not None
    assert refusal(gate, vote("anna", minute=5)).code == "gate-closed"


@pytest.mark.parametrize("kind", [WaitKind.TIMER, WaitKind.SUSPEND, WaitKind.EVENT])
def test_only_approvals_are_decided(kind: WaitKind) -> None:
    assert refusal(wait(kind=kind), vote("anna")).code == "no-approval"


@pytest.mark.parametrize("decision", ["Approved", "timeout", "", None, True, ["approved"], {"a": 1}, 1])
def test_unknown_words_are_refused(decision: Json) -> None:
    error = refusal(wait(), vote("anna", decision))
    assert error.code == "bad-decision"
    assert "approved, rejected" in error.message


# Voters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dora", "Anna", "group:finance", "anna ", "", "  ", "a\nb", "x" * 201])
def test_only_assignees_decide(name: str) -> None:
    assert refusal(wait(assignees=("anna", "group:finance")), vote(name)).code == "not-assignee"


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201])
def test_a_vote_needs_a_name_where_anybody_may_decide(name: str) -> None:
    assert refusal(wait(), vote(name)).code == "not-assignee"


def test_members_of_groups_are_assignees() -> None:
    gate = wait(assignees=("group:finance", "dora"))
    assert decide(gate, vote("bob")).answer is not None
    assert decide(gate, vote("dora")).answer is not None
    assert refusal(wait(assignees=("group:empty", "group:none")), vote("anna")).code == "not-assignee"
    assert people(("group:finance", "group:legal", "anna"), GROUPS) == {"anna", "bob", "carl"}


def test_the_launcher_may_not_decide_under_separation() -> None:
    gate = wait(separation=True, launcher="anna", assignees=("anna", "bob"))
    assert refusal(gate, vote("anna")).code == "separation"
    assert decide(gate, vote("bob")).answer is not None
    assert decide(replace(gate, separation=False), vote("anna")).answer is not None
    assert refusal(replace(gate, assignees=()), vote("anna")).code == "separation"


def test_a_person_votes_once() -> None:
    gate = wait(assignees=("group:finance", "group:legal"), required=2)
    error = refusal(gate, vote("bob"), vote("bob", minute=2))
    assert error.code == "already-voted"
    assert "12:01" in error.message


def test_who_was_escalated_to_decides_from_then_on() -> None:
    gate = wait(assignees=("anna",), escalate_to=("boss",), escalate_at=T0 + timedelta(minutes=10))
    assert refusal(gate, vote("boss", minute=9)).code == "not-assignee"
    assert decide(gate, vote("boss", minute=10)).answer["by"] == "boss"
    # Whoever told them has emptied the moment.
    assert decide(replace(gate, escalate_at=None), vote("boss", minute=11)).answer is not None


def test_a_person_can_be_told_beforehand() -> None:
    gate = wait(assignees=("group:finance",), ordered=False)
    assert person_may(gate, "anna", GROUPS, T0) is None
    error = person_may(gate, "carl", GROUPS, T0)
    assert error is not None
    assert error.code == "not-assignee"
    assert "group:finance" in error.message


# Quorum -----------------------------------------------------------------------------------------------------

TRIO = ("anna", "bob", "carl")


def test_two_of_three_agree() -> None:
    answer = decide(wait(assignees=TRIO, required=2), vote("anna"), vote("carl", minute=2)).answer
    assert (answer["decision"], answer["by"]) == ("approved", "carl")
    assert [(v["by"], v["decision"]) for v in answer["votes"]] == [("anna", "approved"), ("carl", "approved")]


def test_one_rejection_of_three_leaves_the_quorum_in_reach() -> None:
    gate = wait(assignees=TRIO, required=2)
    assert decide(gate, vote("anna", "rejected"), vote("bob"), vote("carl")).answer["decision"] == "approved"
    answer = decide(gate, vote("anna", "rejected"), vote("bob", "rejected")).answer
    assert (answer["decision"], len(answer["votes"])) == ("rejected", 2)
    late = decide(gate, vote("anna"), vote("bob", "rejected"), vote("carl", "rejected")).answer
    assert late["decision"] == "rejected"


def test_all_of_all_falls_with_the_first_rejection() -> None:
    assert decide(wait(assignees=TRIO, required=3), vote("anna"), vote("bob", "rejected")).answer is not None


def test_the_pool_is_of_distinct_people_and_without_the_launcher() -> None:
    gate = wait(assignees=("group:finance", "group:legal"), required=2)
    assert decide(gate, vote("bob", "rejected")).answer is None
    one_less = replace(gate, separation=True, launcher="carl")
    assert decide(one_less, vote("bob", "rejected")).answer["decision"] == "rejected"


def test_those_who_agree_and_are_too_few_keep_the_gate_open() -> None:
    gate = wait(assignees=("group:finance",), required=3)
    assert decide(gate, vote("anna"), vote("bob")).answer is None
    # The group has grown.
    grown = {"finance": ("anna", "bob", "carl")}
    assert decide(gate, vote("anna"), vote("bob"), vote("carl"), groups=grown).answer is not None


def test_without_assignees_one_is_enough() -> None:
    assert decide(wait(required=3), vote("anna")).answer["decision"] == "approved"


def test_votes_come_in_order() -> None:
    gate = wait(assignees=("anna", "group:legal"), required=2, ordered=True)
    assert refusal(gate, vote("carl")).code == "not-your-turn"
    assert "anna" in refusal(gate, vote("carl")).message
    assert decide(gate, vote("anna"), vote("carl")).answer["decision"] == "approved"
    assert decide(gate, vote("anna", "rejected")).answer["decision"] == "rejected"
    assert refusal(gate, vote("dora")).code == "not-assignee"
    three = wait(assignees=TRIO, required=2, ordered=True)
    assert decide(three, vote("anna", "rejected")).answer is None
    assert refusal(three, vote("anna", "rejected"), vote("carl")).code == "not-your-turn"


def test_an_escalation_stands_in_for_whose_turn_it_is() -> None:
    gate = wait(assignees=("anna", "bob"), required=2, ordered=True, escalate_to=("boss",))
    assert decide(gate, vote("boss"), vote("bob")).answer["decision"] == "approved"


# Options ----------------------------------------------------------------------------------------------------


def test_an_option_wins_with_its_quorum() -> None:
    gate = wait(assignees=(*TRIO, "dora"), required=2, options=("red", "blue", "green"))
    answer = decide(gate, vote("anna", "red"), vote("bob", "blue"), vote("carl", "blue")).answer
    assert (answer["decision"], len(answer["votes"])) == ("blue", 3)
    assert refusal(gate, vote("anna", "approved")).code == "bad-decision"
    assert refusal(gate, vote("anna", ["red"])).code == "bad-decision"


def test_options_that_can_no_longer_win_reject() -> None:
    gate = wait(assignees=TRIO, required=2, options=("red", "blue", "green"))
    answer = decide(gate, vote("anna", "red"), vote("bob", "blue"), vote("carl", "green")).answer
    assert (answer["decision"], answer["by"]) == ("rejected", "quorum")
    assert answer["comment"] == "No agreement: anna: red; bob: blue; carl: green"
    all_three = replace(gate, required=3)
    assert decide(all_three, vote("anna", "red"), vote("bob", "blue")).answer["decision"] == "rejected"


def test_several_options_at_once() -> None:
    gate = wait(options=("red", "blue", "green"), multiple=True)
    assert decide(gate, vote("anna", ["green", "red"])).answer["decision"] == ["red", "green"]
    assert decide(gate, vote("anna", "blue")).answer["decision"] == ["blue"]
    for wrong in ([], ["red", "red"], ["red", "pink"], ["red", 1], [["red"]], "pink", None, {"red": 1}):
        assert refusal(gate, vote("anna", wrong)).code == "bad-decision"


# Data -------------------------------------------------------------------------------------------------------


def test_data_is_filled_and_coerced() -> None:
    verdict = decide(wait(form_schema=NOTE), vote("anna", data={"amount": "3"}))
    assert verdict.answer["data"] == {"amount": 3, "note": "none"}
    assert verdict.vote.data == {"amount": 3, "note": "none"}


def test_the_prefill_stands_in_for_data_that_is_not_given() -> None:
    gate = wait(form_schema=NOTE, prefill={"amount": 7})
    assert decide(gate, vote("anna")).answer["data"] == {"amount": 7, "note": "none"}
    assert decide(gate, vote("anna", data={"amount": 1})).answer["data"]["amount"] == 1
    assert decide(wait(prefill={"x": 1}), vote("anna")).answer["data"] == {"x": 1}
    assert decide(wait(), vote("anna")).answer["data"] is None
    optional = {"type": "object", "properties": {"a": {"default": 1}}}
    assert decide(wait(form_schema=optional), vote("anna")).answer["data"] == {"a": 1}


def test_data_that_breaks_the_form_is_refused_with_the_issues() -> None:
    error = refusal(wait(form_schema=NOTE), vote("anna", data={"amount": 0, "colour": "red"}))
    assert error.code == "form"
    assert [issue["path"] for issue in error.context["issues"]] == ["amount", "colour"]
    assert all(issue["message"] for issue in error.context["issues"])
    assert refusal(wait(form_schema=NOTE), vote("anna")).context["issues"][0]["path"] == "amount"


@pytest.mark.parametrize("data", [[1], "text", 3, True, {"a": float("nan")}, {"a": "\x00"}, {"a": "\ud800"}])
def test_data_without_a_form_is_an_object_that_can_be_stored(data: Json) -> None:
    assert refusal(wait(), vote("anna", data=data)).code == "form"
    assert refusal(wait(), vote("anna", "rejected", data=data)).code == "form"


def test_text_that_only_looks_like_an_escape_is_kept() -> None:
    assert decide(wait(), vote("anna", data={"a": "\\u0000"})).answer["data"] == {"a": "\\u0000"}


def test_a_rejection_needs_no_valid_form() -> None:
    gate = wait(form_schema=NOTE, prefill={"amount": 7})
    assert decide(gate, vote("anna", "rejected")).answer["data"] is None
    assert decide(gate, vote("anna", "rejected", data={"why": "no"})).answer["data"] == {"why": "no"}


# Tools and calls that were cut off --------------------------------------------------------------------------


def test_an_approver_edits_the_arguments() -> None:
    gate = wait(kind=WaitKind.TOOL, form_schema=NOTE, prefill={"amount": 900, "note": "x"})
    assert decide(gate, vote("anna")).answer["data"] == {"amount": 900, "note": "x"}
    assert decide(gate, vote("anna", data={"amount": 90})).answer["data"] == {"amount": 90, "note": "none"}
    assert refusal(gate, vote("anna", data={"amount": "much"})).code == "form"


def test_arguments_that_are_not_edited_stay_what_they_are() -> None:
    # A secret in them is not shown, and what stands for it need not fit.
    schema = {"type": "object", "properties": {"key": {"type": "string", "pattern": "^k-"}}}
    gate = wait(kind=WaitKind.TOOL, form_schema=schema, prefill={"key": "***"}, on_timeout="approve")
    assert decide(gate, vote("anna")).answer["data"] == {"key": "***"}
    assert timeout_answer(gate, T0)["decision"] == "approved"


@pytest.mark.parametrize("kind", [WaitKind.TOOL, WaitKind.HUMAN])
def test_who_approves_other_data_is_told_the_fields_and_the_gate_stays_open(kind: WaitKind) -> None:
    gate = wait(kind=kind, form_schema=NOTE, prefill={"amount": 900, "note": "x"}, assignees=TRIO, required=2)
    first = weigh(gate, [], vote("anna", data={"amount": 90}), GROUPS)
    assert first.answer is None
    for data in (None, {"amount": 9, "note": "secret"}):
        with pytest.raises(ApprovalError) as caught:
            weigh(gate, [first.vote], vote("bob", data=data), GROUPS)
        assert caught.value.code == "data-conflict"
        assert caught.value.context["issues"] == [
            {"path": "amount", "message": "differs from the vote of anna"},
            {"path": "note", "message": "differs from the vote of anna"},
        ]
        assert "anna decided, in amount, note" in caught.value.message
        assert "secret" not in caught.value.message
    agreed = weigh(gate, [first.vote], vote("bob", data={"note": "none", "amount": "90"}), GROUPS).answer
    assert (agreed["decision"], agreed["by"], agreed["data"]["amount"]) == ("approved", "bob", 90)


def test_a_rejection_differs_in_nothing_and_is_by_whoever_rejected() -> None:
    gate = wait(form_schema=NOTE, prefill={"amount": 900}, assignees=("anna", "bob"), required=2)
    answer = decide(gate, vote("anna"), vote("bob", "rejected", data={"amount": 1})).answer
    assert (answer["decision"], answer["by"]) == ("rejected", "bob")


def test_places_in_lists_and_missing_fields_are_named() -> None:
    gate = wait(assignees=TRIO, required=3)
    data = {"rows": [{"sum": 1}, {"sum": 2}], "kept": 1, "flag": True, "tags": [1]}
    other = {"rows": [{"sum": 1}, {"sum": 3}], "more": 1, "flag": 1, "tags": [1, 2]}
    refused = refusal(gate, vote("anna", data=data), vote("bob", data=other))
    places = [issue["path"] for issue in refused.context["issues"]]
    assert places == ["flag", "kept", "more", "rows[1].sum", "tags"]


def test_other_options_may_come_with_other_data() -> None:
    gate = wait(assignees=TRIO, required=2, options=("red", "blue"))
    answer = decide(gate, vote("anna", "red", data={"a": 1}), vote("bob", "blue", data={"a": 2})).answer
    assert answer is None


def test_votes_that_differed_before_the_upgrade_are_not_turned_into_anybodys_rejection() -> None:
    gate = wait(kind=WaitKind.TOOL, form_schema=NOTE, prefill={"amount": 900}, assignees=TRIO, required=3)
    kept = [vote("anna", data={"amount": 1}), vote("bob", data={"amount": 2, "note": "none"})]
    answer = weigh(gate, kept, vote("carl", data={"amount": 2}), GROUPS).answer
    assert (answer["decision"], answer["by"], answer["data"]) == ("rejected", "quorum", None)
    assert answer["comment"] == "No agreement: anna: approved; bob: approved; carl: approved"


def test_a_stale_decision_is_refused() -> None:
    gate = wait(kind=WaitKind.TOOL, binding="abc")
    require_binding(gate, None)
    require_binding(gate, "abc")
    with pytest.raises(ApprovalError) as caught:
        require_binding(gate, "abd")
    assert caught.value.code == "stale"


@pytest.mark.parametrize("output", [None, 3, "done", [1], {"a": 1}])
def test_people_give_the_output_of_a_call_that_happened(output: Json) -> None:
    gate = wait(kind=WaitKind.UNKNOWN)
    assert decide(gate, vote("anna", "happened", data=output)).answer["data"] == output


def test_people_say_what_becomes_of_a_call_that_was_cut_off() -> None:
    gate = wait(kind=WaitKind.UNKNOWN, options=("happened", "repeat", "fail"), form_schema=NOTE)
    assert decide(gate, vote("anna", "repeat")).answer["decision"] == "repeat"
    assert decide(gate, vote("anna", "fail")).answer["data"] is None
    assert refusal(gate, vote("anna", "happened")).code == "form"
    assert refusal(gate, vote("anna", "approved")).code == "bad-decision"
    assert refusal(gate, vote("anna", "repeat", data=3)).code == "form"


# Data for suspensions and events ----------------------------------------------------------------------------


def test_what_is_received_fits_its_schema() -> None:
    gate = wait(kind=WaitKind.SUSPEND, form_schema=NOTE)
    assert check_received(gate, {"amount": 1.0}) == {"amount": 1, "note": "none"}
    for wrong in (None, [], {"amount": "x"}):
        with pytest.raises(ApprovalError) as caught:
            check_received(gate, wrong)
        assert caught.value.code == "form"
        assert caught.value.context["issues"]
    anything = wait(kind=WaitKind.EVENT, event_name="paid")
    assert check_received(anything, [1, None]) == [1, None]
    with pytest.raises(ApprovalError, match="stored"):
        check_received(anything, float("inf"))
    assert received_answer({"a": 1}, by="shop", at=T0) == {
        "decision": "received",
        "data": {"a": 1},
        "by": "shop",
        "at": "2026-03-01T12:00:00+00:00",
    }


def test_what_was_received_is_not_received_again() -> None:
    answer = received_answer(1, by="shop", at=T0)
    with pytest.raises(ApprovalError, match="already decided by shop at"):
        require_open(wait(kind=WaitKind.EVENT, status=WaitStatus.DECIDED, answer=answer), T0)


# Time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_timeout", "decision"),
    [("approve", "approved"), ("reject", "rejected"), ("fail", "timeout"), ("route", "timeout")],
)
def test_a_deadline_answers(on_timeout: str, decision: str) -> None:
    gate = wait(on_timeout=on_timeout, timeout_data={"note": "late"})
    assert timeout_answer(gate, T0) == {
        "decision": decision,
        "data": {"note": "late"},
        "by": "timeout",
        "at": "2026-03-01T12:00:00+00:00",
        "comment": "",
    }


def test_an_approval_by_timeout_fits_the_form() -> None:
    gate = wait(on_timeout="approve", form_schema=NOTE, prefill={"amount": 2})
    assert timeout_answer(gate, T0)["data"] == {"amount": 2, "note": "none"}
    unfit = timeout_answer(replace(gate, prefill={"amount": 0}), T0)
    assert unfit["decision"] == "timeout"
    assert "amount" in unfit["comment"]


def test_a_deadline_keeps_the_votes_of_a_quorum() -> None:
    gate = wait(on_timeout="reject", assignees=TRIO, required=2)
    answer = timeout_answer(gate, T0, [vote("anna")])
    assert [v["by"] for v in answer["votes"]] == ["anna"]


def test_a_timer_elapses() -> None:
    gate = wait(kind=WaitKind.TIMER, deadline_at=T0)
    assert timeout_answer(gate, T0) == {"decision": "elapsed", "at": "2026-03-01T12:00:00+00:00"}


# Any sequence -----------------------------------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from([*TRIO, "dora", "eve"]), st.sampled_from(["approved", "rejected"])),
        max_size=8,
    ),
    st.booleans(),
)
def test_a_quorum_never_closes_against_the_votes(
    required: int, given_votes: list[tuple[str, str]], is_ordered: bool
) -> None:
    gate = wait(assignees=(*TRIO, "dora"), required=required, ordered=is_ordered)
    kept: list[Vote] = []
    for by, decision in given_votes:
        try:
            verdict = weigh(gate, kept, vote(by, decision), GROUPS)
        except ApprovalError:
            continue
        kept.append(verdict.vote)
        yes = sum(v.decision == "approved" for v in kept)
        no = len(kept) - yes
        if verdict.answer is None:
            assert yes < required
            assert required > 1
            assert yes + 4 - len(kept) >= required
            continue
        assert verdict.answer["decision"] == ("approved" if yes >= required else "rejected")
        assert yes >= required or no > 4 - required or required == 1
        return
