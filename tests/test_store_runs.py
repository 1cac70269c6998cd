"""Runs as commands and sensors see them: lists, traces, stats, unfinished ones, compare-and-set."""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import datetime

import pytest
from sqlalchemy import text
from store_samples import a_run, a_step, a_vote, a_wait, an_event, at, take_lease

from agentmesh_dagster.errors import NotFound
from agentmesh_dagster.records import Entry, RunSource, RunStatus, StepStatus
from agentmesh_dagster.store import RunStats, Store, open_store


class SteppingClock:
    """Each look is one second later."""

    def __init__(self) -> None:
        self._seconds = 0

    def now(self) -> datetime:
        self._seconds += 1
        return at(self._seconds)

    def monotonic_s(self) -> float:
        return float(self._seconds)

    def new_id(self) -> str:
        return str(uuid.uuid4())


@pytest.fixture
def clocked(database_url: str):
    with open_store(database_url, clock=SteppingClock()) as store:
        yield store


def bind(store: Store, run_id: str, **fields: object) -> None:
    asyncio.run(store.journal.bind_run(a_run(run_id, **fields), run_id))


def finish(store: Store, run_id: str, status: RunStatus, seconds: float) -> None:
    assert asyncio.run(store.journal.finish_run(run_id, status, at=at(seconds)))


def test_runs_are_listed_newest_first_and_filtered(clocked: Store):
    clocked.catalog.create_project("second")
    bind(clocked, "a", source=RunSource.CLI)
    bind(clocked, "b", slug="other")
    bind(clocked, "c", parent_run_id="a")
    bind(clocked, "d", project="second")
    finish(clocked, "b", RunStatus.FAILED, 5)

    def ids(**filters: object) -> list[str]:
        return [run.id for run in clocked.runs.list("default", **filters)]

    assert ids() == ["c", "b", "a"]
    assert ids(limit=2) == ["c", "b"]
    assert ids(kind="workflow", slug="refunds") == ["c", "a"]
    assert ids(kind="agent") == []
    assert ids(status=RunStatus.FAILED) == ["b"]
    assert ids(status=[RunStatus.FAILED, RunStatus.RUNNING]) == ["c", "b", "a"]
    assert ids(source=RunSource.CLI) == ["a"]
    assert ids(parent_run_id="a") == ["c"]
    assert ids(triggered_by="nobody") == []
    assert ids(after="c") == ["b", "a"]
    assert ids(after="b", limit=1) == ["a"]
    assert ids(after="a") == []
    assert ids(since=at(0), until=at(1)) == []
    assert ids(since=at(0), until=at(10_000)) == ["c", "b", "a"]
    assert [run.id for run in clocked.runs.list("second")] == ["d"]
    with pytest.raises(NotFound) as missing:
        clocked.runs.get("nothing")
    assert missing.value.code == "no-run"


def test_steps_come_in_the_order_in_which_they_started(store: Store):
    bind(store, "run-1")

    async def record() -> None:
        await store.journal.record([Entry(step=a_step("z", started_at=at(1)))])
        await store.journal.record([Entry(step=a_step("a", started_at=at(2)))])
        await store.journal.record([Entry(step=a_step("m", started_at=at(0)))])
        await store.journal.record(
            [Entry(step=a_step("k", status=StepStatus.PENDING, started_at=None, finished_at=None))]
        )

    asyncio.run(record())
    assert [step.key for step in store.runs.steps("run-1")] == ["m", "z", "a", "k"]


def test_stats(clocked: Store):
    assert clocked.runs.stats("default", "workflow", "refunds") == RunStats(runs=0)
    for index in range(1, 21):
        bind(clocked, f"r{index}")
        asyncio.run(
            clocked.journal.record(
                [Entry(step=a_step(run_id=f"r{index}", input_tokens=10, output_tokens=1, cost_usd=0.5))]
            )
        )
        finish(clocked, f"r{index}", RunStatus.FAILED if index % 4 == 0 else RunStatus.SUCCEEDED, index)
    bind(clocked, "canceled")
    finish(clocked, "canceled", RunStatus.CANCELED, 0)
    bind(clocked, "running")
    bind(clocked, "foreign", slug="other")

    stats = clocked.runs.stats("default", "workflow", "refunds")
    assert stats.runs == 22
    assert stats.by_status == {"succeeded": 15, "failed": 5, "canceled": 1, "running": 1}
    assert stats.success_rate == 0.75
    assert stats.mean_duration_ms == 10_000
    assert stats.p95_duration_ms == 19_000
    assert (stats.input_tokens, stats.output_tokens, stats.cost_usd) == (200, 20, 10.0)
    assert stats.last_run_id == "running"
    assert stats.last_run_at is not None


