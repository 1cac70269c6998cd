"""Containers as nested Dagster graphs, in real runs: what runs, what people see of it, what a run picks up again."""

from __future__ import annotations

import itertools

import pytest
from workflow_functions import notes
from workflow_project import open_project

from agentmesh_dagster.records import RunStatus, StepStatus
from agentmesh_dagster.testing import Answer, run_workflow

FUNCTIONS = ("workflow_functions",)


def edge(source, target, handle=None, condition=None):
    found = {"source": source, "target": target, "source_handle": handle, "condition": condition}
    return {name: value for name, value in found.items() if value is not None}


def transform(id, output=None, **more):
    return {"id": id, "type": "transform", "config": {"output": id if output is None else output}, **more}


def note(id, value="{{ input.x }}", **more):
    return {
        "id": id,
        "type": "code",
        "config": {"function": "workflow_functions:note", "input": {"name": id, "value": value}},
        **more,
    }


def fail_first(id, failures=1, **more):
    config = {"function": "workflow_functions:fail_first", "input": {"name": id, "failures": failures}}
    return {"id": id, "type": "code", "config": config, **more}


def gate(id, **more):
    return {"id": id, "type": "human", "config": {"title": f"May {id} go on?"}, **more}


def parallel(id, **branches):
    return {"id": id, "type": "parallel", "config": {"branches": branches}}


def foreach(id, *nodes, items="{{ input.items }}", **config):
    body = {"nodes": list(nodes), "edges": [edge(a["id"], b["id"]) for a, b in itertools.pairwise(nodes)]}
    return {"id": id, "type": "foreach", "config": {"items": items, "body": body, "fanout": True, **config}}


def body(*nodes):
    """Nodes one after the other."""
    return {"nodes": list(nodes), "edges": [edge(a["id"], b["id"]) for a, b in itertools.pairwise(nodes)]}


def workflow(nodes, edges, output=None, slug="nested", **more):
    end = {"id": "end", "type": "end", **({} if output is None else {"config": {"output": output}})}
    return {
        "kind": "workflow",
        "slug": slug,
        "nodes": [{"id": "start", "type": "start"}, *nodes, end],
        "edges": edges,
        **more,
    }


def chain(*nodes, output=None, slug="nested", **more):
    names = ["start", *(node["id"] for node in nodes), "end"]
    edges = [edge(a, b) for a, b in itertools.pairwise(names)]
    return workflow(list(nodes), edges, output, slug, **more)


CALLED = chain(
    transform("twice", "{{ input.n * 2 }}"),
    output={"got": "{{ steps.twice.output }}"},
    slug="called",
    input_schema={"type": "object", "required": ["n"], "properties": {"n": {"type": "number"}}},
)


def statuses(steps):
    return {key: step.status.value for key, step in steps.items()}


def steps_of(result, kind="STEP_SUCCESS"):
    """The step keys that have an event of a kind in a Dagster run."""
    return {event.step_key for event in result.all_events if event.event_type_value == kind}


def outputs_of(result, step_key):
    """What an op showed, by the output's name."""
    return {
        event.event_specific_data.step_output_handle.output_name: {
            name: value.value for name, value in event.event_specific_data.metadata.items()
        }
        for event in result.all_events
        if event.event_type_value == "STEP_OUTPUT" and event.step_key == step_key
    }


@pytest.fixture(autouse=True)
def noted(tmp_path, monkeypatch):
    """Where the functions of the workflows leave their notes."""
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


@pytest.fixture
def project(tmp_path, sqlite_url, monkeypatch):
    with open_project(tmp_path, sqlite_url, monkeypatch) as opened:
        yield opened


