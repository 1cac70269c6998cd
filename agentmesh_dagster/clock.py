"""The one source of time and ids, so that tests need no patching."""

from __future__ import annotations

import os
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


_IDS_AT_ONCE = 256
# Random bytes for ids to come: asking the system for those of each id costs more than the id.
_spare: list[bytes] = []


def _fresh_bytes() -> bytes:
    while True:
        try:
            return _spare.pop()
        except IndexError:
            found = os.urandom(16 * _IDS_AT_ONCE)
            _spare.extend(found[at : at + 16] for at in range(0, len(found), 16))


# A forked child must not make the ids that its parent makes.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare.clear)


class SystemClock:
    """The machine's own clock, and random ids."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def new_id(self) -> str:
        return str(uuid.UUID(bytes=_fresh_bytes(), version=4))
