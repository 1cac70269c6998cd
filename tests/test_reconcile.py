"""The reconciler, on a real store and a Dagster instance: what it puts right, once, and what it leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.plan.objects import StepFailureData, UserFailureData
from dagster._utils.error import SerializableErrorInfo
from store_samples import take_lease

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.orchestration.reconcile import Correction, is_dagster_run_over, reconcile
from agentmesh_dagster.records import (
    Entry,
    Event,
    Run,
    RunStatus,
    Step,
    StepStatus,
    Wait,
    WaitKind,
    WaitStatus,
)
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.store import Store

AGO = timedelta(seconds=1)


@dg.job
def nothing() -> None:
    pass


@dg.job(name="agentmesh_finalize")
def finalize() -> None:
    pass


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as opened:
        yield opened


def now() -> datetime:
    return datetime.now(timezone.utc)


def start(
    store: Store,
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus,
    lease_for: timedelta | None,
    *,
    started_at: datetime | None = None,
) -> str:
    """A run that is at work, as its worker left it; `lease_for` from now on, None for no lease."""
    dagster_run = instance.create_run_for_job(nothing, status=status)
    return start_row(store, dagster_run.run_id, lease_for, started_at=started_at)


def start_row(
    store: Store, run_id: str, lease_for: timedelta | None, *, started_at: datetime | None = None
) -> str:
    run = Run(
        id=run_id,
        project="default",
        kind="workflow",
        slug="lost",
        version=1,
        publication=1,
        definition_hash="hash",
        status=RunStatus.RUNNING,
        started_at=started_at or now(),
        queued_at=started_at or now(),
        dagster_run_ids=(run_id,),
    )
    run_on_loop(store.journal.bind_run(run, run_id))
    if lease_for is not None:
        assert take_lease(store, run_id, run_id, length_s=lease_for.total_seconds())
    return run_id


def failures(instance: dg.DagsterInstance, run_id: str) -> int:
    return len(instance.all_logs(run_id, of_type=dg.DagsterEventType.RUN_FAILURE))


def test_a_run_whose_lease_ran_out_is_failed_in_both_places(store: Store, instance: dg.DagsterInstance):
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, -AGO)

    (correction,) = reconcile(store, instance, "default")

    assert (correction.run_id, correction.status) == (run_id, RunStatus.FAILED)
    run = store.runs.get(run_id)
    assert run.status is RunStatus.FAILED
    assert run.error["code"] == "worker-lost"
    dagster_run = instance.get_run_by_id(run_id)
    assert dagster_run is not None
    assert dagster_run.status is dg.DagsterRunStatus.FAILURE
    assert dagster_run.tags["agentmesh/status"] == "failed"
    assert reconcile(store, instance, "default") == []
    assert failures(instance, run_id) == 1
    # A retry may take it up at once.
    assert take_lease(store, "a retry", run_id)


def test_a_run_that_was_being_canceled_is_canceled(store: Store, instance: dg.DagsterInstance):
    run_id = start(store, instance, dg.DagsterRunStatus.CANCELING, -AGO)

    (correction,) = reconcile(store, instance, "default")

    assert correction.status is RunStatus.CANCELED
    assert store.runs.get(run_id).status is RunStatus.CANCELED
    dagster_run = instance.get_run_by_id(run_id)
    assert dagster_run is not None
    assert dagster_run.status is dg.DagsterRunStatus.CANCELED


@pytest.mark.parametrize(
    "lease_for", [timedelta(minutes=1), None], ids=["held", "between two step processes"]
)
def test_a_run_at_work_is_left_alone(store: Store, instance: dg.DagsterInstance, lease_for: timedelta | None):
    long_ago = now() - timedelta(hours=5)
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, lease_for, started_at=long_ago)

    assert reconcile(store, instance, "default") == []
    assert store.runs.get(run_id).status is RunStatus.RUNNING
    assert failures(instance, run_id) == 0


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (dg.DagsterRunStatus.FAILURE, RunStatus.FAILED),
        (dg.DagsterRunStatus.CANCELED, RunStatus.CANCELED),
        (dg.DagsterRunStatus.SUCCESS, RunStatus.FAILED),
    ],
)
def test_the_end_of_a_dagster_run_is_taken_over(
    store: Store, instance: dg.DagsterInstance, ended: dg.DagsterRunStatus, status: RunStatus
):
    run_id = start(store, instance, ended, None)

    (correction,) = reconcile(store, instance, "default")

    assert correction.status is status
    assert store.runs.get(run_id).status is status
    assert store.runs.get(run_id).finished_at is not None


def test_a_retry_need_not_wait_for_the_lease_of_a_worker_that_dagster_saw_die(
    store: Store, instance: dg.DagsterInstance
):
    run_id = start(store, instance, dg.DagsterRunStatus.FAILURE, timedelta(hours=1))

    assert len(reconcile(store, instance, "default")) == 1

    assert take_lease(store, "a retry", run_id)


@pytest.mark.parametrize(
    ("lease_for", "silent_for", "is_lost"),
    [
        (-AGO, timedelta(0), True),
        (timedelta(minutes=1), timedelta(days=1), False),
        (None, timedelta(minutes=1), False),
        (None, timedelta(hours=2), True),
    ],
)
def test_a_run_that_this_dagster_instance_does_not_know(
    store: Store,
    instance: dg.DagsterInstance,
    lease_for: timedelta | None,
    silent_for: timedelta,
    is_lost: bool,
):
    run_id = start_row(store, SystemClock().new_id(), lease_for, started_at=now() - silent_for)

    corrections = reconcile(store, instance, "default")

    assert [c.run_id for c in corrections] == ([run_id] if is_lost else [])
    assert (store.runs.get(run_id).status is RunStatus.FAILED) == is_lost


def test_of_many_reconcilers_at_once_one_reports(
    store: Store, other_store: Store, instance: dg.DagsterInstance
):
    runs = [start(store, instance, dg.DagsterRunStatus.STARTED, -AGO) for _ in range(5)]
    found: list[Correction] = []
    together = threading.Barrier(4)

    def work(mine: Store) -> None:
        together.wait(timeout=10)
        found.extend(reconcile(mine, instance, "default"))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (store, other_store) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert sorted(correction.run_id for correction in found) == sorted(runs)
    assert [failures(instance, run_id) for run_id in runs] == [1] * 5


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (RunStatus.SUCCEEDED, dg.DagsterRunStatus.SUCCESS),
        (RunStatus.FAILED, dg.DagsterRunStatus.FAILURE),
        (RunStatus.CANCELED, dg.DagsterRunStatus.CANCELED),
        (RunStatus.WAITING, dg.DagsterRunStatus.SUCCESS),
    ],
)
def test_dagster_hears_of_an_end_that_the_killed_worker_wrote_in_the_journal_alone(
    store: Store, instance: dg.DagsterInstance, written: RunStatus, shown: dg.DagsterRunStatus
):
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, -AGO)
    assert store.runs.set_status(run_id, (RunStatus.RUNNING,), written, output={"x": 1})

    (correction,) = reconcile(store, instance, "default")

    assert (correction.run_id, correction.status) == (run_id, written)
    dagster_run = instance.get_run_by_id(run_id)
    assert dagster_run is not None
    assert dagster_run.status is shown
    assert dagster_run.tags["agentmesh/status"] == written.value
    assert store.runs.get(run_id).status is written
    assert store.runs.lease(run_id) is None
    assert reconcile(store, instance, "default") == []


def test_a_waiting_run_whose_worker_died_while_it_was_canceled_is_canceled(
    store: Store, instance: dg.DagsterInstance
):
    run_id = start(store, instance, dg.DagsterRunStatus.CANCELING, -AGO)
    assert store.runs.set_status(run_id, (RunStatus.RUNNING,), RunStatus.WAITING)

    (correction,) = reconcile(store, instance, "default")

    assert correction.status is RunStatus.CANCELED
    assert store.runs.get(run_id).status is RunStatus.CANCELED
    dagster_run = instance.get_run_by_id(run_id)
    assert dagster_run is not None
    assert dagster_run.status is dg.DagsterRunStatus.CANCELED


@pytest.mark.parametrize("lease_for", [timedelta(minutes=1), None], ids=["held", "given back"])
def test_a_waiting_run_is_left_alone(store: Store, instance: dg.DagsterInstance, lease_for: timedelta | None):
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, lease_for)
    assert store.runs.set_status(run_id, (RunStatus.RUNNING,), RunStatus.WAITING)

    assert reconcile(store, instance, "default") == []
    assert store.runs.get(run_id).status is RunStatus.WAITING


@pytest.mark.parametrize(
    ("written", "lease_for", "since", "is_over"),
    [
        (RunStatus.WAITING, None, timedelta(0), False),
        (RunStatus.WAITING, None, timedelta(minutes=2), True),
        (RunStatus.WAITING, timedelta(minutes=5), timedelta(minutes=2), False),
        (RunStatus.WAITING, -AGO, timedelta(0), True),
        # Of a run that failed, steps may be at work in other processes, between two of which nobody has the lease.
        (RunStatus.FAILED, None, timedelta(minutes=59), False),
        (RunStatus.FAILED, None, timedelta(minutes=61), True),
        (RunStatus.FAILED, timedelta(minutes=5), timedelta(minutes=61), False),
        (RunStatus.FAILED, -AGO, timedelta(0), True),
        (RunStatus.CANCELED, None, timedelta(minutes=59), False),
        (RunStatus.CANCELED, None, timedelta(minutes=61), True),
        (RunStatus.SUCCEEDED, None, timedelta(0), False),
        (RunStatus.SUCCEEDED, None, timedelta(minutes=2), True),
    ],
)
def test_whether_the_last_dagster_run_is_over(
    store: Store,
    instance: dg.DagsterInstance,
    written: RunStatus,
    lease_for: timedelta | None,
    since: timedelta,
    is_over: bool,
):
    long_ago = now() - timedelta(hours=5)
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, lease_for, started_at=long_ago)
    assert store.runs.set_status(run_id, (RunStatus.RUNNING,), written, at=now() - since)

    run = store.runs.get(run_id)
    assert is_dagster_run_over(store, instance, run, SystemClock()) == is_over
    dagster_run = instance.get_run_by_id(run_id)
    assert dagster_run is not None
    assert dagster_run.is_finished == is_over


def test_another_project_is_left_alone(store: Store, instance: dg.DagsterInstance):
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, -AGO)

    assert reconcile(store, instance, "elsewhere") == []
    assert store.runs.get(run_id).status is RunStatus.RUNNING


class Later(SystemClock):
    """The machine's clock, so many seconds ahead."""

    def __init__(self, seconds: float) -> None:
        self.ahead = timedelta(seconds=seconds)

    def now(self) -> datetime:
        return super().now() + self.ahead


