"""A time-out holds whatever is inside: the late result is never returned."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentmesh_dagster import deadline
from agentmesh_dagster.deadline import DeadlinePassed, within


async def at_once() -> str:
    return "early"


async def for_ever() -> str:
    await asyncio.sleep(3600)
    return "late"


def test_what_ends_in_time_is_returned_or_raised():
    async def fails() -> None:
        raise asyncio.TimeoutError("its own")

    assert asyncio.run(within(at_once(), 60)) == "early"
    assert asyncio.run(within(at_once(), None)) == "early"
    with pytest.raises(asyncio.TimeoutError, match="its own"):
        asyncio.run(within(fails(), 60))


def test_a_time_out_inside_another_does_not_swallow_it():
    async def body() -> str:
        # The loop is held for longer than the outer bound, and the inner coroutine ends in one step.
        time.sleep(0.03)  # noqa: ASYNC251 - that is the case
        await within(at_once(), 60)
        return await for_ever()

    with pytest.raises(DeadlinePassed):
        asyncio.run(within(body(), 0.01))


def test_what_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadline, "CLEANUP_S", 0.05)
    heard: list[str] = []

    async def body() -> str:
        try:
            await for_ever()
        except asyncio.CancelledError:
            heard.append("first")
        try:
            await for_ever()
        finally:
            heard.append("second")
        return "late"

    async def main() -> None:
        with pytest.raises(DeadlinePassed):
            await within(body(), 0.01)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert heard == ["first", "second"]


def test_a_late_result_is_dropped_and_a_late_error_too():
    async def returns_late(error: Exception | None) -> str:
        try:
            await for_ever()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return "late"

    for error in (None, ValueError("late")):
        with pytest.raises(DeadlinePassed):
            asyncio.run(within(returns_late(error), 0.01))


def test_a_caller_that_is_canceled_stays_canceled():
    async def main() -> None:
        task = asyncio.ensure_future(within(at_once(), 60))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # By now the coroutine has ended, and who waits for it has not been told.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
