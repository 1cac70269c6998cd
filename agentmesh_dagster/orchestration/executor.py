"""The executor: Dagster's own step sequence in threads of one process.

A step's thread hands its coroutine to the process's event loop (`agentmesh_dagster.runtime.loop`) and waits, so
hundreds of model calls wait in one process. `plan_run` runs the steps, `event_groups` stores their events,
`output_capture` keeps what they print.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import dagster as dg

from agentmesh_dagster.orchestration.dagster_internals import (
    EngineEventData,
    ExecuteRunWithPlanIterable,
    ExecutionPlan,
    PlanExecutionContext,
    PlanExecutionContextManager,
    PlanOrchestrationContext,
    PoolClaims,
    RetryMode,
    create_compute_log_file_key,
    get_retries_config,
    serializable_error_info_from_exc_info,
)
from agentmesh_dagster.orchestration.event_groups import grouped_event_writes
from agentmesh_dagster.orchestration.output_capture import captured_output
from agentmesh_dagster.orchestration.plan_run import PlanRun

__all__ = [
    "DEFAULT_CANCEL_GRACE_S",
    "DEFAULT_MAX_CONCURRENT",
    "EXECUTOR_NAME",
    "agentmesh_executor",
    "build_executor",
]

EXECUTOR_NAME = "agentmesh_threads"
DEFAULT_MAX_CONCURRENT = 64
DEFAULT_CANCEL_GRACE_S = 10.0


class _ThreadExecutor(dg.Executor):
    def __init__(self, retries: RetryMode, max_concurrent: int, cancel_grace_s: float) -> None:
        self._retries = retries
        self._max_concurrent = max_concurrent
        self._cancel_grace_s = cancel_grace_s

    @property
    def retries(self) -> RetryMode:
        return self._retries

    def execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        step_keys = execution_plan.step_keys_to_execute
        started = time.monotonic()
        with grouped_event_writes(plan_context.instance):
            yield dg.DagsterEvent.engine_event(
                plan_context,
                f"Executing steps in threads of one process (pid: {os.getpid()})",
                EngineEventData.in_process(os.getpid(), step_keys),
            )
            yield from ExecuteRunWithPlanIterable(
                execution_plan=execution_plan,
                iterator=self._run_plan,
                execution_context_manager=PlanExecutionContextManager(
                    job=plan_context.job,
                    retry_mode=plan_context.retry_mode,
                    execution_plan=execution_plan,
                    run_config=plan_context.run_config,
                    dagster_run=plan_context.dagster_run,
                    instance=plan_context.instance,
                    raise_on_error=plan_context.raise_on_error,
                    output_capture=plan_context.output_capture,
                    step_dependency_config=self.step_dependency_config,
                ),
            )
            yield dg.DagsterEvent.engine_event(
                plan_context,
                f"Finished steps in threads (pid: {os.getpid()}) in {time.monotonic() - started:.2f} s",
                EngineEventData.in_process(os.getpid(), step_keys),
            )

    def _run_plan(
        self, job_context: PlanExecutionContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        with (
            PoolClaims(job_context.instance, job_context.dagster_run) as claims,
            execution_plan.start(
                retry_mode=job_context.retry_mode,
                max_concurrent=self._max_concurrent,
                instance_concurrency_context=claims,
                step_dependency_config=job_context.step_dependency_config,
            ) as active,
            ExitStack() as capture,
        ):
            # Standard output belongs to the process, so it is captured once for the whole run.
            logs = job_context.instance.compute_log_manager
            log_key = logs.build_log_key_for_run(job_context.run_id, create_compute_log_file_key())
            try:
                log_context = capture.enter_context(captured_output(logs, log_key))
                event = dg.DagsterEvent.capture_logs(
                    job_context, list(execution_plan.step_keys_to_execute), log_key, log_context
                )
            except Exception:  # noqa: BLE001  # a run goes on without its captured output, and says so
                event = _capture_error(job_context, "setting up")
            yield event
            yield from PlanRun(job_context, active, self._max_concurrent, self._cancel_grace_s).events()
            try:
                capture.close()
            except Exception:  # noqa: BLE001  # as above
                yield _capture_error(job_context, "cleaning up")


def _capture_error(job_context: PlanExecutionContext, doing: str) -> dg.DagsterEvent:
    return dg.DagsterEvent.engine_event(
        job_context,
        f"Exception while {doing} compute log capture",
        EngineEventData(error=serializable_error_info_from_exc_info(sys.exc_info())),
    )


def _check_settings(max_concurrent: int, cancel_grace_s: float) -> None:
    if max_concurrent < 1:
        raise ValueError(f"{EXECUTOR_NAME}: max_concurrent must be at least 1, got {max_concurrent!r}")
    if cancel_grace_s < 0:
        raise ValueError(f"{EXECUTOR_NAME}: cancel_grace_s must not be negative, got {cancel_grace_s!r}")


@dg.executor(
    name=EXECUTOR_NAME,
    config_schema={
        "max_concurrent": dg.Field(
            dg.Int,
            default_value=DEFAULT_MAX_CONCURRENT,
            description="How many steps of a run may be running at once.",
        ),
        "cancel_grace_s": dg.Field(
            dg.Float,
            default_value=DEFAULT_CANCEL_GRACE_S,
            description="How many seconds the steps of a terminated run get for their cleanup.",
        ),
        "retries": get_retries_config(),
    },
)
def agentmesh_executor(init_context: dg.InitExecutorContext) -> dg.Executor:
    """Runs the steps of a run in threads of one process; node bodies share the process's event loop."""
    config: Any = init_context.executor_config
    _check_settings(config["max_concurrent"], config["cancel_grace_s"])
    return _ThreadExecutor(
        retries=RetryMode(next(iter(config["retries"]))),
        max_concurrent=config["max_concurrent"],
        cancel_grace_s=config["cancel_grace_s"],
    )


def build_executor(
    max_concurrent: int = DEFAULT_MAX_CONCURRENT, cancel_grace_s: float = DEFAULT_CANCEL_GRACE_S
) -> dg.ExecutorDefinition:
    """The executor with its settings fixed, as a workflow's settings give them.

    Args:
        max_concurrent: How many steps of a run may be running at once, at least 1.
        cancel_grace_s: How many seconds the steps of a terminated run get for their cleanup, at least 0.

    Raises:
        ValueError: A setting is out of range.
    """
    _check_settings(max_concurrent, cancel_grace_s)
    return agentmesh_executor.configured(
        {"max_concurrent": max_concurrent, "cancel_grace_s": float(cancel_grace_s)}, name=EXECUTOR_NAME
    )
