"""How a run changes: the one way in which it gets another status, and what a further Dagster run does to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, func, insert, or_, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound, RunRefused
from agentmesh_dagster.records import Claim, Event, Json, Lease, Run, RunStatus, StepStatus
from agentmesh_dagster.store.claims import bind_claim, give_back
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.exact import exact_text
from agentmesh_dagster.store.run_rows import (
    RUN_JSON,
    insert_events,
    insert_run,
    last_bound,
    load_runs,
    require_last,
    restored,
)
from agentmesh_dagster.store.tables import dagster_runs, leases, runs, steps
from agentmesh_dagster.store.wait_changes import close_waits_of_run, reopen_waits

_ENDS_WAITS: Final = (RunStatus.CANCELED, RunStatus.SUCCEEDED)
# A further Dagster run that comes to such a run without a claim is a retry that Dagster made.
_CUT_OFF: Final = (RunStatus.FAILED.value, RunStatus.RUNNING.value)


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
    by: str | None = None,
) -> bool:
    """Moves a run to a status by compare-and-set, with its events.

    A final status sets `finished_at`, `duration_ms`, output and error; `waiting` sets `suspended_at` and the keys of
    the steps that wait. What is open in a run that succeeded or was canceled is closed with it; the waits of a failed
    run stay open.

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
        by: The Dagster run that moves it; None: not asked.

    Returns:
        Whether this call moved it; otherwise nothing was written.

    Raises:
        NotFound: The run is not stored.
        RunRefused: A later Dagster run is bound to the run (code `lease-lost`).
    """
    row = (
        connection.execute(select(runs).where(runs.c.id == run_id).with_for_update(key_share=True))
        .mappings()
        .first()
    )
    if row is None:
        raise NotFound(f"there is no run {run_id!r}", code="no-run")
    if by is not None:
        require_last(run_id, by, connection.execute(select(last_bound(run_id))).scalar())
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
            kept = restored(row, RUN_JSON)
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
    if status is RunStatus.CANCELED and row["claim_id"] is not None:
        # A Dagster run on its way to continue it comes to nothing.
        give_back(connection, row["claim_id"])
        values.update(claim_id=None, claimed_at=None, claim_misses=0)
    connection.execute(update(runs).where(runs.c.id == run_id).values(**values))
    if status in _ENDS_WAITS:
        close_waits_of_run(connection, run_id, at)
    insert_events(connection, database, records)
    return True


def bind_run(
    connection: Connection,
    database: Database,
    clock: Clock,
    run: Run,
    dagster_run_id: str,
    records: Sequence[Event] = (),
    claim_id: str | None = None,
) -> Run:
    """Stores a run, or finds it, and binds a Dagster run to it (see the journal's `bind_run`)."""
    now = clock.now()
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
    claim = None
    if claim_id is not None:
        claim = bind_claim(connection, row, claim_id, dagster_run_id, is_bound=owner is not None)
    changed: dict[str, Any] = {}
    if owner is None:
        _add_dagster_run(connection, run.id, dagster_run_id, now)
        insert_events(connection, database, records)
    if not is_new:
        changed = _reopened(row, run, now, by_further=owner is None)
        if owner is None:
            changed.update(_continued(connection, row, claim))
    if changed:
        if not database.is_sqlite and "output" in changed:
            kept = restored(row, RUN_JSON)
            changed["exact"] = exact_text({**kept, "output": None, "error": None})
        connection.execute(update(runs).where(runs.c.id == run.id).values(**changed))
        if row["status"] == RunStatus.CANCELED.value and "status" in changed:
            reopen_waits(connection, database, clock, run.id)
    changed_row = connection.execute(select(runs).where(runs.c.id == run.id)).mappings().one()
    return load_runs(connection, [changed_row])[0]


def _add_dagster_run(connection: Connection, run_id: str, dagster_run_id: str, now: datetime) -> None:
    ordinal = connection.execute(
        select(func.coalesce(func.max(dagster_runs.c.ordinal) + 1, 0)).where(dagster_runs.c.run_id == run_id)
    ).scalar_one()
    connection.execute(
        insert(dagster_runs).values(
            dagster_run_id=dagster_run_id, run_id=run_id, ordinal=ordinal, bound_at=now
        )
    )


def _continued(connection: Connection, row: RowMapping, claim: Claim | None) -> dict[str, Any]:
    """What a further Dagster run changes in a run's claim and its retries."""
    if claim is None:
        if row["claim_id"] is not None:
            give_back(connection, row["claim_id"])
        is_retry = row["status"] in _CUT_OFF
    else:
        is_retry = claim.reason == "retry"
    return {
        "claim_id": None,
        "claimed_at": None,
        "claim_misses": 0,
        "by_claim": claim is not None,
        "retries_left": max(0, row["retries_left"] - is_retry),
    }


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


def take_lease(connection: Connection, database: Database, lease: Lease, now: datetime) -> bool:
    """Takes or renews a lease; False where another Dagster run's has not expired at `now`."""
    values = database.insert(leases).values(
        run_id=lease.run_id, dagster_run_id=lease.dagster_run_id, expires_at=lease.expires_at
    )
    taken = values.on_conflict_do_update(
        index_elements=["run_id"],
        set_={"dagster_run_id": values.excluded.dagster_run_id, "expires_at": values.excluded.expires_at},
        where=or_(leases.c.dagster_run_id == lease.dagster_run_id, leases.c.expires_at <= now),
    )
    return connection.execute(taken).rowcount == 1
