"""The tool node: calls a tool with mapped input."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.runtime.nodes.tool_context import schema_context, tool_context
from agentmesh_dagster.runtime.tools.approval import Refused, approved_arguments
from agentmesh_dagster.runtime.tools.call import call_tool, prepare_input, tool_schemas
from agentmesh_dagster.runtime.tools.errors import ToolRefused
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.specs.nodes import ToolConfig
from agentmesh_dagster.specs.schema_parts import says_fields

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.session import RunSession


class ToolNode(NodeType[ToolConfig]):
    """Calls a tool; the call is a step of its own, so that a finished call is never made again."""

    name: ClassVar[str] = "tool"
    config_model = ToolConfig

    def describe(self, config: ToolConfig) -> str:
        return f"calls tool {config.tool}"

    async def load(self, config: ToolConfig, session: RunSession) -> None:
        tool = _tool(config, session)
        if "input" in config.model_fields_set or tool.slug in session.takes_input:
            return
        # The schema of a function comes from its module, which is imported for it.
        schema, _ = await tool_schemas(tool, schema_context(session.environment))
        session.takes_input[tool.slug] = says_fields(schema)

    def request(self, config: ToolConfig, preparation: Preparation) -> Json:
        value: Json = {}
        if "input" in config.model_fields_set:
            value = preparation.render(config.input, "input")
        elif preparation.session.takes_input[_tool(config, preparation.session).slug]:
            value = preparation.upstream
        return {"tool": config.tool, "input": value}

    async def run(self, config: ToolConfig, call: NodeCall) -> NodeResult:
        tool = _tool(config, call.session)
        given = "input" in config.model_fields_set
        source = "config.input" if given else f"{call.preparation.upstream_source}, as no 'input' is given,"

        async def prepare(value: Json) -> Json:
            return await prepare_input(tool, value, tool_context(call, call.key))

        try:
            prepared = await prepare(call.request["input"])
        except ToolRefused as refused:
            if refused.code != "tool-input":
                raise
            raise ToolRefused(
                f"node {call.key!r}: {source} does not fit the input of tool {tool.slug!r}:\n{refused.message}",
                code=refused.code,
                path=call.key,
            ) from None
        input_schema, output_schema = await tool_schemas(tool, tool_context(call, call.key))
        prepared = await approved_arguments(
            call, tool, call.next_key("tool"), prepared, schema=input_schema, prepare=prepare
        )
        if isinstance(prepared, Refused):
            raise ToolRefused(f"tool {tool.slug!r} was {prepared.sentence}", code="approval-refused")

        async def make(key: str) -> StepAnswer:
            return StepAnswer(output=await call_tool(tool, prepared, tool_context(call, key)))

        request = {"tool": tool.slug, "input": prepared}
        row, replayed = await call.step(
            "tool", request, make, idempotent=tool.may_repeat, answer_schema=output_schema
        )
        if not replayed:
            call.preparation.say(
                f"{call.key}: tool {tool.slug} answered in {(row.duration_ms or 0) / 1000:.2f} s"
            )
        return NodeResult(output=row.output)


def _tool(config: ToolConfig, session: RunSession) -> ToolSpec:
    return session.pinned.closure.tools[config.tool.split("@")[0]].document
