"""Delivers the notices of approvals beside the gate sensor, which never waits for a receiver."""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.runtime.loop import run_on_loop

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.runtime.notify.deliver import Deliveries

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_log = logging.getLogger("agentmesh_dagster.notices")


def deliver_due(agentmesh: AgentMesh) -> Deliveries:
    """Delivers what is due now, one attempt each, and waits for the slowest receiver.

    Raises:
        StoreError: A row could not be read or written.
    """
    from agentmesh_dagster.runtime.notify.deliver import deliver

    store, environment = agentmesh.store(), agentmesh.host().environment
    return run_on_loop(deliver(agentmesh.project, store.notices, store.waits, environment, say=_say))


class Courier:
    """Delivers in a thread of its own, one round at a time."""

    def __init__(self, agentmesh: AgentMesh) -> None:
        self._agentmesh = agentmesh
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self) -> None:
        """Begins a round, unless one is on its way; what that one does not see is due still when it has ended."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            # A daemon: a code server that ends does not wait for a slow receiver.
            self._thread = threading.Thread(target=self._round, name="agentmesh-notices", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Waits until the round has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _round(self) -> None:
        try:
            deliver_due(self._agentmesh)
        except Exception:  # noqa: BLE001 - the notices stay due, and the next poll begins another round
            _log.exception("notices of approvals were not delivered")


@cache
def courier(agentmesh: AgentMesh) -> Courier:
    """The process's one for this project."""
    return Courier(agentmesh)


def _say(level: str, line: str) -> None:
    _log.log(_LEVELS.get(level, logging.INFO), "%s", line)