class TestBranches:
    def test_branches_show_as_ops_and_their_outputs_come_together(self):
        inner = parallel("inner", one=body(transform("deep", "{{ steps.first.output + 1 }}")))
        left = {"nodes": [transform("first", 1), inner], "edges": [edge("first", "inner")]}
        both = parallel("both", left=left, **{"ri-ght": {"workflow": "called", "input": {"n": 21}}})
        result = run_workflow([CALLED, chain(both, output="{{ steps.both.output }}")], slug="nested")
        assert result.succeeded, result.run.error
        assert result.run.output == {"left": {"one": 2}, "ri-ght": {"got": 42}}
        assert {
            "both.agentmesh_begin",
            "both.left.first",
            "both.left.inner.one.deep",
            "both.left.inner.agentmesh_end",
            "both.ri_ght.twice",
            "both.agentmesh_end",
            "agentmesh_finish",
        } <= steps_of(result.dagster_result)
        assert {
            "both",
            "both/left",
            "both/left/first",
            "both/left/inner/one/deep",
            "both/ri-ght/twice",
        } <= set(result.steps)
        assert {step.status for step in result.steps.values()} == {StepStatus.SUCCEEDED}
        shown = outputs_of(result.dagster_result, "both.agentmesh_end")
        assert shown["next"]["output"] == '{"left": {"one": 2}, "ri-ght": {"got": 42}}'
        assert outputs_of(result.dagster_result, "both.left.first")["next"]["output"] == "1"

    def test_a_skipped_container_has_one_row_and_runs_nothing_in_it(self):
        way = {
            "id": "way",
            "type": "branch",
            "config": {"conditions": [{"when": "input.x > 1", "handle": "in"}], "default": "past"},
        }
        edges = [
            edge("start", "way"),
            edge("way", "both", "in"),
            edge("way", "end", "past"),
            edge("both", "end"),
        ]
        document = workflow([way, parallel("both", left=body(note("inside")))], edges)
        result = run_workflow([document], {"x": 1}, function_modules=FUNCTIONS)
        assert result.succeeded, result.run.error
        assert statuses(result.steps) == {
            "start": "succeeded",
            "way": "succeeded",
            "both": "skipped",
            "end": "succeeded",
        }
        assert not {key for key in steps_of(result.dagster_result) if key.startswith("both.")}

    def test_a_branch_whose_last_nodes_are_skipped_comes_to_its_end(self):
        way = {
            "id": "way",
            "type": "branch",
            "config": {"conditions": [{"when": "false", "handle": "in"}], "default": "past"},
        }
        left = {
            "nodes": [way, transform("a"), transform("b")],
            "edges": [edge("way", "a", "in"), edge("way", "b", "past", condition="false")],
        }
        result = run_workflow([chain(parallel("both", left=left), output="{{ steps.both.output }}")])
        assert result.succeeded, result.run.error
        assert result.run.output == {"left": None}
        assert statuses(result.steps)["both/left/a"] == "skipped"
        assert statuses(result.steps)["both/left/b"] == "skipped"

    def test_the_ways_out_of_a_container_are_taken_by_condition(self):
        edges = [
            edge("start", "both"),
            edge("both", "low", condition="steps.both.output.left < 5"),
            edge("both", "high", condition="steps.both.output.left >= 5"),
            edge("low", "end"),
            edge("high", "end"),
        ]
        both = parallel("both", left=body(transform("v", "{{ input.x }}")))
        document = workflow([both, transform("low"), transform("high")], edges)
        result = run_workflow([document], {"x": 7})
        assert (result.run.output, statuses(result.steps)["low"]) == ("high", "skipped")

    def test_a_failure_stops_what_hangs_on_it_and_fails_the_run_with_its_error(self):
        left = body(transform("fine"), fail_first("bad", failures=9), transform("after"))
        both = parallel("both", left=left, right=body(transform("other"), transform("last")))
        result = run_workflow([chain(both, transform("never"))], function_modules=FUNCTIONS)
        assert result.run.status is RunStatus.FAILED
        assert "call 1 of bad fails" in result.run.error["message"]
        found = statuses(result.steps)
        assert found["both/left/bad"] == "failed"
        assert found["both/right/last"] == "succeeded"
        assert "both/left/after" not in found
        assert "never" not in found
        # The containers that were cut short say so: nothing is left as if it were at work.
        assert (found["both"], found["both/left"]) == ("failed", "failed")
        assert result.steps["both"].error["message"] == result.steps["both/left/bad"].error["message"]
        assert steps_of(result.dagster_result, "STEP_FAILURE") == {"both.left.bad"}

    def test_a_gate_in_a_branch_pauses_the_container_and_goes_on_where_it_was(self):
        left = body(note("before"), gate("ask"), note("after"))
        both = parallel("both", left=left, right=body(note("beside")))
        document = chain(both, transform("last"), output="{{ steps.both.output }}")
        waiting = run_workflow([document], {"x": 5}, function_modules=FUNCTIONS)
        assert waiting.run.status is RunStatus.WAITING
        found = statuses(waiting.steps)
        assert (found["both"], found["both/left"], found["both/left/ask"]) == ("waiting",) * 3
        assert found["both/right/beside"] == "succeeded"
        assert "last" not in found
        # The op that waits shows the question; the container's last op yields nothing, so nothing behind it runs.
        assert outputs_of(waiting.dagster_result, "both.left.ask")["waiting"]["waits for"] == "May ask go on?"
        assert outputs_of(waiting.dagster_result, "both.agentmesh_end") == {}
        assert outputs_of(waiting.dagster_result, "agentmesh_finish")["done"]["waits at"] == "both/left/ask"
        assert notes() == ["before", "beside"]

    def test_what_ran_before_a_gate_in_a_branch_runs_once(self):
        left = body(note("before"), gate("ask"), note("after"))
        both = parallel("both", left=left, right=body(note("beside")))
        document = chain(both, output="{{ steps.both.output }}")
        result = run_workflow(
            [document], {"x": 5}, function_modules=FUNCTIONS, answers=lambda _wait: Answer()
        )
        assert result.succeeded, result.run.error
        assert result.run.output == {"left": 5, "right": 5}
        assert sorted(notes()) == ["after", "before", "beside"]
        assert outputs_of(result.dagster_result, "both.left.before")["next"]["replayed"] is True

    def test_a_container_behind_a_gate_waits_with_it(self):
        document = chain(gate("ask"), parallel("both", left=body(note("inside"))))
        result = run_workflow([document], {"x": 1}, function_modules=FUNCTIONS)
        assert result.run.status is RunStatus.WAITING
        assert "both" not in result.steps
        assert outputs_of(result.dagster_result, "both.agentmesh_begin") == {}

    def test_a_container_that_joins_a_gate_and_another_way_waits_for_both(self):
        """To Dagster the way behind the gate is merely skipped, and the container may begin."""
        edges = [
            edge("start", "ask"),
            edge("start", "a"),
            edge("ask", "both"),
            edge("a", "both"),
            edge("both", "end"),
        ]
        both = parallel("both", left=body(note("inside")))
        document = workflow([gate("ask"), transform("a"), both], edges)
        result = run_workflow([document], {"x": 1}, function_modules=FUNCTIONS)
        assert result.run.status is RunStatus.WAITING
        assert "both" not in result.steps
        assert "both.agentmesh_begin" in steps_of(result.dagster_result)
        assert "both.agentmesh_end" not in steps_of(result.dagster_result)


