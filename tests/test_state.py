"""The state of a workflow: writes that come together, conflicts of a run, what the schema takes."""

from __future__ import annotations

import pytest
from control_flow import (
    EXECUTIONS,
    FUNCTIONS,
    SLUG,
    approve,
    body,
    call,
    chain,
    edge,
    foreach,
    gate,
    loop,
    parallel,
    run,
    statuses,
    transform,
    workflow,
)
from twin_runs import twin_runs

from agentmesh_dagster.records import RunStatus

pytestmark = pytest.mark.parametrize("execution", EXECUTIONS)


def schema(**properties):
    return {"type": "object", "properties": properties}


SUM = schema(total={"type": "number", "reducer": "sum"})
APPEND = schema(names={"type": "array", "reducer": "append"})
MERGE = schema(facts={"type": "object", "reducer": "merge"})


def writes(id, /, output=None, **written):
    return transform(id, output, set=written)


ITEM = body(transform("way"), writes("n", k="{{ item }}"), edges=[edge("way", "n", condition="item > 0")])
"""Writes `k` for some items."""


def side_by_side(*nodes, **more):
    """Nodes between `start` and the end, none of which knows of another."""
    edges = [edge("start", n["id"]) for n in nodes] + [edge(n["id"], "done") for n in nodes]
    return workflow(nodes, edges, **more)


def state_of(document, execution, *others, key, input=None, **options):
    end = document["nodes"][-1]
    end["config"] = {"output": f"{{{{ context.{key} }}}}"}
    result = run(document, input, *others, execution=execution, **options)
    assert result.succeeded, result.run.error
    return result.run.output


class TestReducers:
    def test_without_one_a_later_write_replaces_an_earlier_one(self, execution):
        assert state_of(chain(writes("a", k=1), writes("b", k=2)), execution, key="k") == 2

    def test_append_adds_each_value(self, execution):
        document = chain(writes("a", names="x"), writes("b", names=["y"]), state_schema=APPEND)
        assert state_of(document, execution, key="names") == ["x", ["y"]]

    def test_sum_and_default(self, execution):
        rules = schema(total={"type": "number", "reducer": "sum", "default": 10})
        document = side_by_side(writes("a", total=1), writes("b", total=2.5), state_schema=rules)
        assert state_of(document, execution, key="total") == 13.5

    def test_merge_takes_the_members_of_both(self, execution):
        first, second = {"x": 1, "y": 1}, {"y": 2, "z": 2}
        document = chain(writes("a", facts=first), writes("b", facts=second), state_schema=MERGE)
        assert state_of(document, execution, key="facts") == {"x": 1, "y": 2, "z": 2}

    def test_writes_side_by_side_come_together_in_document_order(self, execution):
        document = side_by_side(*(writes(name, names=name) for name in "bac"), state_schema=APPEND)
        assert state_of(document, execution, key="names") == ["b", "a", "c"]

    def test_replace_where_it_is_named_takes_the_last_in_document_order(self, execution):
        rules = schema(k={"reducer": "replace"})
        document = side_by_side(writes("b", k="b"), writes("a", k="a"), state_schema=rules)
        assert state_of(document, execution, key="k") == "a"

    def test_a_node_sees_the_writes_above_it_and_no_others(self, execution):
        nodes = [writes("a", total=1), writes("b", total=10), transform("sees", "{{ context.total }}")]
        edges = [
            edge("start", "a"),
            edge("start", "b"),
            edge("a", "sees"),
            edge("sees", "done"),
            edge("b", "done"),
        ]
        result = run(workflow(nodes, edges, state_schema=SUM), execution=execution)
        assert result.steps["sees"].output == 1

    def test_a_nodes_set_sees_its_own_output_and_its_edges_see_what_it_set(self, execution):
        nodes = [
            transform("a", 3, set={"k": "{{ steps.a.output + context.last_output }}"}),
            transform("yes"),
            transform("no"),
        ]
        edges = [
            edge("start", "a"),
            edge("a", "yes", condition="context.k == 6"),
            edge("a", "no", condition="context.k != 6"),
            edge("yes", "done"),
            edge("no", "done"),
        ]
        result = run(workflow(nodes, edges), execution=execution)
        assert result.run.output == "yes", result.run.error


