"""The HTTP client of tools: one connection pool per event loop, behind the address guard, one hop per call.

The pool is httpcore's, not an `httpx.AsyncClient`: that one would keep cookies across tools, read proxies
from the environment, and log every URL, query secrets included.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.runtime.tools.errors import ToolFailure
from agentmesh_dagster.runtime.tools.http_guard import AddressPolicy, Resolver, guarded_backend, resolve_name

if TYPE_CHECKING:
    import httpcore
    import httpx

__all__ = ["HttpClient", "HttpResponse"]

CONNECT_TIMEOUT_S: Final = 10.0
_MAX_CONNECTIONS: Final = 1000
_KEEP_ALIVE_CONNECTIONS: Final = 100
_KEEP_ALIVE_S: Final = 30.0
# What one step of decompression may produce; a whole compressed chunk at once could be a thousand times its
# size.
_INFLATE_STEP: Final = 65_536


@dataclass(frozen=True, kw_only=True)
class HttpResponse:
    """One answer; the body is decompressed and complete, unless `truncated`."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case; of repeated headers, the values joined with a comma."""
    body: bytes
    truncated: bool = False
    """The body was longer than asked for, and is cut there."""


class HttpClient:
    """Sends single requests to checked addresses, from any event loop.

    Args:
        policy: What may be reached; default: what the deployment says, and `AGENTMESH_HTTP_ALLOW` of this process,
            read once.
        resolver: Resolves names; the system's by default.
        deployment: See `policy`.
    """

    def __init__(
        self,
        policy: AddressPolicy | None = None,
        resolver: Resolver = resolve_name,
        *,
        deployment: Deployment = Deployment(),  # noqa: B008 - a frozen record
    ) -> None:
        self._policy = policy
        self._deployment = deployment
        self._resolver = resolver
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, httpcore.AsyncConnectionPool] = (
            WeakKeyDictionary()
        )

    def _pool(self) -> httpcore.AsyncConnectionPool:
        import httpcore
        import httpx

        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            if self._policy is None:
                self._policy = AddressPolicy.of_deployment(self._deployment)
            pool = self._pools[loop] = httpcore.AsyncConnectionPool(
                # Honours SSL_CERT_FILE and SSL_CERT_DIR, for networks with an authority of their own.
                ssl_context=httpx.create_ssl_context(),
                max_connections=_MAX_CONNECTIONS,
                max_keepalive_connections=_KEEP_ALIVE_CONNECTIONS,
                keepalive_expiry=_KEEP_ALIVE_S,
                network_backend=guarded_backend(self._policy, self._resolver),
            )
        return pool

    async def send(
        self,
        method: str,
        url: httpx.URL,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
        *,
        max_bytes: int,
        on_sending: Callable[[], None] | None = None,
    ) -> HttpResponse:
        """Sends one request and reads its answer; follows no redirect and retries nothing.

        The caller bounds the time; only the wait for a connection has a bound here.

        Args:
            method: An HTTP method.
            url: Absolute, `http` or `https`.
            headers: Names and values, latin-1 text without line breaks; `Host` and `Content-Length` are
                added.
            body: Bytes, or None for no body.
            max_bytes: How much of the decompressed body is read.
            on_sending: Called when there is a connection, before the first byte of the request goes out.

        Raises:
            ToolRefused: The address is not allowed.
            ToolFailure: The answer cannot be decompressed (code `tool-response`).
            httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError: As httpcore means them;
                `ConnectError`, `ConnectTimeout` and `PoolTimeout` say that nothing was sent.
        """
        import httpcore

        host = url.netloc.decode("ascii")
        sent = [("Host", host), ("Accept-Encoding", "gzip, deflate"), *headers]
        if body is not None:
            sent.append(("Content-Length", str(len(body))))
        elif method in ("POST", "PUT", "PATCH"):
            sent.append(("Content-Length", "0"))
        request = httpcore.Request(
            method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent],
            content=body,
            extensions={"timeout": {"connect": CONNECT_TIMEOUT_S}, **_traced(on_sending)},
        )
        response = await self._pool().handle_async_request(request)
        try:
            received: dict[str, str] = {}
            for raw_name, raw_value in response.headers:
                name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
                received[name] = f"{received[name]}, {value}" if name in received else value
            content = bytearray()
            if method != "HEAD":
                async for part in _decoded(response.aiter_stream(), received.get("content-encoding", "")):
                    content += part
                    if len(content) > max_bytes:
                        break
        finally:
            await response.aclose()
        is_longer = len(content) > max_bytes
        return HttpResponse(
            status=response.status, headers=received, body=bytes(content[:max_bytes]), truncated=is_longer
        )

    async def aclose(self) -> None:
        """Closes the connections of the running event loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()


def _traced(on_sending: Callable[[], None] | None) -> dict[str, object]:
    """The extension by which httpcore says how far a request is."""
    if on_sending is None:
        return {}

    async def trace(name: str, _info: object) -> None:
        if name.endswith("send_request_headers.started"):
            on_sending()

    return {"trace": trace}


async def _decoded(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """A body without its content encoding, in pieces of bounded size."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        async for part in parts:
            yield part
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ToolFailure(
            f"the answer is encoded as {encoding[:40]!r}, which was not asked for (gzip and deflate are)",
            code="tool-response",
        )
    problem = "it ends too early"
    inflater = None
    try:
        async for part in parts:
            data = part
            while data:
                if inflater is None:
                    # 47 reads gzip and zlib headers; some servers send 'deflate' without any.
                    is_raw = encoding == "deflate" and (data[0] & 0x0F) != 8
                    inflater = zlib.decompressobj(-15 if is_raw else 47)
                made = inflater.decompress(data, _INFLATE_STEP)
                if made:
                    yield made
                data = inflater.unconsumed_tail or (inflater.unused_data if inflater.eof else b"")
                if inflater.eof:
                    # gzip allows several members, one after the other.
                    inflater = None
        if inflater is None:
            return
        yield inflater.flush()
        if inflater.eof:
            return
    except zlib.error as error:
        problem = str(error)
    raise ToolFailure(f"the {encoding} answer cannot be decompressed: {problem}", code="tool-response")
