"""A journal that waits: what the database cannot do now is asked again for a while, before the step fails.

Repeating is safe, because each write says the whole of what is to be stored and is stored once: a finished row is
compared with the one that is there, events and waits have ids, a binding is found again. So it does no harm that
nobody knows whether a commit, whose answer was lost with the connection, was done.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from typing import Final, TypeVar

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.faults import fault_point
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
from agentmesh_dagster.runtime.ports import Journal

T = TypeVar("T")

BOUND_S: Final = 30.0
"""How long one outage is waited for."""
FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 2.0

_log = logging.getLogger(__name__)


class PatientJournal:
    """Fulfils `runtime.ports.Journal` by another one, whose retryable failures it waits out.

    A call is repeated, first after 0.1 s and then after twice as long each time, up to 2 s, each wait shortened at
    random by at most a half, until `bound_s` have passed since the call came; then the last `StoreError` goes on. After
    an outage has outlasted one call, those that come after it do not wait until one has succeeded: a step that fails
    has several things to write.

    Around each write it passes the fault points `journal.<method>.before` and `.after`, once for a call however often
    that is repeated; of steps' rows they say which, one for each entry: `journal.record.tool.running.before`.

    Args:
        journal: The journal that reaches the database.
        clock: Measures the bound.
        bound_s: Keep it so far below a run's lease that a lease outlasts the wait: half of it is well.
        sleep: Waits so many seconds.
        jitter: A number from 0 to 1, another one each time.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        clock: Clock,
        bound_s: float = BOUND_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._bound_s = bound_s
        self._sleep = sleep
        self._jitter = jitter
        self._given_up = False

    async def bind_run(
        self,
        run: Run,
        dagster_run_id: str,
        events: Sequence[Event] = (),
        *,
        claim: str | None = None,
        lease: Lease | None = None,
    ) -> Run:
        return await self._write(
            "bind_run", lambda: self._journal.bind_run(run, dagster_run_id, events, claim=claim, lease=lease)
        )

    async def claim(self, claim_id: str) -> Claim | None:
        return await self._patiently("claim", lambda: self._journal.claim(claim_id))

    async def spend_claim(self, claim_id: str, dagster_run_id: str) -> None:
        await self._write("spend_claim", lambda: self._journal.spend_claim(claim_id, dagster_run_id))

    async def waits(self, run_id: str, node_key: str | None = None) -> tuple[Wait, ...]:
        return await self._patiently("waits", lambda: self._journal.waits(run_id, node_key))

    async def run_of(self, dagster_run_id: str) -> Run | None:
        return await self._patiently("run_of", lambda: self._journal.run_of(dagster_run_id))

    async def run(self, run_id: str) -> Run | None:
        return await self._patiently("run", lambda: self._journal.run(run_id))

    async def published(self, project: str, kind: str, slug: str) -> Publication | None:
        return await self._patiently("published", lambda: self._journal.published(project, kind, slug))

    async def start_child(self, run: Run, events: Sequence[Event] = (), *, holder: str | None = None) -> Run:
        return await self._write("start_child", lambda: self._journal.start_child(run, events, holder=holder))

    async def finalized(self, run_id: str, ending: int, *, holder: str | None = None) -> None:
        await self._write("finalized", lambda: self._journal.finalized(run_id, ending, holder=holder))

    async def steps(
        self, run_id: str, keys: Collection[str] | None = None, *, needed: bool = False
    ) -> dict[str, Step]:
        return await self._patiently("steps", lambda: self._journal.steps(run_id, keys, needed=needed))

    async def record(self, entries: Sequence[Entry], *, holder: str | None = None) -> None:
        points = [f"journal.record.{entry.step.kind}.{entry.step.status.value}" for entry in entries]
        for point in points:
            fault_point(point + ".before")
        await self._patiently("record", lambda: self._journal.record(entries, holder=holder))
        for point in points:
            fault_point(point + ".after")

    async def record_events(self, events: Sequence[Event], *, holder: str | None = None) -> None:
        await self._write("record_events", lambda: self._journal.record_events(events, holder=holder))

    async def emit(
        self, receipt: Event, name: str, key: str, data: Json, *, keep_s: float, holder: str | None = None
    ) -> str:
        return await self._write(
            "emit", lambda: self._journal.emit(receipt, name, key, data, keep_s=keep_s, holder=holder)
        )

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
        """Moves a run that is not final to `status`.

        Returns:
            Whether this call moved it, be it by an attempt whose answer was lost.
        """
        failures = 0

        async def move() -> bool:
            nonlocal failures
            try:
                moved = await self._journal.finish_run(
                    run_id,
                    status,
                    at=at,
                    output=output,
                    error=error,
                    events=events,
                    holder=holder,
                )
            except StoreError:
                failures += 1
                raise
            if moved or not failures:
                return moved
            # Some attempt before may have done it: then the run stands as it was to stand, since that very moment.
            stands = await self._journal.run(run_id)
            return stands is not None and stands.status is status and _since(stands) == at

        return await self._write("finish_run", move)

    async def take_lease(self, lease: Lease) -> None:
        await self._write("take_lease", lambda: self._journal.take_lease(lease))

    async def renew_lease(self, run_id: str, holder: str) -> bool:
        """Renews the lease, and is tried once: whoever renews comes again soon."""
        return await self._journal.renew_lease(run_id, holder)

    async def release_lease(self, run_id: str, holder: str) -> None:
        await self._write("release_lease", lambda: self._journal.release_lease(run_id, holder))

    async def _write(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        fault_point(f"journal.{name}.before")
        result = await self._patiently(name, call)
        fault_point(f"journal.{name}.after")
        return result

    async def _patiently(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        bound_s = 0.0 if self._given_up else self._bound_s
        began = self._clock.monotonic_s()
        delay_s = FIRST_DELAY_S
        while True:
            try:
                result = await call()
            except StoreError as error:
                left_s = began + bound_s - self._clock.monotonic_s()
                if not error.retryable:
                    raise
                if left_s <= 0:
                    self._given_up = True
                    raise
                if delay_s == FIRST_DELAY_S:
                    _log.warning("journal.%s waits for the database, %.0f s at most: %s", name, left_s, error)
            else:
                self._given_up = False
                return result
            await self._sleep(min(delay_s * (1 - self._jitter() / 2), left_s))
            delay_s = min(delay_s * 2, LONGEST_DELAY_S)


def _since(run: Run) -> datetime | None:
    """When the run came to stand where it stands."""
    return run.suspended_at if run.status is RunStatus.WAITING else run.finished_at