class TestCalledWorkflows:
    def test_a_called_workflows_nodes_are_ops_under_the_callers_name(self):
        call = {
            "id": "ca-ll",
            "type": "workflow",
            "config": {"workflow": "called", "input": {"n": "{{ input.n }}"}},
        }
        result = run_workflow(
            [CALLED, chain(call, output="{{ steps.ca_ll.output }}")], {"n": 4}, slug="nested"
        )
        assert result.succeeded, result.run.error
        assert result.run.output == {"got": 8}
        assert {
            "ca_ll.agentmesh_begin",
            "ca_ll.start",
            "ca_ll.twice",
            "ca_ll.end",
            "ca_ll.agentmesh_end",
        } <= steps_of(result.dagster_result)
        assert result.steps["ca-ll/twice"].parent_key == "ca-ll"
        assert result.steps["ca-ll"].output == {"got": 8}

    def test_the_same_workflow_called_twice(self):
        calls = [
            {"id": f"call{n}", "type": "workflow", "config": {"workflow": "called", "input": {"n": n}}}
            for n in (1, 2)
        ]
        output = ["{{ steps.call1.output.got }}", "{{ steps.call2.output.got }}"]
        result = run_workflow([CALLED, chain(*calls, output=output)], slug="nested")
        assert result.run.output == [2, 4]

    def test_a_container_that_cannot_begin_fails_in_its_first_op(self):
        call = {
            "id": "call",
            "type": "workflow",
            "config": {"workflow": "called", "input": "{{ input.nothing }}"},
        }
        result = run_workflow([CALLED, chain(call)], slug="nested")
        assert result.run.status is RunStatus.FAILED
        assert "nothing" in result.run.error["message"]
        assert result.steps["call"].status is StepStatus.FAILED
        assert steps_of(result.dagster_result, "STEP_FAILURE") == {"call.agentmesh_begin"}

    def test_what_does_not_fit_the_called_workflows_input_fails_its_start(self):
        call = {
            "id": "call",
            "type": "workflow",
            "config": {"workflow": "called", "input": {"n": "{{ input.n }}"}},
        }
        result = run_workflow([CALLED, chain(call)], {"n": "four"}, slug="nested")
        assert result.run.status is RunStatus.FAILED
        assert result.steps["call"].status is StepStatus.FAILED
        assert steps_of(result.dagster_result, "STEP_FAILURE") == {"call.start"}

    def test_calls_of_calls_are_bounded_before_they_are_built(self, project):
        """Each level calls the one below it twice: 2 to the power of the depth."""
        below = "called"
        project.publish(chain(transform("t"), slug=below))
        for depth in range(12):
            twice = [{"id": name, "type": "workflow", "config": {"workflow": below}} for name in "ab"]
            below = f"level{depth}"
            project.publish(chain(*twice, slug=below))
        result = project.execute(below)
        assert not result.success
        assert "more than 5,000 ops" in str(project.step_error(result.run_id, f"{below}__broken"))


