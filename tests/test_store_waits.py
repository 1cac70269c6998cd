"""Waits: opened with their step, answered by people, events and the clock, closed with their run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import forked
import pytest
from sqlalchemy import event as engine_event
from sqlalchemy import select
from store_samples import NOON, HandClock, a_run, a_step, a_vote, a_wait, an_event, at

from agentmesh_dagster.errors import ApprovalError, NotFound, StoreError
from agentmesh_dagster.records import Entry, RunStatus, StepStatus, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.store.tables import notices

SLACK = {"type": "webhook", "url": "https://example.com/hook", "secret": "${secrets.HOOK}"}
FORM = {
    "type": "object",
    "properties": {"amount": {"type": "integer"}, "note": {"type": "string", "default": "-"}},
    "required": ["amount"],
}


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(database_url: str, clock: HandClock) -> Iterator[Store]:
    """A store whose clock stands at noon, with the run `run-1`."""
    with open_store(database_url, clock=clock) as opened:
        run(opened.journal.bind_run(a_run(), "run-1"))
        yield opened


def open_wait(store: Store, *waits: Wait) -> None:
    for wait in waits:
        step = a_step(wait.step_key, wait.run_id, status=StepStatus.WAITING, finished_at=None)
        run(store.journal.record([Entry(step=step, opened=(wait,))]))


def stored(store: Store, wait: Wait) -> Wait:
    return store.waits.get("default", wait.id)


def types(store: Store, run_id: str = "run-1") -> list[str]:
    return [event.type for event in store.runs.events(run_id)]


# Opened, taken up, closed -----------------------------------------------------------------------------------


def test_a_wait_comes_back_as_it_was(store: Store):
    wait = a_wait(
        "second",
        title="Refund?",
        body="**Grüße** 🙂",
        data={"z": 1, "a": [1e16, None, "a\0b", "\ud800"]},
        options=("yes", "no", "weiß nicht"),
        multiple=True,
        form_schema=FORM,
        prefill={"note": "n", "amount": 1},
        assignees=("ann", "group:leads"),
        required=2,
        ordered=True,
        separation=True,
        launcher="bob",
        on_timeout="approve",
        timeout_data={"amount": 0},
        cancel_siblings=True,
        binding="b" * 64,
        notify=[SLACK],
        deadline_at=at(100),
        remind_at=at(50),
        escalate_at=at(70),
        escalate_to=("carl",),
    )
    open_wait(store, wait)
    assert run(store.journal.waits("run-1")) == (wait,)
    assert stored(store, wait) == wait
    timer = a_wait(
        step_key="pause", node_id="pause", kind=WaitKind.TIMER, deadline_at=at(1), created_at=at(-1)
    )
    open_wait(store, timer)
    assert run(store.journal.waits("run-1")) == (timer, wait)
    # Of one node, and of the steps in it.
    assert run(store.journal.waits("run-1", wait.node_id)) == (wait,)
    assert run(store.journal.waits("run-1", "pause")) == (timer,)
    assert run(store.journal.waits("run-2")) == ()


def test_a_wait_is_opened_once_with_its_notices(store: Store):
    gate = a_wait(notify=[SLACK, {"type": "log"}])
    open_wait(store, gate, replace(gate, id="another", title="later"))
    suspended = a_wait("s", kind=WaitKind.SUSPEND, notify=[SLACK])
    open_wait(store, suspended)
    assert {wait.id for wait in run(store.journal.waits("run-1"))} == {gate.id, suspended.id}
    due = store.notices.due("default", at(0))
    assert {(each.wait_id, each.reason, each.channel["type"], each.next_at) for each in due} == {
        (gate.id, "opened", "webhook", NOON),
        (gate.id, "opened", "log", NOON),
    }
    assert next(each for each in due if each.channel["type"] == "webhook").channel == SLACK


def test_the_wait_and_its_step_are_written_together_or_not_at_all(store: Store):
    step = a_step("gate", status=StepStatus.WAITING)
    for wait, code in (
        (a_wait(title="a\0b"), "nul-character"),
        (a_wait(data={1, 2}), "not-json"),
        (a_wait(kind=WaitKind.EVENT, event_name="", event_key="k"), "bad-event"),
        (a_wait(kind=WaitKind.EVENT, event_name="e", event_key="k" * 401), "bad-event"),
    ):
        with pytest.raises(StoreError) as refused:
            run(store.journal.record([Entry(step=step, events=(an_event(),), opened=(wait,))]))
        assert refused.value.code == code
    assert run(store.journal.steps("run-1")) == {}
    assert run(store.journal.waits("run-1")) == ()
    assert store.runs.events("run-1") == []


def test_an_answer_is_taken_up_once_and_an_outdated_question_closed(store: Store, clock: HandClock):
    old, new, other = a_wait("old"), a_wait("new"), a_wait("other")
    open_wait(store, old, other)
    store.waits.decide("default", other.id, a_vote())
    clock.seconds = 90
    running = a_step("gate", status=StepStatus.RUNNING)
    entry = Entry(step=running, opened=(new,), used=(other.id,), superseded=(old.id, other.id))
    run(store.journal.record([entry]))
    clock.seconds = 99
    run(store.journal.record([Entry(step=running, used=(other.id,))]))
    assert stored(store, other).used_at == at(90)
    assert (stored(store, other).status, stored(store, old).status) == (
        WaitStatus.DECIDED,
        WaitStatus.CANCELED,
    )
    assert (stored(store, old).closed_by, stored(store, old).decided_at) == ("superseded", at(90))
    assert stored(store, new).status is WaitStatus.OPEN
    assert types(store)[-1] == "approval.canceled"
    with pytest.raises(ApprovalError, match="what it was asked for no longer stands") as refused:
        store.waits.decide("default", old.id, a_vote(at=at(95)))
    assert refused.value.code == "gate-closed"


def test_a_step_without_waits_costs_no_more_statements(store: Store):
    statements: list[str] = []
    run(store.journal.record([Entry(step=a_step("a"))]))
    engine_event.listen(
        store._database.engine, "before_cursor_execute", lambda *call: statements.append(call[2])
    )
    run(store.journal.record([Entry(step=a_step("b"), events=(an_event(),))]))
    assert not [each for each in statements if not each.startswith(("BEGIN", "SELECT runs.id"))]


def test_a_run_that_is_canceled_closes_its_waits_and_a_retry_opens_them_again(store: Store, clock: HandClock):
    gate, decided = a_wait(notify=[SLACK], deadline_at=at(500)), a_wait("decided")
    open_wait(store, gate, decided)
    store.waits.decide("default", decided.id, a_vote())
    assert run(store.journal.finish_run("run-1", RunStatus.CANCELED, at=at(70)))
    closed = stored(store, gate)
    assert (closed.status, closed.closed_by, closed.decided_at) == (WaitStatus.CANCELED, "run", at(70))
    assert store.notices.due("default", at(999)) == []
    assert store.waits.settle_due("default", at(999)) == []
    with pytest.raises(ApprovalError, match="its run is over"):
        store.waits.decide("default", gate.id, a_vote(at=at(71)))
    # A worker that had not heard of the cancellation yet.
    late = a_wait("late", notify=[SLACK])
    open_wait(store, late)
    assert (stored(store, late).status, stored(store, late).closed_by) == (WaitStatus.CANCELED, "run")
    assert not store.claims.poll("default", at(999)).has_notices

    run(store.journal.bind_run(a_run(), "retry"))
    assert stored(store, gate) == gate
    assert stored(store, late).status is WaitStatus.OPEN
    assert stored(store, decided).status is WaitStatus.DECIDED
    assert {each.wait_id for each in store.notices.due("default", at(0))} == {gate.id, late.id}
    assert [wait.id for wait in store.waits.settle_due("default", at(500))] == [gate.id]


def test_a_run_that_succeeded_closes_its_waits_and_one_that_failed_does_not(store: Store):
    run(store.journal.bind_run(a_run("run-2"), "run-2"))
    first, second = a_wait(), a_wait(run_id="run-2")
    open_wait(store, first, second)
    run(store.journal.finish_run("run-1", RunStatus.SUCCEEDED, at=at(1)))
    run(store.journal.finish_run("run-2", RunStatus.FAILED, at=at(1)))
    assert stored(store, first).closed_by == "run"
    assert store.waits.decide("default", second.id, a_vote()).status is WaitStatus.DECIDED


def test_waits_are_listed_and_found_by_the_beginning_of_their_id(store: Store):
    store.catalog.create_project("second")
    run(store.journal.bind_run(a_run("run-2"), "run-2"))
    one = a_wait("1", id="abcdef00-1", created_at=at(3))
    two = a_wait("2", id="abcdef00-2", created_at=at(1), kind=WaitKind.SUSPEND)
    three = a_wait("3", id="abcdee00-3", created_at=at(2), run_id="run-2")
    foreign = a_wait("4", id="foreign-4", project="second")
    open_wait(store, one, two, three, foreign)
    store.waits.decide("default", three.id, a_vote())

    def ids(**filters: Any) -> list[str]:
        return [wait.label for wait in store.waits.list("default", **filters)]

    assert ids() == ["2", "3", "1"]
    assert ids(limit=1) == ["2"]
    assert ids(run_id="run-1") == ["2", "1"]
    assert ids(kinds=[WaitKind.HUMAN]) == ["3", "1"]
    assert ids(statuses=[WaitStatus.OPEN]) == ["2", "1"]
    assert [wait.label for wait in store.waits.list("second")] == ["4"]
    assert store.waits.get("default", "ABCDEE").label == "3"
    assert store.waits.get("default", "abcdef00-2").label == "2"
    for wanted, code in (
        ("abcdef", "ambiguous-approval"),
        ("abcde", "no-approval"),
        ("foreign-4", "no-approval"),
        ("abc%ee", "no-approval"),
        ("abcdee\0", "no-approval"),
        ("", "no-approval"),
    ):
        with pytest.raises(ApprovalError) as refused:
            store.waits.get("default", wanted)
        assert refused.value.code == code


# People -----------------------------------------------------------------------------------------------------


def test_a_decision_writes_vote_wait_events_and_audit(store: Store):
    gate = a_wait(assignees=("ann", "bob"), form_schema=FORM, prefill={"amount": 3}, notify=[SLACK])
    open_wait(store, gate)
    decided = store.waits.decide(
        "default", gate.id[:8], a_vote(data={"amount": "7"}, comment="fine"), binding=""
    )
    data = {"amount": 7, "note": "-"}
    assert decided == stored(store, gate)
    assert (decided.status, decided.closed_by, decided.decided_at) == (
        WaitStatus.DECIDED,
        "decision",
        at(60),
    )
    assert decided.answer == {
        "decision": "approved",
        "data": data,
        "by": "ann",
        "at": at(60).isoformat(),
        "comment": "fine",
    }
    assert store.waits.votes(gate.id) == [a_vote(data=data, comment="fine")]
    assert types(store) == ["approval.voted", "approval.decided"]
    assert store.runs.events("run-1")[1].payload == {
        "approval": gate.id,
        "decision": "approved",
        "by": "ann",
    }
    [audit] = store.audit.list("default", action="decision")
    assert (audit.actor, audit.entity) == ("ann", "run/run-1")
    assert audit.detail == {
        "approval": gate.id,
        "decision": "approved",
        "step_key": "gate",
        "comment": "fine",
    }
    assert store.notices.due("default", at(999)) == []


def test_two_of_three_and_the_rejection_that_makes_it_unreachable(store: Store):
    store.groups.set("default", "leads", ["ann", "bob", "carl"])
    agreed, refused = a_wait("agreed", assignees=("group:leads",), required=2), a_wait("refused")
    refused = replace(refused, assignees=("group:leads",), required=2)
    open_wait(store, agreed, refused)
    assert store.waits.decide("default", agreed.id, a_vote("ann")).status is WaitStatus.OPEN
    with pytest.raises(ApprovalError) as twice:
        store.waits.decide("default", agreed.id, a_vote("ann"))
    assert twice.value.code == "already-voted"
    closed = store.waits.decide("default", agreed.id, a_vote("carl", at=at(61)))
    assert closed.answer["decision"] == "approved"
    assert [vote["by"] for vote in closed.answer["votes"]] == ["ann", "carl"]
    assert [vote.by for vote in store.waits.votes(agreed.id)] == ["ann", "carl"]

    assert store.waits.decide("default", refused.id, a_vote("ann")).status is WaitStatus.OPEN
    assert store.waits.decide("default", refused.id, a_vote("bob", "rejected")).status is WaitStatus.OPEN
    last = store.waits.decide("default", refused.id, a_vote("carl", "rejected"))
    assert (last.status, last.answer["decision"]) == (WaitStatus.DECIDED, "rejected")
    # A group that changes counts for the votes that come after.
    open_wait(store, late := a_wait("late", assignees=("group:leads",)))
    store.groups.set("default", "leads", ["dora"])
    with pytest.raises(ApprovalError) as stranger:
        store.waits.decide("default", late.id, a_vote("ann"))
    assert stranger.value.code == "not-assignee"


def test_a_decision_closes_the_sibling_gates_that_it_is_asked_to_close(store: Store):
    run(store.journal.bind_run(a_run("run-2"), "run-2"))
    first = a_wait("first", cancel_siblings=True)
    gate, tool = a_wait("gate", notify=[SLACK]), a_wait("tool", kind=WaitKind.TOOL)
    foreign = a_wait("foreign", run_id="run-2")
    open_wait(store, first, gate, tool, foreign)
    store.waits.decide("default", first.id, a_vote(decision="rejected"))
    assert (stored(store, gate).status, stored(store, gate).closed_by) == (WaitStatus.CANCELED, "sibling")
    assert [stored(store, each).status for each in (tool, foreign)] == [WaitStatus.OPEN, WaitStatus.OPEN]
    assert types(store) == ["approval.voted", "approval.decided", "approval.canceled"]
    assert store.notices.due("default", at(999)) == []
    with pytest.raises(ApprovalError, match="another gate of the run was decided"):
        store.waits.decide("default", gate.id, a_vote())


def test_data_answers_a_suspension(store: Store):
    suspended = a_wait("amount", kind=WaitKind.SUSPEND, form_schema=FORM)
    open_wait(store, suspended)
    with pytest.raises(ApprovalError) as refused:
        store.waits.decide("default", suspended.id, a_vote(decision=None, data={"amount": "hush"}))
    assert refused.value.code == "form"
    assert refused.value.context["issues"]
    resumed = store.waits.decide("default", suspended.id, a_vote(decision=None, data={"amount": 1}))
    data = {"amount": 1, "note": "-"}
    assert resumed.answer == {"decision": "received", "data": data, "by": "ann", "at": at(60).isoformat()}
    assert (resumed.status, resumed.closed_by) == (WaitStatus.DECIDED, "decision")
    assert types(store) == ["suspension.refused", "suspension.decided"]
    with pytest.raises(ApprovalError, match="already decided by ann at") as again:
        store.waits.decide("default", suspended.id, a_vote(decision=None, data={"amount": 2}))
    assert again.value.code == "already-decided"
    open_wait(store, a_wait("free", id="free-form", kind=WaitKind.SUSPEND))
    assert store.waits.decide("default", "free-form", a_vote(decision=None, data=[1, None])).answer[
        "data"
    ] == [1, None]


@pytest.mark.parametrize(
    ("code", "fields", "vote", "binding"),
    [
        ("not-assignee", {"assignees": ("bob",)}, {}, None),
        ("separation", {"separation": True, "launcher": "ann"}, {}, None),
        ("not-your-turn", {"assignees": ("bob", "ann"), "required": 2, "ordered": True}, {}, None),
        ("bad-decision", {"options": ("yes", "no")}, {"decision": {"hush": "hush"}}, None),
        ("bad-decision", {"options": ("yes", "no")}, {"decision": "approve\0d"}, None),
        ("form", {"form_schema": FORM}, {}, None),
        ("stale", {"kind": WaitKind.TOOL, "binding": "new"}, {}, "old"),
        ("gate-closed", {"deadline_at": at(59)}, {}, None),
        ("bad-decision", {"kind": WaitKind.SUSPEND}, {}, None),
        ("no-approval", {"kind": WaitKind.TIMER, "deadline_at": at(99)}, {}, None),
        ("no-approval", {"kind": WaitKind.EVENT, "event_name": "paid"}, {}, None),
    ],
)
def test_a_refused_decision_changes_nothing_and_is_recorded_without_its_data(
    store: Store, code: str, fields: dict[str, Any], vote: dict[str, Any], binding: str | None
):
    gate = a_wait(**fields)
    open_wait(store, gate)
    with pytest.raises(ApprovalError) as refused:
        store.waits.decide(
            "default",
            gate.id,
            a_vote(**{"data": {"amount": "hush"}, "comment": "hush", **vote}),
            binding=binding,
        )
    assert refused.value.code == code
    assert stored(store, gate) == gate
    assert store.waits.votes(gate.id) == []
    [audit] = store.audit.list("default", action="decision-refused")
    [event] = store.runs.events("run-1")
    assert (audit.actor, audit.entity, audit.detail["code"]) == ("ann", "run/run-1", code)
    assert event.type.endswith(".refused")
    assert (event.payload["code"], event.payload["by"]) == (code, "ann")
    assert "hush" not in json.dumps([audit.detail, event.payload])


def test_a_decision_on_what_is_not_there_is_recorded(store: Store):
    store.catalog.create_project("second")
    gate = a_wait()
    open_wait(store, gate)
    with pytest.raises(ApprovalError) as refused:
        store.waits.decide("second", gate.id, a_vote(data={"x": "hush"}))
    assert refused.value.code == "no-approval"
    [audit] = store.audit.list("second")
    assert (audit.action, audit.entity, audit.actor) == ("decision-refused", f"approval/{gate.id}", "ann")
    assert "hush" not in json.dumps(audit.detail)
    assert stored(store, gate) == gate
    with pytest.raises(NotFound):
        store.waits.decide("third", gate.id, a_vote())
    with pytest.raises(StoreError) as odd:
        store.waits.decide("default", gate.id, a_vote(comment="a\0b"))
    assert odd.value.code == "nul-character"


def _decide_when_told(url: str, worker: int, wait_id: str, barrier: Any, results: Any) -> None:
    with open_store(url) as store:
        barrier.wait(60)
        vote = Vote(by=f"p{worker}", decision="approved", at=at(worker))
        try:
            results.put((worker, None, store.waits.decide("default", wait_id, vote).answer["by"]))
        except ApprovalError as refused:
            results.put((worker, refused.code, refused.message))


def test_of_eight_processes_that_decide_one_wins_and_seven_are_told(store: Store, database_url: str):
    gate = a_wait(cancel_siblings=True)
    open_wait(store, gate, a_wait("other"))
    context = forked.context()
    barrier, results = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=_decide_when_told, args=(database_url, worker, gate.id, barrier, results))
        for worker in range(8)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(30)
    [(winner, _, by)] = [each for each in found if each[1] is None]
    assert by == f"p{winner}" == stored(store, gate).answer["by"]
    losers = [each for each in found if each[1] is not None]
    assert {code for _, code, _ in losers} == {"already-decided"}
    when = at(winner).isoformat(timespec="seconds")
    assert all(f"already decided by {by} at {when}" in message for _, _, message in losers)
    assert len(store.waits.votes(gate.id)) == 1
    assert len(store.audit.list("default", action="decision-refused")) == 7
    assert types(store).count("approval.decided") == 1


def test_groups(store: Store):
    store.catalog.create_project("second")
    store.groups.set("default", "leads", ["zoe", "ann", "zoe"], by="root")
    store.groups.set("default", "all", ["ann"])
    store.groups.set("second", "leads", ["bob"])
    assert store.groups.all("default") == {"all": ("ann",), "leads": ("zoe", "ann")}
    store.groups.set("default", "leads", ["carl"])
    assert store.groups.all("default")["leads"] == ("carl",)
    store.groups.remove("default", "all")
    assert store.groups.all("default") == {"leads": ("carl",)}
    assert store.audit.list("default", entity="group/leads", actor="root")[0].detail == {
        "members": ["zoe", "ann"]
    }
    with pytest.raises(NotFound):
        store.groups.remove("default", "all")
    with pytest.raises(NotFound):
        store.groups.set("third", "leads", ["ann"])
    for group, members in (("", ["a"]), ("g", []), ("g", ["group:h"]), ("g", [" a"]), ("g\0", ["a"])):
        with pytest.raises(StoreError) as refused:
            store.groups.set("default", group, members)
        assert refused.value.code == "bad-group"


# Events -----------------------------------------------------------------------------------------------------


def an_event_wait(label: str = "", key: str = "7", **fields: Any) -> Wait:
    values = {"kind": WaitKind.EVENT, "event_name": "paid", "event_key": key}
    return a_wait(label, **{**values, **fields})


def test_an_event_answers_every_wait_that_it_fits(store: Store):
    run(store.journal.bind_run(a_run("run-2"), "run-2"))
    first, second = an_event_wait("a", form_schema=FORM), an_event_wait("b", run_id="run-2")
    strict = an_event_wait("c", form_schema={"type": "string"})
    other_key, late = an_event_wait("d", key="8"), an_event_wait("e", deadline_at=at(0))
    open_wait(store, first, second, strict, other_key, late)
    delivery = store.waits.send_event("default", "paid", "7", {"amount": "5"}, by="bank")
    assert set(delivery.completed) == {first.id, second.id}
    assert (delivery.is_kept, delivery.is_duplicate) == (False, False)
    answered = stored(store, first)
    assert (answered.status, answered.closed_by) == (WaitStatus.DECIDED, "event")
    data = {"amount": 5, "note": "-"}
    assert answered.answer == {"decision": "received", "data": data, "by": "bank", "at": NOON.isoformat()}
    assert stored(store, second).answer["data"] == {"amount": "5"}
    for wait in (strict, other_key, late):
        assert stored(store, wait) == wait
    assert sorted(types(store)) == ["event.decided", "event.refused"]
    assert types(store, "run-2") == ["event.decided"]
    # It answered somebody, so it is kept for nobody.
    open_wait(store, after := an_event_wait("f"))
    assert stored(store, after) == after


def test_an_event_that_comes_first_is_kept_for_the_first_wait_that_it_fits(store: Store, clock: HandClock):
    for data in ("text", {"amount": 1}, {"amount": 2}):
        assert store.waits.send_event("default", "paid", "7", data, by="bank").is_kept
    clock.seconds = 5
    waits = [an_event_wait(label, form_schema=FORM) for label in "abc"]
    open_wait(store, *waits)
    amounts = [(stored(store, wait).answer or {}).get("data") for wait in waits]
    assert amounts == [{"amount": 1, "note": "-"}, {"amount": 2, "note": "-"}, None]
    assert (stored(store, waits[0]).decided_at, stored(store, waits[0]).answer["at"]) == (
        at(5),
        NOON.isoformat(),
    )
    assert "text" not in json.dumps([event.payload for event in store.runs.events("run-1")])
    open_wait(store, loose := an_event_wait("d"))
    assert stored(store, loose).answer["data"] == "text"


def test_a_kept_event_answers_no_wait_that_is_opened_again_after_its_deadline(store: Store, clock: HandClock):
    late, other = an_event_wait("a", deadline_at=at(10)), an_event_wait("b", deadline_at=at(99))
    open_wait(store, late, other)
    run(store.journal.finish_run("run-1", RunStatus.CANCELED, at=at(1)))
    clock.seconds = 5
    assert store.waits.send_event("default", "paid", "7", 1).is_kept
    clock.seconds = 20
    run(store.journal.bind_run(a_run(), "again"))
    assert (stored(store, late).status, stored(store, other).status) == (WaitStatus.OPEN, WaitStatus.DECIDED)
    assert [wait.id for wait in store.waits.settle_due("default", at(20))] == [late.id]


def test_an_event_of_the_same_id_is_delivered_once(store: Store, clock: HandClock):
    def send(**fields: Any) -> tuple[bool, bool]:
        delivery = store.waits.send_event("default", "paid", "7", 1, event_id="e-1", keep_s=60, **fields)
        assert delivery.event_id == "e-1"
        return bool(delivery.completed) or delivery.is_kept, delivery.is_duplicate

    assert send() == (True, False)
    assert send() == (False, True)
    open_wait(store, first := an_event_wait("a"))
    assert stored(store, first).status is WaitStatus.DECIDED
    open_wait(store, second := an_event_wait("b"))
    assert send() == (False, True)
    assert stored(store, second).status is WaitStatus.OPEN
    clock.seconds = 61
    assert send() == (True, False)
    assert stored(store, second).status is WaitStatus.DECIDED
    assert send() == (False, True)


def test_kept_events_are_bounded_and_expire(store: Store, clock: HandClock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentmesh_dagster.store.inbox.MAX_KEPT", 3)
    for index in range(3):
        store.waits.send_event("default", "paid", str(index), index, keep_s=60)
    with pytest.raises(StoreError) as full:
        store.waits.send_event("default", "paid", "7", "hush")
    assert full.value.code == "events-full"
    assert "hush" not in full.value.message
    assert store.waits.send_event("default", "shipped", "7", 1, keep_s=60).is_kept
    assert not store.waits.send_event("default", "nobody", "7", 1, keep_s=0).is_kept
    # One that answers a wait needs no place.
    open_wait(store, an_event_wait(key="7"))
    assert store.waits.send_event("default", "paid", "7", 1).completed

    assert not store.claims.poll("default", at(59)).has_due
    clock.seconds = 60
    assert store.claims.poll("default", at(60)).has_due
    open_wait(store, late := an_event_wait("late", key="0"))
    assert stored(store, late).status is WaitStatus.OPEN
    assert store.waits.settle_due("default", at(60)) == []
    assert not store.claims.poll("default", at(60)).has_due
    assert store.waits.send_event("default", "paid", "8", 1).is_kept


def test_what_cannot_be_an_event_is_refused(store: Store):
    refusals: list[tuple[str, str, Any, dict[str, Any], str]] = [
        (" ", "", 1, {}, "bad-event"),
        ("n" * 201, "", 1, {}, "bad-event"),
        ("n", "k" * 401, 1, {}, "bad-event"),
        ("n", "k", 1, {"event_id": ""}, "bad-event"),
        ("n", "k", 1, {"keep_s": -1}, "bad-event"),
        ("n\0", "k", 1, {}, "nul-character"),
        ("n", "k", {1}, {}, "not-json"),
    ]
    for name, key, data, fields, code in refusals:
        with pytest.raises(StoreError) as refused:
            store.waits.send_event("default", name, key, data, **fields)
        assert refused.value.code == code
    with pytest.raises(NotFound):
        store.waits.send_event("third", "n", "k", 1)
    widest = "\N{GRINNING FACE}"
    wait = an_event_wait(event_name=widest * 200, key=widest * 400)
    open_wait(store, wait)
    assert store.waits.send_event("default", wait.event_name, wait.event_key, 1).completed == (wait.id,)


def test_an_event_and_its_wait_that_come_at_once_never_miss_each_other(store: Store, database_url: str):
    count = 60
    run(store.journal.bind_run(a_run("run-2"), "run-2"))
    start = threading.Barrier(2)
    errors: list[BaseException] = []

    def send() -> None:
        try:
            with open_store(database_url) as other:
                start.wait(30)
                for index in range(count):
                    other.waits.send_event("default", "paid", str(index), index)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    start.wait(30)
    waits = [an_event_wait(str(index), str(index), run_id=f"run-{index % 2 + 1}") for index in range(count)]

    async def open_all() -> None:
        for index in range(0, count, 2):
            await asyncio.gather(
                *(
                    store.journal.record(
                        [Entry(step=a_step("gate", wait.run_id, status=StepStatus.WAITING), opened=(wait,))]
                    )
                    for wait in waits[index : index + 2]
                )
            )

    run(open_all())
    thread.join(60)
    assert not errors
    assert [(stored(store, wait).answer or {}).get("data") for wait in waits] == list(range(count))


# The clock --------------------------------------------------------------------------------------------------


def test_timers_elapse_and_deadlines_pass(store: Store):
    timer = a_wait("timer", kind=WaitKind.TIMER, deadline_at=at(10))
    fails = a_wait("fails", deadline_at=at(20), notify=[SLACK])
    approves = a_wait("approves", deadline_at=at(20), on_timeout="approve", timeout_data={"x": 1})
    rejects = a_wait("rejects", deadline_at=at(21), on_timeout="reject", assignees=("ann",), required=1)
    event = an_event_wait("event", deadline_at=at(22), on_timeout="route")
    later = a_wait("later", deadline_at=at(23))
    open_wait(store, timer, fails, approves, rejects, event, later)

    assert not store.claims.poll("default", at(9)).has_due
    assert store.waits.settle_due("default", at(9)) == []
    assert store.claims.poll("default", at(10)).has_due
    [elapsed] = store.waits.settle_due("default", at(10))
    assert (elapsed.status, elapsed.closed_by) == (WaitStatus.DECIDED, "timer")
    assert elapsed.answer == {"decision": "elapsed", "at": at(10).isoformat()}
    assert elapsed == stored(store, timer)

    settled = {wait.label: wait for wait in store.waits.settle_due("default", at(22.5))}
    assert {wait.status for wait in settled.values()} == {WaitStatus.EXPIRED}
    assert {label: wait.answer["decision"] for label, wait in settled.items()} == {
        "fails": "timeout",
        "approves": "approved",
        "rejects": "rejected",
        "event": "timeout",
    }
    assert settled["approves"].answer["data"] == {"x": 1}
    assert stored(store, fails).decided_at == at(22.5)
    assert store.notices.due("default", at(99)) == []
    assert not store.claims.poll("default", at(22.9)).has_due
    assert sorted(types(store)) == ["approval.expired"] * 3 + ["event.expired", "timer.decided"]
    with pytest.raises(ApprovalError, match="its time ran out"):
        store.waits.decide("default", fails.id, a_vote())


def test_a_deadline_that_decides_closes_the_sibling_gates(store: Store):
    gate = a_wait("gate", deadline_at=at(1), on_timeout="reject", cancel_siblings=True)
    sibling = a_wait("sibling", deadline_at=at(2), on_timeout="approve")
    open_wait(store, gate, sibling)
    assert [wait.label for wait in store.waits.settle_due("default", at(9))] == ["gate"]
    assert stored(store, sibling).closed_by == "sibling"


def test_people_are_reminded_once_and_then_others_may_decide_too(store: Store):
    gate = a_wait(
        assignees=("ann",),
        notify=[SLACK, {"type": "log"}],
        remind_at=at(10),
        escalate_at=at(20),
        escalate_to=("ann", "boss"),
        deadline_at=at(100),
    )
    anybody = a_wait("anybody", escalate_at=at(20), escalate_to=("boss",))
    open_wait(store, gate, anybody)
    for notice in store.notices.due("default", at(0)):
        store.notices.sent(notice.id, at(0))

    [reminded] = store.waits.settle_due("default", at(10))
    assert (reminded.remind_at, reminded.status) == (None, WaitStatus.OPEN)
    assert [notice.reason for notice in store.notices.due("default", at(10))] == ["reminder"] * 2
    assert store.waits.settle_due("default", at(19)) == []
    settled = store.waits.settle_due("default", at(20))
    assert {wait.label: wait.assignees for wait in settled} == {"": ("ann", "boss"), "anybody": ()}
    reasons = [notice.reason for notice in store.notices.due("default", at(20))]
    assert sorted(reasons) == ["escalated"] * 2 + ["reminder"] * 2
    assert store.waits.settle_due("default", at(50)) == []
    assert store.waits.decide("default", gate.id, a_vote("boss")).status is WaitStatus.DECIDED
    assert store.notices.due("default", at(99)) == []
    assert "approval.reminded" in types(store)
    assert "approval.escalated" in types(store)


def test_what_is_due_is_done_once_by_several_at_once(store: Store, database_url: str):
    async def bind() -> None:
        for index in range(120):
            wait = a_wait(run_id=f"r{index}", remind_at=at(1), notify=[SLACK], deadline_at=at(index))
            await store.journal.bind_run(a_run(wait.run_id), wait.run_id)
            await store.journal.record([Entry(step=a_step("gate", wait.run_id), opened=(wait,))])

    run(bind())
    barrier = threading.Barrier(3)
    found: list[list[Wait]] = []

    def settle() -> None:
        with open_store(database_url) as other:
            barrier.wait(30)
            found.append(other.waits.settle_due("default", at(60)))

    threads = [threading.Thread(target=settle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    settled = [wait for each in found for wait in each]
    assert len(found) == 3
    assert len({wait.id for wait in settled}) == len(settled) == 120
    assert sum(wait.status is WaitStatus.EXPIRED for wait in settled) == 61
    reminders = [n for n in store.notices.due("default", at(99), limit=999) if n.reason == "reminder"]
    assert len(reminders) == 59
    assert len(store.waits.settle_due("default", at(999), limit=10)) == 10


# Notices ----------------------------------------------------------------------------------------------------


def test_a_notice_is_taken_by_one_and_tried_again_until_it_arrives(store: Store):
    gate = a_wait(notify=[SLACK])
    open_wait(store, gate)
    assert store.claims.poll("default", at(0)).has_notices
    [notice] = store.notices.due("default", at(0))
    assert store.notices.take(notice.id, now=at(0), until=at(30))
    assert not store.notices.take(notice.id, now=at(1), until=at(31))
    assert not store.claims.poll("default", at(29)).has_notices
    store.notices.failed(notice.id, "connection refused", at(40))
    [waiting] = store.notices.list(gate.id)
    assert (waiting.attempts, waiting.error, waiting.next_at) == (1, "connection refused", at(40))
    # Whoever took it was killed: it is due again.
    assert store.notices.take(notice.id, now=at(40), until=at(70))
    assert store.notices.take(notice.id, now=at(70), until=at(99))
    store.notices.sent(notice.id, at(71))
    [sent] = store.notices.list(gate.id)
    assert (sent.attempts, sent.sent_at, sent.next_at, sent.error) == (3, at(71), None, "")
    store.notices.failed(notice.id, "late", at(80))
    assert store.notices.list(gate.id) == [sent]
    assert store.notices.due("default", at(999)) == []


def test_a_notice_that_fails_when_its_gate_is_closed_is_given_up(store: Store):
    gate = a_wait(notify=[SLACK])
    open_wait(store, gate)
    [notice] = store.notices.due("default", at(0))
    assert store.notices.take(notice.id, now=at(0), until=at(30))
    store.waits.decide("default", gate.id, a_vote())
    store.notices.failed(notice.id, "timed out", at(40))
    [given_up] = store.notices.list(gate.id)
    assert (given_up.next_at, given_up.error) == (None, "timed out")


def test_votes_with_different_data_leave_the_gate_open_and_people_are_told(store: Store):
    gate = a_wait("gate", assignees=("ann", "bob", "carl"), required=2, notify=[SLACK])
    open_wait(store, gate)
    store.waits.decide("default", gate.id, a_vote("ann", data={"amount": 90, "note": "n"}))
    for _ in range(2):
        with pytest.raises(ApprovalError) as refused:
            store.waits.decide("default", gate.id, a_vote("bob", data={"amount": 9, "note": "n"}))
        assert refused.value.code == "data-conflict"
    stands = store.waits.get("default", gate.id)
    assert (stands.status, [vote.by for vote in store.waits.votes(gate.id)]) == (WaitStatus.OPEN, ["ann"])
    told = [event.payload for event in store.runs.events("run-1") if event.type == "approval.refused"]
    assert [(payload["by"], payload["code"], payload["fields"]) for payload in told] == [
        ("bob", "data-conflict", ["amount"])
    ] * 2
    with store._database.read() as connection:
        reasons = connection.execute(select(notices.c.reason).order_by(notices.c.id)).scalars().all()
    assert sorted(reasons) == ["conflict", "conflict", "opened"]
    decided = store.waits.decide("default", gate.id, a_vote("bob", data={"note": "n", "amount": 90}))
    assert (decided.status, decided.answer["by"], decided.answer["data"]["amount"]) == (
        WaitStatus.DECIDED,
        "bob",
        90,
    )
    [final] = [event.payload for event in store.runs.events("run-1") if event.type == "approval.decided"]
    assert (final["decision"], final["by"]) == ("approved", "bob")


def test_a_rejection_without_agreement_is_nobodys(store: Store):
    gate = a_wait("gate", assignees=("ann", "dora"), required=2, options=("red", "blue"))
    open_wait(store, gate)
    store.waits.decide("default", gate.id, a_vote("ann", "red"))
    decided = store.waits.decide("default", gate.id, a_vote("dora", "blue"))
    assert (decided.answer["decision"], decided.answer["by"]) == ("rejected", "quorum")
    [final] = [event.payload for event in store.runs.events("run-1") if event.type == "approval.decided"]
    assert (final["decision"], final["by"]) == ("rejected", "quorum")
