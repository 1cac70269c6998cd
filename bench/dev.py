"""Webserver, daemon and code server in a process group of their own, as a person starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agentmesh_dagster.orchestration.webserver import WebserverError, query

START_S: Final = 180.0
STOP_S: Final = 20.0

_UP: Final = """{
  repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } }
  instance { daemonHealth { daemonStatus(daemonType: "SENSOR") { lastHeartbeatTime } } }
}"""
_LAUNCH: Final = """mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}"""
_AT_WORK: Final = """{
  runsOrError(filter: {statuses: [QUEUED, NOT_STARTED, STARTING, STARTED, CANCELING]}) { ... on Runs { count } }
}"""


def wait_until(what: str, look: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> None:
    """Returns once `look` says so.

    Raises:
        TimeoutError: It did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class DevServer:
    """A context manager: within it, runs can be launched, and the sensors tick.

    Args:
        command: What follows `python`; its webserver listens on `port`.
        port: On 127.0.0.1.
        cwd: Its working directory.
        env: Set besides this process's environment.
        log: The file that takes its output.
    """

    def __init__(
        self, command: Sequence[str], *, port: int, cwd: Path, env: Mapping[str, str], log: Path
    ) -> None:
        self._command = [sys.executable, *command]
        self._url = f"http://127.0.0.1:{port}"
        self._cwd = cwd
        self._env = {**os.environ, **env}
        self._log = log
        self._began = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._repository: dict[str, str] = {}

    def __enter__(self) -> DevServer:
        self._began = time.time()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(f"{self._url} is up; its log is {self._log}", self._is_up, START_S, 0.25)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def launch(self, job: str, run_config: Mapping[str, Any]) -> str:
        """Launches a run, as the button of the launchpad does; gives its id."""
        params = {"selector": {**self._repository, "jobName": job}, "runConfigData": run_config}
        answer = query(self._url, _LAUNCH, {"params": params}, timeout_s=60)["launchRun"]
        return answer["run"]["runId"]

    def is_quiet(self) -> bool:
        """Whether no run is queued or at work."""
        return query(self._url, _AT_WORK, timeout_s=60)["runsOrError"]["count"] == 0

    def _is_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{' '.join(self._command)} ended: {self._log.read_text()[-4000:]}")
        try:
            answer = query(self._url, _UP)
        except WebserverError:
            return False
        nodes = answer["repositoriesOrError"].get("nodes", [])
        beat = answer["instance"]["daemonHealth"]["daemonStatus"]["lastHeartbeatTime"]
        if not nodes or beat is None or beat < self._began:
            return False
        self._repository = {
            "repositoryName": nodes[0]["name"],
            "repositoryLocationName": nodes[0]["location"]["name"],
        }
        return True

    def _stop(self) -> None:
        assert self._process is not None
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_S)
        # Its children, should one have outlived it.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
