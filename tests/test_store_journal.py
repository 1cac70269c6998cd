"""The journal: what is recorded is stored, once; runs are bound, finished and leased by one at a time."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from store_samples import NOON, a_lease, a_run, a_step, a_vote, a_wait, an_event, at, end_leases, take_lease

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.errors import AgentMeshError, NotFound, ReplayError, RunRefused, StoreError
from agentmesh_dagster.records import Entry, RunSource, RunStatus, Step, StepStatus, WaitStatus
from agentmesh_dagster.runtime.ports import Journal
from agentmesh_dagster.store import Store, open_store


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture
def journal(store: Store) -> Journal:
    """The journal of a store in which the run `run-1` is bound to the Dagster run `run-1`."""
    run(store.journal.bind_run(a_run(), "run-1"))
    return store.journal


def test_a_run_comes_back_as_it_was(store: Store):
    stored = a_run(
        source=RunSource.CLI,
        triggered_by="ann",
        trigger_id="t",
        parent_run_id="p",
        parent_step_key="p/q",
        thread_id="thread",
        resource_id="resource",
        input={"b": 1, "a": [None, 1.0, "ü"]},
        request_context={"locale": "de"},
        queued_at=at(-1),
        mode="inline",
    )
    bound = run(store.journal.bind_run(stored, "run-1"))
    assert bound == replace(stored, dagster_run_ids=("run-1",))
    assert run(store.journal.run_of("run-1")) == store.runs.get("run-1") == bound
    assert run(store.journal.run_of("nothing")) is None


def test_a_step_comes_back_as_it_was(store: Store, journal: Journal):
    step = a_step(
        "each[3]/summarise/llm/2",
        node_name="Summarise",
        kind="llm",
        parent_key="each[3]/summarise",
        predecessor_keys=("start", "classify"),
        iteration_index=3,
        attempt=2,
        input={"messages": [{"role": "user", "content": "Grüße 🙂"}]},
        output={"text": "ok"},
        error={"code": "model"},
        fingerprint="f" * 64,
        model_used="offline/echo",
        child_run_id="child",
        routing_decision={"handles": ["large"], "edges": [1], "set": {"k": None}},
        input_tokens=10,
        output_tokens=20,
        cost_usd=0.001,
        queued_at=at(-1),
        dagster_run_id="run-1",
    )
    run(journal.record([Entry(step=step)]))
    assert run(journal.steps("run-1")) == {step.key: step}
    run(journal.record([Entry(step=a_step("b", status=StepStatus.RUNNING))]))
    assert set(run(journal.steps("run-1", ["b", "missing"]))) == {"b"}
    assert set(run(journal.steps("run-1", [f"no{i}" for i in range(2000)] + ["b"]))) == {"b"}
    assert run(journal.steps("run-1", [])) == {}
    assert run(journal.steps("run-2")) == {}


def test_what_is_reported_is_there_for_others(journal: Journal, other_store: Store):
    async def work() -> None:
        for index in range(20):
            key = f"n{index}"
            await journal.record([Entry(step=a_step(key), events=(an_event(step_key=key),))])
            # In another connection, as another process has it.
            assert [step.key for step in other_store.runs.steps("run-1") if step.key == key] == [key]
            assert other_store.runs.events("run-1")[-1].step_key == key

    run(work())


def test_a_finished_row_is_never_replaced(store: Store, journal: Journal):
    done = a_step(output={"x": 1}, fingerprint="f", input_tokens=5)
    run(journal.record([Entry(step=done, events=(an_event(),))]))
    for change in (
        {"output": {"x": 2}},
        {"status": StepStatus.FAILED},
        {"status": StepStatus.RUNNING, "output": None, "fingerprint": "g"},
        {"fingerprint": "g"},
    ):
        with pytest.raises(ReplayError, match="'classify' of run 'run-1'") as refused:
            run(journal.record([Entry(step=replace(done, **change), events=(an_event("late"),))]))
        assert refused.value.code == "step-finished"
    # The same answer again, as after an outage in which the first one was not confirmed.
    run(journal.record([Entry(step=replace(done, finished_at=at(9)), events=(an_event("late"),))]))
    # Its begin, which an outage has kept back until now.
    begun = replace(done, status=StepStatus.RUNNING, output=None)
    run(journal.record([Entry(step=begun, events=(an_event("late"),))]))
    assert run(journal.steps("run-1"))["classify"] == done
    assert [event.type for event in store.runs.events("run-1")] == ["step.completed"]
    assert store.runs.get("run-1").input_tokens == 5


def test_totals_count_each_finished_row_once(store: Store, journal: Journal):
    async def work() -> None:
        running = a_step("a", status=StepStatus.RUNNING, input_tokens=7)
        failed = replace(running, status=StepStatus.FAILED, error={"code": "x"})
        await journal.record([Entry(step=running)])
        await journal.record([Entry(step=failed)])
        await journal.record([Entry(step=running)])
        done = replace(running, status=StepStatus.SUCCEEDED, output_tokens=3, cost_usd=0.5)
        await journal.record([Entry(step=done)])
        await journal.record([Entry(step=a_step("a/llm/1", kind="llm", input_tokens=100, cost_usd=0.25))])
        await journal.record([Entry(step=a_step("b", status=StepStatus.SKIPPED))])
        handled = {"handles": ["error"], "edges": [], "set": {}}
        caught = a_step("c", status=StepStatus.FAILED, routing_decision=handled, input_tokens=1)
        await journal.record([Entry(step=caught)])

    run(work())
    found = store.runs.get("run-1")
    assert (found.steps_executed, found.input_tokens, found.output_tokens, found.cost_usd) == (
        2,
        108,
        3,
        0.75,
    )


def test_a_failed_row_may_be_tried_again(journal: Journal):
    run(journal.record([Entry(step=a_step(status=StepStatus.FAILED, error={"code": "x"}))]))
    run(journal.record([Entry(step=a_step(attempt=2, output=1))]))
    assert run(journal.steps("run-1"))["classify"].attempt == 2


def test_a_failing_write_of_a_group_leaves_the_others(store: Store, journal: Journal):
    run(journal.record([Entry(step=a_step("taken", output=1))]))

    async def work() -> list[Any]:
        writes = [
            journal.record([Entry(step=a_step(f"n{index}"), events=(an_event(step_key=f"n{index}"),))])
            for index in range(20)
        ]
        writes.insert(7, journal.record([Entry(step=a_step("taken", output=2))]))
        writes.insert(12, journal.record([Entry(step=a_step("lost", run_id="no-such-run"))]))
        writes.insert(15, journal.record([Entry(step=a_step("odd", output={1, 2}))]))
        writes.insert(16, journal.record([Entry(step=a_step("nul", node_name="a\0b"))]))
        writes.insert(17, journal.record_events([an_event(run_id="no-such-run")]))
        return await asyncio.gather(*writes, return_exceptions=True)

    errors = [result for result in run(work()) if result is not None]
    assert [(type(error), error.code) for error in errors] == [
        (ReplayError, "step-finished"),
        (NotFound, "no-run"),
        (StoreError, "not-json"),
        (StoreError, "nul-character"),
        (NotFound, "no-run"),
    ]
    assert set(run(journal.steps("run-1"))) == {"taken", *(f"n{index}" for index in range(20))}
    assert len(store.runs.events("run-1")) == 20


def entry(step: Step, *types: str, **more: Any) -> Entry:
    """A step's row, with events of these types."""
    return Entry(step=step, events=tuple(an_event(type_, step_key=step.key) for type_ in types), **more)


