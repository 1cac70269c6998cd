"""Events that not every wait takes: schemas, conditions, and what a step sends once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event as engine_event
from store_samples import HandClock, a_run, a_step, a_wait, an_event, end_leases, take_lease

from agentmesh_dagster.errors import ApprovalError, NotFound, RunRefused
from agentmesh_dagster.records import Entry, RunStatus, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs import decisions
from agentmesh_dagster.store import Store, open_store

FORM = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(database_url: str, clock: HandClock) -> Iterator[Store]:
    with open_store(database_url, clock=clock) as opened:
        run(opened.journal.bind_run(a_run(), "run-1"))
        yield opened


def event_wait(label: str = "", *, when: str | None = None, names: Any = None, **fields: Any) -> Wait:
    condition = None if when is None else {"when": when, "names": names or {}}
    values = {"kind": WaitKind.EVENT, "event_name": "paid", "event_key": "7", "data": condition}
    return a_wait(label, **{**values, **fields})


def open_wait(store: Store, *waits: Wait) -> None:
    for wait in waits:
        step = a_step(wait.step_key, wait.run_id, status=StepStatus.WAITING, finished_at=None)
        run(store.journal.record([Entry(step=step, opened=(wait,))]))


def stored(store: Store, wait: Wait) -> Wait:
    return store.waits.get("default", wait.id)


def types(store: Store) -> list[str]:
    return [event.type for event in store.runs.events("run-1")]


def test_data_that_no_wait_takes_is_refused_to_its_sender_and_not_kept(store: Store):
    wait = event_wait(form_schema=FORM)
    open_wait(store, wait)
    with pytest.raises(ApprovalError) as refused:
        store.waits.send_event("default", "paid", "7", {"amount": "much"}, event_id="e-1")
    assert refused.value.code == "form"
    assert [issue["path"] for issue in refused.value.context["issues"]] == ["amount"]
    assert stored(store, wait).status is WaitStatus.OPEN
    assert types(store) == ["event.refused"]
    # The sender corrects it, under the same id; what was refused is kept for nobody.
    assert store.waits.send_event("default", "paid", "7", {"amount": 4}, event_id="e-1").completed == (
        wait.id,
    )
    assert stored(store, wait).answer["data"] == {"amount": 4}
    open_wait(store, later := event_wait("later"))
    assert stored(store, later).status is WaitStatus.OPEN


def test_a_condition_leaves_events_to_others(store: Store):
    large = event_wait("large", when="payload.amount > 100")
    own = event_wait("own", when="payload.order == input.order", names={"input": {"order": "A"}})
    open_wait(store, large, own)
    assert store.waits.send_event("default", "paid", "7", {"amount": 5, "order": "B"}).is_kept
    assert types(store) == []
    delivery = store.waits.send_event("default", "paid", "7", {"amount": 500, "order": "B"})
    assert delivery.completed == (large.id,)
    assert store.waits.send_event("default", "paid", "7", {"amount": 1, "order": "A"}).completed == (own.id,)


def test_a_condition_that_fails_is_told_to_the_run_and_not_to_the_sender(store: Store):
    open_wait(store, wait := event_wait(when="payload.amount > 100"))
    assert store.waits.send_event("default", "paid", "7", "text").is_kept
    assert stored(store, wait).status is WaitStatus.OPEN
    (told,) = store.runs.events("run-1")
    assert (told.type, told.payload["code"]) == ("event.refused", "event-condition")


def test_a_condition_is_asked_of_events_that_were_kept(store: Store):
    for amount in (1, 200, 300):
        assert store.waits.send_event("default", "paid", "7", {"amount": amount}).is_kept
    waits = [event_wait(label, when="payload.amount > 100", form_schema=FORM) for label in "abc"]
    open_wait(store, *waits)
    answers = [(stored(store, wait).answer or {}).get("data") for wait in waits]
    assert answers == [{"amount": 200}, {"amount": 300}, None]
    run(store.journal.finish_run("run-1", RunStatus.CANCELED, at=waits[0].created_at))
    assert store.waits.send_event("default", "paid", "7", {"amount": 400}).is_kept
    run(store.journal.bind_run(a_run(), "again"))
    assert stored(store, waits[2]).answer["data"] == {"amount": 400}


def test_nothing_of_a_document_is_evaluated_in_a_transaction(store: Store, monkeypatch: pytest.MonkeyPatch):
    opened = 0

    def begins(_connection: Any) -> None:
        nonlocal opened
        opened += 1

    def ends(_connection: Any) -> None:
        nonlocal opened
        opened -= 1

    engine = store._database.engine
    engine_event.listen(engine, "begin", begins)
    engine_event.listen(engine, "commit", ends)
    engine_event.listen(engine, "rollback", ends)
    judged: list[int] = []
    real = decisions.check_event

    def check(wait: Wait, data: Any) -> Any:
        judged.append(opened)
        return real(wait, data)

    monkeypatch.setattr("agentmesh_dagster.store.judging.check_event", check)
    open_wait(store, event_wait("a", when="payload.amount > 100"))
    assert store.waits.send_event("default", "paid", "7", {"amount": 1}).is_kept
    open_wait(store, event_wait("b", form_schema=FORM))
    assert judged == [0, 0]


def test_a_step_sends_its_event_once_whatever_it_is_asked(store: Store, clock: HandClock):
    def emit() -> str:
        receipt = an_event("sent-" + clock.new_id(), type="event.sent", step_key="tell")
        return run(store.journal.emit(receipt, "paid", "7", {"amount": 1}, keep_s=0))

    open_wait(store, first := event_wait("a"))
    event_id = emit()
    assert stored(store, first).answer["by"] == "run/run-1"
    # Long after any id is forgotten, the run that was cut off and retried sends it no more.
    open_wait(store, second := event_wait("b"))
    clock.seconds = 10_000_000
    assert emit() == event_id
    assert stored(store, second).status is WaitStatus.OPEN
    assert types(store).count("event.sent") == 1


def test_a_step_hears_that_its_event_was_refused_and_may_send_another(store: Store):
    open_wait(store, wait := event_wait(form_schema=FORM))
    receipt = an_event("sent-1", type="event.sent", step_key="tell")
    with pytest.raises(ApprovalError) as refused:
        run(store.journal.emit(receipt, "paid", "7", "text", keep_s=60))
    assert refused.value.code == "form"
    assert "event.sent" not in types(store)
    run(store.journal.emit(receipt, "paid", "7", {"amount": 1}, keep_s=60))
    assert stored(store, wait).status is WaitStatus.DECIDED


def test_a_step_sends_none_of_agentmesh_own_events(store: Store):
    receipt = an_event("sent-1", type="event.sent", step_key="tell")
    with pytest.raises(ApprovalError) as refused:
        run(store.journal.emit(receipt, "agentmesh.run.ended", "run-9", None, keep_s=60))
    assert refused.value.code == "reserved-event"


@pytest.mark.parametrize("is_released", [False, True])
def test_who_has_lost_the_lease_sends_no_event(store: Store, is_released: bool):
    def emit(holder: str, run_id: str = "run-1") -> str:
        receipt = an_event("sent-" + holder, run_id=run_id, type="event.sent", step_key="tell")
        return run(store.journal.emit(receipt, "paid", "7", {"amount": 1}, keep_s=60, holder=holder))

    open_wait(store, wait := event_wait())
    assert take_lease(store, "mine")
    end_leases(store)
    assert take_lease(store, "reconciler")
    if is_released:
        run(store.journal.release_lease("run-1", "reconciler"))
    with pytest.raises(RunRefused) as lost:
        emit("mine")
    assert lost.value.code == "lease-lost"
    assert stored(store, wait).status is WaitStatus.OPEN
    assert types(store) == []
    with pytest.raises(NotFound) as missing:
        emit("mine", "nothing")
    assert missing.value.code == "no-run"
    # Nor was it kept for a wait that comes later; who holds the run sends it.
    open_wait(store, later := event_wait("later"))
    assert stored(store, later).status is WaitStatus.OPEN
    assert take_lease(store, "reconciler")
    emit("reconciler")
    assert [stored(store, each).status for each in (wait, later)] == [WaitStatus.DECIDED] * 2
