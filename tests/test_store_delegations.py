"""Votes that are delegated, as both databases keep them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import forked
import pytest
from sqlalchemy import select
from store_samples import HandClock, a_run, a_step, a_vote, a_wait, at

from agentmesh_dagster.errors import ApprovalError, NotFound, StoreError
from agentmesh_dagster.records import Delegation, Entry, RunStatus, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.store.tables import notices


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """A store whose clock stands at noon, with the run `run-1`."""
    with open_store(database_url, clock=HandClock()) as opened:
        asyncio.run(opened.journal.bind_run(a_run(), "run-1"))
        yield opened


def open_wait(store: Store, wait: Wait) -> Wait:
    step = a_step(wait.step_key, wait.run_id, status=StepStatus.WAITING, finished_at=None)
    asyncio.run(store.journal.record([Entry(step=step, opened=(wait,))]))
    return wait


def a_delegation(by: str = "ann", to: str = "dora", **fields: Any) -> Delegation:
    return Delegation(**{"by": by, "to": to, "at": at(30), **fields})


def test_a_delegation_writes_wait_notice_event_and_audit(store: Store):
    gate = open_wait(store, a_wait(assignees=("ann", "bob"), required=2, notify=[{"type": "log"}]))
    made = a_delegation(comment="on holiday: Grüße")
    changed = store.waits.delegate("default", gate.id[:8], made)
    assert (changed, changed.delegations) == (store.waits.get("default", gate.id), (made,))
    assert asyncio.run(store.journal.waits("run-1")) == (changed,)
    [told] = store.runs.events("run-1")
    assert (told.type, told.step_key) == ("approval.delegated", "gate")
    assert told.payload == {"approval": gate.id, "by": "ann", "to": "dora"}
    [audit] = store.audit.list("default", action="delegation")
    assert (audit.actor, audit.entity) == ("ann", "run/run-1")
    assert audit.detail == {
        "approval": gate.id,
        "to": "dora",
        "step_key": "gate",
        "comment": "on holiday: Grüße",
    }
    with store._database.read() as connection:
        reasons = connection.execute(select(notices.c.reason)).scalars().all()
    assert sorted(reasons) == ["delegated", "opened"]


def test_the_delegate_votes_for_the_delegator(store: Store):
    gate = open_wait(store, a_wait(assignees=("ann", "bob"), required=2))
    store.waits.delegate("default", gate.id, a_delegation())
    with pytest.raises(ApprovalError) as refused:
        store.waits.decide("default", gate.id, a_vote("ann"))
    assert refused.value.code == "delegated"
    assert store.waits.decide("default", gate.id, a_vote("dora")).status is WaitStatus.OPEN
    decided = store.waits.decide("default", gate.id, a_vote("bob"))
    assert (decided.status, decided.answer["by"]) == (WaitStatus.DECIDED, "bob")
    assert [(each["by"], each.get("for")) for each in decided.answer["votes"]] == [
        ("dora", "ann"),
        ("bob", None),
    ]
    assert [(vote.by, vote.delegator) for vote in store.waits.votes(gate.id)] == [
        ("dora", "ann"),
        ("bob", ""),
    ]
    assert store.waits.votes_of_run("run-1") == {gate.id: store.waits.votes(gate.id)}
    voted = [event.payload for event in store.runs.events("run-1") if event.type == "approval.voted"]
    assert [(each["by"], each.get("for")) for each in voted] == [("dora", "ann"), ("bob", None)]
    audited = {
        entry.actor: entry.detail.get("for") for entry in store.audit.list("default", action="decision")
    }
    assert audited == {"dora": "ann", "bob": None}


def test_a_delegation_outlives_a_cancellation_and_its_end_names_both(store: Store):
    gate = open_wait(store, a_wait(assignees=("ann",)))
    store.waits.delegate("default", gate.id, a_delegation())
    asyncio.run(store.journal.finish_run("run-1", RunStatus.CANCELED, at=at(40)))
    with pytest.raises(ApprovalError, match="its run is over"):
        store.waits.delegate("default", gate.id, a_delegation(to="eve"))
    asyncio.run(store.journal.bind_run(a_run(), "retry"))
    decided = store.waits.decide("default", gate.id, a_vote("dora", at=at(99)))
    assert (decided.answer["by"], decided.answer["for"]) == ("dora", "ann")
    [final] = [event.payload for event in store.runs.events("run-1") if event.type == "approval.decided"]
    assert (final["by"], final["for"]) == ("dora", "ann")


def test_who_gets_a_gate_by_escalation_delegates_it(store: Store):
    gate = open_wait(store, a_wait(assignees=("ann",), escalate_at=at(10), escalate_to=("zoe",)))
    store.waits.delegate("default", gate.id, a_delegation(at=at(5)))
    store.waits.settle_due("default", at(20))
    changed = store.waits.delegate("default", gate.id, a_delegation("zoe", "eve"))
    assert [(each.by, each.to) for each in changed.delegations] == [("ann", "dora"), ("zoe", "eve")]
    assert store.waits.decide("default", gate.id, a_vote("eve")).answer["for"] == "zoe"


def test_a_refused_delegation_changes_nothing_and_is_recorded(store: Store):
    gate = open_wait(store, a_wait(assignees=("ann", "bob"), separation=True, launcher="laura"))
    refusals = [
        (a_delegation("eve", "dora"), "not-assignee"),
        (a_delegation("ann", "LAURA"), "separation"),
        (a_delegation("laura", "dora"), "separation"),
        (a_delegation("ann", "bob"), "bad-delegate"),
        (a_delegation("ann", "a\0b"), "bad-delegate"),
    ]
    for made, code in refusals:
        with pytest.raises(ApprovalError) as refused:
            store.waits.delegate("default", gate.id, made)
        assert refused.value.code == code
    assert store.waits.get("default", gate.id) == gate
    told = [event.payload for event in store.runs.events("run-1") if event.type == "approval.refused"]
    audited = store.audit.list("default", action="delegation-refused")
    for found in (told, [entry.detail for entry in reversed(audited)]):
        assert [(each["by"], each["to"].replace("?", "\0"), each["code"]) for each in found] == [
            (made.by, made.to, code) for made, code in refusals
        ]
    with pytest.raises(ApprovalError, match="there is no approval"):
        store.waits.delegate("default", "no-such-id", a_delegation())
    [unknown] = store.audit.list("default", action="delegation-refused", limit=1)
    assert (unknown.entity, unknown.actor) == ("approval/no-such-id", "ann")
    timer = open_wait(store, a_wait(step_key="pause", kind=WaitKind.TIMER, deadline_at=at(500)))
    with pytest.raises(ApprovalError, match="nobody decides it: it waits for a moment"):
        store.waits.delegate("default", timer.id, a_delegation())
    with pytest.raises(StoreError, match="NUL"):
        store.waits.delegate("default", gate.id, a_delegation(comment="a\0b"))
    with pytest.raises(NotFound):
        store.waits.delegate("other", gate.id, a_delegation())


def _at_once(url: str, wait_id: str, is_vote: bool, barrier: Any, results: Any) -> None:
    with open_store(url) as store:
        barrier.wait(60)
        try:
            if is_vote:
                store.waits.decide("default", wait_id, a_vote("dora"))
            else:
                store.waits.delegate("default", wait_id, a_delegation("ann", "ann"))
            results.put((is_vote, None))
        except ApprovalError as refused:
            results.put((is_vote, refused.code))


def test_a_vote_and_its_being_taken_back_exclude_each_other(store: Store, database_url: str):
    gate = open_wait(store, a_wait(assignees=("ann", "bob"), required=2))
    store.waits.delegate("default", gate.id, a_delegation())
    context = forked.context()
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_at_once, args=(database_url, gate.id, is_vote, barrier, results))
        for is_vote in (True, False)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=90) for _ in processes)
    for process in processes:
        process.join(30)
    votes = [(vote.by, vote.delegator) for vote in store.waits.votes(gate.id)]
    delegations = store.waits.get("default", gate.id).delegations
    if found[True] is None:
        assert (found[False], votes, len(delegations)) == ("already-voted", [("dora", "ann")], 1)
    else:
        assert (found, votes, delegations) == ({True: "not-assignee", False: None}, [], ())
