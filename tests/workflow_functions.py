"""Functions that workflows of the tests call, as `workflow_functions:<name>`."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from agentmesh_dagster import StepContext


def double(number: float) -> float:
    return number * 2


async def double_later(number: float) -> float:
    await asyncio.sleep(0.01)
    return number * 2


def fail(message: str = "no luck") -> None:
    raise ValueError(message)


def note(name: str, value: Any = None) -> Any:
    """Adds a line to the file that WORKFLOW_NOTES names, and gives the value back."""
    with Path(os.environ["WORKFLOW_NOTES"]).open("a", encoding="utf-8") as notes:
        notes.write(f"{name}\n")
    return value


def notes() -> list[str]:
    path = Path(os.environ["WORKFLOW_NOTES"])
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def fail_first(name: str, failures: int = 1) -> int:
    """Fails as often as told, and gives the number of the call."""
    path = Path(os.environ["WORKFLOW_NOTES"])
    with path.open("ab", buffering=0) as notes:
        notes.write(f"{name}\n".encode())
        own_end = notes.tell()
    # Of calls at once each has its own number.
    count = path.read_bytes()[:own_end].decode().splitlines().count(name)
    if count <= failures:
        raise RuntimeError(f"call {count} of {name} fails")
    return count


def process() -> dict[str, int]:
    """The process that it runs in, and the one that has forked it."""
    return {"own": os.getpid(), "parent": os.getppid()}


async def wait_for_note(name: str, then: str, timeout_s: float = 30.0) -> str:
    """Waits until another node has left a note, and leaves one."""
    note(f"{then} begins")
    deadline = time.monotonic() + timeout_s
    while name not in notes():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no note {name!r} within {timeout_s} s")
        await asyncio.sleep(0.01)
    return note(then, then)


async def hang(name: str) -> None:
    """Waits until it is cut off."""
    note(name)
    try:
        await asyncio.sleep(600)
    finally:
        note(f"{name} cleaned up")


async def hang_once(name: str) -> str:
    """Waits until it is cut off; answers from the second call on."""
    note(name)
    if notes().count(name) == 1:
        await asyncio.sleep(600)
    return "answered"


async def fail_when(name: str, message: str = "on purpose") -> None:
    """Fails once another node has left a note."""
    deadline = time.monotonic() + 30
    while name not in notes():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no note {name!r}")
        await asyncio.sleep(0.01)
    raise ValueError(message)


async def wait_for_status(run_id: str, status: str, database_url: str) -> str:
    """Waits until the run stands so in the database."""
    from agentmesh_dagster.orchestration.host import AgentMesh

    store = AgentMesh(database_url=database_url).store()
    deadline = time.monotonic() + 30
    while (await asyncio.to_thread(store.runs.get, run_id)).status.value != status:
        if time.monotonic() > deadline:
            raise TimeoutError(f"run {run_id} did not become {status}")
        await asyncio.sleep(0.01)
    return "seen"


def ask_twice(step: StepContext, subject: str) -> dict[str, Any]:
    """Suspends twice, under two labels; what it notes shows how often it was called."""
    note("called")
    first = step.suspend(
        {"subject": subject}, label="first", resume_schema={"type": "object", "required": ["name"]}
    )
    try:
        second = step.suspend({"after": first}, label="second")
    except Exception:
        note("swallowed")
        raise
    return {"first": first, "second": second}


def ask_once(step: StepContext, timeout: str | None = None) -> Any:
    return step.suspend({"question": "go on?"}, timeout=timeout)


async def ask_later(step: StepContext) -> Any:
    await asyncio.sleep(0)
    return {"got": step.suspend(label="later"), "key": step.step_key}


def bad_label(step: StepContext) -> Any:
    return step.suspend(label="x" * 200)
