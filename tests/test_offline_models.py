from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.llm.client import ModelRouter
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest, ToolOffer

USER = {"role": "user", "content": "Where is my order?"}
ASSISTANT = {"role": "assistant", "content": "One moment."}


def ask(*messages: dict[str, Any], model: str = "offline/script", **changes: Any) -> ModelReply:
    request = ModelRequest(models=(model,), messages=messages or (USER,), **changes)
    return asyncio.run(ModelRouter({}).complete(request))


def test_echo_answers_with_the_last_user_message() -> None:
    reply = ask(USER, ASSISTANT, {"role": "user", "content": "Hello?"}, ASSISTANT, model="offline/echo")
    assert (reply.text, reply.model, reply.cost_usd, reply.output_tokens) == (
        "Hello?",
        "offline/echo",
        0.0,
        2,
    )


def test_echo_gives_the_smallest_instance_of_a_schema() -> None:
    schema = {
        "type": "object",
        "required": ["risk", "score"],
        "properties": {"risk": {"enum": ["low", "high"]}, "score": {"type": "integer", "minimum": 3}},
    }
    assert json.loads(ask(model="offline/echo", output_schema=schema).text) == {"risk": "low", "score": 3}


def test_script_answers_in_the_order_of_the_conversation() -> None:
    settings = {"replies": ["first", {"risk": "low"}, {"object": [1]}, {"text": "slow", "delay_s": 0.01}]}
    assert ask(settings=settings).text == "first"
    assert json.loads(ask(USER, ASSISTANT, settings=settings).text) == {"risk": "low"}
    assert ask(USER, ASSISTANT, USER, ASSISTANT, settings=settings).text == "[1]"
    assert ask(ASSISTANT, ASSISTANT, ASSISTANT, settings=settings).text == "slow"


PAY = ToolOffer(name="pay", description="Pays.", input_schema={"type": "object"})


def test_script_calls_tools_under_ids_of_their_place() -> None:
    settings = {
        "replies": ["first", {"tool_calls": [{"tool": "pay", "arguments": {"a": 1}}, {"tool": "pay"}]}]
    }
    for _ in range(2):
        reply = ask(USER, ASSISTANT, settings=settings, tools=(PAY,))
        assert (reply.text, reply.finish_reason) == ("", "tool_calls")
        assert reply.tool_calls == (
            {"id": "call_1_0", "type": "function", "function": {"name": "pay", "arguments": '{"a": 1}'}},
            {"id": "call_1_1", "type": "function", "function": {"name": "pay", "arguments": "{}"}},
        )


def test_messages_of_tools_do_not_move_the_script_on() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": []}
    result = {"role": "tool", "tool_call_id": "call_0_0", "content": "8"}
    assert ask(USER, called, result, result, settings={"replies": ["first", "second"]}).text == "second"


@pytest.mark.parametrize("tool_calls", ["pay", [{"name": "pay"}], [{"tool": "pay", "input": {}}], [3]])
def test_script_with_other_calls_says_what_it_takes(tool_calls: Any) -> None:
    with pytest.raises(ModelError, match=r"tool_calls: \[\{tool: <slug>") as caught:
        ask(settings={"replies": [{"tool_calls": tool_calls}]}, tools=(PAY,))
    assert caught.value.code == "model-bad-request"


def test_script_that_calls_tools_of_an_agent_without_says_so() -> None:
    replies = [{"tool_calls": [{"tool": "pay"}]}]
    for more in ({}, {"tools": (PAY,), "may_call": False}):
        with pytest.raises(ModelError, match="a call that offers none"):
            ask(settings={"replies": replies}, **more)


def test_script_that_ends_says_so() -> None:
    with pytest.raises(ModelError, match="no reply left: it holds 1, and this is call 2") as caught:
        ask(USER, ASSISTANT, settings={"replies": ["only"]})
    assert not caught.value.retryable


def test_script_can_fail_and_be_slow() -> None:
    settings = {"replies": [{"error": {"message": "busy", "code": "model-rate-limited", "retryable": True}}]}
    with pytest.raises(ModelError, match="busy") as caught:
        ask(settings=settings)
    assert (caught.value.code, caught.value.retryable) == ("model-rate-limited", True)
    with pytest.raises(ModelError, match=r"within 0\.02 s") as caught:
        ask(settings={"replies": [{"text": "x", "delay_s": 60}]}, timeout_s=0.02)
    assert caught.value.code == "model-timeout"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("offline/script", {}, "needs a list of replies"),
        ("offline/ehco", {}, "the stand-ins are 'offline/echo' and 'offline/script'"),
    ],
)
def test_mistakes_are_named(model: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ask(model=model, settings=settings)
    assert caught.value.code == "model-bad-request"


def test_stand_ins_import_neither_litellm_nor_an_http_client() -> None:
    program = """
import asyncio, sys
from agentmesh_dagster.llm.client import ModelRouter
from agentmesh_dagster.runtime.ports import ModelRequest
request = ModelRequest(models=("offline/echo",), messages=({"role": "user", "content": "hi"},))
print(asyncio.run(ModelRouter({}).complete(request)).text)
print(sorted({"litellm", "httpx", "openai", "jsonschema"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "hi\n[]\n", done.stderr
