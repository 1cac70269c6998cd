"""The `function` tool: a Python function from the allow-list of modules."""

from __future__ import annotations

from typing import Any

from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.tools.base import ToolContext
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.specs.tools import FunctionToolConfig

__all__ = ["FunctionTool"]


class FunctionTool:
    """Tools of the type `function`; see `runtime.functions`."""

    config_model: type[SpecModel] = FunctionToolConfig

    async def schemas(
        self, config: FunctionToolConfig, context: ToolContext
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        function = await context.functions.load(config.function)
        return function.input_schema, function.output_schema

    async def call(
        self, tool: ToolSpec, config: FunctionToolConfig, value: Json, context: ToolContext
    ) -> Json:
        function = await context.functions.load(config.function)
        context.outgoing.is_unanswered = True
        return await function(value, context.step)
