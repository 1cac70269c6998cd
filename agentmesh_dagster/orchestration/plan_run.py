"""The steps of one run, in threads of one process.

The run's own thread owns all state (which step may start, which pool slot is held, what gets canceled): step
threads only put messages on one queue. It never waits longer than `POLL_S`, so that neither a full pool nor a
termination request can be missed.
"""

from __future__ import annotations

import contextvars
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import dagster as dg

from agentmesh_dagster.orchestration.dagster_internals import (
    ActiveExecution,
    DagsterExecutionInterruptedError,
    EngineEventData,
    ErrorSource,
    PlanExecutionContext,
    StepAttempt,
    StepFailureData,
    copy_known_state,
    dagster_event_sequence_for_step,
    enter_step_attempt,
    open_step_attempt,
    serializable_error_info_from_exc_info,
    step_failure,
    step_hook_events,
)
from agentmesh_dagster.runtime.loop import cancel_running, run_on_loop

__all__ = ["POLL_S", "PlanRun"]

# The longest wait of the run's own thread, in seconds: a captured interrupt, a retry that is due and a pool
# slot that another run freed are seen within this time.
POLL_S = 0.2


@dataclass(frozen=True)
class _StepEvent:
    attempt: StepAttempt
    event: dg.DagsterEvent


@dataclass(frozen=True)
class _StepEnded:
    """The step's sequence is over; its hooks may still run."""

    attempt: StepAttempt


@dataclass(frozen=True)
class _ThreadFreed:
    """The attempt's thread is done. `error` is what it raised through Dagster's step sequence or a hook."""

    attempt: StepAttempt
    error: BaseException | None


_Message = _StepEvent | _StepEnded | _ThreadFreed


