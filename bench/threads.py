"""Whose work a run is: processor time by thread, since each part of a run has threads of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PARTS = {
    "MainThread": "Dagster's run thread: plan, event objects, event rows, run start and end",
    "agentmesh-step": "step threads: Dagster's step sequence, and our op around the node",
    "agentmesh-event": "event writer: Dagster's events into its database",
    "agentmesh-loop": "event loop: our runtime (run_node, expressions, routing)",
    "agentmesh-journal": "journal writer: rows and events into our database",
}
_OTHER = "other threads"


def cpu_by_part(work: Callable[[], object]) -> dict[str, float] | None:
    """Processor seconds of a call by part; None where the system has no clocks of threads (macOS, Windows)."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    with _ended_threads() as spent:
        before = _clocks()
        work()
        for thread, now_s in _clocks().items():
            # A thread that is new here counts whole; one that ended has counted itself.
            spent[_part(thread)] += now_s - before.get(thread, 0.0)
    return {part: spent[part] for part in (*_PARTS.values(), _OTHER)}


@contextmanager
def _ended_threads() -> Iterator[Counter[str]]:
    """Counts the time of threads that end meanwhile, when they end."""
    spent: Counter[str] = Counter()
    run = threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        try:
            run(thread)
        finally:
            spent[_part(thread)] += time.thread_time()
            _counted.add(thread)

    threading.Thread.run = counted
    try:
        yield spent
    finally:
        threading.Thread.run = run
        _counted.clear()


_counted: set[threading.Thread] = set()


def _clocks() -> dict[threading.Thread, float]:
    found: dict[threading.Thread, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None and thread not in _counted:
            found[thread] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _part(thread: threading.Thread) -> str:
    return next((part for start, part in _PARTS.items() if thread.name.startswith(start)), _OTHER)
