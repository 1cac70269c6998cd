"""The process that executes a Dagster run holds its run, from before the first step to after the last.

Whatever the executor, and wherever it runs the steps: threads work in the same process; step processes, and the tasks
of a cluster, find in a tag whose lease they work under. Two processes that are told to execute one Dagster run, as by
two daemons on one project, are told apart here: the second one gets no lease, and executes no step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final, Protocol, cast

import dagster as dg

from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.orchestration.dagster_internals import (
    ExecutionPlan,
    PlanOrchestrationContext,
    RetryMode,
    StepDependencyConfig,
)

__all__ = ["HoldingExecutor", "RunHolder"]

_RESUME_POLL_S: Final = 1.0


class RunHolder(Protocol):
    """Takes and gives back the lease of the run that a Dagster run works on."""

    @property
    def lease_s(self) -> float:
        """How long the lease of a worker that was killed lasts."""
        ...

    def hold(self, dagster_run: dg.DagsterRun, instance: dg.DagsterInstance) -> None:
        """Opens the run for this process, unless it has. What else may be wrong with it, the first step raises.

        Raises:
            RunRefused: Another process executes the Dagster run (code `second-process`).
        """
        ...

    def let_go(self, dagster_run_id: str, instance: dg.DagsterInstance) -> None:
        """Gives the run back, where this process holds it."""
        ...


class HoldingExecutor(dg.ExecutorDefinition):
    """An executor whose process holds the run while it executes the steps.

    Args:
        inner: Executes them.
        holder: Holds the run.
    """

    def __init__(self, inner: dg.ExecutorDefinition, holder: RunHolder) -> None:
        create = inner.executor_creation_fn
        assert create is not None  # noqa: S101 - without it no executor can be made

        def create_holding(context: dg.InitExecutorContext) -> dg.Executor:
            return _Executor(create(context), holder)

        super().__init__(
            name=inner.name,
            # As Dagster itself copies one.
            config_schema=cast("Any", inner.config_schema),
            requirements=inner.get_requirements,
            executor_creation_fn=create_holding,
            description=inner.description,
        )
        self.holder = holder


class _Executor(dg.Executor):
    def __init__(self, inner: dg.Executor, holder: RunHolder) -> None:
        self._inner = inner
        self._holder = holder

    @property
    def retries(self) -> RetryMode:
        return self._inner.retries

    @property
    def step_dependency_config(self) -> StepDependencyConfig:
        return self._inner.step_dependency_config

    def execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        instance = plan_context.instance
        self._hold(plan_context)
        try:
            yield from self._inner.execute(plan_context, execution_plan)
        finally:
            self._holder.let_go(plan_context.run_id, instance)

    def _hold(self, plan_context: PlanOrchestrationContext) -> None:
        """Holds the run. A worker that Dagster's run monitoring puts in a dead one's place waits for its lease."""
        waits_until = time.monotonic() + 2 * self._holder.lease_s
        while True:
            try:
                self._holder.hold(plan_context.dagster_run, plan_context.instance)
            except RunRefused:
                if not plan_context.resume_from_failure or time.monotonic() > waits_until:
                    raise
                time.sleep(_RESUME_POLL_S)
            else:
                return
