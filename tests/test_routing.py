"""Joins, edge conditions, skipping and handled failures, in whole runs; and what runs beside a failure."""

from __future__ import annotations

import pytest
import workflow_functions
from workflow_project import open_project

from agentmesh_dagster.records import RunStatus, StepStatus
from agentmesh_dagster.testing import run_workflow


def graph(nodes, edges, **more):
    """A workflow from nodes and edges; an edge is `a>b`, `a:handle>b`, or `(edge, condition)`."""
    found = []
    for edge in edges:
        text, condition = edge if isinstance(edge, tuple) else (edge, None)
        source, target = text.split(">")
        source, _, handle = source.partition(":")
        found.append({"source": source, "target": target})
        if handle:
            found[-1]["source_handle"] = handle
        if condition:
            found[-1]["condition"] = condition
    nodes = [
        {"id": n, "type": {"start": "start", "end": "end"}.get(n, "transform")} if isinstance(n, str) else n
        for n in nodes
    ]
    for node in nodes:
        if node["type"] == "transform" and "config" not in node:
            node["config"] = {"output": node["id"]}
    return {"kind": "workflow", "slug": "routing", "nodes": nodes, "edges": found, **more}


def node(id, output=None, **more):
    return {"id": id, "type": "transform", "config": {"output": id if output is None else output}, **more}


def failing(id, **more):
    config = {"function": "workflow_functions:fail", "input": {"message": f"{id} failed"}}
    return {"id": id, "type": "code", "config": config, **more}


def run(workflow, input=None):
    return run_workflow([workflow], input, function_modules=("workflow_functions",))


def statuses(result):
    return {key: step.status.value for key, step in result.steps.items()}


@pytest.fixture(autouse=True)
def _notes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def diamond(join, **more):
    return graph(
        ["start", "a", "b", node("j", join=join), "end"],
        [("start>a", "input.a"), ("start>b", "input.b"), "a>j", "b>j", "j>end", ("start>end", "not input.a")],
        **more,
    )


class TestJoins:
    @pytest.mark.parametrize(
        ("join", "a", "b", "runs"),
        [
            ("any", True, True, True),
            ("any", True, False, True),
            ("any", False, False, False),
            ("all", True, True, True),
            ("all", True, False, False),
            ("all", False, False, False),
        ],
    )
    def test_a_diamond(self, join, a, b, runs):
        result = run(diamond(join), {"a": a, "b": b})
        found = statuses(result)
        assert found["j"] == ("succeeded" if runs else "skipped")
        assert found["a"] == ("succeeded" if a else "skipped")
        assert found["b"] == ("succeeded" if b else "skipped")
        if runs:
            live = tuple(name for name, on in (("a", a), ("b", b)) if on)
            assert result.steps["j"].predecessor_keys == live
            assert result.steps["end"].predecessor_keys == ("j",)
        if not runs and a:
            assert result.run.status is RunStatus.FAILED
            assert result.run.error["code"] == "no-end"
        else:
            assert result.run.status is RunStatus.SUCCEEDED

    def test_a_dead_side_skips_its_whole_chain_and_the_join_runs_without_it(self):
        workflow = graph(
            ["start", "a", "b1", "b2", "b3", "j", "end"],
            ["start>a", ("start>b1", "false"), "b1>b2", "b2>b3", "b3>j", "a>j", "j>end"],
        )
        result = run(workflow)
        assert result.run.output == "j"
        assert statuses(result) == {
            **dict.fromkeys(("start", "a", "j", "end"), "succeeded"),
            **dict.fromkeys(("b1", "b2", "b3"), "skipped"),
        }
        assert result.run.steps_executed == 4
        skipped = [e for e in result.events if e.type == "step.skipped"]
        assert sorted(e.step_key for e in skipped) == ["b1", "b2", "b3"]

    def test_a_join_sees_the_skipped_side_as_undefined(self):
        end = {
            "id": "end",
            "type": "end",
            "config": {"output": "{{ [steps.a.output, steps.b.output | default(none), steps.b.status] }}"},
        }
        workflow = graph(["start", "a", "b", end], ["start>a", ("start>b", "false"), "a>end", "b>end"])
        assert run(workflow).run.output == ["a", None, "skipped"]

    def test_last_output_of_a_join_is_the_live_one(self):
        workflow = graph(["start", "a", "b", "end"], ["start>a", ("start>b", "input.b"), "a>end", "b>end"])
        assert run(workflow, {"b": False}).run.output == "a"
        assert run(workflow, {"b": True}).run.output == "b"


class TestConditions:
    def test_a_condition_sees_its_source_and_what_it_set(self):
        workflow = graph(
            [
                "start",
                node("a", {"n": "{{ input.n }}"}, set={"big": "{{ steps.a.output.n > 5 }}"}),
                node("x"),
                node("y"),
                "end",
            ],
            [
                "start>a",
                ("a>x", "context.big and context.last_output.n == steps.a.output.n"),
                ("a>y", "not context.big"),
                "x>end",
                "y>end",
            ],
        )
        assert run(workflow, {"n": 9}).run.output == "x"
        assert run(workflow, {"n": 1}).run.output == "y"

    def test_two_edges_between_the_same_nodes_are_either_or(self):
        workflow = graph(
            ["start", "a", "end"], [("start>a", "input.n == 1"), ("start>a", "input.n == 2"), "a>end"]
        )
        assert run(workflow, {"n": 2}).run.output == "a"
        failed = run(workflow, {"n": 3})
        assert failed.run.error["code"] == "no-end"
        assert "'start'" in failed.run.error["message"]

    def test_a_condition_that_fails_fails_its_node(self):
        workflow = graph(["start", "a", "end"], ["start>a", ("a>end", "input.nope")])
        result = run(workflow)
        assert result.run.status is RunStatus.FAILED
        assert "edges[1].condition" in result.run.error["message"]
        assert result.steps["a"].status is StepStatus.FAILED

    def test_a_branch_edge_with_a_condition_needs_both(self):
        branch = {
            "id": "b",
            "type": "branch",
            "config": {"conditions": [{"when": "input.x", "handle": "yes"}], "default": "no"},
        }
        workflow = graph(
            ["start", branch, "a", "c", "end"],
            ["start>b", ("b:yes>a", "input.y"), "b:yes>end", "b:no>c", "a>end", "c>end"],
        )
        assert statuses(run(workflow, {"x": True, "y": False}))["a"] == "skipped"
        assert statuses(run(workflow, {"x": True, "y": True}))["a"] == "succeeded"


