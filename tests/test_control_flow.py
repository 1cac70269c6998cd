"""What `foreach`, `loop`, `parallel` and `workflow` do with their options, in real runs."""

from __future__ import annotations

import pytest
from control_flow import (
    EXECUTIONS,
    body,
    call,
    chain,
    code,
    edge,
    fail,
    foreach,
    loop,
    node,
    note,
    parallel,
    run,
    statuses,
    transform,
    workflow,
)
from workflow_functions import notes

from agentmesh_dagster.records import RunStatus

FLOW = {"module": "flow_functions"}
NUMBER = {"type": "object", "required": ["n"], "properties": {"n": {"type": "number"}}}
TWICE = chain(transform("twice", "{{ input.n * 2 }}"), slug="twice", input_schema=NUMBER)


@pytest.fixture(autouse=True)
def noted(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def output_of(container, input=None, *others, execution="dagster", **more):
    """What a container gives, which is all that the run does."""
    document = chain(container, output=f"{{{{ steps.{container['id']}.output }}}}", **more)
    result = run(document, input, *others, execution=execution)
    assert result.succeeded, result.run.error
    return result.run.output


def error_of(container, input=None, *others, **more):
    """The error of a container that fails the run."""
    result = run(chain(container, **more), input, *others)
    assert result.run.status is RunStatus.FAILED
    assert result.steps[container["id"]].status.value == "failed"
    assert result.run.error == result.steps[container["id"]].error
    return result.run.error


class TestForeach:
    @pytest.mark.parametrize("fanout", [False, True])
    @pytest.mark.parametrize("items", [[], ["only"], ["a", "b", "c"]])
    def test_gives_the_outputs_in_the_order_of_the_items(self, items, fanout):
        each = foreach(
            "each", "{{ input.xs }}", body(transform("x", ["{{ item }}", "{{ index }}"])), fanout=fanout
        )
        assert output_of(each, {"xs": items}) == [[item, n] for n, item in enumerate(items)]

    def test_in_the_order_of_the_items_though_the_last_ends_first(self):
        first = code("wait", "when_noted", **FLOW, names="{{ [] if index == 2 else [(index + 1) | string] }}")
        each = foreach("each", [0, 1, 2], body(first, note("told", "{{ item | string }}", "{{ item }}")))
        assert output_of(each) == [0, 1, 2]
        assert notes() == ["2", "1", "0"]

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_no_more_than_concurrency_items_are_at_work(self, execution):
        each = foreach(
            "each", list(range(9)), body(code("in", "side_by_side", **FLOW, expected=3)), concurrency=3
        )
        assert max(output_of(each, execution=execution)) == 3

    def test_the_workflows_max_concurrent_bounds_the_nodes_of_all_items(self):
        each = foreach("each", list(range(6)), body(code("in", "side_by_side", **FLOW, expected=2)))
        assert max(output_of(each, settings={"max_concurrent": 2})) == 2

    def test_one_at_a_time(self):
        each = foreach(
            "each",
            ["a", "b"],
            body(note("in", "{{ item }} in"), note("out", "{{ item }} out")),
            concurrency=1,
        )
        output_of(each)
        assert notes() == ["a in", "a out", "b in", "b out"]

    def test_keys_of_items(self):
        each = foreach("each", "{{ input.xs }}", body(transform("x", "{{ item.id }}")), key="item.id")
        result = run(chain(each), {"xs": [{"id": "a b"}, {"id": 7}, {"id": "x/y"}]})
        assert result.succeeded, result.run.error
        items = [key for key, step in result.steps.items() if step.kind == "item"]
        assert sorted(items) == ["each[7]", "each[a b]", "each[x%2Fy]"]
        assert result.steps["each[x%2Fy]/x"].output == "x/y"
        assert [result.steps[key].iteration_index for key in sorted(items)] == [1, 0, 2]

    @pytest.mark.parametrize(
        ("key", "says"),
        [
            ("none", "gives None for item 0"),
            ("''", "gives '' for item 0"),
            ("true", "gives True for item 0"),
            ("item / 2", "gives 0.5 for item 0"),
            ("[item]", "gives [1] for item 0"),
            ("'x' * 101", "more than 100 characters for item 0"),
            ("item.id", "id"),
        ],
    )
    def test_a_key_that_is_none(self, key, says):
        error = error_of(foreach("each", "{{ input.xs }}", body(note("x")), key=key), {"xs": [1, 2]})
        assert says in error["message"]
        assert "node 'each', config.key" in error["message"]
        assert notes() == []

    def test_two_items_of_one_key(self):
        error = error_of(foreach("each", [3, 4, 13], body(note("x")), key="item % 10"))
        assert error["code"] == "item-key"
        assert "gives 3 for the items 0 and 2" in error["message"]
        assert notes() == []

    @pytest.mark.parametrize(
        ("items", "told"),
        [("text", '"text"'), (5, "5"), ({"a": 1}, "object of 1"), (None, "null")],
    )
    @pytest.mark.parametrize("fanout", [False, True])
    def test_items_that_are_no_list(self, items, told, fanout):
        each = foreach("each", "{{ input.xs }}", body(note("x")), fanout=fanout)
        error = error_of(each, {"xs": items})
        assert f"node 'each', config.items: gives {told}, which is no list" in error["message"]

    def test_a_list_with_expressions_in_it(self):
        each = foreach(
            "each", ["{{ input.x }}", {"y": "{{ input.x + 1 }}"}], body(transform("v", "{{ item }}"))
        )
        assert output_of(each, {"x": 1}) == [1, {"y": 2}]

    def test_a_workflow_as_body_gets_the_item_or_what_input_says(self):
        assert output_of(foreach("each", [{"n": 2}, {"n": 5}], {"workflow": "twice"}), {}, TWICE) == [4, 10]
        given = {"workflow": "twice", "input": {"n": "{{ item + index + input.x }}"}}
        assert output_of(foreach("each", [2, 5], given), {"x": 10}, TWICE) == [24, 32]

    def test_a_body_sees_what_its_container_sees(self):
        seen = ["{{ input.x }}", "{{ steps.before.output }}", "{{ context.k }}", "{{ context.last_output }}"]
        each = foreach("each", [7], body(transform("a", seen), transform("b", "{{ steps.a.output }}")))
        document = chain(
            transform("before", "{{ input.x + 1 }}", set={"k": "kept"}),
            each,
            output="{{ steps.each.output }}",
        )
        assert run(document, {"x": 1}).run.output == [[1, 2, "kept", 7]]

    def test_counts_stand_in_the_journal(self):
        each = foreach("each", [1, 0, 2], body(transform("x", "{{ 1 / item }}")), on_item_error="skip")
        result = run(chain(each))
        assert result.steps["each"].routing_decision["counts"] == {"items": 3, "succeeded": 2, "failed": 1}

    def test_a_body_of_several_last_nodes(self):
        edges = [edge("way", "a", "low"), edge("way", "b", "high"), edge("way", "c")]
        way = node(
            "way", "branch", {"conditions": [{"when": "item < 5", "handle": "low"}], "default": "high"}
        )
        ways = body(way, transform("a"), transform("b"), transform("c"), edges=[*edges[:2]])
        assert output_of(foreach("each", [1, 9], ways)) == [{"a": "a", "c": "c"}, {"b": "b", "c": "c"}]


class TestLoop:
    def test_until_is_asked_after_each_iteration(self):
        again = loop("again", body(transform("x", "{{ iteration * 10 }}")), until="steps.x.output >= 30")
        assert output_of(again) == {"output": 30, "iterations": 3}

    def test_while_is_asked_before_each_iteration(self):
        again = loop("again", body(note("x", value="{{ iteration }}")), **{"while": "iteration < 2"})
        assert output_of(again) == {"output": 2, "iterations": 2}
        assert notes() == ["x", "x"]

    def test_while_may_ask_for_none(self):
        again = loop("again", body(note("x")), **{"while": "false"})
        assert output_of(again) == {"output": None, "iterations": 0}
        assert notes() == []

    def test_while_sees_the_steps_of_the_iteration_before(self):
        asked = "steps.x.status == 'pending' or steps.x.output < 3"
        again = loop("again", body(transform("x", "{{ iteration }}")), **{"while": asked})
        assert output_of(again) == {"output": 3, "iterations": 3}

    def test_an_iteration_begins_with_the_output_of_the_one_before(self):
        again = loop("again", body(transform("x", "{{ context.last_output * 2 }}")), until="iteration == 3")
        document = chain(transform("first", 5), again, output="{{ steps.again.output }}")
        assert run(document).run.output == {"output": 40, "iterations": 3}

    def test_an_object_as_output_has_the_iterations_beside_its_members(self):
        again = loop("again", body(transform("x", {"a": "{{ iteration }}"})), until="iteration == 2")
        assert output_of(again) == {"a": 2, "iterations": 2}

    def test_a_workflow_as_body_gets_the_output_before(self):
        again = loop(
            "again",
            {"workflow": "twice", "input": {"n": "{{ context.last_output }}"}},
            until="iteration == 3",
        )
        document = chain(transform("first", 1), again, output="{{ steps.again.output.output }}")
        assert run(document, {}, TWICE).run.output == 8

    def test_the_bound_fails_the_loop(self):
        error = error_of(loop("again", body(note("x")), until="false", max_iterations=2))
        assert error["code"] == "loop-limit"
        assert "again: 2 iterations" in error["message"]
        assert notes() == ["x", "x"]

    def test_or_is_put_up_with(self):
        again = loop("again", body(transform("x", 1)), until="false", max_iterations=2, on_limit="continue")
        assert output_of(again) == {"output": 1, "iterations": 2}

    def test_the_last_iteration_may_be_the_one_that_is_asked_for(self):
        again = loop("again", body(transform("x", 1)), until="iteration == 2", max_iterations=2)
        assert output_of(again) == {"output": 1, "iterations": 2}

    def test_a_short_delay_is_sat_out_between_two_iterations(self):
        again = loop("again", body(note("x")), until="iteration == 3", delay_s=0.05)
        result = run(chain(again))
        assert result.succeeded, result.run.error
        assert result.steps["again"].duration_ms >= 100
        assert result.waits == []

    def test_a_condition_that_cannot_be_asked(self):
        error = error_of(loop("again", body(transform("x", 1)), until="steps.x.output.y > 1"))
        assert "node 'again', config.until" in error["message"]


class TestParallel:
    def test_a_branch_begins_with_the_output_before(self):
        both = parallel(
            left=body(transform("a", "{{ context.last_output + 1 }}")),
            right={"workflow": "twice", "input": {"n": "{{ context.last_output }}"}},
            third={"workflow": "twice"},
        )
        document = chain(transform("first", "{{ input.n }}"), both, output="{{ steps.both.output }}")
        result = run(document, {"n": 3}, TWICE)
        assert result.run.status is RunStatus.FAILED
        assert statuses(result)["both/third/start"] == "failed"
        assert (result.steps["both/left"].output, result.steps["both/right"].output) == (4, 6)

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_any_takes_what_succeeds(self, execution):
        both = parallel(left=body(fail()), right=body(note("fine")), wait="any")
        assert output_of(both, execution=execution) == {"left": None, "right": "fine"}

    def test_any_runs_all_to_their_end(self):
        slow = body(code("slow", "when_noted", **FLOW, names=["quick"]), note("ended"))
        both = parallel(left=slow, right=body(note("quick")), wait="any")
        assert output_of(both) == {"left": "ended", "right": "quick"}

    def test_any_fails_where_none_succeeds(self):
        both = parallel(left=body(fail("a", "this")), right=body(fail("b", "that")), wait="any")
        assert error_of(both)["message"].endswith(("this", "that"))

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_first_cancels_the_others_and_their_running_code(self, execution):
        hanging = body(code("hang", "hang_after", **FLOW, name="hangs", then="cleaned up"), note("never"))
        winning = body(code("wins", "when_noted", **FLOW, names=["hangs"], value="won"))
        document = chain(
            parallel(left=hanging, right=winning, wait="first"), output="{{ steps.both.output }}"
        )
        result = run(document, execution=execution)
        assert result.succeeded, result.run.error
        assert result.run.output == {"left": None, "right": "won"}
        assert notes() == ["hangs", "cleaned up"]
        found = statuses(result)
        assert (found["both/left"], found["both/left/hang"]) == ("canceled", "canceled")
        assert "both/left/never" not in found

    def test_first_passes_over_what_fails(self):
        late = body(code("late", "when_noted", **FLOW, names=["failing"], value="late"))
        failing = body(note("x", "failing"), fail())
        both = parallel(left=late, right=failing, wait="first")
        assert output_of(both) == {"left": "late", "right": None}

    def test_first_fails_where_all_fail(self):
        both = parallel(left=body(fail("a", "this")), right=body(fail("b", "that")), wait="first")
        assert error_of(both)["message"].endswith(("this", "that"))

    def test_the_first_two(self):
        hanging = body(code("hang", "hang_after", **FLOW, name="hangs", then="cleaned up"))
        quick = code("a", "when_noted", **FLOW, names=["hangs"], value=1)
        other = code("b", "when_noted", **FLOW, names=["hangs"], value=2)
        both = parallel(a1=body(quick), b1=body(other), c1=hanging, wait=2)
        assert output_of(both) == {"a1": 1, "b1": 2, "c1": None}
        assert notes() == ["hangs", "cleaned up"]

    def test_a_number_that_cannot_be_reached_any_more_ends_the_rest(self):
        hanging = body(code("hang", "hang_after", **FLOW, name="hangs", then="cleaned up"))
        failing = body(code("wait", "when_noted", **FLOW, names=["hangs"]), fail())
        error = error_of(parallel(left=hanging, right=failing, wait=2))
        assert error["message"].endswith("no luck")
        assert notes() == ["hangs", "cleaned up"]


class TestWorkflow:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_its_input_has_the_defaults_of_its_schema(self, execution):
        schema = {"type": "object", "properties": {"a": {"default": 5}, "b": {"type": "integer"}}}
        called = chain(slug="called", input_schema=schema)
        assert output_of(call("sub", "called", input={"b": 1}), {}, called, execution=execution) == {
            "a": 5,
            "b": 1,
        }

    def test_without_input_it_gets_the_output_before(self):
        document = chain(transform("t", {"n": 4}), call("sub", "twice"), output="{{ steps.sub.output }}")
        assert run(document, {}, TWICE).run.output == 8

    @pytest.mark.parametrize("more", [{}, {"retry": {"max_attempts": 1}}], ids=["nested", "walked"])
    def test_what_does_not_fit_its_output_schema_fails_the_call(self, more):
        called = chain(transform("t", "text"), slug="called", output_schema={"type": "number"})
        error = error_of(call("sub", "called", more), {}, called)
        assert error["code"] == "run-output"
        assert error["message"].startswith("'sub': the output of the workflow does not fit")

    @pytest.mark.parametrize("more", [{}, {"retry": {"max_attempts": 1}}], ids=["nested", "walked"])
    def test_one_that_comes_to_no_end_fails_the_call(self, more):
        called = workflow(
            [transform("t")], [edge("start", "t", condition="false"), edge("t", "done")], slug="called"
        )
        assert error_of(call("sub", "called", more), {}, called)["code"] == "no-end"

    @pytest.mark.parametrize("execution", EXECUTIONS)
    def test_it_has_a_state_of_its_own(self, execution):
        called = chain(
            transform("t", "{{ context.k }}", set={"k": "inner"}),
            slug="called",
            output=["{{ steps.t.output }}", "{{ context.k }}"],
            state_schema={"properties": {"k": {"default": "inner default"}}},
        )
        document = chain(
            transform("first", set={"k": "outer"}),
            call("sub", "called", input={}),
            output=["{{ steps.sub.output }}", "{{ context.k }}"],
        )
        result = run(document, {}, called, execution=execution)
        assert result.succeeded, result.run.error
        assert result.run.output == [["inner default", "inner"], "outer"]
        assert "set" not in result.steps["sub"].routing_decision

    def test_its_expressions_see_none_of_the_callers_steps(self):
        called = chain(transform("t", "{{ steps | length }}"), slug="called")
        result = run(chain(transform("first"), call("sub", "called", input={})), {}, called)
        assert (result.steps["sub/t"].output, result.succeeded) == (1, True)

    def test_its_own_finally_runs_after_its_nodes(self):
        closing = body(note("closing", "finally {{ run.status }} {{ steps.a.output }}"))
        called = chain(
            note("a"), slug="called", **{"finally": closing}, on_failure=body(note("x", "on_failure"))
        )
        result = run(chain(call("sub", "called", input={}), note("after")), {}, called)
        assert result.succeeded, result.run.error
        assert notes() == ["a", "finally succeeded a", "after"]
        assert statuses(result)["sub/@finally/closing"] == "succeeded"

    def test_its_own_on_failure_and_finally_run_where_it_fails(self):
        telling = body(note("tell", "on_failure {{ run.error.code }} {{ steps.bad.status }}"))
        called = chain(
            fail(),
            slug="called",
            on_failure=telling,
            **{"finally": body(note("close", "finally {{ run.status }}"))},
        )
        result = run(chain(call("sub", "called", {"on_error": "continue"}, input={})), {}, called)
        assert result.succeeded, result.run.error
        assert notes() == ["on_failure function-failed failed", "finally failed"]
        assert result.steps["sub"].error["message"].endswith("no luck")
        assert statuses(result)["sub/@on_failure/tell"] == "succeeded"

    def test_workflows_that_follow_its_end_get_the_input_that_is_said(self):
        told = chain(note("tell", "{{ input.of }} {{ input.why }}"), slug="told")
        closing = {"workflow": "told", "input": {"of": "{{ input.n }}", "why": "{{ run.error.code }}"}}
        called = chain(fail(), slug="called", on_failure=closing)
        document = chain(call("sub", "called", {"on_error": "continue"}, input={"n": 7}))
        result = run(document, {}, told, called)
        assert result.succeeded, result.run.error
        assert notes() == ["7 function-failed"]
        assert statuses(result)["sub/@on_failure/tell"] == "succeeded"

    def test_its_own_timeout_cuts_it_off(self):
        called = chain(
            code("hang", "hang_after", **FLOW, name="hangs", then="cleaned up"),
            slug="called",
            settings={"timeout_s": 0.3},
        )
        error = error_of(call("sub", "called", input={}), {}, called)
        assert "'called', called at 'sub', took longer than its settings.timeout_s = 0.3" in error["message"]
        assert notes() == ["hangs", "cleaned up"]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_four_levels_deep(execution):
    """A workflow in a loop in a branch in an item, in a branch of the run."""
    inner = loop(
        "again", {"workflow": "twice", "input": {"n": "{{ item + iteration }}"}}, until="iteration == 2"
    )
    item = body(
        parallel("inner", one=body(inner), two=body(transform("seen", ["{{ item }}", "{{ index }}"])))
    )
    outer = parallel("outer", left=body(foreach("each", "{{ input.xs }}", item)), right=body(transform("r")))
    document = chain(outer, output="{{ steps.outer.output }}")
    result = run(document, {"xs": [10, 20]}, TWICE, execution=execution)
    assert result.succeeded, result.run.error
    assert result.run.output == {
        "left": [
            {"one": {"output": 24, "iterations": 2}, "two": [10, 0]},
            {"one": {"output": 44, "iterations": 2}, "two": [20, 1]},
        ],
        "right": "r",
    }
    deep = result.steps["outer/left/each[1]/inner/one/again#2/twice"]
    assert (deep.output, deep.parent_key) == (44, "outer/left/each[1]/inner/one/again#2")


class TestJoins:
    @pytest.mark.parametrize("execution", EXECUTIONS)
    @pytest.mark.parametrize(
        ("join", "runs"), [("any", True), (1, True), (2, True), (3, False), ("all", False)]
    )
    def test_so_many_edges_must_be_live(self, join, runs, execution):
        nodes = [transform("a"), transform("b"), transform("c"), transform("met", join=join)]
        edges = [
            *(edge("start", name) for name in "abc"),
            edge("a", "met"),
            edge("b", "met"),
            edge("c", "met", condition="input.x > 1"),
            edge("start", "done"),
            edge("met", "done"),
        ]
        result = run(workflow(nodes, edges), {"x": 1}, execution=execution)
        assert statuses(result)["met"] == ("succeeded" if runs else "skipped")

    def test_in_a_body_too(self):
        nodes = [transform("a"), transform("b"), transform("c"), transform("met", join=2)]
        edges = [
            edge("a", "met"),
            edge("b", "met", condition="item > 1"),
            edge("c", "met", condition="item > 2"),
        ]
        each = foreach("each", [1, 2, 3], body(*nodes, edges=edges))
        assert output_of(each) == [None, "met", "met"]
