"""Events of a run stored in groups: one connection and one commit for many, where Dagster takes one each."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agentmesh_dagster.orchestration.dagster_internals import (
    ASSET_CHECK_EVENTS,
    ASSET_EVENTS,
    EVENT_TYPE_TO_PIPELINE_RUN_STATUS,
    EventLogEntry,
    SqlEventLogStorage,
    SqlEventLogStorageTable,
    event_log_storage,
    event_row,
    is_groupable,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dagster import DagsterInstance

__all__ = ["EVENT_GROUP_MAX", "EVENT_GROUP_S", "grouped_event_writes"]

# An event reaches the database at most this many seconds after it happened.
EVENT_GROUP_S = 0.05
# Or as soon as this many wait.
EVENT_GROUP_MAX = 250

# These have effects beyond their row (asset tables, mirrored rows, run status): Dagster stores them itself.
_NOT_GROUPED = (
    frozenset(ASSET_EVENTS) | frozenset(ASSET_CHECK_EVENTS) | frozenset(EVENT_TYPE_TO_PIPELINE_RUN_STATUS)
)


@dataclass
class _Pending:
    entries: list[EventLogEntry] = field(default_factory=list["EventLogEntry"])
    rows: list[dict[str, Any]] = field(default_factory=list["dict[str, Any]"])


class _EventGroups:
    """Stores events in groups, in order, from one thread, with one commit a group."""

    def __init__(self, storage: SqlEventLogStorage) -> None:
        self._storage = storage
        self._store_event: Callable[[EventLogEntry], None] = storage.store_event
        self._run_connection: Callable[..., AbstractContextManager[Any]] = storage.run_connection
        self._pid = os.getpid()
        self._pending = _Pending()
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition(threading.Lock())
        self._writing = threading.Lock()
        self._writing_thread: int | None = None
        self._thread = threading.Thread(
            target=self._write_until_closed, name="agentmesh-event-writer", daemon=True
        )
        self._thread.start()

    def store_event(self, event: EventLogEntry) -> None:
        """Takes the place of the storage's own ``store_event``.

        Raises:
            Exception: An earlier event of the run could not be stored.
        """
        if os.getpid() != self._pid:
            self._store_event(event)
            return
        if self._failure is not None and event.is_dagster_event:
            raise self._failure
        if self._closed or (event.is_dagster_event and event.dagster_event_type in _NOT_GROUPED):
            self.flush()
            self._store_event(event)
            return
        row = event_row(self._storage, event)
        with self._changed:
            self._pending.entries.append(event)
            self._pending.rows.append(row)
            if len(self._pending.rows) in (1, EVENT_GROUP_MAX):
                self._changed.notify()

    @contextmanager
    def run_connection(self, run_id: str | None = None) -> Generator[Any]:
        """Takes the place of the storage's own ``run_connection``: a reader sees what was written before."""
        # While a group is stored event by event, the storage asks for connections from here, too.
        if os.getpid() == self._pid and self._writing_thread != threading.get_ident():
            self.flush()
        with self._run_connection(run_id) as connection:
            yield connection

    def flush(self) -> None:
        """Stores what waits. Returns after the commit."""
        with self._writing:
            with self._changed:
                group, self._pending = self._pending, _Pending()
            if group.rows:
                self._writing_thread = threading.get_ident()
                try:
                    self._write(group)
                finally:
                    self._writing_thread = None

    def close(self) -> None:
        """Stores what waits, and hands every later event to the storage itself.

        Raises:
            Exception: An event of the run could not be stored.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self.flush()
        if self._failure is not None:
            raise self._failure

    def _write_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending.rows)
                if self._closed:
                    return
                self._changed.wait_for(
                    lambda: self._closed or len(self._pending.rows) >= EVENT_GROUP_MAX, EVENT_GROUP_S
                )
            self.flush()

    def _write(self, group: _Pending) -> None:
        run_ids = {entry.run_id for entry in group.entries}
        try:
            for run_id in run_ids:
                rows = (
                    group.rows
                    if len(run_ids) == 1
                    else [row for row in group.rows if row["run_id"] == run_id]
                )
                with self._run_connection(run_id) as connection:
                    _insert(connection, rows)
                group.entries = [entry for entry in group.entries if entry.run_id != run_id]
        except Exception as error:  # noqa: BLE001  # whatever went wrong, each event gets its own chance
            sys.stderr.write(
                f"Could not store a group of {len(group.rows)} events, storing them one by one: {error}\n"
            )
            self._write_singly(group.entries)

    def _write_singly(self, entries: Sequence[EventLogEntry]) -> None:
        for entry in entries:
            try:
                self._store_event(entry)
            except Exception as error:  # noqa: BLE001  # one bad event takes no other along
                sys.stderr.write(f"Exception while writing logger call to event log: {error}\n")
                # As in Dagster: a log line of a user may get lost, an event that carries the run's state may
                # not.
                if entry.is_dagster_event:
                    self._failure = error


def _insert(connection: Any, rows: Sequence[dict[str, Any]]) -> None:
    """All rows or none. Dagster opens SQLite connections in a transaction, PostgreSQL's with autocommit."""
    if connection.in_transaction():
        connection.execute(SqlEventLogStorageTable.insert(), rows)
        return
    with connection.execution_options(isolation_level="READ COMMITTED").begin():
        connection.execute(SqlEventLogStorageTable.insert(), rows)


@contextmanager
def grouped_event_writes(instance: DagsterInstance) -> Generator[None]:
    """While this is open, events are stored in groups by a thread of its own.

    Dagster opens a connection and commits for each event. Here an event waits at most `EVENT_GROUP_S` seconds
    for others before all of them are committed together. Order is kept; a reader in this process sees every
    event; all are stored when the context closes, however it closes; after `kill -9` the last `EVENT_GROUP_S`
    seconds of events may be missing. Does nothing for storages other than Dagster's own SQLite and
    PostgreSQL, and nothing when it is already open.

    Args:
        instance: The instance of the run.

    Raises:
        Exception: An event could not be stored, neither in its group nor alone.
    """
    storage = event_log_storage(instance)
    if not is_groupable(storage) or "store_event" in vars(storage):
        yield
        return
    groups = _EventGroups(cast("SqlEventLogStorage", storage))
    patched = cast("Any", storage)
    patched.store_event = groups.store_event
    patched.run_connection = groups.run_connection
    try:
        yield
    finally:
        try:
            groups.close()
        finally:
            del patched.store_event
            del patched.run_connection