def test_a_failed_run_whose_other_steps_are_at_work_is_left_alone(store: Store, instance: dg.DagsterInstance):
    long_ago = now() - timedelta(hours=5)
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, None, started_at=long_ago)
    instance.add_run_tags(run_id, {"agentmesh/project": "default"})
    store.runs.set_status(run_id, (RunStatus.RUNNING,), RunStatus.FAILED, at=now() - timedelta(hours=2))
    # The process of another branch has written this, and ended; the next one has not begun.
    step = Step(
        run_id=run_id,
        key="branch",
        node_id="branch",
        node_type="code",
        dagster_run_id=run_id,
        status=StepStatus.SUCCEEDED,
    )
    run_on_loop(store.journal.record([Entry(step=replace(step, started_at=long_ago, finished_at=now()))]))

    assert reconcile(store, instance, "default", Later(61)) == []
    assert failures(instance, run_id) == 0
    (correction,) = reconcile(store, instance, "default", Later(3601))
    assert (correction.run_id, correction.status) == (run_id, RunStatus.FAILED)
    assert failures(instance, run_id) == 1


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING])
@pytest.mark.parametrize(
    ("tags", "is_lost"),
    [
        ({}, True),
        # Copied from the Dagster run that it re-executes.
        ({"agentmesh/status": "failed", "agentmesh/run_id": "parent"}, True),
        # Bound in another database, whose project has the same name.
        ({"agentmesh/status": "failed", "agentmesh/run_id": "itself"}, False),
        ({"agentmesh/status": "running", "agentmesh/run_id": "first"}, False),
    ],
)
def test_a_worker_that_died_before_it_had_bound_its_run(
    store: Store,
    instance: dg.DagsterInstance,
    tags: dict[str, str],
    is_lost: bool,
    status: dg.DagsterRunStatus,
):
    dagster_run = instance.create_run_for_job(nothing, tags={"agentmesh/project": "unbound", **tags})
    run_id = dagster_run.run_id
    if tags.get("agentmesh/run_id") == "itself":
        instance.add_run_tags(run_id, {"agentmesh/run_id": run_id})
    kinds = [dg.DagsterEventType.RUN_START, dg.DagsterEventType.RUN_CANCELING]
    for kind in kinds[: 1 + (status is dg.DagsterRunStatus.CANCELING)]:
        event = dg.DagsterEvent(event_type_value=kind.value, job_name="nothing")
        instance.report_dagster_event(event, run_id)

    assert reconcile(store, instance, "unbound", Later(590)) == []
    assert reconcile(store, instance, "default", Later(610)) == []
    found = reconcile(store, instance, "unbound", Later(610))

    ended = RunStatus.FAILED if status is dg.DagsterRunStatus.STARTED else RunStatus.CANCELED
    assert [(each.run_id, each.status) for each in found] == ([(run_id, ended)] if is_lost else [])
    told = instance.get_run_by_id(run_id)
    assert told is not None
    shown = (
        dg.DagsterRunStatus.FAILURE if status is dg.DagsterRunStatus.STARTED else dg.DagsterRunStatus.CANCELED
    )
    assert told.status is (shown if is_lost else status)
    instance.delete_run(run_id)


