"""The tools of an agent: what its model is offered, and the calls that the model asks for.

A call is a step of its own, `<node>/tool/<n>.<i>`: the number of the model call that asked for it, and its place in
that answer. What it came to is recorded in any case, a failure too: the model has been told it, and a replay must tell
it the same.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.constants import HANDLE_ERROR
from agentmesh_dagster.errors import AgentMeshError, ExpressionError, ToolError
from agentmesh_dagster.records import Json, Step, StepStatus
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.nodes.base import NodeCall
from agentmesh_dagster.runtime.nodes.tool_context import tool_context
from agentmesh_dagster.runtime.ports import ToolOffer
from agentmesh_dagster.runtime.tools.approval import Refused, approved_arguments
from agentmesh_dagster.runtime.tools.call import call_tool, prepare_input, tool_schemas
from agentmesh_dagster.runtime.tools.errors import ToolRefused
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.documents import AgentSpec, ToolSpec

MAX_NAME_CHARS: Final = 64
_HASH_CHARS: Final = 8
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]")

# What the model can mend, or must know in order to go on. Whatever else goes wrong is not its business.
_TOLD: Final = (ToolError, ExpressionError)


@dataclass(frozen=True, kw_only=True)
class OfferedTool:
    """A tool as an agent's model is offered it."""

    tool: ToolSpec
    name: str
    input_schema: Mapping[str, Json]
    output_schema: Mapping[str, Json] | None

    def to_offer(self) -> ToolOffer:
        """What the model client gets."""
        description = self.tool.description or self.tool.name or self.tool.slug
        return ToolOffer(name=self.name, description=description, input_schema=self.input_schema)


@dataclass(frozen=True, kw_only=True)
class AskedCall:
    """A call that a model asks for."""

    id: str
    """The provider's, by which the model finds the answer again."""
    name: str
    arguments: Json
    problem: str = ""
    """Why the arguments cannot be read; they are the text as it came, then."""


async def offered_tools(agent: AgentSpec, call: NodeCall) -> tuple[OfferedTool, ...]:
    """The tools of an agent.

    Raises:
        ToolRefused: One of them cannot be used: its config is wrong, or its function is not there.
    """
    slugs = dict.fromkeys(reference.split("@", maxsplit=1)[0] for reference in agent.tools)
    offered: list[OfferedTool] = []
    for slug in slugs:
        tool = call.session.pinned.closure.tools[slug].document
        input_schema, output_schema = await tool_schemas(tool, tool_context(call, call.key))
        name = _offered_name(slug, {other.name for other in offered})
        offered.append(
            OfferedTool(tool=tool, name=name, input_schema=input_schema, output_schema=output_schema)
        )
    return tuple(offered)


def _offered_name(slug: str, taken: set[str]) -> str:
    """The slug, such that a provider takes it: most take letters, digits, `_` and `-`, 64 at most."""
    name = _NOT_IN_NAMES.sub("_", slug)
    if len(name) <= MAX_NAME_CHARS and name not in taken:
        return name
    return f"{name[: MAX_NAME_CHARS - _HASH_CHARS - 1]}_{content_hash(slug)[:_HASH_CHARS]}"


def read_calls(output: Mapping[str, Json], number: int) -> tuple[AskedCall, ...]:
    """The calls that a model's journalled answer asks for.

    Args:
        output: The output of the model call's step.
        number: That call's number.
    """
    calls: list[AskedCall] = []
    for place, entry in enumerate(output.get("tool_calls", ())):
        function: Mapping[str, Json] = entry["function"]
        given = entry.get("id")
        is_usable = isinstance(given, str) and given and given not in {other.id for other in calls}
        arguments, problem = _read_arguments(function.get("arguments"))
        calls.append(
            AskedCall(
                id=given if is_usable else f"call_{number}_{place}",
                name=function.get("name") or "",
                arguments=arguments,
                problem=problem,
            )
        )
    return tuple(calls)


def _read_arguments(given: Json) -> tuple[Json, str]:
    if given is None or given == "":
        return {}, ""
    if not isinstance(given, str):
        return given, ""
    try:
        return json.loads(given, parse_constant=_refuse_number, parse_float=_finite), ""
    except (ValueError, RecursionError) as error:
        return given, f"the arguments are not JSON: {error}"


def _refuse_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large")
    return number


