"""Which process works on a run: enough to see, from any other process, whether that one still lives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import dagster as dg

__all__ = ["TAG_WORKER", "WorkerIdentity", "is_worker_dead"]

TAG_WORKER: Final = ".dagster/agentmesh_worker"
"""Run tag with the identity as JSON. Tags with this prefix are hidden in Dagster's UI."""
_STARTED_FIELD: Final = 19
"""Place of `starttime` in /proc/PID/stat, counted from the field after the command's name (see proc(5))."""
_ZOMBIE: Final = "Z"
"""The state of a process that has ended, and whose parent has not asked for its exit code."""


@dataclass(frozen=True, kw_only=True)
class WorkerIdentity:
    """A process, told apart from a later one that got the same number."""

    run_id: str
    """The Dagster run it works on. A re-execution copies its parent's tags, and has no worker yet."""
    machine: str
    """Host, boot and process namespace: numbers of processes mean something only there."""
    pid: int
    started: str
    """When it started, in the machine's own words."""

    @staticmethod
    def of_this_process(run_id: str) -> WorkerIdentity:
        pid = os.getpid()
        return WorkerIdentity(run_id=run_id, machine=_machine(), pid=pid, started=_started(pid) or "")

    @staticmethod
    def of_run(run_id: str, tags: Mapping[str, str]) -> WorkerIdentity | None:
        """The worker that a Dagster run's tags name; None where none has begun."""
        if TAG_WORKER not in tags:
            return None
        found = WorkerIdentity(**json.loads(tags[TAG_WORKER]))
        return found if found.run_id == run_id else None

    @staticmethod
    def of_command() -> dict[str, str]:
        """The tags of a Dagster run that this process, a command, is about to execute itself."""
        # The run has no id yet. Who copies its tags is launched, and `of_run` finds no worker in them.
        return WorkerIdentity.of_this_process("").to_tags()

    @staticmethod
    def of_command_run(tags: Mapping[str, str]) -> WorkerIdentity | None:
        """The command that executes a Dagster run which nobody launched; None where the tags name none."""
        return WorkerIdentity.of_run("", tags)

    def to_tags(self) -> dict[str, str]:
        return {TAG_WORKER: json.dumps(asdict(self))}

    def is_alive(self) -> bool | None:
        """Whether the process lives; None where it is on another machine, and so cannot be seen."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        started = _started(self.pid)
        return started is None or started == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.partition('/')[0]}"


def is_worker_dead(dagster_run: dg.DagsterRun) -> bool:
    """Whether a Dagster run's worker is known to be dead; not, where it has none yet, or cannot be seen from here."""
    worker = WorkerIdentity.of_run(dagster_run.run_id, dagster_run.tags)
    return worker is not None and worker.is_alive() is False


def _machine() -> str:
    parts = [socket.gethostname()]
    try:
        # Containers of one host share the boot, and may be given one name.
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - the target is no path
    except OSError:
        pass
    return "/".join(parts)


def _started(pid: int) -> str | None:
    """When a process started, in a word of its own if it has ended; None where nobody says."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _started_by_ps(pid)
    fields = stat.rpartition(")")[2].split()
    return _ZOMBIE if fields[0] == _ZOMBIE else fields[_STARTED_FIELD]


def _started_by_ps(pid: int) -> str | None:
    """Where there is no /proc, as on macOS."""
    try:
        said = subprocess.run(  # noqa: S603 - a number is all that varies
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)],  # noqa: S607 - wherever the system has it
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    state, _, started = said.stdout.strip().partition(" ")
    return _ZOMBIE if state.startswith(_ZOMBIE) else started.strip() or None