class _StepThreads:
    """Daemon threads, started when none is idle: one that never returns must not keep the process alive."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0

    def submit(self, task: Callable[[], None]) -> None:
        with self._lock:
            start = self._idle == 0
            if start:
                self._started += 1
            else:
                self._idle -= 1
        self._tasks.put(task)
        if start:
            threading.Thread(target=self._work, name=f"agentmesh-step-{self._started}", daemon=True).start()

    def close(self) -> None:
        for _ in range(self._started):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            with self._lock:
                self._idle += 1


class PlanRun:
    """The steps of one plan, from the first start to the last event. Used once, by one thread."""

    def __init__(
        self,
        job_context: PlanExecutionContext,
        active: ActiveExecution,
        max_concurrent: int,
        cancel_grace_s: float,
    ) -> None:
        self._job_context = job_context
        self._active = active
        self._max_concurrent = max_concurrent
        self._cancel_grace_s = cancel_grace_s
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._threads = _StepThreads()
        self._live: set[StepAttempt] = set()
        self._error: BaseException | None = None
        self._give_up_at: float | None = None

    @property
    def _interrupted(self) -> bool:
        return self._give_up_at is not None

    def events(self) -> Iterator[dg.DagsterEvent]:
        try:
            yield from self._until_done()
        # BaseException: the consumer may close this generator, too.
        except BaseException:
            if not self._interrupted and self._live:
                cancel_running(self._cancel_grace_s)
            raise
        finally:
            for attempt in self._live:
                attempt.abandoned = True
            self._threads.close()
        if self._interrupted:
            raise DagsterExecutionInterruptedError
        if self._error is not None:
            raise self._error

    def _until_done(self) -> Iterator[dg.DagsterEvent]:
        while self._live or not (self._interrupted or self._error or self._active.is_complete):
            if not self._interrupted and self._active.check_for_interrupts():
                yield from self._interrupt()
            if self._give_up_at is not None:
                # Again and again, for a step's thread may only now reach its coroutine.
                cancel_running(0)
                if time.monotonic() >= self._give_up_at:
                    yield from self._abandon()
                    break
            elif self._error is None:
                self._start_steps()
                yield from self._active.concurrency_event_iterator(self._job_context)
            for message in self._receive():
                yield from self._handle(message)
            if not self._interrupted and self._error is None:
                yield from self._active.plan_events_iterator(self._job_context)
        if self._interrupted:
            yield dg.DagsterEvent.engine_event(
                self._job_context, "AgentMesh executor: all running steps were interrupted", EngineEventData()
            )

    def _start_steps(self) -> None:
        free = self._max_concurrent - len(self._live)
        if free <= 0:
            return
        for step in self._active.get_steps_to_execute(limit=free):
            attempt = open_step_attempt(self._job_context, step, copy_known_state(self._active), run_on_loop)
            missing = [
                key
                for key in attempt.context.required_resource_keys
                if not hasattr(attempt.context.resources, key)
            ]
            if missing:
                raise dg.DagsterInvariantViolationError(
                    f"Step {step.key!r} requires resources that the run lacks: {missing}"
                )
            self._live.add(attempt)
            own_context = contextvars.copy_context()
            self._threads.submit(
                lambda context=own_context, attempt=attempt: context.run(self._work, attempt)
            )

    def _work(self, attempt: StepAttempt) -> None:
        """Runs in a step's thread."""
        enter_step_attempt(attempt)
        error: BaseException | None = None
        try:
            events: list[dg.DagsterEvent] = []
            try:
                for event in dagster_event_sequence_for_step(attempt.context):
                    events.append(event)
                    self._messages.put(_StepEvent(attempt, event))
            finally:
                self._messages.put(_StepEnded(attempt))
            for event in step_hook_events(attempt.context, events):
                self._messages.put(_StepEvent(attempt, event))
        except BaseException as raised:  # noqa: BLE001  # interrupts too are for the run's own thread to judge
            error = raised
        finally:
            self._messages.put(_ThreadFreed(attempt, error))

    def _receive(self) -> Iterator[_Message]:
        """What has arrived: waits for the first message at most `POLL_S`, and not for the rest."""
        try:
            yield self._messages.get(timeout=POLL_S)
            while True:
                yield self._messages.get_nowait()
        except queue.Empty:
            return

    def _handle(self, message: _Message) -> Iterator[dg.DagsterEvent]:
        if isinstance(message, _StepEvent):
            yield message.event
            self._active.handle_event(message.event)
        elif isinstance(message, _StepEnded):
            # After an interrupt a step may end without an event: then the run ends as interrupted anyway.
            if not self._interrupted:
                self._active.verify_complete(self._job_context, message.attempt.step.key)
        else:
            self._live.discard(message.attempt)
            if message.error is not None and self._error is None and not self._interrupted:
                self._error = message.error

    def _interrupt(self) -> Iterator[dg.DagsterEvent]:
        yield dg.DagsterEvent.engine_event(
            self._job_context,
            "AgentMesh executor: received termination signal - canceling running steps",
            EngineEventData.interrupted(self._live_keys()),
        )
        self._report_canceling()
        self._active.mark_interrupted()
        self._give_up_at = time.monotonic() + self._cancel_grace_s

    def _report_canceling(self) -> None:
        """A signal that no termination request announced cancels the run, too.

        Dagster would report such a run as failed. That is left to it where a failure starts the run again, by the
        instance's run retries or run monitoring: an evicted worker's run goes on elsewhere.
        """
        instance = self._job_context.instance
        run = instance.get_run_by_id(self._job_context.run_id)
        if run is None or run.status != dg.DagsterRunStatus.STARTED:
            return
        if not instance.run_retries_enabled and not instance.run_will_resume(run.run_id):
            instance.report_run_canceling(run, "The run's process received a termination signal.")

    def _abandon(self) -> Iterator[dg.DagsterEvent]:
        """Gives up on steps that did not end in time: Python cannot stop a thread. The process's end does."""
        for attempt in sorted(self._live, key=lambda attempt: attempt.step.key):
            try:
                raise DagsterExecutionInterruptedError(
                    f"Step {attempt.step.key!r} did not stop within {self._cancel_grace_s:g} s"
                    " of the termination request"
                )
            except DagsterExecutionInterruptedError:
                failure = StepFailureData(
                    error=serializable_error_info_from_exc_info(sys.exc_info()),
                    user_failure_data=None,
                    error_source=ErrorSource.INTERRUPT,
                )
            event = step_failure(attempt.context, failure)
            attempt.abandoned = True
            yield event
            self._active.handle_event(event)

    def _live_keys(self) -> list[str]:
        return sorted(attempt.step.key for attempt in self._live)
