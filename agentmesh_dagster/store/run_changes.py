"""How a run changes: the one way in which it gets another status, and what a further Dagster run does to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, Update, bindparam, func, insert, or_, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound, RunRefused
from agentmesh_dagster.records import Claim, Event, Json, Lease, Run, RunStatus, StepStatus
from agentmesh_dagster.store.claims import bind_claim, give_back
from agentmesh_dagster.store.endings import (
    announce_ending,
    counted_ending,
    ends_waits,
    is_retried,
    is_run_timeout,
)
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.inserts import CompiledInsert
from agentmesh_dagster.store.run_rows import (
    insert_events,
    insert_run,
    last_bound,
    load_runs,
    require_last,
)
from agentmesh_dagster.store.tables import dagster_runs, leases, runs, steps
from agentmesh_dagster.store.wait_changes import close_waits_of_run, reopen_waits

# A further Dagster run that comes to such a run without a claim is a retry that Dagster made.
_CUT_OFF: Final = (RunStatus.FAILED.value, RunStatus.RUNNING.value)
_LEVEL_OWNERS: Final = ("node", "item", "iteration", "branch")


def move_run(
    connection: Connection,
    database: Database,
    clock: Clock,
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

    A final status sets `finished_at`, `duration_ms`, output and error, and counts one more ending; `waiting` sets
    `suspended_at` and the keys of the steps that wait. What is open in a run that succeeded, was canceled or ran out of
    time is closed with it; the waits of another failed run stay open. The end of a run that another run started answers
    those who wait for it.

    Args:
        connection: In a transaction that writes.
        database: The connection's database.
        clock: Gives the ids of events, and the moment of what follows from an end.
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
        RunsBusy: Other transactions have locked runs that wait for this end: roll back, lock all, and move it again.
    """
    row = connection.execute(_LOCKED_RUN, {"of": run_id}).mappings().first()
    if row is None:
        raise NotFound(f"there is no run {run_id!r}", code="no-run")
    if by is not None:
        require_last(run_id, by, connection.execute(_LAST_BOUND, {"of": run_id}).scalar())
    if row["status"] not in expected:
        return False
    values: dict[str, Any] = {"status": status.value}
    if status.is_final:
        values.update(
            finished_at=at,
            duration_ms=_worked_ms(row, at),
            output=output,
            error=error,
            **counted_ending(row, status),
        )
    elif status is RunStatus.WAITING:
        values.update(suspended_at=at, suspended_steps=_waiting_steps(connection, run_id))
    elif status is RunStatus.RUNNING and row["started_at"] is None:
        values["started_at"] = at
    if status is RunStatus.CANCELED and row["claim_id"] is not None:
        # A Dagster run on its way to continue it comes to nothing.
        give_back(connection, row["claim_id"])
        values.update(claim_id=None, claimed_at=None, claim_misses=0)
    connection.execute(_update_run(tuple(values)), {"of": run_id, **values})
    if ends_waits(status, error):
        close_waits_of_run(connection, run_id, at)
        if status is not RunStatus.SUCCEEDED:
            _call_off_steps(connection, run_id, at)
    insert_events(connection, database, records)
    if status.is_final and not is_retried(row, status):
        announce_ending(connection, database, clock, row)
    return True


def _worked_ms(row: RowMapping, at: datetime) -> int:
    """How long Dagster runs have worked on a run that ends: the time in which it waited does not count."""
    begun: datetime = row["resumed_at"] or row["started_at"] or row["queued_at"] or row["created_at"]
    until: datetime = row["suspended_at"] if row["status"] == RunStatus.WAITING.value else at
    return row["worked_ms"] + max(0, round((until - begun).total_seconds() * 1000))


# Statements that are the same for all runs are made once: to make one costs more than to execute it.
_OF: Final = bindparam("of", type_=runs.c.id.type)
_LOCKED_RUN: Final = select(runs).where(runs.c.id == _OF).with_for_update(key_share=True)
_LAST_BOUND: Final = select(last_bound(_OF))


@lru_cache(maxsize=64)
def _update_run(names: tuple[str, ...]) -> Update:
    """The change of some columns of a run."""
    return update(runs).where(runs.c.id == _OF).values({name: bindparam(name) for name in names})


def _waiting_steps(connection: Connection, run_id: str) -> list[str]:
    """The keys of the steps that wait, and in which nothing else does."""
    query = select(steps.c.key, steps.c.parent_key).where(
        steps.c.run_id == run_id, steps.c.status == StepStatus.WAITING.value
    )
    waiting = connection.execute(query).all()
    holders = {parent_key for _, parent_key in waiting}
    return sorted(key for key, _ in waiting if key not in holders)


