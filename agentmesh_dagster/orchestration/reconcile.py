"""Keeps run rows true to Dagster: the backstop behind runs that write their own end.

A worker that is killed writes nothing. Its lease runs out, and Dagster still believes it started; nobody else finds out
when the code server died with it. So: a run whose Dagster run has ended takes that end over, and a run whose lease has
run out while Dagster calls it started is reported to Dagster as failed (or canceled, where somebody asked for that).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import dagster as dg

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.constants import TAG_STATUS
from agentmesh_dagster.errors import NodeError, NotFound
from agentmesh_dagster.records import Event, Lease, Run, RunStatus

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

_ENDS = {
    dg.DagsterRunStatus.SUCCESS: RunStatus.SUCCEEDED,
    dg.DagsterRunStatus.FAILURE: RunStatus.FAILED,
    dg.DagsterRunStatus.CANCELED: RunStatus.CANCELED,
}
_AT_WORK = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A run row that was put right."""

    run_id: str
    status: RunStatus
    reason: str


def reconcile(
    store: Store, instance: dg.DagsterInstance, project: str, clock: Clock | None = None
) -> list[Correction]:
    """Puts right what can be seen to be wrong among the unfinished runs of a project.

    Safe to run anywhere and at once: each row moves by compare-and-set, and each Dagster run is reported once.
    """
    clock = clock or SystemClock()
    found: list[Correction] = []
    for unfinished in store.runs.unfinished(project):
        correction = reconcile_run(store, instance, unfinished.run, unfinished.lease, clock)
        if correction is not None:
            found.append(correction)
    return found


def reconcile_run(
    store: Store, instance: dg.DagsterInstance, run: Run, lease: Lease | None, clock: Clock
) -> Correction | None:
    """Puts one run right, if it is wrong."""
    if run.status is RunStatus.WAITING or not run.dagster_run_ids:
        return None
    dagster_run = instance.get_run_by_id(run.dagster_run_ids[-1])
    now = clock.now()
    if dagster_run is None:
        # Another Dagster instance's run, or one that was deleted: only the lease can tell.
        return (
            _correct(store, run, RunStatus.FAILED, "its Dagster run is gone", clock)
            if _is_over(lease, now)
            else None
        )
    if dagster_run.status in _ENDS:
        status = _ENDS[dagster_run.status]
        if status is RunStatus.SUCCEEDED:
            # Its own last op says so; a run that Dagster calls a success and that did not is between the two.
            if not _is_over(lease, now):
                return None
            status = RunStatus.FAILED
        return _correct(
            store, run, status, f"Dagster run ended as {dagster_run.status.value}", clock, instance
        )
    if dagster_run.status in _AT_WORK and _is_over(lease, now):
        message = (
            "The worker of this run has not been heard of since its lease ran out; it was probably killed."
        )
        if dagster_run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(dagster_run, message)
            return _correct(
                store, run, RunStatus.CANCELED, "its worker died while it was canceled", clock, instance
            )
        instance.report_run_failed(dagster_run, message)
        return _correct(store, run, RunStatus.FAILED, "its worker died", clock, instance)
    return None


def find_run(store: Store, dagster_run_id: str) -> Run | None:
    """The run that a Dagster run works or worked on; None where it is none of AgentMesh's."""
    try:
        return store.runs.get(dagster_run_id)
    except NotFound:
        return None


def lease_of(store: Store, run: Run) -> Lease | None:
    """The lease on an unfinished run."""
    return next((found.lease for found in store.runs.unfinished(run.project) if found.run.id == run.id), None)


def _is_over(lease: Lease | None, now: datetime) -> bool:
    return lease is None or lease.expires_at <= now


def _correct(
    store: Store,
    run: Run,
    status: RunStatus,
    reason: str,
    clock: Clock,
    instance: dg.DagsterInstance | None = None,
) -> Correction | None:
    now = clock.now()
    error = None
    if status is RunStatus.FAILED:
        error = NodeError(
            f"the run did not finish: {reason}; retry it to go on where it stopped", code="worker-lost"
        )
    event = Event(
        id=clock.new_id(),
        at=now,
        project=run.project,
        run_id=run.id,
        type="run.canceled" if status is RunStatus.CANCELED else "run.failed",
        payload={"reason": reason},
    )
    moved = store.runs.set_status(
        run.id,
        (RunStatus.PENDING, RunStatus.RUNNING),
        status,
        at=now,
        error=error.to_json() if error else None,
        events=[event],
    )
    if not moved:
        return None
    if instance is not None:
        instance.add_run_tags(run.dagster_run_ids[-1], {TAG_STATUS: status.value})
    return Correction(run_id=run.id, status=status, reason=reason)
