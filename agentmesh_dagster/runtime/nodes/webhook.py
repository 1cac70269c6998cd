"""The webhook node: waits for a named event from outside, without a worker."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import ClassVar

from agentmesh_dagster.constants import HANDLE_TIMEOUT
from agentmesh_dagster.errors import TimeOver
from agentmesh_dagster.records import Json, WaitKind, WaitStatus
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.specs.expressions import named_values
from agentmesh_dagster.specs.nodes import WebhookConfig


class WebhookNode(NodeType[WebhookConfig]):
    """Waits for an event of a name with a correlation key; gives the event's payload."""

    name: ClassVar[str] = "webhook"
    config_model = WebhookConfig
    kinds: ClassVar[tuple[str, ...]] = ("webhook",)
    shows_waiting: ClassVar[bool] = True

    def describe(self, config: WebhookConfig) -> str:
        return f"waits for event {config.event}"

    def request(self, config: WebhookConfig, preparation: Preparation) -> Json:
        key = "" if config.key is None else preparation.render(config.key, "key")
        asked = {"event": config.event, "key": key if isinstance(key, str) else str(key)}
        if config.when is None:
            return asked
        # The condition is asked where an event is sent, and of the run it sees what it names.
        names = named_values(config.when, preparation.names)
        return {**asked, "condition": {"when": config.when, "names": names}}

    async def run(self, config: WebhookConfig, call: NodeCall) -> NodeResult:
        wait = call.new_wait(WaitKind.EVENT)
        wait = replace(
            wait,
            title=f"{call.key} waits for the event {config.event}",
            event_name=config.event,
            event_key=call.request["key"],
            data=call.session.redact(call.request.get("condition")),
            form_schema=config.payload_schema,
            on_timeout=config.on_timeout,
            timeout_data=config.timeout_data,
            deadline_at=wait.created_at + timedelta(seconds=config.timeout) if config.timeout else None,
        )
        closed = call.answer(wait)
        if closed.status is not WaitStatus.EXPIRED:
            return NodeResult(output=closed.answer["data"])
        if config.on_timeout == "route":
            return NodeResult(output=config.timeout_data, handles=(HANDLE_TIMEOUT,), takes_default=False)
        raise TimeOver(
            f"no event {config.event!r} with the key {call.request['key']!r} came within {config.timeout:g} s",
            code="event-timeout",
            path=call.key,
        )
