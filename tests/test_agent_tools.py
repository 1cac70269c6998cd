"""Agents with tools, in whole runs: what the model is told, what is journalled, and what is never called twice."""

from __future__ import annotations

import itertools
import json
import sqlite3

import pytest
import workflow_functions
from fake_http import FakeHttp
from fake_provider import FakeProvider, completion
from workflow_project import open_project

from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.records import RunStatus, StepStatus, WaitKind, WaitStatus
from agentmesh_dagster.testing import Answer, run_workflow

TOKEN = "very-secret-token-1"
RISK = {"type": "object", "required": ["risk"], "properties": {"risk": {"enum": ["low", "high"]}}}


def agent(*tools, **more):
    return {
        "kind": "agent",
        "slug": "clerk",
        "model": "openai/fake",
        "tools": list(tools),
        **more,
    }


def scripted(*replies, tools, **more):
    settings = {"replies": list(replies)}
    return {
        "kind": "agent",
        "slug": "clerk",
        "model": "offline/script",
        "model_settings": settings,
        "tools": list(tools),
        **more,
    }


def workflow(config=None, *after, **node):
    nodes = [
        {"id": "start", "type": "start"},
        {
            "id": "ask",
            "type": "agent",
            "config": {"agent": "clerk", "prompt": "Go.", **(config or {})},
            **node,
        },
        *after,
        {"id": "end", "type": "end", "config": {"output": "{{ steps.ask.output }}"}},
    ]
    edges = [{"source": a["id"], "target": b["id"]} for a, b in itertools.pairwise(nodes)]
    return {"kind": "workflow", "slug": "asking", "nodes": nodes, "edges": edges}


def function(slug, name, **more):
    config = {"function": f"workflow_functions:{name}"}
    return {
        "kind": "tool",
        "slug": slug,
        "type": "function",
        "description": f"To {slug}.",
        "config": config,
        **more,
    }


def pay(**more):
    """A tool that notes each payment and gives the amount back; it must not be called twice."""
    schema = {
        "type": "object",
        "required": ["name", "value"],
        "properties": {"name": {"type": "string"}, "value": {"type": "number"}},
        "additionalProperties": False,
    }
    return function("pay", "note", input_schema=schema, side_effects=True, **more)


