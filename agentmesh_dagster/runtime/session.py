"""One process's work on one run: who the run is, the rows already known, the lease, the events."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentmesh_dagster.errors import RunRefused, StoreError, TimeOver
from agentmesh_dagster.records import (
    Entry,
    Event,
    Json,
    Lease,
    Run,
    RunStatus,
    Step,
    StepStatus,
    Wait,
    WaitStatus,
)
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.loop import is_asked_to_stop
from agentmesh_dagster.runtime.scope import Level, Scope, top_scope
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import WorkflowSpec

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.nodes.foreach import Item

RENEWAL_S = 5.0
"""The longest time between two renewals of a lease."""
WALKED_AT_ONCE = 64
"""How many nodes of walked levels may be at work at once, where `settings.max_concurrent` says nothing."""
_CUT_OFF_AGAIN_S = 1.0
_ONE_CUT_S = 1.0
"""What cleans up so soon after another has had its time was cut off with it."""


_END_EVENTS = {
    RunStatus.SUCCEEDED: "run.completed",
    RunStatus.FAILED: "run.failed",
    RunStatus.CANCELED: "run.canceled",
    RunStatus.WAITING: "run.waiting",
}


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """What a run is pinned to: one publication and its closure."""

    project: str
    kind: str
    slug: str
    version: int
    publication: int
    definition_hash: str
    closure: Closure

    @property
    def workflow(self) -> WorkflowSpec:
        """The root workflow."""
        return self.closure.workflow


class RunSession:
    """Shared by all steps of one run in one process.

    Rows are cached: a finished row never changes, and unfinished ones are asked for again.
    """

    def __init__(
        self,
        environment: Environment,
        run: Run,
        pinned: Pinned,
        dagster_run_id: str,
        *,
        works_under: str | None = None,
    ) -> None:
        """A session that holds no lease yet.

        Args:
            environment: The process's.
            run: The run.
            pinned: What it is pinned to.
            dagster_run_id: The Dagster run that works on it.
            works_under: In a step process, the holder of the lease under which it works: the process that executes the
                Dagster run. That one gives the lease back.
        """
        self.environment = environment
        self.run = run
        self.pinned = pinned
        self.dagster_run_id = dagster_run_id
        self._is_step_process = works_under is not None
        self.lease = Lease(
            run_id=run.id,
            dagster_run_id=dagster_run_id,
            holder=works_under or environment.clock.new_id(),
            length_s=environment.lease_s,
        )
        """The lease that every write of this session goes under."""
        self._rows: dict[str, Step] = {}
        self._below: dict[str, list[str]] = {}
        self.levels: dict[tuple[str, ...], Scope] = {}
        """The passes through the levels of nested graphs, by their path."""
        self.fanned: dict[str, Sequence[Item]] = {}
        """The items of fanned-out nodes, by the node's step key."""
        self.takes_input: dict[str, bool] = {}
        """By the slug of a tool: whether its input has fields."""
        self.slots = asyncio.Semaphore(pinned.workflow.settings.max_concurrent or WALKED_AT_ONCE)
        """How many nodes of all walked levels may be at work at once."""
        self._waits: dict[tuple[str, str], Wait] = {}
        self._waits_under: dict[str, dict[tuple[str, str], None]] = {}
        self._renewals: asyncio.Task[None] | None = None
        self._is_held = False
        self._clockwork: asyncio.Task[None] | None = None
        self._begun: dict[str, set[str]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        self._closing_until = -math.inf
        self.is_lease_lost = False
        """Whether another process has taken the run over; nothing is written any more then."""
        self.has_worked = False
        """Whether this process has worked on steps of the run."""
        self.is_interrupted = False
        """Whether this process was asked to stop."""
        self.is_overdue = False
        """Whether the run has taken longer than its `timeout_s`."""
        self.ended: RunStatus | None = None
        """How this process ended the run, once it did."""

    @cached_property
    def scope(self) -> Scope:
        """The run's pass through its workflow's own level."""
        return top_scope(Level.of_workflow(self.pinned.closure, self.pinned.slug), self.run)

    async def load(self) -> None:
        """Reads the rows that earlier Dagster runs and other processes have written, and that may be asked for."""
        for row in (await self.environment.journal.steps(self.run.id, needed=True)).values():
            self.remember_row(row)
        self._remember(await self.environment.journal.waits(self.run.id))

    def wait(self, step_key: str, label: str) -> Wait | None:
        """The wait of a step, as it stood when its node began."""
        return self._waits.get((step_key, label))

    def waits_of(self, node_key: str) -> tuple[Wait, ...]:
        """The waits of a node and of the steps in it, as they stood when it began."""
        return tuple(wait for wait in self.waits_under(node_key) if wait.node_id == node_key)

    def waits_under(self, key: str) -> tuple[Wait, ...]:
        """The waits of a container, an item, an iteration or a branch: those of all nodes in it, and its own.

        A wait of an item itself, such as the end of its time, is its container's to open, and stands under both.
        """
        return tuple(self._waits[place] for place in self._waits_under.get(key, ()))

    def open_waits(self, key: str) -> tuple[Wait, ...]:
        """What a node with its calls, or one call, waits for, as it stood when the node began."""
        return tuple(wait for wait in self.waits_under(key) if wait.status is WaitStatus.OPEN)

    def has_new_answer(self, key: str) -> bool:
        """Whether something that a node or a call waited for was closed, and no earlier Dagster run has taken it up."""
        waits = self.waits_under(key)
        return any(wait.status is not WaitStatus.OPEN and wait.used_at is None for wait in waits)

    async def unused_waits(self, node_key: str) -> tuple[str, ...]:
        """Reads a node's waits again, and gives the ids of those closed whose answers no Dagster run has taken up.

        Of a node that is not known to wait for anything nothing is read.
        """
        if not self.waits_of(node_key):
            return ()
        # Those of other nodes stay as they stood when these began.
        self._remember(await self.environment.journal.waits(self.run.id, node_key))
        closed = (wait for wait in self.waits_of(node_key) if wait.status is not WaitStatus.OPEN)
        return tuple(wait.id for wait in closed if wait.used_at is None)

    def unsettled_waits(self, node_key: str) -> tuple[str, ...]:
        """Ids of the waits under a step that were not taken up when they began; the journal knows which are open."""
        return tuple(
            wait.id
            for wait in self.waits_under(node_key)
            if wait.used_at is None and wait.closed_by != "superseded"
        )

    def was_used_before(self, wait: Wait) -> bool:
        """Whether an earlier Dagster run took the answer up: waits are remembered as they stood before this one did."""
        return wait.used_at is not None

    def _remember(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            place = (wait.step_key, wait.label)
            if place not in self._waits:
                for key in {*_keys_above(wait.node_id), *_keys_above(wait.step_key)}:
                    self._waits_under.setdefault(key, {})[place] = None
            self._waits[place] = wait

    async def row(self, key: str) -> Step | None:
        """The row under a key, from the cache; what another process writes is not of this process's steps."""
        return self._rows.get(key)

    async def rows(self, keys: Collection[str]) -> dict[str, Step]:
        """The rows of those keys that have one; those not known as finished are read again."""
        missing = [key for key in keys if (row := self._rows.get(key)) is None or not row.is_finished]
        if missing:
            for row in (await self.environment.journal.steps(self.run.id, missing)).values():
                self.remember_row(row)
        return {key: self._rows[key] for key in keys if key in self._rows}

    async def node_rows(self, scope: Scope, nodes: Collection[str]) -> dict[str, Step]:
        """Rows by node id, of the nodes of one level."""
        if not scope.is_shared:
            known = self._rows
            return {name: row for name in nodes if (row := known.get(scope.prefix + name)) is not None}
        found = await self.rows([scope.key(name) for name in nodes])
        return {name: found[scope.key(name)] for name in nodes if scope.key(name) in found}

    def known_row(self, key: str) -> Step | None:
        """The row under a key as far as this process knows."""
        return self._rows.get(key)

    def remember_row(self, row: Step) -> None:
        """Takes a row into the cache."""
        if row.parent_key is not None and row.key not in self._rows:
            self._below.setdefault(row.parent_key, []).append(row.key)
        self._rows[row.key] = row

    def has_any_under(self, key: str) -> bool:
        """Whether a row or a wait is known under a step."""
        return key in self._below or key in self._waits_under

    def is_below_finished(self, key: str) -> bool:
        """Whether a step, or one that it stands under, is finished: rows below are not known then, and replayed."""
        return any(
            row is not None and row.is_finished
            for row in (self._rows.get(above) for above in _keys_above(key))
        )

    def rows_under(self, key: str) -> Iterator[Step]:
        """The known rows under a step, of any depth."""
        for below in self._below.get(key, ()):
            if below in self._rows:
                yield self._rows[below]
                yield from self.rows_under(below)

    def forget_below(self, key: str) -> None:
        """Drops the rows under a step that is finished: nobody asks for them again."""
        open_keys = self._below.pop(key, [])
        self._begun.pop(f"{key}/", None)
        while open_keys:
            below = open_keys.pop()
            self._rows.pop(below, None)
            self._begun.pop(f"{below}/", None)
            open_keys += self._below.pop(below, ())

    def begin_node(self, scope: Scope, node_id: str) -> bool:
        """Counts a node of a workflow's own level as one that runs; False where `settings.max_steps` have run before.

        Other step processes are seen as far as their rows were read; siblings of this process always.
        """
        bound = scope.level.workflow.settings.max_steps
        begun = self._begun.get(scope.prefix)
        if begun is None:
            begun = self._begun[scope.prefix] = self._ran(scope)
        if node_id in begun:
            return True
        if len(begun) >= bound or (scope.is_shared and len(begun | self._ran(scope)) >= bound):
            return False
        begun.add(node_id)
        return True

    def _ran(self, scope: Scope) -> set[str]:
        """The nodes of a level that have run."""
        rows = ((name, self._rows.get(scope.key(name))) for name in scope.graph.nodes)
        return {
            name
            for name, row in rows
            if row is not None and row.is_finished and row.status is not StepStatus.SKIPPED
        }

    async def record(self, *entries: Entry) -> None:
        """Writes rows with their events and what they say of waits, in one transaction, then remembers the rows.

        Raises:
            RunRefused: Another process has taken the run over (code `lease-lost`).
        """
        if self.is_lease_lost:
            raise self.lost()
        try:
            await self.environment.journal.record(entries, holder=self.lease.holder)
        except RunRefused as error:
            self._note_refusal(error)
            raise
        except asyncio.CancelledError:
            # What was handed over is written all the same: who ends what was cut off must know of its waits.
            self._note(entries)
            raise
        self._note(entries)

    async def record_event(self, type: str, step_key: str | None = None, payload: Json = None) -> None:
        """Writes an event of this run.

        Raises:
            RunRefused: Another process has taken the run over (code `lease-lost`).
        """
        try:
            event = self.event(type, step_key, payload)
            await self.environment.journal.record_events([event], holder=self.lease.holder)
        except RunRefused as error:
            self._note_refusal(error)
            raise

    async def emit(self, step_key: str, name: str, key: str, data: Json, *, keep_s: float) -> str:
        """Sends a named event in the name of a step, once (see `Journal.emit`), and gives its id.

        Raises:
            RunRefused: Another process has taken the run over (code `lease-lost`).
        """
        receipt = self.event("event.sent", step_key, {"name": name, "key": key})
        try:
            return await self.environment.journal.emit(
                receipt, name, key, self.redact(data), keep_s=keep_s, holder=self.lease.holder
            )
        except RunRefused as error:
            self._note_refusal(error)
            raise

    def _note_refusal(self, error: RunRefused) -> None:
        self.is_lease_lost |= error.code == "lease-lost"

    def _note(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            known = self._rows.get(entry.step.key)
            # A row that waited for this commit may have been followed by the one that ends its step.
            if known is None or not known.is_finished:
                self.remember_row(entry.step)
            self._remember(entry.opened)

    def lost(self) -> RunRefused:
        """The error of a process whose run was taken over."""
        return RunRefused(
            f"another process has taken over run {self.run.id!r}, because this one was not heard of for longer than "
            "its lease; it ends here",
            code="lease-lost",
        )

    def closing_s(self, at_most_s: float) -> float:
        """How long what is cut off now may clean up: what is cut off together has so long together."""
        now = self.environment.clock.monotonic_s()
        if now > self._closing_until + _ONE_CUT_S:
            self._closing_until = now + at_most_s
        return max(0.0, self._closing_until - now)

    @property
    def is_stopping(self) -> bool:
        """Whether this process ends its work on the run, whatever is left of it."""
        is_asked = any(is_asked_to_stop(task) for task in self._working)
        return is_asked or self.is_interrupted or self.is_overdue or self.is_lease_lost

    def overdue(self) -> TimeOver:
        """The error of a run that has taken longer than its `timeout_s`."""
        settings = self.pinned.workflow.settings
        counted = "waiting counts" if settings.timeout_includes_waiting else "waiting does not count"
        return TimeOver(
            f"the run took longer than its settings.timeout_s = {settings.timeout_s:g} ({counted}) and was cut off",
            code="run-timeout",
        )

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Registers the current task, which is canceled when the lease is lost.

        Raises:
            RunRefused: It was (code `lease-lost`).
        """
        task = asyncio.current_task()
        self.has_worked = True
        if task is not None:
            self._working.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.is_lease_lost:
                raise self.lost() from None
            if self.is_overdue:
                raise self.overdue() from None
            self.is_interrupted = True
            raise
        finally:
            if task is not None:
                self._working.discard(task)

    def event(self, type: str, step_key: str | None = None, payload: Json = None) -> Event:
        """A new event of this run."""
        clock = self.environment.clock
        return Event(
            id=clock.new_id(),
            at=clock.now(),
            project=self.run.project,
            run_id=self.run.id,
            type=type,
            step_key=step_key,
            payload=payload or {},
        )

    def redact(self, value: Json) -> Json:
        """The value without any secret that this process has looked up."""
        return self.environment.secrets.redact(value)

    def error_json(self, error: BaseException) -> dict[str, Json]:
        """An error as the journal keeps it."""
        return self.environment.secrets.redact_error(error)

    async def fail(self, error: Json) -> None:
        """Ends the run as failed, unless it is final already."""
        await self.end(RunStatus.FAILED, error=error)

    async def end(self, status: RunStatus, *, output: Json = None, error: Json = None) -> None:
        """Ends the run, or lets it wait, unless it is final already or somebody else's."""
        if self.is_lease_lost:
            return
        event = self.event(_END_EVENTS[status], None, None if error is None else {"error": error})
        try:
            moved = await self.environment.journal.finish_run(
                self.run.id,
                status,
                at=self.environment.clock.now(),
                output=output,
                error=error,
                events=[event],
                holder=self.lease.holder,
            )
        except RunRefused as refusal:
            if refusal.code != "lease-lost":
                raise
            self.is_lease_lost = True
            return
        if moved:
            self.ended = status

    async def take_lease(self) -> None:
        """Takes the run's lease and keeps it until `close`.

        Raises:
            RunRefused: Another process works on the run (code `lease-held`, `second-process`).
        """
        await self.environment.journal.take_lease(self.lease)
        self.keep_lease()

    async def join_lease(self) -> None:
        """Works under the lease of the process that executes the Dagster run, until `close`.

        Raises:
            RunRefused: That one has lost it (code `lease-lost`).
        """
        if not await self.environment.journal.renew_lease(self.run.id, self.lease.holder):
            self.is_lease_lost = True
            raise self.lost()
        self.keep_lease()

    def keep_lease(self) -> None:
        """Renews the lease, which is held already, until `close`."""
        self._is_held = True
        self._renewals = asyncio.get_running_loop().create_task(self._renew_lease())

    def keep_time(self) -> None:
        """Cuts the run off when its time is over, until `close`."""
        left_s = self._left_s()
        if left_s is not None:
            self._clockwork = asyncio.get_running_loop().create_task(self._cut_off_after(left_s))

    def _left_s(self) -> float | None:
        """How long the run may still take; None: for ever."""
        run, timeout_s = self.run, self.pinned.workflow.settings.timeout_s
        now = self.environment.clock.now()
        if run.deadline_at is not None:
            return (run.deadline_at - now).total_seconds()
        if timeout_s is None:
            return None
        began = run.resumed_at or run.started_at or now
        return timeout_s - run.worked_ms / 1000 - (now - began).total_seconds()

    async def _cut_off_after(self, left_s: float) -> None:
        await asyncio.sleep(left_s)
        self.is_overdue = True
        cut_off = set[asyncio.Task[Any]]()
        while True:
            # Each once, so that its clean-up is not cut off; what begins after this moment likewise.
            for task in self._working - cut_off:
                task.cancel()
                cut_off.add(task)
            await asyncio.sleep(_CUT_OFF_AGAIN_S)

    async def close(self) -> None:
        """Stops renewing the lease and gives it back, unless it is that of another process."""
        guards = [task for task in (self._renewals, self._clockwork) if task is not None]
        for task in guards:
            task.cancel()
        await asyncio.gather(*guards, return_exceptions=True)
        self._renewals = self._clockwork = None
        if self._is_held and not self.is_lease_lost and not self._is_step_process:
            self._is_held = False
            await self.environment.journal.release_lease(self.run.id, self.lease.holder)

    async def _renew_lease(self) -> None:
        interval_s = min(self.environment.lease_s / 3, RENEWAL_S)
        while True:
            await asyncio.sleep(interval_s)
            try:
                if not await self.environment.journal.renew_lease(self.run.id, self.lease.holder):
                    self.is_lease_lost = True
                    for task in self._working:
                        task.cancel()
                    return
            except StoreError as error:
                # The next round may reach the database again; until then the lease runs on.
                logging.getLogger(__name__).warning(
                    "the lease of run %s was not renewed: %s", self.run.id, error
                )


def _keys_above(key: str) -> Iterator[str]:
    """A step key, and those of all that it stands under: `each[3]/ask` is under `each[3]`, and that under `each`."""
    yield key
    for at, mark in enumerate(key):
        if mark in "/[#":
            yield key[:at]
