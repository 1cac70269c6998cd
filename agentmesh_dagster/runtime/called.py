"""A workflow that is called inside another one: its own time, `on_failure` and `finally`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from agentmesh_dagster.deadline import finishes
from agentmesh_dagster.errors import NodeTimeout, ReplayError, RunRefused
from agentmesh_dagster.records import Json, RunStatus, StepStatus, WaitKind, WaitStatus
from agentmesh_dagster.runtime.closing import closing_key, closing_scope
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.scope import Scope
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.documents import BodySpec
from agentmesh_dagster.specs.fields import as_object

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.nodes.base import LevelEnd, NodeCall

CLOSING_S: Final = 4.0
"""How long the `finally` of a called workflow may take that is cut off."""
_LAST_S: Final = 0.5
"""How long what is then cut off itself may take to end."""

_UNDER_WAY: Final = (StepStatus.RUNNING, StepStatus.WAITING)

_log = logging.getLogger(__name__)


async def run_called(call: NodeCall, scope: Scope) -> LevelEnd:
    """Runs a called workflow to its end, and then its `on_failure` and `finally`.

    These run when the call succeeds, fails, or is cut off while the run goes on. Where the whole run is stopped, its
    own `finally` follows.

    Raises:
        NodeTimeout: It took longer than its `settings.timeout_s`; the time for which it waited counts where its
            settings say so (`timeout_includes_waiting`).
        Suspended: Something in it waits.
        Exception: What made it fail.
    """
    workflow = scope.level.workflow
    try:
        end = await _in_time(call, scope)
    except (ReplayError, RunRefused):
        # The run is somebody else's, or not what its journal tells: nothing more is done here.
        raise
    except asyncio.CancelledError:
        if workflow.finally_ is not None and not call.session.is_stopping:
            closing = _close(call, scope, "finally", workflow.finally_, RunStatus.CANCELED)
            await _bounded(call, closing)
        raise
    except Exception as error:
        problem = call.session.error_json(error)
        failed = RunStatus.FAILED
        also: Exception | None = None
        if workflow.on_failure is not None:
            try:
                await _close(call, scope, "on_failure", workflow.on_failure, failed, error=problem)
            except Exception as another:  # noqa: BLE001 - raised when `finally` has been run
                also = another
        if workflow.finally_ is not None:
            await _close(call, scope, "finally", workflow.finally_, failed, error=problem)
        if also is not None:
            raise also from error
        raise
    if workflow.finally_ is not None:
        await _close(call, scope, "finally", workflow.finally_, RunStatus.SUCCEEDED, output=end.output)
    return end


async def _close(
    call: NodeCall,
    scope: Scope,
    name: str,
    body: BodySpec,
    status: RunStatus,
    *,
    output: Json = None,
    error: Json = None,
) -> None:
    """Runs `on_failure` or `finally`, once for each end; one that was cut off goes on.

    Raises:
        NodeError: Something in it would wait (code `finalizer-waits`).
        Exception: What made it fail.
    """
    session = call.session
    end: dict[str, Json] = {"body": name, "status": status.value, "error": error}
    request = {**end, "attempt": call.attempt}
    number = 0
    while True:
        number += 1
        key = closing_key(scope, name, number)
        row = session.known_row(key)
        if row is None or row.input == session.redact(request):
            break
        told = as_object(row.input) or {}
        if not row.is_finished and {**told, "attempt": 0} == {**session.redact(end), "attempt": 0}:
            # An attempt before this one came to the same end, and was cut off in the middle of this.
            request = told
            break
    closing = closing_scope(
        session, scope, body, name=name, key=key, status=status, output=output, error=error
    )
    # Announced, so that whoever comes after a kill knows which end it follows.
    await call.part("branch", key, request, closing, lambda: _walked(call, closing), index=0, announce=True)


async def _walked(call: NodeCall, closing: Scope) -> StepAnswer:
    await call.run_level(closing)
    return StepAnswer()


async def _bounded(call: NodeCall, closing: Coroutine[Any, Any, None]) -> None:
    """Runs a clean-up to its end though its task is being canceled, for a while.

    Workflows that call each other share the while: who cut them off waits no longer than for one.
    """
    task = asyncio.ensure_future(closing)
    done, _ = await asyncio.wait([task], timeout=call.session.closing_s(CLOSING_S))
    if not done:
        task.cancel()
        await asyncio.wait([task], timeout=_LAST_S)
    elif task.exception() is not None:
        _log.warning("a called workflow that was cut off could not run its 'finally': %s", task.exception())


async def _in_time(call: NodeCall, scope: Scope) -> LevelEnd:
    """Runs the workflow's nodes, and cuts them off when its time is over."""
    settings, session = scope.level.workflow.settings, call.session
    if settings.timeout_s is None:
        return await call.run_level(scope)
    label = "timeout" if call.attempt <= 1 else f"timeout#{call.attempt}"
    timer = session.wait(scope.owner_key or "", label)
    if timer is not None and timer.deadline_at is not None:
        left_s = (timer.deadline_at - session.environment.clock.now()).total_seconds()
    else:
        left_s = settings.timeout_s - _worked_s(call, scope)
    over = NodeTimeout(
        f"workflow {scope.level.workflow.slug!r}, called at {scope.owner_key!r}, took longer than its "
        f"settings.timeout_s = {settings.timeout_s:g} and was cut off",
        path=scope.owner_key,
    )
    if left_s <= 0 or (timer is not None and timer.status is not WaitStatus.OPEN):
        raise over
    walking = asyncio.ensure_future(call.run_level(scope))
    ends_at = session.environment.clock.now() + timedelta(seconds=left_s)
    if not await finishes(walking, left_s):
        raise over
    try:
        return walking.result()
    except Suspended as suspended:
        if not settings.timeout_includes_waiting:
            raise
        # Somebody must come back when the time is over, whatever else is waited for.
        if timer is None:
            timer = replace(
                call.new_wait(WaitKind.TIMER, scope.owner_key or "", label),
                title=f"{scope.owner_key}: the time of workflow {scope.level.workflow.slug}",
                deadline_at=ends_at,
            )
        raise Suspended([*suspended.waits, timer], suspended.superseded) from None


def _worked_s(call: NodeCall, scope: Scope) -> float:
    """How long this attempt has worked on a called workflow before it waited, as its row says.

    What a worker did that was killed after the wait is in no row, and does not count.
    """
    row = call.session.known_row(scope.owner_key or "")
    if row is None or row.status not in _UNDER_WAY or not call.goes_on:
        return 0.0
    return (row.duration_ms or 0) / 1000
