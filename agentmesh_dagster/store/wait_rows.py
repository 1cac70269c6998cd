"""Rows of waits, votes and notices, as records and back; and the events that tell what became of a wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, insert, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Delegation, Event, Json, Notice, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store.columns import to_text
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import notices, votes, waits

_LISTS: Final = ("options", "assignees", "escalate_to")
_JSON: Final = (*_LISTS, "data", "form_schema", "prefill", "timeout_data", "notify", "answer")
_TEXTS: Final = (
    *("step_key", "label", "node_id", "title", "body", "launcher", "on_timeout", "binding"),
    *("event_name", "event_key", "closed_by"),
)
_FIELDS: Final = tuple(field.name for field in fields(Wait))
# What changes after a wait was opened.
_CHANGING: Final = (
    *("status", "closed_by", "assignees", "answer", "delegations"),
    *("remind_at", "escalate_at", "next_at", "decided_at", "ready_at", "used_at"),
)
_ANSWERED: Final = (WaitStatus.DECIDED, WaitStatus.EXPIRED)

_FAMILIES: Final = {
    WaitKind.HUMAN: "approval",
    WaitKind.TOOL: "approval",
    WaitKind.UNKNOWN: "approval",
    WaitKind.SUSPEND: "suspension",
    WaitKind.TIMER: "timer",
    WaitKind.EVENT: "event",
}


def wait_record(row: RowMapping) -> Wait:
    """A row of `waits`."""
    values: dict[str, Any] = {name: row[name] for name in _FIELDS}
    values["kind"] = WaitKind(values["kind"])
    values["status"] = WaitStatus(values["status"])
    values.update({name: tuple(values[name]) for name in _LISTS})
    values["delegations"] = tuple(_delegation_record(each) for each in values["delegations"] or ())
    return Wait(**values)


def vote_record(row: RowMapping) -> Vote:
    """A row of `votes`."""
    return Vote(
        by=row["by"],
        decision=row["decision"],
        data=row["data"],
        comment=row["comment"],
        at=row["at"],
        delegator=row["delegator"],
    )


def notice_record(row: RowMapping) -> Notice:
    """A row of `notices`."""
    return Notice(**{field.name: row[field.name] for field in fields(Notice)})


def load_wait(connection: Connection, wait_id: str) -> Wait | None:
    """The wait of exactly that id, whatever its project."""
    row = connection.execute(select(waits).where(waits.c.id == wait_id)).mappings().first()
    return None if row is None else wait_record(row)


def load_votes(connection: Connection, wait_id: str) -> list[Vote]:
    """The votes on an approval, the oldest first."""
    query = select(votes).where(votes.c.wait_id == wait_id).order_by(votes.c.seq)
    return [vote_record(row) for row in connection.execute(query).mappings()]


def next_moment(wait: Wait) -> datetime | None:
    """When a clock has something to do for a wait; None: never, as with closed ones."""
    if wait.status is not WaitStatus.OPEN:
        return None
    moments = (wait.deadline_at, wait.remind_at, wait.escalate_at)
    return min((moment for moment in moments if moment is not None), default=None)


def insert_wait(connection: Connection, database: Database, wait: Wait) -> bool:
    """Adds a wait; False where the run has one of that step key and label.

    Raises:
        StoreError: A text has a NUL character (code `nul-character`), or a value is not JSON (`not-json`).
    """
    refuse_nul({name: getattr(wait, name) for name in _TEXTS}, f"the wait of the step {wait.step_key!r}")
    for name in _JSON:
        to_text(getattr(wait, name))
    statement = database.insert(waits).values(**_values(wait)).on_conflict_do_nothing()
    return connection.execute(statement).rowcount == 1


def save_wait(connection: Connection, wait: Wait) -> None:
    """Writes what has changed in a wait since it was opened. The caller has locked its run."""
    values = _values(wait)
    changed = {name: values[name] for name in _CHANGING}
    connection.execute(update(waits).where(waits.c.id == wait.id).values(**changed))


def close_wait(connection: Connection, wait: Wait, **changes: Any) -> Wait:
    """Closes an open wait, and gives up the notices about it that are still on their way.

    Args:
        connection: In a transaction that has locked the wait's run.
        wait: As it stands.
        changes: `status`, `closed_by` and `decided_at`, and `answer` where there is one.
    """
    closed = replace(wait, **changes)
    save_wait(connection, closed)
    if wait.notify:
        give_up_notices(connection, [wait.id])
    return closed


def insert_vote(connection: Connection, wait_id: str, vote: Vote) -> None:
    """Keeps an accepted vote."""
    connection.execute(
        insert(votes).values(
            wait_id=wait_id,
            by=vote.by,
            at=vote.at,
            comment=vote.comment,
            decision=vote.decision,
            data=vote.data,
            delegator=vote.delegator,
        )
    )


def add_notices(connection: Connection, clock: Clock, wait: Wait, reason: str, now: datetime) -> None:
    """Adds a notice for each of the wait's channels, due at once."""
    rows = [
        {
            "id": clock.new_id(),
            "wait_id": wait.id,
            "project": wait.project,
            "reason": reason,
            "channel": channel,
            "attempts": 0,
            "next_at": now,
            "sent_at": None,
            "error": "",
        }
        for channel in wait.notify or ()
    ]
    if rows:
        connection.execute(insert(notices), rows)


def give_up_notices(connection: Connection, wait_ids: Collection[str]) -> None:
    """Nobody need be told any more: the waits are closed."""
    connection.execute(
        update(notices)
        .where(notices.c.wait_id.in_(wait_ids), notices.c.next_at.is_not(None))
        .values(next_at=None)
    )


def wait_event(clock: Clock, wait: Wait, verb: str, payload: Mapping[str, Json]) -> Event:
    """An event that tells what became of a wait: `approval.decided`, `timer.decided`, `event.refused`, ...

    Args:
        clock: Gives its time and id.
        wait: The wait.
        verb: `voted`, `delegated`, `decided`, `expired`, `canceled`, `refused`, `reminded` or `escalated`.
        payload: Further facts; never data that was given or refused.
    """
    family = _FAMILIES[wait.kind]
    label = {"label": wait.label} if wait.label else {}
    return Event(
        id=clock.new_id(),
        at=clock.now(),
        project=wait.project,
        run_id=wait.run_id,
        type=f"{family}.{verb}",
        step_key=wait.step_key,
        payload={"approval" if wait.kind.is_approval else "wait": wait.id, **label, **payload},
    )


def refuse_nul(texts: Mapping[str, str], where: str) -> None:
    """PostgreSQL's text cannot hold a NUL character, so no database gets one there.

    Raises:
        StoreError: One of the texts has one (code `nul-character`).
    """
    for name, value in texts.items():
        if "\0" in value:
            raise StoreError(f"the {name} of {where} has a NUL character", code="nul-character")


def _delegation_record(stored: Mapping[str, Any]) -> Delegation:
    return Delegation(
        by=stored["by"],
        to=stored["to"],
        comment=stored["comment"],
        at=datetime.fromisoformat(stored["at"]),
    )


def _values(wait: Wait) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(wait, name) for name in _FIELDS}
    values.update({name: list(values[name]) for name in _LISTS})
    delegations = [{**asdict(each), "at": each.at.isoformat()} for each in wait.delegations]
    values.update(
        delegations=delegations or None,
        kind=wait.kind.value,
        status=wait.status.value,
        next_at=next_moment(wait),
        ready_at=wait.decided_at if wait.status in _ANSWERED and wait.used_at is None else None,
    )
    return values
