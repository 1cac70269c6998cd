"""Branches side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from agentmesh_dagster.deadline import cut_off
from agentmesh_dagster.records import Json, Step, StepStatus
from agentmesh_dagster.runtime.journalled import call_off
from agentmesh_dagster.runtime.level_end import StepFailed
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation, state_of
from agentmesh_dagster.runtime.nodes.passes import Standing, body_scope, joined_writes
from agentmesh_dagster.runtime.scope import Scope
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.nodes import ParallelConfig


class ParallelNode(NodeType[ParallelConfig]):
    """Runs named branches; `wait` says which of them must succeed."""

    name: ClassVar[str] = "parallel"
    config_model = ParallelConfig
    kinds: ClassVar[tuple[str, ...]] = ("parallel",)

    def describe(self, config: ParallelConfig) -> str:
        wanted = config.wait if isinstance(config.wait, str) else f"the first {config.wait}"
        return f"{', '.join(config.branches)} side by side; waits for {wanted}"

    def request(self, config: ParallelConfig, preparation: Preparation) -> Json:
        request: dict[str, Json] = {"branches": list(config.branches), "wait": config.wait}
        # What called workflows get is rendered here, where an error is the node's.
        scopes = self.levels(config, preparation)
        key = preparation.scope.key(preparation.node.id)
        called = {name for name, body in config.branches.items() if body.workflow is not None}
        if called:
            request["inputs"] = {name: scopes[f"{key}/{name}"].input for name in sorted(called)}
        return request

    def levels(self, config: ParallelConfig, preparation: Preparation) -> Mapping[str, Scope]:
        key = preparation.scope.key(preparation.node.id)
        return {
            f"{key}/{name}": body_scope(
                preparation,
                body,
                f"{key}/{name}",
                upstream=preparation.upstream,
                place=f"branches.{name}",
            )
            for name, body in config.branches.items()
        }

    async def run(self, config: ParallelConfig, call: NodeCall) -> NodeResult:
        keys = {name: f"{call.key}/{name}" for name in config.branches}
        scopes = call.levels(self, config)
        rows: dict[str, Step] = {}
        standing = Standing()
        # How many end the others; None: all run to their end.
        enough = {"first": 1}.get(config.wait) if isinstance(config.wait, str) else config.wait

        async def branch(index: int, name: str) -> None:
            scope = scopes[keys[name]]
            request = {"branch": name}
            row = await standing.attempt(lambda: _branch(call, keys[name], request, scope, index), keys[name])
            if row is not None:
                rows[name] = row

        def is_decided() -> bool:
            return enough is not None and (len(rows) >= enough or len(keys) - standing.failures < enough)

        if enough is not None:
            # Those that won before a worker was killed have won.
            known = {name: call.session.known_row(key) for name, key in keys.items()}
            rows |= {name: row for name, row in known.items() if row and row.status is StepStatus.SUCCEEDED}
        if not is_decided():
            tasks = {asyncio.ensure_future(branch(n, name)) for n, name in enumerate(config.branches)}
            try:
                while tasks and not is_decided():
                    _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cut_off(tasks)
        needed = {"all": len(keys), "any": 1}.get(str(config.wait), enough or 1)
        may_yet_do = len(rows) < needed and len(keys) - standing.failures >= needed
        if standing.is_waiting and (may_yet_do or config.wait == "any"):
            # What waits in a branch that has failed is nobody's any more: the node goes on without it.
            left: list[str] = []
            for key in sorted(standing.failed):
                left += call.session.unsettled_waits(key)
                await call_off(call.session, key, call.buffer)
            raise Suspended(standing.waits, left)
        if len(rows) < needed:
            standing.settle()
        ended = [name for name in config.branches if name in rows]
        return NodeResult(
            output={name: rows[name].output if name in rows else None for name in config.branches},
            state=joined_writes(call, [(keys[name], state_of(rows[name])) for name in ended]),
            counts={"branches": len(keys), "succeeded": len(ended)},
        )


async def _branch(call: NodeCall, key: str, request: Json, scope: Scope, index: int) -> Step:
    """Runs one branch, or replays it; one that failed before the node waited has failed."""
    known = call.session.known_row(key)
    is_failed = known is not None and known.status is StepStatus.FAILED
    if call.goes_on and known is not None and is_failed and known.error is not None:
        raise StepFailed(known.error)
    return await call.part("branch", key, request, scope, index=index)
