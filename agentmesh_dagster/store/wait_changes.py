"""What a run's own writes change in its waits: opened, taken up, superseded, closed with the run, open again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.records import RunStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.inbox import check_names, lock_events, take_kept
from agentmesh_dagster.store.run_rows import insert_events
from agentmesh_dagster.store.tables import notices, runs, waits
from agentmesh_dagster.store.wait_rows import (
    add_notices,
    close_wait,
    give_up_notices,
    insert_wait,
    save_wait,
    wait_event,
    wait_record,
)

_OVER: Final = (RunStatus.CANCELED.value, RunStatus.SUCCEEDED.value)


def open_waits(connection: Connection, database: Database, clock: Clock, opened: Sequence[Wait]) -> None:
    """Adds waits, each once, with their notices; an event that was kept for one answers it at once.

    A wait of a run that was canceled meanwhile is stored as closed with it.

    Args:
        connection: In a transaction that has locked the waits' runs.
        database: The connection's database.
        clock: Gives the moment and the ids.
        opened: Open waits.

    Raises:
        StoreError: A text cannot be stored (`nul-character`), a value is not JSON (`not-json`), or an event's name or
            key is none (`bad-event`).
    """
    now = clock.now()
    query = select(runs.c.id).where(runs.c.id.in_({wait.run_id for wait in opened}), runs.c.status.in_(_OVER))
    over = set(connection.execute(query).scalars())
    if any(wait.kind is WaitKind.EVENT for wait in opened):
        lock_events(connection, database)
    for wait in opened:
        if wait.kind is WaitKind.EVENT:
            check_names(wait.event_name, wait.event_key)
        is_over = wait.run_id in over
        stored = _closed_with_run(wait, now) if is_over else wait
        if not insert_wait(connection, database, stored):
            continue
        if wait.kind.is_approval:
            add_notices(connection, clock, wait, "opened", now)
        if is_over:
            give_up_notices(connection, [wait.id])
        elif wait.kind is WaitKind.EVENT:
            take_kept(connection, database, clock, wait)


def use_waits(connection: Connection, run_id: str, wait_ids: Sequence[str], now: datetime) -> None:
    """Says of waits that their answers are taken up, where they are closed and it was not said before."""
    connection.execute(
        update(waits)
        .where(
            waits.c.run_id == run_id,
            waits.c.id.in_(wait_ids),
            waits.c.status != WaitStatus.OPEN.value,
            waits.c.used_at.is_(None),
        )
        .values(used_at=now, ready_at=None)
    )


def supersede_waits(
    connection: Connection, database: Database, clock: Clock, run_id: str, wait_ids: Sequence[str]
) -> None:
    """Cancels waits of a run whose question no longer stands, where they are open."""
    query = select(waits).where(waits.c.id.in_(wait_ids))
    _cancel(connection, database, clock, _open_ones(connection, query, run_id), "superseded")


def close_siblings(connection: Connection, database: Database, clock: Clock, decided: Wait) -> None:
    """Cancels the other gates of a run that are open, where the one that was decided asks for it."""
    if decided.cancel_siblings:
        query = select(waits).where(waits.c.kind == WaitKind.HUMAN.value, waits.c.id != decided.id)
        _cancel(connection, database, clock, _open_ones(connection, query, decided.run_id), "sibling")


_CLOSE_OPEN: Final = (
    update(waits)
    .where(waits.c.run_id == bindparam("of"), waits.c.status == WaitStatus.OPEN.value)
    .values(status=WaitStatus.CANCELED.value, closed_by="run", decided_at=bindparam("at"), next_at=None)
)


def close_waits_of_run(connection: Connection, run_id: str, at: datetime) -> None:
    """Closes what is open in a run that is over."""
    closed = connection.execute(_CLOSE_OPEN, {"of": run_id, "at": at})
    if closed.rowcount:
        of_run = select(waits.c.id).where(waits.c.run_id == run_id, waits.c.closed_by == "run")
        connection.execute(
            update(notices)
            .where(notices.c.wait_id.in_(of_run), notices.c.next_at.is_not(None))
            .values(next_at=None)
        )


def reopen_waits(connection: Connection, database: Database, clock: Clock, run_id: str) -> None:
    """Opens again what was closed with a run that goes on after all, with the notices that were not sent."""
    now = clock.now()
    query = select(waits).where(waits.c.run_id == run_id, waits.c.closed_by == "run")
    found = [wait_record(row) for row in connection.execute(query.order_by(waits.c.id)).mappings()]
    if any(wait.kind is WaitKind.EVENT for wait in found):
        lock_events(connection, database)
    for closed in found:
        wait = replace(closed, status=WaitStatus.OPEN, closed_by="", decided_at=None)
        save_wait(connection, wait)
        connection.execute(
            update(notices)
            .where(notices.c.wait_id == wait.id, notices.c.sent_at.is_(None))
            .values(next_at=now)
        )
        if wait.kind is WaitKind.EVENT:
            take_kept(connection, database, clock, wait)


def _closed_with_run(wait: Wait, now: datetime) -> Wait:
    return replace(wait, status=WaitStatus.CANCELED, closed_by="run", decided_at=now)


def _open_ones(connection: Connection, query: Select[Any], run_id: str) -> list[Wait]:
    narrowed = query.where(waits.c.run_id == run_id, waits.c.status == WaitStatus.OPEN.value)
    return [wait_record(row) for row in connection.execute(narrowed.order_by(waits.c.id)).mappings()]


def _cancel(
    connection: Connection, database: Database, clock: Clock, found: Sequence[Wait], closed_by: str
) -> None:
    now = clock.now()
    for wait in found:
        close_wait(connection, wait, status=WaitStatus.CANCELED, closed_by=closed_by, decided_at=now)
    told = [wait_event(clock, wait, "canceled", {"closed_by": closed_by}) for wait in found]
    insert_events(connection, database, told)
