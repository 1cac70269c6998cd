"""What the `code` nodes of benchmarks call."""

from __future__ import annotations

import asyncio
from typing import Final

TEXT: Final = "0123456789abcdef" * 64
"""One kilobyte."""


def hand_on(value: int) -> dict[str, int]:
    """Does nothing, in a thread of its own, as all functions do that are not coroutines."""
    return {"value": value}


async def hand_on_async(value: int) -> dict[str, int]:
    """Does nothing, on the event loop."""
    return {"value": value}


async def kilobyte(value: int) -> str:
    """An output of 1 KB, another for each value."""
    return f"{value}{TEXT}"[:1024]


async def pause(seconds: float) -> dict[str, float]:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return {"seconds": seconds}