def calls(*wanted):
    return {"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in wanted]}


def payment(name, value):
    return ("pay", {"name": name, "value": value})


def said(messages, role="tool"):
    return [message["content"] for message in messages if message["role"] == role]


@pytest.fixture(autouse=True)
def _notes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


@pytest.fixture
def fake():
    with FakeProvider() as server:
        yield server


@pytest.fixture
def project(tmp_path, sqlite_url, monkeypatch, fake):
    with open_project(tmp_path, sqlite_url, monkeypatch, api_base=fake.base_url) as opened:
        yield opened


def run(fake, *documents, **options):
    endpoints = {} if fake is None else fake.deployment.endpoints
    deployment = Deployment.of(endpoints=endpoints, secrets=["SHOP_TOKEN", "NOT_THERE"])
    return run_workflow(
        list(documents), function_modules=("workflow_functions",), deployment=deployment, **options
    )


class TestLoop:
    def test_offers_calls_tells_and_goes_on(self, fake):
        fake.push(calls(("double", {"number": 4})), {"text": "It is 8.", "usage": [20, 5]})
        result = run(fake, agent("double"), workflow(), function("double", "double"))
        assert result.succeeded, result.run.error
        first, second = (request.body for request in fake.requests)
        (offer,) = first["tools"]
        assert (offer["type"], offer["function"]["name"]) == ("function", "double")
        assert offer["function"]["description"] == "To double."
        assert offer["function"]["parameters"]["properties"] == {"number": {"type": "number"}}
        assert second["tools"] == first["tools"]
        assert second["messages"][1:] == [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "double", "arguments": '{"number": 4}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_0", "content": "8.0"},
        ]
        assert list(result.steps) == ["start", "ask", "ask/llm/1", "ask/tool/1.0", "ask/llm/2", "end"]
        step = result.steps["ask/tool/1.0"]
        assert (step.kind, step.parent_key, step.status) == ("tool", "ask", StepStatus.SUCCEEDED)
        assert (step.input, step.output) == ({"tool": "double", "input": {"number": 4}}, 8)
        output = result.run.output
        assert output["text"] == "It is 8."
        assert output["tool_calls"] == [
            {"tool": "double", "arguments": {"number": 4}, "output": 8, "key": "ask/tool/1.0"}
        ]
        usage = output["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["calls"]) == (31, 12, 2)
        types = [e.type for e in result.events if e.step_key == "ask/tool/1.0"]
        assert types == ["tool.request", "tool.response"]

    def test_calls_of_one_answer_run_side_by_side(self):
        wait = function("wait", "wait_for_note")
        both = [
            {"tool": "wait", "arguments": {"name": "two begins", "then": "one"}},
            {"tool": "wait", "arguments": {"name": "one begins", "then": "two"}},
        ]
        result = run(None, scripted({"tool_calls": both}, "done", tools=["wait"]), workflow(), wait)
        assert result.succeeded, result.run.error
        assert [one["output"] for one in result.run.output["tool_calls"]] == ["one", "two"]
        assert [one["key"] for one in result.run.output["tool_calls"]] == ["ask/tool/1.0", "ask/tool/1.1"]

    def test_what_goes_wrong_is_told_and_the_agent_goes_on(self, fake):
        wanted = [
            {"name": "pay", "arguments": {"name": "a"}},
            {"name": "refund", "arguments": {}},
            {"name": "fail", "arguments": {"message": "out of order"}},
            {"name": "pay", "arguments": {"name": "b", "value": 2}},
        ]
        fake.push({"tool_calls": wanted}, {"text": "Enough."})
        result = run(fake, agent("pay", "fail"), workflow(), pay(), function("fail", "fail"))
        assert result.succeeded, result.run.error
        told = said(fake.requests[1].body["messages"])
        assert "value" in told[0]
        assert "there is no tool 'refund'; there are 'pay', 'fail'" in told[1]
        assert "out of order" in told[2]
        assert told[3] == "2"
        assert [content.startswith("Error: ") for content in told] == [True, True, True, False]
        assert workflow_functions.notes() == ["b"]
        codes = [one["error"]["code"] for one in result.run.output["tool_calls"][:3]]
        assert codes == ["tool-input", "tool-unknown", "function-failed"]
        assert result.run.output["tool_calls"][1]["tool"] == "refund"
        assert result.steps["ask/tool/1.2"].status is StepStatus.FAILED
        assert result.steps["ask"].attempt == 1

    @pytest.mark.parametrize(
        "arguments", ['{"name": "a", ', '{"name": "a", "value": NaN}', "[1]", '{"value": 1e999}']
    )
    def test_arguments_that_cannot_be_read_are_told_and_not_handed_on(self, fake, arguments):
        body = completion({"model": "fake"}, calls(("pay", {})))
        body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = arguments
        fake.push({"body": body}, {"text": "Sorry."})
        result = run(fake, agent("pay"), workflow(), pay())
        assert result.succeeded, result.run.error
        messages = fake.requests[1].body["messages"]
        assert said(messages)[0].startswith("Error: ")
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == "{}"
        assert result.steps["ask/tool/1.0"].error["code"] == "tool-input"
        assert workflow_functions.notes() == []

    def test_names_and_ids_are_such_as_providers_take(self, fake):
        body = completion({"model": "fake"}, calls(("bad name!", {}), ("pay", {"name": "a", "value": 1})))
        for entry in body["choices"][0]["message"]["tool_calls"]:
            entry["id"] = "same"
        fake.push({"body": body}, {"text": "Done."})
        long = "x" * 90
        tools = [pay(), function(long, "double")]
        assert run(fake, agent("pay", long), workflow(), *tools).succeeded
        messages = fake.requests[1].body["messages"]
        assert [one["function"]["name"] for one in messages[1]["tool_calls"]] == ["bad_name_", "pay"]
        assert [one["id"] for one in messages[1]["tool_calls"]] == ["same", "call_1_1"]
        assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ["same", "call_1_1"]
        offered = [one["function"]["name"] for one in fake.requests[0].body["tools"]]
        assert offered[0] == "pay"
        assert len(offered[1]) <= 64

    def test_max_steps_bounds_the_model_calls(self, fake):
        fake.push(*[calls(("double", {"number": 1}))] * 5)
        retry = {"max_attempts": 3, "delay_s": 0}
        result = run(fake, agent("double", max_steps=2), workflow(retry=retry), function("double", "double"))
        assert result.run.error["code"] == "agent-max-steps"
        assert "max_steps = 2" in result.run.error["message"]
        assert fake.count == 2
        assert "ask/tool/2.0" not in result.steps

    def test_an_agent_without_tools_offers_none(self, fake):
        fake.push(calls(("double", {"number": 1})))
        result = run(fake, agent(), workflow())
        assert "tools" not in fake.requests[0].body
        assert (result.run.output["text"], result.run.output["tool_calls"]) == ("", [])

    def test_a_tool_that_cannot_be_used_fails_before_the_model_is_asked(self, fake):
        result = run(fake, agent("gone"), workflow(), function("gone", "no_such_function"))
        assert result.run.status is RunStatus.FAILED
        assert "no_such_function" in result.run.error["message"]
        assert fake.count == 0

    def test_secrets_reach_neither_the_model_nor_the_journal(self, fake, monkeypatch):
        monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
        monkeypatch.setenv("SHOP_TOKEN", TOKEN)
        with FakeHttp() as shop:
            tools = [
                {
                    "kind": "tool",
                    "slug": slug,
                    "type": "http",
                    "config": {
                        "url": shop.url + path,
                        "headers": {"X-Token": "{{ secret('SHOP_TOKEN') }}"},
                        "query": {"token": "{{ secret('SHOP_TOKEN') }}"},
                    },
                }
                for slug, path in (("echo", "/echo"), ("broken", "/status/404"))
            ]
            fake.push(calls(("echo", {}), ("broken", {})), {"text": f"The token is {TOKEN}."})
            result = run(fake, agent("echo", "broken"), workflow(), *tools)
            assert result.succeeded, result.run.error
            assert [call.headers["x-token"] for call in shop.calls] == [TOKEN] * 2
        assert TOKEN not in json.dumps(fake.requests[1].body)
        assert TOKEN not in repr((result.run, result.steps, result.events))

    def test_a_secret_that_is_missing_is_not_the_models_business(self, fake, monkeypatch):
        monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
        config = {"url": "http://127.0.0.1:9/", "headers": {"X": "{{ secret('NOT_THERE') }}"}}
        tool = {"kind": "tool", "slug": "shop", "type": "http", "config": config}
        fake.push(calls(("shop", {})))
        result = run(fake, agent("shop"), workflow(), tool)
        assert result.run.error["code"] == "secret-missing"
        assert fake.count == 1


class TestObject:
    def test_the_object_is_asked_for_when_no_tool_is(self, fake):
        fake.push(calls(("double", {"number": 4})), {"text": "High, I think."}, {"object": {"risk": "high"}})
        result = run(fake, agent("double"), workflow({"output_schema": RISK}), function("double", "double"))
        assert result.succeeded, result.run.error
        assert result.run.output["risk"] == "high"
        bodies = [request.body for request in fake.requests]
        assert ["response_format" in body for body in bodies] == [False, False, True]
        assert [body.get("tool_choice") for body in bodies] == [None, None, "none"]
        assert all("tools" in body for body in bodies)
        assert [m["role"] for m in bodies[2]["messages"]] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
        ]
        assert result.run.output["usage"]["calls"] == 3

    def test_an_answer_that_is_the_object_is_taken(self, fake):
        fake.push(calls(("double", {"number": 4})), {"object": {"risk": "low"}})
        result = run(fake, agent("double"), workflow({"output_schema": RISK}), function("double", "double"))
        assert (result.run.output["risk"], fake.count) == ("low", 2)

    def test_an_object_that_does_not_fit_is_repaired_once(self, fake):
        fake.push({"text": "High."}, {"object": {"risk": "medium"}}, {"object": {"risk": "high"}})
        result = run(fake, agent("double"), workflow({"output_schema": RISK}), function("double", "double"))
        assert (result.run.output["risk"], fake.count) == ("high", 3)
        assert "does not fit the schema" in said(fake.requests[2].body["messages"], "user")[-1]


class TestReplay:
    def test_a_retry_repeats_no_finished_call_of_the_model_or_of_a_tool(self, project, fake):
        fake.push(calls(payment("a", 1), ("fail", {"message": "first"})), {"status": 500})
        project.publish(agent("pay", "fail"), workflow(), pay(), function("fail", "fail"))
        first = project.execute("asking")
        assert not first.success
        fake.push({"text": "Paid."})
        second = project.retry("asking", first.run_id)
        assert second.success
        assert fake.count == 3
        assert fake.requests[1].body["messages"] == fake.requests[2].body["messages"]
        assert workflow_functions.notes() == ["a"]
        steps = project.steps(first.run_id)
        assert [steps[f"ask/tool/1.{i}"].attempt for i in (0, 1)] == [1, 1]
        requests = [key for kind, key in project.events(first.run_id) if kind == "tool.request"]
        assert sorted(requests) == ["ask/tool/1.0", "ask/tool/1.1"]

    def test_a_failed_answer_stays_the_answer_although_the_tool_would_work_now(self, project, fake):
        fake.push(calls(("flaky", {"name": "flaky"})), {"status": 500})
        project.publish(agent("flaky"), workflow(), function("flaky", "fail_first"))
        first = project.execute("asking")
        fake.push({"text": "It failed."})
        assert project.retry("asking", first.run_id).success
        assert workflow_functions.notes() == ["flaky"]
        output = project.run_row(first.run_id).output
        assert "call 1 of flaky fails" in output["tool_calls"][0]["error"]["message"]

    def test_bad_objects_ask_the_model_anew_and_never_a_tool_again(self, project, fake):
        bad = [{"text": "No object."}, *[{"object": {"risk": "medium"}}] * 2]
        fake.push(calls(payment("a", 1)), *bad, *bad)
        config, retry = {"output_schema": RISK}, {"max_attempts": 2, "delay_s": 0}
        project.publish(agent("pay"), workflow(config, retry=retry), pay())
        first = project.execute("asking")
        assert project.run_row(first.run_id).error["code"] == "model-bad-object"
        assert fake.count == 7
        fake.push(calls(payment("b", 2)), {"object": {"risk": "high"}})
        second = project.retry("asking", first.run_id)
        assert second.success, project.run_row(first.run_id).error
        assert fake.count == 9
        assert workflow_functions.notes() == ["a", "b"]
        # Each anew from what the tool had answered.
        for anew in (4, 7):
            assert fake.requests[anew].body["messages"] == fake.requests[1].body["messages"]
        steps = project.steps(first.run_id)
        assert {"ask/tool/1.0", "ask/tool/8.0", "ask/llm/9"} <= set(steps)
        keys = [one["key"] for one in project.run_row(first.run_id).output["tool_calls"]]
        assert keys == ["ask/tool/1.0", "ask/tool/8.0"]

    def test_a_retry_after_max_steps_asks_once_more(self, project, fake):
        fake.push(*[calls(payment(name, 1)) for name in ("a", "b")])
        project.publish(agent("pay", max_steps=2), workflow(), pay())
        first = project.execute("asking")
        assert project.run_row(first.run_id).error["code"] == "agent-max-steps"
        fake.push({"text": "Paid."})
        assert project.retry("asking", first.run_id).success
        assert (fake.count, workflow_functions.notes()) == (3, ["a"])

    def test_an_idempotent_call_that_was_cut_off_is_the_only_one_that_is_repeated(self, project, fake):
        fake.push(calls(payment("a", 1), ("slow", {"name": "slow"})), {"text": "Both."})
        retry = {"max_attempts": 2, "delay_s": 0}
        tools = [pay(), function("slow", "hang_once")]
        project.publish(agent("pay", "slow"), workflow(timeout_s=3, retry=retry), *tools)
        result = project.execute("asking")
        assert result.success
        assert sorted(workflow_functions.notes()) == ["a", "slow", "slow"]
        assert fake.count == 2
        steps = project.steps(result.run_id)
        assert [steps[f"ask/tool/1.{i}"].attempt for i in (0, 1)] == [1, 2]

    def test_a_call_that_must_not_be_repeated_is_not(self, project, fake):
        fake.push(calls(("slow", {"name": "slow"})))
        retry = {"max_attempts": 2, "delay_s": 0}
        tool = function("slow", "hang_once", side_effects=True)
        project.publish(agent("slow"), workflow(timeout_s=2, retry=retry, on_unknown="fail"), tool)
        result = project.execute("asking")
        assert project.run_row(result.run_id).error["code"] == "step-unknown"
        assert workflow_functions.notes() == ["slow"]

    def test_another_answer_of_the_model_under_the_key_is_refused(self, project, fake, tmp_path):
        fake.push(calls(payment("a", 1)), {"status": 500})
        project.publish(agent("pay"), workflow(), pay())
        first = project.execute("asking")
        with sqlite3.connect(tmp_path / "store" / "agentmesh.db") as connection:
            connection.execute("UPDATE steps SET fingerprint = 'other' WHERE key = 'ask/llm/1'")
        connection.close()
        assert not project.retry("asking", first.run_id).success
        assert project.run_row(first.run_id).error["code"] == "fingerprint"
        assert workflow_functions.notes() == ["a"]


class TestApproval:
    def decide(self, **by_name):
        """Answers by the `name` in the arguments of the call that is to be approved."""
        seen = []

        def answer(wait):
            seen.append(wait)
            return by_name.get(wait.data["arguments"]["name"])

        return seen, answer

    def test_refused_and_edited_calls_and_one_that_needs_nobody(self, fake, database_url):
        fake.push(
            calls(payment("a", 900), payment("b", 800), payment("c", 5)), {"text": "One of two, and c."}
        )
        seen, answer = self.decide(
            a=Answer(decision="rejected", by="ann", comment="too much"),
            b=Answer(decision="approved", by="bob", data={"value": 8, "name": "b"}),
        )
        result = run(
            fake,
            agent("pay"),
            workflow(),
            pay(requires_approval="input.value > 100"),
            answers=answer,
            database_url=database_url,
        )
        assert result.succeeded, result.run.error
        # Both at once, and nothing is asked twice.
        assert [wait.step_key for wait in seen] == ["ask/tool/1.0", "ask/tool/1.1"]
        assert [(wait.kind, wait.node_id) for wait in result.waits] == [(WaitKind.TOOL, "ask")] * 2
        assert seen[0].data == {"tool": "pay", "arguments": {"name": "a", "value": 900}}
        assert fake.count == 2
        assert workflow_functions.notes() == ["c", "b"]
        told = said(fake.requests[1].body["messages"])
        assert told[0] == "Error: tool 'pay' was refused by ann: too much"
        assert told[1] == (
            # In the order of the tool's schema.
            'Those who approved the call changed its arguments to {"name": "b", "value": 8}. It answered:\n8'
        )
        assert told[2] == "5"
        a, b, c = result.run.output["tool_calls"]
        assert (a["error"]["code"], a["arguments"]["value"]) == ("approval-refused", 900)
        assert (b["output"], b["arguments"]) == (8, {"name": "b", "value": 8})
        assert (c["output"], c["key"]) == (5, "ask/tool/1.2")
        step = result.steps["ask/tool/1.1"]
        assert step.input == {
            "tool": "pay",
            "input": {"name": "b", "value": 8},
            "asked": {"name": "b", "value": 800},
        }
        assert step.attempt == 1

    def test_decided_one_after_the_other_each_is_called_when_it_is(self, fake):
        fake.push(calls(payment("a", 1), payment("b", 2)), {"text": "Both."})
        seen = []

        def answer(wait):
            seen.append((wait.data["arguments"]["name"], workflow_functions.notes()))
            rounds = [name for name, _ in seen].count(wait.data["arguments"]["name"])
            return Answer() if wait.data["arguments"]["name"] == "b" or rounds > 1 else None

        result = run(fake, agent("pay"), workflow(), pay(requires_approval=True), answers=answer)
        assert result.succeeded, result.run.error
        assert seen == [("a", []), ("b", []), ("a", ["b"])]
        assert workflow_functions.notes() == ["b", "a"]
        assert fake.count == 2
        assert len(result.waits) == 2

    def test_nobody_decides(self, fake):
        fake.push(calls(payment("a", 1), ("double", {"number": 2})))
        tools = [pay(requires_approval=True), function("double", "double")]
        result = run(fake, agent("pay", "double"), workflow(), *tools)
        assert result.run.status is RunStatus.WAITING
        assert [wait.status for wait in result.waits] == [WaitStatus.OPEN]
        assert result.steps["ask"].status is StepStatus.WAITING
        assert result.steps["ask/tool/1.1"].output == 4
        assert "ask/tool/1.0" not in result.steps
        assert workflow_functions.notes() == []

    def test_arguments_that_do_not_fit_ask_nobody(self, fake):
        fake.push(calls(("pay", {"name": "a"})), {"text": "Sorry."})
        result = run(fake, agent("pay"), workflow(), pay(requires_approval=True))
        assert result.succeeded, result.run.error
        assert result.waits == []
        assert result.steps["ask/tool/1.0"].error["code"] == "tool-input"

    def test_a_condition_that_fails_calls_nothing(self, fake):
        fake.push(calls(payment("a", 1)), {"text": "Sorry."})
        tool = pay(requires_approval="input.value > input.limit")
        tool["input_schema"]["properties"]["limit"] = {"type": "number"}
        result = run(fake, agent("pay"), workflow(), tool)
        assert workflow_functions.notes() == []
        assert "limit" in said(fake.requests[1].body["messages"])[0]
        assert result.succeeded, result.run.error

    def test_a_second_round_asks_for_itself(self, fake):
        fake.push(calls(payment("a", 1)), calls(payment("a", 1)), {"text": "Twice."})
        seen, answer = self.decide(a=Answer())
        result = run(fake, agent("pay"), workflow(), pay(requires_approval=True), answers=answer)
        assert [wait.step_key for wait in seen] == ["ask/tool/1.0", "ask/tool/2.0"]
        assert workflow_functions.notes() == ["a", "a"]
        assert (fake.count, result.run.output["text"]) == (3, "Twice.")

    def test_time_runs_out(self, fake):
        fake.push(calls(payment("a", 1)), {"text": "Never mind."})
        _, answer = self.decide(a=Answer(decision="timeout"))
        late = pay(requires_approval=True, approval={"timeout": "1h", "on_timeout": "reject"})
        result = run(fake, agent("pay"), workflow(), late, answers=answer)
        assert result.succeeded, result.run.error
        assert workflow_functions.notes() == []
        assert said(fake.requests[1].body["messages"])[0].startswith("Error: tool 'pay' was refused")
        fake.push(calls(payment("a", 1)))
        late["approval"] = {"timeout": "1h"}
        result = run(fake, agent("pay"), workflow(), late, answers=answer)
        assert result.run.error["code"] == "gate-timeout"
        assert fake.count == 3

    def test_people_say_what_a_call_came_to_that_was_cut_off(self, fake):
        fake.push(calls(("slow", {"name": "slow"}), payment("a", 1)), {"text": "Both."})
        tool = function("slow", "hang_once", side_effects=True)
        result = run(
            fake,
            agent("slow", "pay"),
            workflow(timeout_s=2, retry={"max_attempts": 2, "delay_s": 0}),
            tool,
            pay(),
            answers=lambda _wait: Answer(decision="happened", data="it went through"),
        )
        assert result.succeeded, result.run.error
        (wait,) = result.waits
        assert (wait.kind, wait.step_key) == (WaitKind.UNKNOWN, "ask/tool/1.0")
        assert said(fake.requests[1].body["messages"]) == ["it went through", "1"]
        assert sorted(workflow_functions.notes()) == ["a", "slow"]
        assert fake.count == 2

    def test_a_function_may_suspend_in_the_middle(self, fake):
        fake.push(calls(("wait", {}), payment("a", 1)), {"text": "Go."})
        result = run(
            fake,
            agent("wait", "pay"),
            workflow(),
            function("wait", "ask_once"),
            pay(),
            answers=lambda _wait: Answer(data={"go": True}),
        )
        assert result.succeeded, result.run.error
        (wait,) = result.waits
        assert (wait.kind, wait.step_key) == (WaitKind.SUSPEND, "ask/tool/1.0")
        assert said(fake.requests[1].body["messages"]) == ['{"go": true}', "1"]
        assert workflow_functions.notes() == ["a"]
        assert fake.count == 2


class TestOffline:
    def test_a_script_calls_tools_by_slug(self):
        replies = [
            {
                "tool_calls": [
                    {"tool": "double", "arguments": {"number": 4}},
                    {"tool": "double", "arguments": "{"},
                ]
            },
            {"risk": "low"},
        ]
        result = run(
            None,
            scripted(*replies, tools=["double"]),
            workflow({"output_schema": RISK}),
            function("double", "double"),
        )
        assert result.succeeded, result.run.error
        assert (result.run.output["risk"], result.run.output["usage"]["calls"]) == ("low", 2)
        first, second = result.run.output["tool_calls"]
        assert (first["output"], second["error"]["code"]) == (8, "tool-input")
