"""The process of one run: what the warm server's children do, with the private Dagster names that it takes.

As `dagster api execute_run` does, with three things more: a run that is being canceled before it starts ends canceled,
the worker asks Dagster's storage whether it shall stop, and somebody else reports it when it dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Final

import dagster as dg
from dagster._core.events import EngineEventData
from dagster._core.instance.ref import InstanceRef
from dagster._grpc.impl import core_execute_run
from dagster._serdes import deserialize_value
from dagster._utils.hosted_user_process import recon_job_from_origin
from dagster._utils.interrupts import capture_interrupts

from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.orchestration.run_holder import HoldingExecutor, RunHolder
from agentmesh_dagster.orchestration.run_tags import stated_holder
from agentmesh_dagster.orchestration.worker_identity import WorkerIdentity

__all__ = ["CANCEL_POLL_S", "LIBRARIES", "execute_run", "report_dead_worker"]

LIBRARIES: Final = (
    "dagster._core.definitions.external_asset",
    "dagster._core.definitions.repository_definition.repository_data_builder",
    "dagster._core.instance.factory",
    "dagster._core.secrets.env_file",
    "dagster._core.storage.defs_state.blob_storage_state_storage",
    "dagster._core.storage.local_compute_log_manager",
    "dagster._core.storage.migration.utils",
    "dagster._core.storage.root",
    "dagster._core.storage.sqlite_storage",
    "dagster._core.system_config.composite_descent",
    "dagster._core.types.primitive_mapping",
    "dagster._core.utility_ops",
    "dagster._utils.test.definitions",
    "dagster_postgres",
    "upath.implementations.local",
)
"""What Dagster imports only while it opens an instance, loads a job and executes it."""

CANCEL_POLL_S: Final = 1.0
"""How often a worker asks whether its run is being canceled."""
_REPORT_TRIES: Final = 6
_REPORT_PAUSE_S: Final = 1.0
"""The pause after the first failed try; each further one is twice as long."""
_STOPPED: Final = 0


def execute_run(instance_ref: str, run_id: str) -> bool:
    """Executes a launched run in this process.

    Args:
        instance_ref: The Dagster instance, serialized.
        run_id: The Dagster run.

    Returns:
        Whether nothing is left to report: the run has an end that is stored, be it a failure, or another process
        executes it.

    Raises:
        RunRefused: There is no such run (code `no-run`).
    """
    with (
        capture_interrupts(),
        dg.DagsterInstance.from_ref(deserialize_value(instance_ref, InstanceRef)) as instance,
    ):
        run = instance.get_run_by_id(run_id)
        if run is None:
            raise RunRefused(f"Dagster run {run_id!r} is gone", code="no-run")
        known = WorkerIdentity.of_run(run_id, run.tags)
        if known is None or known.is_alive() is False:
            instance.add_run_tags(run_id, WorkerIdentity.of_this_process(run_id).to_tags())
        if not _execute(instance, run):
            return True
        ended = instance.get_run_by_id(run_id)
        return ended is None or ended.is_finished


def _execute(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Executes the run; False where another process does."""
    pid = os.getpid()
    data = EngineEventData.in_process(pid)
    instance.report_engine_event(f"Started process for run (pid: {pid}).", run, data)
    holder: RunHolder | None = None
    try:
        # Dagster loads it again, which costs nothing, and reports why it cannot be loaded.
        with contextlib.suppress(Exception):
            holder = _load(instance, run)
        if _is_canceled(instance, run):
            return True
        # Before Dagster's own first event, so that a second process leaves the run as it is.
        if holder is not None and not _has_ended(instance, run) and not _hold(holder, instance, run):
            return False
        assert run.job_code_origin is not None  # noqa: S101 - the launcher has seen it
        job = recon_job_from_origin(run.job_code_origin)
        with _CancelWatch(instance, run.run_id) as watch:
            for event in core_execute_run(job, run, instance, inject_env_vars=True):
                if event.event_type in (
                    dg.DagsterEventType.RUN_SUCCESS,
                    dg.DagsterEventType.RUN_FAILURE,
                    dg.DagsterEventType.RUN_CANCELED,
                ):
                    watch.stop()
    except BaseException:  # noqa: BLE001 - Dagster has stored what it was; the run's end, or its lack, is looked at
        return True
    else:
        return True
    finally:
        if holder is not None:
            # Where Dagster never came to the steps.
            holder.let_go(run.run_id, instance)
        instance.report_engine_event(f"Process for run exited (pid: {pid}).", run)


