"""What fails, times out, is canceled or goes on later in containers: what is kept, and what runs again."""

from __future__ import annotations

import contextlib
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
    note,
    opened_job,
    parallel,
    run,
    statuses,
    transform,
    workflow,
)
from workflow_functions import notes

from agentmesh_dagster.records import RunStatus, StepStatus, WaitStatus
from agentmesh_dagster.runtime import nested

FLOW = {"module": "flow_functions"}
ONCE = {"retry": {"max_attempts": 2, "delay_s": 0}}


@pytest.fixture(autouse=True)
def noted(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def at(bad, *, function="fail_at", id="x"):
    """A node that notes its item, and fails for those that are bad."""
    return code(id, function, **FLOW, name=id, item="{{ item }}", bad=bad)


def hanging(id="hang"):
    """A node that never ends by itself."""
    return code(id, "hang_after", **FLOW, name=f"{id} begins", then=f"{id} cleaned up")


class TestItemsThatFail:
    def test_fail_begins_no_further_item_and_keeps_the_finished_ones(self):
        each = foreach("each", [1, 2, 3, 4], body(at([2])), concurrency=1)
        result = run(chain(each))
        assert result.run.status is RunStatus.FAILED
        assert result.run.error == result.steps["each[1]/x"].error
        found = statuses(result)
        assert (found["each"], found["each[0]"], found["each[1]"]) == ("failed", "succeeded", "failed")
        assert "each[2]" not in found
        assert notes() == ["x 1", "x 2"]

    def test_fail_lets_items_that_are_at_work_go_on_to_their_end(self):
        waiting = code(
            "x", "until_failed", **FLOW, key="{{ 'each[0]' if index else '' }}", bad=[0], item="{{ item }}"
        )
        result = run(chain(foreach("each", [0, 1, 2, 3], body(waiting), concurrency=2)))
        found = statuses(result)
        assert (found["each[0]"], found["each[1]"]) == ("failed", "succeeded")
        assert "each[2]" not in found

    @pytest.mark.parametrize("fanout", [False, True])
    def test_collect_puts_the_error_in_the_items_place(self, fanout):
        each = foreach("each", [1, 2, 3], body(at([2])), on_item_error="collect", fanout=fanout)
        result = run(chain(each, output="{{ steps.each.output }}"))
        assert result.succeeded, result.run.error
        [first, second, third] = result.run.output
        assert (first, third) == (1, 3)
        assert second == {"error": result.steps["each[1]/x"].error}
        assert statuses(result)["each[1]"] == "failed"

    @pytest.mark.parametrize("fanout", [False, True])
    def test_skip_leaves_the_item_out(self, fanout):
        each = foreach("each", [1, 2, 3], body(at([2])), on_item_error="skip", fanout=fanout)
        result = run(chain(each, output="{{ steps.each.output }}"))
        assert result.run.output == [1, 3]

    def test_so_many_failures_are_put_up_with(self):
        each = foreach("each", [1, 2, 3], body(at([1, 3])), on_item_error="skip", max_failures=2)
        result = run(chain(each, output="{{ steps.each.output }}"))
        assert result.run.output == [2]

    def test_one_more_fails_the_node(self):
        each = foreach(
            "each", [1, 2, 3, 4], body(at([1, 3])), on_item_error="skip", max_failures=1, concurrency=1
        )
        result = run(chain(each))
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "too-many-failures"
        assert "each: more than max_failures = 1 items failed" in result.run.error["message"]
        assert result.run.error["context"]["error"] == result.steps["each[2]/x"].error
        assert notes() == ["x 1", "x 2", "x 3"]

    def test_a_retry_keeps_the_failures_that_were_put_up_with(self):
        """What was one too many runs again, and only that."""
        failing = body(at([1, 3], function="fail_at_first"))
        each = foreach(
            "each", [1, 2, 3, 4], failing, on_item_error="collect", max_failures=1, concurrency=1, more=ONCE
        )
        result = run(chain(each, output="{{ steps.each.output }}"))
        assert result.succeeded, result.run.error
        assert result.run.output[1:] == [2, 3, 4]
        assert set(result.run.output[0]) == {"error"}
        assert Counter(notes()) == {"x 1": 1, "x 2": 1, "x 3": 2, "x 4": 1}
        assert result.steps["each"].attempt == 2

    def test_a_retry_cannot_put_up_with_more(self):
        each = foreach("each", [1, 2, 3], body(at([1, 3])), on_item_error="skip", max_failures=1, more=ONCE)
        result = run(chain(each))
        assert result.run.error["code"] == "too-many-failures"
        assert sum(count for name, count in Counter(notes()).items() if name != "x 2") == 3


class TestRetriesOfContainers:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_a_foreach_repeats_no_finished_item(self, execution):
        each = foreach(
            "each", [1, 2, 3], body(note("a", "a {{ item }}"), at([2], function="fail_at_first")), more=ONCE
        )
        result = run(chain(each), execution=execution)
        assert result.succeeded, result.run.error
        assert Counter(notes()) == {"a 1": 1, "a 2": 1, "a 3": 1, "x 1": 1, "x 2": 2, "x 3": 1}

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_a_loop_goes_on_with_the_iteration_that_failed(self, execution):
        failing = code("x", "fail_at_first", **FLOW, name="x", item="{{ iteration }}", bad=[2])
        again = loop(
            "again", body(note("a", "a {{ iteration }}"), failing), until="iteration == 3", more=ONCE
        )
        result = run(chain(again), execution=execution)
        assert result.succeeded, result.run.error
        assert notes() == ["a 1", "x 1", "a 2", "x 2", "x 2", "a 3", "x 3"]

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_a_parallel_repeats_no_finished_branch(self, execution):
        bad = code("bad", "fail_first", name="bad")
        both = parallel(left=body(note("a"), bad), right=body(note("b")), more=ONCE)
        result = run(chain(both), execution=execution)
        assert result.succeeded, result.run.error
        assert Counter(notes()) == {"a": 1, "bad": 2, "b": 1}

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_a_workflow_repeats_none_of_its_finished_nodes(self, execution):
        called = chain(note("a"), code("bad", "fail_first", name="bad"), slug="called")
        result = run(chain(call("sub", "called", ONCE, input={})), {}, called, execution=execution)
        assert result.succeeded, result.run.error
        assert notes() == ["a", "bad", "bad"]
        assert (result.steps["sub"].attempt, result.steps["sub/bad"].attempt) == (2, 2)

    def test_a_retry_after_a_gate_asks_nobody_again(self):
        bad = code("bad", "fail_first", name="bad")
        both = parallel(left=body(gate(), bad), right=body(note("b")), more=ONCE)
        result = run(chain(both), answers=approve)
        assert result.succeeded, result.run.error
        assert Counter(notes()) == {"bad": 2, "b": 1}
        assert len(result.waits) == 1


class TestHandledFailures:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    @pytest.mark.parametrize("kind", ["foreach", "loop", "parallel", "workflow"])
    def test_route_leads_on_by_the_edge_for_errors(self, kind, execution):
        more = {"on_error": "route"}
        container = {
            "foreach": foreach("it", [1], body(fail()), more=more),
            "loop": loop("it", body(fail()), until="true", more=more),
            "parallel": parallel("it", left=body(fail()), more=more),
            "workflow": call("it", "called", more, input={}),
        }[kind]
        nodes = [container, transform("told", "{{ steps.it.error.message }}"), transform("fine")]
        edges = [
            edge("start", "it"),
            edge("it", "told", "error"),
            edge("it", "fine"),
            edge("told", "done"),
            edge("fine", "done"),
        ]
        result = run(workflow(nodes, edges), {}, chain(fail(), slug="called"), execution=execution)
        assert result.succeeded, result.run.error
        assert result.run.output.endswith("no luck")
        assert statuses(result)["fine"] == "skipped"
        assert statuses(result)["it"] == "failed"

    def test_errors_are_handled_inside_a_body_too(self):
        edges = [edge("bad", "told", "error"), edge("bad", "fine")]
        nodes = [
            code("bad", "fail_at", **FLOW, name="x", item="{{ item }}", bad=[2], more={"on_error": "route"}),
            transform("told", "told"),
            transform("fine", "{{ item }}"),
        ]
        each = foreach("each", [1, 2, 3], body(*nodes, edges=edges))
        result = run(chain(each, output="{{ steps.each.output }}"))
        assert result.run.output == [1, "told", 3]

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_what_does_not_hang_on_a_failure_goes_on_to_its_end(self, execution):
        edges = [edge("bad", "never"), edge("a", "b"), edge("b", "c")]
        nodes = [fail(), note("never"), note("a"), note("b"), note("c")]
        result = run(chain(parallel(left=body(*nodes, edges=edges)), note("after")), execution=execution)
        assert result.run.status is RunStatus.FAILED
        assert notes() == ["a", "b", "c"]
        assert "both/left/never" not in statuses(result)


class TestTimeouts:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    @pytest.mark.parametrize("kind", ["foreach", "loop", "parallel", "workflow"])
    def test_of_a_container_cuts_off_all_that_is_in_it(self, kind, execution):
        more = {"timeout_s": 0.5}
        container = {
            "foreach": foreach("it", [1, 2], body(hanging()), more=more),
            "loop": loop("it", body(hanging()), until="true", more=more),
            "parallel": parallel(
                "it", left=body(hanging()), right=body(foreach("e", [1], body(hanging("h")))), more=more
            ),
            "workflow": call("it", "called", more, input={}),
        }[kind]
        result = run(chain(container), {}, chain(hanging(), slug="called"), execution=execution)
        assert result.run.status is RunStatus.FAILED
        assert "node 'it' took longer than its timeout_s = 0.5" in result.run.error["message"]
        began = [name for name in notes() if name.endswith("begins")]
        assert began
        assert sorted(n for n in notes() if n.endswith("cleaned up")) == sorted(
            name.replace("begins", "cleaned up") for name in began
        )
        assert StepStatus.RUNNING not in {step.status for step in result.steps.values()}
        assert statuses(result)["it"] == "failed"

    def test_of_a_node_in_a_body(self):
        slow = {**hanging(), "timeout_s": 0.3}
        result = run(chain(foreach("each", [1], body(slow)), note("never")))
        assert "node 'each[0]/hang' took longer than its timeout_s = 0.3" in result.run.error["message"]
        assert notes() == ["hang begins", "hang cleaned up"]

    def test_the_workflows_node_timeout_holds_in_bodies_and_not_for_containers(self):
        slow = code("x", "when_noted", **FLOW, names=["a"])
        each = foreach("each", [1], body(note("a"), slow, hanging()))
        result = run(chain(each, settings={"node_timeout_s": 0.4}))
        assert "'each[0]/hang' took longer" in result.run.error["message"]

    @pytest.mark.parametrize("execution", EXECUTIONS)
    @pytest.mark.parametrize("kind", ["foreach", "parallel"])
    def test_of_the_run_reaches_into_bodies(self, kind, execution):
        container = {
            "foreach": foreach("it", [1, 2], body(hanging())),
            "parallel": parallel("it", left=body(hanging()), right=body(note("b"))),
        }[kind]
        result = run(chain(note("a"), container, settings={"timeout_s": 1.5}), execution=execution)
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "run-timeout"
        assert "settings.timeout_s = 1.5" in result.run.error["message"]
        counted = Counter(notes())
        assert counted["hang cleaned up"] == counted["hang begins"]
        assert counted["hang begins"] >= 1
        assert not {StepStatus.RUNNING, StepStatus.WAITING} & {step.status for step in result.steps.values()}


class TestBounds:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_max_steps_bounds_the_workflows_own_nodes_and_not_bodies(self, execution):
        each = foreach("each", [1, 2, 3, 4, 5], body(note("x")))
        fine = run(chain(each, settings={"max_steps": 3}), execution=execution)
        assert fine.succeeded, fine.run.error
        late = run(chain(each, note("y"), settings={"max_steps": 3}), execution=execution)
        assert late.run.error["code"] == "max-steps"
        assert late.steps["done"].status is StepStatus.FAILED

    @pytest.mark.parametrize("more", [{}, {"retry": {"max_attempts": 1}}], ids=["nested", "walked"])
    def test_a_called_workflow_has_its_own(self, more):
        called = chain(note("a"), note("b"), slug="called", settings={"max_steps": 3})
        result = run(chain(call("sub", "called", more, input={})), {}, called)
        assert result.run.error["code"] == "max-steps"
        assert result.steps["sub/done"].status is StepStatus.FAILED
        assert notes() == ["a", "b"]


class TestCancel:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_reaches_into_bodies_and_cleans_up(self, execution):
        item = body(parallel("inner", one=body(hanging()), two=body(note("beside"))))
        document = chain(foreach("each", [1, 2], item), note("never"))
        with opened_job(document, execution=execution) as job:
            stopped = job.canceled({}, lambda: notes().count("hang begins") == 2)
            assert stopped.status is RunStatus.CANCELED
            assert notes().count("hang cleaned up") == 2
            found = job.statuses(stopped)
            assert found["each[0]/inner/one/hang"] == found["each[1]/inner/one/hang"] == "canceled"
            assert "never" not in found
            assert "running" not in found.values()

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_reaches_into_nested_graphs(self, execution):
        called = chain(hanging(), slug="called")
        both = parallel(left={"workflow": "called", "input": {}}, right=body(note("beside")))
        with opened_job(chain(both, note("never")), called, execution=execution) as job:
            stopped = job.canceled({}, lambda: "hang begins" in notes())
            assert stopped.status is RunStatus.CANCELED
            assert notes().count("hang cleaned up") == 1
            found = job.statuses(stopped)
            assert found["both/left/hang"] == "canceled"
            assert "never" not in found
            assert "running" not in found.values()

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_of_what_waits_ends_its_steps_too(self, execution):
        both = parallel(left=body(gate()), right=body(note("beside")))
        with opened_job(chain(both, note("never")), execution=execution) as job:
            waiting = job.execute()
            assert job.store.runs.set_status(waiting.id, [RunStatus.WAITING], RunStatus.CANCELED)
            found = job.statuses(waiting)
            assert (found["both"], found["both/left/ask"]) == ("canceled", "canceled")
            assert set(found.values()) <= {"succeeded", "canceled"}
            again = job.resume(job.store.runs.get(waiting.id))
            assert again.status is RunStatus.WAITING
            assert notes() == ["beside"]

    def test_a_called_workflow_that_is_cut_off_cleans_up(self):
        closing = body(note("closing", "finally {{ run.status }}"))
        called = chain(hanging(), slug="called", **{"finally": closing})
        document = chain(call("sub", "called", {"timeout_s": 0.3, "on_error": "continue"}, input={}))
        result = run(document, {}, called)
        assert result.succeeded, result.run.error
        assert notes() == ["hang begins", "hang cleaned up", "finally canceled"]

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_of_branches_that_lose_ends_all_that_is_in_them(self, execution):
        slow = body(foreach("each", [1, 2], body(hanging()), concurrency=2))
        quick = body(code("quick", "when_noted", **FLOW, names=["hang begins"], value="won"))
        result = run(chain(parallel(slow=slow, quick=quick, wait="first")), execution=execution)
        assert result.succeeded, result.run.error
        assert not {"running", "waiting"} & set(statuses(result).values())

    def test_a_canceled_run_goes_on_where_it_was(self):
        waiting = code("x", "hang_once", name="hangs {{ item }}")
        each = foreach("each", [1, 2], body(note("a", "a {{ item }}"), waiting))
        with opened_job(chain(each, output="{{ steps.each.output }}")) as job:
            stopped = job.canceled({}, lambda: {"hangs 1", "hangs 2"} <= set(notes()))
            assert stopped.status is RunStatus.CANCELED
            done = job.resume(stopped)
            assert (done.status, done.output) == (RunStatus.SUCCEEDED, ["answered", "answered"])
            assert Counter(notes()) == {"a 1": 1, "a 2": 1, "hangs 1": 2, "hangs 2": 2}


class TestResume:
    @pytest.mark.parametrize("fanout", [False, True])
    def test_after_a_failure_at_one_item_no_finished_item_is_repeated(self, fanout, database_url):
        items = list(range(12))
        each = foreach(
            "each",
            items,
            body(at([7], function="fail_at_first"), transform("y", "{{ steps.x.output }}")),
            concurrency=1,
            fanout=fanout,
        )
        with opened_job(chain(each, output="{{ steps.each.output }}"), url=database_url) as job:
            failed = job.execute()
            assert failed.status is RunStatus.FAILED
            done = job.resume(failed)
            assert (done.status, done.output) == (RunStatus.SUCCEEDED, items), done.error
            assert len(done.dagster_run_ids) == 2
            assert Counter(notes()) == {f"x {item}": 2 if item == 7 else 1 for item in items}
            steps = job.steps(done)
            assert (steps["each[7]/x"].attempt, steps["each[6]/x"].attempt) == (2, 1)

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_deep_inside(self, execution):
        again = loop(
            "again",
            body(note("a", "a {{ item }} {{ iteration }}"), at([2], function="fail_at_first")),
            until="iteration == 2",
        )
        document = chain(
            parallel(left=body(foreach("each", [1, 2], body(again), concurrency=1)), right=body(note("b"))),
            output="{{ steps.both.output }}",
        )
        with opened_job(document, execution=execution) as job:
            failed = job.execute()
            assert failed.status is RunStatus.FAILED
            done = job.resume(failed)
            one, two = ({"output": n, "iterations": 2} for n in (1, 2))
            assert (done.status, done.output) == (RunStatus.SUCCEEDED, {"left": [one, two], "right": "b"})
            found = Counter(notes())
            assert found == {"a 1 1": 1, "a 1 2": 1, "x 1": 2, "a 2 1": 1, "x 2": 3, "a 2 2": 1, "b": 1}

    def test_an_open_gate_of_a_failed_run_can_be_answered_and_goes_on_with_a_retry(self):
        both = parallel(left=body(gate(), note("after")), right=body(code("bad", "fail_first", name="bad")))
        with opened_job(chain(both, output="{{ steps.both.output }}")) as job:
            failed = job.execute()
            assert failed.status is RunStatus.FAILED
            [wait] = job.store.waits.list(failed.project, run_id=failed.id)
            assert wait.status is WaitStatus.OPEN
            waiting = job.resume(failed)
            assert waiting.status is RunStatus.WAITING
            assert notes() == ["bad", "bad"]


def test_an_exception_that_no_row_tells_is_not_hidden_by_one_that_a_row_does(monkeypatch):
    """A whole workflow in one op: its end is read from the rows, and the walker itself may have failed."""

    honest = nested.walk

    async def failing(session, scope, say):
        with contextlib.suppress(Exception):
            await honest(session, scope, say)
        raise RuntimeError("the walker itself")

    monkeypatch.setattr(nested, "walk", failing)
    result = run(chain(fail()), execution="inline")
    assert result.run.status is RunStatus.FAILED
    shown = str(result.dagster_result.failure_data_for_node("agentmesh_run"))
    assert "the walker itself" in shown
