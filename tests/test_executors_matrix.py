"""The same workflow under every executor and on every database: same output, same step keys, same rows."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

from dagster import DagsterRunStatus
from dagster_server import parent_of
from workflow_project import open_project

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.orchestration.reconcile import reconcile_run
from agentmesh_dagster.records import RunStatus

ECHO = {"kind": "agent", "slug": "echo", "model": "offline/echo"}
TOOL = {"kind": "tool", "slug": "sum", "type": "builtin", "config": {"name": "calculator"}}


def workflow(executor):
    nodes = [
        {"id": "start", "type": "start"},
        {"id": "ask", "type": "agent", "config": {"agent": "echo", "prompt": "Order {{ input.order }}"}},
        {
            "id": "add",
            "type": "tool",
            "config": {"tool": "sum", "input": {"expression": "2 * {{ input.n }}"}},
            "set": {"total": "{{ steps.add.output.result }}"},
        },
        {
            "id": "check",
            "type": "branch",
            "config": {"conditions": [{"when": "input.n > 100", "handle": "sehr groß"}], "default": "class"},
        },
        {"id": "never", "type": "transform", "config": {"output": 1}},
        {
            "id": "bad",
            "type": "code",
            "config": {"function": "workflow_functions:fail", "input": {}},
            "on_error": "continue",
        },
        {
            "id": "end",
            "type": "end",
            "config": {
                "output": ["{{ steps.ask.output.text }}", "{{ context.total }}", "{{ steps.bad.status }}"]
            },
            "join": "any",
        },
    ]
    pairs = [
        ("start", "ask"),
        ("start", "add"),
        ("start", "bad"),
        ("add", "check"),
        ("never", "end"),
        ("ask", "end"),
        ("bad", "end"),
    ]
    edges = [{"source": a, "target": b} for a, b in pairs]
    edges += [
        {"source": "check", "target": "never", "source_handle": "sehr groß"},
        {"source": "check", "target": "end", "source_handle": "class"},
    ]
    return {
        "kind": "workflow",
        "slug": "matrix",
        "nodes": nodes,
        "edges": edges,
        "settings": {"executor": executor},
    }


def told(project, run_id):
    """What must be the same everywhere."""
    run = project.run_row(run_id)
    steps = {
        key: (
            s.status.value,
            s.kind,
            s.output,
            s.predecessor_keys,
            s.parent_key,
            s.attempt,
            s.fingerprint != "",
            s.routing_decision,
        )
        for key, s in sorted(project.steps(run_id).items())
    }
    totals = (run.status, run.output, run.error, run.steps_executed, run.input_tokens, run.output_tokens)
    return totals, steps, sorted(project.events(run_id), key=str)


def test_the_same_under_every_executor(tmp_path, database_url, monkeypatch):
    with open_project(tmp_path, database_url, monkeypatch) as project:
        found = {}
        for executor in ("threads", "in_process", "multiprocess"):
            project.publish(TOOL, ECHO, workflow(executor))
            result = project.execute("matrix", {"order": "A1", "n": 21})
            assert result.success, project.run_row(result.run_id).error
            found[executor] = told(project, result.run_id)
            tags = project.instance.get_run_by_id(result.run_id).tags
            assert tags["agentmesh/status"] == "succeeded"
        totals, steps, events = found["threads"]
        assert totals[:4] == (RunStatus.SUCCEEDED, ["Order A1", 42, "failed"], None, 6)
        assert list(steps) == [
            "add",
            "add/tool/1",
            "ask",
            "ask/llm/1",
            "bad",
            "check",
            "end",
            "never",
            "start",
        ]
        assert ("step.skipped", "never") in events
        assert found["in_process"] == found["threads"]
        assert found["multiprocess"] == found["threads"]


def test_a_run_of_step_processes_is_not_taken_for_dead_between_its_steps(tmp_path, sqlite_url, monkeypatch):
    """The reconciler looks in while no process holds the run's lease."""
    with open_project(tmp_path, sqlite_url, monkeypatch) as project:
        project.publish(TOOL, ECHO, workflow("multiprocess"))
        result = project.execute("matrix", {"order": "A1", "n": 1}, tags={"agentmesh/source": "test"})
        run = project.run_row(result.run_id)

        class Between:
            """The instance as the reconciler sees it while the run goes on."""

            def get_run_by_id(self, run_id):
                return project.instance.get_run_by_id(run_id).with_status(DagsterRunStatus.STARTED)

            def report_run_failed(self, *_arguments):
                raise AssertionError("a run that goes on was reported failed")

        assert project.store.runs.lease(run.id) is None
        running = replace(run, status=RunStatus.RUNNING)
        assert reconcile_run(project.store, Between(), running, None, SystemClock()) is None


def test_step_processes_are_forked_from_one_that_belongs_to_the_run(tmp_path, sqlite_url, monkeypatch):
    ids = ["start", "one", "two", "end"]
    function = {"type": "code", "config": {"function": "workflow_functions:process", "input": {}}}
    nodes = [{"id": key, **(function if key in ("one", "two") else {"type": key})} for key in ids]
    edges = [{"source": above, "target": below} for above, below in pairwise(ids)]
    settings = {"executor": "multiprocess", "max_concurrent": 1}
    with open_project(tmp_path, sqlite_url, monkeypatch) as project:
        project.publish(
            {"kind": "workflow", "slug": "forked", "nodes": nodes, "edges": edges, "settings": settings}
        )
        result = project.execute("forked")
        steps = project.steps(result.run_id)
        one, two = steps["one"].output, steps["two"].output
        assert one["own"] != two["own"]
        assert one["parent"] == two["parent"] != os.getpid()
        assert parent_of(one["parent"]) == os.getpid()
