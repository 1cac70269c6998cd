"""Continues a run: one more Dagster run of the same run, built from what the run is pinned to.

Here are those that this process executes by itself, the first one of a run that another run started, and the one that
finalizes a run, among them; the gate sensor asks Dagster for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.constants import FINALIZE_JOB, METADATA_PUBLICATION
from agentmesh_dagster.errors import DefinitionError, RunRefused
from agentmesh_dagster.faults import fault_point
from agentmesh_dagster.orchestration.history import refuse_missing
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.local_run import LocalRun, code_location_file, reconstructable_job
from agentmesh_dagster.orchestration.location_internals import hand_over, reconstructable_from_file
from agentmesh_dagster.orchestration.reconcile import UNFINISHED, is_dagster_run_over, reconcile_run
from agentmesh_dagster.orchestration.retries import settle_retries
from agentmesh_dagster.orchestration.run_failure import first_failure
from agentmesh_dagster.orchestration.run_tags import (
    RESUME_RETRY_TAG,
    continuation_tags,
    first_tags,
    last_working,
)
from agentmesh_dagster.records import Claim, Json, Publication, Run, RunStatus

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.location_internals import ReconstructableJob
    from agentmesh_dagster.store import Store

_RETRYABLE: Final = (RunStatus.FAILED, RunStatus.CANCELED)


def pinned_job(root: Path, publication: Publication) -> ReconstructableJob:
    """The job of one publication, whatever was published since, such that a step process can build it too.

    Raises:
        DefinitionError: The code location cannot be loaded, or does not offer the job (code `job-unloadable`).
    """
    try:
        if code_location_file(root) is None:
            job = reconstructable_job(root, publication.id, publication.slug)
        else:
            # As a code server hands it to its run workers: here, where the file is loaded now, and to step processes.
            load_data = hand_over({METADATA_PUBLICATION: str(publication.id)})
            job = reconstructable_job(root, publication.id, publication.slug)
            job = job.with_repository_load_data(load_data)
        job.get_definition()
    except DefinitionError:
        raise
    except Exception as error:  # the code location is a person's own file, and may raise anything
        raise _unloadable(f"the job of workflow {publication.slug!r}", root, error) from error
    return job


def finalizing_job(root: Path) -> ReconstructableJob:
    """The job `agentmesh_finalize` of a project, with its code location's functions and notifiers.

    Raises:
        DefinitionError: The code location cannot be loaded, or does not offer the job (code `job-unloadable`).
    """
    try:
        file = code_location_file(root)
        if file is None:
            job = dg.build_reconstructable_job(
                "agentmesh_dagster.orchestration.finalize_job",
                "job_of_project",
                reconstructable_kwargs={"root": str(root)},
            )
        else:
            job = reconstructable_from_file(file, FINALIZE_JOB)
        job.get_definition()
    except DefinitionError:
        raise
    except Exception as error:  # the code location is a person's own file, and may raise anything
        raise _unloadable(f"the job {FINALIZE_JOB!r}", root, error) from error
    return job


def _unloadable(what: str, root: Path, error: Exception) -> DefinitionError:
    reason = next(iter(str(error).strip().splitlines()), "")
    return DefinitionError(
        f"{what} cannot be loaded from the code location of {str(root)!r}: {type(error).__name__}: {reason}\n"
        "`dagster definitions validate -w workspace.yaml` shows where",
        code="job-unloadable",
    )


def check_retryable(store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock | None = None) -> Run:
    """Sees whether a run may be continued now, and puts right what a killed worker left behind.

    Returns:
        The run as it stands.

    Raises:
        RunRefused: It did not fail (code `run-not-failed`), something still works on it (`run-at-work`), or its Dagster
            run is not in this Dagster instance (`dagster-run-missing`).
    """
    clock = clock or SystemClock()
    if not run.status.is_final:
        store.runs.shorten_leases(run.project)
        lease = store.runs.lease(run.id)
        if reconcile_run(store, instance, run, lease, clock) is not None:
            run = store.runs.get(run.id)
        elif lease is not None and lease.is_live:
            raise RunRefused(
                f"run {run.id!r} is still being worked on (Dagster run {run.dagster_run_ids[-1]}); wait for its end, "
                "or a minute where its worker was killed",
                code="run-at-work",
            )
    if run.status not in _RETRYABLE:
        raise RunRefused(
            f"run {run.id!r} is {run.status.value}: only failed and canceled runs are retried",
            code="run-not-failed",
        )
    refuse_missing(instance, run)
    _check_over(store, instance, run, clock)
    return run


def check_resumable(store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock | None = None) -> Run:
    """Sees whether a waiting run may be continued now, and tells Dagster the end of a worker that was killed.

    Returns:
        The run as it stands.

    Raises:
        RunRefused: It does not wait (code `run-not-waiting`), nothing that it waits for has come (`nothing-to-resume`),
            something still works on it (`run-at-work`), or its Dagster run is not in this Dagster instance
            (`dagster-run-missing`).
    """
    run = store.runs.get(run.id)
    if run.status is not RunStatus.WAITING:
        raise RunRefused(
            f"run {run.id!r} is {run.status.value}: it waits for nothing", code="run-not-waiting"
        )
    if not store.claims.is_ready(run.id):
        raise RunRefused(
            f"run {run.id!r} is waiting, and nothing that it waits for has come; "
            f"`agentmesh runs show {run.id[:8]}` shows what that is",
            code="nothing-to-resume",
        )
    refuse_missing(instance, run)
    _check_over(store, instance, run, clock or SystemClock())
    return run


def _check_over(store: Store, instance: dg.DagsterInstance, run: Run, clock: Clock) -> None:
    if not run.dagster_run_ids:
        return
    last = run.dagster_run_ids[-1]
    if not is_dagster_run_over(store, instance, run, clock):
        raise RunRefused(
            f"run {run.id!r} is {run.status.value}, and other steps of its Dagster run {last} are still at "
            "work; wait for their end, or terminate it in the Dagster UI",
            code="run-at-work",
        )


def continue_here(
    agentmesh: AgentMesh, job: ReconstructableJob, run: Run, *, instance: dg.DagsterInstance, by: str
) -> LocalRun:
    """Retries a run in this process: finished steps are replayed from the journal.

    Args:
        agentmesh: The process's.
        job: The job of the run's publication.
        run: See `check_retryable`.
        instance: Holds the run's Dagster runs, whose config and tags are handed on.
        by: Who asks for it.

    Raises:
        RunRefused: The Dagster run ended before it could go on (code `not-continued`).
    """
    store = agentmesh.store()
    store.audit.add(run.project, "retry", actor=by, entity=f"run/{run.id}", version=run.version)
    if last_working(instance, run.dagster_run_ids) is not None:
        return _execute_here(agentmesh, job, run, instance, {RESUME_RETRY_TAG: "true", "user": by}, None)
    # Canceled before it had begun: there is no Dagster run whose retry this could be.
    claim = store.claims.claim(run.id, reason="resume")
    if claim is None:
        raise RunRefused(
            f"somebody else continues run {run.id!r} already; `agentmesh runs show {run.id[:8]}` shows how it stands",
            code="run-claimed",
        )
    return _execute_here(agentmesh, job, run, instance, {"user": by}, claim)


def resume_here(
    agentmesh: AgentMesh,
    job: ReconstructableJob,
    run: Run,
    *,
    instance: dg.DagsterInstance,
    claim: Claim,
    by: str,
) -> LocalRun:
    """Continues a run in this process by a claim, as the gate sensor has Dagster do it.

    Args:
        agentmesh: The process's.
        job: The job of the run's publication.
        run: See `check_resumable`.
        instance: Holds the run's Dagster runs, whose config and tags are handed on.
        claim: The caller's.
        by: Who asks for it.

    Raises:
        RunRefused: The Dagster run ended before it could go on (code `not-continued`).
    """
    agentmesh.store().audit.add(run.project, "resume", actor=by, entity=f"run/{run.id}", version=run.version)
    return _execute_here(agentmesh, job, run, instance, {"user": by}, claim)


def start_here(
    agentmesh: AgentMesh,
    job: ReconstructableJob,
    run: Run,
    *,
    instance: dg.DagsterInstance,
    claim: Claim,
    by: str,
) -> LocalRun:
    """Begins a run in this process that another run started; see `resume_here`.

    Raises:
        RunRefused: The Dagster run ended before it could begin (code `not-continued`).
    """
    agentmesh.store().audit.add(run.project, "start", actor=by, entity=f"run/{run.id}", version=run.version)
    return _execute_here(agentmesh, job, run, instance, {"user": by}, claim)


def finalize_here(
    agentmesh: AgentMesh, root: Path, run: Run, *, instance: dg.DagsterInstance, by: str
) -> bool:
    """Runs `on_failure` and `finally` of a run that has ended in this process, where they are due.

    Args:
        agentmesh: The process's.
        root: The project's folder.
        run: The run.
        instance: Holds the run's Dagster runs.
        by: Who asks for it.

    Returns:
        Whether they were due, and nobody else runs them; how they went, the events of the run say.

    Raises:
        RunRefused: Its Dagster run has not ended yet (code `run-at-work`), or the one that was to finalize it ended
            before it could (`not-continued`).
    """
    store = agentmesh.store()
    run = store.runs.get(run.id)
    if not run.status.is_final or run.finalized >= run.endings:
        return False
    _check_over(store, instance, run, SystemClock())
    if run.status is RunStatus.FAILED and run.retries_left:
        left = store.runs.left_to_dagster(run.project, failed_since=run.finished_at or SystemClock().now())
        if any(each.id == run.id for each in left):
            settle_retries(store, instance, run)
    job = finalizing_job(root)
    claim = store.claims.claim(run.id, reason="finalize")
    if claim is None:
        return False
    last = last_working(instance, run.dagster_run_ids)
    first = instance.get_run_by_id(run.dagster_run_ids[0]) if run.dagster_run_ids else None
    if last is None or first is None:
        tags = first_tags(run, claim)
    else:
        tags = continuation_tags(first, last, claim=claim)
    result = dg.execute_job(job, instance=instance, tags={**tags, "user": by}, raise_on_error=False)
    if result.run_id not in store.runs.get(run.id).dagster_run_ids:
        reason = _why_not(instance, result.run_id)
        raise RunRefused(
            f"run {run.id!r} could not be finalized: {reason}",
            code="not-continued",
            context={"dagster_run_id": result.run_id},
        )
    return True


def _execute_here(
    agentmesh: AgentMesh,
    job: ReconstructableJob,
    run: Run,
    instance: dg.DagsterInstance,
    tags: Mapping[str, str],
    claim: Claim | None,
) -> LocalRun:
    parent = last_working(instance, run.dagster_run_ids)
    # All steps, not those that Dagster holds for failed: a killed worker's steps have no end, and what finished costs
    # nothing to replay.
    fault_point("launch.before")
    if parent is None:
        # No Dagster run has worked on it: what it is launched with stands in its row.
        own = first_tags(run, claim) if claim is not None else {}
        result = dg.execute_job(
            job, instance=instance, run_config=run.input or {}, tags={**own, **tags}, raise_on_error=False
        )
    else:
        first = instance.get_run_by_id(run.dagster_run_ids[0]) or parent
        result = dg.execute_job(
            job,
            instance=instance,
            tags={**continuation_tags(first, parent, claim=claim), **tags},
            raise_on_error=False,
            reexecution_options=dg.ReexecutionOptions(parent_run_id=parent.run_id),
        )
    fault_point("launch.after")
    store = agentmesh.store()
    stands = store.runs.get(run.id)
    if result.run_id in stands.dagster_run_ids and not stands.status.is_final:
        reconcile_run(store, instance, stands, store.runs.lease(stands.id), SystemClock())
        stands = store.runs.get(run.id)
    error: dict[str, Json] = stands.error or {}
    if result.run_id not in stands.dagster_run_ids or error.get("code") in UNFINISHED:
        reason = _why_not(instance, result.run_id)
        raise RunRefused(
            f"run {run.id!r} could not go on: {reason}",
            code="not-continued",
            context={"dagster_run_id": result.run_id},
        )
    ended = instance.get_run_by_id(result.run_id)
    return LocalRun(
        dagster_run_id=result.run_id,
        dagster_status=ended.status.value if ended else "UNKNOWN",
        run=stands,
    )


def _why_not(instance: dg.DagsterInstance, dagster_run_id: str) -> str:
    failure = first_failure(instance, dagster_run_id)
    return "its Dagster run ended early" if failure is None else failure.text
