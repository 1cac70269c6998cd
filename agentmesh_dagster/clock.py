"""The one source of time and ids, so that tests need no patching."""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """Tells the time and makes ids."""

    def now(self) -> datetime:
        """The present moment, in UTC with a zone."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that only grow, for durations."""
        ...

    def new_id(self) -> str:
        """A fresh id: a UUID as 36 characters."""
        ...


class SystemClock:
    """The machine's own clock, and random ids."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def new_id(self) -> str:
        return str(uuid.uuid4())
