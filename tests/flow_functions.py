"""Functions for workflows whose nodes run side by side, as `flow_functions:<name>`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from workflow_functions import note, notes

from agentmesh_dagster import StepContext

BOUND_S = 20.0

_inside: Counter[str] = Counter()
_most: Counter[str] = Counter()


async def side_by_side(step: StepContext, expected: int) -> int:
    """Stays until so many calls of a run have been inside at once; gives the most that ever were."""
    run_id = step.run_id
    _inside[run_id] += 1
    _most[run_id] = max(_most[run_id], _inside[run_id])
    deadline = time.monotonic() + BOUND_S
    while _most[run_id] < expected:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {_most[run_id]} of {expected} came together")
        await asyncio.sleep(0.005)
    # Time for one too many to come in.
    for _ in range(50):
        await asyncio.sleep(0)
    _inside[run_id] -= 1
    return _most[run_id]


async def hang_after(name: str, then: str) -> None:
    """Leaves a note, waits until it is cut off, and leaves a note of its clean-up, which takes a while."""
    note(name)
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        note(then)


async def when_noted(names: list[str], value: Any = None) -> Any:
    """Gives a value once all these notes are there."""
    deadline = time.monotonic() + BOUND_S
    while not set(names) <= set(notes()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {names} were noted")
        await asyncio.sleep(0.005)
    return value


def fail_at(name: str, item: Any, bad: list[Any]) -> Any:
    """Notes the item, and fails for some."""
    note(f"{name} {item}")
    if item in bad:
        raise ValueError(f"{item} is bad")
    return item


def fail_at_first(name: str, item: Any, bad: list[Any]) -> Any:
    """Notes the item, and fails for some when it sees them for the first time."""
    note(f"{name} {item}")
    if item in bad and notes().count(f"{name} {item}") == 1:
        raise ValueError(f"{item} is bad at first")
    return item


async def ask_in_between(step: StepContext, name: str) -> Any:
    """Notes each call, and suspends."""
    note(f"{name} called")
    return step.suspend({"of": name})


async def until_failed(step: StepContext, key: str, item: Any, bad: list[Any]) -> Any:
    """Fails for some items; for others waits until the step under a key has failed."""
    if item in bad:
        raise ValueError(f"{item} is bad")
    return await until(step, key, "failed", item)


async def until(step: StepContext, key: str, status: str, value: Any = None) -> Any:
    """Gives a value once another step of the run stands so."""
    deadline = time.monotonic() + BOUND_S
    while (row := step.session.known_row(key)) is None or row.status.value != status:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key} is not {status}")
        await asyncio.sleep(0.005)
    return value
