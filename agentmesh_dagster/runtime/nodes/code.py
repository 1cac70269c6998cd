"""The code node: calls a Python function from the allow-list of modules."""

from __future__ import annotations

from typing import ClassVar

from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.specs.nodes import CodeConfig


class CodeNode(NodeType[CodeConfig]):
    """Calls a registered Python function.

    A function that was cut off runs again at a retry, as a Dagster op does; what must not happen twice belongs into a
    tool with `side_effects`.
    """

    name: ClassVar[str] = "code"
    config_model = CodeConfig
    kinds: ClassVar[tuple[str, ...]] = ("python",)

    def describe(self, config: CodeConfig) -> str:
        return f"calls {config.function}"

    def request(self, config: CodeConfig, preparation: Preparation) -> Json:
        given = "input" in config.model_fields_set
        value = preparation.render(config.input, "input") if given else preparation.upstream
        return {"function": config.function, "input": value}

    async def run(self, config: CodeConfig, call: NodeCall) -> NodeResult:
        function = await call.environment.functions.load(config.function)
        return NodeResult(output=await function(call.request["input"], call.context(call.key)))
