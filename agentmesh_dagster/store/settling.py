"""What the clock does to waits: timers that elapse, deadlines that pass, reminders, escalations."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, select

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.records import Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.decisions import timeout_answer
from agentmesh_dagster.specs.fittings import Fit, Fittings
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.run_rows import insert_events, lock_runs
from agentmesh_dagster.store.tables import waits
from agentmesh_dagster.store.wait_changes import close_siblings
from agentmesh_dagster.store.wait_rows import (
    add_notices,
    close_wait,
    load_votes,
    load_wait,
    save_wait,
    wait_event,
)

# The runs of one transaction are locked together: few enough that their workers do not notice.
_CHUNK: Final = 50
_DECIDES: Final = ("approve", "reject")


def settle_due(database: Database, clock: Clock, project: str, now: datetime, limit: int) -> list[Wait]:
    """Does what is due (see `Waits.settle_due`), a few runs at a time."""
    query = (
        select(waits.c.run_id)
        .where(waits.c.project == project, waits.c.next_at <= now)
        .order_by(waits.c.next_at, waits.c.id)
        .limit(limit)
    )
    with database.read() as connection:
        run_ids = list(dict.fromkeys(connection.execute(query).scalars()))
    settled: list[Wait] = []
    fittings = Fittings()
    for start in range(0, len(run_ids), _CHUNK):

        def settle(fit: Fit, chunk: list[str] = run_ids[start : start + _CHUNK]) -> list[Wait]:
            with database.write() as connection:
                return _settle_runs(connection, database, clock, project, chunk, now, fit)

        settled.extend(fittings.repeated(settle))
    return settled


def _settle_runs(
    connection: Connection,
    database: Database,
    clock: Clock,
    project: str,
    run_ids: list[str],
    now: datetime,
    fit: Fit,
) -> list[Wait]:
    lock_runs(connection, run_ids)
    due = (
        select(waits.c.id)
        .where(waits.c.project == project, waits.c.next_at <= now, waits.c.run_id.in_(run_ids))
        .order_by(waits.c.next_at, waits.c.id)
    )
    settled: list[Wait] = []
    for wait_id in connection.execute(due).scalars().all():
        # Read one by one, because a gate that expires may close the next one.
        wait = load_wait(connection, wait_id)
        if wait is not None and wait.status is WaitStatus.OPEN:
            settled.append(_settle(connection, database, clock, wait, now, fit))
    return settled


def _settle(
    connection: Connection, database: Database, clock: Clock, wait: Wait, now: datetime, fit: Fit
) -> Wait:
    if wait.deadline_at is not None and wait.deadline_at <= now:
        return _expire(connection, database, clock, wait, now, fit)
    if wait.remind_at is not None and wait.remind_at <= now:
        wait = replace(wait, remind_at=None)
        add_notices(connection, clock, wait, "reminder", now)
        insert_events(connection, database, [wait_event(clock, wait, "reminded", {})])
    if wait.escalate_at is not None and wait.escalate_at <= now:
        wait = _escalated(wait)
        add_notices(connection, clock, wait, "escalated", now)
        told = wait_event(clock, wait, "escalated", {"escalate_to": list(wait.escalate_to)})
        insert_events(connection, database, [told])
    save_wait(connection, wait)
    return wait


def _expire(
    connection: Connection, database: Database, clock: Clock, wait: Wait, now: datetime, fit: Fit
) -> Wait:
    is_timer = wait.kind is WaitKind.TIMER
    answer = timeout_answer(wait, now, load_votes(connection, wait.id), fit)
    closed = close_wait(
        connection,
        wait,
        status=WaitStatus.DECIDED if is_timer else WaitStatus.EXPIRED,
        closed_by="timer" if is_timer else "timeout",
        answer=answer,
        decided_at=now,
    )
    verb = "decided" if is_timer else "expired"
    told = wait_event(clock, closed, verb, {"decision": answer["decision"]})
    insert_events(connection, database, [told])
    if wait.on_timeout in _DECIDES:
        close_siblings(connection, database, clock, closed)
    return closed


def _escalated(wait: Wait) -> Wait:
    """Those it is escalated to may decide too; where anybody may, or in turn, they are no further entries."""
    if not wait.assignees or wait.ordered:
        return replace(wait, escalate_at=None)
    assignees = tuple(dict.fromkeys((*wait.assignees, *wait.escalate_to)))
    return replace(wait, escalate_at=None, assignees=assignees)
