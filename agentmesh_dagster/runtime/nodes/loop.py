"""A body, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Final

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Json, Step, WaitKind
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.nodes.base import (
    LevelEnd,
    NodeCall,
    NodeResult,
    NodeType,
    Preparation,
    part_answer,
    state_of,
)
from agentmesh_dagster.runtime.nodes.passes import body_scope
from agentmesh_dagster.runtime.scope import Scope, step_view
from agentmesh_dagster.specs.expressions import evaluate
from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.nodes import LoopConfig

AGAIN: Final = "again"
"""In the routing decision of an iteration's row: its condition asked for another one."""


class LoopNode(NodeType[LoopConfig]):
    """Repeats a body while, or until, a condition holds; the output of an iteration is the input of the next."""

    name: ClassVar[str] = "loop"
    config_model = LoopConfig
    kinds: ClassVar[tuple[str, ...]] = ("loop",)

    def describe(self, config: LoopConfig) -> str:
        condition = f"while {config.while_}" if config.while_ is not None else f"until {config.until}"
        return f"{condition}, at most {config.max_iterations} times"

    def request(self, config: LoopConfig, preparation: Preparation) -> Json:
        condition = {"while": config.while_} if config.while_ is not None else {"until": config.until}
        return {**condition, "max_iterations": config.max_iterations}

    async def run(self, config: LoopConfig, call: NodeCall) -> NodeResult:
        preparation = call.preparation
        rules = call.scope.level.state
        state: dict[str, Json] = {}
        output: Json = None
        upstream = preparation.upstream
        count = 0
        row: Step | None = None
        wants_more = config.while_ is None or self._asks(config, call, None, LevelEnd(output=upstream), 0)
        while wants_more and count < config.max_iterations:
            if count and config.delay_s:
                await self._pause(config, call, count)
            count += 1
            scope = body_scope(
                preparation,
                config.body,
                iteration_key(call.key, count),
                upstream=upstream,
                place="body",
                names={"iteration": count},
                context=rules.joined(preparation.names["context"], state),
                now=row.finished_at if row is not None else None,
                buffer=call.buffer,
            )
            row = await call.part(
                "iteration",
                iteration_key(call.key, count),
                {"iteration": count},
                scope,
                self._pass(config, call, scope, count),
                index=count,
            )
            output = upstream = row.output
            state = rules.joined(state, state_of(row))
            decision: Mapping[str, Json] = row.routing_decision or {}
            wants_more = AGAIN in decision.get("handles", ())
        if wants_more and config.on_limit == "fail":
            raise NodeError(
                f"{call.key}: {config.max_iterations} iterations, as many as max_iterations allows, and the condition "
                "asks for more: raise max_iterations, or take what there is with 'on_limit: continue'",
                code="loop-limit",
                path=call.key,
            )
        fields = as_object(output)
        shown = fields if fields is not None and count else {"output": output}
        return NodeResult(output={**shown, "iterations": count}, state=state, counts={"iterations": count})

    def _pass(self, config: LoopConfig, call: NodeCall, scope: Scope, count: int) -> Any:
        """One iteration; its answer says whether another one follows, so that a replay need not ask."""

        async def work() -> StepAnswer:
            end = await call.run_pass(scope)
            return part_answer(end, *([AGAIN] if self._asks(config, call, scope, end, count) else []))

        return work

    def _asks(
        self, config: LoopConfig, call: NodeCall, scope: Scope | None, end: LevelEnd, count: int
    ) -> bool:
        """Whether the condition asks for another iteration after so many."""
        rules = call.scope.level.state
        seen = call.preparation.names
        context = rules.joined(scope.context if scope is not None else seen["context"], end.state)
        names = {
            **seen,
            "steps": {**seen["steps"], **_body_steps(config, call, scope)},
            "context": {**context, "last_output": end.output},
            "iteration": count,
        }
        where = f"node {call.preparation.node.id!r}, config."
        if config.while_ is not None:
            return bool(evaluate(config.while_, names, where=f"{where}while"))
        return not evaluate(config.until or "", names, where=f"{where}until")

    async def _pause(self, config: LoopConfig, call: NodeCall, count: int) -> None:
        """Waits between two iterations, without a worker where it takes longer than `settings.inline_s`."""
        if call.session.known_row(iteration_key(call.key, count + 1)) is not None:
            return
        if config.delay_s <= call.scope.level.workflow.settings.inline_s:
            await asyncio.sleep(config.delay_s)
            return
        wait = call.new_wait(WaitKind.TIMER, label=f"after {count}")
        moment = wait.created_at + timedelta(seconds=config.delay_s)
        call.answer(replace(wait, title=f"{call.key} waits for its next iteration", deadline_at=moment))


def iteration_key(node_key: str, number: int) -> str:
    """The step key of an iteration, counted from 1."""
    return f"{node_key}#{number}"


def _body_steps(config: LoopConfig, call: NodeCall, scope: Scope | None) -> Mapping[str, Json]:
    """The steps of the body as the iteration left them; before the first they are pending."""
    if config.body.workflow is not None:
        return {}
    steps: dict[str, Json] = {}
    for node in config.body.nodes or ():
        row = call.session.known_row(scope.key(node.id)) if scope is not None else None
        pending = {**step_view(None), "status": "pending"}
        steps[identifier(node.id)] = step_view(row) if row is not None else pending
    return steps
