"""The graph walker: runs a level's nodes inside one op, as Dagster runs the ops of a job.

A node is run as soon as all nodes before it are decided. What does not depend on a node that failed or waits goes on to
its end; then the first failure is raised, or what waits is. Rows are read from the session's cache alone: all that
stands under an op is written by it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from agentmesh_dagster.deadline import cut_off
from agentmesh_dagster.records import Wait
from agentmesh_dagster.runtime.level_end import level_end
from agentmesh_dagster.runtime.nodes.base import LevelEnd, Say
from agentmesh_dagster.runtime.routing import NodeState
from agentmesh_dagster.runtime.scope import Scope
from agentmesh_dagster.runtime.waiting import Suspended

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.run_node import NodeOutcome
    from agentmesh_dagster.runtime.session import RunSession


class RunNode(Protocol):
    """`run_node`, as far as the walker calls it."""

    def __call__(
        self, session: RunSession, scope: Scope, node_id: str, say: Say, /
    ) -> Awaitable[NodeOutcome]: ...


async def walk_level(session: RunSession, scope: Scope, say: Say, run_node: RunNode) -> LevelEnd:
    """Runs the nodes of a level.

    Args:
        session: The process's work on the run.
        scope: The pass, with a buffer.
        say: Takes the lines of the readable step log.
        run_node: Runs one node.

    Raises:
        Suspended: A node waits, and nothing failed.
        Exception: What the first node that failed raised.
    """
    return await _Walk(session, scope, say, run_node).run()


class _Walk:
    def __init__(self, session: RunSession, scope: Scope, say: Say, run_node: RunNode) -> None:
        self.session = session
        self.scope = scope
        self.say = say
        self.run_node = run_node
        graph = scope.graph
        self.missing = dict(graph.before)
        self.ready = deque(graph.roots)
        self.tasks: set[asyncio.Task[None]] = set()
        self.changed: asyncio.Event | None = None
        self.failure: Exception | None = None
        self.is_waiting = False
        self.waits: list[Wait] = []

    async def run(self) -> LevelEnd:
        try:
            while self.ready or self.tasks:
                # One after the other needs no task: chains are most of what there is.
                if len(self.ready) == 1 and not self.tasks:
                    await self._work(self.ready.popleft())
                    continue
                while self.ready:
                    task = asyncio.ensure_future(self._work(self.ready.popleft()))
                    self.tasks.add(task)
                    task.add_done_callback(self._done)
                self.changed = asyncio.Event()
                if self.tasks:
                    await self.changed.wait()
        finally:
            if self.tasks:
                await cut_off(self.tasks)
        if self.failure is not None:
            raise self.failure
        if self.is_waiting:
            raise Suspended(self.waits)
        rows = await self.session.node_rows(self.scope, self.scope.graph.order)
        return level_end(self.scope, rows, self.session.environment.node_types)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self.changed is not None:
            self.changed.set()

    async def _work(self, name: str) -> None:
        node = self.scope.level.node(name, self.session.environment.node_types)
        # A container works through the nodes in it, and these take the slots.
        is_leaf = not (node.type.is_pure or node.config.is_container)
        try:
            if is_leaf:
                async with self.session.slots:
                    outcome = await self.run_node(self.session, self.scope, name, self.say)
            else:
                outcome = await self.run_node(self.session, self.scope, name, self.say)
        except Exception as error:  # noqa: BLE001 - whatever a node raises is raised when the others have ended
            self.failure = self.failure or error
            return
        if outcome.state is NodeState.UNDECIDED:
            self.is_waiting = True
            self.waits += outcome.waits
            return
        for target in self.scope.graph.after[name]:
            self.missing[target] -= 1
            if not self.missing[target]:
                self.ready.append(target)