@pytest.mark.parametrize("status", [RunStatus.SUCCEEDED, RunStatus.WAITING])
def test_a_worker_that_died_after_it_gave_its_lease_back(
    store: Store, instance: dg.DagsterInstance, status: RunStatus
):
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, None)
    dagster_run = instance.get_run_by_id(run_id)
    assert dagster_run is not None
    instance.add_run_tags(run_id, {"agentmesh/project": "default"})

    store.runs.set_status(run_id, (RunStatus.RUNNING,), status, at=now())
    assert reconcile(store, instance, "default") == []

    (correction,) = reconcile(store, instance, "default", Later(61))
    assert (correction.run_id, correction.status) == (run_id, status)
    told = instance.get_run_by_id(run_id)
    assert told is not None
    assert told.status is dg.DagsterRunStatus.SUCCESS
    assert reconcile(store, instance, "default", Later(61)) == []


@pytest.mark.parametrize(
    ("tags", "code", "adopted"),
    [
        ({"dagster/will_retry": "false"}, "", True),
        ({"dagster/will_retry": "false"}, "run-output", False),
        ({"dagster/will_retry": "true"}, "", False),
        ({}, "", False),
        ({"dagster/will_retry": "false", "dagster/auto_retry_run_id": "other"}, "", False),
        (
            {
                "dagster/will_retry": "false",
                "dagster/failure_reason": "STEP_FAILURE",
                "dagster/retry_on_asset_or_op_failure": "false",
            },
            "",
            False,
        ),
    ],
)
def test_retries_that_dagster_gave_up_are_taken_over(
    store: Store, instance: dg.DagsterInstance, tags: dict[str, str], code: str, adopted: bool
):
    dagster_run = instance.create_run_for_job(nothing, status=dg.DagsterRunStatus.FAILURE, tags=tags)
    row = Run(
        id=dagster_run.run_id,
        project="default",
        kind="workflow",
        slug="lost",
        version=1,
        publication=1,
        definition_hash="hash",
        status=RunStatus.RUNNING,
        retries_left=2,
    )
    run_on_loop(store.journal.bind_run(row, row.id))
    store.runs.set_status(row.id, (RunStatus.RUNNING,), RunStatus.FAILED, at=now(), error={"code": code})
    assert store.claims.poll("default", now()).ready == ()

    reconcile(store, instance, "default")

    ready = [(run.run_id, run.reason) for run in store.claims.poll("default", now()).ready]
    assert ready == ([(row.id, "retry")] if adopted else [])