class TestContainers:
    @pytest.mark.parametrize("fanout", [False, True])
    def test_items_in_the_order_of_items(self, fanout, execution):
        each = foreach("each", [3, 1, 2], body(writes("x", names="{{ item }}")), fanout=fanout)
        assert state_of(chain(each, state_schema=APPEND), execution, key="names") == [3, 1, 2]

    def test_items_do_not_see_one_another(self, execution):
        each = foreach(
            "each", [1, 2, 3], body(writes("x", "{{ context.total }}", total="{{ item }}")), concurrency=1
        )
        rules = schema(total={"type": "number", "reducer": "sum", "default": 0})
        result = run(chain(each, state_schema=rules, output="{{ context.total }}"), execution=execution)
        assert result.steps["each"].output == [0, 0, 0]
        assert result.run.output == 6

    def test_iterations_see_those_before(self, execution):
        rules = schema(total={"type": "number", "reducer": "sum", "default": 5})
        again = loop(
            "again",
            body(writes("x", "{{ context.total }}", total="{{ iteration }}")),
            until="context.total > 9",
        )
        result = run(chain(again, state_schema=rules, output="{{ context.total }}"), execution=execution)
        assert result.steps["again"].output == {"output": 8, "iterations": 3}
        assert result.run.output == 11

    def test_iterations_replace_what_those_before_wrote(self, execution):
        again = loop("again", body(writes("x", k="{{ iteration }}")), until="context.k == 3")
        assert state_of(chain(again), execution, key="k") == 3

    def test_branches_in_the_order_in_which_they_are_written(self, execution):
        both = parallel(
            b=body(writes("x", names="b")), a=body(writes("y", names="a"), writes("z", names="z"))
        )
        assert state_of(chain(both, state_schema=APPEND), execution, key="names") == ["b", "a", "z"]

    def test_a_containers_own_set_follows_those_of_its_bodies(self, execution):
        more = {"set": {"names": "{{ context.names | length }}"}}
        each = foreach("each", ["x", "y"], body(writes("n", names="{{ item }}")), more=more)
        assert state_of(chain(each, state_schema=APPEND), execution, key="names") == ["x", "y", 2]

    def test_what_a_failed_item_wrote_does_not_count(self, execution):
        item = body(writes("n", names="{{ item }}"), transform("bad", "{{ 1 / item }}"))
        each = foreach("each", [1, 0, 2], item, on_item_error="skip")
        assert state_of(chain(each, state_schema=APPEND), execution, key="names") == [1, 2]

    def test_it_survives_a_wait(self, execution):
        each = foreach(
            "each", ["x", "y"], body(writes("n", names="{{ item }}"), gate(), writes("m", names="m"))
        )
        document = chain(writes("a", names="a"), each, state_schema=APPEND)
        found = state_of(document, execution, key="names", answers=approve)
        assert found == ["a", "x", "m", "y", "m"]

    def test_a_called_workflow_neither_sees_nor_changes_the_callers(self, execution):
        called = chain(
            writes("n", "{{ context.names }}", names="inner"),
            slug="called",
            state_schema=schema(names={"type": "array", "reducer": "append", "default": ["own"]}),
            output="{{ context.names }}",
        )
        document = chain(
            writes("a", names="a"),
            call("sub", "called", input={}),
            state_schema=APPEND,
            output=["{{ context.names }}", "{{ steps.sub.output }}"],
        )
        result = run(document, {}, called, execution=execution)
        assert result.run.output == [["a"], ["own", "inner"]]


