"""Named events on their way to waits: answered at once, or kept for the first wait that comes and that they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, text, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.constants import EVENT_RUN_ENDED, RESERVED_EVENTS
from agentmesh_dagster.errors import ApprovalError, NotFound, StoreError
from agentmesh_dagster.records import Delivery, Event, Json, RunStatus, Wait, WaitStatus
from agentmesh_dagster.specs.decisions import received_answer
from agentmesh_dagster.store.columns import to_text
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.judging import Pair, Unjudged
from agentmesh_dagster.store.run_rows import (
    insert_events,
    lease_holder,
    lock_at_once,
    lock_runs,
    require_holder,
)
from agentmesh_dagster.store.tables import (
    KEPT_EVENTS,
    OPEN_EVENT_WAITS,
    RETRIED_RUNS,
    events,
    inbox,
    runs,
    waits,
)
from agentmesh_dagster.store.wait_rows import close_wait, refuse_nul, wait_event, wait_record

MAX_KEPT: Final = 1_000
"""So many events may be kept for each name in a project."""

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
    token: str
    """What it is judged under; an id is the sender's, who may give it to several."""
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
    if name.startswith(RESERVED_EVENTS):
        raise ApprovalError(
            f"nobody may send the event {name!r}: events whose name begins with {RESERVED_EVENTS!r} are sent by "
            "AgentMesh itself; choose another name",
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
    receipt: Event | None = None,
    holder: str | None = None,
) -> Delivery:
    """Delivers an event (see `Waits.send_event`).

    Args:
        database: Where.
        clock: Gives the moment and the ids.
        project: The project's slug.
        name: The event's name.
        key: The correlation key.
        data: Any JSON.
        by: Who sends it.
        event_id: An id of the sender's own.
        keep_s: How long it is kept, in seconds.
        receipt: The event of a run that sends it: written in the same transaction. Where the run has one of that type
            for that step, nothing is sent.
        holder: Who sends it, and must hold the lease of the receipt's run; None: not asked.
    """
    check_names(name, key, event_id)
    refuse_nul({"sender": by}, "an event")
    to_text(data)
    if keep_s < 0:
        raise StoreError(f"an event cannot be kept for {keep_s} seconds", code="bad-event")
    # One id for all attempts: what was judged of the event is found under it.
    sent = _Sent(event_id or clock.new_id(), data, by, clock.now(), clock.new_id())
    for _ in range(_MAX_ATTEMPTS):
        try:
            with database.write() as connection:
                database.require_project(connection, project)
                found = _locked_waits(connection, database, project, name, key, receipt)
                if receipt is not None:
                    _require_sender(connection, receipt, holder)
                    if _is_sent(connection, receipt):
                        return Delivery(event_id=sent.id, is_duplicate=True)
                if found is None:
                    continue
                if event_id is not None and _is_duplicate(connection, project, event_id, sent.at):
                    return Delivery(event_id=event_id, is_duplicate=True)
                completed, refusals = _answer_all(connection, database, clock, found, sent)
                if completed or not refusals:
                    is_kept = not completed and keep_s > 0
                    if is_kept:
                        _require_space(connection, project, name, sent.at)
                    if is_kept or (event_id is not None and keep_s > 0):
                        _insert(connection, project, name, key, sent, keep_s, is_kept=is_kept)
                    if receipt is not None:
                        insert_events(connection, database, [receipt])
                    return Delivery(event_id=sent.id, completed=completed, is_kept=is_kept)
        except Unjudged as unjudged:
            unjudged.judge(database)
            continue
        # The refusals have been recorded; the sender hears the first.
        raise refusals[0]
    raise StoreError(
        f"the event {name!r} was not delivered: new waits for it keep coming; send it again", code="conflict"
    )


def _locked_waits(
    connection: Connection, database: Database, project: str, name: str, key: str, receipt: Event | None
) -> list[Wait] | None:
    """The open waits for an event, locked with their runs; None where one was opened meanwhile: to be tried again.

    The run that sends it, where one does, is locked with them.
    """
    run_ids = {wait.run_id for wait in _open_waits(connection, project, name, key)}
    sender = set[str]() if receipt is None else {receipt.run_id}
    lock_runs(connection, run_ids | sender)
    lock_events(connection, database)
    found = _open_waits(connection, project, name, key)
    # One that was opened between the two looks is in a run that is not locked here.
    return None if {wait.run_id for wait in found} - run_ids - sender else found


def _require_sender(connection: Connection, receipt: Event, holder: str | None) -> None:
    """Refuses the event of a run that is not stored, or whose lease somebody else holds; its row is locked."""
    stored = select(runs.c.id, lease_holder(receipt.run_id)).where(runs.c.id == receipt.run_id)
    row = connection.execute(stored).first()
    if row is None:
        raise NotFound(f"there is no run {receipt.run_id!r}", code="no-run")
    if holder is not None:
        require_holder(receipt.run_id, holder, row[1])


