"""An OpenAI-compatible server that answers from a script, for tests over real HTTP.

In a test:

    with FakeProvider(replies=[{"status": 429, "retry_after": 1}, {"text": "hello"}]) as fake:
        ...  # deployment = fake.deployment
        assert fake.count == 2

In a process of its own (the script is JSON: `{"replies": [...], "by_model": {...}, "default": {...}}`):

    python tests/fake_provider.py --port 0 --log requests.jsonl --script script.json

Each chat request takes the next reply of its model in `by_model` (named as the server sees it, without `openai/`), else
the next of `replies`, else `default`, else an answer of its own: the smallest instance of the schema asked for, or
`You said: <last user message>`. A reply is a JSON object:

    {"text": "..."}  {"object": {...}}  {"tool_calls": [{"name": "f", "arguments": {...}}]}
    {"status": 500, "message": "...", "retry_after": 2}     an error
    {"hang": true}                                          no answer until released or closed
    {"malformed": true}                                     status 200 and broken JSON
    {"body": {...}}                                         status 200 and this body
    {"disconnect": true}                                    the connection is cut
    any of them with "delay_s": 0.2 and "usage": [input_tokens, output_tokens]
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from agentmesh_dagster.deployment import Deployment, Endpoint

HANG_FOREVER_S = 600.0


@dataclass(frozen=True)
class SeenRequest:
    """One request that the server got; `at` is `time.monotonic()`."""

    path: str
    body: Any
    headers: dict[str, str]
    at: float
    at_unix: float

    @property
    def model(self) -> str:
        return self.body.get("model", "") if isinstance(self.body, dict) else ""

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "body": self.body, "headers": self.headers, "at_unix": self.at_unix}


class FakeProvider:
    """The server; a context manager. All methods may be called from any thread."""

    def __init__(
        self,
        replies: list[dict[str, Any]] | None = None,
        *,
        by_model: dict[str, list[dict[str, Any]]] | None = None,
        default: dict[str, Any] | None = None,
        port: int = 0,
        log: Path | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._replies = list(replies or [])
        self._by_model = {model: list(script) for model, script in (by_model or {}).items()}
        self._default = default
        self._log = log
        self._seen: list[SeenRequest] = []
        self._active = 0
        self._most_active = 0
        self._cut = 0
        self.released = threading.Event()
        """Set it to let hanging requests be answered with `You said: ...`."""
        self.on_request: Callable[[], None] | None = None
        """Called with each chat request that has come, before it is answered."""
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.fake = self
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def base_url(self) -> str:
        """The `api_base`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def deployment(self) -> Deployment:
        """One in which the models of `openai/` are this server's."""
        return Deployment.of(endpoints={"openai": Endpoint(api_base=self.base_url)})

    @property
    def requests(self) -> list[SeenRequest]:
        """The chat requests so far, in order of arrival."""
        with self._lock:
            return list(self._seen)

    @property
    def count(self) -> int:
        return len(self.requests)

    @property
    def most_active(self) -> int:
        """How many chat requests were being answered at once, at most."""
        with self._lock:
            return self._most_active

    @property
    def cut(self) -> int:
        """How many hanging requests the client gave up."""
        with self._lock:
            return self._cut

    def count_of(self, model: str) -> int:
        return sum(1 for request in self.requests if request.model == model)

    def push(self, *replies: dict[str, Any]) -> None:
        """Adds replies to the script."""
        with self._lock:
            self._replies.extend(replies)

    def wait_for(self, count: int, timeout_s: float = 10.0) -> None:
        """Waits until that many chat requests have come."""
        deadline = time.monotonic() + timeout_s
        while self.count < count:
            assert time.monotonic() < deadline, f"{self.count} of {count} requests came within {timeout_s} s"
            time.sleep(0.01)

    def wait_for_cut(self, timeout_s: float = 10.0) -> None:
        """Waits until a client has given up a hanging request."""
        deadline = time.monotonic() + timeout_s
        while not self.cut:
            assert time.monotonic() < deadline, f"no request was given up within {timeout_s} s"
            time.sleep(0.01)

    def start(self) -> FakeProvider:
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.02},
            name="fake-provider",
            daemon=True,
        )
        self._thread.start()
        return self

    def close(self) -> None:
        self.closing.set()
        self.released.set()
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> FakeProvider:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take(self, request: SeenRequest) -> dict[str, Any]:
        """Records a chat request and picks its reply."""
        reply = self._take(request)
        if self.on_request is not None:
            self.on_request()
        return reply

    def _take(self, request: SeenRequest) -> dict[str, Any]:
        with self._lock:
            self._seen.append(request)
            if self._log is not None:
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(request.to_json()) + "\n")
            script = self._by_model.get(request.model)
            if script is None:
                script = self._replies
            if script:
                return script.pop(0)
            return self._default if self._default is not None else {}

    def enter(self) -> None:
        with self._lock:
            self._active += 1
            self._most_active = max(self._most_active, self._active)

    def leave(self) -> None:
        with self._lock:
            self._active -= 1

    def note_cut(self) -> None:
        with self._lock:
            self._cut += 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    fake: FakeProvider

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/models"):
            self._send(
                200, {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "tests"}]}
            )
        else:
            self._send(404, {"error": {"message": f"no such path: {self.path}", "type": "not_found"}})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw)
        except ValueError:
            self._send(
                400, {"error": {"message": "the request is not JSON", "type": "invalid_request_error"}}
            )
            return
        if not self.path.endswith("/chat/completions"):
            self._send(404, {"error": {"message": f"no such path: {self.path}", "type": "not_found"}})
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = SeenRequest(self.path, body, headers, time.monotonic(), time.time())
        fake = self.server.fake
        fake.enter()
        try:
            self._answer(fake, seen, fake.take(seen))
        finally:
            fake.leave()

    def _answer(self, fake: FakeProvider, seen: SeenRequest, reply: dict[str, Any]) -> None:
        if reply.get("delay_s"):
            fake.closing.wait(reply["delay_s"])
        if reply.get("hang") and not self._hang(fake):
            return
        if reply.get("disconnect"):
            self._cut_off()
        elif "status" in reply:
            message = reply.get("message", f"scripted {reply['status']}")
            extra = {"Retry-After": str(reply["retry_after"])} if "retry_after" in reply else {}
            self._send(
                reply["status"], {"error": {"message": message, "type": "scripted", "code": None}}, extra
            )
        elif reply.get("malformed"):
            self._send_bytes(200, b'{"id": "broken", "choices": [{"mess')
        elif "body" in reply:
            self._send(200, reply["body"])
        elif seen.body.get("stream"):
            self._stream(seen, reply)
        else:
            self._send(200, completion(seen.body, reply))

    def _hang(self, fake: FakeProvider) -> bool:
        """Waits; says whether the client is still there."""
        end = time.monotonic() + HANG_FOREVER_S
        self.connection.settimeout(0.02)
        while not fake.released.is_set() and time.monotonic() < end:
            try:
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            self.connection.settimeout(self.timeout)
            if not fake.closing.is_set():
                return True
            self._cut_off()
            return False
        fake.note_cut()
        self.close_connection = True
        return False

    def _cut_off(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(body).encode(), headers)

    def _send_bytes(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, seen: SeenRequest, reply: dict[str, Any]) -> None:
        whole = completion(seen.body, reply)
        message = whole["choices"][0]["message"]
        head = {"id": whole["id"], "object": "chat.completion.chunk", "created": whole["created"]}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word} for word in (message["content"] or "").split(" ") if word]
        if message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]})
        for delta in deltas:
            chunk = {
                **head,
                "model": whole["model"],
                "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
            }
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        last = {"index": 0, "delta": {}, "finish_reason": whole["choices"][0]["finish_reason"]}
        chunk = {**head, "model": whole["model"], "choices": [last], "usage": whole["usage"]}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())


def completion(request: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion."""
    calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for index, call in enumerate(reply.get("tool_calls", []))
    ]
    text = None if calls and "text" not in reply else _text(request, reply)
    asked, answered = reply.get("usage", (11, 7))
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": request.get("model", "fake"),
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered},
    }


def _text(request: dict[str, Any], reply: dict[str, Any]) -> str:
    if "object" in reply:
        return json.dumps(reply["object"])
    if "text" in reply:
        return reply["text"]
    wanted = request.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        from agentmesh_dagster.specs.schema import smallest_instance

        return json.dumps(smallest_instance(wanted["json_schema"]["schema"]))
    said = [
        message.get("content") for message in request.get("messages", []) if message.get("role") == "user"
    ]
    return f"You said: {said[-1] if said else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that answers from a script.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append each chat request to this file, as a line of JSON")
    parser.add_argument("--script", type=Path, help="JSON: {replies, by_model, default}")
    options = parser.parse_args()
    script = json.loads(options.script.read_text(encoding="utf-8")) if options.script else {}
    fake = FakeProvider(
        script.get("replies"),
        by_model=script.get("by_model"),
        default=script.get("default"),
        port=options.port,
        log=options.log,
    )
    with fake:
        print(f"listening on {fake.base_url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
