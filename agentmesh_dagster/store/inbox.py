"""Named events on their way to waits: answered at once, or kept for the first wait that comes and that they fit."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, text, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.constants import EVENT_RUN_ENDED
from agentmesh_dagster.errors import ApprovalError, StoreError
from agentmesh_dagster.records import Delivery, Event, Json, RunStatus, Wait, WaitStatus
from agentmesh_dagster.specs.decisions import check_received, received_answer
from agentmesh_dagster.store.columns import to_text
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.run_rows import insert_events, lock_at_once, lock_runs
from agentmesh_dagster.store.tables import KEPT_EVENTS, OPEN_EVENT_WAITS, RETRIED_RUNS, inbox, runs, waits
from agentmesh_dagster.store.wait_rows import close_wait, refuse_nul, wait_event, wait_record

MAX_KEPT: Final = 1_000
"""So many events may be kept for each name in a project."""

RESERVED: Final = "agentmesh."
"""Events whose name begins so are sent by the store itself alone."""

# PostgreSQL's index entries hold 2.7 kB, and a character may take four bytes.
_MAX_LENGTHS: Final = {"name": 200, "key": 400, "id": 200}
# Any number that no other application locks by: "AgentEvt" read as bytes.
_EVENTS_LOCK: Final = 0x4167656E74457674
_MAX_ATTEMPTS: Final = 10
_FINAL: Final = tuple(status.value for status in RunStatus if status.is_final)


@dataclass(frozen=True, slots=True)
class _Sent:
    """An event as it was sent."""

    id: str
    data: Json
    by: str
    at: datetime
    is_own: bool = False
    """Whether the data comes from the journal, which holds some text that nobody may send."""


def lock_events(connection: Connection, database: Database) -> None:
    """Makes this transaction the only one that keeps events or opens waits for them, until it ends.

    Without it an event could miss the wait that is being opened, and that wait the event. One lock for all, and always
    taken after the runs are locked: so nobody waits in a circle.
    """
    if not database.is_sqlite:
        connection.execute(select(func.pg_advisory_xact_lock(_EVENTS_LOCK)))


def check_names(name: str, key: str, event_id: str | None = None) -> None:
    """Refuses what cannot be an event's name, key or id.

    Raises:
        StoreError: It is empty, too long (code `bad-event`), or has a NUL character (`nul-character`).
    """
    given = {"name": name, "key": key, "id": event_id or ""}
    refuse_nul(given, "an event")
    if not name.strip():
        raise StoreError("an event needs a name", code="bad-event")
    if event_id is not None and not event_id:
        raise StoreError("an event's id cannot be empty; leave it out where there is none", code="bad-event")
    for part, value in given.items():
        if len(value) > _MAX_LENGTHS[part]:
            raise StoreError(
                f"the {part} of an event has {len(value)} characters; at most {_MAX_LENGTHS[part]} are allowed",
                code="bad-event",
            )


def refuse_reserved(name: str) -> None:
    """Refuses the name of an event that nobody may send.

    Raises:
        ApprovalError: It begins as those that AgentMesh sends itself (code `reserved-event`).
    """
    if name.startswith(RESERVED):
        raise ApprovalError(
            f"nobody may send the event {name!r}: events whose name begins with {RESERVED!r} are sent by AgentMesh "
            "itself; choose another name",
            code="reserved-event",
        )


def send_event(
    database: Database,
    clock: Clock,
    project: str,
    name: str,
    key: str,
    data: Json,
    *,
    by: str,
    event_id: str | None,
    keep_s: float,
) -> Delivery:
    """Delivers an event (see `Waits.send_event`)."""
    check_names(name, key, event_id)
    refuse_nul({"sender": by}, "an event")
    to_text(data)
    if keep_s < 0:
        raise StoreError(f"an event cannot be kept for {keep_s} seconds", code="bad-event")
    for _ in range(_MAX_ATTEMPTS):
        with database.write() as connection:
            database.require_project(connection, project)
            now = clock.now()
            run_ids = {wait.run_id for wait in _open_waits(connection, project, name, key)}
            lock_runs(connection, run_ids)
            lock_events(connection, database)
            found = _open_waits(connection, project, name, key)
            if {wait.run_id for wait in found} - run_ids:
                # Opened between the two looks, in runs that are not locked here.
                continue
            event_id_kept = event_id or clock.new_id()
            if event_id is not None and _is_duplicate(connection, project, event_id, now):
                return Delivery(event_id=event_id, is_duplicate=True)
            sent = _Sent(event_id_kept, data, by, now)
            completed = _answer_all(connection, database, clock, found, sent)
            is_kept = not completed and keep_s > 0
            if is_kept:
                _require_space(connection, project, name, now)
            if is_kept or (event_id is not None and keep_s > 0):
                kept_data = data if is_kept else None
                connection.execute(
                    insert(inbox).values(
                        project=project,
                        event_id=event_id_kept,
                        name=name,
                        key=key,
                        by=by,
                        is_kept=is_kept,
                        sent_at=now,
                        expires_at=now + timedelta(seconds=keep_s),
                        data=kept_data,
                    )
                )
            return Delivery(event_id=event_id_kept, completed=completed, is_kept=is_kept)
    raise StoreError(
        f"the event {name!r} was not delivered: new waits for it keep coming; send it again", code="conflict"
    )


def send_run_ended(connection: Connection, database: Database, clock: Clock, run: RowMapping) -> None:
    """Answers all open waits for the end of a run that another run started.

    Nothing is kept for a wait that comes later: it finds the end in the run's row (`take_kept`), however long ago that
    was.

    Args:
        connection: In a transaction that has locked the run.
        database: The connection's database.
        clock: Gives the moment and the ids.
        run: The run's row, after its end.

    Raises:
        RunsBusy: Other transactions have locked runs that wait for it; nothing was written here.
    """
    lock_events(connection, database)
    sought: tuple[str, str, str] = (run["project"], EVENT_RUN_ENDED, run["id"])
    found = _open_waits(connection, *sought)
    if found:
        lock_at_once(connection, {wait.run_id for wait in found})
        # Again: one may have been closed before its run was locked. New ones are kept out by the lock of events.
        _answer_all(connection, database, clock, _open_waits(connection, *sought), _run_ended(run))


def take_kept(connection: Connection, database: Database, clock: Clock, wait: Wait) -> Wait:
    """Answers a wait that was just opened by the oldest event that was kept for it and that fits.

    A wait for the end of a run that another run started is answered by that run's row, where it has ended. One whose
    deadline has passed meanwhile, as that of a wait which is opened again may have, is left to it.

    Args:
        connection: In a transaction that has locked the wait's run, and the events.
        database: The connection's database.
        clock: Tells which events have expired.
        wait: The wait, stored.

    Returns:
        The wait as it stands then.
    """
    now = clock.now()
    if _has_expired(wait, now):
        return wait
    if wait.event_name == EVENT_RUN_ENDED:
        return _take_end(connection, database, clock, wait, now)
    query = (
        select(inbox)
        .where(
            inbox.c.project == wait.project,
            inbox.c.name == wait.event_name,
            inbox.c.key == wait.event_key,
            inbox.c.expires_at > now,
            text(KEPT_EVENTS),
        )
        .order_by(inbox.c.seq)
    )
    for row in connection.execute(query).mappings().all():
        sent = _Sent(row["event_id"], row["data"], row["by"], row["sent_at"])
        answered, told = _answered(connection, database, clock, wait, sent, now)
        insert_events(connection, database, [told])
        if answered is not None:
            connection.execute(
                update(inbox).where(inbox.c.seq == row["seq"]).values(is_kept=False, data=None)
            )
            return answered
    return wait


def _take_end(connection: Connection, database: Database, clock: Clock, wait: Wait, now: datetime) -> Wait:
    query = select(runs).where(
        runs.c.id == wait.event_key,
        runs.c.project == wait.project,
        runs.c.parent_run_id.is_not(None),
        runs.c.status.in_(_FINAL),
        # What is yet to be retried has not come to its end.
        text(f"NOT ({RETRIED_RUNS})"),
    )
    row = connection.execute(query).mappings().first()
    if row is None:
        return wait
    answered, told = _answered(connection, database, clock, wait, _run_ended(row), now)
    insert_events(connection, database, [told])
    return answered or wait


def _run_ended(run: RowMapping) -> _Sent:
    """The event that the end of a run sends: another one each time that it ends."""
    data = {
        "run_id": run["id"],
        "status": run["status"],
        "output": run["output"],
        "error": run["error"],
    }
    event_id = f"{EVENT_RUN_ENDED}/{run['id']}/{run['endings']}"
    return _Sent(event_id, data, f"run/{run['id']}", run["finished_at"], is_own=True)


def delete_expired(database: Database, project: str, now: datetime) -> None:
    """Forgets events whose time is over."""
    with database.write() as connection:
        lock_events(connection, database)
        connection.execute(delete(inbox).where(inbox.c.project == project, inbox.c.expires_at <= now))


def _open_waits(connection: Connection, project: str, name: str, key: str) -> list[Wait]:
    query = (
        select(waits)
        .where(
            waits.c.project == project,
            waits.c.event_name == name,
            waits.c.event_key == key,
            text(OPEN_EVENT_WAITS),
        )
        .order_by(waits.c.created_at, waits.c.id)
    )
    return [wait_record(row) for row in connection.execute(query).mappings()]


def _is_duplicate(connection: Connection, project: str, event_id: str, now: datetime) -> bool:
    same = (inbox.c.project == project, inbox.c.event_id == event_id)
    connection.execute(delete(inbox).where(*same, inbox.c.expires_at <= now))
    return connection.execute(select(inbox.c.seq).where(*same)).first() is not None


def _require_space(connection: Connection, project: str, name: str, now: datetime) -> None:
    kept = connection.execute(
        select(func.count()).where(
            inbox.c.project == project, inbox.c.name == name, inbox.c.expires_at > now, text(KEPT_EVENTS)
        )
    ).scalar_one()
    if kept >= MAX_KEPT:
        raise StoreError(
            f"{kept} events {name!r} are kept already, for waits that have not come; at most {MAX_KEPT} are. "
            "Check the name and the key, or wait until some have expired",
            code="events-full",
        )


def _answer_all(
    connection: Connection, database: Database, clock: Clock, found: list[Wait], sent: _Sent
) -> tuple[str, ...]:
    completed: list[str] = []
    told: list[Event] = []
    for wait in found:
        if _has_expired(wait, sent.at):
            continue
        answered, event = _answered(connection, database, clock, wait, sent, sent.at)
        told.append(event)
        if answered is not None:
            completed.append(wait.id)
    insert_events(connection, database, told)
    return tuple(completed)


def _has_expired(wait: Wait, now: datetime) -> bool:
    """Whether the deadline of an open wait has passed; `settle_due` has only not written it yet."""
    return wait.deadline_at is not None and wait.deadline_at <= now


def _answered(
    connection: Connection, database: Database, clock: Clock, wait: Wait, sent: _Sent, now: datetime
) -> tuple[Wait | None, Event]:
    """Answers one wait, where the data fits; and the event that tells which it was."""
    payload = {"event_id": sent.id, "name": wait.event_name, "key": wait.event_key, "by": sent.by}
    try:
        is_free = sent.is_own and wait.form_schema is None
        fitted = sent.data if is_free else check_received(wait, sent.data)
    except ApprovalError as refusal:
        return None, wait_event(clock, wait, "refused", {**payload, "code": refusal.code})
    answered = close_wait(
        connection,
        wait,
        status=WaitStatus.DECIDED,
        closed_by="event",
        answer=received_answer(fitted, by=sent.by, at=sent.at),
        decided_at=now,
    )
    return answered, wait_event(clock, wait, "decided", payload)
