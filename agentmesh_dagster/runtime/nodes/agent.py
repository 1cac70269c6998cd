"""The agent node: a model is asked until it needs no tool any more.

Its answer is text, or an object that is checked against a schema, with a repair round.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from agentmesh_dagster.errors import ModelError, NodeError
from agentmesh_dagster.records import Json, Step
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.nodes.agent_tools import (
    OfferedTool,
    assistant_message,
    call_summary,
    call_tools,
    offered_tools,
    read_calls,
    tool_message,
)
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
        talk = _Talk(call, agent, await offered_tools(agent, call))
        if config.output_schema is None:
            await talk.answer(None)
            return talk.result(None)
        # With tools the object is asked for only at the end: many servers answer with one of the two and never both.
        found, issues = _read_object(
            await talk.answer(None if talk.tools else config.output_schema), config.output_schema
        )
        if issues and talk.tools:
            found, issues = _read_object(
                await talk.ask_again(_OBJECT_PROMPT, config.output_schema), config.output_schema
            )
        if issues:
            found, issues = _read_object(
                await talk.ask_again(_repair_prompt(issues), config.output_schema), config.output_schema
            )
        if issues:
            raise ModelError(
                f"agent {agent.slug!r} gave no object that fits the output_schema, nor after it was shown what was "
                "wrong:\n" + "\n".join(issues),
                model=talk.last.model_used or "",
                retryable=True,
                code="model-bad-object",
            )
        return talk.result(found)


class _Talk:
    """An agent's conversation with its model, in one attempt."""

    def __init__(self, call: NodeCall, agent: AgentSpec, tools: tuple[OfferedTool, ...]) -> None:
        self.call = call
        self.agent = agent
        self.tools = tools
        self.messages: list[dict[str, Json]] = []
        if call.request["instructions"]:
            self.messages.append({"role": "system", "content": call.request["instructions"]})
        self.messages.append({"role": "user", "content": call.request["prompt"]})
        self.rows: list[Step] = []
        self.called: list[Step] = []

    @property
    def last(self) -> Step:
        """The row of the last model call."""
        return self.rows[-1]

    async def answer(self, schema: Mapping[str, Json] | None) -> str:
        """Asks the model, and makes the calls of tools that it asks for, until it asks for none; its answer's text.

        Raises:
            NodeError: It still asks for some in the last call that `max_steps` allows (code `agent-max-steps`).
        """
        while True:
            await self._ask(schema, may_call=True)
            number = int(self.last.key.rpartition("/")[2])
            asked = read_calls(self.last.output, number) if self.tools else ()
            if not asked:
                return self.last.output["text"]
            if len(self.rows) == self.agent.max_steps:
                raise NodeError(
                    f"agent {self.agent.slug!r} still asks for tools in its model call {len(self.rows)}, the last "
                    f"one that its max_steps = {self.agent.max_steps} allows: raise max_steps, or mend its "
                    "instructions or tools",
                    code="agent-max-steps",
                    path=self.call.key,
                )
            called = await call_tools(self.call, self.tools, number, asked)
            self.messages.append(assistant_message(self.last.output["text"], asked, self.tools))
            self.messages += [tool_message(one, row) for one, row in zip(asked, called, strict=True)]
            self.called += called

    async def ask_again(self, prompt: str, schema: Mapping[str, Json]) -> str:
        """Asks for an object after an answer that is none."""
        self.messages.append({"role": "assistant", "content": self.last.output["text"]})
        self.messages.append({"role": "user", "content": prompt})
        await self._ask(schema, may_call=False)
        return self.last.output["text"]

    async def _ask(self, schema: Mapping[str, Json] | None, *, may_call: bool) -> None:
        self.rows.append(await _ask(self.call, self.agent, self.messages, self.tools, schema, may_call))

    def result(self, found: Json) -> NodeResult:
        """What the node came to."""
        return _result(self.rows, self.called, found)


def agent_of(reference: str, preparation: Preparation) -> AgentSpec:
    """The agent that a node refers to, from the run's closure."""
    return preparation.session.pinned.closure.agents[reference.split("@", maxsplit=1)[0]].document


async def _ask(
    call: NodeCall,
    agent: AgentSpec,
    messages: list[dict[str, Json]],
    tools: tuple[OfferedTool, ...],
    schema: Mapping[str, Json] | None,
    may_call: bool,
) -> Step:
    """One journalled model call: an LLM call that was cut off is made again."""
    asked = {key: call.request[key] for key in ("models", "temperature", "max_tokens") if key in call.request}
    if schema is not None:
        asked["output_schema"] = dict(schema)
    if tools:
        # By name: their documents are pinned, and what a function's schema says may change with its code.
        asked["tools"] = [tool.name for tool in tools]

    async def make(key: str) -> StepAnswer:
        where = f"model_settings of agent {agent.slug!r}"
        settings: dict[str, Any] = render(
            dict(agent.model_settings), {"config": call.scope.config}, where=where
        )
        timeout_s = settings.pop("timeout_s", None)
        settings |= {key: asked[key] for key in ("temperature", "max_tokens") if key in asked}
        answer = await call.environment.models.complete(
            ModelRequest(
                models=tuple(asked["models"]),
                messages=tuple(dict(message) for message in messages),
                settings=settings,
                output_schema=schema,
                tools=tuple(tool.to_offer() for tool in tools),
                may_call=may_call,
                timeout_s=timeout_s,
                idempotency_key=content_hash([call.session.run.id, key]),
            )
        )
        return StepAnswer(
            output={
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                **({"tool_calls": [dict(one) for one in answer.tool_calls]} if answer.tool_calls else {}),
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


def _result(rows: list[Step], called: list[Step], found: Json) -> NodeResult:
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
    output["tool_calls"] = [call_summary(row) for row in called]
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


_OBJECT_PROMPT: Final = "Give this answer as one JSON value that fits the schema, and nothing else."


def _repair_prompt(issues: list[str]) -> str:
    lines = "\n".join(issues)
    return f"Your answer does not fit the schema:\n{lines}\nAnswer again with the corrected JSON and nothing else."


def _as_text(value: Json) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "usage" in value and isinstance(value.get("text"), str):  # pyright: ignore[reportUnknownMemberType] - any JSON object
        return value["text"]  # pyright: ignore[reportUnknownVariableType] - any JSON object
    return json.dumps(value, ensure_ascii=False)
