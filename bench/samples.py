"""Records of runs that no Dagster run works on, to fill a database with."""

from __future__ import annotations

import sqlite3
from datetime import datetime, timedelta, timezone
from typing import Any, Final
from uuid import uuid4

import psycopg2

from agentmesh_dagster.records import Event, Run, RunStatus, Step, StepStatus, Wait, WaitKind
from agentmesh_dagster.store.tables import dagster_runs, runs, steps, waits

PROJECT: Final = "default"

_ROWS_OF_A_RUN: Final = {
    runs: ("id",),
    dagster_runs: ("dagster_run_id", "run_id"),
    steps: ("run_id",),
    waits: ("id", "run_id"),
}
"""Tables with the columns by which their rows belong to a run, in the order in which they refer to each other."""

OUTPUT: Final = {"text": "An answer of some length, as models give it. " * 8, "usage": {"input_tokens": 321}}


def now() -> datetime:
    """The present moment."""
    return datetime.now(timezone.utc)


def new_run() -> Run:
    """A run that has begun."""
    run_id = str(uuid4())
    return Run(
        id=run_id,
        project=PROJECT,
        kind="workflow",
        slug="bench",
        version=1,
        publication=1,
        definition_hash="0" * 64,
        status=RunStatus.RUNNING,
        dagster_run_ids=(run_id,),
        started_at=now(),
    )


def new_step(run: Run, key: str) -> Step:
    """An agent's step that has succeeded."""
    return Step(
        run_id=run.id,
        key=key,
        node_id=key,
        node_type="agent",
        predecessor_keys=("start",),
        status=StepStatus.SUCCEEDED,
        input={"prompt": "A question."},
        output=OUTPUT,
        fingerprint="0" * 64,
        routing_decision={"handles": [], "edges": [0]},
        queued_at=now(),
        started_at=now(),
        finished_at=now(),
        duration_ms=1,
        dagster_run_id=run.id,
    )


def new_event(step: Step, type_: str) -> Event:
    """An event of a step."""
    return Event(
        id=str(uuid4()),
        at=now(),
        project=PROJECT,
        run_id=step.run_id,
        type=type_,
        step_key=step.key,
        payload={"attempt": 1, "node_type": step.node_type},
    )


def new_gate(run: Run) -> tuple[Step, Wait]:
    """A step that waits, and the gate at which it does: for a month, with a reminder on the way."""
    step = Step(
        run_id=run.id,
        key="review",
        node_id="review",
        node_type="human",
        predecessor_keys=("start",),
        status=StepStatus.WAITING,
        fingerprint="0" * 64,
        queued_at=now(),
        started_at=now(),
        dagster_run_id=run.id,
    )
    wait = Wait(
        id=str(uuid4()),
        project=PROJECT,
        run_id=run.id,
        step_key=step.key,
        kind=WaitKind.HUMAN,
        node_id=step.node_id,
        title="Go on?",
        body="A few words about what is asked. " * 10,
        created_at=now(),
        deadline_at=now() + timedelta(days=30),
        remind_at=now() + timedelta(days=7),
    )
    return step, wait


def multiply(url: str, copies: int) -> None:
    """Copies all runs of a database with their steps and waits, under new ids: much quicker than to journal them."""
    connection: Any = (
        sqlite3.connect(url.removeprefix("sqlite:///"))
        if url.startswith("sqlite:")
        else psycopg2.connect(url)
    )
    cursor = connection.cursor()
    for number in range(copies):
        for table, ids in _ROWS_OF_A_RUN.items():
            columns = [column.name for column in table.columns]
            values = [f"'{number}-' || {name}" if name in ids else name for name in columns]
            # Copies have longer ids than the UUIDs of what was journalled, and are not copied again.
            cursor.execute(
                f"INSERT INTO {table.name} ({', '.join(columns)}) "
                f"SELECT {', '.join(values)} FROM {table.name} WHERE length({ids[0]}) = 36"
            )
    connection.commit()
    connection.close()
