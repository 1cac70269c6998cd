"""Runs, for commands and sensors: lists, traces, stats, and the compare-and-set of a status."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

from sqlalchemy import Connection, RowMapping, and_, delete, not_, or_, select, text, tuple_, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound
from agentmesh_dagster.records import Event, Json, Lease, Run, RunSource, RunStatus, Step
from agentmesh_dagster.store.columns import database_moment, seconds_until
from agentmesh_dagster.store.endings import announce_ending, is_retried
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.judging import Unjudged
from agentmesh_dagster.store.run_changes import move_run
from agentmesh_dagster.store.run_rows import (
    MAX_LOCKINGS,
    OPEN_STATUSES,
    RunsBusy,
    event_record,
    insert_events,
    load_run,
    load_runs,
    lock_runs,
    require_runs,
    step_record,
    still_busy,
)
from agentmesh_dagster.store.run_stats import RunStats, load_stats
from agentmesh_dagster.store.tables import OVERDUE_RUNS, dagster_runs, events, leases, runs, steps

T = TypeVar("T")

_STILL: Final = tuple(status.value for status in RunStatus if status.is_final or status is RunStatus.WAITING)

_LEASES: Final = select(leases, seconds_until(leases.c.expires_at).label("left_s"))
_CLOCK_TOLERANCE_S: Final = 1.0

_WORKED_ON: Final = (RunStatus.PENDING.value, RunStatus.RUNNING.value)


@dataclass(frozen=True, kw_only=True)
class UnfinishedRun:
    """A run that somebody works or should work on, with its lease where a Dagster run holds or held one."""

    run: Run
    lease: Lease | None


class Runs:
    """Reads runs; the journal writes them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def get(self, run_id: str) -> Run:
        """The run.

        Args:
            run_id: Its id, or the id of any of its Dagster runs.

        Raises:
            NotFound: There is none (code `no-run`).
        """
        with self._database.read() as connection:
            found = load_run(connection, run_id)
            if found is None:
                owner = connection.execute(
                    select(dagster_runs.c.run_id).where(dagster_runs.c.dagster_run_id == run_id)
                ).scalar()
                found = None if owner is None else load_run(connection, owner)
        if found is None:
            raise NotFound(f"there is no run {run_id!r}; `agentmesh runs list` shows what is", code="no-run")
        return found

    def list(
        self,
        project: str,
        *,
        kind: str | None = None,
        slug: str | None = None,
        status: RunStatus | Collection[RunStatus] | None = None,
        source: RunSource | None = None,
        parent_run_id: str | None = None,
        triggered_by: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: str | None = None,
        limit: int | None = 50,
    ) -> builtins.list[Run]:
        """The newest runs first.

        Args:
            project: The project's slug.
            kind: One of `constants.KINDS`.
            slug: The definition's.
            status: One status, or several.
            source: Who or what started them.
            parent_run_id: Started by this run.
            triggered_by: Who or what started them, by name.
            since: Stored at this moment or later.
            until: Stored before this moment.
            after: Only those that come after the run of this id in the list.
            limit: At most so many; None for all.
        """
        query = select(runs).where(runs.c.project == project)
        for column, wanted in (
            (runs.c.kind, kind),
            (runs.c.slug, slug),
            (runs.c.source, None if source is None else source.value),
            (runs.c.parent_run_id, parent_run_id),
            (runs.c.triggered_by, triggered_by),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        if status is not None:
            statuses = [status] if isinstance(status, RunStatus) else status
            query = query.where(runs.c.status.in_([each.value for each in statuses]))
        if since is not None:
            query = query.where(runs.c.created_at >= since)
        if until is not None:
            query = query.where(runs.c.created_at < until)
        if after is not None:
            last = runs.alias()
            place = select(last.c.created_at, last.c.id).where(last.c.id == after).subquery()
            query = query.where(
                tuple_(runs.c.created_at, runs.c.id)
                < tuple_(select(place.c.created_at).scalar_subquery(), select(place.c.id).scalar_subquery())
            )
        query = query.order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
        with self._database.read() as connection:
            return load_runs(connection, connection.execute(query).mappings().all())

    def children(self, run_id: str) -> builtins.list[Run]:
        """The runs that a run started, in the order in which it did; not those that these started."""
        query = select(runs).where(runs.c.parent_run_id == run_id).order_by(runs.c.created_at, runs.c.id)
        with self._database.read() as connection:
            return load_runs(connection, connection.execute(query).mappings().all())

    def overdue(self, project: str, now: datetime) -> builtins.list[Run]:
        """The waiting runs of a project whose time is over (`deadline_at`), the one that was due first comes first."""
        query = (
            select(runs)
            .where(runs.c.project == project, runs.c.deadline_at <= now, text(OVERDUE_RUNS))
            .order_by(runs.c.deadline_at, runs.c.id)
        )
        with self._database.read() as connection:
            return load_runs(connection, connection.execute(query).mappings().all())

    def steps(self, run_id: str) -> builtins.list[Step]:
        """The steps of a run, in the order in which they started; those that never did come last."""
        query = select(steps).where(steps.c.run_id == run_id)
        with self._database.read() as connection:
            found = [step_record(row) for row in connection.execute(query).mappings()]
        return sorted(found, key=_by_start)

    def events(
        self,
        run_id: str,
        *,
        type: str | None = None,
        step_key: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> builtins.list[Event]:
        """The events of a run, in the order in which they were committed.

        Args:
            run_id: The run.
            type: Such as `step.completed`; `step.*` for all that begin so.
            step_key: Those of one step.
            after: Only what came after the event of this id: no event is missed by asking so again and again.
            limit: At most so many.
        """
        query = select(events).where(events.c.run_id == run_id).order_by(events.c.seq).limit(limit)
        if type is not None:
            is_family = type.endswith(".*")
            query = query.where(
                events.c.type.startswith(type[:-1], autoescape=True) if is_family else events.c.type == type
            )
        if step_key is not None:
            query = query.where(events.c.step_key == step_key)
        if after is not None:
            query = query.where(
                events.c.seq > select(events.c.seq).where(events.c.id == after).scalar_subquery()
            )
        with self._database.read() as connection:
            return [event_record(row) for row in connection.execute(query).mappings()]

    def stats(self, project: str, kind: str, slug: str) -> RunStats:
        """What the runs of a definition came to, over all its versions."""
        with self._database.read() as connection:
            return load_stats(connection, project, kind, slug)

    def unfinished(self, project: str | None = None) -> builtins.list[UnfinishedRun]:
        """The pending and running runs, the oldest first, with their leases; of all projects where none is named.

        Not those that wait: there may be thousands, and nobody works on them.
        """
        query = select(runs).where(runs.c.status.in_(_WORKED_ON)).order_by(runs.c.created_at, runs.c.id)
        held = _LEASES.join(runs, runs.c.id == leases.c.run_id).where(runs.c.status.in_(_WORKED_ON))
        if project is not None:
            query = query.where(runs.c.project == project)
        with self._database.read() as connection:
            found = load_runs(connection, connection.execute(query).mappings().all())
            lease_of = {row["run_id"]: _lease(row) for row in connection.execute(held).mappings()}
        return [UnfinishedRun(run=run, lease=lease_of.get(run.id)) for run in found]

    def left_to_dagster(self, project: str, *, failed_since: datetime) -> builtins.list[Run]:
        """Runs that failed since a moment, may be retried, and whose retries are Dagster's own."""
        query = select(runs).where(
            runs.c.project == project,
            runs.c.status == RunStatus.FAILED.value,
            runs.c.finished_at >= failed_since,
            runs.c.retries_left > 0,
            not_(runs.c.by_claim),
        )
        with self._database.read() as connection:
            return load_runs(connection, connection.execute(query).mappings().all())

    def adopt_retries(self, run_id: str) -> None:
        """Makes the retries of a failed run AgentMesh's: from now on it asks to be claimed for one."""
        with self._database.write() as connection:
            connection.execute(
                update(runs)
                .where(runs.c.id == run_id, runs.c.status == RunStatus.FAILED.value)
                .values(by_claim=True)
            )

    def give_up_retries(self, run_id: str) -> None:
        """Lets a failed run ask no more to be retried by itself: it has come to its end, and says so."""

        def write(connection: Connection) -> None:
            query = select(runs).where(runs.c.id == run_id, runs.c.status == RunStatus.FAILED.value)
            row = connection.execute(query.with_for_update(key_share=True)).mappings().first()
            if row is None:
                return
            connection.execute(update(runs).where(runs.c.id == run_id).values(retries_left=0))
            if is_retried(row, RunStatus.FAILED):
                announce_ending(connection, self._database, self._clock, row)

        self._locked(run_id, write)

    def lease(self, run_id: str) -> Lease | None:
        """The lease on a run; None where nobody holds or held one since it was last given back."""
        query = _LEASES.where(leases.c.run_id == run_id)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _lease(row)

    def abandoned(self, project: str) -> builtins.list[UnfinishedRun]:
        """Runs that stand still, with a lease that nobody gave back and that has run out.

        They are final or waiting: their worker was killed after it had written so.
        """
        query = _LEASES.join(runs, runs.c.id == leases.c.run_id).where(
            runs.c.project == project,
            leases.c.expires_at <= database_moment(0.0),
            runs.c.status.in_(_STILL),
        )
        with self._database.read() as connection:
            held = {row["run_id"]: _lease(row) for row in connection.execute(query).mappings()}
            rows = connection.execute(select(runs).where(runs.c.id.in_(list(held)))).mappings().all()
            return [UnfinishedRun(run=run, lease=held[run.id]) for run in load_runs(connection, rows)]

    def release_lease(self, lease: Lease) -> None:
        """Gives back the lease of a worker that is known to be gone. Should it live, it writes nothing more."""
        with self._database.write() as connection:
            lock_runs(connection, (lease.run_id,))
            connection.execute(
                delete(leases).where(leases.c.run_id == lease.run_id, leases.c.holder == lease.holder)
            )

    def shorten_leases(self, project: str) -> int:
        """Cuts leases that seem to last longer than a lease can: the database's clock was ahead when they were taken.

        A worker that lives renews its lease soon; the lease of one that was killed runs out now after its length.

        Returns:
            How many were cut.
        """
        too_long = (
            select(leases.c.run_id)
            .join(runs, runs.c.id == leases.c.run_id)
            .where(
                runs.c.project == project,
                leases.c.expires_at > database_moment(leases.c.length_s + _CLOCK_TOLERANCE_S),
            )
        )
        with self._database.read() as connection:
            found = connection.execute(too_long).scalars().all()
        if not found:
            return 0
        with self._database.write() as connection:
            lock_runs(connection, found)
            cut = connection.execute(
                update(leases)
                .where(leases.c.run_id.in_(too_long))
                .values(expires_at=database_moment(leases.c.length_s))
            )
        return cut.rowcount

    def with_prefix(self, project: str, prefix: str, *, limit: int = 10) -> builtins.list[Run]:
        """Runs whose id, or the id of one of whose Dagster runs, begins so; the newest first."""
        bound = select(dagster_runs.c.run_id).where(
            dagster_runs.c.dagster_run_id.startswith(prefix, autoescape=True)
        )
        query = (
            select(runs)
            .where(
                runs.c.project == project,
                or_(runs.c.id.startswith(prefix, autoescape=True), runs.c.id.in_(bound)),
            )
            .order_by(runs.c.created_at.desc(), runs.c.id.desc())
            .limit(limit)
        )
        with self._database.read() as connection:
            return load_runs(connection, connection.execute(query).mappings().all())

    def set_status(
        self,
        run_id: str,
        from_statuses: Collection[RunStatus],
        to: RunStatus,
        *,
        at: datetime | None = None,
        output: Json = None,
        error: Json = None,
        events: Sequence[Event] = (),
    ) -> bool:
        """Moves a run from one of `from_statuses` to another status, by compare-and-set, with events.

        A run that fails with the error code `run-timeout` closes what is open in it; the end of one that another run
        started answers those who wait for it.

        Args:
            run_id: The run.
            from_statuses: Where it must stand.
            to: Where it goes.
            at: When; default now.
            output: Stored with a final status.
            error: Stored with a final status.
            events: Written with the change.

        Returns:
            Whether this call moved it; otherwise nothing was written.

        Raises:
            NotFound: There is no such run (code `no-run`).
        """

        def write(connection: Connection) -> bool:
            return move_run(
                connection,
                self._database,
                self._clock,
                run_id,
                to,
                expected=[status.value for status in from_statuses],
                at=at or self._clock.now(),
                output=output,
                error=error,
                records=events,
            )

        return self._locked(run_id, write)

    def _locked(self, run_id: str, write: Callable[[Connection], T]) -> T:
        """Writes with a run locked, and with all further ones that the write turns out to need."""
        run_ids = {run_id}
        for _ in range(MAX_LOCKINGS):
            try:
                with self._database.write() as connection:
                    lock_runs(connection, run_ids)
                    return write(connection)
            except RunsBusy as busy:
                run_ids |= busy.run_ids
            except Unjudged as unjudged:
                unjudged.judge(self._database)
        raise still_busy(run_id)

    def add_events(self, records: Sequence[Event]) -> None:
        """Appends events; one whose id is stored already is left out.

        Raises:
            NotFound: The run of one of them is not stored (code `no-run`).
        """
        with self._database.write() as connection:
            require_runs(connection, {event.run_id for event in records})
            insert_events(connection, self._database, records)

    def pinned_publications(
        self, project: str, *, failed_since: datetime
    ) -> builtins.list[tuple[int, str, str, str]]:
        """The publications that runs may still be continued with: of unfinished runs, and of those that failed lately.

        Args:
            project: The project's slug.
            failed_since: Of failed runs, those that ended at this moment or later.

        Returns:
            Publication, slug, kind and definition hash of each, by publication.
        """
        query = (
            select(runs.c.publication, runs.c.slug, runs.c.kind, runs.c.definition_hash)
            .where(
                runs.c.project == project,
                or_(
                    runs.c.status.in_(OPEN_STATUSES),
                    and_(runs.c.status == RunStatus.FAILED.value, runs.c.finished_at >= failed_since),
                ),
            )
            .distinct()
            .order_by(runs.c.publication)
        )
        with self._database.read() as connection:
            return [(row[0], row[1], row[2], row[3]) for row in connection.execute(query)]


def _lease(row: RowMapping) -> Lease:
    return Lease(
        run_id=row["run_id"],
        dagster_run_id=row["dagster_run_id"],
        holder=row["holder"],
        length_s=row["length_s"],
        left_s=row["left_s"],
    )


def _by_start(step: Step) -> tuple[bool, str, str]:
    begun = step.started_at or step.queued_at or step.finished_at
    return begun is None, "" if begun is None else begun.isoformat(timespec="microseconds"), step.key