class TestConflicts:
    """Two that wrote one key side by side, where only the run can tell that both do."""

    def ways(self):
        """Two nodes that write `k`, which edges with conditions lead to."""
        nodes = [transform("way"), writes("a", k=1), writes("b", k=2), transform("met", "{{ context.k }}")]
        edges = [
            edge("start", "way"),
            edge("way", "a", condition="input.x > 0"),
            edge("way", "b", condition="input.x > 5"),
            edge("a", "met"),
            edge("b", "met"),
            edge("met", "done"),
        ]
        return nodes, edges

    def test_one_that_ran_is_none(self, execution):
        assert run(workflow(*self.ways()), {"x": 3}, execution=execution).run.output == 1

    def test_two_that_ran_fail_the_node_that_sees_both(self, execution):
        result = run(workflow(*self.ways()), {"x": 7}, execution=execution)
        assert result.run.status is RunStatus.FAILED
        error = result.run.error
        assert error["code"] == "state-conflict"
        assert "context.k was written by 'a' and 'b'" in error["message"]
        assert "'met' sees both: give 'k' a 'reducer'" in error["message"]
        assert result.steps["met"].error == error

    def test_in_a_body(self, execution):
        nodes, edges = self.ways()
        each = foreach("each", [1], body(*nodes, edges=edges[1:-1]))
        result = run(chain(each), {"x": 7}, execution=execution)
        assert result.run.error["code"] == "state-conflict"
        assert "'each[0]/met' sees both" in result.run.error["message"]
        assert statuses(result)["each[0]/met"] == "failed"

    @pytest.mark.parametrize(
        ("container", "writers"),
        [
            (foreach("it", [4, 0, 5], ITEM), ("it[0]", "it[2]")),
            (foreach("it", [4, 0, 5], ITEM, fanout=True), ("it[0]", "it[2]")),
            (
                parallel("it", left=body(writes("a", k=1)), right=body(writes("b", k=2))),
                ("it/left", "it/right"),
            ),
        ],
        ids=["foreach", "fan-out", "parallel"],
    )
    def test_of_the_passes_of_a_container(self, container, writers, execution):
        """The validation refuses them; a run does not rely on that."""
        with twin_runs(FUNCTIONS) as twins:
            failed = twins.journal([chain(container)], SLUG, {}, execution)
            handled = twins.journal(
                [chain({**container, "on_error": "continue"}, output="went on")], SLUG, {}, execution
            )
        assert failed.run.error["code"] == "state-conflict"
        assert f"written by {writers[0]!r} and {writers[1]!r}" in failed.run.error["message"]
        assert failed.steps["it"].error == failed.run.error
        assert handled.run.output == "went on"
        assert handled.steps["it"].error["code"] == "state-conflict"


class TestSchema:
    @pytest.mark.parametrize(
        ("rules", "written", "says"),
        [
            ({"type": "string"}, "{{ input.x }}", "must be of type string"),
            ({"type": "number", "reducer": "sum"}, "{{ input.x | string }}", "takes numbers (reducer: sum)"),
            ({"type": "object", "reducer": "merge"}, "{{ input.x }}", "takes objects (reducer: merge)"),
        ],
    )
    def test_a_value_that_does_not_suit_fails_the_node(self, rules, written, says, execution):
        result = run(
            chain(writes("a", k=written), state_schema=schema(k=rules)), {"x": 5}, execution=execution
        )
        assert result.run.error["code"] == "state"
        assert says in result.run.error["message"]
        assert result.steps["a"].error == result.run.error

    def test_the_reduced_value_is_checked(self, execution):
        rules = schema(total={"type": "number", "reducer": "sum", "maximum": 5})
        document = chain(writes("a", total="{{ input.x }}"), writes("b", total=3), state_schema=rules)
        assert run(document, {"x": 2}, execution=execution).succeeded
        result = run(document, {"x": 4}, execution=execution)
        assert result.run.error["code"] == "state"
        assert result.steps["b"].error == result.run.error

    def test_what_is_added_to_a_list_is_checked(self, execution):
        rules = schema(
            names={"type": "array", "items": {"type": "string"}, "maxItems": 2, "reducer": "append"}
        )
        nodes = [writes("a", names="a"), writes("b", names="{{ input.x }}"), writes("c", names="c")]
        result = run(chain(*nodes, state_schema=rules), {"x": "b"}, execution=execution)
        assert result.run.error["code"] == "state"
        assert "at most 2 items" in result.steps["c"].error["message"]
        result = run(chain(*nodes, state_schema=rules), {"x": 1}, execution=execution)
        assert result.steps["b"].error == result.run.error