def test_entries_are_written_in_order_and_of_each_step_its_last_row(store: Store, journal: Journal):
    running = a_step("a", status=StepStatus.RUNNING, finished_at=None)
    failed = a_step("a", status=StepStatus.FAILED, error={"code": "x"}, input_tokens=50)
    done = a_step("a", attempt=2, output=1, input_tokens=3, cost_usd=0.5)
    other = a_step("b", status=StepStatus.SKIPPED)
    call = a_step("a/llm/1", kind="llm", output_tokens=4, cost_usd=0.25)
    run(
        journal.record(
            [
                entry(running, "one"),
                entry(call, "two", "three"),
                entry(failed, "four"),
                entry(other),
                entry(done, "five"),
                # The same answer once more: with nothing new to say.
                entry(replace(done, finished_at=at(9)), "late"),
            ]
        )
    )
    assert run(journal.steps("run-1")) == {"a": done, "a/llm/1": call, "b": other}
    assert [event.type for event in store.runs.events("run-1")] == ["one", "two", "three", "four", "five"]
    found = store.runs.get("run-1")
    totals = (found.steps_executed, found.input_tokens, found.output_tokens, found.cost_usd)
    assert totals == (1, 3, 4, 0.75)
    run(journal.record([]))


def test_a_node_that_failed_before_counts_once_with_its_later_rows(store: Store, journal: Journal):
    failed = a_step("a", status=StepStatus.FAILED, error={"code": "x"})
    run(journal.record([entry(failed)]))
    run(journal.record([entry(a_step("a", status=StepStatus.RUNNING)), entry(failed), entry(a_step("b"))]))
    assert store.runs.get("run-1").steps_executed == 2
    run(journal.record([entry(a_step("a", status=StepStatus.RUNNING)), entry(a_step("a"))]))
    assert store.runs.get("run-1").steps_executed == 2


