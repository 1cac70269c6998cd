"""The journal: runs and steps, durable, for many coroutines at once (`runtime.ports.Journal`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Final, TypeVar

from sqlalchemy import Connection, delete, exists, select

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import (
    Claim,
    Entry,
    Event,
    Json,
    Lease,
    Publication,
    Run,
    RunStatus,
    Step,
    Wait,
)
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.store.claims import load_claim, spend_claim
from agentmesh_dagster.store.endings import mark_finalized
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.group_writer import GroupWriter
from agentmesh_dagster.store.inbox import refuse_reserved, send_event
from agentmesh_dagster.store.judging import MAX_JUDGINGS, Unjudged
from agentmesh_dagster.store.publications import load_live
from agentmesh_dagster.store.run_changes import bind_run, move_run, renew_lease, take_lease
from agentmesh_dagster.store.run_rows import (
    MAX_LOCKINGS,
    OPEN_STATUSES,
    RunsBusy,
    insert_run,
    lease_holder,
    load_run,
    load_runs,
    require_holder,
    require_runs,
    step_record,
    still_busy,
)
from agentmesh_dagster.store.step_writer import StepWriter
from agentmesh_dagster.store.tables import dagster_runs, leases, runs, steps, waits
from agentmesh_dagster.store.wait_changes import open_waits, supersede_waits, use_waits
from agentmesh_dagster.store.wait_rows import wait_record

T = TypeVar("T")

_READERS: Final = 4
# Under the limits that databases set to the parameters of one statement.
_MAX_KEYS_IN_QUERY: Final = 500


class StoreJournal:
    """Fulfils `runtime.ports.Journal`: its docstrings are the contract; here is what they leave open.

    Writes go to the one writer thread of this object; reads to a few threads, each with a connection from the pool.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._step_writer = StepWriter(database)
        self._writer = GroupWriter(database)
        self._readers: ThreadPoolExecutor | None = None
        self._closed = False
        database.at_fork(self.leave_to_parent)

    async def bind_run(
        self,
        run: Run,
        dagster_run_id: str,
        events: Sequence[Event] = (),
        *,
        claim: str | None = None,
        lease: Lease | None = None,
    ) -> Run:
        """Stores a run or finds it, and binds a Dagster run to it, by a claim or without one.

        A further Dagster run makes a final or waiting run `running` again, at `resumed_at`; what ended it (output,
        error, `finished_at`) is cleared, and `worked_ms` grows by what the one before it worked. A stored `pending` run
        takes the status that `run` brings, and is `running` where a claim starts it. A claim to retry takes one off
        `retries_left`, and so does a further Dagster run that comes without a claim to a run that failed or was cut
        off. A claim to finalize leaves the run as it ended.

        Raises:
            RunRefused: The Dagster run works on another run (code `dagster-run-bound`), the claim does not count
                (`claim-lost`), or the lease is another process's (`lease-held`, `second-process`).
        """

        def write(connection: Connection) -> Run:
            return bind_run(
                connection, self._database, self._clock, run, dagster_run_id, events, claim, lease
            )

        return await self._submit_judged((run.id,), write)

    async def claim(self, claim_id: str) -> Claim | None:
        """The claim of that id, or None where the store has none."""
        return await self._read(lambda connection: load_claim(connection, claim_id))

    async def spend_claim(self, claim_id: str, dagster_run_id: str) -> None:
        """Binds a claim that nobody has bound to the Dagster run that came too late with it, and does no more."""
        await self._writer.submit((), lambda connection: spend_claim(connection, claim_id, dagster_run_id))

    async def waits(self, run_id: str, node_key: str | None = None) -> tuple[Wait, ...]:
        """The waits of a run, or of one of its nodes and the steps in it, the oldest first."""
        query = select(waits).where(waits.c.run_id == run_id).order_by(waits.c.created_at, waits.c.id)
        if node_key is not None:
            query = query.where(waits.c.node_id == node_key)

        def read(connection: Connection) -> tuple[Wait, ...]:
            return tuple(wait_record(row) for row in connection.execute(query).mappings())

        return await self._read(read)

    async def run_of(self, dagster_run_id: str) -> Run | None:
        """The run that a Dagster run works on, or None where it is bound to none."""

        def read(connection: Connection) -> Run | None:
            run_id = connection.execute(
                select(dagster_runs.c.run_id).where(dagster_runs.c.dagster_run_id == dagster_run_id)
            ).scalar()
            return None if run_id is None else load_run(connection, run_id)

        return await self._read(read)

    async def run(self, run_id: str) -> Run | None:
        """The run of that id, whether a Dagster run is bound to it or not."""
        return await self._read(lambda connection: load_run(connection, run_id))

    async def published(self, project: str, kind: str, slug: str) -> Publication | None:
        """What is published of a definition now, with its closure; None where nothing is."""
        return await self._read(lambda connection: load_live(connection, project, kind, slug))

    async def start_child(self, run: Run, events: Sequence[Event] = (), *, holder: str | None = None) -> Run:
        """Stores a `pending` run with its events, or finds it by its id; then no event is written.

        Raises:
            RunRefused: The holder does not hold the lease of the run that starts it any more (code `lease-lost`).
        """
        parent = run.parent_run_id

        def write(connection: Connection) -> Run:
            if holder is not None and parent is not None:
                self._require_holder(connection, parent, holder)
            if insert_run(connection, self._database, run, self._clock.now()):
                self._step_writer.write_events(connection, events)
            row = connection.execute(select(runs).where(runs.c.id == run.id)).mappings().one()
            return load_runs(connection, [row])[0]

        run_ids = {run.id, *(event.run_id for event in events), *([] if parent is None else [parent])}
        return await self._writer.submit(run_ids, write)

    async def steps(
        self, run_id: str, keys: Collection[str] | None = None, *, needed: bool = False
    ) -> dict[str, Step]:
        """The steps of a run by key, in the order of their keys; all, or those named."""
        query = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.key)
        if keys is not None and len(keys) <= _MAX_KEYS_IN_QUERY:
            query = query.where(steps.c.key.in_(keys))
        if needed:
            parents = steps.alias()
            is_parent = (parents.c.run_id == steps.c.run_id) & (parents.c.key == steps.c.parent_key)
            query = query.where(~exists().where(is_parent, parents.c.finished))

        def read(connection: Connection) -> dict[str, Step]:
            rows = connection.execute(query).mappings()
            return {row["key"]: step_record(row) for row in rows if keys is None or row["key"] in keys}

        return {} if keys is not None and not keys else await self._read(read)

    async def record(self, entries: Sequence[Entry], *, holder: str | None = None) -> None:
        """Inserts or replaces the rows of steps of one run, with their events and what they change in its waits.

        A finished row that says the same (status, fingerprint, output, error, routing decision) is left as it is, and
        its events are not written again. Of several entries of one step the last row is written, with all their
        events. The waits follow after the rows.

        Raises:
            NotFound: The run is not stored (code `no-run`).
            ReplayError: The stored row is finished and differs (code `step-finished`).
            RunRefused: The holder does not hold the run's lease any more (code `lease-lost`).
            ValueError: The steps are of several runs.
        """
        entries = tuple(entries)
        if not entries:
            return
        run_id = entries[0].step.run_id
        waiting = [entry for entry in entries if entry.used or entry.superseded or entry.opened]
        if not waiting:
            await self._writer.submit_parts(run_id, entries, self._step_writer.write_entries, holder)
            return

        def write(connection: Connection) -> None:
            self._step_writer.write_entries(connection, entries, holder)
            for entry in waiting:
                self._change_waits(connection, entry)

        opened = (wait.run_id for entry in waiting for wait in entry.opened)
        await self._submit_judged({run_id, *opened}, write)

    async def record_events(self, events: Sequence[Event], *, holder: str | None = None) -> None:
        """Appends events; one whose id is stored already is left out.

        Raises:
            NotFound: The run of one of them is not stored (code `no-run`).
            RunRefused: The holder does not hold the lease of each run (code `lease-lost`).
        """
        run_ids = {event.run_id for event in events}

        def write(connection: Connection) -> None:
            require_runs(connection, run_ids)
            if holder is not None:
                for run_id in run_ids:
                    self._require_holder(connection, run_id, holder)
            self._step_writer.write_events(connection, events)

        if events:
            await self._writer.submit(run_ids, write)

    async def emit(
        self, receipt: Event, name: str, key: str, data: Json, *, keep_s: float, holder: str | None = None
    ) -> str:
        """Sends a named event in the name of a step, once; its id is made of the run and the step.

        Raises:
            ApprovalError: The payload fits none of the waits for it (code `form`), or the name is reserved
                (`reserved-event`).
            NotFound: The sending run is not stored (code `no-run`).
            RunRefused: The holder does not hold its lease any more (code `lease-lost`).
            StoreError: Too many are kept already (code `events-full`), or name or key are none (`bad-event`).
        """
        refuse_reserved(name)
        event_id = content_hash([receipt.run_id, receipt.step_key])
        by = f"run/{receipt.run_id}"
        delivery = await self._in_thread(
            lambda: send_event(
                self._database,
                self._clock,
                receipt.project,
                name,
                key,
                data,
                by=by,
                event_id=event_id,
                keep_s=keep_s,
                receipt=receipt,
                holder=holder,
            )
        )
        return delivery.event_id

    async def finish_run(
        self,
        run_id: str,
        status: RunStatus,
        *,
        at: datetime,
        output: Json = None,
        error: Json = None,
        events: Sequence[Event] = (),
        holder: str | None = None,
    ) -> bool:
        """Moves a run that is not final to `status`; `waiting` keeps output and error as they are.

        Raises:
            NotFound: The run is not stored (code `no-run`).
            RunRefused: The holder does not hold the run's lease any more (code `lease-lost`).
        """

        def write(connection: Connection) -> bool:
            return move_run(
                connection,
                self._database,
                self._clock,
                run_id,
                status,
                expected=OPEN_STATUSES,
                at=at,
                output=output,
                error=error,
                records=events,
                by=holder,
            )

        run_ids = {run_id}
        for _ in range(MAX_LOCKINGS):
            try:
                return await self._writer.submit(run_ids, write)
            except RunsBusy as busy:
                run_ids = run_ids | busy.run_ids
            except Unjudged as unjudged:
                await self._judge(unjudged)
        raise still_busy(run_id)

    async def finalized(self, run_id: str, ending: int, *, holder: str | None = None) -> None:
        """Says that what a run's ending asks for has been done; an ending that was said before stays so.

        Raises:
            NotFound: The run is not stored (code `no-run`).
            RunRefused: The holder does not hold the run's lease any more (code `lease-lost`).
        """
        await self._writer.submit(
            (run_id,), lambda connection: mark_finalized(connection, run_id, ending, holder)
        )

    async def take_lease(self, lease: Lease) -> None:
        """Takes the lease of a run, or renews it.

        Raises:
            NotFound: The run is not stored (code `no-run`).
            RunRefused: Another process holds one that has not run out (code `lease-held`, `second-process`).
        """

        def write(connection: Connection) -> None:
            require_runs(connection, (lease.run_id,))
            take_lease(connection, lease)

        await self._writer.submit((lease.run_id,), write)

    async def renew_lease(self, run_id: str, holder: str) -> bool:
        """Makes a lease last for its whole length again; False where the holder does not hold the run any more."""
        return await self._writer.submit(
            (run_id,), lambda connection: renew_lease(connection, run_id, holder)
        )

    async def release_lease(self, run_id: str, holder: str) -> None:
        """Gives the lease back; nothing happens where another process holds it."""
        statement = delete(leases).where(leases.c.run_id == run_id, leases.c.holder == holder)

        def write(connection: Connection) -> None:
            connection.execute(statement)

        await self._writer.submit((run_id,), write)

    def _require_holder(self, connection: Connection, run_id: str, holder: str) -> None:
        require_holder(run_id, holder, connection.execute(select(lease_holder(run_id))).scalar())

    def _change_waits(self, connection: Connection, entry: Entry) -> None:
        run_id = entry.step.run_id
        if entry.used:
            # Before others are closed here: those nobody has answered.
            use_waits(connection, run_id, entry.used, self._clock.now())
        if entry.superseded:
            supersede_waits(connection, self._database, self._clock, run_id, entry.superseded)
        if entry.opened:
            open_waits(connection, self._database, self._clock, entry.opened)

    def close(self) -> None:
        """Writes what was asked for until now, and ends the threads."""
        self._closed = True
        self._writer.close()
        if self._readers is not None:
            self._readers.shutdown()

    def leave_to_parent(self) -> object:
        """In a forked child: starts anew, and returns what must not be garbage collected."""
        left = (self._writer.leave_to_parent(), self._readers)
        self._readers = None
        return left

    async def _submit_judged(self, run_ids: Collection[str], write: Callable[[Connection], T]) -> T:
        """Writes, after the events that waits may take were judged outside of the transaction."""
        for _ in range(MAX_JUDGINGS):
            try:
                return await self._writer.submit(run_ids, write)
            except Unjudged as unjudged:
                await self._judge(unjudged)
        raise StoreError("new events for a wait that is opened keep coming; try again", code="conflict")

    async def _judge(self, unjudged: Unjudged) -> None:
        await self._in_thread(lambda: unjudged.judge(self._database))

    async def _read(self, query: Callable[[Connection], T]) -> T:
        return await self._in_thread(lambda: self._read_now(query))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError("the store is closed", code="closed")
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="agentmesh-reads")
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _read_now(self, query: Callable[[Connection], T]) -> T:
        with self._database.read() as connection:
            return query(connection)
