"""Rows of walked levels that may wait for the next commit.

A walker writes many rows, and not each needs a commit of its own: it goes with the next one that does, in one
transaction and in order, or by itself a moment later. What only computes (`transform`, `branch`, skipped nodes) may be
lost, since it is computed again. The row of a node that called the world is committed before another node of its level
begins, and before its item, iteration or branch is done. A call of a model or a tool is committed at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.records import Entry

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.session import RunSession

MAX_ENTRIES: Final = 256
"""With so many rows a buffer is written at once."""
DELAY_S: Final = 0.05
"""How long a row waits at most."""

_log = logging.getLogger(__name__)


class RowBuffer:
    """The rows of one op that wait; all of the process's loop."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._entries: list[Entry] = []
        self._calls: set[str | None] = set()
        self._calls_in_writing: set[str | None] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._committed: asyncio.Future[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    def add(self, entry: Entry, *, is_call: bool = False) -> None:
        """Takes a row; the session knows it from now on.

        Args:
            entry: The row, with its events.
            is_call: Whether it ends a node that called the world.
        """
        self._session.remember_row(entry.step)
        self._entries.append(entry)
        if is_call:
            self._calls.add(entry.step.parent_key)
        if len(self._entries) >= MAX_ENTRIES:
            self._write()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._write)

    async def begin(self, entry: Entry) -> None:
        """Takes the row of a node that begins; what called the world before it in its level is committed first.

        Raises:
            StoreError: The database failed, now or with rows before.
            RunRefused: Another Dagster run has taken the run over (code `lease-lost`).
        """
        parent = entry.step.parent_key
        if parent in self._calls or parent in self._calls_in_writing:
            await self.write_with(entry)
        else:
            self.add(entry)

    async def write_with(self, entry: Entry) -> None:
        """Writes a row and all that wait, and returns after the commit.

        Raises:
            StoreError: The database failed.
            RunRefused: Another Dagster run has taken the run over (code `lease-lost`).
        """
        # Handed over before anything is awaited: the row of a step that is cut off here is written all the same.
        self._entries.append(entry)
        if self._committed is None:
            self._committed = asyncio.get_running_loop().create_future()
        committed = self._committed
        self._write()
        await asyncio.shield(committed)

    async def flush(self) -> None:
        """Writes all that wait, and waits for what is being written.

        Raises:
            StoreError: The database failed.
            RunRefused: Another Dagster run has taken the run over (code `lease-lost`).
        """
        while self._entries or self._writing is not None:
            self._write()
            if self._writing is not None:
                await asyncio.wait([self._writing])
            if self._error is not None:
                raise self._error

    def _write(self) -> None:
        """Begins to write, unless that is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None and self._entries:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        """Writes until nothing waits, one transaction after the other.

        One at a time: a row that is begun must not come after the one that ends it. What comes meanwhile shares the
        next transaction.
        """
        try:
            while self._entries:
                entries, self._entries = self._entries, []
                committed, self._committed = self._committed, None
                self._calls_in_writing, self._calls = self._calls, set()
                try:
                    await self._session.record(*entries)
                except Exception as error:  # noqa: BLE001 - it is raised where the rows are waited for
                    self._fail(entries, committed, error)
                    return
                self._error = None
                self._calls_in_writing = set()
                if committed is not None and not committed.done():
                    committed.set_result(None)
        finally:
            self._writing = None

    def _fail(self, entries: list[Entry], committed: asyncio.Future[None] | None, error: Exception) -> None:
        """Nothing of it was stored: the rows wait on, and the next write tries them again."""
        self._entries = [*entries, *self._entries]
        self._calls |= self._calls_in_writing
        self._calls_in_writing = set()
        self._error = error
        if committed is None:
            _log.warning("rows of run %s could not be written yet: %s", self._session.run.id, error)
        for future in (committed, self._committed):
            if future is not None and not future.done():
                future.set_exception(error)
                # Whoever waited for it may have been cut off.
                future.exception()
        self._committed = None
