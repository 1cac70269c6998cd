"""Time, ends and waits of called workflows, across attempts, continuations and kills."""

from __future__ import annotations

from collections import Counter

import pytest
from control_flow import (
    EXECUTIONS,
    approve,
    body,
    call,
    chain,
    code,
    fail,
    foreach,
    gate,
    loop,
    node,
    note,
    opened_job,
    parallel,
    run,
    statuses,
)
from workflow_functions import notes

from agentmesh_dagster.errors import RunRefused, StoreError
from agentmesh_dagster.orchestration.cancellation import cancel_children
from agentmesh_dagster.orchestration.code_location import build_published_job, named_executors
from agentmesh_dagster.records import RunStatus, StepStatus, Vote, WaitKind, WaitStatus
from agentmesh_dagster.store.journal import StoreJournal

TWICE = {"retry": {"max_attempts": 2, "delay_s": 0}}
BY_THE_CLOCK = {"timeout_s": 60, "timeout_includes_waiting": True}


@pytest.fixture(autouse=True)
def noted(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def pause(id, seconds):
    return node(id, "delay", {"seconds": seconds})


def waits_of(job, run):
    return {(wait.step_key, wait.kind): wait for wait in job.store.waits.list(run.project, run_id=run.id)}


def decide(job, run, step_key):
    wait = waits_of(job, run)[step_key, WaitKind.HUMAN]
    job.store.waits.decide(
        run.project, wait.id, Vote(by="ann", decision="approved", data={}, at=wait.created_at)
    )


class TestTime:
    @pytest.mark.parametrize("fanout", [False, True])
    def test_an_item_that_waits_by_the_clock_is_woken_when_its_time_is_over(self, fanout):
        called = chain(gate(), slug="called", settings=BY_THE_CLOCK)
        with opened_job(chain(foreach("each", [{}], {"workflow": "called"}, fanout=fanout)), called) as job:
            waiting = job.execute()
            found = waits_of(job, waiting)
            assert set(found) == {("each[0]/ask", WaitKind.HUMAN), ("each[0]", WaitKind.TIMER)}
            job.store.waits.settle_due(waiting.project, found["each[0]", WaitKind.TIMER].deadline_at)
            late = job.resume(waiting)
            assert (late.status, late.error["code"]) == (RunStatus.FAILED, "timeout")

    def test_the_timer_of_an_iteration_ends_with_it(self):
        called = chain(gate(), slug="called", settings=BY_THE_CLOCK)
        again = loop("again", {"workflow": "called", "input": {}}, until="iteration >= 2")
        with opened_job(chain(again), called) as job:
            waiting = job.execute()
            decide(job, waiting, "again#1/ask")
            waiting = job.resume(waiting)
            found = waits_of(job, waiting)
            assert found["again#1", WaitKind.TIMER].status is WaitStatus.CANCELED
            assert found["again#2", WaitKind.TIMER].status is WaitStatus.OPEN

    @pytest.mark.parametrize("includes_waiting", [False, True])
    def test_each_attempt_has_its_own(self, includes_waiting):
        settings = {"timeout_s": 1, "timeout_includes_waiting": includes_waiting}
        called = chain(code("work", "hang_once", name="work"), slug="called", settings=settings)
        result = run(chain(call("sub", "called", TWICE)), {}, called)
        assert result.succeeded, result.run.error
        assert notes() == ["work", "work"]

    def test_after_a_wait_an_attempt_goes_on_with_its_own_time(self):
        """The first attempt takes most of the time; the second waits, and has all that it did not use."""
        work = body(pause("nap", 1.5), code("one", "fail_first", name="one"), gate(), pause("then", 1.5))
        result = run(chain(parallel(left=work, more={"timeout_s": 2.6, **TWICE})), answers=approve)
        assert result.succeeded, result.run.error
        assert result.steps["both"].attempt == 2

    def test_short_stretches_add_up(self):
        each = foreach("each", [1, 2, 3, 4], body(gate(), pause("nap", 1)), {"timeout_s": 2.7})
        with opened_job(chain(each)) as job:
            found = job.execute()
            answered = 0
            while found.status is RunStatus.WAITING:
                decide(job, found, f"each[{answered}]/ask")
                found = job.resume(found)
                answered += 1
            assert (found.status, found.error["code"]) == (RunStatus.FAILED, "timeout")
            assert answered == 3


class TestEnds:
    @pytest.mark.parametrize("fanout", [False, True])
    def test_an_item_is_retried_with_a_further_finally(self, fanout):
        closing = body(note("clean", "clean {{ run.status }}"))
        called = chain(code("work", "fail_first", name="work"), slug="called", **{"finally": closing})
        with opened_job(chain(foreach("each", [{}], {"workflow": "called"}, fanout=fanout)), called) as job:
            done = job.resume(job.execute())
            assert done.status is RunStatus.SUCCEEDED, done.error
            assert notes() == ["work", "clean failed", "work", "clean succeeded"]

    def test_a_finally_that_was_cut_off_goes_on_where_it_was(self):
        closing = body(note("release"), code("second", "hang_once", name="second"))
        called = chain(note("work"), slug="called", **{"finally": closing})
        with opened_job(chain(call("sub", "called")), called) as job:
            stopped = job.canceled({}, lambda: "second" in notes())
            done = job.resume(stopped)
            assert done.status is RunStatus.SUCCEEDED, done.error
            assert Counter(notes()) == {"work": 1, "release": 1, "second": 2}
            assert job.statuses(done)["sub/@finally"] == "succeeded"

    def test_a_run_that_is_canceled_leaves_its_end_to_its_own_finally(self):
        called = chain(
            code("work", "hang_once", name="work"), slug="called", **{"finally": body(note("clean"))}
        )
        with opened_job(chain(call("sub", "called")), called) as job:
            stopped = job.canceled({}, lambda: "work" in notes())
            assert stopped.status is RunStatus.CANCELED
            assert notes() == ["work"]

    def test_a_worker_that_lost_its_run_ends_nothing(self, monkeypatch):
        honest = StoreJournal.record

        async def taken_over(self, entries, **options):
            if any(entry.step.key == "sub/second" for entry in entries):
                raise RunRefused("taken over", code="lease-lost")
            return await honest(self, entries, **options)

        monkeypatch.setattr(StoreJournal, "record", taken_over)
        closing = {"on_failure": body(note("told")), "finally": body(note("cleaned"))}
        called = chain(note("first"), note("second"), slug="called", **closing)
        with opened_job(chain(call("sub", "called")), called) as job:
            job.execute()
            assert notes() == ["first"]

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_what_would_wait_in_it_opens_nothing(self, execution):
        closing = body(node("pause", "delay", {"seconds": "{{ 3600 + input.more }}"}))
        called = chain(note("work"), slug="called", **{"finally": closing})
        document = chain(call("sub", "called", {"on_error": "continue"}, input={"more": 1}))
        result = run(document, {}, called, execution=execution)
        assert result.succeeded, result.run.error
        assert result.steps["sub"].error["code"] == "finalizer-waits"
        assert statuses(result)["sub/@finally/pause"] == "failed"
        assert result.waits == []


def test_a_gate_in_a_branch_that_has_failed_asks_for_nothing():
    """The branches beside it go on without it."""
    left = body(fail(), gate(), edges=[])
    with opened_job(chain(parallel(left=left, right=body(gate("other")), wait="any"))) as job:
        waiting = job.execute()
        assert waiting.status is RunStatus.WAITING
        assert waiting.suspended_steps == ("both/right/other",)
        assert waits_of(job, waiting)["both/left/ask", WaitKind.HUMAN].status is WaitStatus.CANCELED
        assert not job.store.claims.is_ready(waiting.id)
        decide(job, waiting, "both/right/other")
        assert job.resume(waiting).status is RunStatus.SUCCEEDED
        assert not job.store.claims.is_ready(waiting.id)


class TestStarted:
    """Runs that a node started and did not wait for."""

    def test_one_that_was_stored_before_its_node_ended_is_found_again(self, monkeypatch):
        honest = StoreJournal.record
        is_away = [True]

        async def away(self, entries, **options):
            if is_away[0] and any(entry.step.key == "sub" and entry.step.is_finished for entry in entries):
                raise StoreError("the database is away")
            return await honest(self, entries, **options)

        monkeypatch.setattr(StoreJournal, "record", away)
        with opened_job(chain(call("sub", "called", **{"async": True})), chain(slug="called")) as job:
            failed = job.execute()
            [child] = job.store.runs.children(failed.id)
            is_away[0] = False
            job.store.publications.unpublish("default", "workflow", "called", by="ann")
            done = job.resume(failed)
            assert done.status is RunStatus.SUCCEEDED, done.error
            assert [each.id for each in job.store.runs.children(done.id)] == [child.id]
            assert job.steps(done)["sub"].status is StepStatus.SUCCEEDED

    def test_one_that_failed_is_not_retried_after_its_parent_was_canceled(self):
        document = chain(call("sub", "called", **{"async": True}), gate())
        with opened_job(document, chain(fail(), slug="called")) as job:
            waiting = job.execute()
            [child] = job.store.runs.children(waiting.id)
            published = job.store.publications.get(child.publication)
            claim = job.store.claims.claim(child.id, reason="start")
            started = build_published_job(
                published, resource=job._agentmesh.resource(), executors=named_executors()
            )
            tags = {"agentmesh/claim": claim.id, "dagster/max_retries": "2"}
            started.execute_in_process(raise_on_error=False, tags=tags, instance=job._instance)
            assert job.store.runs.get(child.id).retries_left == 2
            cancel_children(job.store, job._instance, waiting, by="ann")
            assert job.store.claims.claim(child.id, reason="retry") is None
