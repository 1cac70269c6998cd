"""The tool node: calls a tool with mapped input."""

from __future__ import annotations

from typing import ClassVar

from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.runtime.tools.call import ToolContext, call_tool, prepare_input
from agentmesh_dagster.runtime.tools.errors import ToolRefused
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.nodes import ToolConfig


class ToolNode(NodeType[ToolConfig]):
    """Calls a tool; the call is a step of its own, so that a finished call is never made again."""

    name: ClassVar[str] = "tool"
    config_model = ToolConfig

    def describe(self, config: ToolConfig) -> str:
        return f"calls tool {config.tool}"

    def request(self, config: ToolConfig, preparation: Preparation) -> Json:
        given = "input" in config.model_fields_set
        value = preparation.render(config.input, "input") if given else preparation.upstream
        return {"tool": config.tool, "input": value}

    async def run(self, config: ToolConfig, call: NodeCall) -> NodeResult:
        session, environment = call.session, call.environment
        tool = session.pinned.closure.tools[config.tool.split("@")[0]].document

        if tool.requires_approval is not False:
            raise ToolRefused(
                f"tool {tool.slug!r} requires approval, and this release has nobody to ask: it is not called",
                code="approval-needed",
            )

        def context(key: str) -> ToolContext:
            return ToolContext(
                secrets=environment.secrets,
                http=environment.http,
                functions=environment.functions,
                clock=environment.clock,
                # The same in every attempt: the other side can tell a repeated call from a new one.
                idempotency_key=content_hash([session.run.id, key]),
            )

        prepared = await prepare_input(tool, call.request["input"], context(call.key))

        async def make(key: str) -> StepAnswer:
            return StepAnswer(output=await call_tool(tool, prepared, context(key)))

        request = {"tool": tool.slug, "input": prepared}
        row, replayed = await call.step("tool", request, make, idempotent=tool.may_repeat)
        if not replayed:
            call.preparation.say(
                f"{call.key}: tool {tool.slug} answered in {(row.duration_ms or 0) / 1000:.2f} s"
            )
        return NodeResult(output=row.output)