class TestFanOut:
    def test_each_item_is_a_step(self):
        each = foreach("each", transform("half", "{{ item // 2 }}"))
        result = run_workflow([chain(each, output="{{ steps.each.output }}")], {"items": [2, 4, 6]})
        assert result.succeeded, result.run.error
        assert result.run.output == [1, 2, 3]
        assert {f"each.agentmesh_item[{n}]" for n in range(3)} <= steps_of(result.dagster_result)
        assert statuses(result.steps)["each[1]/half"] == "succeeded"
        assert result.steps["each[1]"].kind == "item"
        assert outputs_of(result.dagster_result, "each.agentmesh_begin")["done"]["items"] == 3
        assert outputs_of(result.dagster_result, "each.agentmesh_end")["next"]["output"] == "[1, 2, 3]"

    def test_an_empty_list_gives_an_empty_list(self):
        each = foreach("each", note("half"))
        result = run_workflow(
            [chain(each, output="{{ steps.each.output }}")], {"items": []}, function_modules=FUNCTIONS
        )
        assert result.succeeded, result.run.error
        assert result.run.output == []
        assert set(result.steps) == {"start", "each", "end"}

    def test_a_skipped_fan_out_has_one_row(self):
        edges = [edge("start", "each", condition="false"), edge("start", "end"), edge("each", "end")]
        result = run_workflow(
            [workflow([foreach("each", note("n"))], edges)], {"items": [1]}, function_modules=FUNCTIONS
        )
        assert result.succeeded, result.run.error
        assert statuses(result.steps) == {"start": "succeeded", "each": "skipped", "end": "succeeded"}

    def test_items_keep_their_own_keys(self):
        each = foreach("each", transform("name", "{{ item.id }}"), key="item.id")
        items = [{"id": key} for key in ("a b", "a_b", "a-b", "größe", "A/1")]
        result = run_workflow([chain(each, output="{{ steps.each.output }}")], {"items": items})
        assert result.succeeded, result.run.error
        assert result.run.output == ["a b", "a_b", "a-b", "größe", "A/1"]
        assert "each[a-b]/name" in result.steps
        assert "each.agentmesh_item[a_2d_b]" in steps_of(result.dagster_result)

    def test_a_fan_out_in_a_branch_and_in_a_called_workflow(self):
        fan = chain(
            foreach("each", transform("half", "{{ item // 2 }}")),
            output="{{ steps.each.output }}",
            slug="fan",
        )
        given = {"workflow": "fan", "input": {"items": [2, 4]}}
        left = body(foreach("mine", transform("twice", "{{ item * 2 }}"), items=[1]))
        call = {"id": "call", "type": "workflow", "config": given}
        document = chain(
            parallel("both", left=left, right=given),
            call,
            output=["{{ steps.both.output }}", "{{ steps.call.output }}"],
        )
        result = run_workflow([fan, document], slug="nested")
        assert result.succeeded, result.run.error
        assert result.run.output == [{"left": [2], "right": [1, 2]}, [1, 2]]
        assert {
            "both.left.mine.agentmesh_item[0]",
            "both.right.each.agentmesh_item[1]",
            "call.each.agentmesh_item[1]",
        } <= steps_of(result.dagster_result)

    def test_two_items_wait_at_once_and_are_answered_in_the_opposite_order(self):
        each = foreach("each", note("before", "{{ item }}"), gate("ask"), note("after", "{{ item }}"))
        asked = []

        def answer(wait):
            asked.append(wait.step_key)
            # The first item's question only when it is asked for the second time.
            return Answer() if wait.step_key == "each[1]/ask" or asked.count(wait.step_key) > 1 else None

        result = run_workflow(
            [chain(each, output="{{ steps.each.output }}")],
            {"items": ["a", "b"]},
            function_modules=FUNCTIONS,
            answers=answer,
        )
        assert result.succeeded, result.run.error
        assert asked == ["each[0]/ask", "each[1]/ask", "each[0]/ask"]
        assert result.run.output == ["a", "b"]
        assert notes() == ["before", "before", "after", "after"]

    def test_an_item_shows_what_it_waits_for_or_came_to(self):
        asks = {
            "id": "check",
            "type": "branch",
            "config": {"conditions": [{"handle": "big", "when": "item > 1"}]},
        }
        inner = {"nodes": [asks, gate("ask")], "edges": [edge("check", "ask", "big")]}
        each = foreach("each")
        each["config"]["body"] = inner
        result = run_workflow([chain(each)], {"items": [1, 2]}, function_modules=FUNCTIONS)
        assert result.run.status is RunStatus.WAITING
        done, waiting = (
            outputs_of(result.dagster_result, f"each.agentmesh_item[{n}]")["done"] for n in range(2)
        )
        assert (done["item"], done["status"]) == ("0", "succeeded")
        assert waiting["waits for"] == "May ask go on?"
        assert "agentmesh approvals approve" in waiting["how to decide"]
        assert outputs_of(result.dagster_result, "agentmesh_finish")["done"]["waits at"] == "each[1]/ask"

    def test_an_item_that_fails_fails_the_run_with_its_error(self):
        each = foreach("each", note("seen", "{{ item }}"), transform("half", "{{ 6 / item }}"))
        result = run_workflow([chain(each)], {"items": [1, 0, 3]}, function_modules=FUNCTIONS)
        assert result.run.status is RunStatus.FAILED
        assert steps_of(result.dagster_result, "STEP_FAILURE") == {"each.agentmesh_item[1]"}
        found = statuses(result.steps)
        assert (found["each"], found["each[1]"], found["each[1]/half"]) == ("failed",) * 3
        assert result.steps["each"].error["message"] == result.steps["each[1]/half"].error["message"]
        assert result.run.error["message"] == result.steps["each[1]/half"].error["message"]

    def test_failures_that_are_collected_stand_in_the_items_place(self):
        each = foreach("each", transform("half", "{{ 6 / item }}"), on_item_error="collect")
        result = run_workflow([chain(each, output="{{ steps.each.output }}")], {"items": [1, 0, 3]})
        assert result.succeeded, result.run.error
        assert (result.run.output[0], result.run.output[2]) == (6, 2)
        assert set(result.run.output[1]) == {"error"}


