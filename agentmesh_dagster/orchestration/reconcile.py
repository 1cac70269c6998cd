"""Keeps run rows true to Dagster: the backstop behind runs that write their own end.

A worker that is killed writes nothing. Its lease runs out, and Dagster still believes it started; nobody else finds out
when the code server died with it. So: a run whose Dagster run has ended takes that end over, and a run whose lease has
run out while Dagster calls it started is reported to Dagster as failed (or canceled, where somebody asked for that).
A run that had written how it stands, final or waiting, when its worker was killed is reported to Dagster as that. And a
run whose time is over while it waits has nobody at work who could say so.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.compiler.levels import op_names
from agentmesh_dagster.compiler.snapshot import construct_pinned
from agentmesh_dagster.constants import TAG_CLAIM, TAG_PROJECT, TAG_PUBLICATION, TAG_RUN_ID, TAG_STATUS
from agentmesh_dagster.errors import NodeError, NotFound, RunRefused, TimeOver
from agentmesh_dagster.orchestration.history import missing_error
from agentmesh_dagster.orchestration.host import construct_launch
from agentmesh_dagster.orchestration.launcher import WarmRunLauncher
from agentmesh_dagster.orchestration.retries import settle_retries
from agentmesh_dagster.orchestration.run_failure import first_failure
from agentmesh_dagster.orchestration.run_tags import is_finalizing
from agentmesh_dagster.orchestration.worker_identity import is_worker_dead
from agentmesh_dagster.records import Event, Json, Lease, Run, RunStatus
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.runtime.registry import node_types
from agentmesh_dagster.specs.names import job_name, pinned_job_name

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

UNFINISHED: Final = ("worker-lost", "dagster-run-failed")
"""Codes of errors of runs that ended outside of AgentMesh's own steps."""
_ENDS = {
    dg.DagsterRunStatus.SUCCESS: RunStatus.SUCCEEDED,
    dg.DagsterRunStatus.FAILURE: RunStatus.FAILED,
    dg.DagsterRunStatus.CANCELED: RunStatus.CANCELED,
}
_AT_WORK = (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
_UNBEGUN: Final = (dg.DagsterRunStatus.NOT_STARTED, *_AT_WORK)
_NEVER_BEGAN: Final = "The worker of this run was killed before it had begun."
_LOST: Final = "The worker of this run has not been heard of since its lease ran out; it was probably killed."
_REPORTING_S: Final = 60.0
"""How long a reconciler has for reporting a lost run, before another one may."""
_ENDING_S: Final = 60.0
"""How long a worker that has given its lease back may take until Dagster has heard of its end."""
_STARTING_S: Final = 600.0
"""How long a Dagster run may take from its start until it has bound its run."""
_WARM_STARTING_S: Final = 120.0
"""The same where runs are forked on this machine from a process that has the libraries loaded."""
_SILENCE_S: Final = 3600.0
"""How long a run without a lease must have written nothing before it is given up, where Dagster cannot say more."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A run row that was put right."""

    run_id: str
    status: RunStatus
    reason: str


def reconcile(
    store: Store, instance: dg.DagsterInstance, project: str, clock: Clock | None = None
) -> list[Correction]:
    """Puts right what can be seen to be wrong among the runs of a project that are unfinished or were left behind.

    Safe to run anywhere and at once: each row moves by compare-and-set, and each Dagster run is reported once.
    """
    clock = clock or SystemClock()
    found: list[Correction] = []
    store.runs.shorten_leases(project)
    for unfinished in store.runs.unfinished(project):
        correction = reconcile_run(store, instance, unfinished.run, unfinished.lease, clock)
        if correction is not None:
            found.append(correction)
    for abandoned in store.runs.abandoned(project):
        correction = _tell_dagster_the_end(store, instance, abandoned.run, clock)
        if correction is not None:
            found.append(correction)
    found += _left_behind(store, instance, project, clock)
    found += fail_overdue(store, instance, project, clock)
    _settle_retries(store, instance, project, clock)
    return found


def fail_overdue(
    store: Store, instance: dg.DagsterInstance, project: str, clock: Clock
) -> Generator[Correction]:
    """Fails the runs of a project whose `timeout_s` is over while they wait; what they wait for is closed."""
    for run in store.runs.overdue(project, clock.now()):
        error = TimeOver(
            "the run took longer than its settings.timeout_s, which includes the time for which it waits "
            "(timeout_includes_waiting)",
            code="run-timeout",
        )
        reason = "its time was over while it waited"
        correction = _correct(store, run, RunStatus.FAILED, reason, clock, instance, error.to_json())
        if correction is not None:
            yield correction


def _left_behind(
    store: Store, instance: dg.DagsterInstance, project: str, clock: Clock
) -> Generator[Correction]:
    """Dagster runs at work whose worker died when it had no lease any more, or none yet."""
    at_work = instance.get_run_records(dg.RunsFilter(statuses=list(_UNBEGUN), tags={TAG_PROJECT: project}))
    for record in at_work:
        run = find_run(store, record.dagster_run.run_id)
        correction = None
        if run is None or (run.status is RunStatus.PENDING and run.dagster_run_ids):
            correction = _end_unbegun(store, instance, record, clock)
        elif (
            run.status not in (RunStatus.PENDING, RunStatus.RUNNING)
            and run.dagster_run_ids[-1] == record.dagster_run.run_id
        ):
            correction = _tell_if_left(store, instance, run, clock)
        if correction is not None:
            yield correction


def _end_unbegun(
    store: Store, instance: dg.DagsterInstance, record: dg.RunRecord, clock: Clock
) -> Correction | None:
    """Reports a Dagster run whose worker died before it had bound a run, and gives the launch a row."""
    if not _is_unbegun(instance, record, clock):
        return None
    # As it stands after it was found dead: a worker that ended says so before it is gone.
    dagster_run = instance.get_run_by_id(record.dagster_run.run_id)
    if dagster_run is None or dagster_run.is_finished:
        return None
    tags = dagster_run.tags
    if find_run(store, dagster_run.run_id) is None and (
        tags.get(TAG_RUN_ID) == dagster_run.run_id or tags.get(TAG_STATUS) == RunStatus.RUNNING.value
    ):
        # It says itself that it has bound one: in another database, whose project is called the same.
        return None
    if dagster_run.status is dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(dagster_run, _NEVER_BEGAN)
        return Correction(
            run_id=dagster_run.run_id, status=RunStatus.CANCELED, reason="its worker died before it had begun"
        )
    # The row first: whoever reports it the next time, if this process dies here, finds it.
    run = store_launch(store, instance, dagster_run)
    instance.report_run_failed(dagster_run, _NEVER_BEGAN)
    reason = "its worker died before it had begun"
    correction = None if run is None else _correct(store, run, RunStatus.FAILED, reason, clock, instance)
    return correction or Correction(run_id=dagster_run.run_id, status=RunStatus.FAILED, reason=reason)


def _is_unbegun(instance: dg.DagsterInstance, record: dg.RunRecord, clock: Clock) -> bool:
    """Whether nobody will begin a Dagster run that has bound no run: its worker is dead, or had its time to begin."""
    dagster_run = record.dagster_run
    if is_worker_dead(dagster_run):
        return True
    since = record.start_time or record.update_timestamp.timestamp()
    if dagster_run.status is dg.DagsterRunStatus.NOT_STARTED:
        # Created and not submitted: Dagster's daemon may yet do so, when it comes back.
        limit_s = _SILENCE_S
    else:
        limit_s = _WARM_STARTING_S if isinstance(instance.run_launcher, WarmRunLauncher) else _STARTING_S
    return since + limit_s <= clock.now().timestamp()


def store_launch(store: Store, instance: dg.DagsterInstance, dagster_run: dg.DagsterRun) -> Run | None:
    """Stores the `pending` run of a Dagster run that was launched and never came to its first step, or finds it.

    Returns:
        None where the Dagster run was to continue or finalize another run, is none of this database, or would have been
        refused.
    """
    found = find_run(store, dagster_run.run_id)
    if found is not None:
        return found
    tags = dagster_run.tags
    publication_id = tags.get(TAG_PUBLICATION, "")
    if not publication_id.isdecimal() or _carries_claim(store, dagster_run):
        return None
    try:
        publication = store.publications.get(int(publication_id))
    except NotFound:
        return None
    job = job_name(publication.kind, publication.slug)
    if dagster_run.job_name not in (job, pinned_job_name(job, publication.id)):
        return None
    pinned = construct_pinned(publication)
    launch = construct_launch(dagster_run, op_names(pinned, node_types()), instance)
    if launch.is_selection and not launch.continues:
        return None
    if any(find_run(store, each) is not None for each in launch.continues):
        return None
    run = Run(
        id=launch.run_id,
        project=publication.project,
        kind=publication.kind,
        slug=publication.slug,
        version=publication.version,
        publication=publication.id,
        definition_hash=publication.closure_hash,
        source=launch.source,
        triggered_by=launch.triggered_by,
        input=dict(dagster_run.run_config),
        status=RunStatus.PENDING,
        queued_at=SystemClock().now(),
        retries_left=launch.retries_left,
        finalizers=pinned.workflow.finalizers,
    )
    return run_on_loop(store.journal.bind_run(run, dagster_run.run_id))


def _carries_claim(store: Store, dagster_run: dg.DagsterRun) -> bool:
    """Whether a Dagster run was launched by a claim of its own: its run is stored, and is claimed anew."""
    claim_id = dagster_run.tags.get(TAG_CLAIM)
    claim = None if claim_id is None else run_on_loop(store.journal.claim(claim_id))
    return claim is not None and claim.dagster_run_id in (None, dagster_run.run_id)


def _settle_retries(store: Store, instance: dg.DagsterInstance, project: str, clock: Clock) -> None:
    """Looks after the runs that failed, may be retried, and are Dagster's to retry."""
    for run in store.runs.left_to_dagster(project, failed_since=clock.now() - timedelta(seconds=_SILENCE_S)):
        settle_retries(store, instance, run)


def reconcile_run(
    store: Store, instance: dg.DagsterInstance, run: Run, lease: Lease | None, clock: Clock
) -> Correction | None:
    """Puts one run right, if it is wrong.

    A run without any lease is between two holders (a step process of the multiprocess executor has ended, and the next
    one has not begun), so that only Dagster can say that it is over.
    """
    if run.status is RunStatus.WAITING or not run.dagster_run_ids:
        return None
    now = clock.now()
    # The holder of a live lease, and not always the last one: that may have been refused because of the lease.
    holder = lease.dagster_run_id if lease is not None and lease.is_live else run.dagster_run_ids[-1]
    dagster_run = instance.get_run_by_id(holder)
    if dagster_run is None:
        # Another Dagster instance's run, or one that was deleted: only the journal can tell.
        if not _is_silent(store, run, lease, now):
            return None
        error = missing_error().to_json()
        return _correct(store, run, RunStatus.FAILED, "its Dagster run is gone", clock, error=error)
    if dagster_run.status in _ENDS:
        return _take_over_end(store, instance, run, dagster_run, lease, clock)
    if dagster_run.status in _AT_WORK and lease is not None and not lease.is_live:
        return _end_lost_worker(store, instance, run, clock)
    return None


def _take_over_end(
    store: Store,
    instance: dg.DagsterInstance,
    run: Run,
    dagster_run: dg.DagsterRun,
    lease: Lease | None,
    clock: Clock,
) -> Correction | None:
    status = _ENDS[dagster_run.status]
    if status is RunStatus.SUCCEEDED:
        # Its own last op says so; a run that Dagster calls a success and that did not is between the two.
        if lease is not None and lease.is_live:
            return None
        status = RunStatus.FAILED
    reason = f"Dagster run ended as {dagster_run.status.value}"
    error = None if status is RunStatus.CANCELED else _lost_error(instance, dagster_run.run_id, reason)
    correction = _correct(store, run, status, reason, clock, instance, error)
    if lease is not None and lease.dagster_run_id == dagster_run.run_id:
        # Its worker has ended with it: a retry need not wait until the lease has run out.
        store.runs.release_lease(lease)
    return correction


def _end_lost_worker(store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock) -> Correction | None:
    """Reports a run whose lease has run out before its end."""
    with _taken_lease(store, run, clock) as is_taken:
        dagster_run = _still_at_work(instance, run) if is_taken else None
        if dagster_run is None:
            return None
        if dagster_run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(dagster_run, _LOST)
            return _correct(
                store, run, RunStatus.CANCELED, "its worker died while it was canceled", clock, instance
            )
        error = _lost_error(instance, dagster_run.run_id, "its worker died")
        instance.report_run_failed(dagster_run, _LOST)
        return _correct(store, run, RunStatus.FAILED, "its worker died", clock, instance, error)


def is_dagster_run_over(store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock) -> bool:
    """Whether the last Dagster run of a run that stands still is over, so that another one may continue it.

    Dagster hears of an end a moment after the run's row and its lease say it. Where the worker died in that moment,
    Dagster is told here.

    Args:
        store: The run's.
        instance: The Dagster instance that the run is in.
        run: A run that is waiting or final, as its row says.
        clock: Where times come from.
    """
    dagster_run = instance.get_run_by_id(run.dagster_run_ids[-1]) if run.dagster_run_ids else None
    if dagster_run is None or dagster_run.is_finished:
        return True
    return _tell_if_left(store, instance, run, clock) is not None


def _tell_if_left(store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock) -> Correction | None:
    """Reports a run that stands still, once its worker must be gone."""
    if store.runs.lease(run.id) is None and not _is_left(store, run, clock.now()):
        return None
    # With a lease that is held, nothing is told.
    return _tell_dagster_the_end(store, instance, run, clock)


def _is_left(store: Store, run: Run, now: datetime) -> bool:
    """Whether nobody can be at work on a run that stands still and on which nobody has the lease.

    One that failed or was canceled may have steps at work in other processes, each with the lease in turn; one that
    waits or succeeded has none any more.
    """
    since = run.suspended_at if run.status is RunStatus.WAITING else run.finished_at
    if since is None:
        return False
    if run.status in (RunStatus.WAITING, RunStatus.SUCCEEDED):
        # One that is finalized says so long after its end.
        heard_of = max([since, *(event.at for event in store.runs.events(run.id, type="run.*"))])
        return heard_of + timedelta(seconds=_ENDING_S) <= now
    return _has_been_silent(store, run, now)


def tell_end_of_dead_worker(store: Store, instance: dg.DagsterInstance, dagster_run_id: str) -> bool:
    """Reports a Dagster run as its run's row says, where its worker, which is known to be dead, had written an end.

    Returns:
        Whether it did; False where the run had no end, or is another Dagster run's by now.
    """
    run = find_run(store, dagster_run_id)
    stands_still = run is not None and run.status not in (RunStatus.PENDING, RunStatus.RUNNING)
    if run is None or not stands_still or run.dagster_run_ids[-1] != dagster_run_id:
        return False
    lease = store.runs.lease(run.id)
    if lease is not None and lease.dagster_run_id == dagster_run_id:
        store.runs.release_lease(lease)
    return _tell_dagster_the_end(store, instance, run, SystemClock()) is not None


def _tell_dagster_the_end(
    store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock
) -> Correction | None:
    """Reports a run that has written how it stands, and whose worker died before Dagster heard of it."""
    with _taken_lease(store, run, clock) as is_taken:
        dagster_run = _still_at_work(instance, run) if is_taken else None
        if dagster_run is None:
            return None
        if is_finalizing(dagster_run):
            if dagster_run.status is dg.DagsterRunStatus.CANCELING:
                instance.report_run_canceled(dagster_run, _LOST)
            else:
                instance.report_run_failed(dagster_run, _LOST)
            # The run stays as it ended; what its end asks for is asked for again.
            return Correction(
                run_id=run.id, status=run.status, reason="the worker that finalized it died before the end"
            )
        if run.status is RunStatus.WAITING and dagster_run.status is dg.DagsterRunStatus.CANCELING:
            # Somebody asked for it while the worker could still have heard.
            instance.report_run_canceled(dagster_run, _LOST)
            reason = "its worker died while it was canceled"
            return _correct(store, run, RunStatus.CANCELED, reason, clock, instance)
        stands = "was waiting" if run.status is RunStatus.WAITING else f"had ended as {run.status.value}"
        message = f"The run {stands} when its worker was killed."
        if run.status in (RunStatus.SUCCEEDED, RunStatus.WAITING):
            event = dg.DagsterEvent(
                event_type_value=dg.DagsterEventType.RUN_SUCCESS.value,
                job_name=dagster_run.job_name,
                message=message,
            )
            instance.report_dagster_event(event, dagster_run.run_id)
        elif run.status is RunStatus.CANCELED:
            instance.report_run_canceled(dagster_run, message)
        else:
            instance.report_run_failed(dagster_run, message)
        instance.add_run_tags(dagster_run.run_id, {TAG_STATUS: run.status.value})
        return Correction(
            run_id=run.id, status=run.status, reason="its worker died before Dagster heard of its end"
        )


@contextmanager
def _taken_lease(store: Store, run: Run, clock: Clock) -> Generator[bool]:
    """Takes a lease that has run out, and gives it back: whoever holds it may report the run.

    So of several reconcilers one reports, a worker that was only slow keeps its run, and a reconciler that dies
    half-way leaves a lease that runs out again.
    """
    holder = f"reconciler/{clock.new_id()}"
    lease = Lease(run_id=run.id, dagster_run_id=holder, holder=holder, length_s=_REPORTING_S)
    try:
        run_on_loop(store.journal.take_lease(lease))
    except RunRefused:
        yield False
        return
    try:
        yield True
    finally:
        run_on_loop(store.journal.release_lease(run.id, holder))


def _still_at_work(instance: dg.DagsterInstance, run: Run) -> dg.DagsterRun | None:
    dagster_run = instance.get_run_by_id(run.dagster_run_ids[-1]) if run.dagster_run_ids else None
    return dagster_run if dagster_run is not None and dagster_run.status in _AT_WORK else None


def _is_silent(store: Store, run: Run, lease: Lease | None, now: datetime) -> bool:
    """Whether nobody can be at work on a run that this Dagster instance does not know."""
    if lease is not None:
        return not lease.is_live
    return _has_been_silent(store, run, now)


def _has_been_silent(store: Store, run: Run, now: datetime) -> bool:
    """Whether nothing of a run was written for long."""
    moments = [run.queued_at, run.started_at, run.resumed_at, run.finished_at]
    for step in store.runs.steps(run.id):
        moments += [step.queued_at, step.started_at, step.finished_at]
    heard_of = [moment for moment in moments if moment is not None]
    return not heard_of or max(heard_of) + timedelta(seconds=_SILENCE_S) <= now


def find_run(store: Store, dagster_run_id: str) -> Run | None:
    """The run that a Dagster run works or worked on; None where it is none of AgentMesh's."""
    try:
        return store.runs.get(dagster_run_id)
    except NotFound:
        return None


def _lost_error(instance: dg.DagsterInstance, dagster_run_id: str, reason: str) -> Mapping[str, Json]:
    """The error of a run whose worker could not write it: what Dagster's log says, else that the worker is lost."""
    failure = first_failure(instance, dagster_run_id)
    if failure is None:
        return _unfinished(reason, "worker-lost")
    if failure.error is not None:
        return failure.error
    return _unfinished(
        f"{reason}: {failure.text}", "worker-lost" if failure.is_worker_lost else "dagster-run-failed"
    )


def _unfinished(reason: str, code: str) -> Mapping[str, Json]:
    message = f"the run did not finish: {reason}; retry it to go on where it stopped"
    return NodeError(message, code=code).to_json()


def _correct(
    store: Store,
    run: Run,
    status: RunStatus,
    reason: str,
    clock: Clock,
    instance: dg.DagsterInstance | None = None,
    error: Mapping[str, Json] | None = None,
) -> Correction | None:
    now = clock.now()
    if status is RunStatus.FAILED and error is None:
        error = _unfinished(reason, "worker-lost")
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
        # A waiting run, only where somebody canceled it or its time is over.
        (run.status,) if run.status is RunStatus.WAITING else (RunStatus.PENDING, RunStatus.RUNNING),
        status,
        at=now,
        error=None if error is None else dict(error),
        events=[event],
    )
    if not moved:
        return None
    if instance is not None and instance.get_run_by_id(run.dagster_run_ids[-1]) is not None:
        instance.add_run_tags(run.dagster_run_ids[-1], {TAG_STATUS: status.value})
    return Correction(run_id=run.id, status=status, reason=reason)
