"""Taking times: in this process or of another one, in turns, so that a busy machine disturbs both sides alike."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.sizes import sized


@dataclass(frozen=True)
class Times:
    """One measurement: the clock on the wall, and the processor time of all threads and child processes."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Spread:
    """Some measurements of one thing, in one unit."""

    median: float
    low: float
    high: float
    count: int
    p95: float | None = None
    """The least value that 95% of them do not exceed; None where it was not asked for."""

    @staticmethod
    def of(values: Sequence[float], *, with_p95: bool = False) -> Spread:
        """The spread of at least one value."""
        p95 = sorted(values)[math.ceil(0.95 * len(values)) - 1] if with_p95 else None
        return Spread(median(values), min(values), max(values), len(values), p95)


def time_here(work: Callable[[], object]) -> Times:
    """The times of a call in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def time_process(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Times:
    """The times of a fresh Python process, from its start to its end.

    Args:
        command: What follows `python`.
        cwd: Its working directory.
        env: Set besides this process's environment.

    Raises:
        RuntimeError: It failed; what it wrote to stderr is in the message.
    """
    wall = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"python {' '.join(command)} ended with {process.returncode}:\n{said[-4000:]}")
    return Times(time.perf_counter() - wall, usage.ru_utime + usage.ru_stime)


def in_turns(
    ours: Callable[[], Times], baseline: Callable[[], Times], repetitions: int
) -> tuple[list[Times], list[Times]]:
    """Both in turns, as often as asked, after one round of each that does not count.

    Who goes first changes from round to round, so that neither has the other's leavings to clean up.
    """
    for _ in range(sized(1, 0)):
        ours()
        baseline()
    found: tuple[list[Times], list[Times]] = ([], [])
    for number in range(repetitions):
        order = ((0, ours), (1, baseline)) if number % 2 else ((1, baseline), (0, ours))
        for side, measurement in order:
            found[side].append(measurement())
    return found
