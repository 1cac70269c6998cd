"""Group commit: one thread per process writes what many coroutines ask for, a group at a time, in one transaction."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.failures import store_error
from agentmesh_dagster.store.run_rows import lock_runs

T = TypeVar("T")
P = TypeVar("P")

MAX_GROUP: Final = 256
"""At most so many writes share a commit, so that the first of them does not wait for ever."""


class _Item(NamedTuple):
    """One write, and the coroutine that waits for it."""

    run_ids: Collection[str]
    write: Callable[..., Any]
    """Takes the connection; where there are parts, those too."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    parts: Sequence[Any] | None = None
    """Of a write that may be done together with its neighbours."""
    holder: str | None = None
    """Who writes the parts."""


class _Outcome(NamedTuple):
    """How a write ended."""

    item: _Item
    result: Any = None
    error: Exception | None = None


class GroupWriter:
    """Writes in groups on a thread and a connection of its own; both are made at the first write."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._committing = False
        self._reset()

    def _reset(self) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def submit(self, run_ids: Collection[str], write: Callable[[Connection], T]) -> T:
        """Has `write` called in a transaction, and returns its result after the commit.

        Args:
            run_ids: The runs that it writes to: they are locked before.
            write: May be called again in a further transaction when the first one was rolled back.

        Raises:
            StoreError: The database failed, or the store is closed; nothing was written.
        """
        loop = asyncio.get_running_loop()
        return cast("T", await self._put(_Item(run_ids, write, loop, loop.create_future())))

    async def submit_parts(
        self,
        run_id: str,
        parts: Sequence[P],
        write: Callable[[Connection, Sequence[P], str | None], None],
        holder: str | None,
    ) -> None:
        """As `submit`, for writes of one run that cost less together.

        Neighbours in a group that say the same `write`, run and holder become one call of it, with the parts of all in
        order.
        """
        loop = asyncio.get_running_loop()
        await self._put(_Item((run_id,), write, loop, loop.create_future(), parts, holder))

    def close(self) -> None:
        """Writes what was asked for until now, and ends the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join()
        self._refuse_rest()

    def leave_to_parent(self) -> object:
        """In a forked child: starts anew, and returns what must not be garbage collected."""
        left = (self._connection, self._queue)
        self._connection = None
        self._reset()
        return left

    def _put(self, item: _Item) -> asyncio.Future[Any]:
        if self._thread is None:
            self._start()
        self._queue.put(item)
        if self._closed:
            # The thread may be gone already: whoever finds the item first answers it.
            self._refuse_rest()
        return item.future

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="agentmesh-journal", daemon=True)
                self._thread.start()

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                _deliver([_Outcome(item, error=StoreError("the store is closed", code="closed"))])

    def _run(self) -> None:
        while True:
            group: list[_Item] = []
            item = self._queue.get()
            while item is not None:
                group.append(item)
                if len(group) == MAX_GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if group:
                _deliver(self._outcomes(group))
            if item is None:
                self._drop_connection()
                return

    def _outcomes(self, group: list[_Item]) -> list[_Outcome]:
        try:
            return self._write_together(group)
        except StoreError as error:
            if error.code == "unreachable":
                return self._after_outage(group, error)
            return self._one_by_one(group, error)
        except Exception as error:  # noqa: BLE001 - it belongs to a coroutine; here it would end the thread for all
            return self._one_by_one(group, error)

    def _after_outage(self, group: list[_Item], error: StoreError) -> list[_Outcome]:
        """A server that was restarted closed this connection: a new one is tried once.

        Not after a commit was sent: nobody knows then whether it was done, and the callers decide.
        """
        if not self._committing:
            try:
                return self._write_together(group)
            except StoreError as again:
                if again.code != "unreachable":
                    return self._one_by_one(group, again)
                error = again
            except Exception as again:  # noqa: BLE001 - likewise
                return self._one_by_one(group, again)
        return [_Outcome(item, error=error) for item in group]

    def _one_by_one(self, group: list[_Item], error: Exception) -> list[_Outcome]:
        """One write of the group failed, and the transaction with it: each gets its own."""
        if len(group) == 1:
            return [_Outcome(group[0], error=error)]
        return [outcome for item in group for outcome in self._outcomes([item])]

    def _write_together(self, group: list[_Item]) -> list[_Outcome]:
        self._committing = False
        try:
            connection = self._connection
            if connection is None:
                connection = self._connection = self._database.connect_for_writes()
            with connection.begin():
                if not self._database.is_sqlite:
                    # In order of their ids, all at once: two processes never wait for each other.
                    lock_runs(connection, {run_id for item in group for run_id in item.run_ids})
                    group = sorted(group, key=lambda item: min(item.run_ids, default=""))
                outcomes = _write_each(connection, group)
                self._committing = True
            return outcomes
        except self._database.errors as error:
            self._drop_connection()
            raise store_error(error, self._database.url) from error

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except SQLAlchemyError:
                # It was broken, which is why it is dropped: the error that showed it is on its way to the callers.
                connection.invalidate()


def _joint(item: _Item) -> object:
    """What neighbours must have in common to be written by one call; None: nothing does."""
    return None if item.parts is None else (item.write, item.run_ids, item.holder)


def _write_each(connection: Connection, group: list[_Item]) -> list[_Outcome]:
    outcomes: list[_Outcome] = []
    for joint, neighbours in groupby(group, key=_joint):
        if joint is None:
            outcomes += [_Outcome(item, item.write(connection)) for item in neighbours]
        else:
            items = list(neighbours)
            parts = [part for item in items for part in item.parts or ()]
            items[0].write(connection, parts, items[0].holder)
            outcomes += [_Outcome(item) for item in items]
    return outcomes


def _deliver(outcomes: list[_Outcome]) -> None:
    """Hands the outcomes to the loops that wait for them, with one wake-up for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.item.loop, []).append(outcome)
    for loop, its_outcomes in by_loop.items():
        # A loop that was closed refuses: nobody waits there any more.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, its_outcomes)


def _resolve(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        future = outcome.item.future
        if future.done():  # its coroutine was canceled
            continue
        if outcome.error is not None:
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome.result)
