"""Rows of runs, steps and events, as records and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, RowMapping, ScalarSelect, select

from agentmesh_dagster.errors import NotFound, RunRefused, StoreError
from agentmesh_dagster.records import Event, Run, RunSource, RunStatus, Step, StepStatus
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.inserts import CompiledInsert
from agentmesh_dagster.store.tables import dagster_runs, events, leases, runs

MAX_LOCKINGS: Final = 10
"""How often a transaction that found runs locked is begun anew."""

_RUN_FIELDS = tuple(field.name for field in fields(Run) if field.name != "dagster_run_ids")
_STEP_FIELDS = tuple(field.name for field in fields(Step))
OPEN_STATUSES = tuple(status.value for status in RunStatus if not status.is_final)


def run_record(row: RowMapping, dagster_run_ids: Sequence[str]) -> Run:
    """A row of `runs`, with its Dagster runs in the order in which they were bound."""
    values: dict[str, Any] = {name: row[name] for name in _RUN_FIELDS}
    values["source"] = RunSource(values["source"])
    values["status"] = RunStatus(values["status"])
    values["suspended_steps"] = tuple(values["suspended_steps"])
    return Run(dagster_run_ids=tuple(dagster_run_ids), **values)


def step_record(row: RowMapping) -> Step:
    """A row of `steps`."""
    values: dict[str, Any] = {name: row[name] for name in _STEP_FIELDS}
    values["status"] = StepStatus(values["status"])
    values["predecessor_keys"] = tuple(values["predecessor_keys"])
    return Step(**values)


def event_record(row: RowMapping) -> Event:
    """A row of `events`."""
    return Event(
        id=row["id"],
        at=row["at"],
        project=row["project"],
        run_id=row["run_id"],
        type=row["type"],
        step_key=row["step_key"],
        payload=row["payload"],
    )


_INSERT_RUN: Final = CompiledInsert(
    runs,
    [*_RUN_FIELDS, "created_at"],
    lambda insert: insert.on_conflict_do_nothing(index_elements=["id"]),
)
_INSERT_EVENT: Final = CompiledInsert(
    events,
    [column.name for column in events.columns if column.name != "seq"],
    lambda insert: insert.on_conflict_do_nothing(index_elements=["id"]),
)


def insert_run(connection: Connection, database: Database, run: Run, created_at: datetime) -> bool:
    """Adds the row of a run, without its Dagster runs.

    Returns:
        False where the run is stored already.
    """
    values: dict[str, Any] = {name: getattr(run, name) for name in _RUN_FIELDS}
    values.update(
        source=run.source.value,
        status=run.status.value,
        suspended_steps=list(run.suspended_steps),
        created_at=created_at,
    )
    return connection.execute(_INSERT_RUN.of(database), values).rowcount == 1


def load_runs(connection: Connection, rows: Sequence[RowMapping]) -> list[Run]:
    """The records of rows of `runs`."""
    bound = dagster_runs_of(connection, [row["id"] for row in rows])
    return [run_record(row, bound[row["id"]]) for row in rows]


def dagster_runs_of(connection: Connection, run_ids: Sequence[str]) -> dict[str, list[str]]:
    """The Dagster runs of runs, by run and in the order in which they were bound."""
    bound: dict[str, list[str]] = {run_id: [] for run_id in run_ids}
    for start in range(0, len(run_ids), 500):
        query = (
            select(dagster_runs.c.run_id, dagster_runs.c.dagster_run_id)
            .where(dagster_runs.c.run_id.in_(run_ids[start : start + 500]))
            .order_by(dagster_runs.c.run_id, dagster_runs.c.ordinal)
        )
        for run_id, dagster_run_id in connection.execute(query):
            bound[run_id].append(dagster_run_id)
    return bound


def load_run(connection: Connection, run_id: str) -> Run | None:
    """The run, or None where it is not stored."""
    row = connection.execute(select(runs).where(runs.c.id == run_id)).mappings().first()
    return None if row is None else load_runs(connection, [row])[0]


def insert_events(connection: Connection, database: Database, records: Sequence[Event]) -> None:
    """Appends events; one whose id is stored already is left out."""
    if records:
        rows = [
            {
                "id": event.id,
                "at": event.at,
                "project": event.project,
                "run_id": event.run_id,
                "step_key": event.step_key,
                "type": event.type,
                "payload": event.payload,
            }
            for event in records
        ]
        connection.execute(_INSERT_EVENT.of(database), rows)


def lock_runs(connection: Connection, run_ids: Collection[str]) -> set[str]:
    """Makes this transaction the only one that writes to these runs.

    So the events of a run get their numbers in the order in which they are committed, and its totals are right.

    Returns:
        Those that are stored.
    """
    query = (
        select(runs.c.id).where(runs.c.id.in_(run_ids)).order_by(runs.c.id).with_for_update(key_share=True)
    )
    return set(connection.execute(query).scalars())


class RunsBusy(Exception):
    """Further runs that a transaction needs are locked by others: it rolls back, and locks all of them first."""

    def __init__(self, run_ids: Collection[str]) -> None:
        super().__init__(f"runs are locked: {sorted(run_ids)}")
        self.run_ids = frozenset(run_ids)


def lock_at_once(connection: Connection, run_ids: Collection[str]) -> None:
    """Locks further runs in a transaction that has locked some, without waiting: so nobody waits in a circle.

    Raises:
        RunsBusy: Another transaction has locked one of them.
    """
    query = select(runs.c.id).where(runs.c.id.in_(run_ids)).with_for_update(key_share=True, skip_locked=True)
    if set(run_ids) - set(connection.execute(query).scalars()):
        raise RunsBusy(run_ids)


def still_busy(run_id: str) -> StoreError:
    """The error of a run whose end was not written, after `MAX_LOCKINGS` attempts to lock what waits for it."""
    return StoreError(
        f"the end of run {run_id!r} was not written: new runs that wait for it keep coming; try again",
        code="conflict",
    )


def require_runs(connection: Connection, run_ids: Collection[str]) -> None:
    """As `lock_runs`.

    Raises:
        NotFound: One of them is not stored (code `no-run`).
    """
    missing = set(run_ids) - lock_runs(connection, run_ids)
    if missing:
        raise NotFound(f"there is no run {min(missing)!r}", code="no-run")


def lease_holder(run_id: str | BindParameter[str]) -> ScalarSelect[str]:
    """Who holds the lease of a run, as an expression; NULL where nobody does. One look into an index."""
    return select(leases.c.holder).where(leases.c.run_id == run_id).scalar_subquery()


def require_holder(run_id: str, holder: str, found: str | None) -> None:
    """Refuses a write of a process that does not hold the run any more, in a transaction that has locked the run.

    A worker that was stopped for longer than its lease does not know that another one has taken the run over, be it to
    report it, and may write nothing more, though nobody holds the run by now. One whose lease has run out, and whose
    run nobody has taken, goes on.

    Args:
        run_id: The run.
        holder: Who writes.
        found: Who holds the lease; None where nobody does.

    Raises:
        RunRefused: It is another one, or nobody (code `lease-lost`).
    """
    if found != holder:
        raise RunRefused(
            f"this process does not hold run {run_id!r} any more: it was not heard of for longer than its lease, and "
            "another one has taken the run over or reported it; it writes nothing more",
            code="lease-lost",
        )
