"""Cancels a run: asks Dagster to terminate its Dagster run, and puts the row right where nobody is left to do so.

The unfinished runs that it has started are canceled with it, and those that these have started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.constants import TAG_CLAIM, TAG_RUN_ID, TAG_STATUS
from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.orchestration.webserver import query
from agentmesh_dagster.orchestration.worker_identity import WorkerIdentity
from agentmesh_dagster.records import Event, Run, RunStatus, Wait, WaitStatus

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

_POLL_S: Final = 0.2
_OPEN: Final = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.WAITING)
_NOT_BEGUN: Final = (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.QUEUED)
_TERMINATE: Final = """
mutation Terminate($run: String!) {
  terminateRun(runId: $run) {
    __typename
    ... on TerminateRunFailure { message }
    ... on RunNotFoundError { message }
    ... on UnauthorizedError { message }
    ... on PythonError { message }
  }
}
"""


@dataclass(frozen=True, kw_only=True)
class ChildrenCanceled:
    """What became of the unfinished runs that a run had started, and of those that these had."""

    runs: tuple[Run, ...] = ()
    """As they stand; not final yet where their steps still clean up."""
    unreached: Mapping[str, str] = field(default_factory=dict[str, str])
    """Those that could not be told to stop, by id: why not."""


@dataclass(frozen=True, kw_only=True)
class Cancellation:
    """What became of it."""

    run: Run
    """As it stands; not final yet where its steps still clean up."""
    is_asked: bool
    """Whether Dagster took the request for a run at work."""
    closed: tuple[Wait, ...] = ()
    """What it waited for, and nobody waits for any more: gates, suspensions, timers, events."""
    children: ChildrenCanceled = ChildrenCanceled()


class CannotReach(RunRefused):
    """Nobody here can tell the run's process to stop."""

    category = "system"
    default_code = "cannot-terminate"


def cancel_run(
    store: Store,
    instance: dg.DagsterInstance,
    run: Run,
    *,
    by: str,
    webserver: str | None = None,
    wait_s: float = 15.0,
    clock: Clock | None = None,
) -> Cancellation:
    """Cancels a run that is not final, and the unfinished runs that it started; with an audit row for each.

    Args:
        store: The run's.
        instance: The Dagster instance that the run is in, where no webserver is named.
        run: The run.
        by: Who cancels it.
        webserver: Terminates through the webserver at this address.
        wait_s: How long to wait until the runs at work have ended.
        clock: Where times come from.

    Raises:
        RunRefused: It is final already (code `run-final`).
        CannotReach: It is at work in a process that cannot be told. The runs that it started are left alone then.
        WebserverError: The webserver does not answer.
    """
    until = time.monotonic() + wait_s
    done = _cancel_one(store, instance, run, by, webserver, until, clock or SystemClock())
    below = cancel_children(
        store, instance, run, by=by, webserver=webserver, wait_s=until - time.monotonic(), clock=clock
    )
    return replace(done, children=below)


def cancel_children(
    store: Store,
    instance: dg.DagsterInstance,
    run: Run,
    *,
    by: str,
    webserver: str | None = None,
    wait_s: float = 0.0,
    clock: Clock | None = None,
) -> ChildrenCanceled:
    """Cancels the unfinished runs that a run started, and those that these started; see `cancel_run`."""
    clock = clock or SystemClock()
    until = time.monotonic() + wait_s
    found: list[Run] = []
    unreached: dict[str, str] = {}
    waiting = [run.id]
    while waiting:
        for child in store.runs.children(waiting.pop()):
            # Of one that has ended the children may be at work all the same.
            waiting.append(child.id)
            if child.status.is_final:
                # One that has failed may have retries left, and nobody wants them any more.
                store.runs.give_up_retries(child.id)
                continue
            try:
                found.append(_cancel_one(store, instance, child, by, webserver, until, clock).run)
            except CannotReach as error:
                unreached[child.id] = error.message
    return ChildrenCanceled(runs=tuple(found), unreached=unreached)


def _cancel_one(
    store: Store,
    instance: dg.DagsterInstance,
    run: Run,
    by: str,
    webserver: str | None,
    until: float,
    clock: Clock,
) -> Cancellation:
    """See `cancel_run`; waits until that moment of `time.monotonic` at most."""
    if run.status.is_final:
        raise RunRefused(f"run {run.id!r} is {run.status.value} already", code="run-final")
    waited_for = store.waits.list(run.project, run_id=run.id, statuses=(WaitStatus.OPEN,), limit=None)
    is_asked = _terminate(store, instance, run, webserver)
    store.audit.add(run.project, "cancel", actor=by, entity=f"run/{run.id}", version=run.version)
    while _is_at_work(store, run) and time.monotonic() < until:
        time.sleep(_POLL_S)
    stands = store.runs.get(run.id)
    if not stands.status.is_final and not _is_at_work(store, run):
        set_canceled(store, instance, stands, by, clock)
        stands = store.runs.get(run.id)
    closed = (store.waits.get(wait.project, wait.id) for wait in waited_for)
    return Cancellation(
        run=stands,
        is_asked=is_asked,
        closed=tuple(wait for wait in closed if wait.status is WaitStatus.CANCELED),
    )


