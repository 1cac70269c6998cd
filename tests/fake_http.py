"""A small HTTP server that tools are pointed at in tests.

    with FakeHttp() as server:
        ...  # server.url + "/echo"

Paths: `/echo` answers with what it got (method, path, query, headers, body); `/status/<code>`; `/slow/<seconds>`;
`/big/<bytes>`; `/gzip/<bytes>` (that many zeros, compressed); `/redirect/<status>?to=<url>`; `/text`; `/broken-json`;
`/nan`; `/empty`; `/cut` (the connection ends without an answer); `/json?value=<json>` answers with that; `/script`
takes the next reply given to `script()`: `{"status": 503, "headers": {...}, "json": ..., "cut": true}`.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class SeenCall:
    method: str
    path: str
    """As sent, with the query."""
    headers: dict[str, str]
    body: str
    at: float


class FakeHttp:
    """The server; a context manager. All methods may be called from any thread."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._lock = threading.Lock()
        self._seen: list[SeenCall] = []
        self._script: list[dict[str, Any]] = []
        self.on_call: Callable[[], None] | None = None
        """Called with each call that has come, before it is answered."""
        self.closing = threading.Event()
        self._server = _Server((host, port), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-http", daemon=True
        )

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def calls(self) -> list[SeenCall]:
        with self._lock:
            return list(self._seen)

    @property
    def idempotency_keys(self) -> Counter[str]:
        """How often each `Idempotency-Key` came."""
        return Counter(
            call.headers["idempotency-key"] for call in self.calls if "idempotency-key" in call.headers
        )

    def script(self, *replies: dict[str, Any]) -> None:
        """Replies for `/script`, in order; after them it answers as `/echo`."""
        with self._lock:
            self._script.extend(replies)

    def note(self, call: SeenCall) -> None:
        with self._lock:
            self._seen.append(call)
        if self.on_call is not None:
            self.on_call()

    def take(self) -> dict[str, Any] | None:
        with self._lock:
            return self._script.pop(0) if self._script else None

    def start(self) -> FakeHttp:
        self._thread.start()
        return self

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> FakeHttp:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    fake: FakeHttp

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode("utf-8", "replace")
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = SeenCall(self.command, self.path, headers, body, time.monotonic())
        self.server.fake.note(call)
        word, _, rest = urlsplit(self.path).path.lstrip("/").partition("/")
        answer = getattr(self, f"_{word.replace('-', '_')}", None)
        if answer is None:
            self._echo(rest, call)
        else:
            answer(rest, call)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _handle

    def _echo(self, rest: str, call: SeenCall) -> None:
        query = parse_qs(urlsplit(call.path).query, keep_blank_values=True)
        shown = {
            "method": call.method,
            "path": call.path,
            "query": query,
            "headers": call.headers,
            "body": call.body,
        }
        self._send(200, json.dumps(shown).encode())

    def _status(self, rest: str, call: SeenCall) -> None:
        self._send(int(rest), b"the body of status " + rest.encode(), "text/plain")

    def _slow(self, rest: str, call: SeenCall) -> None:
        self.server.fake.closing.wait(float(rest))
        self._send(200, b'"late"')

    def _big(self, rest: str, call: SeenCall) -> None:
        self._send(200, b"x" * int(rest), "text/plain")

    def _gzip(self, rest: str, call: SeenCall) -> None:
        # In pieces: the tests measure this process's memory.
        packer, left, packed = zlib.compressobj(wbits=31), int(rest), b""
        while left > 0:
            packed += packer.compress(b"0" * min(left, 100_000))
            left -= 100_000
        self._send(200, packed + packer.flush(), "text/plain", {"Content-Encoding": "gzip"})

    def _redirect(self, rest: str, call: SeenCall) -> None:
        (target,) = parse_qs(urlsplit(call.path).query)["to"]
        self._send(int(rest), b"", headers={"Location": target})

    def _text(self, rest: str, call: SeenCall) -> None:
        self._send(200, "grün".encode("latin-1"), "text/plain; charset=latin-1")

    def _broken_json(self, rest: str, call: SeenCall) -> None:
        self._send(200, b'{"a": ')

    def _nan(self, rest: str, call: SeenCall) -> None:
        self._send(200, b'{"a": NaN}')

    def _empty(self, rest: str, call: SeenCall) -> None:
        self._send(200, b"")

    def _cut(self, rest: str, call: SeenCall) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _json(self, rest: str, call: SeenCall) -> None:
        (value,) = parse_qs(urlsplit(call.path).query)["value"]
        self._send(200, value.encode())

    def _script(self, rest: str, call: SeenCall) -> None:
        reply = self.server.fake.take()
        if reply is None:
            self._echo(rest, call)
        elif reply.get("cut"):
            self._cut(rest, call)
        else:
            body = json.dumps(reply.get("json")).encode()
            self._send(reply.get("status", 200), body, headers=reply.get("headers", {}))

    def _send(
        self,
        status: int,
        body: bytes,
        media_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small HTTP server that tools are pointed at.")
    parser.add_argument("--port", type=int, default=0)
    with FakeHttp(port=parser.parse_args().port) as server:
        print(f"listening on {server.url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
