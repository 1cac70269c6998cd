"""Addresses that tools may not reach; names come from a resolver of the test, sockets are real."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import pytest
from fake_http import FakeHttp

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.errors import DefinitionError, ToolError
from agentmesh_dagster.runtime.functions import FunctionRegistry
from agentmesh_dagster.runtime.secrets import EnvironmentSecrets, Secrets
from agentmesh_dagster.runtime.tools.call import ToolContext, call_tool
from agentmesh_dagster.runtime.tools.http_client import HttpClient
from agentmesh_dagster.runtime.tools.http_guard import (
    AddressPolicy,
    checked_addresses,
    is_public,
    resolve_name,
)
from agentmesh_dagster.specs.documents import ToolSpec

PRIVATE = [
    "127.0.0.1",
    "127.9.9.9",
    "0.0.0.0",
    "0.1.2.3",
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.0.8",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "2001::1",
    "2002:7f00:1::",
    "2002:a00:1::",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "3fff::1",
]
PUBLIC = [
    "1.1.1.1",
    "93.184.216.34",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "64:ff9b::101:101",
    "::ffff:1.1.1.1",
]


@pytest.mark.parametrize("text", PRIVATE)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_addresses_that_are_public(text: str) -> None:
    assert is_public(ip_address(text))


class Names:
    """A resolver; the last answers for a name are repeated."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.answers.get(host.partition(".")[0])
        if not answers:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def check(host: str, allow: str = "", port: int = 80, **names: list[list[str]]) -> list[str]:
    resolver = Names(**names) if names else resolve_name
    return asyncio.run(checked_addresses(host, port, AddressPolicy(allow.split(",")), resolver))


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "localhost",
    ],
)
def test_every_spelling_of_loopback_is_refused(host: str) -> None:
    with pytest.raises(ToolError, match="AGENTMESH_HTTP_ALLOW") as caught:
        check(host)
    assert caught.value.code == "http-address"
    assert not caught.value.retryable


def test_one_private_address_among_public_ones_refuses_the_name() -> None:
    assert check("shop.example", shop=[["1.1.1.1", "2606:4700::1111"]]) == ["1.1.1.1", "2606:4700::1111"]
    with pytest.raises(ToolError, match=r"'shop.example' \(it is 10\.0\.0\.1\)"):
        check("shop.example", shop=[["1.1.1.1", "10.0.0.1"]])


@pytest.mark.parametrize(
    ("allow", "host", "port", "is_allowed"),
    [
        ("localhost", "localhost", 80, True),
        ("LOCALHOST", "localhost", 80, True),
        ("localhost:8080", "localhost", 8080, True),
        ("localhost:8080", "localhost", 80, False),
        ("127.0.0.0/8,::1/128", "localhost", 80, True),
        ("127.0.0.0/8", "2130706433", 80, True),
        ("127.0.0.1", "::ffff:127.0.0.1", 80, True),
        ("127.0.0.1:81", "127.0.0.1", 80, False),
        ("[::1]:81", "::1", 81, True),
        ("::1", "::1", 80, True),
        ("127.0.0.0/8", "10.0.0.1", 80, False),
        ("*.corp.example", "api.corp.example", 443, True),
        ("*.corp.example", "corp.example", 443, False),
        ("*.corp.example", "evilcorp.example", 443, False),
        ("api.corp.example", "api.corp.example", 443, True),
        ("api.corp.example", "api.corp.example.", 443, True),
        ("corp.example", "api.corp.example", 443, False),
    ],
)
def test_what_the_deployment_allows(allow: str, host: str, port: int, is_allowed: bool) -> None:
    names = {name: [["10.0.0.1"]] for name in ("api", "corp", "evilcorp")} | {
        "localhost": [["127.0.0.1", "::1"]]
    }
    if is_allowed:
        assert check(host, allow, port, **names)
    else:
        with pytest.raises(ToolError):
            check(host, allow, port, **names)


@pytest.mark.parametrize("rule", ["http://localhost", "local host", "10.0.0.0/99", "localhost:http", "*"])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(DefinitionError, match="AGENTMESH_HTTP_ALLOW") as caught:
        AddressPolicy([rule])
    assert repr(rule) in caught.value.message


def fetch(url: str, allow: str = "", names: Names | None = None) -> Any:
    async def body() -> Any:
        client = HttpClient(AddressPolicy(allow.split(",")), names or resolve_name)
        context = ToolContext(
            secrets=Secrets(EnvironmentSecrets({})),
            http=client,
            functions=FunctionRegistry(),
            clock=SystemClock(),
            idempotency_key="key",
        )
        tool = ToolSpec(
            slug="fetch", type="http", config={"url": "{{ input.url }}", "retries": 0, "timeout_s": 5}
        )
        try:
            return await call_tool(tool, {"url": url}, context)
        finally:
            await client.aclose()

    return asyncio.run(body())


def test_connection_goes_to_the_checked_address() -> None:
    """A name that becomes private after the check: it is resolved once, and never again for this connection."""
    with FakeHttp() as server:
        names = Names(rebind=[["127.0.0.1"], ["10.0.0.1"]])
        answer = fetch(f"http://rebind.example:{server.port}/echo", "127.0.0.0/8", names)
    assert names.asked == ["rebind.example"]
    assert answer["headers"]["host"] == f"rebind.example:{server.port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "localhost"])
def test_nothing_is_sent_to_a_refused_address(host: str) -> None:
    with FakeHttp() as server:
        with pytest.raises(ToolError) as caught:
            fetch(f"http://{host}:{server.port}/echo")
        assert caught.value.code == "http-address"
        assert server.calls == []


@pytest.mark.parametrize(
    "target", ["http://localhost:{port}/echo", "http://2130706433:{port}/echo", "//inner.example:{port}/echo"]
)
def test_redirects_are_checked_at_each_hop(target: str) -> None:
    with FakeHttp() as server:
        names = Names(outer=[["127.0.0.1"]], inner=[["127.0.0.1"]], localhost=[["127.0.0.1"]])
        with pytest.raises(ToolError) as caught:
            fetch(
                f"http://outer.example:{server.port}/redirect/302?to={target.format(port=server.port)}",
                "outer.example",
                names,
            )
        assert caught.value.code == "http-address"
        assert [call.path.split("?")[0] for call in server.calls] == ["/redirect/302"]


def test_redirect_to_another_scheme_is_refused() -> None:
    with FakeHttp() as server, pytest.raises(ToolError) as caught:
        fetch(f"{server.url}/redirect/302?to=file:///etc/passwd", "127.0.0.1")
    assert caught.value.code == "tool-url"


def test_environment_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHttp() as proxy, FakeHttp() as server:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert fetch(f"{server.url}/echo", "127.0.0.1")["method"] == "GET"
        assert proxy.calls == []


def test_allow_list_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", " localhost , 10.0.0.0/8 ")
    policy = AddressPolicy.of_deployment(Deployment())
    assert policy.allows_host("localhost", 80)
    assert policy.allows_address(ip_address("10.9.9.9"), 80)
    assert not policy.allows_address(ip_address("127.0.0.1"), 80)


def test_second_address_is_tried_where_the_first_does_not_answer() -> None:
    with FakeHttp() as server:
        names = Names(two=[["127.0.0.2", "127.0.0.1"]])
        assert fetch(f"http://two.example:{server.port}/echo", "127.0.0.0/8", names)["method"] == "GET"
