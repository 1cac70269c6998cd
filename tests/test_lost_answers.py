"""A call that must not be made twice, and whose answer did not come, is `unknown`; nobody repeats it without asking."""

from __future__ import annotations

import asyncio
import socket
from datetime import datetime, timezone
from typing import Any

import pytest
from fake_http import FakeHttp
from test_agent_tools import function, scripted
from test_agent_tools import workflow as asking
from test_replay import chain
from test_tools import context
from workflow_functions import notes
from workflow_project import open_project

from agentmesh_dagster.errors import ToolError
from agentmesh_dagster.records import RunStatus, StepStatus, Vote, WaitKind
from agentmesh_dagster.runtime.tools.call import call_tool
from agentmesh_dagster.runtime.tools.http_client import HttpClient
from agentmesh_dagster.runtime.tools.http_guard import AddressPolicy
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.testing import Answer, run_workflow

CALL = {"id": "call", "type": "tool", "config": {"tool": "pay", "input": {"order": "A1"}}}
PAID = {"receipt": "R-1"}


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")


@pytest.fixture
def shop():
    with FakeHttp() as server:
        yield server


@pytest.fixture
def project(tmp_path, sqlite_url, monkeypatch):
    with open_project(tmp_path, sqlite_url, monkeypatch) as opened:
        yield opened


def pay(url, *, config=None, **more):
    given = {"method": "POST", "url": url, "json": {"order": "{{ input.order }}"}, **(config or {})}
    return {"kind": "tool", "slug": "pay", "type": "http", "config": given, "side_effects": True, **more}


def run(*documents, **options):
    return run_workflow(list(documents), {}, function_modules=("workflow_functions",), **options)


def says(decision, data=None):
    """What a person says of a call that is unknown; approvals are given."""

    def answers(wait):
        is_unknown = wait.kind is WaitKind.UNKNOWN
        return Answer(decision=decision, data=data) if is_unknown else Answer()

    return answers


