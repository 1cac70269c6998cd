"""Claims: one continuation for each time that a run can go on, whoever asks at once, and whoever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from sqlalchemy import event as engine_event
from store_samples import HandClock, a_run, a_step, a_vote, a_wait, an_event, at, end_leases, take_lease

from agentmesh_dagster.constants import ENV_FAULT, EVENT_RUN_ENDED
from agentmesh_dagster.errors import AgentMeshError, ApprovalError, NotFound, RunRefused
from agentmesh_dagster.faults import arm_from_environment
from agentmesh_dagster.records import Claim, Entry, ReadyRun, Run, RunStatus, StepStatus, WaitKind, WaitStatus
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.store.ready_runs import window_s


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(database_url: str, clock: HandClock) -> Iterator[Store]:
    with open_store(database_url, clock=clock) as opened:
        yield opened


async def wait_at_gate(store: Store, run_id: str = "run-1", *, is_decided: bool = True, **fields: Any) -> str:
    """Makes a run that waits at a gate, which somebody has decided; returns the gate's id."""
    gate = a_wait(run_id=run_id, **fields)
    await store.journal.bind_run(a_run(run_id), run_id)
    await store.journal.record(
        [Entry(step=a_step("gate", run_id, status=StepStatus.WAITING, finished_at=None), opened=(gate,))]
    )
    await store.journal.finish_run(run_id, RunStatus.WAITING, at=at(1))
    if is_decided:
        store.waits.decide("default", gate.id, a_vote())
    return gate.id


def bind(store: Store, dagster_run_id: str, claim: Claim | None = None, run_id: str = "run-1") -> Run:
    return run(
        store.journal.bind_run(
            a_run(run_id), dagster_run_id, [an_event()], claim=None if claim is None else claim.id
        )
    )


def claimed(store: Store, seconds: float = 0, *, reason: str = "gate", run_id: str = "run-1") -> Claim:
    claim = store.claims.claim(run_id, reason=reason, now=at(seconds))
    assert claim is not None
    return claim


def ready(store: Store, seconds: float = 0) -> list[str]:
    return [each.run_id for each in store.claims.poll("default", at(seconds)).ready]


def end(store: Store, status: RunStatus, run_id: str = "run-1") -> None:
    assert run(store.journal.finish_run(run_id, status, at=at(2)))


# What is ready ----------------------------------------------------------------------------------------------


def test_a_run_is_ready_when_it_waits_and_an_answer_has_come(store: Store):
    gate = run(wait_at_gate(store, is_decided=False))
    other = a_wait("other")
    run(store.journal.record([Entry(step=a_step("gate", status=StepStatus.WAITING), opened=(other,))]))
    poll = store.claims.poll("default", at(0))
    assert (poll.ready, poll.has_due, poll.has_notices) == ((), False, False)
    assert store.claims.claim("run-1", reason="gate") is None

    store.waits.decide("default", gate, a_vote())
    [found] = store.claims.poll("default", at(0)).ready
    assert found == ReadyRun(
        run_id="run-1",
        kind="workflow",
        slug="refunds",
        publication=1,
        definition_hash="abc",
        dagster_run_ids=("run-1",),
        reason="gate",
    )
    assert store.claims.poll("second", at(0)).ready == ()

    claim = claimed(store)
    assert ready(store) == []
    bind(store, "second", claim)
    assert ready(store) == []
    # An answer that the continuation has not taken up asks for another one.
    store.waits.decide("default", other.id, a_vote())
    run(store.journal.record([Entry(step=a_step("gate", status=StepStatus.RUNNING), used=(gate,))]))
    assert ready(store) == []
    end(store, RunStatus.WAITING)
    [again] = store.claims.poll("default", at(0)).ready
    assert again.dagster_run_ids == ("run-1", "second")
    bind(store, "third", claimed(store))
    run(store.journal.record([Entry(step=a_step("gate", status=StepStatus.RUNNING), used=(other.id,))]))
    end(store, RunStatus.WAITING)
    assert ready(store) == []