def finalizing(
    store: Store, instance: dg.DagsterInstance, status: dg.DagsterRunStatus, *, ended_at: datetime
) -> tuple[str, str]:
    """A run that has succeeded, and the Dagster run that finalizes it; that one holds no lease."""
    worked = instance.create_run_for_job(nothing, status=dg.DagsterRunStatus.SUCCESS)
    run = Run(
        id=worked.run_id,
        project="default",
        kind="workflow",
        slug="careful",
        version=1,
        publication=1,
        definition_hash="hash",
        status=RunStatus.RUNNING,
        started_at=ended_at,
        finalizers="always",
    )
    run_on_loop(store.journal.bind_run(run, run.id))
    events = [event(run.id, "run.completed", ended_at)]
    store.runs.set_status(run.id, (RunStatus.RUNNING,), RunStatus.SUCCEEDED, at=ended_at, events=events)
    claim = store.claims.claim(run.id, reason="finalize")
    assert claim is not None
    at_work = instance.create_run_for_job(
        finalize, tags={"agentmesh/project": "default"}, status=dg.DagsterRunStatus.STARTED
    )
    if status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceling(at_work)
    run_on_loop(store.journal.bind_run(run, at_work.run_id, claim=claim.id))
    return run.id, at_work.run_id


def event(run_id: str, type: str, at: datetime) -> Event:
    return Event(id=SystemClock().new_id(), at=at, project="default", run_id=run_id, type=type)


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE),
        (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED),
    ],
)
def test_a_killed_worker_that_finalized_a_run_is_reported_and_the_run_stays_as_it_ended(
    store: Store, instance: dg.DagsterInstance, status: dg.DagsterRunStatus, shown: dg.DagsterRunStatus
):
    run_id, at_work = finalizing(store, instance, status, ended_at=now())
    assert take_lease(store, at_work, run_id, length_s=-AGO.total_seconds())

    (correction,) = reconcile(store, instance, "default")

    assert (correction.run_id, correction.status) == (run_id, RunStatus.SUCCEEDED)
    told = instance.get_run_by_id(at_work)
    assert told is not None
    assert told.status is shown
    assert store.runs.get(run_id).status is RunStatus.SUCCEEDED
    assert store.runs.lease(run_id) is None
    assert reconcile(store, instance, "default") == []


