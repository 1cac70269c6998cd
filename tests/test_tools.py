"""Calls of tools: `http` over real HTTP, `function`, `builtin`, and what holds for all types."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_http import FakeHttp

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.errors import AgentMeshError, ToolError
from agentmesh_dagster.runtime.functions import FunctionRegistry
from agentmesh_dagster.runtime.secrets import EnvironmentSecrets, SecretMissing, Secrets
from agentmesh_dagster.runtime.tools.call import (
    TOOL_TYPES,
    ToolContext,
    call_tool,
    prepare_input,
    tool_schemas,
)
from agentmesh_dagster.runtime.tools.http_client import HttpClient
from agentmesh_dagster.runtime.tools.http_guard import AddressPolicy
from agentmesh_dagster.specs.documents import ToolSpec

SECRET = "s3cr3t-t0ken"
ALL = Deployment.of(secrets=["*"])


class FixedClock(SystemClock):
    def now(self) -> datetime:
        return datetime(2026, 7, 1, 12, 0, tzinfo=timezone.utc)

    def new_id(self) -> str:
        return "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def server() -> Iterator[FakeHttp]:
    with FakeHttp() as fake:
        yield fake


def context(**changes: Any) -> ToolContext:
    made = ToolContext(
        secrets=Secrets(EnvironmentSecrets({"TOKEN": SECRET}), ALL),
        http=HttpClient(AddressPolicy(["127.0.0.0/8", "localhost"])),
        functions=FunctionRegistry(),
        clock=SystemClock(),
        idempotency_key="run-1/pay",
    )
    return replace(made, **changes)


def call(tool: ToolSpec, value: Any = None, **changes: Any) -> Any:
    async def body() -> Any:
        made = context(**changes)
        try:
            return await call_tool(tool, value, made)
        finally:
            await made.http.aclose()

    return asyncio.run(body())


def refused(tool: ToolSpec, value: Any = None, **changes: Any) -> AgentMeshError:
    with pytest.raises(AgentMeshError) as caught:
        call(tool, value, **changes)
    return caught.value


def http(url: str, spec: Mapping[str, Any] | None = None, **config: Any) -> ToolSpec:
    return ToolSpec(slug="shop", type="http", config={"url": url, **config}, **(spec or {}))


def builtin(name: str) -> ToolSpec:
    return ToolSpec(slug=name, type="builtin", config={"name": name})


# What holds for all types ---------------------------------------------------------------------------------------------


def test_input_is_filled_coerced_and_checked(server: FakeHttp) -> None:
    tool = http(
        server.url + "/echo",
        {
            "input_schema": {
                "type": "object",
                "required": ["id", "count"],
                "properties": {
                    "id": {"type": "string", "minLength": 2},
                    "count": {"type": "integer"},
                    "currency": {"type": "string", "default": "EUR"},
                },
            }
        },
        method="POST",
        json="{{ input }}",
    )
    answer = call(tool, {"id": "A1", "count": "5"})
    assert json.loads(answer["body"]) == {"id": "A1", "count": 5, "currency": "EUR"}
    error = refused(tool, {"id": "A", "count": "many"})
    assert (error.code, error.category) == ("tool-input", "user")
    assert [line.split(": ")[0] for line in error.message.splitlines()] == ["count", "id"] or [
        line.split(": ")[0] for line in error.message.splitlines()
    ] == ["id", "count"]
    assert len(server.calls) == 1


def test_prepared_input_is_stable_and_free_of_secrets() -> None:
    tool = builtin("now")
    assert asyncio.run(prepare_input(tool, None, context())) == {"timezone": "UTC"}
    assert asyncio.run(prepare_input(tool, {"timezone": "UTC"}, context())) == {"timezone": "UTC"}


def test_output_is_checked(server: FakeHttp) -> None:
    schema = {"type": "object", "required": ["total"]}
    error = refused(http(server.url + "/echo", {"output_schema": schema}))
    assert error.code == "tool-output"
    assert "total" in error.message


def test_unknown_type_and_bad_config_are_named() -> None:
    error = refused(ToolSpec(slug="x", type="htpp"))
    assert error.code == "tool-type"
    assert "'builtin', 'function', 'http'" in error.message
    error = refused(ToolSpec(slug="x", type="http", config={"url": "https://a.example", "retry": 3}))
    assert error.code == "tool-config"
    assert "config.retry" in error.message


def test_types_of_plugins_are_called_like_others() -> None:
    class Shout:
        config_model = TOOL_TYPES["builtin"].config_model

        async def schemas(self, config: Any, context: ToolContext) -> tuple[None, None]:
            return None, None

        async def call(self, tool: ToolSpec, config: Any, value: Any, context: ToolContext) -> Any:
            await asyncio.sleep(value.get("wait_s", 0))
            return (
                context.secrets.of_deployment("TOKEN").upper()
                + value["text"].upper()
                + context.secrets.of_deployment("TOKEN")
            )

    tool = ToolSpec(slug="shout", type="shout", config={"name": "now"}, timeout_s=0.05, side_effects=True)
    types = {**TOOL_TYPES, "shout": Shout()}
    made = context()
    assert asyncio.run(call_tool(tool, {"text": "hi"}, made, types=types)) == "S3CR3T-T0KENHI***"
    with pytest.raises(ToolError, match=r"longer than 0\.05 s") as caught:
        asyncio.run(call_tool(tool, {"text": "hi", "wait_s": 30}, made, types=types))
    assert (caught.value.code, caught.value.retryable) == ("tool-timeout", False)


# http: the request ----------------------------------------------------------------------------------------------------


def test_request_is_built_from_templates(server: FakeHttp) -> None:
    tool = http(
        server.url + "/echo/{{ input.id }}?v=1",
        method="POST",
        query={"q": "{{ input.q }}", "tags": ["a", "b"], "none": None, "flag": True},
        headers={"Authorization": "Bearer {{ secret('TOKEN') }}", "X-Count": "{{ input.count }}"},
        json={"count": "{{ input.count }}", "text": "n={{ input.count }}"},
    )
    call(tool, {"id": "A 1", "q": "x&y=z", "count": 5})
    (seen,) = server.calls
    assert seen.path == "/echo/A%201?v=1&q=x%26y%3Dz&tags=a&tags=b&flag=true"
    assert seen.headers["authorization"] == f"Bearer {SECRET}"
    assert seen.headers["x-count"] == "5"
    assert seen.headers["content-type"] == "application/json"
    assert json.loads(seen.body) == {"count": 5, "text": "n=5"}


def test_form_body(server: FakeHttp) -> None:
    call(http(server.url + "/echo", method="PUT", form={"a": "{{ input.a }}", "b": [1, 2]}), {"a": "ä&b"})
    (seen,) = server.calls
    assert seen.headers["content-type"] == "application/x-www-form-urlencoded"
    assert seen.body == "a=%C3%A4%26b&b=1&b=2"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("../admin", "/echo/..%2Fadmin/orders"),
        ("a/b?x=1#y", "/echo/a%2Fb%3Fx%3D1%23y/orders"),
        ("%2e%2e", "/echo/%252e%252e/orders"),
        ("1\r\nX: 2", "/echo/1%0D%0AX%3A%202/orders"),
        ("grün", "/echo/gr%C3%BCn/orders"),
        (7, "/echo/7/orders"),
    ],
)
def test_values_cannot_change_the_urls_path(server: FakeHttp, value: Any, path: str) -> None:
    call(http(server.url + "/echo/{{ input.id }}/orders"), {"id": value})
    assert server.calls[0].path == path


@pytest.mark.parametrize("value", ["", None, ".", ".."])
def test_values_that_would_address_something_else_are_refused(server: FakeHttp, value: Any) -> None:
    assert refused(http(server.url + "/echo/{{ input.id }}"), {"id": value}).code == "tool-url"
    assert server.calls == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://a.example/", "http:// or https://"),
        ("/relative", "http:// or https://"),
        ("https://user:s3cr3t-t0ken@a.example/", "user name or password"),
        ("https://{{ input.host }}/", "no such name"),
        ("https://{{ input.host }}.a.example/", "no such name"),
        ("https:///path", "names no host"),
        ("https://a.example/{% if true %}x{% endif %}", "only"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    error = refused(http(url), {"host": "evil.example/x"})
    assert message in error.message
    assert SECRET not in error.message


def test_base_url_comes_first_and_is_taken_as_it_is(server: FakeHttp) -> None:
    secrets = Secrets(EnvironmentSecrets({"BASE": server.url + "/echo"}), ALL)
    call(http("{{ secret('BASE') }}/orders/{{ input.id }}"), {"id": "a/b"}, secrets=secrets)
    assert server.calls[0].path == "/echo/orders/a%2Fb"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Note", "a\r\nEvil: 1"),
        ("X-Note", "a\nb"),
        ("X-Note", "a\0b"),
        ("X-Note", "€"),
        ("Bad Name", "x"),
        ("Host", "x"),
    ],
)
def test_headers_that_are_refused(server: FakeHttp, name: str, value: str) -> None:
    error = refused(http(server.url + "/echo", headers={name: "{{ input.v }}"}), {"v": value})
    assert error.code == "tool-header"
    assert server.calls == []


def test_missing_secret_is_named(server: FakeHttp) -> None:
    with pytest.raises(SecretMissing, match="'ABSENT'"):
        call(http(server.url + "/echo", headers={"X": "{{ secret('ABSENT') }}"}))


# http: the answer -----------------------------------------------------------------------------------------------------


def test_results_by_content_type_and_by_wish(server: FakeHttp) -> None:
    assert call(http(server.url + "/text")) == "grün"
    assert call(http(server.url + "/empty")) is None
    assert call(http(server.url + "/echo"))["method"] == "GET"
    assert call(http(server.url + "/echo", result="text")).startswith("{")
    assert call(http(server.url + "/echo", method="HEAD"))["status"] == 200
    assert call(http(server.url + "/gzip/5")) == "00000"


@pytest.mark.parametrize("path", ["/broken-json", "/nan"])
def test_answers_that_are_not_json(server: FakeHttp, path: str) -> None:
    error = refused(http(server.url + path))
    assert error.code == "tool-response"
    assert "not JSON" in error.message


def test_status_outside_2xx_shows_the_bodys_beginning(server: FakeHttp) -> None:
    error = refused(http(server.url + "/status/404"))
    assert (error.code, error.context["status"], error.retryable) == ("tool-status", 404, False)
    assert error.message.endswith("answered with status 404: the body of status 404")
    server.script({"status": 400, "json": "x" * 5000})
    assert len(refused(http(server.url + "/script")).message) < 700
    assert len(server.calls) == 2


@pytest.mark.parametrize("path", ["/big/2000", "/gzip/2000"])
def test_size_limit(server: FakeHttp, path: str) -> None:
    error = refused(http(server.url + path, max_bytes=1000))
    assert error.code == "tool-too-large"
    assert "max_bytes" in error.message
    assert len(call(http(server.url + "/big/1000", max_bytes=1000))) == 1000


def test_a_gzip_bomb_is_not_unpacked(server: FakeHttp) -> None:
    call(http(server.url + "/gzip/10"))  # imports and the TLS context, which would be measured too
    tracemalloc.start()
    try:
        error = refused(http(server.url + "/gzip/100000000", max_bytes=1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.code == "tool-too-large"
    assert peak < 10_000_000


def test_secrets_never_surface(server: FakeHttp) -> None:
    tool = http(
        server.url + "/echo?key={{ secret('TOKEN') }}",
        headers={"Authorization": "Bearer {{ secret('TOKEN') }}"},
    )
    answer = call(tool)
    assert SECRET not in json.dumps(answer)
    assert answer["headers"]["authorization"] == "Bearer ***"
    server.script({"status": 400, "json": {"you sent": SECRET}})
    error = refused(http(server.url + "/script?key={{ secret('TOKEN') }}"))
    assert SECRET not in json.dumps(error.to_json()) + repr(error)
    assert "***" in error.message
    assert error.__cause__ is None
    assert error.__context__ is None


# http: retries and redirects ------------------------------------------------------------------------------------------


def test_server_errors_are_tried_again_with_the_same_key(server: FakeHttp) -> None:
    server.script({"status": 500}, {"status": 503, "headers": {"Retry-After": "0"}})
    answer = call(http(server.url + "/script", method="POST"), {})
    assert answer["method"] == "POST"
    assert server.idempotency_keys == {"run-1/pay": 3}


def test_retries_end(server: FakeHttp) -> None:
    server.script(*[{"status": 503, "headers": {"Retry-After": "0"}}] * 5)
    error = refused(http(server.url + "/script", retries=2))
    assert (error.code, error.retryable, error.context["retry_after_s"]) == ("tool-status", True, 0)
    assert len(server.calls) == 3


def test_retry_after_is_honoured(server: FakeHttp) -> None:
    server.script({"status": 429, "headers": {"Retry-After": "1"}})
    call(http(server.url + "/script"))
    first, second = server.calls
    assert 0.95 <= second.at - first.at < 5


def test_retry_after_may_be_a_date(server: FakeHttp) -> None:
    at = FixedClock().now() + timedelta(seconds=1)
    server.script({"status": 429, "headers": {"Retry-After": format_datetime(at, usegmt=True)}})
    call(http(server.url + "/script"), clock=FixedClock())
    first, second = server.calls
    assert 0.95 <= second.at - first.at < 5


def test_retry_after_beyond_the_timeout_fails_at_once(server: FakeHttp) -> None:
    server.script({"status": 429, "headers": {"Retry-After": "3600"}})
    started = time.monotonic()
    error = refused(http(server.url + "/script", timeout_s=5))
    assert time.monotonic() - started < 3
    assert (error.context["status"], error.retryable) == (429, True)


@pytest.mark.parametrize("failure", [{"status": 500}, {"cut": True}])
@pytest.mark.parametrize(
    ("method", "spec", "is_repeated"),
    [
        ("GET", {"side_effects": True}, True),
        ("PUT", {"side_effects": True}, True),
        ("DELETE", {"idempotent": False}, False),
        ("POST", {"side_effects": True}, False),
        ("PATCH", {"side_effects": True}, False),
        ("POST", {"side_effects": True, "idempotent": True}, True),
        ("POST", {}, True),
    ],
)
def test_what_may_have_happened_is_repeated_only_where_harmless(
    server: FakeHttp, failure: dict[str, Any], method: str, spec: dict[str, Any], is_repeated: bool
) -> None:
    server.script(failure)
    tool = http(server.url + "/script", spec, method=method)
    if is_repeated:
        assert call(tool)["method"] == method
    else:
        error = refused(tool)
        assert not error.retryable
        assert len(server.calls) == 1


def test_refusals_are_repeated_even_for_side_effects(server: FakeHttp) -> None:
    server.script({"status": 429, "headers": {"Retry-After": "0"}})
    assert call(http(server.url + "/script", {"side_effects": True}, method="POST"))["method"] == "POST"


def test_nobody_listens() -> None:
    with FakeHttp() as gone:
        url = gone.url
    error = refused(http(url + "/echo", {"side_effects": True}, method="POST", retries=1))
    assert (error.code, error.retryable) == ("tool-connect", True)


def test_timeout_covers_everything(server: FakeHttp) -> None:
    started = time.monotonic()
    error = refused(http(server.url + "/slow/30", timeout_s=0.2))
    assert time.monotonic() - started < 5
    assert error.code == "tool-timeout"
    assert "0.2 s" in error.message
    assert refused(http(server.url + "/slow/30"), timeout_s=0.1).code == "tool-timeout"


def test_timeout_holds_when_the_loop_was_busy(server: FakeHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    create = httpx.create_ssl_context

    def slowly() -> ssl.SSLContext:
        time.sleep(0.3)
        return create()

    monkeypatch.setattr(httpx, "create_ssl_context", slowly)
    assert refused(http(server.url + "/slow/2", timeout_s=0.1)).code == "tool-timeout"


@pytest.mark.parametrize(
    ("status", "method", "expected"),
    [
        (302, "GET", "GET"),
        (303, "POST", "GET"),
        (302, "POST", "GET"),
        (307, "POST", "POST"),
        (308, "PUT", "PUT"),
    ],
)
def test_redirects_on_the_same_host(server: FakeHttp, status: int, method: str, expected: str) -> None:
    body = {} if method == "GET" else {"json": {"a": 1}}
    tool = http(f"{server.url}/redirect/{status}?to=/echo", method=method, headers={"X-Key": "k"}, **body)
    answer = call(tool)
    assert (answer["method"], answer["headers"]["x-key"]) == (expected, "k")
    assert answer["body"] == ("" if expected == "GET" else '{"a":1}')


def test_headers_do_not_follow_to_another_origin(server: FakeHttp) -> None:
    with FakeHttp() as other:
        headers = {"Authorization": "Bearer {{ secret('TOKEN') }}", "X-Key": "k", "Accept": "text/plain"}
        answer = call(http(f"{server.url}/redirect/302?to={other.url}/echo", headers=headers))
        assert answer["headers"]["accept"] == "text/plain"
        assert not {"authorization", "x-key"} & set(answer["headers"])
        error = refused(http(f"{server.url}/redirect/307?to={other.url}/echo", method="POST", json={"a": 1}))
        assert error.code == "tool-redirect"
        assert [seen.method for seen in other.calls] == ["GET"]


def test_redirects_end(server: FakeHttp) -> None:
    server.script(*[{"status": 302, "headers": {"Location": "/script"}}] * 20)
    error = refused(http(server.url + "/script"))
    assert "redirected more than 5 times" in error.message
    assert len(server.calls) == 6


def test_cookies_are_not_kept_between_calls(server: FakeHttp) -> None:
    server.script({"status": 200, "headers": {"Set-Cookie": "session=1"}})

    async def twice() -> Any:
        made = context()
        try:
            await call_tool(http(server.url + "/script"), {}, made)
            return await call_tool(http(server.url + "/echo"), {}, made)
        finally:
            await made.http.aclose()

    assert "cookie" not in asyncio.run(twice())["headers"]


# function -------------------------------------------------------------------------------------------------------------


def test_function_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool_functions.py").write_text(
        "import time\n"
        "def total(prices: list[float], currency: str = 'EUR') -> dict[str, float]:\n"
        "    return {currency: sum(prices)}\n"
        "def slow() -> None:\n"
        "    time.sleep(1)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tool_functions", raising=False)
    functions = FunctionRegistry(["tool_functions"])
    tool = ToolSpec(slug="total", type="function", config={"function": "tool_functions:total"})
    assert call(tool, {"prices": ["1.5", 2]}, functions=functions) == {"EUR": 3.5}
    error = refused(tool, {"price": [1]}, functions=functions)
    assert (error.code, "prices" in error.message) == ("tool-input", True)
    assert refused(tool, {"prices": []}).code == "function-not-allowed"
    input_schema, output_schema = asyncio.run(tool_schemas(tool, context(functions=functions)))
    assert input_schema["required"] == ["prices"]
    assert output_schema == {"type": "object", "additionalProperties": {"type": "number"}}
    slow = ToolSpec(slug="slow", type="function", config={"function": "tool_functions:slow"}, timeout_s=0.05)
    assert refused(slow, {}, functions=functions).code == "tool-timeout"


# builtin --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 * (3 + 4) ** 2", 98),
        ("7 // 2 + 7 % 4 - -1", 7),
        ("1 / 4", 0.25),
        ("2 ** -1", 0.5),
        ("sqrt(16) + max(1, 2, 3) + round(2.567, 1)", 9.6),
        ("floor(2.7) + ceil(2.1) + abs(-3)", 8),
        ("1 ** 999999999999", 1),
    ],
)
def test_calculator(expression: str, result: float) -> None:
    assert call(builtin("calculator"), {"expression": expression}) == {"result": pytest.approx(result)}


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "(2**4000)*(2**4000)",
        "10.0**400",
        "exp(1000)",
        "1/0",
        "(-8)**0.5",
        "sqrt(-1)",
        "__import__('os')",
        "().__class__",
        "'a'*9",
        "True",
        "x",
        "1 if 1 else 2",
        "[1]",
        "max()",
        "open('/etc/passwd')",
        "((((",
        "(" * 250 + "1" + ")" * 249,
        "-" * 499 + "1",
        "9" * 501,
        "1e999",
        "round(1, 10**9)",
        "2" + "**2" * 160,
    ],
)
def test_calculator_refuses_quickly(expression: str) -> None:
    started = time.monotonic()
    if expression == "-" * 499 + "1":
        assert call(builtin("calculator"), {"expression": expression}) == {"result": -1}
    else:
        assert refused(builtin("calculator"), {"expression": expression}).code == "tool-input"
    assert time.monotonic() - started < 2


def test_now() -> None:
    assert call(builtin("now"), {"timezone": "Europe/Berlin"}, clock=FixedClock()) == {
        "now": "2026-07-01T14:00:00+02:00",
        "timezone": "Europe/Berlin",
        "unix_s": 1782907200.0,
    }
    for zone in ("Europe/Nowhere", "../etc/passwd", "/etc/passwd", ""):
        assert "no zone" in refused(builtin("now"), {"timezone": zone}).message


def test_generate_id() -> None:
    made = call(builtin("generate_id"), {"prefix": "ord-"}, clock=FixedClock())
    assert made == {"id": "ord-00000000-0000-4000-8000-000000000001"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$", {"a": [{"b": 1}, {"b": 2}, {}], "x y": None}),
        ("$.a[0].b", 1),
        ("$.a[-2].b", 2),
        ("$.a[*].b", [1, 2]),
        ("$['x y']", None),
        ("$.c[*].d", []),
        ("$.*[0]", [{"b": 1}]),
    ],
)
def test_json_path(path: str, value: Any) -> None:
    data = {"a": [{"b": 1}, {"b": 2}, {}], "x y": None}
    assert call(builtin("json_path"), {"data": data, "path": path}) == {"value": value}


def test_json_path_says_what_is_wrong() -> None:
    assert "nothing stands at '$.a'" in refused(builtin("json_path"), {"data": {}, "path": "$.a"}).message
    assert call(builtin("json_path"), {"data": {}, "path": "$.a", "default": 0}) == {"value": 0}
    for path in ("a.b", "$.a[?(@.b)]", "$..a", "$.a[1:2]", "$."):
        assert refused(builtin("json_path"), {"data": {}, "path": path}).code == "tool-input"
