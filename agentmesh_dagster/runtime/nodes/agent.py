"""The agent node: one call of a model; text, or an object checked against a schema, with a repair round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.records import Json, Step
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.runtime.ports import ModelRequest
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.documents import AgentSpec
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.nodes import AgentConfig
from agentmesh_dagster.specs.schema import validate_value


class AgentNode(NodeType[AgentConfig]):
    """Runs an agent with a prompt."""

    name: ClassVar[str] = "agent"
    config_model = AgentConfig
    kinds: ClassVar[tuple[str, ...]] = ("ai",)

    def describe(self, config: AgentConfig) -> str:
        return f"asks agent {config.agent}"

    def request(self, config: AgentConfig, preparation: Preparation) -> Json:
        agent = agent_of(config.agent, preparation)
        prompt = _as_text(
            preparation.upstream if config.prompt is None else preparation.render(config.prompt, "prompt")
        )
        instructions = agent.instructions if config.instructions is None else config.instructions
        where = f"node {preparation.node.id!r}, instructions of agent {agent.slug!r}"
        override = config.model
        models = (
            list(agent.models)
            if override is None
            else ([override] if isinstance(override, str) else override)
        )
        request: dict[str, Json] = {
            "agent": agent.slug,
            "models": models,
            "instructions": _as_text(render(instructions, preparation.names, where=where)),
            "prompt": prompt,
        }
        for setting in ("temperature", "max_tokens"):
            value = getattr(config, setting)
            value = getattr(agent, setting) if value is None else value
            if value is not None:
                request[setting] = value
        if config.output_schema is not None:
            request["output_schema"] = config.output_schema
        return request

    async def run(self, config: AgentConfig, call: NodeCall) -> NodeResult:
        agent = agent_of(config.agent, call.preparation)
        request = call.request
        messages: list[dict[str, Json]] = []
        if request["instructions"]:
            messages.append({"role": "system", "content": request["instructions"]})
        messages.append({"role": "user", "content": request["prompt"]})
        reply = await _ask(call, agent, messages)
        rows = [reply]
        if config.output_schema is None:
            return _result(rows, None)
        found, issues = _read_object(reply.output["text"], config.output_schema)
        if issues:
            messages.append({"role": "assistant", "content": reply.output["text"]})
            messages.append({"role": "user", "content": _repair_prompt(issues)})
            reply = await _ask(call, agent, messages)
            rows.append(reply)
            found, issues = _read_object(reply.output["text"], config.output_schema)
        if issues:
            raise ModelError(
                f"agent {agent.slug!r} gave no object that fits the output_schema, nor after it was shown what was "
                "wrong:\n" + "\n".join(issues),
                model=reply.model_used or "",
                retryable=True,
                code="model-bad-object",
            )
        return _result(rows, found)


def agent_of(reference: str, preparation: Preparation) -> AgentSpec:
    """The agent that a node refers to, from the run's closure."""
    return preparation.session.pinned.closure.agents[reference.split("@", maxsplit=1)[0]].document


async def _ask(call: NodeCall, agent: AgentSpec, messages: list[dict[str, Json]]) -> Step:
    """One journalled model call: an LLM call that was cut off is made again."""
    asked = {
        key: call.request[key]
        for key in ("models", "temperature", "max_tokens", "output_schema")
        if key in call.request
    }

    async def make(key: str) -> StepAnswer:
        secrets = call.environment.secrets
        where = f"model_settings of agent {agent.slug!r}"
        settings: dict[str, Any] = render(dict(agent.model_settings), {"secret": secrets.lookup}, where=where)
        timeout_s = settings.pop("timeout_s", None)
        settings |= {key: asked[key] for key in ("temperature", "max_tokens") if key in asked}
        answer = await call.environment.models.complete(
            ModelRequest(
                models=tuple(asked["models"]),
                messages=tuple(dict(message) for message in messages),
                settings=settings,
                output_schema=asked.get("output_schema"),
                timeout_s=timeout_s,
                idempotency_key=content_hash([call.session.run.id, key]),
            )
        )
        return StepAnswer(
            output={
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                **({"failures": list(answer.failures)} if answer.failures else {}),
            },
            model_used=answer.model,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            cost_usd=answer.cost_usd,
        )

    row, replayed = await call.step("llm", {**asked, "messages": [dict(m) for m in messages]}, make)
    if not replayed:
        call.preparation.say(
            f"{call.key}: {row.model_used} answered in {(row.duration_ms or 0) / 1000:.2f} s, "
            f"{row.input_tokens} tokens in, {row.output_tokens} out, {row.cost_usd:.6f} USD"
        )
    return row


def _result(rows: list[Step], found: Json) -> NodeResult:
    last = rows[-1]
    output: dict[str, Json] = {"text": last.output["text"]}
    if found is not None:
        # The object's fields stand beside `text`, so that `steps.classify.output.risk` reads as people write it.
        output = {**(found if isinstance(found, Mapping) else {}), **output, "object": found}
    output["usage"] = {
        "input_tokens": sum(row.input_tokens for row in rows),
        "output_tokens": sum(row.output_tokens for row in rows),
        "cost_usd": sum(row.cost_usd for row in rows),
        "calls": len(rows),
        "model": last.model_used,
    }
    output["tool_calls"] = []
    return NodeResult(output=output)


def _read_object(text: str, schema: Mapping[str, Json]) -> tuple[Json, list[str]]:
    """The JSON in a model's answer, and what is wrong with it; a Markdown fence around it is taken off."""
    stripped = text.strip()
    if stripped.startswith("```"):
        stripped = stripped.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    try:
        found = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return None, [f"$: the answer is not JSON: {error}"]
    return found, [f"{issue.path}: {issue.message}" for issue in validate_value(schema, found)]


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _repair_prompt(issues: list[str]) -> str:
    lines = "\n".join(issues)
    return f"Your answer does not fit the schema:\n{lines}\nAnswer again with the corrected JSON and nothing else."


def _as_text(value: Json) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "usage" in value and isinstance(value.get("text"), str):  # pyright: ignore[reportUnknownMemberType] - any JSON object
        return value["text"]  # pyright: ignore[reportUnknownVariableType] - any JSON object
    return json.dumps(value, ensure_ascii=False)
