"""Records for tests of the journal, with only the fields that a test speaks of to be given."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import update

from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.records import Event, Lease, Run, RunStatus, Step, StepStatus, Vote, Wait, WaitKind
from agentmesh_dagster.store import Store
from agentmesh_dagster.store.tables import leases

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=timezone.utc)


def at(seconds: float) -> datetime:
    """So many seconds after noon."""
    return NOON + timedelta(seconds=seconds)


def a_run(run_id: str = "run-1", **fields: Any) -> Run:
    values: dict[str, Any] = {
        "id": run_id,
        "project": "default",
        "kind": "workflow",
        "slug": "refunds",
        "version": 1,
        "publication": 1,
        "definition_hash": "abc",
        "status": RunStatus.RUNNING,
        "started_at": NOON,
    }
    return Run(**{**values, **fields})


def a_step(key: str = "classify", run_id: str = "run-1", **fields: Any) -> Step:
    values: dict[str, Any] = {
        "run_id": run_id,
        "key": key,
        "node_id": key.partition("/")[0],
        "node_type": "agent",
        "status": StepStatus.SUCCEEDED,
        "started_at": NOON,
        "finished_at": at(1),
        "duration_ms": 1000,
    }
    return Step(**{**values, **fields})


def an_event(type_: str = "step.completed", run_id: str = "run-1", **fields: Any) -> Event:
    values: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "at": NOON,
        "project": "default",
        "run_id": run_id,
        "type": type_,
    }
    return Event(**{**values, **fields})


def a_wait(label: str = "", run_id: str = "run-1", **fields: Any) -> Wait:
    values: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "project": "default",
        "run_id": run_id,
        "step_key": "gate",
        "label": label,
        "kind": WaitKind.HUMAN,
        "node_id": "gate",
        "created_at": NOON,
    }
    return Wait(**{**values, **fields})


def a_vote(by: str = "ann", decision: Any = "approved", **fields: Any) -> Vote:
    return Vote(**{"by": by, "decision": decision, "at": at(60), **fields})


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return at(self.seconds)

    def monotonic_s(self) -> float:
        return self.seconds

    def new_id(self) -> str:
        return str(uuid.uuid4())


def a_lease(
    holder: str = "worker",
    run_id: str = "run-1",
    *,
    dagster_run_id: str | None = None,
    length_s: float = 60.0,
) -> Lease:
    """A lease of a worker, which executes the Dagster run of its name where none is named."""
    return Lease(run_id=run_id, dagster_run_id=dagster_run_id or holder, holder=holder, length_s=length_s)


def take_lease(store: Store, holder: str = "worker", run_id: str = "run-1", **fields: Any) -> bool:
    """Takes a lease; False where another one's is live. With a negative `length_s` it has run out at once."""
    try:
        asyncio.run(store.journal.take_lease(a_lease(holder, run_id, **fields)))
    except RunRefused:
        return False
    return True


def end_leases(store: Store, moment: datetime = NOON) -> None:
    """Makes all leases run out, at a moment that has passed."""
    with store._database.write() as connection:
        connection.execute(update(leases).values(expires_at=moment))
