"""The emit node: sends a named event to the runs of its project, once."""

from __future__ import annotations

from typing import ClassVar

from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.specs.nodes import EmitConfig


class EmitNode(NodeType[EmitConfig]):
    """Sends an event; a node that was cut off after it had sent it does not send it again."""

    name: ClassVar[str] = "emit"
    config_model = EmitConfig
    kinds: ClassVar[tuple[str, ...]] = ("event",)

    def describe(self, config: EmitConfig) -> str:
        return f"sends event {config.event}"

    def request(self, config: EmitConfig, preparation: Preparation) -> Json:
        key = "" if config.key is None else preparation.render(config.key, "key")
        return {
            "event": config.event,
            "key": key if isinstance(key, str) else str(key),
            "data": preparation.render(config.data, "data"),
        }

    async def run(self, config: EmitConfig, call: NodeCall) -> NodeResult:
        name, key = call.request["event"], call.request["key"]
        event_id = await call.session.emit(call.key, name, key, call.request["data"], keep_s=config.keep)
        call.preparation.say(f"{call.key}: sent the event {name}, id {event_id}")
        return NodeResult(output={"event_id": event_id, "event": name, "key": key})