def test_a_status_is_moved_by_compare_and_set(store: Store):
    bind(store, "run-1", status=RunStatus.PENDING, started_at=None)
    assert not store.runs.set_status("run-1", [RunStatus.RUNNING], RunStatus.FAILED, events=[an_event("no")])
    assert store.runs.set_status("run-1", [RunStatus.PENDING], RunStatus.RUNNING, at=at(1))
    assert store.runs.get("run-1").started_at == at(1)
    open_ones = [RunStatus.PENDING, RunStatus.RUNNING, RunStatus.WAITING]
    assert store.runs.set_status(
        "run-1",
        open_ones,
        RunStatus.FAILED,
        at=at(4),
        error={"code": "lost"},
        events=[an_event("run.failed")],
    )
    found = store.runs.get("run-1")
    assert (found.status, found.error, found.duration_ms) == (RunStatus.FAILED, {"code": "lost"}, 3000)
    assert [event.type for event in store.runs.events("run-1")] == ["run.failed"]
    store.runs.add_events([an_event("note")])
    assert [event.type for event in store.runs.events("run-1")] == ["run.failed", "note"]
    with pytest.raises(NotFound):
        store.runs.add_events([an_event(run_id="nothing")])
    with pytest.raises(NotFound):
        store.runs.set_status("nothing", open_ones, RunStatus.FAILED)


def test_reconciler_and_worker_at_once_end_a_run_once(store: Store, other_store: Store):
    for index in range(10):
        run_id = f"r{index}"
        bind(store, run_id)
        barrier = threading.Barrier(2)
        moved: list[bool] = []

        def reconcile(
            run_id: str = run_id, barrier: threading.Barrier = barrier, moved: list[bool] = moved
        ) -> None:
            barrier.wait(30)
            moved.append(other_store.runs.set_status(run_id, [RunStatus.RUNNING], RunStatus.FAILED))

        thread = threading.Thread(target=reconcile)
        thread.start()
        barrier.wait(30)
        moved.append(asyncio.run(store.journal.finish_run(run_id, RunStatus.SUCCEEDED, at=at(1))))
        thread.join(30)
        assert sorted(moved) == [False, True]


def test_unfinished_runs_come_with_their_leases(store: Store):
    store.catalog.create_project("second")
    bind(store, "a")
    bind(store, "b", project="second")
    bind(store, "c")
    finish(store, "c", RunStatus.SUCCEEDED, 1)
    assert take_lease(store, "dagster-a", "a")
    assert take_lease(store, "dagster-c", "c")
    found = {each.run.id: each.lease for each in store.runs.unfinished()}
    assert set(found) == {"a", "b"}
    assert found["b"] is None
    assert found["a"] is not None
    assert (found["a"].dagster_run_id, found["a"].is_live) == ("dagster-a", True)
    assert 55 < found["a"].left_s <= 60
    assert [each.run.id for each in store.runs.unfinished("second")] == ["b"]


def test_runs_that_stand_still_under_a_lease_that_ran_out_are_abandoned(store: Store):
    for run_id, status in (
        ("failed", RunStatus.FAILED),
        ("waiting", RunStatus.WAITING),
        ("running", None),
        ("given-back", RunStatus.WAITING),
        ("live", RunStatus.WAITING),
    ):
        bind(store, run_id)
        assert take_lease(store, f"d-{run_id}", run_id, length_s=60 if run_id == "live" else -1)
        if status is not None:
            finish(store, run_id, status, 1)
    asyncio.run(store.journal.release_lease("given-back", "d-given-back"))
    found = {each.run.id: each.lease for each in store.runs.abandoned("default")}
    assert set(found) == {"failed", "waiting"}
    lease = found["waiting"]
    assert lease is not None
    assert lease.dagster_run_id == "d-waiting"
    store.runs.release_lease(lease)
    assert [each.run.id for each in store.runs.abandoned("default")] == ["failed"]


def test_the_rows_of_a_deleted_run_go_with_it(store: Store):
    bind(store, "run-1")
    gate = a_wait(notify=[{"type": "log"}])
    asyncio.run(store.journal.record([Entry(step=a_step(), events=(an_event(),), opened=(gate,))]))
    store.waits.decide("default", gate.id, a_vote())
    assert store.claims.claim("run-1", reason="resume") is None
    assert asyncio.run(store.journal.finish_run("run-1", RunStatus.WAITING, at=at(1)))
    assert store.claims.claim("run-1", reason="resume") is not None
    assert take_lease(store, "d")
    with store._database.write() as connection:
        connection.execute(text("DELETE FROM runs"))
    with store._database.read() as connection:
        for table in ("steps", "events", "dagster_runs", "leases", "claims", "waits", "votes", "notices"):
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0
