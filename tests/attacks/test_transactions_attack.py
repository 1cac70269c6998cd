"""Schemas of documents that take long: nothing of them is evaluated while a row or a file is locked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_samples import HandClock, a_run, a_step, a_vote, a_wait, an_event, at

from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Entry, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs import schema_checks
from agentmesh_dagster.store import Store, open_store

pytestmark = pytest.mark.timeout(60)

FORM = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^(a|a)*$"}},
    "required": ["text"],
}
FITS = {"text": "a" * 24}
MISFIT = {"text": "a" * 24 + "!"}


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(database_url: str, clock: HandClock) -> Iterator[Store]:
    with open_store(database_url, clock=clock) as opened:
        asyncio.run(opened.journal.bind_run(a_run(), "run-1"))
        yield opened


@pytest.fixture
def writes_meanwhile(store: Store, other_store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Has another process write to the same run at each evaluation of a schema; gives how often it did.

    Where the evaluation held a lock, that write would wait for it: SQLite gives up after a while, PostgreSQL never.
    """
    written: list[str] = []
    construct = schema_checks._validator

    def evaluated(text: str) -> Any:
        asyncio.run(other_store.journal.record_events([an_event("step.progress")]))
        asyncio.run(other_store.journal.bind_run(a_run(f"run-{len(written) + 2}"), f"run-{len(written) + 2}"))
        written.append(text)
        return construct(text)

    monkeypatch.setattr(schema_checks, "_validator", evaluated)
    return lambda: len(written)


def open_wait(store: Store, wait: Wait) -> None:
    step = a_step(wait.step_key, wait.run_id, status=StepStatus.WAITING, finished_at=None)
    asyncio.run(store.journal.record([Entry(step=step, opened=(wait,))]))


def stored(store: Store, wait: Wait) -> Wait:
    return store.waits.get("default", wait.id)


def event_wait(label: str = "") -> Wait:
    return a_wait(label, kind=WaitKind.EVENT, event_name="paid", event_key="7", form_schema=FORM)


def test_a_decision(store: Store, writes_meanwhile: Callable[[], int]) -> None:
    gate = a_wait(form_schema=FORM, prefill=MISFIT)
    open_wait(store, gate)
    with pytest.raises(ApprovalError, match="must match the regular expression"):
        store.waits.decide("default", gate.id, a_vote())
    assert store.waits.decide("default", gate.id, a_vote(data=FITS)).status is WaitStatus.DECIDED
    assert writes_meanwhile() == 2
    kinds = [event.type for event in store.runs.events("run-1")]
    assert kinds.count("approval.refused") == kinds.count("approval.voted") == 1  # each is written once


def test_what_answers_a_suspension(store: Store, writes_meanwhile: Callable[[], int]) -> None:
    suspended = a_wait(kind=WaitKind.SUSPEND, form_schema=FORM)
    open_wait(store, suspended)
    decided = store.waits.decide("default", suspended.id, a_vote(decision=None, data=FITS))
    assert decided.answer["data"] == FITS
    assert writes_meanwhile() == 1


def test_an_event_that_is_sent(store: Store, writes_meanwhile: Callable[[], int]) -> None:
    first = event_wait("first")
    open_wait(store, first)
    with pytest.raises(ApprovalError, match="must match the regular expression"):
        store.waits.send_event("default", "paid", "7", MISFIT)
    assert store.waits.send_event("default", "paid", "7", FITS).completed == (first.id,)
    assert writes_meanwhile() == 2
    assert [e.type for e in store.runs.events("run-1")].count("event.refused") == 1


def test_a_kept_event_that_a_new_wait_takes(store: Store, writes_meanwhile: Callable[[], int]) -> None:
    for data in (MISFIT, FITS):
        store.waits.send_event("default", "paid", "7", data)
    opened = event_wait()
    open_wait(store, opened)
    assert stored(store, opened).answer["data"] == FITS
    assert writes_meanwhile() == 2


def test_an_approval_by_the_clock(
    store: Store, clock: HandClock, writes_meanwhile: Callable[[], int]
) -> None:
    fits, misfits = (
        a_wait(label, form_schema=FORM, on_timeout="approve", timeout_data=data, deadline_at=at(30))
        for label, data in (("fits", FITS), ("misfits", MISFIT))
    )
    open_wait(store, fits)
    open_wait(store, misfits)
    clock.seconds = 60
    assert len(store.waits.settle_due("default", clock.now())) == 2
    assert stored(store, fits).answer["decision"] == "approved"
    assert stored(store, misfits).answer["decision"] == "timeout"
    assert writes_meanwhile() == 2


def test_a_form_that_was_stored_before_its_schema_was_refused(store: Store, clock: HandClock) -> None:
    form = {"type": "object", "properties": {"text": {"type": "string", "pattern": "(?=a)b"}}}
    gate = a_wait(form_schema=form, on_timeout="approve", deadline_at=at(3000))
    open_wait(store, gate)
    with pytest.raises(ApprovalError, match="uses look-ahead") as caught:
        store.waits.decide("default", gate.id, a_vote(data={"text": "ab"}))
    assert caught.value.code == "form"
    clock.seconds = 4000
    store.waits.settle_due("default", clock.now())
    assert "look-ahead" in stored(store, gate).answer["comment"]
