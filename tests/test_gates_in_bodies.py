"""Waiting inside containers: each pauses, goes on where it was, and repeats nothing; walked, and as ops of Dagster."""

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
    edge,
    fail,
    foreach,
    gate,
    loop,
    node,
    note,
    parallel,
    run,
    statuses,
)
from workflow_functions import notes

from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import RunStatus, StepStatus, Vote, WaitKind, WaitStatus
from agentmesh_dagster.store import open_store
from agentmesh_dagster.store.journal import StoreJournal
from agentmesh_dagster.testing import Answer

pytestmark = pytest.mark.parametrize("execution", EXECUTIONS)

RETRIED = {"retry": {"max_attempts": 2, "delay_s": 0}}
PAUSE = {name: node(name, "delay", {"seconds": 0.4}) for name in ("before", "after")}
CALLED = chain(note("first"), gate(), note("last"), slug="called", output="{{ steps.last.output }}")


@pytest.fixture(autouse=True)
def noted(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def asking():
    """What waits in the middle."""
    return body(note("first"), gate(), note("last"))


def in_loop():
    return loop("again", asking(), until="iteration >= 2")


IN_BODIES = {
    "foreach": (foreach("each", [1, 2], asking()), ["each[0]/ask", "each[1]/ask"]),
    "fan-out": (foreach("each", [1, 2], asking(), fanout=True), ["each[0]/ask", "each[1]/ask"]),
    "one at a time": (foreach("each", [1, 2], asking(), concurrency=1), ["each[0]/ask", "each[1]/ask"]),
    "loop": (in_loop(), ["again#1/ask", "again#2/ask"]),
    "parallel": (parallel(left=asking(), right=body(note("beside"))), ["both/left/ask"]),
    "parallel, walked": (
        parallel(left=asking(), right=body(note("beside")), more=RETRIED),
        ["both/left/ask"],
    ),
    "parallel, any": (parallel(left=asking(), right=body(note("beside")), wait="any"), ["both/left/ask"]),
    "parallel, the first two": (
        parallel(left=asking(), right=body(note("beside")), wait=2),
        ["both/left/ask"],
    ),
    "workflow": (call("sub", "called"), ["sub/ask"]),
    "workflow, walked": (call("sub", "called", RETRIED), ["sub/ask"]),
    "workflow in foreach in parallel": (
        parallel(
            left=body(foreach("each", [1, 2], {"workflow": "called", "input": {"x": "{{ item }}"}})),
            right=body(note("beside")),
        ),
        ["both/left/each[0]/ask", "both/left/each[1]/ask"],
    ),
    "workflow in fan-out in parallel": (
        parallel(
            left=body(
                foreach("each", [1, 2], {"workflow": "called", "input": {"x": "{{ item }}"}}, fanout=True)
            )
        ),
        ["both/left/each[0]/ask", "both/left/each[1]/ask"],
    ),
    "loop in foreach": (
        foreach("each", [1, 2], body(in_loop())),
        ["each[0]/again#1/ask", "each[0]/again#2/ask", "each[1]/again#1/ask", "each[1]/again#2/ask"],
    ),
}


class TestGates:
    @pytest.mark.parametrize("place", IN_BODIES)
    def test_pauses_and_goes_on_where_it_was_and_repeats_nothing(self, place, execution, sqlite_url):
        container, gates = IN_BODIES[place]
        document = chain(container, output=f"{{{{ steps.{container['id']}.output }}}}")
        asked = []

        def answer(wait):
            asked.append(wait.step_key)
            return Answer(by="ann")

        open_store(sqlite_url).close()
        result = run(document, {}, CALLED, execution=execution, answers=answer, database_url=sqlite_url)
        assert result.succeeded, result.run.error
        assert sorted(asked) == gates
        counted = Counter(notes())
        assert (counted["first"], counted["last"]) == (len(gates), len(gates))
        assert counted["beside"] in (0, 1)
        assert {step.attempt for step in result.steps.values()} == {1}
        assert {step.status for step in result.steps.values()} == {StepStatus.SUCCEEDED}
        assert all(wait.used_at is not None for wait in result.waits)
        with open_store(sqlite_url) as store:
            assert not store.claims.is_ready(result.run.id)

    @pytest.mark.parametrize("place", IN_BODIES)
    def test_while_it_waits_its_containers_wait_and_the_rest_is_done(self, place, execution):
        container, gates = IN_BODIES[place]
        result = run(chain(container, note("after")), {}, CALLED, execution=execution)
        assert result.run.status is RunStatus.WAITING
        assert result.dagster_result.success
        # The gates themselves, and not what they stand in.
        assert set(result.run.suspended_steps) == {
            wait.step_key for wait in result.waits if wait.status is WaitStatus.OPEN
        }
        found = statuses(result)
        assert found[container["id"]] == "waiting"
        assert "after" not in found
        waiting = {wait.step_key for wait in result.waits if wait.status is WaitStatus.OPEN}
        assert waiting <= set(gates)
        assert waiting
        for key in waiting:
            assert found[key] == "waiting"
            while (key := result.steps[key].parent_key) is not None:
                assert found[key] == "waiting", key
        assert Counter(notes())["beside"] == ("right" in container["config"].get("branches", {}))

    def test_two_items_are_answered_in_the_opposite_order_each_after_its_own_continuation(self, execution):
        each = foreach("each", ["a", "b"], body(note("first"), gate(), note("last", value="{{ item }}")))
        asked = []

        def answer(wait):
            asked.append(wait.step_key)
            return Answer() if wait.step_key == "each[1]/ask" or asked.count(wait.step_key) > 1 else None

        result = run(chain(each, output="{{ steps.each.output }}"), execution=execution, answers=answer)
        assert result.succeeded, result.run.error
        assert (sorted(asked[:2]), asked[2:]) == (["each[0]/ask", "each[1]/ask"], ["each[0]/ask"])
        assert len(result.run.dagster_run_ids) == 3
        assert result.run.output == ["a", "b"]
        assert notes() == ["first", "first", "last", "last"]
        assert result.steps["each[1]/last"].dagster_run_id == result.run.dagster_run_ids[1]
        assert result.steps["each[0]/last"].dagster_run_id == result.run.dagster_run_ids[2]

    def test_the_answer_decides_where_the_body_goes_on(self, execution):
        edges = [edge("ask", "yes", "approved"), edge("ask", "no", "rejected")]
        each = foreach("each", [1, 2, 3], body(gate(), note("yes"), note("no"), edges=edges))

        def answer(wait):
            return Answer(decision="rejected" if wait.step_key == "each[1]/ask" else "approved")

        result = run(chain(each, output="{{ steps.each.output }}"), execution=execution, answers=answer)
        assert result.succeeded, result.run.error
        assert result.run.output == ["yes", "no", "yes"]
        assert statuses(result)["each[1]/yes"] == "skipped"


class TestOtherWaits:
    def test_a_tool_that_needs_approval(self, execution):
        pay = {
            "kind": "tool",
            "slug": "pay",
            "type": "function",
            "config": {"function": "workflow_functions:note"},
            "requires_approval": True,
            "side_effects": True,
        }
        paying = node("pay", "tool", {"tool": "pay", "input": {"name": "paid", "value": "{{ item }}"}})
        each = foreach("each", [1, 2], body(note("first"), paying, note("last")))
        waiting = run(chain(each), {}, pay, execution=execution)
        assert waiting.run.status is RunStatus.WAITING
        assert {wait.kind for wait in waiting.waits} == {WaitKind.TOOL}
        assert sorted(wait.step_key for wait in waiting.waits) == ["each[0]/pay/tool/1", "each[1]/pay/tool/1"]
        assert "paid" not in notes()
        done = run(chain(each), {}, pay, execution=execution, answers=lambda _wait: Answer())
        assert done.succeeded, done.run.error
        assert Counter(notes()) == {"first": 4, "paid": 2, "last": 2}

    def test_an_event(self, execution):
        paid = node("paid", "webhook", {"event": "payment", "key": "{{ item }}"})
        each = foreach("each", ["a", "b"], body(note("first"), paid))
        answers = lambda wait: Answer(data={"of": wait.event_key})  # noqa: E731
        result = run(chain(each, output="{{ steps.each.output }}"), execution=execution, answers=answers)
        assert result.succeeded, result.run.error
        assert result.run.output == [{"of": "a"}, {"of": "b"}]
        assert notes() == ["first", "first"]

    def test_a_timer(self, execution):
        pause = node("pause", "delay", {"seconds": "2h"})
        again = loop("again", body(note("first"), pause), until="iteration >= 2")
        waiting = run(chain(again), execution=execution)
        assert waiting.run.status is RunStatus.WAITING
        assert [wait.kind for wait in waiting.waits] == [WaitKind.TIMER]
        done = run(chain(again), execution=execution, answers=approve)
        assert done.succeeded, done.run.error
        assert len(done.run.dagster_run_ids) == 3
        assert Counter(notes()) == {"first": 3}

    def test_a_function_that_suspends(self, execution):
        ask = code("ask", "ask_in_between", module="flow_functions", name="ask {{ item }}")
        branch = body(foreach("each", [1, 2], body(note("first"), ask)))
        answers = lambda wait: Answer(data=wait.data)  # noqa: E731
        document = chain(parallel(left=branch), output="{{ steps.both.output.left }}")
        result = run(document, execution=execution, answers=answers)
        assert result.succeeded, result.run.error
        assert result.run.output == [{"of": "ask 1"}, {"of": "ask 2"}]
        # A function that suspends is called again from its start.
        assert Counter(notes()) == {"first": 2, "ask 1 called": 2, "ask 2 called": 2}

    def test_the_time_between_two_iterations(self, execution):
        again = loop("again", body(note("first")), until="iteration >= 3", delay_s="2h")
        waiting = run(chain(again), execution=execution)
        assert waiting.run.status is RunStatus.WAITING
        assert (waiting.waits[0].kind, waiting.waits[0].step_key) == (WaitKind.TIMER, "again")
        done = run(chain(again, output="{{ steps.again.output }}"), execution=execution, answers=approve)
        assert done.succeeded, done.run.error
        assert done.run.output == {"output": "first", "iterations": 3}
        assert len(done.run.dagster_run_ids) == 3
        assert Counter(notes()) == {"first": 4}


class TestClosedGates:
    """A gate whose answer nobody needs any more is closed, and asks for no continuation."""

    def closed(self, document, url, execution, **options):
        open_store(url).close()
        result = run(document, execution=execution, database_url=url, **options)
        assert result.succeeded, result.run.error
        [wait] = result.waits
        assert wait.status is WaitStatus.CANCELED
        with open_store(url) as store:
            assert not store.claims.is_ready(result.run.id)
            vote = Vote(by="ann", decision="approved", at=wait.created_at)
            with pytest.raises(ApprovalError):
                store.waits.decide(result.run.project, wait.id, vote)
            assert not store.claims.is_ready(result.run.id)
        return result

    def test_of_a_branch_that_lost(self, execution, database_url):
        right = body(
            code("wins", "until", module="flow_functions", key="both/left", status="waiting", value="won")
        )
        both = parallel(left=body(gate()), right=right, wait="first")
        result = self.closed(chain(both, output="{{ steps.both.output }}"), database_url, execution)
        assert result.run.output == {"left": None, "right": "won"}
        found = statuses(result)
        assert (found["both/left"], found["both/left/ask"]) == ("canceled", "canceled")

    def test_and_later_ones_are_all_that_a_run_waits_at(self, execution):
        """The node that lost is no place where the run waits."""
        right = body(
            code("wins", "until", module="flow_functions", key="both/left", status="waiting", value="won")
        )
        both = parallel(left=body(gate()), right=right, wait="first")
        result = run(chain(both, gate("later")), execution=execution)
        assert result.run.status is RunStatus.WAITING
        assert result.run.suspended_steps == ("later",)

    def test_of_a_branch_beside_one_whose_failure_is_handled(self, execution, sqlite_url):
        more = {"on_error": "continue"}
        both = parallel(left=body(gate()), right=body(fail()), more=more)
        result = self.closed(chain(both), sqlite_url, execution)
        assert result.steps["both"].error["message"].endswith("no luck")

    def test_of_an_item_whose_failure_is_collected(self, execution, sqlite_url):
        each = foreach("each", [1], body(gate(), fail(), edges=[]), on_item_error="collect")
        result = self.closed(chain(each, output="{{ steps.each.output }}"), sqlite_url, execution)
        assert set(result.run.output[0]) == {"error"}

    def test_of_a_called_workflow_whose_failure_is_handled(self, execution, sqlite_url):
        called = {
            **chain(slug="called"),
            "nodes": [{"id": "start", "type": "start"}, gate(), fail(), node("done", "end", {})],
            "edges": [
                edge("start", "ask"),
                edge("start", "bad"),
                edge("ask", "done"),
                edge("bad", "done"),
            ],
        }
        each = foreach("each", [{}], {"workflow": "called"}, on_item_error="skip")
        open_store(sqlite_url).close()
        result = run(
            chain(each, output="{{ steps.each.output }}"),
            {},
            called,
            execution=execution,
            database_url=sqlite_url,
        )
        assert result.run.output == []
        assert [wait.status for wait in result.waits] == [WaitStatus.CANCELED]
        with open_store(sqlite_url) as store:
            assert not store.claims.is_ready(result.run.id)

    def test_of_a_branch_that_lost_after_it_had_waited(self, execution, sqlite_url):
        """The gate that decides is answered first; the other one is closed then."""
        both = parallel(left=body(gate("slow")), right=body(gate("quick")), wait="first")
        answers = lambda wait: Answer() if wait.step_key.endswith("quick") else None  # noqa: E731
        open_store(sqlite_url).close()
        result = run(chain(both), execution=execution, answers=answers, database_url=sqlite_url)
        assert result.succeeded, result.run.error
        found = {wait.step_key: wait.status for wait in result.waits}
        assert found == {"both/left/slow": WaitStatus.CANCELED, "both/right/quick": WaitStatus.DECIDED}
        with open_store(sqlite_url) as store:
            assert not store.claims.is_ready(result.run.id)


class TestFailuresBesideGates:
    @pytest.mark.parametrize("wait", ["any", 1])
    def test_a_branch_that_failed_stays_failed_when_the_gate_is_answered(self, wait, execution):
        """It is no further attempt: what failed before the gate was answered has failed."""
        left, right = body(gate(), note("went")), body(note("tried"), fail())
        result = run(chain(parallel(left=left, right=right, wait=wait)), execution=execution, answers=approve)
        assert result.succeeded, result.run.error
        assert sorted(notes()) == ["tried", "went"]
        found = statuses(result)
        assert (found["both/left"], found["both/right"]) == ("succeeded", "failed")
        assert result.steps["both/right/bad"].attempt == 1

    def test_its_own_retry_runs_it_again(self, execution):
        left, right = body(note("tried"), fail()), body(gate(), code("bad", "fail_first", name="bad"))
        both = parallel(left=left, right=right, wait="any", more=RETRIED)
        result = run(chain(both), execution=execution, answers=approve)
        assert result.succeeded, result.run.error
        assert (statuses(result)["both/left"], result.steps["both/left"].attempt) == ("failed", 2)
        assert Counter(notes()) == {"tried": 1, "bad": 2}


class TestWaitingOn:
    """What waits on, while something beside it is answered, writes nothing again."""

    def test_a_gate_is_told_of_once(self, execution, sqlite_url):
        asked = []

        def answer(wait):
            asked.append(wait.step_key)
            return Answer() if wait.step_key == "each[2]/ask" or len(asked) > 3 else None

        open_store(sqlite_url).close()
        each = foreach("each", [1, 2, 3], body(gate()))
        result = run(chain(each), execution=execution, answers=answer, database_url=sqlite_url)
        assert result.succeeded, result.run.error
        assert len(result.run.dagster_run_ids) == 3
        told = Counter((event.type, event.step_key) for event in result.events)
        for index in range(3):
            assert told["step.waiting_human", f"each[{index}]/ask"] == 1

    def test_each_node_asks_for_its_own_waits_alone(self, execution, sqlite_url, monkeypatch):
        read = []
        honest = StoreJournal.waits

        async def counting(self, run_id, node_key=None):
            read.append(node_key)
            return await honest(self, run_id, node_key)

        monkeypatch.setattr(StoreJournal, "waits", counting)
        open_store(sqlite_url).close()
        each = foreach("each", [1, 2, 3], body(gate(), note("last")))
        result = run(chain(each), execution=execution, answers=approve, database_url=sqlite_url)
        assert result.succeeded, result.run.error
        assert Counter(key for key in read if key is not None) == {f"each[{n}]/ask": 1 for n in range(3)}


class TestTimeOfCalledWorkflows:
    """`settings.timeout_s` of a called workflow counts on where its call goes on."""

    def called(self, **settings):
        return chain(PAUSE["before"], gate(), PAUSE["after"], slug="called", settings=settings)

    @pytest.mark.parametrize("container", ["workflow", "foreach"])
    def test_working_time_is_that_of_all_dagster_runs(self, container, execution):
        containers = {
            "workflow": call("sub", "called", input={}),
            "foreach": foreach("sub", [1], {"workflow": "called", "input": {}}),
        }
        document = chain(containers[container])
        late = run(document, {}, self.called(timeout_s=0.6), execution=execution, answers=approve)
        assert late.run.status is RunStatus.FAILED
        assert late.run.error["code"] == "timeout"
        [wait] = late.waits
        assert wait.status is WaitStatus.DECIDED
        fine = run(document, {}, self.called(timeout_s=30), execution=execution, answers=approve)
        assert fine.succeeded, fine.run.error

    def test_waiting_counts_where_its_settings_say_so_and_its_end_wakes_the_run(self, execution):
        called = self.called(timeout_s=60, timeout_includes_waiting=True)
        document = chain(call("sub", "called", {"on_error": "continue"}, input={}), note("after"))
        waiting = run(document, {}, called, execution=execution)
        timer, asked = sorted(waiting.waits, key=lambda wait: wait.kind is not WaitKind.TIMER)
        assert (timer.step_key, asked.step_key) == ("sub", "sub/ask")
        assert 0 < (timer.deadline_at - waiting.steps["sub"].started_at).total_seconds() < 61

        only_time = lambda wait: Answer() if wait.kind is WaitKind.TIMER else None  # noqa: E731
        late = run(document, {}, called, execution=execution, answers=only_time)
        assert late.succeeded, late.run.error
        assert late.steps["sub"].error["code"] == "timeout"
        assert notes() == ["after"]
        assert {wait.step_key: wait.status for wait in late.waits}["sub/ask"] is WaitStatus.CANCELED

        only_people = lambda wait: Answer() if wait.kind is WaitKind.HUMAN else None  # noqa: E731
        fine = run(document, {}, called, execution=execution, answers=only_people)
        assert fine.steps["sub"].status is StepStatus.SUCCEEDED
        assert {wait.kind: wait.status for wait in fine.waits}[WaitKind.TIMER] is WaitStatus.CANCELED

    def test_so_does_the_timeout_of_a_container(self, execution):
        each = foreach("each", [1], body(PAUSE["before"], gate(), PAUSE["after"]), more={"timeout_s": 0.6})
        result = run(chain(each), execution=execution, answers=approve)
        assert result.run.error["code"] == "timeout"


def test_the_finally_of_a_called_workflow_does_not_wait(execution):
    # What is not seen before it runs: a function that suspends.
    closing = body(note("closing"), code("ask", "ask_in_between", module="flow_functions", name="asks"))
    called = chain(note("a"), slug="called", **{"finally": closing})
    result = run(chain(call("sub", "called", input={})), {}, called, execution=execution, answers=approve)
    assert (result.run.status, result.run.error["code"]) == (RunStatus.FAILED, "finalizer-waits")
    assert notes() == ["a", "closing", "asks called"]


def test_a_rejection_in_a_branch_fails_what_had_waited_with_it(execution):
    inner = parallel("inner", one=body(gate(), note("never")), two=body(note("beside")))
    result = run(
        chain(parallel(left=body(inner))),
        execution=execution,
        answers=lambda _wait: Answer(decision="rejected", comment="no"),
    )
    assert result.run.status is RunStatus.FAILED
    assert result.run.error["code"] == "rejected"
    found = statuses(result)
    failed = {key for key, status in found.items() if status == "failed"}
    assert failed == {
        "both",
        "both/left",
        "both/left/inner",
        "both/left/inner/one",
        "both/left/inner/one/ask",
    }
    assert "waiting" not in found.values()


def test_an_unhandled_failure_beside_a_gate_fails_the_run(execution):
    both = parallel(left=body(gate()), right=body(fail()))
    result = run(chain(both), execution=execution, answers=approve)
    assert result.run.status is RunStatus.FAILED
    found = statuses(result)
    assert (found["both"], found["both/left/ask"], found["both/right"]) == ("failed", "waiting", "failed")


def test_the_journal_of_a_gate_is_the_same_on_postgresql(execution, postgres_url):
    container, gates = IN_BODIES["workflow in foreach in parallel"]
    document = chain(container, output="{{ steps.both.output }}")
    result = run(document, {}, CALLED, execution=execution, answers=approve, database_url=postgres_url)
    assert result.succeeded, result.run.error
    assert result.run.output == {"left": ["last", "last"], "right": "beside"}
    assert sorted(wait.step_key for wait in result.waits) == gates
    assert Counter(notes()) == {"first": 2, "last": 2, "beside": 1}
