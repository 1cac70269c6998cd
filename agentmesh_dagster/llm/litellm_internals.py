"""The guard of model calls: every HTTP request that LiteLLM makes goes to a host of its call's destination.

LiteLLM makes its HTTP clients in four functions, each for many providers. They are wrapped, so that each client asks
before each request, redirects included. A request outside of a call is refused. `tests/attacks/test_model_calls.py`
fails where a release makes its clients elsewhere.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentmesh_dagster.llm.destinations import Destination

__all__ = ["Outgoing", "guard_clients", "outgoing_to"]

_MARK = "_agentmesh_guarded"


class HostRefused(Exception):
    """A request would go to a host that is not its destination's."""


@dataclass
class Outgoing:
    """The requests of one call."""

    destination: Destination
    hosts: list[str] = field(default_factory=list[str])
    """Those to which requests went."""
    refused: str = ""
    """The host to which one would have gone."""


_outgoing: ContextVar[Outgoing | None] = ContextVar("agentmesh_outgoing", default=None)


@contextmanager
def outgoing_to(destination: Destination) -> Generator[Outgoing]:
    """The requests inside go to this destination; threads that take the context along are inside."""
    outgoing = Outgoing(destination)
    token = _outgoing.set(outgoing)
    try:
        yield outgoing
    finally:
        _outgoing.reset(token)


def guard_clients() -> None:
    """Has the HTTP clients that LiteLLM makes from now on ask before each request; a second call changes nothing.

    Raises:
        AttributeError: A release of LiteLLM makes them elsewhere.
    """
    handlers: Any = importlib.import_module("litellm.llms.custom_httpx.http_handler")
    openai: Any = importlib.import_module("litellm.llms.openai.common_utils")
    makers: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (handlers.AsyncHTTPHandler, "create_client", _asks_async),
        (handlers.HTTPHandler, "create_client", _asks),
        (openai.BaseOpenAILLM, "_get_async_http_client", _asks_async),
        (openai.BaseOpenAILLM, "_get_sync_http_client", _asks),
    )
    for owner, name, hook in makers:
        made: Any = getattr(owner, name)
        if not hasattr(made, _MARK):
            wrapped = _guarded(made, hook)
            is_static = isinstance(owner.__dict__[name], staticmethod)
            setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def _guarded(make: Callable[..., Any], hook: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def guarded(*args: Any, **options: Any) -> Any:
        client = make(*args, **options)
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "request": [*hooks["request"], hook]}
        return client

    setattr(guarded, _MARK, True)
    return guarded


async def _asks_async(request: Any) -> None:
    _asks(request)


def _asks(request: Any) -> None:
    """Takes an `httpx.Request` that is about to be sent, the first one or that of a redirect."""
    outgoing = _outgoing.get()
    url = request.url
    port = url.port or (443 if url.scheme == "https" else 80)
    if outgoing is None:
        raise HostRefused(f"LiteLLM asks {url.host!r} outside of a call")
    rules = outgoing.destination.hosts
    if rules and not any(rule.matches(url.host, port) for rule in rules):
        outgoing.refused = f"{url.host}:{port}" if url.port else url.host
        raise HostRefused(f"{url.host!r} is not a host of {outgoing.destination.name!r}")
    outgoing.hosts.append(url.host)
