"""The process that a launcher's runs are forked from: it has the libraries loaded, and nothing else.

    python -m agentmesh_dagster.orchestration.warm_server FD PRELOAD

FD is its end of a socket pair, PRELOAD a JSON list of modules. A line of JSON asks for a run, and the line that answers
has the number of its process. When the launcher's process ends, however it ends, the socket ends with it; then the
server ends too, after its runs.

It loads in two stages. The libraries that every run needs take a second or two; then it serves. What PRELOAD names
(LiteLLM takes seconds more) is loaded by a successor, forked while no run is at work, and the successor takes over the
socket when it is ready. So no run waits for the second stage.

The server has one thread, opens no database and loads no definitions: what a fork copies must be good to copy. What
takes a database, the report that a run's process died, is done by a process forked for it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Any, Final

__all__ = ["main"]

# What a run's process imports before its first step; of packages, every module.
_PACKAGES: Final = ("agentmesh_dagster.runtime", "agentmesh_dagster.compiler", "agentmesh_dagster.store")
LIBRARIES: Final = (
    "agentmesh_dagster.orchestration.code_location",
    "agentmesh_dagster.orchestration.continuation",
    "agentmesh_dagster.orchestration.sensors",
    "agentmesh_dagster.llm.client",
    "jsonschema",
    "idna",
)
_IDLE_S: Final = 1.0
"""How long the server has had no run before it forks its successor, whose loading takes a processor."""
_BUSY_S: Final = 20.0
"""How long it waits for that at most."""

Task = Callable[[], int]
"""What a forked process does, to its exit code. `serve` gives it in that process."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    run_id: str
    instance_ref: str
    farewell: int
    """The reading end of a pipe into which the run's process writes when it has seen the run's end stored."""


@dataclass(frozen=True, kw_only=True)
class _Death:
    """A run's process ended, and did not say that it had seen the run's end."""

    run: _Run
    pid: int
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class _Successor:
    pid: int
    channel: socket.socket


