"""The agent node in whole runs: over real HTTP through LiteLLM, and with the stand-ins."""

from __future__ import annotations

import itertools
import json

import pytest
from fake_provider import FakeProvider
from workflow_project import open_project

from agentmesh_dagster.deployment import Deployment, Endpoint
from agentmesh_dagster.records import RunStatus, StepStatus
from agentmesh_dagster.testing import run_workflow

KEY = "sk-never-to-be-seen-4711"
RISK = {
    "type": "object",
    "required": ["risk"],
    "properties": {"risk": {"enum": ["low", "high"]}, "why": {"type": "string"}},
    "additionalProperties": False,
}


def agent(**more):
    return {"kind": "agent", "slug": "triage", "model": "openai/first", **more}


def workflow(config=None, *after, **node):
    nodes = [
        {"id": "start", "type": "start"},
        {
            "id": "ask",
            "type": "agent",
            "config": {"agent": "triage", "prompt": "Risk of {{ input.amount }}?", **(config or {})},
            **node,
        },
        *after,
        {"id": "end", "type": "end"},
    ]
    edges = [{"source": a["id"], "target": b["id"]} for a, b in itertools.pairwise(nodes)]
    return {"kind": "workflow", "slug": "asking", "nodes": nodes, "edges": edges}


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("MODEL_KEY", KEY)


@pytest.fixture
def fake():
    with FakeProvider() as server:
        yield server


def deployment(fake):
    endpoint = Endpoint(api_base=fake.base_url, api_key="{{ secret('MODEL_KEY') }}")
    return Deployment.of(endpoints={"openai": endpoint})


def run(fake, documents, input=None):
    result = run_workflow(documents, {"amount": 50} if input is None else input, deployment=deployment(fake))
    assert KEY not in repr((result.run, result.steps, result.events))
    return result


def llm_steps(result):
    return {key: step for key, step in result.steps.items() if step.kind == "llm"}