def test_entries_are_written_together_or_not_at_all(store: Store, journal: Journal):
    run(journal.record([entry(a_step("done", output=1))]))
    before = store.runs.get("run-1")
    fresh = entry(a_step("fresh", input_tokens=9), "step.completed")
    for wrong, error, code in (
        (a_step("done", output=2), ReplayError, "step-finished"),
        (a_step("fresh", output=2), ReplayError, "step-finished"),
        (a_step("odd", output={1}), StoreError, "not-json"),
        (a_step("nul", fingerprint="a\0b"), StoreError, "nul-character"),
    ):
        with pytest.raises(error) as refused:
            run(journal.record([fresh, entry(wrong), entry(a_step("after"))]))
        assert refused.value.code == code
    with pytest.raises(ValueError, match="'run-1' and 'run-2'"):
        run(journal.record([fresh, entry(a_step(run_id="run-2"))]))
    with pytest.raises(NotFound):
        run(journal.record([entry(a_step(run_id="run-2"))]))
    assert set(run(journal.steps("run-1"))) == {"done"}
    assert store.runs.events("run-1") == []
    assert store.runs.get("run-1") == before


def test_many_entries_of_which_some_are_stored(store: Store, journal: Journal):
    keys = [f"each[{index}]" for index in range(600)]
    answers = {key: a_step(key, kind="item", output=key, input_tokens=1) for key in keys}
    run(journal.record([entry(answers[key], "first") for key in keys[::3]]))
    run(journal.record([entry(a_step(key, status=StepStatus.RUNNING), "begun") for key in keys[1::3]]))
    run(journal.record([entry(answers[key], "second") for key in keys]))
    assert run(journal.steps("run-1")) == answers
    types = [event.type for event in store.runs.events("run-1", limit=2000)]
    assert types == ["first"] * 200 + ["begun"] * 200 + ["second"] * 400
    assert store.runs.get("run-1").input_tokens == 600


def test_entries_change_their_waits_with_their_rows(store: Store, journal: Journal):
    first, second = a_wait("one"), a_wait("two", step_key="other")
    gates = [a_step(key, status=StepStatus.WAITING, finished_at=None) for key in ("gate", "other")]
    run(journal.record([entry(gates[0], opened=(first,)), entry(gates[1], opened=(second,))]))
    store.waits.decide("default", first.id, a_vote())
    run(
        journal.record([entry(a_step("gate"), used=(first.id,)), entry(a_step("x"), superseded=(second.id,))])
    )
    waits = {wait.id: wait for wait in run(journal.waits("run-1"))}
    assert waits[first.id].used_at is not None
    assert (waits[second.id].status, waits[second.id].closed_by) == (WaitStatus.CANCELED, "superseded")


def test_steps_under_a_finished_one_are_left_out_where_only_needed_ones_are_asked_for(journal: Journal):
    handled = {"handles": ["error"], "edges": [0], "set": {}}
    rows = [
        a_step("each", status=StepStatus.RUNNING),
        a_step("each[0]", kind="item", parent_key="each"),
        a_step("each[0]/x", parent_key="each[0]"),
        a_step("each[1]", kind="item", parent_key="each", status=StepStatus.FAILED),
        a_step("each[1]/x", parent_key="each[1]"),
        a_step("call", status=StepStatus.FAILED, routing_decision=handled),
        a_step("call/x", parent_key="call", status=StepStatus.FAILED),
        a_step("lone", parent_key="nowhere"),
    ]
    run(journal.record([Entry(step=row) for row in rows]))
    run(journal.bind_run(a_run("run-2"), "run-2"))
    run(journal.record([entry(a_step("each", "run-2"))]))
    needed = run(journal.steps("run-1", needed=True))
    assert list(needed) == ["call", "each", "each[0]", "each[1]", "each[1]/x", "lone"]
    assert set(run(journal.steps("run-1", ["each[0]/x", "each[1]/x"], needed=True))) == {"each[1]/x"}
    assert set(run(journal.steps("run-1"))) == {row.key for row in rows}


