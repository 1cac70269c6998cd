"""Named places in product code where a test may kill the process. Inert unless the environment arms one.

`AGENTMESH_FAULT=<point>#<n>` kills the process, as `kill -9` does, when it comes to that point for the n-th time.
`AGENTMESH_FAULT_LOG=<file>` writes down every point that is passed, so that a test can try each of them. (The idea of
named fault points in product code is DBOS's and CockroachDB's.)
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Final

from agentmesh_dagster.constants import ENV_FAULT, ENV_FAULT_LOG


class _Armed:
    """What the environment asks for, and how often each point was passed."""

    def __init__(self, fault: str, log: str) -> None:
        self._fault = fault
        self._log = log
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def passed(self, point: str) -> None:
        with self._lock:
            self._passed[point] += 1
            name = f"{point}#{self._passed[point]}"
            if self._log:
                with open(self._log, "a", encoding="utf-8") as log:  # noqa: PTH123 - as plain as can be
                    log.write(f"{name}\n")
        if name == self._fault:
            os.kill(os.getpid(), signal.SIGKILL)


def _armed() -> _Armed | None:
    fault, log = os.environ.get(ENV_FAULT, ""), os.environ.get(ENV_FAULT_LOG, "")
    return _Armed(fault, log) if fault or log else None


_state: Final = [_armed()]


def fault_point(point: str) -> None:
    """Passes a fault point.

    Args:
        point: Its name, such as `journal.record.node.running.before`; `AGENTMESH_FAULT_LOG` shows those of a run.
    """
    armed = _state[0]
    if armed is not None:
        armed.passed(point)


def arm_from_environment() -> None:
    """Reads the environment anew: for processes that were forked from one that had read it."""
    _state[0] = _armed()
