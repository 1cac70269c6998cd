"""The `http` tool: one request, with retries and redirects, and its answer as JSON.

What is repeated: whatever was not sent (connect errors), and what the server refused before it did anything
(429, 503). Anything else may have had its effect, so it is repeated only where that does no harm: GET, HEAD,
PUT and DELETE unless the tool says `idempotent: false`, POST and PATCH where the tool may repeat
(`ToolSpec.may_repeat`). All tries carry the same `Idempotency-Key`, and share one `timeout_s`.

A failure after a request went out to which no answer came says so (`answer_lost`), also where a later try failed
otherwise. So does one after a 2xx, or after a redirect to the result (303), where that cannot be read: the request
was taken.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Any, Final

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.tools.base import ToolContext
from agentmesh_dagster.runtime.tools.errors import ToolFailure, ToolRefused
from agentmesh_dagster.runtime.tools.http_client import HttpResponse
from agentmesh_dagster.runtime.tools.http_request import HttpRequest, build_request, parse_url, port_of
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.specs.tools import HttpToolConfig

__all__ = ["HttpTool"]

MAX_REDIRECTS: Final = 5
_BODY_SHOWN: Final = 500
_BACKOFF_S: Final = 0.25
_MAX_BACKOFF_S: Final = 8.0
_REDIRECTS: Final = (301, 302, 303, 307, 308)
# Of the given headers only these follow a redirect to another origin; any other may carry a secret.
_HARMLESS_HEADERS: Final = ("accept", "accept-language", "content-type", "user-agent")


class HttpTool:
    """Tools of the type `http`."""

    config_model: type[SpecModel] = HttpToolConfig

    async def schemas(
        self, config: Any, context: ToolContext
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        return None, None

    async def call(self, tool: ToolSpec, config: HttpToolConfig, value: Json, context: ToolContext) -> Json:
        """Sends the request until it is answered; see the module.

        Returns:
            The body: parsed where it is JSON (or `result: json` asks so; an empty body gives null), else
            text. For HEAD, `{"status": int, "headers": {name: value}}`.

        Raises:
            ToolRefused: The request cannot be made from this input, or its address is not allowed.
            SecretRefused: The deployment does not allow a secret to documents, or not to this host.
            ToolFailure: There was no answer (codes `tool-connect`, `tool-read`, `tool-timeout`), its status
                is not 2xx (`tool-status`, with `status` in the context), it is too large (`tool-too-large`),
                or cannot be read (`tool-response`).
        """
        secrets = context.secrets.use()
        request = build_request(
            config,
            {"input": value, "config": context.config, "secret": secrets.lookup},
            tool=tool.slug,
            idempotency_key=context.idempotency_key,
        )
        # A redirect to another origin takes none of them along; see `_redirected`.
        secrets.check_destination(request.url.host, port_of(request.url))
        attempts = _Attempts(tool, config, request, context)
        try:
            return await within(attempts.run(), config.timeout_s)
        except DeadlinePassed:
            pass
        raise attempts.timed_out()


class _Attempts:
    """The tries of one call."""

    def __init__(
        self, tool: ToolSpec, config: HttpToolConfig, request: HttpRequest, context: ToolContext
    ) -> None:
        self._config = config
        self._request = request
        self._context = context
        self._deadline_s = context.clock.monotonic_s() + config.timeout_s
        is_safe = tool.may_repeat if request.method in ("POST", "PATCH") else tool.idempotent is not False
        self._may_repeat = is_safe
        self._outgoing = context.outgoing
        self._last: ToolFailure | None = None

    def timed_out(self) -> ToolFailure:
        before = f"; the try before: {self._last.message}" if self._last is not None else ""
        return ToolFailure(
            f"{self._shown(self._request)} took longer than {self._config.timeout_s:g} s{before}",
            code="tool-timeout",
            retryable=self._may_repeat,
            answer_lost=self._outgoing.is_unanswered,
        )

    async def run(self) -> Json:
        tries_left = self._config.retries
        while True:
            was_unanswered = self._outgoing.is_unanswered
            try:
                response = await self._follow()
                if 200 <= response.status < 300:
                    result = self._result(response)
                    self._outgoing.is_unanswered = was_unanswered
                    return result
                wait_s = _retry_after_s(response, self._context.clock)
                failure = self._status_failure(response, wait_s)
            except ToolFailure as error:
                failure, wait_s = error, None
            except ToolRefused as error:
                if not self._outgoing.is_unanswered:
                    raise
                # Not what was asked for is refused, but what it was redirected to.
                failure, wait_s = self._unusable(error), None
            if not failure.retryable or not tries_left:
                raise failure
            if wait_s is None:
                wait_s = min(_BACKOFF_S * 2 ** (self._config.retries - tries_left), _MAX_BACKOFF_S)
            if self._context.clock.monotonic_s() + wait_s >= self._deadline_s:
                raise failure
            self._last = failure
            tries_left -= 1
            await asyncio.sleep(wait_s)

    async def _follow(self) -> HttpResponse:
        request, was_unanswered = self._request, self._outgoing.is_unanswered
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._send(request)
            location = response.headers.get("location")
            if response.status not in _REDIRECTS or location is None:
                if not 200 <= response.status < 300:
                    self._outgoing.is_unanswered = was_unanswered
                return response
            # A redirect that asks for a GET stands for the answer: the request itself was taken.
            was_unanswered = was_unanswered or (
                request.method != "GET" and _becomes_get(request, response.status)
            )
            self._outgoing.is_unanswered = was_unanswered
            request = _redirected(request, response.status, location)
        raise ToolFailure(
            f"{self._shown(self._request)} was redirected more than {MAX_REDIRECTS} times",
            code="tool-response",
            answer_lost=self._outgoing.is_unanswered,
        )

    async def _send(self, request: HttpRequest) -> HttpResponse:
        import httpcore

        shown = self._shown(request)
        failure: ToolFailure
        try:
            return await self._context.http.send(
                request.method,
                request.url,
                request.headers,
                request.body,
                max_bytes=self._config.max_bytes,
                on_sending=self._sending,
            )
        except ToolFailure as error:
            failure = self._unusable(error)
        except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout) as error:
            failure = ToolFailure(
                f"{shown}: no connection: {_reason(error)}",
                code="tool-connect",
                retryable=True,
                answer_lost=self._outgoing.is_unanswered,
            )
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            failure = ToolFailure(
                f"{shown}: the connection broke before the answer was complete: {_reason(error)}",
                code="tool-read",
                retryable=self._may_repeat,
                answer_lost=self._outgoing.is_unanswered,
            )
        raise failure

    def _sending(self) -> None:
        self._outgoing.is_unanswered = True

    def _unusable(self, error: ToolFailure | ToolRefused) -> ToolFailure:
        return ToolFailure(
            error.message,
            code=error.code,
            answer_lost=self._outgoing.is_unanswered,
            context=error.context,
        )

    def _status_failure(self, response: HttpResponse, retry_after_s: float | None) -> ToolFailure:
        body = _text(response)[:_BODY_SHOWN].strip()
        was_refused = response.status in (429, 503)
        return ToolFailure(
            f"{self._shown(self._request)} answered with status {response.status}{': ' if body else ''}{body}",
            code="tool-status",
            retryable=was_refused or (response.status >= 500 and self._may_repeat),
            answer_lost=self._outgoing.is_unanswered,
            context={
                "status": response.status,
                **({} if retry_after_s is None else {"retry_after_s": retry_after_s}),
            },
        )

    def _result(self, response: HttpResponse) -> Json:
        if self._request.method == "HEAD":
            return {"status": response.status, "headers": dict(response.headers)}
        if response.truncated:
            raise ToolFailure(
                f"{self._shown(self._request)} answered with more than {self._config.max_bytes} bytes:"
                " ask for less, or raise the tool's 'max_bytes'",
                code="tool-too-large",
                answer_lost=True,
            )
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = media_type.endswith(("/json", "+json"))
        if self._config.result == "text" or (self._config.result == "auto" and not is_json):
            return _text(response)
        if not response.body.strip():
            return None
        return self._json(response)

    def _json(self, response: HttpResponse) -> Json:
        try:
            return json.loads(response.body, parse_constant=_refuse_constant, parse_float=_finite)
        except RecursionError:
            problem = "it is nested too deeply"
        except ValueError as error:
            problem = str(error)
        raise ToolFailure(
            f"{self._shown(self._request)} answered with what is not JSON ({problem}):"
            f" {_text(response)[:_BODY_SHOWN]}",
            code="tool-response",
            answer_lost=True,
        )

    @staticmethod
    def _shown(request: HttpRequest) -> str:
        # Without the query, which carries keys more often than it explains anything.
        return f"{request.method} {request.url.copy_with(query=None)}"


def _redirected(request: HttpRequest, status: int, location: str) -> HttpRequest:
    """The request that a redirect asks for."""
    import httpx

    try:
        target = str(request.url.join(location))
    except (httpx.InvalidURL, ValueError):
        target = ""
    url = parse_url(target, "the redirect's target")
    method, headers, body = request.method, request.headers, request.body
    if _becomes_get(request, status):
        method, body = "GET", None
        headers = tuple(h for h in headers if h[0].lower() not in ("content-type", "idempotency-key"))
    if not _is_same_origin(request.url, url):
        if method not in ("GET", "HEAD"):
            raise ToolRefused(
                f"{method} was redirected to another host ({url.host!r}), and is not repeated there:"
                " put the address that answers into the tool's 'url'",
                code="tool-redirect",
            )
        headers = tuple(h for h in headers if h[0].lower() in _HARMLESS_HEADERS)
    return replace(request, method=method, url=url, headers=headers, body=body)


def _becomes_get(request: HttpRequest, status: int) -> bool:
    """Whether a redirect asks for a GET in place of the request."""
    return (status == 303 and request.method != "HEAD") or (status in (301, 302) and request.method == "POST")


def _is_same_origin(one: Any, other: Any) -> bool:
    """Scheme, host and port are the same, or the other is the same host's `https` on the default ports."""
    one_port, other_port = port_of(one), port_of(other)
    if one.host != other.host:
        return False
    if one.scheme == other.scheme:
        return one_port == other_port
    return (one.scheme, one_port, other.scheme, other_port) == ("http", 80, "https", 443)


def _retry_after_s(response: HttpResponse, clock: Clock) -> float | None:
    """Seconds to wait, from `Retry-After` (RFC 9110, section 10.2.3): a number of seconds or a date."""
    text = response.headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text) if len(text) < 10 else 1e9
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return max((at - clock.now()).total_seconds(), 0.0)


def _text(response: HttpResponse) -> str:
    charset = "utf-8"
    for parameter in response.headers.get("content-type", "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            charset = value.strip().strip("\"'")
    try:
        return response.body.decode(charset, "replace")
    except (LookupError, ValueError):
        return response.body.decode("utf-8", "replace")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
