"""Model calls through the real LiteLLM, over real HTTP, against a local OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from fake_provider import FakeProvider

from agentmesh_dagster.deployment import Deployment, Endpoint
from agentmesh_dagster.errors import DefinitionError, ModelError
from agentmesh_dagster.llm.client import ModelRouter, parse_limits
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest, ToolOffer

KEY = "sk-test-0123456789abcdef"
SCHEMA = {"type": "object", "required": ["risk"], "properties": {"risk": {"enum": ["low", "high"]}}}
T = TypeVar("T")


ENDPOINTS: dict[str, Endpoint] = {"ollama": Endpoint(provider="ollama", api_base="http://127.0.0.1:9")}
"""Of the router under test; `request_to` says where `openai` is."""


def run(work: Callable[[ModelRouter], Awaitable[T]], limits: dict[str, int] | None = None) -> T:
    async def body() -> T:
        router = ModelRouter(limits or {}, deployment=Deployment(endpoints=ENDPOINTS))
        try:
            return await work(router)
        finally:
            await router.aclose()

    return asyncio.run(body())


def ask(request: ModelRequest, **limits: int) -> ModelReply:
    return run(lambda router: router.complete(request), limits)


def refused(request: ModelRequest) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask(request)
    assert KEY not in json.dumps(caught.value.to_json())
    assert KEY not in repr(caught.value)
    return caught.value


def request_to(fake: FakeProvider, **changes: Any) -> ModelRequest:
    ENDPOINTS["openai"] = Endpoint(api_base=fake.base_url, api_key=KEY)
    request = ModelRequest(
        models=("openai/fake",),
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}),
        settings={"temperature": 0.2, "max_tokens": 50},
        timeout_s=20,
    )
    return replace(request, **changes)


@pytest.fixture
def fake() -> Iterator[FakeProvider]:
    with FakeProvider() as server:
        yield server


def test_plain_answer_with_tokens(fake: FakeProvider) -> None:
    fake.push({"text": "Good day", "usage": [12, 3]})
    reply = ask(request_to(fake, idempotency_key="run/step/1"))
    assert reply == ModelReply(text="Good day", model="openai/fake", input_tokens=12, output_tokens=3)
    (seen,) = fake.requests
    assert seen.body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    assert (seen.body["model"], seen.body["temperature"], seen.body["max_tokens"]) == ("fake", 0.2, 50)
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.headers["idempotency-key"] == "run/step/1"


def test_cost_is_recorded_where_the_price_is_known(fake: FakeProvider) -> None:
    fake.push({"text": "x", "usage": [1_000_000, 0]})
    assert ask(request_to(fake, models=("openai/gpt-4o-mini",))).cost_usd == pytest.approx(0.15, rel=0.5)


def test_structured_answer(fake: FakeProvider) -> None:
    reply = ask(request_to(fake, output_schema=SCHEMA))
    assert json.loads(reply.text) == {"risk": "low"}
    assert fake.requests[0].body["response_format"]["json_schema"]["schema"] == SCHEMA


def test_tool_calls_are_passed_on(fake: FakeProvider) -> None:
    fake.push({"tool_calls": [{"name": "pay", "arguments": {"amount": 5}}]})
    reply = ask(request_to(fake))
    assert (reply.text, reply.finish_reason) == ("", "tool_calls")
    assert reply.tool_calls == (
        {"id": "call_0", "type": "function", "function": {"name": "pay", "arguments": '{"amount": 5}'}},
    )


def test_tools_are_offered_and_may_be_named_without_being_callable(fake: FakeProvider) -> None:
    offer = ToolOffer(name="pay", description="Pays.", input_schema={"type": "object"})
    ask(request_to(fake, tools=(offer,)))
    ask(request_to(fake, tools=(offer,), may_call=False, output_schema=SCHEMA))
    ask(request_to(fake))
    offered, named, without = (request.body for request in fake.requests)
    function = {"name": "pay", "description": "Pays.", "parameters": {"type": "object", "properties": {}}}
    assert offered["tools"] == named["tools"] == [{"type": "function", "function": function}]
    assert (offered.get("tool_choice"), named["tool_choice"]) == (None, "none")
    assert named["response_format"]["json_schema"]["schema"] == SCHEMA
    assert not {"tools", "tool_choice"} & set(without)
    # What LiteLLM is told about its own doings is no part of the request.
    assert not [key for body in (offered, named) for key in body if "mcp" in key]


def test_a_model_that_takes_no_tools_is_refused_and_not_asked_without() -> None:
    offer = ToolOffer(name="pay", description="Pays.", input_schema={"type": "object"})
    messages = ({"role": "user", "content": "Hello"},)
    error = refused(ModelRequest(models=("ollama/llama3",), messages=messages, tools=(offer,)))
    assert (error.code, error.retryable) == ("model-bad-request", False)
    assert "tools" in error.message


def test_an_agents_tools_and_tools_in_its_settings_do_not_mix(fake: FakeProvider) -> None:
    offer = ToolOffer(name="pay", description="Pays.", input_schema={"type": "object"})
    request = request_to(fake, tools=(offer,))
    error = refused(replace(request, settings={**request.settings, "tools": []}))
    assert "'tools'" in error.message
    assert fake.count == 0


@pytest.mark.parametrize(
    ("answer", "code", "retryable"),
    [
        ({"status": 429, "retry_after": 1}, "model-rate-limited", True),
        ({"status": 500}, "model-unavailable", True),
        ({"status": 503}, "model-unavailable", True),
        ({"status": 408}, "model-timeout", True),
        ({"status": 409}, "model-unavailable", True),
        ({"status": 401, "message": f"Incorrect API key provided: {KEY}"}, "model-auth", False),
        (
            {"status": 401, "message": "Incorrect API key provided: sk-te***************cdef."},
            "model-auth",
            False,
        ),
        ({"status": 403}, "model-auth", False),
        ({"status": 400, "message": f"bad header Authorization: Bearer {KEY}"}, "model-bad-request", False),
        ({"status": 404}, "model-bad-request", False),
        ({"status": 422}, "model-bad-request", False),
        ({"malformed": True}, "model-malformed", True),
        ({"body": {"hello": "world"}}, "model-malformed", True),
        ({"body": {"choices": []}}, "model-malformed", True),
        ({"disconnect": True}, "model-unavailable", True),
    ],
)
def test_failures_have_stable_words(
    fake: FakeProvider, answer: dict[str, Any], code: str, retryable: bool
) -> None:
    fake.push(answer)
    error = refused(request_to(fake))
    assert (error.code, error.retryable) == (code, retryable), error.message
    assert (error.provider, error.model) == ("openai", "openai/fake")
    assert error.to_json().get("status") == (None if code == "model-timeout" else answer.get("status"))
    assert "cdef" not in error.message
    assert fake.count == 1, "nothing but AgentMesh repeats a call"


def test_an_error_is_one_sentence_in_the_provider_s_words(fake: FakeProvider) -> None:
    fake.push({"status": 400, "message": "The context is too long."})
    error = refused(request_to(fake))
    assert error.message == (
        "the model 'openai/fake' refused the request with status 400: The context is too long."
    )


def test_429_is_retryable_and_the_next_call_succeeds(fake: FakeProvider) -> None:
    fake.push({"status": 429}, {"text": "now"})

    async def twice(router: ModelRouter) -> str:
        with pytest.raises(ModelError) as caught:
            await router.complete(request_to(fake))
        assert caught.value.retryable
        return (await router.complete(request_to(fake))).text

    assert run(twice) == "now"


def test_hang_is_cut_by_the_timeout_and_closes_the_connection(fake: FakeProvider) -> None:
    fake.push({"hang": True})

    async def hang(router: ModelRouter) -> ModelError:
        with pytest.raises(ModelError) as caught:
            await router.complete(request_to(fake, timeout_s=0.3))
        return caught.value

    started = time.monotonic()
    error = run(hang)
    assert time.monotonic() - started < 5
    assert (error.code, error.retryable) == ("model-timeout", True)
    assert "0.3 s" in error.message


def test_timeout_in_model_settings_bounds_the_call(fake: FakeProvider) -> None:
    fake.push({"hang": True})
    request = request_to(fake)
    error = refused(replace(request, settings={**request.settings, "timeout_s": 0.3}))
    assert error.code == "model-timeout"


def test_canceling_the_coroutine_cancels_the_request(fake: FakeProvider) -> None:
    fake.push({"hang": True})

    async def cancel(router: ModelRouter) -> None:
        task = asyncio.create_task(router.complete(request_to(fake)))
        await asyncio.to_thread(fake.wait_for, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(fake.wait_for_cut)

    run(cancel)


def test_nobody_listens() -> None:
    with FakeProvider() as gone:
        request = request_to(gone)
    error = refused(request)
    assert (error.code, error.retryable) == ("model-unavailable", True)


def test_second_model_after_a_retryable_failure() -> None:
    with FakeProvider(by_model={"bad": [{"status": 500}], "good": [{"text": "second"}]}) as fake:
        reply = ask(request_to(fake, models=("openai/bad", "openai/good")))
    assert (reply.text, reply.model) == ("second", "openai/good")
    (failure,) = reply.failures
    assert (failure["code"], failure["context"]["model"]) == ("model-unavailable", "openai/bad")


def test_no_second_model_after_a_refused_key() -> None:
    with FakeProvider(by_model={"bad": [{"status": 401}]}) as fake:
        error = refused(request_to(fake, models=("openai/bad", "openai/good")))
        assert fake.count == 1
    assert error.code == "model-auth"


def test_last_error_carries_the_others() -> None:
    with FakeProvider(default={"status": 500}) as fake:
        error = refused(request_to(fake, models=("openai/a", "openai/b", "openai/c")))
        assert [request.model for request in fake.requests] == ["a", "b", "c"]
    assert error.model == "openai/c"
    assert [failure["context"]["model"] for failure in error.context["failures"]] == ["openai/a", "openai/b"]


def test_real_model_falls_back_to_a_stand_in() -> None:
    with FakeProvider(default={"status": 503}) as fake:
        reply = ask(request_to(fake, models=("openai/fake", "offline/echo")))
    assert (reply.text, reply.model) == ("Hello", "offline/echo")


def test_unknown_provider_is_a_bad_request(fake: FakeProvider) -> None:
    error = refused(request_to(fake, models=("nosuchthing",), settings={}))
    assert (error.code, error.retryable) == ("model-refused", False)
    assert "nosuchthing" in error.message


def test_settings_that_agentmesh_decides_are_refused(fake: FakeProvider) -> None:
    request = request_to(fake)
    error = refused(replace(request, settings={**request.settings, "stream": True}))
    assert error.code == "model-setting"
    assert "'stream'" in error.message
    assert fake.count == 0


@pytest.mark.parametrize("limits", [{"openai": 2}, {"*": 2}, {"openai/fake": 2}])
def test_limits_bound_concurrent_calls(limits: dict[str, int]) -> None:
    with FakeProvider(default={"text": "x", "delay_s": 0.1}) as fake:

        async def many(router: ModelRouter) -> int:
            replies = await asyncio.gather(*(router.complete(request_to(fake)) for _ in range(6)))
            return len(replies)

        assert run(many, limits) == 6
        assert fake.most_active == 2


def test_limits_are_read_from_text() -> None:
    assert parse_limits("20, openai=30,openai/gpt-5-mini = 5") == {
        "*": 20,
        "openai": 30,
        "openai/gpt-5-mini": 5,
    }
    with pytest.raises(DefinitionError, match="'openai=many'"):
        parse_limits("openai=many")


PROGRAM = """
import asyncio, logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
from agentmesh_dagster.llm.client import ModelRouter
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.runtime.ports import ModelRequest
assert "litellm" not in sys.modules
from agentmesh_dagster.deployment import Deployment, Endpoint
deployment = Deployment.of(endpoints={{"openai": Endpoint(api_base={base_url!r}, api_key={key!r})}})
request = ModelRequest(models=("openai/fake",), messages=({{"role": "user", "content": "hi"}},))
async def main():
    router = ModelRouter({{}}, deployment=deployment)
    assert (await router.complete(request)).text == "hi"
    try:
        await router.complete(request)
    except Exception as error:
        print("ended:", error.code)
    if {closes}:
        await router.aclose()
{run}(main())
"""


@pytest.mark.parametrize(
    ("run_with", "closes", "options"),
    [("asyncio.run", True, ["-X", "dev", "-W", "error"]), ("run_on_loop", False, [])],
)
def test_a_process_that_calls_models_says_nothing_of_its_own(
    run_with: str, closes: bool, options: list[str]
) -> None:
    with FakeProvider(replies=[{"text": "hi"}, {"status": 401, "message": f"no {KEY}"}]) as fake:
        program = PROGRAM.format(base_url=fake.base_url, key=KEY, closes=closes, run=run_with)
        done = subprocess.run(
            [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert "ended: model-auth" in done.stdout
    assert KEY not in done.stdout
    assert "litellm.ai" not in done.stdout
    assert done.stderr == ""
