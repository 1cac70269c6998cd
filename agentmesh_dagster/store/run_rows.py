"""Rows of runs, steps and events, as records and back; and the one way in which a run changes its status."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from agentmesh_dagster.errors import NotFound, RunRefused
from agentmesh_dagster.records import Event, Json, Run, RunSource, RunStatus, Step, StepStatus
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.exact import exact_text, exact_values
from agentmesh_dagster.store.tables import dagster_runs, events, runs, steps

RUN_JSON = ("input", "request_context", "output", "error")
STEP_JSON = ("input", "output", "error", "routing_decision")

_RUN_FIELDS = tuple(field.name for field in fields(Run) if field.name != "dagster_run_ids")
_STEP_FIELDS = tuple(field.name for field in fields(Step))
OPEN_STATUSES = tuple(status.value for status in RunStatus if not status.is_final)


def _restored(row: RowMapping, names: Sequence[str]) -> dict[str, Any]:
    """The row's values, its JSON as it was written."""
    values = {name: row[name] for name in names}
    return values | exact_values(row["exact"])


def run_record(row: RowMapping, dagster_run_ids: Sequence[str]) -> Run:
    """A row of `runs`, with its Dagster runs in the order in which they were bound."""
    values = _restored(row, _RUN_FIELDS)
    values["source"] = RunSource(values["source"])
    values["status"] = RunStatus(values["status"])
    values["suspended_steps"] = tuple(values["suspended_steps"])
    return Run(dagster_run_ids=tuple(dagster_run_ids), **values)


def step_record(row: RowMapping) -> Step:
    """A row of `steps`."""
    values = _restored(row, _STEP_FIELDS)
    values["status"] = StepStatus(values["status"])
    values["predecessor_keys"] = tuple(values["predecessor_keys"])
    return Step(**values)


def event_record(row: RowMapping) -> Event:
    """A row of `events`."""
    exact = exact_values(row["exact"])
    return Event(
        id=row["id"],
        at=row["at"],
        project=row["project"],
        run_id=row["run_id"],
        type=row["type"],
        step_key=row["step_key"],
        payload=exact.get("payload", row["payload"]),
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
        exact=None if database.is_sqlite else exact_text({name: values[name] for name in RUN_JSON}),
    )
    result = connection.execute(
        database.insert(runs).values(**values).on_conflict_do_nothing(index_elements=["id"])
    )
    return result.rowcount == 1


def load_runs(connection: Connection, rows: Sequence[RowMapping]) -> list[Run]:
    """The records of rows of `runs`."""
    ids = [row["id"] for row in rows]
    bound: dict[str, list[str]] = {run_id: [] for run_id in ids}
    for start in range(0, len(ids), 500):
        query = (
            select(dagster_runs.c.run_id, dagster_runs.c.dagster_run_id)
            .where(dagster_runs.c.run_id.in_(ids[start : start + 500]))
            .order_by(dagster_runs.c.run_id, dagster_runs.c.ordinal)
        )
        for run_id, dagster_run_id in connection.execute(query):
            bound[run_id].append(dagster_run_id)
    return [run_record(row, bound[row["id"]]) for row in rows]


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
                "exact": None if database.is_sqlite else exact_text({"payload": event.payload}),
            }
            for event in records
        ]
        connection.execute(database.insert(events).on_conflict_do_nothing(index_elements=["id"]), rows)


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


def require_runs(connection: Connection, run_ids: Collection[str]) -> None:
    """As `lock_runs`.

    Raises:
        NotFound: One of them is not stored (code `no-run`).
    """
    missing = set(run_ids) - lock_runs(connection, run_ids)
    if missing:
        raise NotFound(f"there is no run {min(missing)!r}", code="no-run")


