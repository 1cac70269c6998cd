"""Levels that are more than one op, or one op that is a whole level: what Dagster's ops ask besides `run_node`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentmesh_dagster.errors import AgentMeshError, RunRefused
from agentmesh_dagster.records import RunStatus, StepStatus, WaitStatus
from agentmesh_dagster.runtime.finish import RunEnd, finish_run
from agentmesh_dagster.runtime.level_end import settled_rows
from agentmesh_dagster.runtime.level_walk import walk_level
from agentmesh_dagster.runtime.nodes.base import LevelEnd, NodeCall, Preparation, Say
from agentmesh_dagster.runtime.nodes.foreach import (
    FOLLOWED_ITEMS,
    Item,
    Tally,
    count_accepted,
    item_key,
    items,
    run_item,
)
from agentmesh_dagster.runtime.routing import NodeState
from agentmesh_dagster.runtime.row_buffer import RowBuffer
from agentmesh_dagster.runtime.run_node import NodeOutcome, run_node
from agentmesh_dagster.runtime.scope import Scope, names_before
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.runtime.walker import walk
from agentmesh_dagster.specs.levels import is_walked
from agentmesh_dagster.specs.nodes import ForeachConfig

_ENDED: Final = (StepStatus.SUCCEEDED, StepStatus.SKIPPED, StepStatus.FAILED, StepStatus.WAITING)


async def scope_at(session: RunSession, path: tuple[str, ...]) -> Scope:
    """The pass through the level of a nested graph, whose container `begin_node` has begun.

    Its ops may be executed though the container, or the branch, is finished: beside another one that waits, or after a
    kill that cost Dagster's log its last events. A session does not load rows below a finished one, so that they are
    read here; the ops replay them.

    Args:
        session: The process's work on the run.
        path: The ids of the nodes on the way, each `parallel` followed by the name of its branch; empty for the
            workflow's own level.
    """
    scope = session.levels.get(path)
    if scope is None:
        scope, left = session.scope, list(path)
        while left:
            node_id = left.pop(0)
            node = scope.level.node(node_id, session.environment.node_types)
            key = scope.key(node_id)
            levels = node.type.levels(node.config, await _preparation(session, scope, node_id))
            scope = levels[key] if key in levels else levels[f"{key}/{left.pop(0)}"]
        session.levels[path] = scope
    if scope.owner_key is not None and session.is_below_finished(scope.owner_key):
        await session.node_rows(scope, scope.graph.nodes)
    return scope


async def fanned_items(session: RunSession, scope: Scope, node_id: str) -> tuple[str, ...]:
    """The names of the items of a fanned-out `foreach`, in order."""
    return tuple(item.name for item in await _items(session, scope, node_id))


async def run_fanned_item(
    session: RunSession, scope: Scope, node_id: str, item_name: str, say: Say
) -> NodeOutcome:
    """Runs one item of a fanned-out `foreach`; one that waits is noted in its row.

    Returns:
        The item's row; in state `UNDECIDED`, what it waits for.

    Raises:
        Exception: What made it fail, where `on_item_error` does not put up with it.
    """
    preparation = await _preparation(session, scope, node_id, say)
    config = _foreach(session, scope, node_id)
    found = await _items(session, scope, node_id)
    item = next(item for item in found if item.name == item_name)
    key = scope.key(node_id)
    tally = Tally(is_quiet=len(found) > FOLLOWED_ITEMS)
    if config.max_failures is not None:
        rows = await session.rows([item_key(key, other.name) for other in found])
        tally.accepted = count_accepted(rows.values())
    if session.is_below_finished(key):
        await session.rows([item_key(key, item_name)])
    buffer = RowBuffer(session)

    async def run_level(level: Scope) -> LevelEnd:
        return await walk_level(session, level.walked(buffer), say, run_node)

    known = session.known_row(key)
    call = NodeCall(
        preparation=preparation,
        key=key,
        request=None,
        run_level=run_level,
        buffer=buffer,
        is_fanned=True,
        has_waited=known is not None and known.status is StepStatus.WAITING,
    )
    call.begin_attempt(known.attempt if known is not None else 1)
    own_key = item_key(key, item_name)
    try:
        row = await run_item(config, call, item, tally)
    except Suspended:
        waits = tuple(wait for wait in session.waits_under(own_key) if wait.status is WaitStatus.OPEN)
        return NodeOutcome(state=NodeState.UNDECIDED, row=session.known_row(own_key), waits=waits)
    finally:
        await buffer.flush()
    return NodeOutcome(state=NodeState.FINISHED, row=row)


async def run_inline(session: RunSession, say: Say) -> RunEnd:
    """Runs a whole workflow in one op, and writes how it ended.

    Raises:
        RunRefused: Another Dagster run has taken the run over.
        StoreError: The database failed.
    """
    try:
        await walk(session, session.scope, say)
    except Suspended:
        return await finish_run(session)
    except RunRefused:
        raise
    except Exception as error:
        end = await finish_run(session)
        rows = (session.known_row(name) for name in session.scope.graph.order)
        told = [end.error, *(row.error for row in rows if row is not None)]
        if end.status is not RunStatus.FAILED or session.error_json(error) not in told:
            # No row tells it, so no row may stand for it.
            raise
        return end
    return await finish_run(session)


async def settle_failed(session: RunSession) -> None:
    """Writes what a failed run's ops left open: rows of skipped nodes, and of containers whose last op never ran."""
    await _settle(session, session.scope)


