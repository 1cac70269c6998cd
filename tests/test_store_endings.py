"""How runs end: who waits for that, what it asks for, who does it; runs that others start; how long work took."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from store_samples import (
    NOON,
    HandClock,
    a_lease,
    a_run,
    a_step,
    a_vote,
    a_wait,
    an_event,
    at,
    end_leases,
    take_lease,
)

from agentmesh_dagster.constants import EVENT_RUN_ENDED
from agentmesh_dagster.errors import ApprovalError, NotFound, RunRefused
from agentmesh_dagster.records import (
    Claim,
    Entry,
    ReadyRun,
    Run,
    RunSource,
    RunStatus,
    StepStatus,
    Wait,
    WaitKind,
    WaitStatus,
)
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.store.claims import MAX_FINALIZINGS
from agentmesh_dagster.store.ready_runs import LEFT_TO_DAGSTER_S
from agentmesh_dagster.store.run_rows import lock_runs

LOST = {"code": "lost", "message": "lost"}
LATE = {"code": "run-timeout", "message": "its time is over"}


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(database_url: str, clock: HandClock) -> Iterator[Store]:
    with open_store(database_url, clock=clock) as opened:
        yield opened


def bind(store: Store, dagster_run_id: str = "run-1", claim: Claim | None = None, **fields: Any) -> Run:
    claim_id = None if claim is None else claim.id
    return run(store.journal.bind_run(a_run(**fields), dagster_run_id, claim=claim_id))


def end(
    store: Store, status: RunStatus, run_id: str = "run-1", *, seconds: float = 10, **fields: Any
) -> None:
    assert run(store.journal.finish_run(run_id, status, at=at(seconds), **fields))


def offered(store: Store, seconds: float = 10) -> list[tuple[str, str]]:
    return [(each.run_id, each.reason) for each in store.claims.poll("default", at(seconds)).ready]


def claimed(store: Store, reason: str = "finalize", seconds: float = 10, run_id: str = "run-1") -> Claim:
    claim = store.claims.claim(run_id, reason=reason, now=at(seconds))
    assert claim is not None
    return claim


def open_wait(store: Store, *waits: Wait) -> None:
    for wait in waits:
        step = a_step(wait.step_key, wait.run_id, status=StepStatus.WAITING, finished_at=None)
        run(store.journal.record([Entry(step=step, opened=(wait,))]))


def stored(store: Store, wait: Wait) -> Wait:
    return store.waits.get(wait.project, wait.id)


def types(store: Store, run_id: str = "run-1") -> list[str]:
    return [event.type for event in store.runs.events(run_id)]


# What an end asks for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finalizers", "status", "asks"),
    [
        ("", RunStatus.FAILED, False),
        ("failure", RunStatus.SUCCEEDED, False),
        ("failure", RunStatus.CANCELED, False),
        ("failure", RunStatus.FAILED, True),
        ("always", RunStatus.SUCCEEDED, True),
        ("always", RunStatus.CANCELED, True),
        ("always", RunStatus.FAILED, True),
    ],
)
def test_an_end_asks_to_be_finalized_where_the_workflow_has_something_for_it(
    store: Store, finalizers: str, status: RunStatus, asks: bool
):
    bind(store, finalizers=finalizers)
    assert offered(store) == []
    assert store.claims.claim("run-1", reason="finalize", now=at(10)) is None
    assert store.runs.set_status("run-1", [RunStatus.RUNNING], status, at=at(10))
    ended = store.runs.get("run-1")
    assert (ended.endings, ended.finalized) == (1, 0 if asks else 1)
    assert offered(store) == ([("run-1", "finalize")] if asks else [])
    assert (store.claims.claim("run-1", reason="finalize", now=at(10)) is not None) is asks
    assert store.claims.poll("second", at(10)).ready == ()


def test_finalizing_leaves_the_run_as_it_ended(store: Store, clock: HandClock):
    bind(store, finalizers="always", input={"b": 1, "a": 1e16}, retries_left=2)
    end(store, RunStatus.SUCCEEDED, output={"z": 1e16, "a": 1})
    ended = store.runs.get("run-1")
    [found] = store.claims.poll("default", at(10)).ready
    assert found == ReadyRun(
        run_id="run-1",
        kind="workflow",
        slug="refunds",
        publication=1,
        definition_hash="abc",
        dagster_run_ids=("run-1",),
        reason="finalize",
    )
    claim = claimed(store)
    assert offered(store) == []
    clock.seconds = 30
    bound = bind(store, "finalizer", claim)
    assert bound == replace(ended, dagster_run_ids=("run-1", "finalizer"))
    assert bind(store, "finalizer", claim) == bound

    # It writes now, and nobody before it.
    assert take_lease(store, "finalizer")
    row = a_step("@finally/clean", dagster_run_id="finalizer")
    run(store.journal.record([Entry(step=row)], holder="finalizer"))
    with pytest.raises(RunRefused) as refused:
        run(store.journal.record([Entry(step=a_step("late", dagster_run_id="run-1"))], holder="run-1"))
    assert refused.value.code == "lease-lost"
    assert not run(store.journal.finish_run("run-1", RunStatus.FAILED, at=at(31), holder="finalizer"))

    for holder, run_id, code in (("run-1", "run-1", "lease-lost"), ("x", "nothing", "no-run")):
        with pytest.raises((RunRefused, NotFound)) as also:
            run(store.journal.finalized(run_id, 1, holder=holder))
        assert also.value.code == code
    end_leases(store)
    assert offered(store, 30) == [("run-1", "finalize")]
    run(store.journal.finalized("run-1", 1, holder="finalizer"))
    for ending in (0, 2):
        run(store.journal.finalized("run-1", ending, holder="finalizer"))
    assert store.runs.get("run-1") == replace(bound, finalized=1, steps_executed=1)
    assert offered(store, 30) == []


def test_what_is_still_retried_is_not_finalized(store: Store):
    bind(store, finalizers="failure", retries_left=1)
    end(store, RunStatus.FAILED)
    # Dagster may retry it by itself, and that can be seen nowhere here.
    assert offered(store, 10 + LEFT_TO_DAGSTER_S - 1) == []
    assert offered(store, 10 + LEFT_TO_DAGSTER_S) == [("run-1", "finalize")]
    store.runs.adopt_retries("run-1")
    assert offered(store, 10 + LEFT_TO_DAGSTER_S) == [("run-1", "retry")]
    assert store.claims.claim("run-1", reason="finalize", now=at(10)) is None
    bind(store, "second", claimed(store, "retry"))
    assert offered(store) == []
    end(store, RunStatus.FAILED, seconds=20)
    assert offered(store, 20) == [("run-1", "finalize")]

    bind(store, "run-2", run_id="run-2", finalizers="failure", retries_left=1)
    end(store, RunStatus.FAILED, "run-2", seconds=30)
    store.runs.give_up_retries("run-2")
    assert offered(store, 30) == [("run-1", "finalize"), ("run-2", "finalize")]


def test_a_run_that_is_retried_asks_with_its_next_end(store: Store):
    bind(store, finalizers="failure")
    end(store, RunStatus.FAILED, error=LOST)
    claim = claimed(store)
    # By hand, before the finalizing has begun.
    assert bind(store, "retry").status is RunStatus.RUNNING
    with pytest.raises(RunRefused):
        bind(store, "finalizer", claim)
    assert offered(store) == []
    end(store, RunStatus.SUCCEEDED, seconds=20)
    again = store.runs.get("run-1")
    assert (again.endings, again.finalized) == (2, 2)
    assert offered(store, 20) == []


def test_a_retry_waits_until_the_finalizing_is_over(store: Store):
    bind(store, finalizers="always")
    end(store, RunStatus.FAILED, error=LOST)
    bind(store, "finalizer", claimed(store, seconds=40))
    assert take_lease(store, "finalizer")
    before = store.runs.get("run-1")
    assert not take_lease(store, "retry")
    with pytest.raises(RunRefused) as refused:
        run(store.journal.bind_run(a_run(), "retry", lease=a_lease("retry")))
    assert refused.value.code == "lease-held"
    assert store.claims.claim("run-1", reason="resume", now=at(39)) is None
    assert store.runs.get("run-1") == before
    run(store.journal.release_lease("run-1", "finalizer"))
    assert bind(store, "retry").status is RunStatus.RUNNING
    with pytest.raises(RunRefused):
        run(store.journal.finalized("run-1", 1, holder="finalizer"))


def test_finalizing_that_is_lost_is_begun_again_and_given_up_in_the_end(store: Store):
    bind(store, finalizers="always")
    end(store, RunStatus.FAILED, seconds=0)
    # A claim that nobody binds is none of them.
    claimed(store, seconds=0)
    moment = 60.0
    for attempt in range(MAX_FINALIZINGS):
        assert offered(store, moment) == [("run-1", "finalize")]
        bind(store, f"finalizer-{attempt}", claimed(store, seconds=moment))
        assert take_lease(store, f"finalizer-{attempt}")
        assert offered(store, moment + 60) == []
        end_leases(store)
        moment += 60
    assert offered(store, moment) == [("run-1", "finalize")]
    assert store.claims.claim("run-1", reason="finalize", now=at(moment)) is None
    assert offered(store, moment) == []
    [told] = store.runs.events("run-1", type="run.finalize_failed")
    assert (told.at, told.payload) == (at(moment), {"ending": 1, "attempts": MAX_FINALIZINGS})
    given_up = store.runs.get("run-1")
    assert (given_up.status, given_up.finalized) == (RunStatus.FAILED, 1)
    # Another end is another matter.
    bind(store, "retry")
    end(store, RunStatus.CANCELED, seconds=moment)
    bind(store, "finalizer-3", claimed(store, seconds=moment + 60))
    run(store.journal.finalized("run-1", 2))
    assert offered(store, moment + 999) == []


# Runs that others start -------------------------------------------------------------------------------------


def a_child(run_id: str = "child", parent: str = "run-1", **fields: Any) -> Run:
    values = {
        "status": RunStatus.PENDING,
        "source": RunSource.WORKFLOW,
        "parent_run_id": parent,
        "parent_step_key": "call",
        "started_at": None,
        "queued_at": NOON,
    }
    return a_run(run_id, **{**values, **fields})


def test_a_child_is_started_once_by_a_claim(store: Store, clock: HandClock):
    bind(store)
    child = a_child(worked_ms=7, deadline_at=at(99), finalizers="always", input={"b": 1, "a": 1e16})
    queued = an_event("run.queued", "child")
    assert run(store.journal.start_child(child, [queued])) == child
    again = run(store.journal.start_child(replace(child, input=2), [an_event("run.queued", "child")]))
    assert again == child == run(store.journal.run("child"))
    assert types(store, "child") == ["run.queued"]
    assert run(store.journal.run("nothing")) is None
    assert run(store.journal.run_of("child")) is None

    [found] = store.claims.poll("default", at(0)).ready
    assert (found.run_id, found.reason, found.dagster_run_ids) == ("child", "start", ())
    assert store.claims.claim("child", reason="gate", now=at(0)) is None
    first = claimed(store, "start", 0, "child")
    assert offered(store, 59) == []
    [late] = store.claims.poll("default", at(60)).ready
    assert late.expired_claim == first.id
    claim = claimed(store, "start", 60, "child")
    clock.seconds = 70
    begun = run(store.journal.bind_run(child, "dagster-1", claim=claim.id))
    assert begun == replace(
        child, status=RunStatus.RUNNING, started_at=at(70), dagster_run_ids=("dagster-1",)
    )
    assert run(store.journal.run_of("dagster-1")) == begun == store.runs.get("dagster-1")
    assert run(store.journal.bind_run(child, "dagster-1", claim=claim.id)) == begun
    with pytest.raises(RunRefused):
        run(store.journal.bind_run(child, "dagster-2", claim=first.id))
    assert offered(store, 999) == []
    assert store.claims.claim("child", reason="start", now=at(999)) is None

    # Dagster does not retry what came by a claim.
    end(store, RunStatus.FAILED, "child", seconds=80)
    assert offered(store, 80) == [("child", "finalize")]


def test_only_a_run_that_another_one_started_and_that_has_not_begun_is_to_be_started(store: Store):
    bind(store, "run-1", status=RunStatus.PENDING, started_at=None)
    bind(store, "run-2", run_id="run-2", status=RunStatus.PENDING, started_at=None, parent_run_id="run-1")
    run(store.journal.start_child(a_child()))
    claim = claimed(store, "start", 0, "child")
    assert store.runs.set_status("child", [RunStatus.PENDING], RunStatus.CANCELED, at=at(1))
    assert offered(store, 999) == []
    with pytest.raises(RunRefused):
        run(store.journal.bind_run(a_child(), "dagster-1", claim=claim.id))
    assert store.claims.claim("run-1", reason="start") is None
    assert store.claims.claim("run-2", reason="start") is None


def test_the_children_of_a_run_come_in_the_order_in_which_they_were_started(store: Store, clock: HandClock):
    for seconds, name in enumerate(("c", "a", "b")):
        clock.seconds = seconds
        run(store.journal.start_child(a_child(name)))
    run(store.journal.start_child(a_child("grandchild", "a")))
    assert [child.id for child in store.runs.children("run-1")] == ["c", "a", "b"]
    assert [child.id for child in store.runs.children("a")] == ["grandchild"]
    assert store.runs.children("c") == []


# The event of an end ----------------------------------------------------------------------------------------


def a_wait_for_end(label: str = "", run_id: str = "run-1", key: str = "child", **fields: Any) -> Wait:
    values = {"kind": WaitKind.EVENT, "event_name": EVENT_RUN_ENDED, "event_key": key}
    return a_wait(label, run_id, **{**values, **fields})


def test_the_end_of_a_child_answers_everybody_who_waits_for_it(store: Store):
    store.catalog.create_project("second")
    for name in ("run-1", "run-2"):
        bind(store, name, run_id=name)
    bind(store, "other", run_id="other", project="second")
    run(store.journal.start_child(a_child(status=RunStatus.RUNNING)))
    first, second = a_wait_for_end("a"), a_wait_for_end("b", "run-2")
    other_key, other_project = (
        a_wait_for_end("c", key="run-2"),
        a_wait_for_end("d", "other", project="second"),
    )
    strict = a_wait_for_end("e", form_schema={"type": "object", "required": ["paid"]})
    open_wait(store, first, second, other_key, other_project, strict)
    output = {"z": 1e16, "a": ["\0", None]}
    end(store, RunStatus.SUCCEEDED, "child", output=output)
    payload = {"run_id": "child", "status": "succeeded", "output": output, "error": None}
    for wait in (first, second):
        answered = stored(store, wait)
        assert (answered.status, answered.closed_by) == (WaitStatus.DECIDED, "event")
        assert answered.answer == {
            "decision": "received",
            "data": payload,
            "by": "run/child",
            "at": at(10).isoformat(),
        }
    for wait in (other_key, other_project, strict):
        assert stored(store, wait).status is WaitStatus.OPEN
    assert sorted(types(store)) == ["event.decided", "event.refused"]
    # Whoever comes later finds it too, and nothing is kept for long.
    for label in ("f", "g"):
        open_wait(store, late := a_wait_for_end(label))
        assert stored(store, late).answer["data"] == payload
    assert not store.claims.poll("default", at(10**9)).has_due


def test_a_child_that_ends_again_says_so_again(store: Store):
    bind(store)
    run(store.journal.start_child(a_child(status=RunStatus.RUNNING)))
    open_wait(store, first := a_wait_for_end("a"))
    assert store.runs.set_status("child", [RunStatus.RUNNING], RunStatus.FAILED, at=at(1), error=LOST)
    bind(store, "retry", run_id="child")
    # It is at work again: what it came to before counts no more.
    open_wait(store, second := a_wait_for_end("b"))
    assert stored(store, second).status is WaitStatus.OPEN
    end(store, RunStatus.CANCELED, "child", seconds=2)
    found = [stored(store, wait).answer["data"] for wait in (first, second)]
    assert [(data["status"], data["error"]) for data in found] == [("failed", LOST), ("canceled", None)]
    decided = store.runs.events("run-1", type="event.decided")
    assert len({event.payload["event_id"] for event in decided}) == 2


def test_the_end_of_a_run_that_nobody_started_and_a_wait_that_does_not_end_it_say_nothing(store: Store):
    bind(store)
    bind(store, "child", run_id="child")
    open_wait(store, before := a_wait_for_end("a"))
    end(store, RunStatus.SUCCEEDED, "child")
    open_wait(store, after := a_wait_for_end("b"))
    run(store.journal.start_child(a_child("real", status=RunStatus.RUNNING)))
    open_wait(store, waiting := a_wait_for_end("c", key="real"))
    end(store, RunStatus.WAITING, "real")
    for wait in (before, after, waiting):
        assert stored(store, wait).status is WaitStatus.OPEN


def test_nobody_else_sends_the_events_of_agentmesh(store: Store):
    bind(store)
    open_wait(store, wait := a_wait_for_end())
    for name in (EVENT_RUN_ENDED, "agentmesh.anything"):
        with pytest.raises(ApprovalError, match="sent by AgentMesh itself") as refused:
            store.waits.send_event("default", name, "child", {}, by="eve")
        assert refused.value.code == "reserved-event"
    assert stored(store, wait) == wait
    assert store.waits.send_event("default", "agentmeshed", "child", {}).is_kept


@pytest.mark.parametrize("by", ["worker", "reconciler"])
def test_an_end_waits_for_the_writer_of_a_run_that_waits_for_it(postgres_url: str, by: str):
    with open_store(postgres_url) as store, open_store(postgres_url) as other:
        run(store.journal.bind_run(a_run("parent"), "parent"))
        run(store.journal.start_child(a_child("z-child", "parent", status=RunStatus.RUNNING)))
        open_wait(store, wait := a_wait_for_end(run_id="parent", key="z-child"))

        def finish() -> None:
            if by == "worker":
                end(store, RunStatus.SUCCEEDED, "z-child")
            else:
                assert store.runs.set_status("z-child", [RunStatus.RUNNING], RunStatus.FAILED)

        thread = threading.Thread(target=finish)
        with other._database.write() as connection:
            lock_runs(connection, ["parent"])
            thread.start()
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            deadline = time.monotonic() + 30
            while not connection.execute(waiting).scalar_one():
                assert time.monotonic() < deadline
                assert thread.is_alive()
            # It waits with nothing in its hands: this writer, which locks in order, may have the child too.
            assert lock_runs(connection, ["z-child"]) == {"z-child"}
        thread.join(30)
        assert stored(store, wait).status is WaitStatus.DECIDED
        assert store.runs.get("z-child").status.is_final


# Time -------------------------------------------------------------------------------------------------------


def worked_ms(store: Store) -> int:
    return store.runs.get("run-1").worked_ms


def test_work_counts_and_waiting_does_not(store: Store, clock: HandClock):
    bind(store)
    assert worked_ms(store) == 0
    open_wait(store, gate := a_wait())
    end(store, RunStatus.WAITING, seconds=3)
    store.waits.decide("default", gate.id, a_vote())
    clock.seconds = 100
    assert bind(store, "second", claimed(store, "gate", 100)).worked_ms == 3000
    assert bind(store, "second").worked_ms == 3000
    end(store, RunStatus.FAILED, seconds=105.5)
    clock.seconds = 200
    assert bind(store, "third").worked_ms == 8500
    end(store, RunStatus.CANCELED, seconds=201)
    assert worked_ms(store) == 8500
    clock.seconds = 300
    assert bind(store, "fourth").worked_ms == 9500


def test_finalizing_is_no_work_of_the_run(store: Store, clock: HandClock):
    bind(store, finalizers="always")
    end(store, RunStatus.FAILED, seconds=10)
    clock.seconds = 100
    assert bind(store, "finalizer", claimed(store, seconds=100)).worked_ms == 0
    assert take_lease(store, "finalizer")
    end_leases(store, at(160))
    clock.seconds = 500
    assert take_lease(store, "retry")
    assert bind(store, "retry").worked_ms == 10_000


def test_a_worker_that_was_killed_worked_until_its_lease_ran_out_at_most(store: Store, clock: HandClock):
    bind(store)
    assert take_lease(store, "run-1")
    end_leases(store, at(60))
    clock.seconds = 1000
    # As workers do: the lease with the binding.
    bound = run(store.journal.bind_run(a_run(), "second", lease=a_lease("second", dagster_run_id="second")))
    assert (bound.worked_ms, bound.resumed_at) == (60_000, at(1000))
    # Found dead by a reconciler, and that long after.
    end_leases(store, at(1060))
    clock.seconds = 5000
    assert take_lease(store, "reconciler/1")
    assert store.runs.set_status("run-1", [RunStatus.RUNNING], RunStatus.FAILED, at=at(5000))
    run(store.journal.release_lease("run-1", "reconciler/1"))
    clock.seconds = 6000
    assert bind(store, "third").worked_ms == 120_000
    # The binding before the lease, and a worker that gave its lease back.
    assert take_lease(store, "third")
    end_leases(store, at(6060))
    clock.seconds = 7000
    assert bind(store, "fourth").worked_ms == 180_000
    run(store.journal.release_lease("run-1", "third"))
    clock.seconds = 7005
    assert bind(store, "fifth").worked_ms == 185_000


def test_a_waiting_run_whose_time_is_over_closes_its_waits(store: Store):
    store.catalog.create_project("second")
    gates: dict[str, Wait] = {}
    for name, fields in (
        ("late", {"deadline_at": at(50)}),
        ("later", {"deadline_at": at(60)}),
        ("early", {"deadline_at": at(61)}),
        ("never", {}),
        ("foreign", {"deadline_at": at(50), "project": "second"}),
    ):
        bind(store, name, run_id=name, **fields)
        project = fields.get("project", "default")
        open_wait(store, gate := a_wait(run_id=name, project=project, notify=[{"type": "log"}]))
        gates[name] = gate
        end(store, RunStatus.WAITING, name)
    bind(store, "working", run_id="working", deadline_at=at(1))
    assert store.runs.overdue("default", at(49)) == []
    overdue = store.runs.overdue("default", at(60))
    assert [(each.id, each.deadline_at) for each in overdue] == [("late", at(50)), ("later", at(60))]

    for name, error in (("late", LATE), ("early", LOST)):
        assert store.runs.set_status(name, [RunStatus.WAITING], RunStatus.FAILED, at=at(60), error=error)
    closed = stored(store, gates["late"])
    assert (closed.status, closed.closed_by, closed.decided_at) == (WaitStatus.CANCELED, "run", at(60))
    assert stored(store, gates["early"]).status is WaitStatus.OPEN
    assert gates["late"].id not in {each.wait_id for each in store.notices.due("default", at(60))}
    assert [each.id for each in store.runs.overdue("default", at(60))] == ["later"]
    # Somebody gives it more time.
    assert bind(store, "retry", run_id="late").status is RunStatus.RUNNING
    assert stored(store, gates["late"]).status is WaitStatus.OPEN


def test_an_error_of_any_shape_closes_no_waits(store: Store):
    bind(store)
    open_wait(store, gate := a_wait())
    end(store, RunStatus.FAILED, error="run-timeout")
    assert stored(store, gate).status is WaitStatus.OPEN
