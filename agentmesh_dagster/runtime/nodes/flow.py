"""Node types that only compute: start, end, transform, fail, branch; and delay."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import ClassVar

from agentmesh_dagster.errors import ExpressionError, NodeError, WorkflowFailed
from agentmesh_dagster.records import Json, WaitKind
from agentmesh_dagster.runtime.excerpts import values_read, values_rendered
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.specs.base import parse_duration
from agentmesh_dagster.specs.expressions import evaluate
from agentmesh_dagster.specs.nodes import (
    BranchConfig,
    DelayConfig,
    EndConfig,
    FailConfig,
    StartConfig,
    TransformConfig,
)
from agentmesh_dagster.specs.schema import validate_value


class StartNode(NodeType[StartConfig]):
    """Validates the run's input and hands it on."""

    name: ClassVar[str] = "start"
    config_model = StartConfig
    is_pure: ClassVar[bool] = True

    def request(self, config: StartConfig, preparation: Preparation) -> Json:
        return preparation.names["input"]

    async def run(self, config: StartConfig, call: NodeCall) -> NodeResult:
        schema = call.scope.level.workflow.input_schema
        issues = validate_value(schema, call.request)
        if issues:
            lines = "\n".join(f"{issue.path}: {issue.message}" for issue in issues)
            called_at = call.scope.owner_key
            whose = f"the input of the workflow called at {called_at!r}" if called_at else "the run's input"
            raise NodeError(f"{whose} does not fit the workflow's input_schema:\n{lines}", code="run-input")
        return NodeResult(output=call.request)


class EndNode(NodeType[EndConfig]):
    """Evaluates the run's output."""

    name: ClassVar[str] = "end"
    config_model = EndConfig
    is_pure: ClassVar[bool] = True

    def request(self, config: EndConfig, preparation: Preparation) -> Json:
        if "output" not in config.model_fields_set:
            return preparation.upstream
        return preparation.render(config.output, "output")

    def read(self, config: EndConfig, preparation: Preparation) -> Json:
        given = "output" in config.model_fields_set
        return values_rendered(config.output, preparation.names) if given else None

    async def run(self, config: EndConfig, call: NodeCall) -> NodeResult:
        return NodeResult(output=call.request)


class TransformNode(NodeType[TransformConfig]):
    """Evaluates a mapping."""

    name: ClassVar[str] = "transform"
    config_model = TransformConfig
    is_pure: ClassVar[bool] = True

    def request(self, config: TransformConfig, preparation: Preparation) -> Json:
        return preparation.render(config.output, "output")

    def read(self, config: TransformConfig, preparation: Preparation) -> Json:
        return values_rendered(config.output, preparation.names)

    async def run(self, config: TransformConfig, call: NodeCall) -> NodeResult:
        return NodeResult(output=call.request)


class FailNode(NodeType[FailConfig]):
    """Fails with the code and the message that the workflow gives."""

    name: ClassVar[str] = "fail"
    config_model = FailConfig
    is_pure: ClassVar[bool] = True

    def describe(self, config: FailConfig) -> str:
        return f"fails with {config.code}"

    def request(self, config: FailConfig, preparation: Preparation) -> Json:
        message = preparation.render(config.message, "message")
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
        return {"code": config.code, "message": text}

    async def run(self, config: FailConfig, call: NodeCall) -> NodeResult:
        raise WorkflowFailed(
            call.session.redact(call.request["message"]), code=call.request["code"], path=call.key
        )


class BranchNode(NodeType[BranchConfig]):
    """Picks handles by conditions."""

    name: ClassVar[str] = "branch"
    config_model = BranchConfig
    is_pure: ClassVar[bool] = True

    def describe(self, config: BranchConfig) -> str:
        return "; ".join(f"{c.handle} when {c.when}" for c in config.conditions)

    def request(self, config: BranchConfig, preparation: Preparation) -> Json:
        taken: list[str] = []
        for index, condition in enumerate(config.conditions):
            where = f"node {preparation.node.id!r}, config.conditions[{index}].when"
            if evaluate(condition.when, preparation.names, where=where):
                taken.append(condition.handle)
                if config.mode == "first":
                    break
        if not taken and config.default is not None:
            taken.append(config.default)
        return {"taken": list(dict.fromkeys(taken))}

    def read(self, config: BranchConfig, preparation: Preparation) -> Json:
        return values_read([condition.when for condition in config.conditions], preparation.names, bare=True)

    async def run(self, config: BranchConfig, call: NodeCall) -> NodeResult:
        return NodeResult(output=call.request, handles=tuple(call.request["taken"]))


class DelayNode(NodeType[DelayConfig]):
    """Waits: up to `settings.inline_s` in the worker, where a re-run waits for what is left; beyond, without one."""

    name: ClassVar[str] = "delay"
    config_model = DelayConfig
    kinds: ClassVar[tuple[str, ...]] = ("timer",)
    shows_waiting: ClassVar[bool] = True

    def request(self, config: DelayConfig, preparation: Preparation) -> Json:
        if config.until is not None:
            return {
                "until": _moment(preparation.render(config.until, "until"), preparation.node.id).isoformat()
            }
        given = preparation.render(config.seconds, "seconds")
        try:
            seconds = parse_duration(given)
        except ValueError:
            seconds = given
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 <= seconds < float("inf")
        ):
            raise ExpressionError(
                f"node {preparation.node.id!r}, config.seconds: gives {seconds!r}, which is no number of seconds"
            )
        return {"seconds": seconds}

    async def run(self, config: DelayConfig, call: NodeCall) -> NodeResult:
        clock, session = call.environment.clock, call.session
        row = await session.row(call.key)
        began = (row.queued_at if row else None) or clock.now()
        passed_s = (clock.now() - began).total_seconds()
        if "until" in call.request:
            left_s = (datetime.fromisoformat(call.request["until"]) - clock.now()).total_seconds()
        else:
            left_s = call.request["seconds"] - passed_s
        if session.wait(call.key, "") is not None or left_s > call.scope.level.workflow.settings.inline_s:
            wait = call.new_wait(WaitKind.TIMER)
            moment = wait.created_at + timedelta(seconds=left_s)
            call.answer(replace(wait, title=f"{call.key} waits for its time", deadline_at=moment))
        elif left_s > 0:
            await asyncio.sleep(left_s)
        return NodeResult(output={"waited_s": round((clock.now() - began).total_seconds(), 3)})


def _moment(value: Json, node_id: str) -> datetime:
    where = f"node {node_id!r}, config.until"
    if not isinstance(value, str):
        raise ExpressionError(f"{where}: gives {value!r}, which is no ISO 8601 time")
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        raise ExpressionError(
            f"{where}: {value!r} is no ISO 8601 time, such as '2026-01-31T09:00:00+01:00'"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
