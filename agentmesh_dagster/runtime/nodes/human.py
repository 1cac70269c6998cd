"""The human node: asks people, and waits for them without a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from agentmesh_dagster.constants import HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Json, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.runtime.waiting import timed_out, with_policy
from agentmesh_dagster.specs.fields import as_list
from agentmesh_dagster.specs.nodes import HumanConfig


class HumanNode(NodeType[HumanConfig]):
    """Opens an approval; goes on by the handle that the decision names."""

    name: ClassVar[str] = "human"
    config_model = HumanConfig
    kinds: ClassVar[tuple[str, ...]] = ("human",)
    shows_waiting: ClassVar[bool] = True

    def describe(self, config: HumanConfig) -> str:
        who = ", ".join(config.assignees) or "anybody"
        return f"asks {who}: {config.title}"

    def request(self, config: HumanConfig, preparation: Preparation) -> Json:
        rendered: dict[str, Json] = {"title": _text(preparation.render(config.title, "title"))}
        if config.body:
            rendered["body"] = _text(preparation.render(config.body, "body"))
        for field in ("data", "prefill"):
            if field in config.model_fields_set:
                rendered[field] = preparation.render(getattr(config, field), field)
        return rendered

    async def run(self, config: HumanConfig, call: NodeCall) -> NodeResult:
        wait = replace(
            with_policy(call.new_wait(WaitKind.HUMAN), config, call.notify),
            title=call.session.redact(call.request["title"]),
            body=call.session.redact(call.request.get("body", "")),
            data=call.session.redact(call.request.get("data")),
            prefill=call.session.redact(call.request.get("prefill")),
            form_schema=config.form_schema,
            options=tuple(config.options or ()),
            multiple=config.multiple,
            cancel_siblings=config.cancel_siblings,
        )
        return _result(config, call, call.answer(wait))


def _result(config: HumanConfig, call: NodeCall, wait: Wait) -> NodeResult:
    if wait.status is WaitStatus.CANCELED:
        # Another gate of the run decided for this one: the run goes past it.
        return NodeResult(status=StepStatus.SKIPPED)
    answer: Json = wait.answer
    decision = answer["decision"]
    if decision == HANDLE_TIMEOUT and config.on_timeout != "route":
        raise timed_out(wait)
    is_rejection = decision == HANDLE_REJECTED and HANDLE_REJECTED not in (config.options or ())
    if is_rejection and HANDLE_REJECTED not in call.preparation.attached:
        comment = f": {answer['comment']}" if answer.get("comment") else ""
        raise NodeError(
            f"{call.key!r} was rejected by {answer['by']}{comment}; no edge leaves from its handle 'rejected'",
            code="rejected",
            path=call.key,
        )
    handles: tuple[str, ...] = tuple(as_list(decision) or (decision,))
    passes = not is_rejection and decision != HANDLE_TIMEOUT
    return NodeResult(output=answer, handles=handles, takes_default=passes)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else str(value)