def test_one_that_has_just_finalized_a_run_is_not_held_for_dead(store: Store, instance: dg.DagsterInstance):
    ended_at = now() - timedelta(hours=2)
    run_id, at_work = finalizing(store, instance, dg.DagsterRunStatus.STARTED, ended_at=ended_at)
    store.runs.add_events([event(run_id, "run.finalized", now())])

    assert reconcile(store, instance, "default") == []
    (correction,) = reconcile(store, instance, "default", Later(61))

    assert correction.run_id == run_id
    told = instance.get_run_by_id(at_work)
    assert told is not None
    assert told.status is dg.DagsterRunStatus.FAILURE


@pytest.mark.parametrize(("due_in", "is_over"), [(-AGO, True), (timedelta(hours=1), False)])
def test_a_run_whose_time_is_over_while_it_waits_is_failed_and_asks_nobody_any_more(
    store: Store, instance: dg.DagsterInstance, due_in: timedelta, is_over: bool
):
    dagster_run = instance.create_run_for_job(nothing, status=dg.DagsterRunStatus.SUCCESS)
    run_id = dagster_run.run_id
    row = Run(
        id=run_id,
        project="default",
        kind="workflow",
        slug="slow",
        version=1,
        publication=1,
        definition_hash="hash",
        status=RunStatus.RUNNING,
        started_at=now(),
        deadline_at=now() + due_in,
        retries_left=2,
    )
    run_on_loop(store.journal.bind_run(row, run_id))
    wait = Wait(
        id=SystemClock().new_id(),
        project="default",
        run_id=run_id,
        step_key="review",
        kind=WaitKind.HUMAN,
        created_at=now(),
    )
    step = Step(
        run_id=run_id,
        key="review",
        node_id="review",
        node_type="human",
        status=StepStatus.WAITING,
        dagster_run_id=run_id,
    )
    run_on_loop(store.journal.record([Entry(step=step, opened=(wait,))]))
    store.runs.set_status(run_id, (RunStatus.RUNNING,), RunStatus.WAITING)

    corrections = reconcile(store, instance, "default")

    assert [each.run_id for each in corrections] == ([run_id] if is_over else [])
    run = store.runs.get(run_id)
    assert run.status is (RunStatus.FAILED if is_over else RunStatus.WAITING)
    stands = store.waits.get("default", wait.id)
    assert stands.status is (WaitStatus.CANCELED if is_over else WaitStatus.OPEN)
    if is_over:
        assert run.error["code"] == "run-timeout"
        told = instance.get_run_by_id(run_id)
        assert told is not None
        assert told.tags["agentmesh/status"] == "failed"
        # A retry would be late too.
        assert run.retries_left == 0
        assert reconcile(store, instance, "default") == []