def _insert(
    connection: Connection,
    project: str,
    name: str,
    key: str,
    sent: _Sent,
    keep_s: float,
    *,
    is_kept: bool,
) -> None:
    """Keeps an event, or its id alone."""
    data = sent.data if is_kept else None
    connection.execute(
        insert(inbox).values(
            project=project,
            event_id=sent.id,
            name=name,
            key=key,
            by=sent.by,
            is_kept=is_kept,
            sent_at=sent.at,
            expires_at=sent.at + timedelta(seconds=keep_s),
            data=data,
        )
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
        Unjudged: Schemas or conditions of waits are to be asked; nothing was written here.
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

    Raises:
        Unjudged: Its schema or its condition is to be asked; nothing was written here.
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
    kept = [
        (row["seq"], _Sent(row["event_id"], row["data"], row["by"], row["sent_at"], f"kept/{row['seq']}"))
        for row in connection.execute(query).mappings()
    ]
    _require_judged(database, [(wait, sent) for _, sent in kept])
    for seq, sent in kept:
        answered, told = _answered(connection, database, clock, wait, sent, now)
        insert_events(connection, database, told)
        if isinstance(answered, Wait):
            connection.execute(update(inbox).where(inbox.c.seq == seq).values(is_kept=False, data=None))
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
    insert_events(connection, database, told)
    return answered if isinstance(answered, Wait) else wait


def _run_ended(run: RowMapping) -> _Sent:
    """The event that the end of a run sends: another one each time that it ends."""
    data = {
        "run_id": run["id"],
        "status": run["status"],
        "output": run["output"],
        "error": run["error"],
    }
    event_id = f"{EVENT_RUN_ENDED}/{run['id']}/{run['endings']}"
    return _Sent(event_id, data, f"run/{run['id']}", run["finished_at"], event_id, is_own=True)


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


def _is_sent(connection: Connection, receipt: Event) -> bool:
    """Whether a step of a run has sent its event, in this attempt or in one before."""
    query = select(events.c.seq).where(
        events.c.run_id == receipt.run_id,
        events.c.step_key == receipt.step_key,
        events.c.type == receipt.type,
    )
    return connection.execute(query.limit(1)).first() is not None


def _answer_all(
    connection: Connection, database: Database, clock: Clock, found: list[Wait], sent: _Sent
) -> tuple[tuple[str, ...], list[ApprovalError]]:
    """Answers waits: the ids of those that took the event, and why its data does not fit the others."""
    completed: list[str] = []
    refusals: list[ApprovalError] = []
    told: list[Event] = []
    live = [wait for wait in found if not _has_expired(wait, sent.at)]
    _require_judged(database, [(wait, sent) for wait in live])
    for wait in live:
        outcome, event = _answered(connection, database, clock, wait, sent, sent.at)
        told += event
        if isinstance(outcome, Wait):
            completed.append(wait.id)
        elif outcome.code == "form":
            refusals.append(outcome)
    insert_events(connection, database, told)
    return tuple(completed), refusals


def _is_free(wait: Wait, sent: _Sent) -> bool:
    """Whether an event fits whatever it holds; nobody's schema or condition is asked."""
    return sent.is_own and wait.form_schema is None and wait.data is None


def _require_judged(database: Database, pairs: Sequence[tuple[Wait, _Sent]]) -> None:
    """Asks for the judgements that are missing.

    Raises:
        Unjudged: Some are.
    """
    asked = [Pair(wait, sent.token, sent.data) for wait, sent in pairs if not _is_free(wait, sent)]
    missing = [pair for pair in asked if (pair.wait.id, pair.token) not in database.judgements]
    if missing:
        raise Unjudged(missing)


def _has_expired(wait: Wait, now: datetime) -> bool:
    """Whether the deadline of an open wait has passed; `settle_due` has only not written it yet."""
    return wait.deadline_at is not None and wait.deadline_at <= now


def _answered(
    connection: Connection, database: Database, clock: Clock, wait: Wait, sent: _Sent, now: datetime
) -> tuple[Wait | ApprovalError, list[Event]]:
    """Answers one wait, where the event fits, or says why it does not; and the events that tell which it was."""
    payload = {"event_id": sent.id, "name": wait.event_name, "key": wait.event_key, "by": sent.by}
    fitted = sent.data
    if not _is_free(wait, sent):
        _require_judged(database, [(wait, sent)])
        judged = database.judgements.pop((wait.id, sent.token))
        if judged.refusal is not None:
            refusal = judged.refusal
            # An event that the condition leaves to others is none of the run's.
            is_told = refusal.code != "other-event"
            return refusal, [
                wait_event(clock, wait, "refused", {**payload, "code": refusal.code})
            ] if is_told else []
        fitted = judged.data
    answered = close_wait(
        connection,
        wait,
        status=WaitStatus.DECIDED,
        closed_by="event",
        answer=received_answer(fitted, by=sent.by, at=sent.at),
        decided_at=now,
    )
    return answered, [wait_event(clock, wait, "decided", payload)]