def test_many_writes_share_a_commit(store: Store, journal: Journal):
    commits: list[int] = []
    from sqlalchemy import event

    event.listen(store._database.engine, "commit", lambda _: commits.append(1))

    async def work() -> None:
        await asyncio.gather(*(journal.record([Entry(step=a_step(f"n{index}"))]) for index in range(100)))

    run(work())
    assert len(run(journal.steps("run-1"))) == 100
    assert len(commits) < 20


def test_events_keep_their_order_and_are_followed_without_a_gap(store: Store, journal: Journal):
    async def work() -> None:
        await journal.record_events([an_event("run.started", payload={"n": 0})])
        await journal.record(
            [Entry(step=a_step("a"), events=(an_event("step.started", step_key="a"), an_event(step_key="a")))]
        )
        await journal.record_events([])

    run(work())
    found = store.runs.events("run-1")
    assert [event.type for event in found] == ["run.started", "step.started", "step.completed"]
    assert found[0].payload == {"n": 0}
    assert store.runs.events("run-1", after=found[0].id) == found[1:]
    assert store.runs.events("run-1", after=found[2].id) == []
    assert store.runs.events("run-1", type="step.started") == [found[1]]
    assert store.runs.events("run-1", type="step.*", limit=1) == [found[1]]
    assert store.runs.events("run-1", step_key="a", limit=5) == found[1:]
    run(journal.record_events(found))  # once more, as after an unconfirmed commit
    assert store.runs.events("run-1") == found


def test_binding_again(store: Store, journal: Journal):
    first = run(journal.bind_run(a_run(slug="ignored"), "run-1"))
    assert (first.slug, first.dagster_run_ids) == ("refunds", ("run-1",))

    assert run(journal.finish_run("run-1", RunStatus.FAILED, at=at(2), error={"code": "x"}, output=1))
    late = run(journal.bind_run(a_run(), "run-1"))
    assert late.status is RunStatus.FAILED

    retried = run(journal.bind_run(a_run(), "retry"))
    assert (retried.status, retried.dagster_run_ids) == (RunStatus.RUNNING, ("run-1", "retry"))
    assert (retried.error, retried.output, retried.finished_at, retried.duration_ms) == (
        None,
        None,
        None,
        None,
    )
    assert retried.resumed_at is not None
    assert run(journal.run_of("retry")) == retried

    run(journal.bind_run(a_run("run-2"), "run-2"))
    with pytest.raises(RunRefused) as refused:
        run(journal.bind_run(a_run("run-2"), "retry"))
    assert refused.value.code == "dagster-run-bound"
    assert store.runs.get("retry").id == "run-1"


def test_a_pending_run_starts_when_its_dagster_run_does(store: Store):
    pending = a_run(status=RunStatus.PENDING, started_at=None, queued_at=NOON)
    assert run(store.journal.bind_run(pending, "run-1")).status is RunStatus.PENDING
    begun = run(store.journal.bind_run(a_run(started_at=at(3)), "run-1"))
    assert (begun.status, begun.started_at, begun.queued_at) == (RunStatus.RUNNING, at(3), NOON)
    assert run(store.journal.bind_run(pending, "run-1")) == begun


def test_a_run_waits_and_goes_on(store: Store, journal: Journal):
    run(journal.record([Entry(step=a_step("gate", status=StepStatus.WAITING, finished_at=None))]))
    assert run(journal.finish_run("run-1", RunStatus.WAITING, at=at(2)))
    waiting = store.runs.get("run-1")
    assert (waiting.suspended_at, waiting.suspended_steps, waiting.finished_at) == (at(2), ("gate",), None)
    resumed = run(journal.bind_run(a_run(), "run-1b"))
    assert (resumed.status, resumed.suspended_steps) == (RunStatus.RUNNING, ())


