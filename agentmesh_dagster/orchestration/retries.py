"""Who retries a failed run by itself: Dagster, AgentMesh, or nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.errors import WorkflowFailed
from agentmesh_dagster.records import Json, Run

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

_WILL_RETRY: Final = "dagster/will_retry"
_AUTO_RETRY: Final = "dagster/auto_retry_run_id"
_FAILURE_REASON: Final = "dagster/failure_reason"
_ANSWERS: Final = frozenset(
    {
        "approval-refused",
        "event-timeout",
        "gate-timeout",
        "no-end",
        "rejected",
        "run-input",
        "run-output",
        "run-timeout",
        "step-unknown",
        "suspend-timeout",
    }
)
"""Codes of errors that are an answer: of people, of the clock, or of the definition. A retry would hear the same."""


def settle_retries(store: Store, instance: dg.DagsterInstance, run: Run) -> None:
    """Takes over the retries of a run that Dagster meant to retry and gave up, or says that there are none.

    It tries once, and not again where the code location could not be reached at that moment, as when worker and code
    server died together. Until it is known that nobody retries a run, its `on_failure` and `finally` are not due.

    Args:
        store: The run's.
        instance: The Dagster instance that the run is in.
        run: A run that failed, has retries left, and was launched by no claim.
    """
    last = instance.get_run_by_id(run.dagster_run_ids[-1]) if run.dagster_run_ids else None
    unbound = 0
    while last is not None and (retry := last.tags.get(_AUTO_RETRY)) is not None:
        # A retry that is on its way, or whose worker died before it had bound the run.
        last = instance.get_run_by_id(retry)
        unbound += 1
    if last is None or not last.is_finished:
        return
    will_retry = last.tags.get(_WILL_RETRY)
    if will_retry == "true" and last.remote_job_origin is not None:
        return
    is_canceled = last.status is dg.DagsterRunStatus.CANCELED
    may_retry = run.retries_left > unbound and may_retry_by_itself(run, last, instance)
    if will_retry == "false" and may_retry:
        store.runs.adopt_retries(run.id)
    elif will_retry is not None or is_canceled or not instance.run_retries_enabled:
        # What a process executes by itself, Dagster's daemon cannot launch anew; without the setting it never does.
        store.runs.give_up_retries(run.id)


def may_retry_by_itself(run: Run, last: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Whether a failed run may be retried without anybody asking for it, by what it failed with.

    Args:
        run: The run.
        last: Its last Dagster run.
        instance: Has the setting that counts where the Dagster run has no tag for it.
    """
    error: dict[str, Json] = run.error or {}
    if error.get("code") in _ANSWERS or error.get("domain") == WorkflowFailed.domain:
        return False
    return last.tags.get(_FAILURE_REASON) != "STEP_FAILURE" or _retries_steps(last, instance)


def _retries_steps(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    stated = run.tags.get("dagster/retry_on_asset_or_op_failure")
    if stated is not None:
        return stated.lower() == "true"
    return instance.run_retries_retry_on_asset_or_op_failure
