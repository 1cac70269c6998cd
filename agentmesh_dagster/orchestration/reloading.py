"""Has the webserver load the code location anew, where a run waits for a job that it does not offer yet."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.constants import ENV_DAGSTER_URL
from agentmesh_dagster.orchestration.webserver import LOCATION, WebserverError, reload_code_location

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.host import AgentMesh

_PAUSE_S: Final = 60.0
"""How long a job that was asked for is not asked for again."""

_log = logging.getLogger(__name__)


def reloader_url() -> str | None:
    """The webserver that may be asked; None where the environment names none."""
    return os.environ.get(ENV_DAGSTER_URL) or None


class Reloader:
    """Asks in a thread of its own: the answer comes when a new code server runs, and this one is on its way out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def ask(self, jobs: Collection[str], location: str | None) -> bool:
        """Asks once for jobs that are missing, at most once a minute for each.

        Args:
            jobs: Their names.
            location: The code location's name in the workspace.

        Returns:
            Whether it asks now.
        """
        url, now = reloader_url(), time.monotonic()
        if url is None:
            return False
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return False
            if all(now - self._asked.get(job, -_PAUSE_S) < _PAUSE_S for job in jobs):
                return False
            self._asked.update(dict.fromkeys(jobs, now))
            self._thread = threading.Thread(
                target=_reload, args=(url, location or LOCATION), name="agentmesh-reload", daemon=True
            )
            self._thread.start()
        return True

    def wait(self, timeout_s: float) -> None:
        """Waits until the webserver has answered."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)


def _reload(url: str, location: str) -> None:
    try:
        reload_code_location(url, location)
    except WebserverError as error:
        _log.warning("the code location %s was not loaded anew: %s", location, error.message)


@cache
def reloader(_agentmesh: AgentMesh) -> Reloader:
    """The process's one for this project."""
    return Reloader()
