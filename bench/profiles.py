"""Where the threads of an inline run spend their processor time, function by function."""

from __future__ import annotations

import cProfile
import io
import pstats
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bench.inline import Document, prepared_walks

_LINES: Final = 25
_WRITER: Final = "agentmesh-journal"


def profile_of(workflow: Document, input: Document, runs: int) -> list[str]:
    """Lines for people. Profiling is slow: only the shares count.

    Args:
        workflow: Is published and run by itself.
        input: Of each run.
        runs: How many, after one that the event loop's thread does not count.
    """
    slug = workflow["slug"]
    # The clock of the thread: what it waits for, and what other threads and processes take, does not count.
    loop = cProfile.Profile(time.thread_time)
    with _writer_profiled() as writer, prepared_walks([workflow]) as walks:
        walks.run(slug, input)
        for _ in range(runs):
            walks.run(slug, input, profile=loop)
    return [
        *_said(f"{slug}, {runs} runs: the event loop's thread, while it walks", loop),
        *_said(f"{slug}, {runs + 1} runs: the journal's writer", writer),
    ]


@contextmanager
def _writer_profiled() -> Iterator[cProfile.Profile]:
    """Profiles the journal's thread, which begins and ends meanwhile."""
    profile = cProfile.Profile(time.thread_time)
    run = threading.Thread.run

    def profiled(self: threading.Thread) -> None:
        if not self.name.startswith(_WRITER):
            run(self)
            return
        profile.enable()
        try:
            run(self)
        finally:
            profile.disable()

    threading.Thread.run = profiled
    try:
        yield profile
    finally:
        threading.Thread.run = run


def _said(title: str, profile: cProfile.Profile) -> list[str]:
    said = io.StringIO()
    stats = pstats.Stats(profile, stream=said)
    stats.sort_stats("tottime").print_stats(_LINES)
    stats.sort_stats("cumulative").print_stats(_LINES)
    return ["", title, "=" * len(title), *said.getvalue().splitlines()]
