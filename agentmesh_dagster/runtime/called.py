"""A workflow that is called inside another one: its own time, `on_failure` and `finally`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from agentmesh_dagster.errors import NodeTimeout
from agentmesh_dagster.records import Json, RunStatus
from agentmesh_dagster.runtime.scope import Scope, step_view
from agentmesh_dagster.specs.documents import BodySpec
from agentmesh_dagster.specs.names import identifier

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.nodes.base import LevelEnd, NodeCall


async def run_called(call: NodeCall, scope: Scope) -> LevelEnd:
    """Runs a called workflow to its end, and then its `on_failure` and `finally`.

    These run when the call succeeds or fails; not where the whole run is stopped, whose own `finally` follows then.

    Raises:
        NodeTimeout: It took longer than its `settings.timeout_s`; the time for which it waited does not count.
        Suspended: Something in it waits.
        Exception: What made it fail.
    """
    workflow = scope.level.workflow
    timeout_s = workflow.settings.timeout_s
    try:
        if timeout_s is None:
            end = await call.run_level(scope)
        else:
            end = await _in_time(call, scope, timeout_s)
    except Exception as error:
        problem = call.session.error_json(error)
        try:
            if workflow.on_failure is not None:
                await call.run_level(_closing(call, scope, "on_failure", workflow.on_failure, problem))
        finally:
            if workflow.finally_ is not None:
                await call.run_level(_closing(call, scope, "finally", workflow.finally_, problem))
        raise
    if workflow.finally_ is not None:
        await call.run_level(_closing(call, scope, "finally", workflow.finally_, None))
    return end


async def _in_time(call: NodeCall, scope: Scope, timeout_s: float) -> LevelEnd:
    walking = asyncio.ensure_future(call.run_level(scope))
    try:
        done, _ = await asyncio.wait([walking], timeout=timeout_s)
    finally:
        if not walking.done():
            walking.cancel()
            await asyncio.wait([walking])
    if not done:
        raise NodeTimeout(
            f"workflow {scope.level.workflow.slug!r}, called at {scope.owner_key!r}, took longer than its "
            f"settings.timeout_s = {timeout_s:g} and was cut off",
            path=scope.owner_key,
        )
    return walking.result()


def _closing(call: NodeCall, scope: Scope, name: str, body: BodySpec, error: Json) -> Scope:
    """The pass through `on_failure` or `finally` of a called workflow."""
    status = RunStatus.FAILED if error is not None else RunStatus.SUCCEEDED
    # A further attempt ends anew, and maybe otherwise.
    number = f"#{call.attempt}" if call.attempt > 1 else ""
    owner_key = f"{scope.owner_key}/@{name}{number}"
    steps: dict[str, Json] = {}
    for node_id in scope.graph.nodes:
        row = call.session.known_row(scope.key(node_id))
        view = step_view(row) if row is not None else {**step_view(None), "status": "pending"}
        steps[identifier(node_id)] = view
    return replace(
        scope,
        level=scope.level.body(body),
        prefix=f"{owner_key}/",
        steps=steps,
        run={**scope.run, "status": status.value, "error": error},
    )