OWN = {
    "code": "disk-full",
    "domain": "store",
    "category": "system",
    "message": "the database could not write",
}


@pytest.mark.parametrize(
    ("raised", "class_name", "code", "said"),
    [
        (OWN, None, "disk-full", "the database could not write"),
        (None, "ValueError", "dagster-run-failed", "Dagster run ended as FAILURE: no such thing; retry it"),
        (None, "ChildProcessCrashException", "worker-lost", "no such thing"),
        (None, None, "worker-lost", "no such thing"),
    ],
)
@pytest.mark.parametrize("status", [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED])
def test_the_reason_that_dagster_knows_is_the_error_of_a_run_that_could_not_write_it(
    store: Store,
    instance: dg.DagsterInstance,
    status: dg.DagsterRunStatus,
    raised: dict[str, Any] | None,
    class_name: str | None,
    code: str,
    said: str,
):
    run_id = start(store, instance, status, -AGO)
    metadata = {"error": dg.MetadataValue.json(raised)}
    failure = StepFailureData(
        error=SerializableErrorInfo("no such thing\nand more\n", [], class_name),
        user_failure_data=None if raised is None else UserFailureData("its words", metadata=metadata),
    )
    event = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.STEP_FAILURE.value,
        job_name="nothing",
        step_key="write",
        event_specific_data=failure,
    )
    instance.report_dagster_event(event, run_id)

    (correction,) = reconcile(store, instance, "default")

    assert correction.status is RunStatus.FAILED
    error = store.runs.get(run_id).error
    assert error["code"] == code
    if status is dg.DagsterRunStatus.STARTED:
        said = said.replace("Dagster run ended as FAILURE", "its worker died")
    assert said in error["message"]
    assert "and more" not in error["message"]


def test_a_run_whose_dagster_run_was_deleted_says_so(store: Store, instance: dg.DagsterInstance):
    run_id = start(store, instance, dg.DagsterRunStatus.STARTED, -AGO)
    instance.delete_run(run_id)

    reconcile(store, instance, "default")

    error = store.runs.get(run_id).error
    assert error["code"] == "dagster-run-missing"
    assert "deleted, or DAGSTER_HOME names another" in error["message"]
    # `agentmesh runs retry` would refuse.
    assert "retry" not in error["message"]