async def _settle(session: RunSession, scope: Scope) -> bool:
    """Settles a level, and those below it; says whether nothing in it can still be at work, in any process."""
    rows, states = await settled_rows(session, scope)
    is_over = True
    for name in scope.graph.order:
        row = rows.get(name)
        if row is None:
            is_over &= states[name] is not NodeState.READY
            continue
        # One that waited before this Dagster run began, and whose last op has not run in it, may have failed since.
        had_waited = row.status is StepStatus.WAITING and row.dagster_run_id != session.dagster_run_id
        if row.status is not StepStatus.RUNNING and not had_waited:
            continue
        node = scope.level.node(name, session.environment.node_types)
        if not node.config.is_container or is_walked(node.spec, node.config, scope.level.closure):
            is_over &= had_waited
            continue
        if isinstance(node.config, ForeachConfig) and not await _all_items_ended(session, scope, name):
            is_over = False
            continue
        levels = node.type.levels(node.config, await _preparation(session, scope, name))
        if not all([await _settle(session, level) for level in levels.values()]):
            is_over = False
            continue
        try:
            await run_node(session, scope, name, _silent, collect=True)
        except AgentMeshError:
            # Its row says so now, and the run has failed already.
            continue
    return is_over


async def _all_items_ended(session: RunSession, scope: Scope, node_id: str) -> bool:
    """Whether the steps of all items of a fan-out have come to their end, or wait."""
    key = scope.key(node_id)
    keys = [item_key(key, item.name) for item in await _items(session, scope, node_id)]
    rows = await session.rows(keys)
    return len(rows) == len(keys) and all(row.status in _ENDED for row in rows.values())


async def _preparation(
    session: RunSession, scope: Scope, node_id: str, say: Say | None = None
) -> Preparation:
    rows = await session.node_rows(scope, scope.graph.ancestors[node_id])
    finished = {name: row for name, row in rows.items() if row.is_finished}
    return Preparation(
        node=scope.graph.nodes[node_id],
        names=names_before(scope, node_id, finished),
        scope=scope,
        session=session,
        say=say or _silent,
    )


async def _items(session: RunSession, scope: Scope, node_id: str) -> Sequence[Item]:
    """The items of a fanned-out `foreach`, whose ancestors are all decided."""
    key = scope.key(node_id)
    if key not in session.fanned:
        preparation = await _preparation(session, scope, node_id)
        session.fanned[key] = items(_foreach(session, scope, node_id), preparation)
    return session.fanned[key]


def _foreach(session: RunSession, scope: Scope, node_id: str) -> ForeachConfig:
    config = scope.level.node(node_id, session.environment.node_types).config
    if not isinstance(config, ForeachConfig):
        raise TypeError(f"{node_id!r} is no foreach node")
    return config


def _silent(_line: str) -> None:
    return
