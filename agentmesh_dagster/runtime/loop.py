"""The process's event loop: node bodies are coroutines, and step threads wait for them here.

There is one loop per process, on a daemon thread, started at the first call, so that HTTP clients live in one
loop under every executor. A forked child starts a fresh one: threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar
from weakref import WeakSet

__all__ = ["CoroutineCanceled", "cancel_running", "is_asked_to_stop", "run_on_loop"]

T = TypeVar("T")

# How long a caller that was itself interrupted waits for its coroutine's cleanup, in seconds.
INTERRUPTED_CLEANUP_S = 10.0
# A signal handler runs in the main thread between two bytecodes: a wait there is cut into pieces of this many
# seconds, so that an interrupt which does not wake a lock (``_thread.interrupt_main``) is seen too.
_MAIN_THREAD_POLL_S = 0.2


_stopping: WeakSet[asyncio.Task[Any]] = WeakSet()


def is_asked_to_stop(task: asyncio.Task[Any]) -> bool:
    """Whether a task is canceled because its process was asked to stop, and not by something inside the run."""
    return task in _stopping


class CoroutineCanceled(KeyboardInterrupt):
    """The coroutine was canceled by `cancel_running`, because this process was asked to stop.

    An interrupt and not an error: what retries or handles errors lets it pass.
    """


class _Call(Generic[T]):
    """One coroutine handed to the loop. Its future ends when the coroutine's cleanup has ended too."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self._cancel_requested = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the loop's thread, in the caller's contextvars."""
        self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        if self._cancel_requested:
            self._coroutine.close()
            self._fail(asyncio.CancelledError())
            return
        self._started = True
        try:
            result = await self._coroutine
        # SystemExit and KeyboardInterrupt belong to the caller, and would end the loop's thread here.
        except BaseException as error:  # noqa: BLE001
            self._fail(error)
        else:
            self.future.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = (
                CoroutineCanceled("canceled, because this process was asked to stop")
                if self._cancel_requested
                else concurrent.futures.CancelledError("the coroutine canceled itself")
            )
        self.future.set_exception(error)

    def request_cancel(self) -> None:
        """Runs on the loop's thread. Only the first request counts: a second would cut the cleanup off."""
        if self._cancel_requested:
            return
        self._cancel_requested = True
        # A task canceled before its first step would never run `_run`, which sees the request by itself.
        if self._task is not None and self._started:
            _stopping.add(self._task)
            self._task.cancel()


class _LoopThread:
    """An event loop on a daemon thread, with the calls that run on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._calls: set[_Call[Any]] = set()
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self.loop.run_forever, name="agentmesh-loop", daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> _Call[T]:
        call = _Call(coroutine)
        with self._lock:
            self._calls.add(call)
        call.future.add_done_callback(lambda _: self._forget(call))
        # The handle keeps the calling thread's contextvars, and the task inherits them.
        self.loop.call_soon_threadsafe(call.start, self.loop)
        return call

    def _forget(self, call: _Call[Any]) -> None:
        with self._lock:
            self._calls.discard(call)

    def running(self) -> list[_Call[Any]]:
        with self._lock:
            return list(self._calls)

    def request_cancel(self, call: _Call[Any]) -> None:
        self.loop.call_soon_threadsafe(call.request_cancel)


class _Process:
    """The loop of this process."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self.loop_thread: _LoopThread | None = None

    def start(self) -> _LoopThread:
        if self.loop_thread is None:
            with self._starting:
                if self.loop_thread is None:
                    self.loop_thread = _LoopThread()
        return self.loop_thread

    def forget(self) -> None:
        """In a forked child: neither the parent's thread nor the state of its lock is there."""
        self._starting = threading.Lock()
        self.loop_thread = None


_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the process's loop and waits for its result.

    The coroutine sees the caller's contextvars. When the caller is interrupted while it waits (an exception
    raised by a signal handler in the main thread), the coroutine is canceled, its cleanup is awaited for at
    most `INTERRUPTED_CLEANUP_S` seconds, and the interrupt is raised again.

    Args:
        coroutine: What to run. It is consumed.

    Returns:
        What the coroutine returned.

    Raises:
        CoroutineCanceled: `cancel_running` canceled it.
        concurrent.futures.CancelledError: The coroutine canceled itself.
        RuntimeError: Called from the loop's own thread, where waiting would never end.
        BaseException: Whatever the coroutine raised.
    """
    owner = _process.start()
    if threading.current_thread() is owner.thread:
        coroutine.close()
        raise RuntimeError("run_on_loop() was called on the event loop itself: await the coroutine instead")
    call = owner.submit(coroutine)
    try:
        if threading.current_thread() is threading.main_thread():
            while not concurrent.futures.wait([call.future], timeout=_MAIN_THREAD_POLL_S).done:
                pass
        return call.future.result()
    except BaseException:
        if not call.future.done():
            owner.request_cancel(call)
            concurrent.futures.wait([call.future], timeout=INTERRUPTED_CLEANUP_S)
        raise


def cancel_running(grace_s: float) -> int:
    """Cancels every coroutine that `run_on_loop` is running in this process, and waits for their cleanup.

    A coroutine is canceled once, however often this is called: its cleanup is never cut off.

    Args:
        grace_s: How long to wait for the cleanups, in seconds. 0 asks and does not wait.

    Returns:
        How many coroutines were still running when the wait ended.
    """
    owner = _process.loop_thread
    if owner is None:
        return 0
    calls = owner.running()
    for call in calls:
        owner.request_cancel(call)
    if grace_s > 0:
        concurrent.futures.wait([call.future for call in calls], timeout=grace_s)
    return len([call for call in calls if not call.future.done()])