def _call_off_steps(connection: Connection, run_id: str, at: datetime) -> None:
    """Ends what waits in a run that has ended, and the nodes that its Dagster runs left in the middle.

    Calls that were cut off keep their row: it says that nobody knows whether they took effect.
    """
    is_cut_off = (steps.c.status == StepStatus.RUNNING.value) & steps.c.kind.in_(_LEVEL_OWNERS)
    connection.execute(
        update(steps)
        .where(steps.c.run_id == run_id, or_(steps.c.status == StepStatus.WAITING.value, is_cut_off))
        .values(status=StepStatus.CANCELED.value, finished_at=at)
    )


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
            changed = _continued(connection, row, run, claim, dagster_run_id, now)
    elif row["status"] == RunStatus.PENDING.value:
        changed = _begun(run, now)
    if changed:
        connection.execute(update(runs).where(runs.c.id == run.id).values(**changed))
        if "output" in changed:
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


def _continued(
    connection: Connection,
    row: RowMapping,
    run: Run,
    claim: Claim | None,
    dagster_run_id: str,
    now: datetime,
) -> dict[str, Any]:
    """What a further Dagster run changes in a stored run: its claim and retries, its status, its time."""
    changed: dict[str, Any] = {"claim_id": None, "claimed_at": None, "claim_misses": 0}
    if claim is not None and claim.reason == "finalize":
        # It comes after the end, which stays as it is.
        return changed
    if claim is None:
        if row["claim_id"] is not None:
            give_back(connection, row["claim_id"])
        is_retry = row["status"] in _CUT_OFF
    else:
        is_retry = claim.reason == "retry"
    changed.update(by_claim=claim is not None, retries_left=max(0, row["retries_left"] - is_retry))
    status = RunStatus(row["status"])
    if status is RunStatus.PENDING:
        if claim is None:
            return changed | _begun(run, now)
        # Who begins what another run started knows how often it may be retried.
        begins = replace(run, status=RunStatus.RUNNING)
        return changed | _begun(begins, now) | {"retries_left": run.retries_left}
    changed.update(
        status=RunStatus.RUNNING.value,
        resumed_at=now,
        worked_ms=row["worked_ms"] + _stretch_ms(connection, row, dagster_run_id, now),
        cut_off_at=None,
    )
    if is_run_timeout(row["error"]):
        # Who retries a run whose time was over gives it its time anew: nothing else could.
        changed["worked_ms"] = 0
        if row["deadline_at"] is not None:
            changed["deadline_at"] = now + (row["deadline_at"] - (row["started_at"] or row["created_at"]))
    if status is not RunStatus.RUNNING:
        changed["suspended_steps"] = []
    if status.is_final:
        changed.update(finished_at=None, duration_ms=None, output=None, error=None)
    return changed


def _begun(run: Run, now: datetime) -> dict[str, Any]:
    """What changes in a stored `pending` run when a Dagster run brings it with a status of its own."""
    if run.status is RunStatus.PENDING:
        return {}
    return {"status": run.status.value, "started_at": run.started_at or now}


def _stretch_ms(connection: Connection, row: RowMapping, dagster_run_id: str, now: datetime) -> int:
    """How long the Dagster run before this one worked: until it ended, or could no longer renew its lease."""
    begun: datetime | None = row["resumed_at"] or row["started_at"]
    if begun is None:
        return 0
    others = select(leases.c.expires_at).where(
        leases.c.run_id == row["id"], leases.c.dagster_run_id != dagster_run_id
    )
    ended = row["suspended_at"] if row["status"] == RunStatus.WAITING.value else row["finished_at"]
    moments: list[datetime | None] = [
        now,
        ended,
        row["cut_off_at"],
        connection.execute(others).scalar(),
    ]
    until = min(moment for moment in moments if moment is not None)
    return max(0, round((until - begun).total_seconds() * 1000))


_TAKEN_AT: Final = bindparam("taken_at", type_=leases.c.expires_at.type)
_TAKE_LEASE: Final = CompiledInsert(
    leases,
    ["run_id", "dagster_run_id", "expires_at"],
    lambda insert: insert.on_conflict_do_update(
        index_elements=["run_id"],
        set_={"dagster_run_id": insert.excluded.dagster_run_id, "expires_at": insert.excluded.expires_at},
        where=or_(
            leases.c.dagster_run_id == insert.excluded.dagster_run_id, leases.c.expires_at <= _TAKEN_AT
        ),
    ),
)


def take_lease(connection: Connection, database: Database, lease: Lease, now: datetime) -> bool:
    """Takes or renews a lease; False where another Dagster run's has not expired at `now`.

    When the lease of a worker that is gone ran out, is kept with its run. The caller has locked the run.
    """
    cut_off = connection.execute(
        select(leases.c.expires_at).where(
            leases.c.run_id == lease.run_id,
            leases.c.dagster_run_id != lease.dagster_run_id,
            leases.c.expires_at <= now,
        )
    ).scalar()
    if cut_off is not None:
        connection.execute(
            update(runs)
            .where(runs.c.id == lease.run_id, runs.c.cut_off_at.is_(None))
            .values(cut_off_at=cut_off)
        )
    values = {
        "run_id": lease.run_id,
        "dagster_run_id": lease.dagster_run_id,
        "expires_at": lease.expires_at,
        "taken_at": now,
    }
    return connection.execute(_TAKE_LEASE.of(database).bindparams(_TAKEN_AT), values).rowcount == 1