class TestPlain:
    def test_asks_and_answers_with_text_usage_and_rows(self, fake):
        fake.push({"text": "All is well.", "usage": [30, 4]})
        result = run(
            fake, [agent(instructions="You rate refunds of {{ input.amount }}.", temperature=0.5), workflow()]
        )
        assert result.succeeded, result.run.error
        (request,) = fake.requests
        assert request.body["messages"] == [
            {"role": "system", "content": "You rate refunds of 50."},
            {"role": "user", "content": "Risk of 50?"},
        ]
        assert request.body["temperature"] == 0.5
        assert request.headers["authorization"] == f"Bearer {KEY}"
        output = result.run.output
        assert output["text"] == "All is well."
        assert output["tool_calls"] == []
        assert "object" not in output
        usage = output["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["calls"]) == (30, 4, 1)
        assert usage["model"] == "openai/first"
        step = result.steps["ask/llm/1"]
        assert (step.kind, step.parent_key, step.status) == ("llm", "ask", StepStatus.SUCCEEDED)
        assert (step.input_tokens, step.output_tokens, step.model_used) == (30, 4, "openai/first")
        assert (result.run.input_tokens, result.run.output_tokens) == (30, 4)
        assert result.run.steps_executed == 3
        types = [e.type for e in result.events if e.step_key and e.step_key.startswith("ask")]
        assert types == ["step.started", "agent.request", "agent.response", "step.completed"]
        op = [e for e in result.dagster_result.events_for_node("ask") if e.is_successful_output]
        metadata = op[0].step_output_data.metadata
        assert (metadata["input_tokens"].value, metadata["output_tokens"].value) == (30, 4)
        assert metadata["model"].value == "openai/first"

    def test_node_overrides_win_over_the_agents_settings(self, fake):
        documents = [
            agent(instructions="old", temperature=0.5, max_tokens=9),
            workflow({"model": "openai/other", "temperature": 0, "instructions": "new", "max_tokens": 5}),
        ]
        assert run(fake, documents).succeeded
        body = fake.requests[0].body
        assert (body["model"], body["temperature"], body["messages"][0]["content"]) == ("other", 0, "new")
        assert body.get("max_tokens", body.get("max_completion_tokens")) == 5

    def test_default_prompt_is_the_upstream_output(self, fake):
        before = {"id": "before", "type": "transform", "config": {"output": {"a": ["ü"]}}}
        document = workflow()
        del document["nodes"][1]["config"]["prompt"]
        document["nodes"].insert(1, before)
        document["edges"] = [
            {"source": a["id"], "target": b["id"]}
            for a, b in zip(document["nodes"], document["nodes"][1:], strict=False)
        ]
        assert run(fake, [agent(), document]).succeeded
        assert fake.requests[0].body["messages"] == [{"role": "user", "content": '{"a": ["ü"]}'}]

    def test_an_agent_after_an_agent_gets_its_text(self, fake):
        fake.push({"text": "first answer"}, {"text": "second answer"})
        second = {"id": "again", "type": "agent", "config": {"agent": "triage"}}
        result = run(fake, [agent(), workflow(None, second)])
        assert fake.requests[1].body["messages"] == [{"role": "user", "content": "first answer"}]
        assert result.run.output["text"] == "second answer"
        assert (result.run.input_tokens, result.run.output_tokens) == (22, 14)

    def test_cost_is_summed_on_the_run(self, fake):
        fake.push({"text": "a", "usage": [1000, 500]})
        documents = [agent(), workflow({"model": "openai/gpt-4o-mini"})]
        result = run(fake, documents)
        assert result.run.cost_usd > 0
        assert result.run.cost_usd == pytest.approx(result.steps["ask/llm/1"].cost_usd)
        assert result.run.output["usage"]["cost_usd"] == pytest.approx(result.run.cost_usd)


class TestObject:
    def test_an_object_is_checked_and_its_fields_stand_beside_the_text(self, fake):
        fake.push({"object": {"risk": "high", "why": "large"}})
        after = {
            "id": "use",
            "type": "transform",
            "config": {"output": "{{ [steps.ask.output.risk, steps.ask.output.object.why] }}"},
        }
        result = run(fake, [agent(), workflow({"output_schema": RISK}, after)])
        assert result.run.output == ["high", "large"]
        assert json.loads(result.steps["ask"].output["text"]) == {"risk": "high", "why": "large"}
        assert fake.requests[0].body["response_format"]["type"] == "json_schema"

    def test_a_markdown_fence_is_taken_off(self, fake):
        fake.push({"text": '```json\n{"risk": "low"}\n```'})
        assert run(fake, [agent(), workflow({"output_schema": RISK})]).run.output["object"] == {"risk": "low"}

    @pytest.mark.parametrize(
        ("first", "shown"),
        [
            ({"object": {"risk": "medium"}}, "risk"),
            ({"text": "I think it is low."}, "not JSON"),
            ({"text": '{"risk": NaN}'}, "NaN"),
        ],
    )
    def test_a_bad_object_is_repaired_in_a_second_call_that_shows_the_errors(self, fake, first, shown):
        fake.push(first, {"object": {"risk": "low"}})
        result = run(fake, [agent(), workflow({"output_schema": RISK})])
        assert result.succeeded, result.run.error
        assert result.run.output["risk"] == "low"
        assert fake.count == 2
        messages = fake.requests[1].body["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant", "user"]
        assert shown in messages[2]["content"]
        assert list(llm_steps(result)) == ["ask/llm/1", "ask/llm/2"]
        assert result.run.output["usage"]["calls"] == 2
        assert result.run.input_tokens == 22
        assert result.steps["ask"].attempt == 1

    def test_bad_twice_fails_without_retry(self, fake):
        fake.push(*[{"object": {"risk": "medium"}}] * 2)
        result = run(fake, [agent(), workflow({"output_schema": RISK})])
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "model-bad-object"
        assert "risk" in result.run.error["message"]
        assert fake.count == 2
        assert (result.run.input_tokens, result.run.output_tokens) == (22, 14)

    def test_bad_twice_then_the_next_attempt(self, fake):
        fake.push(*[{"object": {"risk": "medium"}}] * 2, {"object": {"risk": "high"}})
        result = run(
            fake, [agent(), workflow({"output_schema": RISK}, retry={"max_attempts": 2, "delay_s": 0.05})]
        )
        assert result.run.output["risk"] == "high"
        assert fake.count == 3
        assert len(fake.requests[2].body["messages"]) == 1
        assert list(llm_steps(result)) == ["ask/llm/1", "ask/llm/2", "ask/llm/3"]
        assert result.steps["ask"].attempt == 2


class TestFailures:
    def test_429_then_success(self, fake):
        fake.push({"status": 429, "message": "slow down"}, {"text": "fine"})
        result = run(fake, [agent(), workflow(retry={"max_attempts": 3, "delay_s": 0.05})])
        assert result.run.output["text"] == "fine"
        assert fake.count == 2
        assert result.steps["ask"].attempt == 2
        (step,) = llm_steps(result).values()
        assert (step.key, step.attempt, step.status) == ("ask/llm/1", 2, StepStatus.SUCCEEDED)
        responses = [e.payload for e in result.events if e.type == "agent.response"]
        assert responses[0]["error"]["code"] == "model-rate-limited"

    def test_500_until_failure(self, fake):
        fake.push(*[{"status": 500, "message": "broken"}] * 5)
        result = run(fake, [agent(), workflow(retry={"max_attempts": 2, "delay_s": 0})])
        assert result.run.status is RunStatus.FAILED
        error = result.run.error
        assert error["domain"] == "model"
        assert error["code"] == "model-unavailable"
        assert error["context"]["retryable"] is True
        assert error["context"]["model"] == "openai/first"
        assert fake.count == 2
        assert result.steps["ask"].attempt == 2

    def test_what_is_not_retryable_is_asked_once(self, fake):
        fake.push(*[{"status": 400, "message": "no such parameter"}] * 3)
        result = run(fake, [agent(), workflow(retry={"max_attempts": 3, "delay_s": 0})])
        assert result.run.error["context"]["retryable"] is False
        assert fake.count == 1

    def test_a_hang_is_cut_by_the_nodes_timeout(self, fake):
        fake.push({"hang": True}, {"text": "awake"})
        result = run(fake, [agent(), workflow(timeout_s=1.5, retry={"max_attempts": 2, "delay_s": 0})])
        assert result.succeeded, result.run.error
        assert result.run.output["text"] == "awake"
        fake.wait_for_cut()
        assert fake.count == 2
        assert result.steps["ask"].attempt == 2
        assert result.steps["ask/llm/1"].attempt == 2

    def test_a_hang_fails_the_run_with_a_timeout(self, fake):
        fake.push({"hang": True})
        result = run(fake, [agent(), workflow(timeout_s=1)])
        assert result.run.error["code"] == "timeout"
        assert result.steps["ask/llm/1"].status is StepStatus.CANCELED
        fake.wait_for_cut()

    def test_the_agents_own_timeout_bounds_one_call(self, fake):
        fake.push({"hang": True}, {"text": "second"})
        documents = [
            agent(model_settings={"timeout_s": 0.5}),
            workflow(retry={"max_attempts": 2, "delay_s": 0}),
        ]
        result = run(fake, documents)
        assert result.run.output["text"] == "second"
        first = next(e for e in result.events if e.type == "agent.response")
        assert first.payload["error"]["code"] == "model-timeout"

    def test_malformed_json_is_a_retryable_error(self, fake):
        fake.push({"malformed": True}, {"text": "whole"})
        result = run(fake, [agent(), workflow(retry={"max_attempts": 2, "delay_s": 0})])
        assert result.run.output["text"] == "whole"
        first = next(e for e in result.events if e.type == "agent.response")
        assert first.payload["error"]["code"] == "model-malformed"

    def test_a_second_model_takes_over(self):
        with FakeProvider(by_model={"first": [{"status": 503}], "second": [{"text": "from two"}]}) as fake:
            result = run(fake, [agent(model=["openai/first", "openai/second"]), workflow()])
            assert result.run.output["text"] == "from two"
            assert (fake.count_of("first"), fake.count_of("second")) == (1, 1)
            step = result.steps["ask/llm/1"]
            assert step.model_used == "openai/second"
            assert step.output["failures"][0]["context"]["model"] == "openai/first"
            assert result.steps["ask"].attempt == 1

    def test_a_missing_secret_names_itself_and_calls_nobody(self, fake, monkeypatch):
        monkeypatch.delenv("MODEL_KEY")
        result = run(fake, [agent(), workflow()])
        assert result.run.status is RunStatus.FAILED
        assert "MODEL_KEY" in result.run.error["message"]
        assert fake.count == 0

    def test_a_provider_that_shows_the_key_does_not_get_it_into_the_journal(self, fake):
        fake.push({"status": 401, "message": f"bad key {KEY}"})
        result = run(fake, [agent(), workflow()])
        assert result.run.status is RunStatus.FAILED
        fake.push({"text": f"your key is {KEY}"})
        assert run(fake, [agent(), workflow()]).succeeded


class TestOffline:
    def test_echo_and_script_need_no_server(self, fake):
        echo = {"kind": "agent", "slug": "triage", "model": "offline/echo"}
        assert run(fake, [echo, workflow()]).run.output["text"] == "Risk of 50?"
        assert run(fake, [echo, workflow({"output_schema": RISK})]).run.output["risk"] == "low"
        script = {
            **echo,
            "model": "offline/script",
            "model_settings": {"replies": ["bad", {"object": {"risk": "high"}}]},
        }
        assert run(fake, [script, workflow({"output_schema": RISK})]).run.output["risk"] == "high"


@pytest.mark.parametrize("answer", ["text", "error"])
def test_the_key_is_in_no_file_and_in_no_output(tmp_path, sqlite_url, monkeypatch, capfd, fake, answer):
    fake.push({"status": 401, "message": f"refused {KEY}"} if answer == "error" else {"text": f"hello {KEY}"})
    with open_project(
        tmp_path,
        sqlite_url,
        monkeypatch,
        api_base=fake.base_url,
        api_key="{{ secret('MODEL_KEY') }}",
    ) as project:
        project.publish(agent(), workflow())
        result = project.execute("asking", {"amount": 1})
        assert result.success == (answer == "text")
    assert fake.count == 1
    assert fake.requests[0].headers["authorization"] == f"Bearer {KEY}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".db" and path.stat().st_size for path in files)
    leaks = [path for path in files if KEY.encode() in path.read_bytes()]
    assert leaks == []
    printed = capfd.readouterr()
    assert KEY not in printed.out
    assert KEY not in printed.err