INLINE = {"execution": "inline"}


class TestInline:
    def test_the_whole_workflow_is_one_step(self):
        both = parallel("both", left=body(transform("a", "{{ input.x }}")))
        result = run_workflow([chain(both, output="{{ steps.both.output }}", settings=INLINE)], {"x": 3})
        assert result.succeeded, result.run.error
        assert result.run.output == {"left": 3}
        assert steps_of(result.dagster_result) == {"agentmesh_run"}
        assert outputs_of(result.dagster_result, "agentmesh_run")["done"] == {
            "status": "succeeded",
            "output": '{"left": 3}',
        }
        assert {"start", "both", "both/left/a", "end"} <= set(result.steps)

    def test_a_failure_is_a_failed_step(self):
        document = chain(fail_first("bad", failures=9), settings=INLINE)
        result = run_workflow([document], function_modules=FUNCTIONS)
        assert result.run.status is RunStatus.FAILED
        assert result.steps["bad"].status is StepStatus.FAILED
        assert steps_of(result.dagster_result, "STEP_FAILURE") == {"agentmesh_run"}

    def test_it_waits_and_goes_on(self):
        document = chain(note("before"), gate("ask"), note("after"), settings=INLINE)
        waiting = run_workflow([document], {"x": 1}, function_modules=FUNCTIONS)
        assert waiting.run.status is RunStatus.WAITING
        assert outputs_of(waiting.dagster_result, "agentmesh_run")["done"]["waits at"] == "ask"
        done = run_workflow([document], {"x": 1}, function_modules=FUNCTIONS, answers=lambda _wait: Answer())
        assert done.succeeded
        assert notes() == ["before", "before", "after"]