def test_an_answer_in_a_run_that_failed_waits_for_a_retry(store: Store):
    gate = run(wait_at_gate(store, is_decided=False))
    bind(store, "second")
    end(store, RunStatus.FAILED)
    store.waits.decide("default", gate, a_vote())
    assert ready(store) == []
    assert store.claims.claim("run-1", reason="gate") is None
    bind(store, "third", claimed(store, reason="resume"))
    end(store, RunStatus.WAITING)
    assert ready(store) == ["run-1"]


def test_a_run_whose_lease_is_live_is_not_ready(store: Store):
    run(wait_at_gate(store))
    assert take_lease(store, "run-1")
    assert ready(store, 29) == []
    assert store.claims.claim("run-1", reason="gate", now=at(29)) is None
    assert store.claims.claim("run-1", reason="resume", now=at(29)) is None
    end_leases(store)
    assert ready(store, 30) == ["run-1"]
    assert claimed(store, 30)


def test_those_that_could_go_on_first_come_first(store: Store):
    for index in (3, 1, 2):
        gate = run(wait_at_gate(store, f"run-{index}", is_decided=False))
        store.waits.decide("default", gate, a_vote(at=at(index)))
    assert ready(store) == ["run-1", "run-2", "run-3"]


def test_a_poll_is_one_statement_that_reads_no_table_from_end_to_end(store: Store):
    run(wait_at_gate(store, is_decided=False))
    seen: list[tuple[str, Any]] = []
    engine_event.listen(
        store._database.engine, "before_cursor_execute", lambda *call: seen.append((call[2], call[3]))
    )
    store.claims.poll("default", at(0))
    [(statement, parameters)] = [each for each in seen if not each[0].startswith("BEGIN")]
    if store.url.startswith("sqlite"):
        with store._database.read() as connection:
            plan = [
                row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
        tables = ("runs", "waits", "leases", "inbox", "notices", "dagster_runs")
        assert [line for line in plan if line.startswith(tuple(f"SCAN {name}" for name in tables))] == []
        assert any("ix_waits_project_run_id_ready_at" in line for line in plan)
        for name in ("retried", "starting", "unfinalized"):
            assert any(f"ix_runs_project_{name}" in line for line in plan)
        assert not any("ix_runs_status" in line for line in plan)
        assert any("ix_waits_project_next_at" in line for line in plan)


# Claims and bindings ----------------------------------------------------------------------------------------


def test_a_claim_is_bound_once_and_a_copy_of_it_is_told_apart(store: Store, clock: HandClock):
    run(wait_at_gate(store))
    clock.seconds = 100
    claim = claimed(store, 100)
    assert claim == Claim(id=claim.id, run_id="run-1", reason="gate", made_at=at(100))
    assert run(store.journal.claim(claim.id)) == claim
    assert run(store.journal.claim("nothing")) is None

    bound = bind(store, "second", claim)
    assert (bound.status, bound.resumed_at) == (RunStatus.RUNNING, at(100))
    assert bound.dagster_run_ids == ("run-1", "second")
    found = run(store.journal.claim(claim.id))
    assert (found.dagster_run_id, found.is_current) == ("second", True)
    # The same Dagster run says it again, as after an answer that was lost; its events are written once.
    assert bind(store, "second", claim) == bound
    assert len(store.runs.events("run-1", type="step.completed")) == 1
    with pytest.raises(RunRefused, match="the Dagster run 'second' came with it before") as copy:
        bind(store, "copy", claim)
    assert copy.value.code == "claim-lost"
    assert run(store.journal.run_of("copy")) is None
    assert store.runs.get("run-1") == bound


def test_a_claim_that_nobody_binds_in_time_is_given_back(store: Store):
    run(wait_at_gate(store))
    first = claimed(store, 0)
    assert store.claims.claim("run-1", reason="gate", now=at(59)) is None
    assert ready(store, 59) == []
    [late] = store.claims.poll("default", at(60)).ready
    assert late.expired_claim == first.id
    # Its Dagster run is still in the queue.
    assert store.claims.renew(first.id, at(60))
    assert ready(store, 119) == []
    second = claimed(store, 120)
    assert run(store.journal.claim(first.id)).is_current is False
    assert not store.claims.renew(first.id, at(121))

    with pytest.raises(RunRefused, match="it was given back") as lost:
        bind(store, "late", first)
    assert lost.value.code == "claim-lost"
    assert run(store.journal.run_of("late")) is None
    run(store.journal.spend_claim(first.id, "late"))
    run(store.journal.spend_claim(first.id, "later"))
    spent = run(store.journal.claim(first.id))
    assert (spent.dagster_run_id, spent.is_current) == ("late", False)
    assert store.runs.get("run-1").status is RunStatus.WAITING
    assert bind(store, "second", second).status is RunStatus.RUNNING
    assert not store.claims.renew(second.id, at(130))


def test_each_claim_waits_twice_as_long_as_the_one_before(store: Store):
    run(wait_at_gate(store))
    moment = 0.0
    claim = claimed(store, moment)
    for misses in range(9):
        claim = claimed(store, moment) if misses else claim
        window = window_s(misses)
        assert ready(store, moment + window - 1) == []
        assert store.claims.claim("run-1", reason="gate", now=at(moment + window - 1)) is None
        moment += window
        assert ready(store, moment) == ["run-1"]
    assert [window_s(misses) for misses in (0, 1, 5, 6, 99)] == [60, 120, 1920, 3600, 3600]
    # An expired one that nobody has replaced still counts, and whoever binds it begins anew.
    bind(store, "second", claim)
    end(store, RunStatus.WAITING)
    claimed(store, moment)
    assert ready(store, moment + 60) == ["run-1"]


def test_a_claim_of_another_run_or_of_none_is_refused(store: Store):
    run(wait_at_gate(store))
    run(wait_at_gate(store, "run-2"))
    claim = claimed(store)
    for wrong in (claim, Claim(id="nothing", run_id="run-2", reason="gate", made_at=at(0))):
        with pytest.raises(RunRefused) as refused:
            bind(store, "second", wrong, "run-2")
        assert refused.value.code == "claim-lost"
    with pytest.raises(RunRefused):
        bind(store, "new", claim, "new")
    with pytest.raises(NotFound):
        store.runs.get("new")
    with pytest.raises(NotFound):
        store.claims.claim("nothing", reason="gate")
    assert bind(store, "second", claim).status is RunStatus.RUNNING


def test_a_dagster_run_without_a_claim_withdraws_the_one_that_nobody_has_bound(store: Store):
    run(wait_at_gate(store))
    claim = claimed(store)
    assert bind(store, "by-hand").status is RunStatus.RUNNING
    assert run(store.journal.claim(claim.id)).is_current is False
    with pytest.raises(RunRefused):
        bind(store, "late", claim)
    end(store, RunStatus.WAITING)
    assert ready(store) == ["run-1"]


def test_a_claim_does_not_count_for_a_run_that_is_over(store: Store):
    run(wait_at_gate(store))
    claim = claimed(store)
    end(store, RunStatus.SUCCEEDED)
    with pytest.raises(RunRefused, match="succeeded by now"):
        bind(store, "second", claim)
    assert store.claims.claim("run-1", reason="resume") is None


def test_a_canceled_run_goes_on_only_when_somebody_asks(store: Store):
    run(wait_at_gate(store))
    open_gate = a_wait("open")
    run(store.journal.record([Entry(step=a_step("gate", status=StepStatus.WAITING), opened=(open_gate,))]))
    end(store, RunStatus.CANCELED)
    assert ready(store) == []
    for reason in ("gate", "retry"):
        assert store.claims.claim("run-1", reason=reason) is None
    bind(store, "second", claimed(store, reason="resume"))
    assert store.waits.get("default", open_gate.id).status is WaitStatus.OPEN


# Retries ----------------------------------------------------------------------------------------------------


def test_a_run_that_failed_after_a_claim_is_retried_while_it_may_be(store: Store):
    run(store.journal.bind_run(a_run(retries_left=2), "run-1"))
    gate = a_wait()
    run(store.journal.record([Entry(step=a_step("gate", status=StepStatus.WAITING), opened=(gate,))]))
    assert store.runs.get("run-1").retries_left == 2
    end(store, RunStatus.WAITING)
    store.waits.decide("default", gate.id, a_vote())
    assert bind(store, "second", claimed(store)).retries_left == 2
    for left, dagster_run_id in ((1, "third"), (0, "fourth")):
        end(store, RunStatus.FAILED)
        [found] = store.claims.poll("default", at(0)).ready
        assert (found.reason, found.dagster_run_ids[-1] != dagster_run_id) == ("retry", True)
        bound = bind(store, dagster_run_id, claimed(store, reason="retry"))
        assert (bound.retries_left, bound.status) == (left, RunStatus.RUNNING)
    end(store, RunStatus.FAILED)
    assert ready(store) == []
    assert store.claims.claim("run-1", reason="retry") is None
    assert bind(store, "fifth", claimed(store, reason="resume")).retries_left == 0


def test_dagster_retries_its_own_runs_and_counts_for_agentmesh_too(store: Store):
    run(store.journal.bind_run(a_run(retries_left=2), "run-1"))
    end(store, RunStatus.FAILED)
    assert ready(store) == []
    assert store.claims.claim("run-1", reason="retry") is None
    assert bind(store, "retry").retries_left == 1
    # A worker that was killed left the run as running.
    assert bind(store, "again").retries_left == 0
    end(store, RunStatus.FAILED)
    assert bind(store, "by-hand").retries_left == 0
    end(store, RunStatus.WAITING)
    assert bind(store, "more").retries_left == 0
    # The same Dagster run again, from another process of its, is no retry.
    run(store.journal.bind_run(a_run("run-2", retries_left=2), "run-2"))
    assert run(store.journal.bind_run(a_run("run-2"), "run-2")).retries_left == 2


def test_a_retry_that_nobody_binds_is_claimed_again(store: Store):
    run(store.journal.bind_run(a_run(retries_left=1), "run-1"))
    end(store, RunStatus.FAILED)
    bind(store, "second", claimed(store, reason="resume"))
    assert store.runs.get("run-1").retries_left == 1
    end(store, RunStatus.FAILED)
    first = claimed(store, 0, reason="retry")
    assert ready(store, 59) == []
    [again] = store.claims.poll("default", at(60)).ready
    assert (again.reason, again.expired_claim) == ("retry", first.id)
    assert bind(store, "third", claimed(store, 60, reason="retry")).retries_left == 0


# Many at once, and killed -----------------------------------------------------------------------------------


def _claim_all(url: str, seconds: float, launched: str, fault: str, barrier: Any) -> None:
    """Claims what is ready until nothing is, and writes down each continuation that it launches."""
    clock = HandClock()
    clock.seconds = seconds
    if fault:
        os.environ[ENV_FAULT] = fault
        arm_from_environment()
    with open_store(url, clock=clock) as store, Path(launched).open("a", buffering=1) as log:
        barrier.wait(60)
        while found := store.claims.poll("default", clock.now()).ready:
            for each in found:
                claim = store.claims.claim(each.run_id, reason=each.reason)
                if claim is not None:
                    log.write(f"{claim.run_id} {claim.id}\n")


def _race(url: str, seconds: float, folder: Path, faults: dict[int, str], count: int = 8) -> list[int | None]:
    context = forked.context()
    barrier = context.Barrier(count)
    folder.mkdir()
    processes = [
        context.Process(
            target=_claim_all,
            args=(url, seconds, str(folder / str(worker)), faults.get(worker, ""), barrier),
        )
        for worker in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    return [process.exitcode for process in processes]


def _launched(folder: Path) -> list[list[str]]:
    return [line.split() for log in folder.iterdir() for line in log.read_text().splitlines()]


async def _wait_at_gates(store: Store, count: int) -> None:
    for start in range(0, count, 50):
        await asyncio.gather(
            *(wait_at_gate(store, f"run-{index}") for index in range(start, min(count, start + 50)))
        )


async def _bind_all(store: Store, launched: list[list[str]]) -> None:
    journal = store.journal
    await asyncio.gather(
        *(journal.bind_run(a_run(run_id), f"d-{run_id}", claim=claim_id) for run_id, claim_id in launched)
    )


def test_eight_processes_claim_each_of_200_runs_once(postgres_url: str, tmp_path: Path):
    with open_store(postgres_url) as store:
        run(_wait_at_gates(store, 200))
        assert len(ready(store)) == 200
        assert _race(postgres_url, 0, tmp_path / "launched", {}) == [0] * 8
        launched = _launched(tmp_path / "launched")
        assert sorted(run_id for run_id, _ in launched) == sorted(f"run-{index}" for index in range(200))
        assert len({claim_id for _, claim_id in launched}) == 200
        assert ready(store) == []


@pytest.mark.parametrize("fault", ["claim.before#5", "claim.after#5"])
def test_a_process_that_is_killed_between_loses_no_run_and_doubles_none(
    postgres_url: str, tmp_path: Path, fault: str
):
    with open_store(postgres_url) as store:
        run(_wait_at_gates(store, 200))
        codes = _race(postgres_url, 0, tmp_path / "first", {3: fault})
        assert codes == [-signal.SIGKILL if worker == 3 else 0 for worker in range(8)]
        first = _launched(tmp_path / "first")
        counts = Counter(run_id for run_id, _ in first)
        assert set(counts.values()) == {1}
        # What the killed one had claimed and not launched; another may have had the fifth before it.
        lost = {f"run-{index}" for index in range(200)} - set(counts)
        assert len(lost) <= 1
        assert ready(store, 59) == []
        run(_bind_all(store, first))
        assert set(ready(store, 60)) == lost

        assert _race(postgres_url, 60, tmp_path / "second", {}, count=2) == [0] * 2
        second = _launched(tmp_path / "second")
        assert {run_id for run_id, _ in second} == lost
        assert len(second) == len(lost)
        assert ready(store, 61) == []


def _work(url: str, worker: int, barrier: Any, results: Any) -> None:
    """What meets at the rows of a few runs: decisions, events, settling, claims, bindings, records, ends."""
    refused: Counter[str] = Counter()
    with open_store(url) as store:
        barrier.wait(60)
        for index in range(25):
            run_id = f"run-{(index + worker) % 4}"
            try:
                if worker % 4 == 0:
                    kind = (WaitKind.EVENT, WaitKind.HUMAN)[index % 2]
                    other = f"run-{(index + 1) % 4}"
                    name, key = (("e", ""), (EVENT_RUN_ENDED, other))[index // 2 % 2]
                    event = {"event_name": name, "event_key": key, "deadline_at": at(30)}
                    wait = a_wait(f"{worker}-{index}", run_id, kind=kind, **event)
                    step = a_step(wait.label, run_id, status=StepStatus.WAITING)
                    run(store.journal.record([Entry(step=step, opened=(wait,))]))
                elif worker % 4 == 1:
                    store.waits.send_event("default", "e", "", index)
                    for each in store.waits.list("default", run_id=run_id, statuses=[WaitStatus.OPEN]):
                        store.waits.decide("default", each.id, a_vote())
                elif worker % 4 == 2:
                    run(store.journal.finish_run(run_id, RunStatus.WAITING, at=at(index)))
                    claim = store.claims.claim(run_id, reason="resume")
                    if claim is not None:
                        bind(store, f"d-{worker}-{index}", claim, run_id)
                else:
                    store.waits.settle_due("default", at(index))
                    store.runs.set_status(
                        run_id, [RunStatus.RUNNING], (RunStatus.CANCELED, RunStatus.FAILED)[index % 2]
                    )
                    bind(store, f"d-{worker}-{index}", None, run_id)
            except (ApprovalError, RunRefused) as error:
                refused[error.code] += 1
            except AgentMeshError as error:
                results.put(f"{type(error).__name__} {error.code}: {error.message}")
                return
    results.put(None)


def _open(store: Store, run_id: str, wait: Any) -> None:
    from dataclasses import replace

    from agentmesh_dagster.records import WaitKind

    opened = replace(wait, kind=WaitKind(wait.kind), deadline_at=at(30))
    run(
        store.journal.record(
            [Entry(step=a_step(f"gate-{wait.label}", run_id, status=StepStatus.WAITING), opened=(opened,))]
        )
    )


def test_writers_of_every_kind_never_wait_for_each_other_in_a_circle(store: Store, database_url: str):
    async def make() -> None:
        for index in range(4):
            await store.journal.bind_run(a_run(f"run-{index}", parent_run_id="run"), f"run-{index}")

    run(make())
    context = forked.context()
    barrier, results = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=_work, args=(database_url, worker, barrier, results)) for worker in range(8)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [None] * 8
    for process in processes:
        process.join(30)