def assistant_message(
    text: str, asked: Sequence[AskedCall], offered: Sequence[OfferedTool]
) -> dict[str, Json]:
    """The model's answer, as the conversation holds it from then on.

    Providers check names and arguments there too, so what cannot be read stands only in the call's result.
    """
    calls: list[Json] = []
    for one in asked:
        tool = _find(one.name, offered)
        name = tool.name if tool else _NOT_IN_NAMES.sub("_", one.name)[:MAX_NAME_CHARS] or "unknown"
        readable = isinstance(one.arguments, Mapping)
        arguments = json.dumps(one.arguments, ensure_ascii=False) if readable else "{}"
        calls.append({"id": one.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


def tool_message(asked: AskedCall, row: Step) -> dict[str, Json]:
    """What the model is told that its call came to."""
    if row.error is not None:
        content = f"Error: {row.error['message']}"
    else:
        content = row.output if isinstance(row.output, str) else json.dumps(row.output, ensure_ascii=False)
        if "asked" in row.input:
            shown = json.dumps(row.input["input"], ensure_ascii=False)
            content = f"Those who approved the call changed its arguments to {shown}. It answered:\n{content}"
    return {"role": "tool", "tool_call_id": asked.id, "content": content}


def call_summary(row: Step) -> dict[str, Json]:
    """A call in the agent's output."""
    came_to = {"output": row.output} if row.error is None else {"error": row.error}
    return {"tool": row.input["tool"], "arguments": row.input["input"], **came_to, "key": row.key}


async def call_tools(
    call: NodeCall, offered: Sequence[OfferedTool], number: int, asked: Sequence[AskedCall]
) -> tuple[Step, ...]:
    """Makes the calls of one answer side by side, or replays them.

    Args:
        call: The agent's node.
        offered: The agent's tools.
        number: The number of the model call that asked for them.
        asked: The calls.

    Returns:
        Their rows, in the order of `asked`; a call that failed, or was refused, has an error.

    Raises:
        Suspended: Some of them wait: all that need people, together; what needs nobody has been called.
        AgentMeshError: One of them could not be journalled, or failed in a way that the model cannot mend.
    """
    call.keep()
    came_to = await asyncio.gather(
        *(_answer(call, offered, f"{number}.{place}", one) for place, one in enumerate(asked)),
        return_exceptions=True,
    )
    rows: list[Step] = []
    suspended: list[Suspended] = []
    for one in came_to:
        if isinstance(one, Suspended):
            suspended.append(one)
        elif isinstance(one, BaseException):
            raise one
        else:
            rows.append(one)
    if suspended:
        raise Suspended(
            [wait for one in suspended for wait in one.waits],
            [wait_id for one in suspended for wait_id in one.superseded],
        )
    return tuple(rows)


async def _answer(call: NodeCall, offered: Sequence[OfferedTool], under: str, asked: AskedCall) -> Step:
    """The row of one call.

    A finished row is the answer, whatever would be asked today: the model's answer that asked for it is journalled, so
    it is this very call. Only the code behind a tool may have changed, and with it what its arguments are filled with.
    """
    row = await call.session.row(f"{call.key}/tool/{under}")
    return row if row is not None and row.is_finished else await _make(call, offered, under, asked)


async def _make(call: NodeCall, offered: Sequence[OfferedTool], under: str, asked: AskedCall) -> Step:
    known = _find(asked.name, offered)
    slug = asked.name if known is None else known.tool.slug
    problem: AgentMeshError
    try:
        if known is None:
            names = ", ".join(repr(other.name) for other in offered)
            raise ToolRefused(f"there is no tool {asked.name!r}; there are {names}", code="tool-unknown")
        if asked.problem:
            raise ToolRefused(asked.problem, code="tool-input")
        arguments, prepared = await _approved(call, known, under, asked)
    except _TOLD as error:
        problem = error
    else:
        changed = {} if arguments == prepared else {"asked": prepared}
        return await _journalled(call, known, under, {"tool": slug, "input": arguments, **changed})

    async def refuse(_key: str) -> StepAnswer:
        return _failed(call, problem)

    # Nothing is called, so there is nothing that must not happen twice.
    row, _ = await call.step(
        "tool", {"tool": slug, "input": asked.arguments}, refuse, under=under, entity=("tool", slug)
    )
    call.preparation.say(f"{call.key}: tool {slug} was not called: {row.error['message']}")
    return row


async def _approved(call: NodeCall, known: OfferedTool, under: str, asked: AskedCall) -> tuple[Json, Json]:
    """The arguments with which to call, and those that the model asked for."""
    tool, key = known.tool, f"{call.key}/tool/{under}"

    async def prepare(value: Json) -> Json:
        return await prepare_input(tool, value, tool_context(call, key))

    prepared = await prepare(asked.arguments)
    arguments = await approved_arguments(
        call, tool, key, prepared, schema=dict(known.input_schema), prepare=prepare
    )
    if isinstance(arguments, Refused):
        raise ToolRefused(f"tool {tool.slug!r} was {arguments.sentence}", code="approval-refused")
    return arguments, prepared


async def _journalled(call: NodeCall, known: OfferedTool, under: str, request: Mapping[str, Json]) -> Step:
    tool = known.tool
    may_repeat = tool.may_repeat or call.preparation.node.on_unknown == "retry"

    async def make(key: str) -> StepAnswer:
        try:
            return StepAnswer(output=await call_tool(tool, request["input"], tool_context(call, key)))
        except _TOLD as error:
            if error.answer_lost and not may_repeat:
                # The model would ask for it again, and nobody knows whether it took effect.
                raise
            return _failed(call, error)

    row, _ = await call.step(
        "tool",
        dict(request),
        make,
        idempotent=tool.may_repeat,
        answer_schema=known.output_schema,
        under=under,
        entity=("tool", tool.slug),
    )
    came_to = "answered" if row.error is None else "failed"
    call.preparation.say(f"{call.key}: tool {tool.slug} {came_to} in {(row.duration_ms or 0) / 1000:.2f} s")
    return row


def _failed(call: NodeCall, error: AgentMeshError) -> StepAnswer:
    """A failure that the model is told is an answer: with a route, as a node's whose failure was handled."""
    return StepAnswer(
        status=StepStatus.FAILED,
        error=call.session.error_json(error),
        routing_decision={"handles": [HANDLE_ERROR], "edges": []},
    )


def _find(name: str, offered: Sequence[OfferedTool]) -> OfferedTool | None:
    """The tool of a name, or of a slug that had to be offered under another name."""
    return next((one for one in offered if name in (one.name, one.tool.slug)), None)