def _hold(holder: RunHolder, instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Takes the run for this process; False where another process has it."""
    try:
        holder.hold(run, instance)
    except RunRefused as refusal:
        instance.report_engine_event(refusal.message, run)
        return False
    known = instance.get_run_by_id(run.run_id)
    own = WorkerIdentity.of_this_process(run.run_id)
    if known is not None and WorkerIdentity.of_run(run.run_id, known.tags) != own:
        # Of two that began at once, the other one may have said so last.
        instance.add_run_tags(run.run_id, own.to_tags())
    return True


def _load(instance: dg.DagsterInstance, run: dg.DagsterRun) -> RunHolder | None:
    """Loads the run's job, leaves it in Dagster's cache, and gives who holds its runs; None: it is none of AgentMesh.

    Loading takes a large part of a short run, and Dagster reports a run that is canceled meanwhile as failed.
    """
    origin = run.job_code_origin
    if origin is None:
        return None
    remote = run.remote_job_origin
    instance.inject_env_vars(remote.location_name if remote is not None else None)
    job = recon_job_from_origin(origin)
    if run.has_repository_load_data and run.execution_plan_snapshot_id is not None:
        plan = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
        job = job.with_repository_load_data(plan.repository_load_data)
    executor = job.get_definition().executor_def
    return executor.holder if isinstance(executor, HoldingExecutor) else None


def _is_canceled(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    now = instance.get_run_by_id(run.run_id)
    if now is None or now.status is not dg.DagsterRunStatus.CANCELING:
        return False
    instance.report_run_canceled(now, "Canceled before its execution started.")
    return True


def _has_ended(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    now = instance.get_run_by_id(run.run_id)
    return now is None or now.is_finished


class _CancelWatch:
    """Interrupts this process when its run is being canceled, or was ended by somebody else.

    Asking the storage reaches a worker on any machine, whoever launched it, and needs no process to be known. A signal
    from elsewhere, as by Ctrl-C, ends the watch: a second interrupt would cut off the cleanup after the first.
    """

    def __init__(self, instance: dg.DagsterInstance, run_id: str) -> None:
        self._instance = instance
        self._run_id = run_id
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, name="agentmesh-cancel-watch", daemon=True)
        self._seen_ended = False

    def __enter__(self) -> _CancelWatch:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(-1)
        self.stop()

    def stop(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of signals: it has stopped already
            os.write(self._writer, bytes([_STOPPED]))

    def _watch(self) -> None:
        main_thread = threading.main_thread().ident
        assert main_thread is not None  # noqa: S101 - it runs
        while not self._is_over(CANCEL_POLL_S):
            try:
                shall_stop = self._shall_stop()
            except Exception:  # noqa: BLE001 - an outage of the storage must not end the watch
                traceback.print_exc()
                continue
            if shall_stop:
                if not self._is_over(0):
                    signal.pthread_kill(main_thread, signal.SIGINT)
                return

    def _is_over(self, timeout_s: float) -> bool:
        """Whether the watch was stopped, or this process got a signal that ends it; waits for that."""
        if not select.select([self._reader], [], [], timeout_s)[0]:
            return False
        return not {_STOPPED, signal.SIGINT, signal.SIGTERM}.isdisjoint(os.read(self._reader, 4096))

    def _shall_stop(self) -> bool:
        run = self._instance.get_run_by_id(self._run_id)
        if run is None:
            return False
        if run.status is dg.DagsterRunStatus.CANCELING:
            return True
        # An end that this process has just stored stops the watch before it is seen twice.
        has_ended_before, self._seen_ended = self._seen_ended, run.is_finished
        return run.is_finished and has_ended_before


def report_dead_worker(instance_ref: str, run_id: str, pid: int, exit_code: int) -> bool:
    """Reports the run of a process that died; one that has an end is left alone.

    Args:
        instance_ref: The Dagster instance, serialized.
        run_id: The Dagster run.
        pid: The process that was to execute it.
        exit_code: Its exit code; negative for a signal.

    Returns:
        Whether the run has an end now. Tried for about a minute, should the storage be away.
    """
    pause_s = _REPORT_PAUSE_S
    for left in reversed(range(_REPORT_TRIES)):
        try:
            _report(instance_ref, run_id, pid, exit_code)
            return True
        except Exception:  # noqa: BLE001 - whatever a storage raises that cannot be reached
            sys.stderr.write(f"The end of run {run_id} cannot be reported: {traceback.format_exc()}\n")
            if left:
                time.sleep(pause_s)
                pause_s *= 2
    return False


def _report(instance_ref: str, run_id: str, pid: int, exit_code: int) -> None:
    with dg.DagsterInstance.from_ref(deserialize_value(instance_ref, InstanceRef)) as instance:
        run = instance.get_run_by_id(run_id)
        if run is None or run.is_finished or _told_as_written(instance, run):
            return
        how = (
            f"was killed by {_signal_name(-exit_code)}"
            if exit_code < 0
            else f"ended with exit code {exit_code}"
        )
        when = (
            "before it had begun"
            if run.status in (dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED)
            else "before the run's end"
        )
        message = (
            f"The run's process (pid {pid}) {how} {when}. What it wrote stands in the launcher's console."
        )
        if run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)


def _told_as_written(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Reports a run as its row says, where its worker died after it had written how the run stands.

    Returns:
        False where it had not, or where that cannot be seen because its code cannot be loaded.
    """
    if stated_holder(run.run_id, run.tags) is None:
        # No process has begun it. Its code may be what kills whoever loads it, and would kill this process too.
        return False
    from agentmesh_dagster.orchestration.host import HostedRun
    from agentmesh_dagster.orchestration.reconcile import tell_end_of_dead_worker

    holder: RunHolder | None = None
    try:
        holder = _load(instance, run)
    except Exception as error:  # noqa: BLE001 - a person's own code may raise anything; the death is reported all the same
        # Only the type: the text may hold what the code read from its environment.
        instance.report_engine_event(
            f"The code of this run cannot be loaded ({type(error).__name__}): its death is reported without a look at "
            "what AgentMesh has written of its end.",
            run,
        )
    return isinstance(holder, HostedRun) and tell_end_of_dead_worker(
        holder.agentmesh.store(), instance, run.run_id
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
