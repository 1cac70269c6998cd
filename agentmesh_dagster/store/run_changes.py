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
from agentmesh_dagster.store.columns import database_moment, seconds_until
from agentmesh_dagster.store.endings import (
    announce_ending,
    counted_ending,
    ends_waits,
    is_retried,
    is_run_timeout,
)
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.run_rows import (
    insert_events,
    insert_run,
    lease_holder,
    load_runs,
    lock_runs,
    require_holder,
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
        by: Who moves it, and must hold the run's lease; None: not asked.

    Returns:
        Whether this call moved it; otherwise nothing was written.

    Raises:
        NotFound: The run is not stored.
        RunRefused: It does not hold the lease any more (code `lease-lost`).
        RunsBusy: Other transactions have locked runs that wait for this end: roll back, lock all, and move it again.
    """
    row = connection.execute(_LOCKED_RUN, {"of": run_id}).mappings().first()
    if row is None:
        raise NotFound(f"there is no run {run_id!r}", code="no-run")
    if by is not None:
        require_holder(run_id, by, connection.execute(_HOLDER, {"of": run_id}).scalar())
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
_HOLDER: Final = select(lease_holder(_OF))


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
    lease: Lease | None = None,
) -> Run:
    """Stores a run, or finds it, and binds a Dagster run to it (see the journal's `bind_run`)."""
    now = clock.now()
    is_new = insert_run(connection, database, run, now)
    if lease is not None:
        lock_runs(connection, (run.id,))
        take_lease(connection, lease)
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


_HELD: Final = select(
    leases.c.holder,
    leases.c.dagster_run_id,
    leases.c.expires_at,
    seconds_until(leases.c.expires_at).label("left_s"),
).where(leases.c.run_id == _OF)
_LENGTH_S: Final = bindparam("length", type_=leases.c.length_s.type)
_CHANGED_LEASE: Final = {
    "holder": bindparam("by", type_=leases.c.holder.type),
    "dagster_run_id": bindparam("dagster_run", type_=leases.c.dagster_run_id.type),
    "expires_at": database_moment(_LENGTH_S),
    "length_s": _LENGTH_S,
}
_ADD_LEASE: Final = insert(leases).values(run_id=_OF, **_CHANGED_LEASE)
_CHANGE_LEASE: Final = update(leases).where(leases.c.run_id == _OF).values(**_CHANGED_LEASE)
_RENEW_LEASE: Final = (
    update(leases)
    .where(leases.c.run_id == _OF, leases.c.holder == bindparam("by", type_=leases.c.holder.type))
    .values(expires_at=database_moment(leases.c.length_s))
)


def take_lease(connection: Connection, lease: Lease) -> None:
    """Takes a lease, or renews it. The caller has locked the run.

    When the lease of a worker that is gone ran out, is kept with its run.

    Raises:
        RunRefused: Another process holds a lease that has not run out: of the same Dagster run (code `second-process`),
            or of another one (`lease-held`).
    """
    held = connection.execute(_HELD, {"of": lease.run_id}).mappings().first()
    values = {
        "of": lease.run_id,
        "by": lease.holder,
        "dagster_run": lease.dagster_run_id,
        "length": lease.length_s,
    }
    if held is None:
        connection.execute(_ADD_LEASE, values)
        return
    if held["holder"] != lease.holder:
        if held["left_s"] > 0:
            raise _held_by_another(lease, held["dagster_run_id"])
        connection.execute(
            update(runs)
            .where(runs.c.id == lease.run_id, runs.c.cut_off_at.is_(None))
            .values(cut_off_at=held["expires_at"])
        )
    connection.execute(_CHANGE_LEASE, values)


def renew_lease(connection: Connection, run_id: str, holder: str) -> bool:
    """Makes a lease last for its whole length again; False where the process does not hold the run any more."""
    return connection.execute(_RENEW_LEASE, {"of": run_id, "by": holder}).rowcount == 1


def _held_by_another(lease: Lease, dagster_run_id: str) -> RunRefused:
    if dagster_run_id == lease.dagster_run_id:
        return RunRefused(
            f"another process is executing the Dagster run {dagster_run_id!r} already; this one ends here, and "
            "nothing was done twice",
            code="second-process",
        )
    return RunRefused(
        f"another Dagster run is working on run {lease.run_id!r}; this one ends here, and nothing was done twice",
        code="lease-held",
        context={"dagster_run_id": dagster_run_id},
    )
