"""What a tool may use that is called in a node."""

from __future__ import annotations

from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.nodes.base import NodeCall
from agentmesh_dagster.runtime.tools.base import ToolContext


def tool_context(call: NodeCall, key: str) -> ToolContext:
    """The context of the call under a step key; its idempotency key is the same in every attempt."""
    environment, step = call.environment, call.context(key)
    return ToolContext(
        secrets=environment.secrets,
        http=environment.http,
        functions=environment.functions,
        clock=environment.clock,
        idempotency_key=step.idempotency_key,
        config=call.scope.config,
        step=step,
    )


def schema_context(environment: Environment) -> ToolContext:
    """What suffices to ask a tool for its schemas."""
    return ToolContext(
        secrets=environment.secrets,
        http=environment.http,
        functions=environment.functions,
        clock=environment.clock,
        idempotency_key="",
    )
