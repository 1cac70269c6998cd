"""The sensors that keep run rows true: one that hears of ended Dagster runs, and one that looks for lost workers."""

from __future__ import annotations

import dagster as dg

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.constants import TAG_CLAIM, TAG_PROJECT
from agentmesh_dagster.orchestration.cancellation import cancel_children, set_canceled
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.reconcile import find_run, reconcile, reconcile_run, store_launch
from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.runtime.loop import run_on_loop


def build_run_status_sensors(
    agentmesh: AgentMesh, *, minimum_interval_s: int = 15
) -> list[dg.SensorDefinition]:
    """Sensors on failed and on canceled Dagster runs: the run row takes that end over at once.

    Runs write their own end; these are for the runs that could not.
    """

    def sensor(status: dg.DagsterRunStatus, name: str) -> dg.SensorDefinition:
        def heard(context: dg.RunStatusSensorContext) -> dg.SkipReason:
            # Not the run id of the tag, which a re-execution copies: whose work it was stands in the store.
            run = find_run(agentmesh.store(), context.dagster_run.run_id)
            if run is None:
                said = _failed_unbegun(agentmesh, context) or _canceled_unbegun(agentmesh, context)
                return dg.SkipReason(said or "not a run of AgentMesh")
            store = agentmesh.store()
            if run.status.is_final or run.dagster_run_ids[-1] != context.dagster_run.run_id:
                said = f"run {run.id} has written its own end"
            else:
                lease = store.runs.lease(run.id)
                correction = reconcile_run(store, context.instance, run, lease, SystemClock())
                said = f"run {run.id}: {correction.reason if correction else 'nothing to put right'}"
                run = store.runs.get(run.id)
            if status is dg.DagsterRunStatus.CANCELED and run.status is RunStatus.CANCELED:
                # Canceled in Dagster, which knows nothing of the runs that it has started.
                cancel_children(store, context.instance, run, by="Dagster")
            return dg.SkipReason(said)

        return dg.run_status_sensor(  # pyright: ignore[reportUnknownMemberType] - Dagster types its metadata in part
            run_status=status,
            name=name,
            minimum_interval_seconds=minimum_interval_s,
            description=f"Takes the end of Dagster runs that end as {status.value} over into AgentMesh's run rows.",
            default_status=dg.DefaultSensorStatus.RUNNING,
        )(heard)

    return [
        sensor(dg.DagsterRunStatus.FAILURE, "agentmesh_run_failed"),
        sensor(dg.DagsterRunStatus.CANCELED, "agentmesh_run_canceled"),
    ]


def _failed_unbegun(agentmesh: AgentMesh, context: dg.RunStatusSensorContext) -> str | None:
    """Gives a launch that failed before its first step a row, so that it is seen, retried and finalized like others."""
    dagster_run, store = context.dagster_run, agentmesh.store()
    if (
        dagster_run.status is not dg.DagsterRunStatus.FAILURE
        or dagster_run.tags.get(TAG_PROJECT) != agentmesh.project
        or context.instance.all_logs(dagster_run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    ):
        return None
    run = store_launch(store, context.instance, dagster_run)
    if run is None:
        return None
    correction = reconcile_run(store, context.instance, run, None, SystemClock())
    return None if correction is None else f"run {run.id} is failed: its worker died before it had begun"


def _canceled_unbegun(agentmesh: AgentMesh, context: dg.RunStatusSensorContext) -> str | None:
    """Cancels the run that a Dagster run was to start or continue, which somebody canceled in Dagster before it began.

    Without that, another one would be started in its place.
    """
    dagster_run, store = context.dagster_run, agentmesh.store()
    claim_id = dagster_run.tags.get(TAG_CLAIM)
    is_copy = dagster_run.parent_run_id is not None
    if claim_id is None or is_copy or dagster_run.status is not dg.DagsterRunStatus.CANCELED:
        return None
    claim = run_on_loop(store.journal.claim(claim_id))
    if claim is None or not claim.is_current or claim.dagster_run_id is not None:
        return None
    run = store.runs.get(claim.run_id)
    if run.project != agentmesh.project or run.status not in (RunStatus.PENDING, RunStatus.WAITING):
        return None
    if not set_canceled(store, context.instance, run, "Dagster", SystemClock()):
        return None
    cancel_children(store, context.instance, run, by="Dagster")
    whose = "first Dagster run" if run.status is RunStatus.PENDING else "continuation"
    return f"run {run.id} is canceled: its {whose} was canceled in Dagster before it began"


def build_reconciler_sensor(agentmesh: AgentMesh, *, minimum_interval_s: int = 15) -> dg.SensorDefinition:
    """A sensor that compares unfinished runs with Dagster, and reports runs whose worker was killed."""

    @dg.sensor(  # pyright: ignore[reportUnknownMemberType] - Dagster types its metadata in part
        name="agentmesh_reconciler",
        minimum_interval_seconds=minimum_interval_s,
        description="Finds runs whose worker died (lease run out) or whose time was over while they waited, and puts "
        "their rows and Dagster's status right.",
        default_status=dg.DefaultSensorStatus.RUNNING,
    )
    def agentmesh_reconciler(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        corrections = reconcile(agentmesh.store(), context.instance, agentmesh.project)
        if not corrections:
            return dg.SkipReason("nothing to put right")
        return dg.SkipReason(
            "; ".join(f"run {c.run_id} is {c.status.value}: {c.reason}" for c in corrections)
        )

    return agentmesh_reconciler