def _terminate(store: Store, instance: dg.DagsterInstance, run: Run, webserver: str | None) -> bool:
    """Asks Dagster to end the run's Dagster run; False where none is at work."""
    last = run.dagster_run_ids[-1] if run.dagster_run_ids else None
    dagster_run = instance.get_run_by_id(last) if last is not None else None
    if last is None or (dagster_run is not None and dagster_run.is_finished):
        return False
    # A run that a process executes by itself, as `agentmesh run` does, was launched by nobody.
    is_launched = dagster_run is None or dagster_run.remote_job_origin is not None
    if dagster_run is not None and not is_launched:
        if _interrupt(dagster_run):
            return True
        reason = (
            f"Dagster run {last} executes in a process of its own, which cannot be reached from here: press "
            "Ctrl-C there"
        )
    elif webserver is not None:
        answer = query(webserver, _TERMINATE, {"run": last})["terminateRun"]
        if answer["__typename"] == "TerminateRunSuccess":
            return True
        reason = f"the webserver at {webserver} did not terminate Dagster run {last}: {answer.get('message')}"
    elif dagster_run is None:
        reason = f"its Dagster run {last} is not in this Dagster instance; set DAGSTER_HOME to the one that runs it"
    else:
        if instance.run_coordinator.cancel_run(last):
            return True
        reason = (
            f"Dagster run {last} could not be terminated from here; terminate it in the Dagster UI, or set "
            "AGENTMESH_DAGSTER_URL to its webserver"
        )
    if _is_at_work(store, run):
        raise CannotReach(f"run {run.id!r} is at work: {reason}", context={"dagster_run_id": last})
    return False


def _interrupt(dagster_run: dg.DagsterRun) -> bool:
    """Interrupts the command that executes a Dagster run, as Ctrl-C does; False where no live one is known here."""
    command = WorkerIdentity.of_command_run(dagster_run.tags)
    if command is None or not command.is_alive():
        return False
    try:
        # Not SIGINT, which a shell lets its background commands ignore.
        os.kill(command.pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _is_at_work(store: Store, run: Run) -> bool:
    if store.runs.get(run.id).status.is_final:
        return False
    lease = store.runs.lease(run.id)
    return lease is not None and lease.is_live


def set_canceled(store: Store, instance: dg.DagsterInstance, run: Run, by: str, clock: Clock) -> bool:
    """Writes that a run on which nobody is at work was canceled, and tells Dagster; what it waits for is closed.

    Args:
        store: The run's.
        instance: The Dagster instance that the run is in.
        run: The run.
        by: Who canceled it.
        clock: Where times come from.

    Returns:
        Whether this call did; False where the run was final already.
    """
    event = Event(
        id=clock.new_id(),
        at=clock.now(),
        project=run.project,
        run_id=run.id,
        type="run.canceled",
        payload={"reason": "canceled by a person", "by": by},
    )
    if not store.runs.set_status(run.id, _OPEN, RunStatus.CANCELED, events=[event]):
        return False
    _stop_continuation(instance, run)
    dagster_run = instance.get_run_by_id(run.dagster_run_ids[-1]) if run.dagster_run_ids else None
    if dagster_run is not None:
        if not dagster_run.is_finished:
            instance.report_run_canceled(dagster_run, "Canceled; no worker was at work on it.")
        instance.add_run_tags(dagster_run.run_id, {TAG_STATUS: RunStatus.CANCELED.value})
    return True


def _stop_continuation(instance: dg.DagsterInstance, run: Run) -> None:
    """Cancels a Dagster run that was to continue the run, and has not begun."""
    launched = instance.get_runs(dg.RunsFilter(tags={TAG_RUN_ID: run.id}, statuses=list(_NOT_BEGUN)))
    for dagster_run in launched:
        # A re-execution, which copies the tags, has a parent of its own and is another run.
        if TAG_CLAIM in dagster_run.tags and dagster_run.parent_run_id is None:
            instance.report_run_canceled(
                dagster_run, f"Canceled with run {run.id}, which it was to continue."
            )