def test_a_run_ends_once(store: Store, journal: Journal):
    ended = run(
        journal.finish_run(
            "run-1",
            RunStatus.SUCCEEDED,
            at=at(2.5),
            output={"z": 1, "a": 2},
            events=[an_event("run.completed")],
        )
    )
    again = run(
        journal.finish_run("run-1", RunStatus.FAILED, at=at(3), error={}, events=[an_event("run.failed")])
    )
    assert (ended, again) == (True, False)
    found = store.runs.get("run-1")
    assert (found.status, found.finished_at, found.duration_ms) == (RunStatus.SUCCEEDED, at(2.5), 2500)
    assert list(found.output) == ["z", "a"]
    assert [event.type for event in store.runs.events("run-1")] == ["run.completed"]
    with pytest.raises(NotFound):
        run(journal.finish_run("no-such-run", RunStatus.FAILED, at=NOON))


def test_of_eight_threads_that_end_a_run_one_does(store: Store, other_store: Store, journal: Journal):
    barrier = threading.Barrier(8)
    moved: list[tuple[int, bool]] = []

    def end(index: int) -> None:
        its_journal = (store if index % 2 else other_store).journal
        barrier.wait(30)
        events = [an_event(f"by.{index}")]
        moved.append(
            (index, run(its_journal.finish_run("run-1", RunStatus.CANCELED, at=at(index), events=events)))
        )

    threads = [threading.Thread(target=end, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    winners = [index for index, won in moved if won]
    assert len(moved) == 8
    assert len(winners) == 1
    assert store.runs.get("run-1").finished_at == at(winners[0])
    assert [event.type for event in store.runs.events("run-1")] == [f"by.{winners[0]}"]


def test_a_lease_is_held_by_one_until_it_expires(store: Store, journal: Journal):
    assert take_lease(store, "one")
    assert not take_lease(store, "two")
    assert take_lease(store, "one")
    end_leases(store)
    assert run(journal.renew_lease("run-1", "one"))
    assert not take_lease(store, "two")
    end_leases(store)
    assert take_lease(store, "two")
    # Whoever lost it does not get it back by renewing it, nor when the other one has given it back.
    assert not run(journal.renew_lease("run-1", "one"))
    run(journal.release_lease("run-1", "one"))
    [unfinished] = store.runs.unfinished()
    assert unfinished.lease is not None
    assert (unfinished.lease.dagster_run_id, unfinished.lease.is_live) == ("two", True)
    run(journal.release_lease("run-1", "two"))
    assert not run(journal.renew_lease("run-1", "one"))
    assert take_lease(store, "one")
    with pytest.raises(NotFound):
        run(journal.take_lease(a_lease("one", "no-such-run")))


def test_two_processes_of_one_dagster_run_are_told_apart(store: Store, journal: Journal):
    assert take_lease(store, "first process", dagster_run_id="d")
    for holder, dagster_run_id, code in (
        ("second process", "d", "second-process"),
        ("another", "e", "lease-held"),
    ):
        lease = a_lease(holder, dagster_run_id=dagster_run_id)
        with pytest.raises(RunRefused, match="nothing was done twice") as refused:
            run(journal.take_lease(lease))
        assert refused.value.code == code
        with pytest.raises(RunRefused) as also:
            run(journal.bind_run(a_run(), dagster_run_id, lease=lease))
        assert also.value.code == code
    assert store.runs.get("run-1").dagster_run_ids == ("run-1",)


def test_who_has_lost_the_lease_writes_nothing(store: Store, journal: Journal):
    """Though nobody else is bound to the run, and though nobody holds it by now."""
    assert take_lease(store, "mine")
    mine = a_step(status=StepStatus.RUNNING)
    run(journal.record([Entry(step=mine)], holder="mine"))
    before = store.runs.get("run-1")
    end_leases(store)
    # It has run out, and nobody has taken it.
    run(journal.record_events([an_event("in.time")], holder="mine"))
    assert take_lease(store, "reconciler")

    def refused() -> None:
        child = a_run("child", status=RunStatus.PENDING, parent_run_id="run-1")
        late = Entry(step=a_step(), events=(an_event("late"),))
        opens = Entry(step=a_step("gate", status=StepStatus.WAITING), opened=(a_wait("", step_key="gate"),))
        for write in (
            journal.record([late], holder="mine"),
            journal.record([opens], holder="mine"),
            journal.record_events([an_event("late")], holder="mine"),
            journal.finish_run("run-1", RunStatus.FAILED, at=at(2), holder="mine"),
            journal.finalized("run-1", 0, holder="mine"),
            journal.start_child(child, holder="mine"),
        ):
            with pytest.raises(RunRefused, match="does not hold run 'run-1' any more") as lost:
                run(write)
            assert lost.value.code == "lease-lost"

    refused()
    run(journal.release_lease("run-1", "reconciler"))
    refused()
    assert run(journal.steps("run-1")) == {mine.key: mine}
    assert [event.type for event in store.runs.events("run-1")] == ["in.time"]
    assert store.runs.get("run-1") == before
    assert [each.id for each in store.runs.list("default")] == ["run-1"]
    assert take_lease(store, "next")
    run(journal.record([Entry(step=a_step())], holder="next"))
    assert run(journal.finish_run("run-1", RunStatus.SUCCEEDED, at=at(3), holder="next"))


def test_writers_of_one_group_are_asked_one_by_one(store: Store, journal: Journal):
    assert take_lease(store, "holder")

    async def work() -> list[object]:
        writes = (
            journal.record([Entry(step=a_step(f"n{index}"))], holder="holder" if index % 2 else "lost")
            for index in range(6)
        )
        return await asyncio.gather(*writes, return_exceptions=True)

    outcomes = run(work())
    assert [isinstance(each, RunRefused) for each in outcomes] == [True, False] * 3
    assert sorted(run(journal.steps("run-1"))) == ["n1", "n3", "n5"]


def test_a_lease_is_measured_by_the_clock_of_the_database(database_url: str):
    """A worker whose own clock is hours ahead, or behind, holds its run as long as any other."""

    class Wrong(SystemClock):
        def __init__(self, hours: float) -> None:
            self._off = timedelta(hours=hours)

        def now(self) -> datetime:
            return super().now() + self._off

    with (
        open_store(database_url, clock=Wrong(3)) as ahead,
        open_store(database_url, clock=Wrong(-3)) as behind,
    ):
        for run_id, first, second in (("run-a", ahead, behind), ("run-b", behind, ahead)):
            run(first.journal.bind_run(a_run(run_id), run_id, lease=a_lease("first", run_id)))
            assert not take_lease(second, "second", run_id)
            lease = second.runs.lease(run_id)
            assert lease is not None
            assert 50 < lease.left_s <= 60


@pytest.mark.usefixtures("journal")
def test_a_lease_from_a_clock_that_was_ahead_is_cut_to_its_length(store: Store):
    """The database's own clock was set back, as after a correction of the machine's."""
    assert take_lease(store, "worker")
    assert store.runs.shorten_leases("default") == 0
    end_leases(store, datetime.now(timezone.utc) + timedelta(hours=5))
    assert store.runs.shorten_leases("other") == 0
    assert store.runs.shorten_leases("default") == 1
    lease = store.runs.lease("run-1")
    assert lease is not None
    assert 50 < lease.left_s <= 60
    assert store.runs.shorten_leases("default") == 0


def test_of_eight_that_want_a_lease_one_gets_it(store: Store, other_store: Store, journal: Journal):
    async def want() -> list[object]:
        return await asyncio.gather(
            *(
                (store if index % 2 else other_store).journal.take_lease(a_lease(f"d{index}"))
                for index in range(8)
            ),
            return_exceptions=True,
        )

    assert sorted(isinstance(each, RunRefused) for each in run(want())) == [False] + [True] * 7


def test_a_canceled_coroutine_does_not_stop_the_journal(journal: Journal):
    async def work() -> None:
        tasks = [
            asyncio.ensure_future(journal.record([Entry(step=a_step(f"n{index}"))])) for index in range(50)
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await journal.record([Entry(step=a_step("last"))])

    run(work())
    stored = run(journal.steps("run-1"))
    assert {f"n{index}" for index in range(1, 50, 2)} | {"last"} <= set(stored)


def test_a_closed_store_says_so(store: Store, journal: Journal):
    store.close()
    for call in (lambda: journal.record([Entry(step=a_step())]), lambda: journal.steps("run-1")):
        with pytest.raises(AgentMeshError) as refused:
            run(call())
        assert refused.value.code == "closed"