def unused_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class TestToolNodes:
    @pytest.mark.parametrize(
        ("path", "more", "code"),
        [
            ("/cut", {}, "tool-read"),
            ("/slow/30", {"config": {"timeout_s": 0.5}}, "tool-timeout"),
            ("/slow/30", {"timeout_s": 0.5}, "tool-timeout"),
        ],
    )
    def test_a_person_is_asked(self, database_url, shop, path, more, code):
        result = run(pay(shop.url + path, **more), chain(CALL), database_url=database_url)
        assert result.run.status is RunStatus.WAITING, result.run.error
        step = result.steps["call/tool/1"]
        assert (step.status, step.error["code"]) == (StepStatus.UNKNOWN, code)
        assert result.steps["call"].status is StepStatus.WAITING
        (wait,) = result.waits
        assert (wait.kind, wait.step_key, wait.label) == (WaitKind.UNKNOWN, "call/tool/1", "unknown-1")
        assert "got no answer" in wait.body
        assert len(shop.calls) == 1
        kinds = [event.type for event in result.events if event.step_key == "call/tool/1"]
        assert kinds == ["tool.request", "step.unknown"]

    def test_a_function_that_takes_too_long(self):
        tool = {**function("pay", "hang"), "side_effects": True, "timeout_s": 0.3}
        call = {**CALL, "config": {"tool": "pay", "input": {"name": "paid"}}}
        result = run(tool, chain(call))
        assert result.run.status is RunStatus.WAITING, result.run.error
        assert result.steps["call/tool/1"].status is StepStatus.UNKNOWN
        assert notes().count("paid") == 1

    @pytest.mark.parametrize(("decision", "times"), [("happened", 1), ("repeat", 2), ("fail", 1)])
    def test_what_the_person_says_holds(self, shop, decision, times):
        shop.script({"cut": True}, {"json": PAID})
        data = PAID if decision == "happened" else None
        result = run(pay(shop.url + "/script"), chain(CALL), answers=says(decision, data))
        if decision == "fail":
            assert (result.run.status, result.run.error["code"]) == (RunStatus.FAILED, "step-unknown")
        else:
            assert (result.run.status, result.run.output) == (RunStatus.SUCCEEDED, PAID)
        assert len(shop.calls) == times
        assert all(wait.used_at is not None for wait in result.waits)

    def test_neither_a_failure_route_nor_a_retry_goes_past_the_question(self, shop):
        node = {**CALL, "on_error": "continue", "retry": {"max_attempts": 3, "delay_s": 0}}
        result = run(pay(shop.url + "/cut"), chain(node))
        assert result.run.status is RunStatus.WAITING, result.run.error
        assert len(shop.calls) == 1

    def test_a_failing_node_is_not_repeated_by_a_retry_of_the_run(self, project, shop):
        project.publish(pay(shop.url + "/cut"), chain({**CALL, "on_unknown": "fail"}))
        result = project.execute("sample")
        for _ in range(2):
            assert not result.success
            run_row = project.run_row(result.run_id)
            assert run_row.error["code"] == "step-unknown"
            assert project.steps(run_row.id)["call/tool/1"].status is StepStatus.UNKNOWN
            assert len(shop.calls) == 1
            result = project.retry("sample", run_row.dagster_run_ids[-1])

    def test_a_retry_after_the_person_let_it_fail_asks_again(self, project, shop):
        project.publish(pay(shop.url + "/cut"), chain(CALL))
        first = project.execute("sample").run_id
        (wait,) = project.store.waits.list("default", run_id=first)
        vote = Vote(by="anna", decision="fail", at=datetime.now(timezone.utc))
        project.store.waits.decide("default", wait.id, vote)
        claim = project.store.claims.claim(first, reason="resume")
        project.execute("sample", tags={"agentmesh/claim": claim.id})
        failed = project.run_row(first)
        assert failed.error["code"] == "step-unknown"
        assert project.retry("sample", failed.dagster_run_ids[-1]).success
        assert project.run_row(first).status is RunStatus.WAITING
        assert len(shop.calls) == 1

    def test_it_is_repeated_where_the_node_says_so(self, project, shop):
        shop.script({"cut": True}, {"cut": True}, {"json": PAID})
        node = {**CALL, "on_unknown": "retry", "retry": {"max_attempts": 2, "delay_s": 0}}
        project.publish(pay(shop.url + "/script"), chain(node))
        first = project.execute("sample")
        assert project.run_row(first.run_id).error["code"] == "tool-read"
        assert len(shop.calls) == 2
        assert project.retry("sample", first.run_id).success
        assert project.run_row(first.run_id).output == PAID

    @pytest.mark.parametrize(
        ("path", "more", "code"),
        [
            ("/json?value={}", {"output_schema": {"type": "object", "required": ["receipt"]}}, "tool-output"),
            ("/broken-json", {}, "tool-response"),
            ("/big/2000", {"config": {"max_bytes": 1000}}, "tool-too-large"),
            ("/redirect/303?to=/status/500", {}, "tool-status"),
            ("/redirect/303?to=http://192.0.2.1/", {}, "http-address"),
            ("/redirect/303?to=ftp://shop.example/", {}, "tool-url"),
        ],
    )
    def test_an_answer_that_cannot_be_used_is_no_reason_to_call_again(self, project, shop, path, more, code):
        project.publish(pay(shop.url + path, **more), chain({**CALL, "on_unknown": "fail"}))
        result = project.execute("sample")
        for _ in range(2):
            run_row = project.run_row(result.run_id)
            assert run_row.error["code"] == "step-unknown"
            step = project.steps(run_row.id)["call/tool/1"]
            assert (step.status, step.error["code"]) == (StepStatus.UNKNOWN, code)
            assert [seen.method for seen in shop.calls].count("POST") == 1
            result = project.retry("sample", run_row.dagster_run_ids[-1])

    def test_a_person_sees_what_came_and_says_what_it_should_have_been(self, database_url, shop):
        shop.script({"json": {"recipt": "R-1"}})
        schema = {"type": "object", "properties": {"receipt": {"type": "string"}}, "required": ["receipt"]}
        tool = pay(shop.url + "/script", output_schema=schema)
        result = run(tool, chain(CALL), answers=says("happened", PAID), database_url=database_url)
        assert (result.run.status, result.run.output) == (RunStatus.SUCCEEDED, PAID)
        (wait,) = result.waits
        assert "got no answer that can be used" in wait.body
        assert '{"recipt": "R-1"}' in wait.body
        assert len(shop.calls) == 1

    def test_a_function_whose_result_does_not_fit(self):
        tool = {**function("pay", "note"), "side_effects": True, "output_schema": {"type": "string"}}
        call = {**CALL, "config": {"tool": "pay", "input": {"name": "paid", "value": 5}}}
        result = run(tool, chain(call), answers=says("happened", "R-1"))
        assert (result.run.status, result.run.output) == (RunStatus.SUCCEEDED, "R-1")
        assert notes() == ["paid"]

    def test_a_redirect_that_is_not_followed_took_nothing(self, shop):
        with FakeHttp() as other:
            result = run(pay(f"{shop.url}/redirect/307?to={other.url}/echo"), chain(CALL))
            assert other.calls == []
        assert (result.run.status, result.run.error["code"]) == (RunStatus.FAILED, "tool-redirect")
        assert result.steps["call/tool/1"].status is StepStatus.FAILED

    def test_an_idempotent_tool_fails_as_before(self, shop):
        result = run(pay(shop.url + "/cut", idempotent=True), chain(CALL))
        assert (result.run.status, result.run.error["code"]) == (RunStatus.FAILED, "tool-read")
        assert result.steps["call/tool/1"].status is StepStatus.FAILED

    @pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
    def test_what_never_went_out_is_failed(self, monkeypatch, host):
        result = run(pay(f"http://{host}:{unused_port()}/pay"), chain(CALL))
        assert result.run.status is RunStatus.FAILED
        assert result.steps["call/tool/1"].status is StepStatus.FAILED
        assert result.waits == []

    def test_what_the_other_side_refused_is_failed(self, shop):
        result = run(pay(shop.url + "/status/400"), chain(CALL))
        assert (result.run.status, result.run.error["code"]) == (RunStatus.FAILED, "tool-status")
        assert result.steps["call/tool/1"].status is StepStatus.FAILED

    @pytest.mark.parametrize(
        ("replies", "status"),
        [
            ([{"cut": True}, {"status": 409, "json": {}}], StepStatus.UNKNOWN),
            ([{"status": 503, "json": {}}, {"status": 409, "json": {}}], StepStatus.FAILED),
        ],
    )
    def test_a_try_whose_answer_was_lost_counts_whatever_the_next_one_came_to(self, shop, replies, status):
        shop.script(*replies)
        tool = pay(shop.url + "/script", config={"method": "PUT", "retries": 1})
        result = run(tool, chain(CALL))
        assert result.steps["call/tool/1"].status is status
        assert len(shop.calls) == 2

    def test_an_approved_call_is_not_approved_again(self, shop):
        shop.script({"cut": True}, {"json": PAID})
        tool = pay(shop.url + "/script", requires_approval=True)
        result = run(tool, chain(CALL), answers=says("repeat"))
        assert result.run.output == PAID
        assert [wait.kind for wait in result.waits] == [WaitKind.TOOL, WaitKind.UNKNOWN]
        assert len(shop.calls) == 2

    def test_what_follows_the_end_asks_nobody(self, shop):
        body = {"nodes": [CALL]}
        result = run(pay(shop.url + "/cut"), chain(**{"finally": body}))
        (row,) = [step for step in result.steps.values() if step.kind == "tool"]
        assert row.status is StepStatus.UNKNOWN
        assert result.waits == []
        assert len(shop.calls) == 1


