"""The launcher's side of a warm server: starts it, asks it for processes, starts another when it has died."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from typing import Any, Final

from agentmesh_dagster.errors import AgentMeshError

__all__ = ["LaunchFailed", "WarmServer"]

ANSWER_S: Final = 60.0
"""How long a server has for an answer; the first one includes its loading."""

# Servers outlive the objects that started them, until their runs are over; kept here to be waited for.
_started: list[subprocess.Popen[bytes]] = []


class LaunchFailed(AgentMeshError):
    """No process for a run could be started."""

    domain = "orchestration"
    category = "system"
    default_code = "launch-failed"


class WarmServer:
    """One warm server; safe to use from any thread.

    Args:
        executable: The Python that runs it, whose libraries the runs have.
        preload: What it loads beyond the libraries of every run: `module`, or `module:function` to call.
    """

    def __init__(self, executable: str, preload: tuple[str, ...]) -> None:
        self._executable = executable
        self._preload = preload
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def start_run(self, instance_ref: str, run_id: str) -> int:
        """Forks a process for a run, in a server that is started if need be.

        Returns:
            The number of the process.

        Raises:
            LaunchFailed: The server cannot be started, or cannot fork.
        """
        line = json.dumps({"run_id": run_id, "instance_ref": instance_ref}).encode() + b"\n"
        with self._lock:
            connection = self._connected()
            try:
                connection.sendall(line)
                answer = _read_line(connection)
            except ConnectionError:
                answer = b""
            except OSError as error:
                self._disconnect()
                raise self._failed(f"does not answer: {error}") from error
            if not answer.endswith(b"\n"):
                self._disconnect()
                raise self._failed("ended before it had started the run; its console output says why")
        said: dict[str, Any] = json.loads(answer)
        if "pid" not in said:
            raise self._failed(f"cannot fork: {said['error']}")
        return said["pid"]

    def close(self) -> None:
        """Lets the server end, when its runs are over."""
        with self._lock:
            self._disconnect()

    def _connected(self) -> socket.socket:
        if self._connection is not None and not _has_ended(self._connection):
            return self._connection
        self._disconnect()
        _started[:] = [process for process in _started if process.poll() is None]
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603 - the code location's own Python
                    [
                        self._executable,
                        "-m",
                        "agentmesh_dagster.orchestration.warm_server",
                        str(theirs.fileno()),
                        json.dumps(self._preload),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                raise self._failed(f"cannot be started: {error}") from error
        _started.append(process)
        ours.settimeout(ANSWER_S)
        self._connection = ours
        return ours

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failed(self, what: str) -> LaunchFailed:
        return LaunchFailed(
            f"the process that runs are forked from ({self._executable!r} -m "
            f"agentmesh_dagster.orchestration.warm_server) {what}"
        )


def _has_ended(connection: socket.socket) -> bool:
    """Whether the server is gone. Nothing else is to be read while no answer is awaited."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(ANSWER_S)
    return True


def _read_line(connection: socket.socket) -> bytes:
    """A line, or less where the other side has ended."""
    received = b""
    while not received.endswith(b"\n"):
        data = connection.recv(4096)
        if not data:
            break
        received += data
    return received
