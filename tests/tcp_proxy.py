"""A TCP proxy before a PostgreSQL server: its connections are cut, refused and made again as a test asks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from sqlalchemy import make_url


class TcpProxy:
    """Stands before the server of a database; a context manager.

    Args:
        url: The database's URL, as `store_fixtures` gives it: the server listens on a Unix socket.
    """

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._listener: socket.socket | None = None
        self._port = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._to_lose: bytes | None = None
        self.lost = 0
        """How many answers were lost."""

    @property
    def url(self) -> str:
        """The database's URL through the proxy."""
        return f"postgresql://{self._url.username}@127.0.0.1:{self._port}/{self._url.database}"

    def restore(self) -> None:
        """Takes connections, from the first call on at one port."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def cut(self) -> None:
        """Ends all connections and refuses new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            # Closing alone would leave the thread in `accept`, and the port open.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _end(connection)

    def lose_answer_to(self, marker: bytes) -> None:
        """Hands the next message with these bytes to the server, and cuts the connection in place of the answer."""
        self._to_lose = marker

    def __enter__(self) -> TcpProxy:
        self.restore()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cut()

    @staticmethod
    def _start(target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True, name="tcp-proxy").start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(f"{self._url.query['host']}/.s.PGSQL.{self._url.port or 5432}")
            except OSError:
                _end(client)
                continue
            connection = _Connection(client, server)
            with self._lock:
                self._open |= {client, server}
            if self._listener is not listener:  # cut meanwhile
                self._finish(connection)
            self._start(self._pump_requests, connection)
            self._start(self._pump_answers, connection)

    def _pump_requests(self, connection: _Connection) -> None:
        while data := _receive(connection.client):
            marker = self._to_lose
            if marker is not None and marker in data:
                self._to_lose = None
                connection.loses_answer = True
            if not _send(connection.server, data):
                break
        self._finish(connection)

    def _pump_answers(self, connection: _Connection) -> None:
        while data := _receive(connection.server):
            if connection.loses_answer:
                self.lost += 1
                break
            if not _send(connection.client, data):
                break
        self._finish(connection)

    def _finish(self, connection: _Connection) -> None:
        for end in (connection.client, connection.server):
            with self._lock:
                self._open.discard(end)
            _end(end)


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.loses_answer = False


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(65536)
    except OSError:
        return b""


def _send(end: socket.socket, data: bytes) -> bool:
    try:
        end.sendall(data)
    except OSError:
        return False
    return True


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def wait_until(what: str, condition: Callable[[], bool], bound_s: float = 30) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {bound_s} s"
        time.sleep(0.01)