def move_run(
    connection: Connection,
    database: Database,
    run_id: str,
    status: RunStatus,
    *,
    expected: Collection[str],
    at: datetime,
    output: Json = None,
    error: Json = None,
    records: Sequence[Event] = (),
) -> bool:
    """Moves a run to a status by compare-and-set, with its events.

    A final status sets `finished_at`, `duration_ms`, output and error; `waiting` sets `suspended_at` and the keys of
    the steps that wait.

    Args:
        connection: In a transaction that writes.
        database: The connection's database.
        run_id: The run.
        status: Where it goes.
        expected: The statuses from which it may.
        at: When.
        output: Stored with a final status.
        error: Stored with a final status.
        records: Events of this change.

    Returns:
        Whether this call moved it; otherwise nothing was written.

    Raises:
        NotFound: The run is not stored.
    """
    row = (
        connection.execute(select(runs).where(runs.c.id == run_id).with_for_update(key_share=True))
        .mappings()
        .first()
    )
    if row is None:
        raise NotFound(f"there is no run {run_id!r}", code="no-run")
    if row["status"] not in expected:
        return False
    values: dict[str, Any] = {"status": status.value}
    if status.is_final:
        begun: datetime = row["started_at"] or row["queued_at"] or row["created_at"]
        values.update(
            finished_at=at,
            duration_ms=max(0, round((at - begun).total_seconds() * 1000)),
            output=output,
            error=error,
        )
        if not database.is_sqlite:
            kept = _restored(row, RUN_JSON)
            values["exact"] = exact_text({**kept, "output": output, "error": error})
    elif status is RunStatus.WAITING:
        waiting = select(steps.c.key).where(
            steps.c.run_id == run_id, steps.c.status == StepStatus.WAITING.value
        )
        values.update(
            suspended_at=at, suspended_steps=list(connection.execute(waiting.order_by(steps.c.key)).scalars())
        )
    elif status is RunStatus.RUNNING and row["started_at"] is None:
        values["started_at"] = at
    connection.execute(update(runs).where(runs.c.id == run_id).values(**values))
    insert_events(connection, database, records)
    return True


def bind_run(
    connection: Connection,
    database: Database,
    run: Run,
    dagster_run_id: str,
    now: datetime,
    records: Sequence[Event] = (),
) -> Run:
    """Stores a run, or finds it, and binds a Dagster run to it (see the journal's `bind_run`)."""
    is_new = insert_run(connection, database, run, now)
    row = (
        connection.execute(select(runs).where(runs.c.id == run.id).with_for_update(key_share=True))
        .mappings()
        .one()
    )
    owner = connection.execute(
        select(dagster_runs.c.run_id).where(dagster_runs.c.dagster_run_id == dagster_run_id)
    ).scalar()
    if owner is not None and owner != run.id:
        raise RunRefused(
            f"the Dagster run {dagster_run_id!r} works on the run {owner!r}, and cannot work on {run.id!r} too",
            code="dagster-run-bound",
        )
    if owner is None:
        ordinal = connection.execute(
            select(func.coalesce(func.max(dagster_runs.c.ordinal) + 1, 0)).where(
                dagster_runs.c.run_id == run.id
            )
        ).scalar_one()
        connection.execute(
            insert(dagster_runs).values(
                dagster_run_id=dagster_run_id, run_id=run.id, ordinal=ordinal, bound_at=now
            )
        )
        insert_events(connection, database, records)
    changed = {} if is_new else _reopened(row, run, now, by_further=owner is None)
    if changed:
        if not database.is_sqlite and "output" in changed:
            kept = _restored(row, RUN_JSON)
            changed["exact"] = exact_text({**kept, "output": None, "error": None})
        connection.execute(update(runs).where(runs.c.id == run.id).values(**changed))
    changed_row = connection.execute(select(runs).where(runs.c.id == run.id)).mappings().one()
    return load_runs(connection, [changed_row])[0]


def _reopened(row: RowMapping, run: Run, now: datetime, *, by_further: bool) -> dict[str, Any]:
    """What changes in a stored run when a Dagster run is bound to it: a further one, or one that is bound already."""
    status = RunStatus(row["status"])
    if status is RunStatus.PENDING:
        if run.status is RunStatus.PENDING:
            return {}
        return {"status": run.status.value, "started_at": run.started_at or now}
    if status is RunStatus.RUNNING or not by_further:
        return {}
    changed: dict[str, Any] = {"status": RunStatus.RUNNING.value, "resumed_at": now, "suspended_steps": []}
    if status.is_final:
        changed.update(finished_at=None, duration_ms=None, output=None, error=None)
    return changed