class TestOnError:
    def test_fail_is_the_default_and_nothing_after_it_runs(self):
        result = run(graph(["start", failing("a"), "b", "end"], ["start>a", "a>b", "b>end"]))
        assert result.run.status is RunStatus.FAILED
        assert not result.succeeded
        assert "a failed" in result.run.error["message"]
        assert statuses(result) == {"start": "succeeded", "a": "failed"}
        assert [e.type for e in result.events][-2:] == ["step.failed", "run.failed"]

    def test_continue_goes_on_with_null(self):
        workflow = graph(
            [
                "start",
                failing("a", on_error="continue"),
                node("b", ["{{ context.last_output }}", "{{ steps.a.status }}", "{{ steps.a.error.code }}"]),
                "end",
            ],
            ["start>a", "a>b", "b>end"],
        )
        result = run(workflow)
        assert result.succeeded
        assert result.run.output == [None, "failed", "function-failed"]
        assert result.steps["a"].status is StepStatus.FAILED
        assert "a failed" in result.steps["a"].error["message"]
        assert result.run.steps_executed == 4
        assert result.run.error is None

    def test_route_takes_only_the_error_edges(self):
        workflow = graph(
            [
                "start",
                failing("a", on_error="route"),
                "fine",
                node("mend", "{{ steps.a.error.message }}"),
                "end",
            ],
            ["start>a", "a>fine", "a:error>mend", "fine>end", "mend>end"],
        )
        result = run(workflow)
        assert result.succeeded
        assert "a failed" in result.run.output
        assert statuses(result)["fine"] == "skipped"
        assert result.steps["a"].routing_decision["handles"] == ["error"]

    def test_route_takes_the_others_when_nothing_fails(self):
        workflow = graph(
            ["start", node("a", on_error="route"), "fine", "mend", "end"],
            ["start>a", "a>fine", "a:error>mend", "fine>end", "mend>end"],
        )
        assert run(workflow).run.output == "fine"

    def test_a_failure_before_the_body_is_handled_too(self):
        bad = node("a", "{{ input.nope }}", on_error="route")
        workflow = graph(
            ["start", bad, "fine", node("mend", "{{ steps.a.error.domain }}"), "end"],
            ["start>a", "a>fine", "a:error>mend", "fine>end", "mend>end"],
        )
        assert run(workflow).run.output == "expression"

    def test_a_delay_that_is_no_number_is_handled_too(self):
        bad = {"id": "a", "type": "delay", "config": {"seconds": "{{ input.v }}"}, "on_error": "route"}
        workflow = graph(
            ["start", bad, "fine", "mend", "end"],
            ["start>a", "a>fine", "a:error>mend", "fine>end", "mend>end"],
        )
        assert run(workflow, {"v": "soon"}).run.output == "mend"

    def test_a_handled_failure_whose_set_needs_the_output_keeps_its_own_error(self):
        bad = failing("a", on_error="continue", set={"x": "{{ steps.a.output.y }}"})
        result = run(graph(["start", bad, "b", "end"], ["start>a", "a>b", "b>end"]))
        # Whatever becomes of `set`, the reason why the node failed must not get lost.
        error = result.steps["a"].error
        assert "a failed" in str(error)

    def test_retries_come_before_on_error(self):
        flaky = {
            "id": "a",
            "type": "code",
            "config": {"function": "workflow_functions:fail_first", "input": {"name": "a", "failures": 5}},
            "retry": {"max_attempts": 2, "delay_s": 0},
            "on_error": "continue",
        }
        result = run(graph(["start", flaky, "end"], ["start>a", "a>end"]))
        assert result.succeeded
        assert result.steps["a"].attempt == 2
        assert workflow_functions.notes() == ["a", "a"]


def test_an_unhandled_failure_ends_the_run_at_once_and_a_sibling_finishes(tmp_path, sqlite_url, monkeypatch):
    with open_project(tmp_path, sqlite_url, monkeypatch) as project:
        slow = {
            "id": "slow",
            "type": "code",
            "config": {
                "function": "workflow_functions:wait_for_status",
                "input": {"run_id": "{{ run.id }}", "status": "failed", "database_url": "{{ input.url }}"},
            },
        }
        project.publish(
            graph(
                ["start", failing("bad"), slow, "after", "end"],
                ["start>bad", "start>slow", "slow>after", "bad>end", "after>end"],
            )
        )
        result = project.execute("routing", {"url": sqlite_url})
        run_row, steps = project.run_row(result.run_id), project.steps(result.run_id)
        assert not result.success
        assert run_row.status is RunStatus.FAILED
        assert "bad failed" in run_row.error["message"]
        # `slow` waited until the run was failed in the database: it was in flight then, and ended well.
        assert (steps["slow"].status, steps["slow"].output) == (StepStatus.SUCCEEDED, "seen")
        assert steps["slow"].finished_at > run_row.finished_at
        assert steps["bad"].status is StepStatus.FAILED
        assert steps.get("end") is None or steps["end"].status is not StepStatus.SUCCEEDED
