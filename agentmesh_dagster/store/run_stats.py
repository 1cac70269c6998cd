"""What the runs of a definition came to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Connection, func, select

from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.store.tables import runs


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """What the runs of a definition came to."""

    runs: int
    by_status: dict[str, int] = field(default_factory=dict[str, int])
    """How many runs stand in each status; statuses without runs are left out."""
    success_rate: float | None = None
    """Succeeded among succeeded and failed, from 0 to 1; None before the first of them."""
    mean_duration_ms: float | None = None
    """Over succeeded, failed and canceled runs."""
    p95_duration_ms: int | None = None
    """95 of 100 such runs took no longer (nearest rank)."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    last_run_id: str | None = None
    last_run_at: datetime | None = None


def load_stats(connection: Connection, project: str, kind: str, slug: str) -> RunStats:
    """The figures over all versions of a definition."""
    mine = (runs.c.project == project, runs.c.kind == kind, runs.c.slug == slug)
    totals = select(
        runs.c.status,
        func.count(),
        func.sum(runs.c.input_tokens),
        func.sum(runs.c.output_tokens),
        func.sum(runs.c.cost_usd),
        func.count(runs.c.duration_ms),
        func.sum(runs.c.duration_ms),
    )
    groups = connection.execute(totals.where(*mine).group_by(runs.c.status)).all()
    timed = int(sum(group[5] for group in groups))
    durations = select(runs.c.duration_ms).where(*mine, runs.c.duration_ms.is_not(None))
    p95 = (
        connection.execute(
            durations.order_by(runs.c.duration_ms).offset(math.ceil(0.95 * timed) - 1).limit(1)
        ).scalar()
        if timed
        else None
    )
    newest = select(runs.c.id, runs.c.created_at).where(*mine)
    last = connection.execute(newest.order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(1)).first()
    by_status = {group[0]: int(group[1]) for group in groups}
    succeeded = by_status.get(RunStatus.SUCCEEDED.value, 0)
    judged = succeeded + by_status.get(RunStatus.FAILED.value, 0)
    return RunStats(
        runs=sum(by_status.values()),
        by_status=by_status,
        success_rate=succeeded / judged if judged else None,
        mean_duration_ms=float(sum(group[6] or 0 for group in groups)) / timed if timed else None,
        p95_duration_ms=p95,
        input_tokens=int(sum(group[2] for group in groups)),
        output_tokens=int(sum(group[3] for group in groups)),
        cost_usd=float(sum(group[4] for group in groups)),
        last_run_id=None if last is None else last[0],
        last_run_at=None if last is None else last[1],
    )
