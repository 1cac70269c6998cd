"""Bounds on the time of what runs on the event loop.

In place of `asyncio.wait_for`: before Python 3.12 that one swallows a cancellation which comes when the coroutine
inside it has just ended. Where one stands inside another, and the loop was held for longer than the outer bound, the
outer time-out then has no effect, and the late result is returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, Final, TypeVar

__all__ = ["CLEANUP_S", "DeadlinePassed", "cut_off", "finishes", "within"]

T = TypeVar("T")

CLEANUP_S: Final = 5.0
"""How long the clean-up of what was cut off may take before it is left behind."""


class DeadlinePassed(Exception):
    """The time was over before the coroutine had ended."""


async def within(coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """Awaits a coroutine for a bounded time.

    When the time is over, or the caller is canceled, the coroutine is canceled and its clean-up awaited, for at most
    `CLEANUP_S`. What it still returns or raises is dropped.

    Args:
        coroutine: What to await. It is consumed, and runs as a task of its own.
        timeout_s: The bound, in seconds; None for none.

    Returns:
        What the coroutine returned.

    Raises:
        DeadlinePassed: The time was over.
        BaseException: Whatever the coroutine raised in time, `asyncio.TimeoutError` included.
    """
    if timeout_s is None:
        return await coroutine
    task = asyncio.ensure_future(coroutine)
    if not await finishes(task, timeout_s):
        raise DeadlinePassed
    return task.result()


async def finishes(task: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether a task ends in time; if not, and where the waiting is canceled, it is cut off."""
    # Who is not told of the end asks for no error, and asyncio would log it.
    task.add_done_callback(_take_error)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        return bool(done)
    finally:
        await cut_off([task])


async def cut_off(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancels those tasks that have not ended, and awaits their clean-up, for a while.

    A task that swallows its cancellation is canceled once more, and left behind.
    """
    left = [task for task in tasks if not task.done()]
    if not left:
        return
    for task in left:
        task.cancel()
    try:
        await asyncio.wait(left, timeout=CLEANUP_S)
    finally:
        for task in left:
            task.cancel()


def _take_error(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
