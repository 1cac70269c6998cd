"""What nodes get without being told: the moments of their run, and the input of tools."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import ClassVar

import pytest
from fake_http import FakeHttp
from workflow_project import open_project

from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.testing import Answer, run_workflow

NOW = "{{ run.now }}"


def chain(*nodes, **more):
    nodes = [{"id": "start", "type": "start"}, *nodes]
    edges = [{"source": a["id"], "target": b["id"]} for a, b in itertools.pairwise(nodes)]
    return {"kind": "workflow", "slug": "sample", "nodes": nodes, "edges": edges, **more}


def transform(id, output):
    return {"id": id, "type": "transform", "config": {"output": output}}


def end(output):
    return {"id": "done", "type": "end", "config": {"output": output}}


def run(document, input=None, *others, **options):
    options.setdefault("function_modules", ("workflow_functions",))
    return run_workflow([*others, document], input, slug="sample", **options)


def moment(text):
    return datetime.fromisoformat(text)


def in_ms(at):
    return at.isoformat(timespec="milliseconds")


class TestMoments:
    def test_now_is_when_the_node_above_finished(self):
        first = transform("first", {"began": "{{ run.started_at }}", "now": NOW})
        result = run(
            chain(first, transform("second", NOW), end("{{ [steps.first.output, steps.second.output] }}"))
        )
        seen, later = result.run.output
        assert seen["began"] == in_ms(result.run.started_at)
        assert seen["now"] == in_ms(result.steps["start"].finished_at)
        assert later == in_ms(result.steps["first"].finished_at)

    def test_continuations_see_the_same(self, tmp_path):
        ask = {"id": "ask", "type": "human", "config": {"title": "{{ run.now }}", "prefill": {"at": NOW}}}
        began = {"began": "{{ run.started_at }}", "now": NOW, "asked": "{{ steps.ask.output.data.at }}"}
        result = run(chain(transform("first", NOW), ask, end(began)), answers=lambda _: Answer())
        assert result.run.status is RunStatus.SUCCEEDED, result.run.error
        assert result.waits[0].title == result.run.output["asked"] == in_ms(result.steps["first"].finished_at)
        assert result.run.output["began"] == in_ms(result.run.started_at)
        assert result.run.output["now"] == in_ms(result.steps["ask"].finished_at)

    def test_a_retry_sees_the_same(self, tmp_path, monkeypatch):
        failing = {
            "id": "work",
            "type": "code",
            "config": {"function": "workflow_functions:fail_first", "input": {"name": NOW}},
        }
        with open_project(tmp_path, f"sqlite:///{tmp_path}/agentmesh.db", monkeypatch) as project:
            project.publish(chain(transform("first", NOW), failing, end("{{ steps.first.output }}")))
            failed = project.execute("sample")
            before = project.steps(failed.run_id)["work"].input
            again = project.retry("sample", failed.run_id)
            assert again.success
            after = project.steps(failed.run_id)
            assert after["work"].input == before
            assert before["input"]["name"] == in_ms(after["first"].finished_at)

    def test_bodies_begin_when_what_is_before_them_finished(self):
        body = {"nodes": [transform("x", NOW)], "edges": []}
        loop = {
            "id": "again",
            "type": "loop",
            "config": {"until": "iteration == 2", "max_iterations": 2, "body": body},
        }
        each = {"id": "each", "type": "foreach", "config": {"items": [1], "body": body}}
        each["config"]["body"] = {"nodes": [transform("y", NOW)], "edges": []}
        result = run(chain(loop, each, end("{{ steps.each.output }}")))
        steps = result.steps
        assert steps["again#1/x"].output == in_ms(steps["start"].finished_at)
        assert steps["again#2/x"].output == in_ms(steps["again#1"].finished_at)
        assert steps["each[0]/y"].output == in_ms(steps["again"].finished_at)

    def test_called_workflows_and_finally_see_them(self):
        inner = chain(end({"now": NOW, "began": "{{ run.started_at }}"}), slug="inner")
        call = {"id": "call", "type": "workflow", "config": {"workflow": "inner", "input": {}}}
        last = {"nodes": [transform("told", {"now": NOW})], "edges": []}
        document = chain(transform("first", 1), call, end("{{ steps.call.output }}"))
        result = run({**document, "finally": last}, None, inner)
        assert result.run.output["now"] == in_ms(result.steps["call/start"].finished_at)
        assert result.run.output["began"] == in_ms(result.run.started_at)
        assert result.steps["@finally/told"].output == {"now": in_ms(result.run.finished_at)}


class TestToolsWithoutInput:
    @staticmethod
    def tool(**more):
        return {"kind": "tool", "slug": "ask", "type": "builtin", "config": {"name": "now"}, **more}

    NODE: ClassVar = {"id": "call", "type": "tool", "config": {"tool": "ask"}}

    def function(self, name, **more):
        return self.tool(type="function", config={"function": f"workflow_functions:{name}"}, **more)

    @pytest.mark.parametrize("name", ["notes", "process"])
    def test_a_function_without_parameters_gets_nothing_in_every_iteration(self, name, tmp_path, monkeypatch):
        monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))
        body = {"nodes": [self.NODE], "edges": []}
        loop = {
            "id": "again",
            "type": "loop",
            "config": {"until": "iteration == 2", "max_iterations": 2, "body": body},
        }
        result = run(chain(loop, end(1)), None, self.function(name))
        assert result.run.status is RunStatus.SUCCEEDED, result.run.error
        assert [result.steps[f"again#{n}/call"].input["input"] for n in (1, 2)] == [{}, {}]

    def test_an_http_tool_without_a_schema_gets_nothing(self, monkeypatch):
        monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
        with FakeHttp() as server:
            tool = self.tool(
                type="http", config={"method": "POST", "url": f"{server.url}/echo", "json": "{{ input }}"}
            )
            result = run(chain(transform("first", {"a": 1}), self.NODE, end(1)), None, tool)
        assert result.run.status is RunStatus.SUCCEEDED, result.run.error
        assert result.steps["call"].input == {"tool": "ask", "input": {}}

    def test_one_with_fields_gets_what_the_node_before_gave(self):
        result = run(
            chain(transform("first", {"number": 4}), self.NODE, end("{{ steps.call.output }}")),
            None,
            self.function("double"),
        )
        assert result.run.output == 8

    def test_the_error_names_node_and_source(self):
        result = run(
            chain(transform("first", {"amount": 4}), self.NODE, end(1)), None, self.function("double")
        )
        error = result.run.error
        assert (error["code"], error["path"]) == ("tool-input", "call")
        assert (
            "node 'call': the output of 'first', as no 'input' is given, does not fit the input of tool 'ask'"
            in (error["message"])
        )
        given = {**self.NODE, "config": {"tool": "ask", "input": {"number": "many"}}}
        problem = run(
            chain({**given, "config": {"tool": "ask", "input": {"number": "{{ input.x }}"}}}, end(1)),
            {"x": "many"},
            self.function("double"),
        ).run.error
        assert "node 'call': config.input does not fit the input of tool 'ask'" in problem["message"]

    def test_in_a_body_the_source_is_what_came_before(self):
        body = {"nodes": [self.NODE], "edges": []}
        each = {
            "id": "each",
            "type": "foreach",
            "config": {"items": [{"number": 1}, {"amount": 2}], "body": body},
        }
        error = run(chain(each, end(1)), None, self.function("double")).run.error
        assert "node 'each[1]/call': what came before the first nodes of this body" in error["message"]