class TestAgents:
    def test_the_model_is_told_what_a_person_says(self, shop):
        shop.script({"cut": True})
        asked = {"tool_calls": [{"tool": "pay", "arguments": {"order": "A1"}}]}
        clerk = scripted(asked, {"text": "Done."}, tools=["pay"])
        documents = [pay(shop.url + "/script"), clerk, asking()]
        result = run(*documents, answers=says("happened", PAID))
        assert result.succeeded, result.run.error
        assert len(shop.calls) == 1
        assert [wait.kind for wait in result.waits] == [WaitKind.UNKNOWN]
        (told,) = result.run.output["tool_calls"]
        assert told["output"] == PAID

    def test_the_model_is_not_told_of_an_answer_that_cannot_be_used(self, shop):
        asked = {"tool_calls": [{"tool": "pay", "arguments": {"order": "A1"}}]}
        clerk = scripted(asked, {"text": "Done."}, tools=["pay"])
        result = run(pay(shop.url + "/broken-json"), clerk, asking(), answers=says("happened", PAID))
        assert result.succeeded, result.run.error
        assert len(shop.calls) == 1
        assert [told["output"] for told in result.run.output["tool_calls"]] == [PAID]

    def test_the_model_hears_of_it_where_the_node_lets_it_be_repeated(self, shop):
        shop.script({"cut": True}, {"json": PAID})
        asked = {"tool_calls": [{"tool": "pay", "arguments": {"order": "A1"}}]}
        clerk = scripted(asked, asked, {"text": "Done."}, tools=["pay"])
        result = run(pay(shop.url + "/script"), clerk, asking(on_unknown="retry"))
        assert result.succeeded, result.run.error
        assert [bool(told.get("error")) for told in result.run.output["tool_calls"]] == [True, False]


def test_a_time_out_before_there_is_a_connection_loses_nothing():
    async def never(_name: str, _port: int) -> Any:
        await asyncio.sleep(60)

    async def failure() -> ToolError:
        client = HttpClient(AddressPolicy(["127.0.0.0/8"]), never)
        tool = ToolSpec.model_validate(pay("http://shop.example/pay", timeout_s=0.2))
        with pytest.raises(ToolError) as caught:
            await call_tool(tool, {"order": "A1"}, context(http=client))
        await client.aclose()
        return caught.value

    error = asyncio.run(failure())
    assert (error.code, error.answer_lost) == ("tool-timeout", False)
