"""Runs a level inside one op: the graph walker with `run_node`."""

from __future__ import annotations

from agentmesh_dagster.runtime.level_walk import walk_level
from agentmesh_dagster.runtime.nodes.base import LevelEnd, Say
from agentmesh_dagster.runtime.row_buffer import RowBuffer
from agentmesh_dagster.runtime.run_node import run_node
from agentmesh_dagster.runtime.scope import Scope
from agentmesh_dagster.runtime.session import RunSession


async def walk(session: RunSession, scope: Scope, say: Say) -> LevelEnd:
    """Runs the nodes of a level, and returns after all its rows are stored.

    Args:
        session: The process's work on the run.
        scope: The pass; its rows get a buffer of their own.
        say: Takes the lines of the readable step log.

    Raises:
        Suspended: A node waits, and nothing failed.
        Exception: What the first node that failed raised.
    """
    buffer = RowBuffer(session)
    try:
        return await walk_level(session, scope.walked(buffer), say, run_node)
    finally:
        await buffer.flush()