class TestRetries:
    def test_reexecution_from_failure_in_a_branch_runs_what_failed_and_no_more(self, project):
        left = body(note("before"), fail_first("bad"), note("after"))
        both = parallel("both", left=left, right=body(note("beside")))
        project.publish(chain(both, output="{{ steps.both.output }}"))
        first = project.execute("nested", {"x": 5})
        assert not first.success
        second = project.retry("nested", first.run_id)
        run = project.run_row(first.run_id)
        assert second.success, run.error
        assert (run.status, run.output) == (RunStatus.SUCCEEDED, {"left": 5, "right": 5})
        assert run.dagster_run_ids == (first.run_id, second.run_id)
        assert "both.agentmesh_begin" not in steps_of(second)
        assert sorted(notes()) == ["after", "bad", "bad", "before", "beside"]

    def test_reexecution_from_failure_of_an_item(self, project):
        """Dagster names the steps by the keys that it has resolved."""
        each = foreach("each", note("seen", "{{ item }}"), fail_first("bad"))
        project.publish(chain(each, output="{{ steps.each.output }}"))
        first = project.execute("nested", {"items": ["a", "b", "c"]})
        assert not first.success
        failed = steps_of(first, "STEP_FAILURE")
        assert len(failed) == 1
        second = project.retry("nested", first.run_id)
        run = project.run_row(first.run_id)
        assert second.success, run.error
        assert len(run.output) == 3
        assert steps_of(second) == {*failed, "each.agentmesh_end", "end", "agentmesh_finish"}
        assert notes().count("seen") == 3

    @pytest.mark.parametrize("chosen", ["both.left.inside", "both"])
    def test_a_selection_of_steps_is_refused(self, project, chosen):
        project.publish(chain(parallel("both", left=body(note("inside")))))
        result = project.execute("nested", {"x": 1}, op_selection=[chosen])
        assert not result.success
        (failed,) = steps_of(result, "STEP_FAILURE")
        assert "hand-made selection" in project.step_error(result.run_id, failed).description
        assert notes() == []


def test_the_same_under_every_executor(project):
    """Ops of one container in processes of their own."""
    found = {}
    project.publish(CALLED)
    for executor in ("threads", "in_process", "multiprocess"):
        called = {"workflow": "called", "input": {"n": 3}}
        both = parallel("both", left=body(gate("ask")), right=called)
        each = foreach("each", transform("half", "{{ item // 2 }}"))
        edges = [edge("start", "both"), edge("start", "each"), edge("each", "end"), edge("both", "end")]
        project.publish(workflow([both, each], edges, settings={"executor": executor}))
        result = project.execute("nested", {"items": [4]})
        assert result.success, project.run_row(result.run_id).error
        run = project.run_row(result.run_id)
        steps = {
            key: (
                step.status,
                step.kind,
                step.output,
                step.parent_key,
                step.predecessor_keys,
                step.iteration_index,
            )
            for key, step in project.steps(result.run_id).items()
        }
        found[executor] = (run.status, run.output, steps, steps_of(result))
    status, _output, steps, dagster_steps = found["threads"]
    assert status is RunStatus.WAITING
    assert steps["both"][0] is StepStatus.WAITING
    assert steps["each"][:3] == (StepStatus.SUCCEEDED, "node", [2])
    assert steps["both/right"][:3] == (StepStatus.SUCCEEDED, "branch", {"got": 6})
    assert "each.agentmesh_item[0]" in dagster_steps
    assert found["in_process"] == found["threads"]
    assert found["multiprocess"] == found["threads"]


def test_a_fan_out_beside_a_branch_that_fails_ends_by_its_items(project):
    """The items have processes of their own, which end before or after the failure: their container says which."""
    each = foreach("each", note("seen", "{{ item }}"), items="{{ [1, 2] }}")
    both = parallel("both", left=body(fail_first("bad", failures=9)), right=body(each))
    project.publish(chain(both, settings={"executor": "multiprocess"}))
    result = project.execute("nested", {"x": 1})
    assert not result.success
    found = {key: step.status.value for key, step in project.steps(result.run_id).items()}
    assert (found["both"], found["both/left"]) == ("failed", "failed")
    assert (
        found["both/right/each"] == found["both/right/each[0]"] == found["both/right/each[1]"] == "succeeded"
    )
    assert "running" not in found.values()
    # A retry finds all that ended.
    assert sorted(notes()) == ["bad", "seen", "seen"]