class _Server:
    """Serves on a connection. Every method that may fork gives a task in the child, and None in the server."""

    def __init__(self, connection: socket.socket, preload: tuple[str, ...]) -> None:
        self._connection: socket.socket | None = connection
        self._received = b""
        self._runs: dict[int, _Run] = {}
        self._deaths: list[_Death] = []
        self._reporters: set[int] = set()
        self._successor: _Successor | None = None
        self._preload = preload
        self._began = self._idle_since = time.monotonic()
        self._is_told_to_end = False
        self._wakeup, self._wake = os.pipe()

    def serve(self) -> Task | None:
        """Serves until the launcher is gone and the runs are over.

        Returns:
            In a forked process what it shall do; None in the server.
        """
        _check_threads()
        gc.collect()
        # A collection in a child would otherwise write to, and so copy, what it shares with the server.
        gc.freeze()
        self._take_signals()
        while self._connection is not None or self._runs or self._deaths or self._reporters:
            task = self._turn()
            if task is not None:
                return task
        return None

    def _turn(self) -> Task | None:
        ready = self._wait()
        if self._is_told_to_end:
            self._close()
        if self._wakeup in ready:
            os.read(self._wakeup, 65536)
        self._reap()
        task = self._fork_reporter() if self._deaths else None
        if task is None and self._connection is not None and self._connection in ready:
            task = self._receive(self._connection)
        if task is None and self._successor is not None and self._successor.channel in ready:
            self._hand_over(self._successor)
        if task is None and self._shall_preload():
            task = self._fork_successor()
        return task

    def _wait(self) -> list[Any]:
        watched: list[Any] = [self._wakeup]
        if self._connection is not None:
            watched.append(self._connection)
        if self._successor is not None:
            watched.append(self._successor.channel)
        waits = self._preload and self._connection is not None and self._successor is None
        return select.select(watched, [], [], _IDLE_S / 2 if waits or self._deaths else None)[0]

    def _take_signals(self) -> None:
        def ignore(_number: int, _frame: FrameType | None) -> None:
            """Only wakes `select`, through the wakeup descriptor."""

        def end(_number: int, _frame: FrameType | None) -> None:
            self._is_told_to_end = True

        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, ignore)
        signal.signal(signal.SIGTERM, end)
        # Ctrl-C reaches every process of the terminal: the runs end by it, and then the server.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _close(self) -> None:
        """Serves no more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._successor is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._successor.pid, signal.SIGKILL)
            self._successor.channel.close()
            self._successor = None

    # Runs

    def _receive(self, connection: socket.socket) -> Task | None:
        try:
            data = connection.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._close()
            return None
        self._received += data
        # The launcher waits for each answer, so that there is one line at most.
        if not self._received.endswith(b"\n"):
            return None
        request, self._received = json.loads(self._received), b""
        answer: dict[str, Any]
        try:
            pid, task = self._fork_run(request["run_id"], request["instance_ref"])
            if task is not None:
                return task
            answer = {"pid": pid}
        except OSError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self._close()
        return None

    def _fork_run(self, run_id: str, instance_ref: str) -> tuple[int, Task | None]:
        farewell, say_farewell = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(farewell)
            os.close(say_farewell)
            raise
        if pid == 0:
            os.close(farewell)
            self._leave()

            def work() -> int:
                from agentmesh_dagster.orchestration.worker_internals import execute_run

                if not execute_run(instance_ref, run_id):
                    return 1
                with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
                    os.write(say_farewell, b".")
                os.close(say_farewell)
                return 0

            return 0, work
        os.close(say_farewell)
        self._runs[pid] = _Run(run_id=run_id, instance_ref=instance_ref, farewell=farewell)
        return pid, None

    def _leave(self) -> None:
        """In a forked process: gives up what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (self._wakeup, self._wake, *(run.farewell for run in self._runs.values())):
            os.close(descriptor)
        if self._connection is not None:
            self._connection.close()
        if self._successor is not None:
            self._successor.channel.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._successor is not None and pid == self._successor.pid:
                _say("the modules to preload could not be loaded: runs start without them")
                self._successor.channel.close()
                self._successor = None
                self._preload = ()
            self._reporters.discard(pid)
            run = self._runs.pop(pid, None)
            if not self._runs:
                self._idle_since = time.monotonic()
            if run is None:
                continue
            is_accounted_for = os.read(run.farewell, 1) != b""
            os.close(run.farewell)
            if not is_accounted_for:
                exit_code = os.waitstatus_to_exitcode(status)
                self._deaths.append(_Death(run=run, pid=pid, exit_code=exit_code))

    def _fork_reporter(self) -> Task | None:
        death = self._deaths[0]
        try:
            pid = os.fork()
        except OSError as error:
            _say(f"cannot report the end of run {death.run.run_id} yet: {error}")
            return None
        if pid != 0:
            del self._deaths[0]
            self._reporters.add(pid)
            return None
        self._leave()
        # What ended the worker, a Ctrl-C say, must not end the report of it; it takes a minute at most.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def report() -> int:
            from agentmesh_dagster.orchestration.worker_internals import report_dead_worker

            run = death.run
            done = report_dead_worker(run.instance_ref, run.run_id, death.pid, death.exit_code)
            return 0 if done else 1

        return report

    # The second stage

    def _shall_preload(self) -> bool:
        if not self._preload or self._successor is not None or self._connection is None:
            return False
        now = time.monotonic()
        is_idle = not self._runs and now - self._idle_since >= _IDLE_S
        return is_idle or now - self._began >= _BUSY_S

    def _fork_successor(self) -> Task | None:
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:
            _say(f"cannot preload {', '.join(self._preload)}: {error}; runs start without")
            self._preload = ()
            ours.close()
            theirs.close()
            return None
        if pid != 0:
            theirs.close()
            self._successor = _Successor(pid=pid, channel=ours)
            return None
        ours.close()
        connection, self._connection = self._connection, None
        assert connection is not None  # noqa: S101 - `_shall_preload` has seen it
        self._leave()

        def succeed() -> int:
            for name in self._preload:
                _load(name)
            _check_threads()
            theirs.sendall(b"!")
            # Its predecessor closes the channel when it has stopped to read from the connection.
            theirs.recv(1)
            theirs.close()
            return _serve(connection, ())

        return succeed

    def _hand_over(self, successor: _Successor) -> None:
        if self._connection is None or self._received or not successor.channel.recv(1):
            return
        self._connection.close()
        self._connection = None
        successor.channel.close()
        self._successor = None


def _modules() -> Iterator[str]:
    for package in map(import_module, _PACKAGES):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".migrations" not in found.name:  # programs of Alembic
                yield found.name


def _load(name: str) -> None:
    """Imports `module`; of `module:function` calls the function, too."""
    module, _, function = name.partition(":")
    loaded = import_module(module)
    if function:
        getattr(loaded, function)()


def _check_threads() -> None:
    """A fork copies no thread, but the locks that one holds."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        raise RuntimeError(f"a preloaded module left threads behind: {', '.join(others)}; do not preload it")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the launcher's console may be gone
        sys.stderr.write(f"agentmesh warm server (pid {os.getpid()}): {line}\n")
        sys.stderr.flush()


def _serve(connection: socket.socket, preload: tuple[str, ...]) -> int:
    task = _Server(connection, preload).serve()
    return 0 if task is None else task()


def main(arguments: list[str]) -> int:
    """Loads the libraries, and serves; a forked process comes back here with what it did."""
    connection = socket.socket(fileno=int(arguments[0]))
    try:
        from agentmesh_dagster.orchestration import worker_internals

        for name in (*worker_internals.LIBRARIES, *LIBRARIES, *_modules()):
            _load(name)
    except Exception:  # noqa: BLE001 - whatever an import raises: the launcher sees the end, the console why
        _say(f"cannot load the libraries of a run: {traceback.format_exc()}")
        return 1
    return _serve(connection, tuple(json.loads(arguments[1])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
