"""Every private Dagster name that this project uses, and small adaptors that reach into private attributes.

Dagster promises nothing about ``dagster._*``. So nothing else imports from there;
``tests/test_dagster_internals.py`` holds each name, signature and attribute used here against the installed
release, and says which one moved. To use another private name: import it here under its heading, add it to
``__all__``, and state in that test what is relied on.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import dagster as dg

# Errors, events, checks.
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.events import (
    ASSET_CHECK_EVENTS,
    ASSET_EVENTS,
    EVENT_TYPE_TO_PIPELINE_RUN_STATUS,
    EngineEventData,
)
from dagster._core.events.log import EventLogEntry

# Running a plan and its steps.
from dagster._core.execution.api import ExecuteRunWithPlanIterable
from dagster._core.execution.compute_logs import create_compute_log_file_key
from dagster._core.execution.context.system import (
    PlanExecutionContext,
    PlanOrchestrationContext,
    StepExecutionContext,
)
from dagster._core.execution.context_creation_job import PlanExecutionContextManager
from dagster._core.execution.plan import execute_plan
from dagster._core.execution.plan.active import ActiveExecution
from dagster._core.execution.plan.execute_plan import dagster_event_sequence_for_step
from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext
from dagster._core.execution.plan.objects import ErrorSource, StepFailureData
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.plan.state import KnownExecutionState
from dagster._core.execution.plan.step import ExecutionStep
from dagster._core.execution.retries import RetryMode, get_retries_config
from dagster._core.execution.step_dependency_config import StepDependencyConfig

# Captured output.
from dagster._core.storage.compute_log_manager import CapturedLogContext, ComputeIOType, ComputeLogManager

# Event log.
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.legacy_storage import LegacyEventLogStorage
from dagster._core.storage.local_compute_log_manager import IO_TYPE_EXTENSION, LocalComputeLogManager
from dagster._utils import ensure_file, touch_file
from dagster._utils.error import serializable_error_info_from_exc_info
from dagster_shared.utils import warnings as dagster_warnings

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "ASSET_CHECK_EVENTS",
    "ASSET_EVENTS",
    "EVENT_TYPE_TO_PIPELINE_RUN_STATUS",
    "IO_TYPE_EXTENSION",
    "ActiveExecution",
    "CapturedLogContext",
    "ComputeIOType",
    "ComputeLogManager",
    "DagsterExecutionInterruptedError",
    "EngineEventData",
    "ErrorSource",
    "EventLogEntry",
    "ExecuteRunWithPlanIterable",
    "ExecutionPlan",
    "ExecutionStep",
    "KnownExecutionState",
    "LocalComputeLogManager",
    "PlanExecutionContext",
    "PlanExecutionContextManager",
    "PlanOrchestrationContext",
    "PoolClaims",
    "RetryMode",
    "SqlEventLogStorage",
    "SqlEventLogStorageTable",
    "StepAttempt",
    "StepDependencyConfig",
    "StepExecutionContext",
    "StepFailureData",
    "complete_artifact_path",
    "copy_known_state",
    "create_compute_log_file_key",
    "dagster_event_sequence_for_step",
    "ensure_file",
    "enter_step_attempt",
    "event_log_storage",
    "event_row",
    "get_retries_config",
    "is_groupable",
    "open_step_attempt",
    "serializable_error_info_from_exc_info",
    "step_failure",
    "step_hook_events",
    "touch_file",
]


# Steps ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StepAttempt:
    """One attempt of one step, run by one thread."""

    step: ExecutionStep
    context: StepExecutionContext
    abandoned: bool = False
    """Set when the executor gave up on the thread: what it still logs is dropped, for the run has ended."""


_current_attempt: contextvars.ContextVar[StepAttempt | None] = contextvars.ContextVar(
    "agentmesh_step_attempt", default=None
)


class _LoopBorrower(Protocol):
    def __call__(self, coroutine: Any) -> Any: ...


class _SharedLoop:
    """Stands in for the event loop of a plan context, which serves one thread only.

    Dagster drives ``async def`` ops with ``run_until_complete`` and uses nothing else of the loop.
    """

    def __init__(self, run: _LoopBorrower) -> None:
        self._run = run

    def run_until_complete(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self._run(wait())


def open_step_attempt(
    job_context: PlanExecutionContext,
    step: ExecutionStep,
    known_state: KnownExecutionState,
    run_on_loop: _LoopBorrower,
) -> StepAttempt:
    """Makes the context in which a thread of its own runs one attempt of a step.

    Dagster's step context assumes that one step runs at a time. Two things are changed for threads: what
    modules log through Python's loggers is attributed to the step that logged it (Dagster hangs a handler per
    running step on the same logger, and the first one would take all); and `async def` ops run on the
    process's loop.

    Args:
        job_context: The plan's context.
        step: The step.
        known_state: A state that nothing changes any more, see `copy_known_state`.
        run_on_loop: Runs a coroutine from a step's thread.
    """
    context = job_context.for_step(step, known_state)
    context._event_loop = cast("Any", _SharedLoop(run_on_loop))  # pyright: ignore[reportPrivateUsage]  # no public seam
    attempt = StepAttempt(step, context)
    handler = context.log._dagster_handler  # pyright: ignore[reportPrivateUsage]  # no public seam
    own_filter = handler.filter

    def only_own_records(record: logging.LogRecord) -> bool:
        current = _current_attempt.get()
        if attempt.abandoned or (current is not None and current is not attempt):
            return False
        return own_filter(record)

    cast("Any", handler).filter = only_own_records
    return attempt


def enter_step_attempt(attempt: StepAttempt) -> None:
    """Marks the current context (a step's thread and the coroutines it hands over) as working for an attempt.

    Dagster's own deprecation warnings are off in it: Dagster mutes them around single calls with
    `warnings.catch_warnings`, which changes the whole process's filters and, in threads, never puts them
    back.
    """
    _current_attempt.set(attempt)
    dagster_warnings._warnings_on.set(False)  # pyright: ignore[reportPrivateUsage]  # no public seam


def step_hook_events(
    context: StepExecutionContext, events: Sequence[dg.DagsterEvent]
) -> Iterator[dg.DagsterEvent]:
    """Runs the op's hooks on the events of its attempt."""
    return execute_plan._trigger_hook(context, events)  # pyright: ignore[reportPrivateUsage]  # no public seam


def step_failure(context: StepExecutionContext, failure: StepFailureData) -> dg.DagsterEvent:
    """Logs and returns the event of a failed step."""
    # Dagster leaves an argument of it without a type.
    create: Callable[[StepExecutionContext, StepFailureData], dg.DagsterEvent] = cast(
        "Any", dg.DagsterEvent
    ).step_failure_event
    return create(context, failure)


def copy_known_state(active: ActiveExecution) -> KnownExecutionState:
    """The execution's state, for a step that runs in another thread while the execution goes on."""
    state = active.get_known_state()
    return state._replace(ready_outputs=set(state.ready_outputs))


class PoolClaims(InstanceConcurrencyContext):
    """Pool claims that ask again as soon as a step of this run frees a slot of the same pool.

    Dagster alone asks again after one second and more, since it cannot know when another run frees one.
    """

    def __init__(self, instance: dg.DagsterInstance, dagster_run: dg.DagsterRun) -> None:
        super().__init__(instance, dagster_run)
        self._waiting: dict[str, dict[str, int]] = {}
        self._pool_by_step: dict[str, str] = {}

    def claim(self, concurrency_key: str, step_key: str, step_priority: int = 0) -> bool:
        claimed = super().claim(concurrency_key, step_key, step_priority)
        waiting = self._waiting.setdefault(concurrency_key, {})
        if claimed:
            waiting.pop(step_key, None)
            self._pool_by_step[step_key] = concurrency_key
        else:
            waiting[step_key] = step_priority
        return claimed

    def free_step(self, step_key: str) -> None:
        cast("Any", super()).free_step(step_key)
        pool = self._pool_by_step.pop(step_key, None)
        if pool is None:
            return
        # The storage hands a freed slot to the most urgent step that asked first. Only that one asks again at
        # once, for each question costs several queries.
        waiting = self._waiting[pool]
        first = max(waiting, key=waiting.__getitem__, default=None)
        ask_again_at = cast("dict[str, float]", cast("Any", self)._pending_timeouts)
        if first is not None and first in ask_again_at:
            ask_again_at[first] = 0.0


# Event log ------------------------------------------------------------------------------------------------

_POSTGRES_STORAGE = "dagster_postgres.event_log.event_log.PostgresEventLogStorage"


def event_log_storage(instance: dg.DagsterInstance) -> object:
    """The instance's event log storage, without the wrapper that `storage:` in `dagster.yaml` adds."""
    storage: Any = instance.event_log_storage
    while isinstance(storage, LegacyEventLogStorage):
        storage = storage._storage.event_log_storage  # pyright: ignore[reportPrivateUsage]  # no public seam
    return storage


def is_groupable(storage: object) -> bool:
    """Whether a plain event (no asset, no run status) is one row to this storage, and nothing else."""
    kind = type(storage)
    # By name, for dagster-postgres need not be installed. PostgreSQL's NOTIFY per event has had no listener
    # for long.
    return kind is SqliteEventLogStorage or f"{kind.__module__}.{kind.__qualname__}" == _POSTGRES_STORAGE


def complete_artifact_path(manager: LocalComputeLogManager, log_key: Sequence[str]) -> str:
    """The file whose existence says that the capture is over."""
    return cast("str", cast("Any", manager).complete_artifact_path(log_key))


def event_row(storage: SqlEventLogStorage, event: EventLogEntry) -> dict[str, Any]:
    """The event's row, as Dagster writes it."""
    return storage._event_to_row(event)  # pyright: ignore[reportPrivateUsage]  # no public seam
