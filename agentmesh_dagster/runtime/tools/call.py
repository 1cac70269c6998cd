"""Calls a tool: checks its input, runs it under a time limit, checks its output, redacts secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.errors import AgentMeshError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.tools.base import ToolContext, ToolType
from agentmesh_dagster.runtime.tools.builtin import BuiltinTool
from agentmesh_dagster.runtime.tools.errors import ToolFailure, ToolRefused
from agentmesh_dagster.runtime.tools.function import FunctionTool
from agentmesh_dagster.runtime.tools.http import HttpTool
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.specs.schema import fill_and_coerce, validate_value

__all__ = ["TOOL_TYPES", "ToolContext", "ToolType", "call_tool", "prepare_input", "tool_schemas"]

TOOL_TYPES: Final[Mapping[str, ToolType]] = MappingProxyType(
    {"http": HttpTool(), "function": FunctionTool(), "builtin": BuiltinTool()}
)
_OUTPUT_SHOWN: Final = 500
ANY_OBJECT: Final[Mapping[str, Any]] = MappingProxyType({"type": "object"})


async def call_tool(
    tool: ToolSpec, value: Json, context: ToolContext, *, types: Mapping[str, ToolType] = TOOL_TYPES
) -> Json:
    """Calls a tool.

    Args:
        tool: The tool.
        value: Its input; prepared input (`prepare_input`) stays as it is.
        context: What the tool may use.
        types: The known types of tools.

    Returns:
        The tool's output, checked against its output schema, secrets redacted.

    Raises:
        ToolError: The input does not fit (code `tool-input`), the tool was refused or failed, took too long
            (`tool-timeout`), or its output does not fit (`tool-output`). `retryable` says whether to try
            again.
        ExpressionError: A template of the tool's config failed.
        SecretMissing: The config names a secret that is not configured.
    """
    failure: AgentMeshError
    try:
        return context.secrets.redact(await _call(tool, value, context, types))
    except AgentMeshError as error:
        failure = error
    raise context.secrets.scrub(failure)


async def prepare_input(
    tool: ToolSpec, value: Json, context: ToolContext, *, types: Mapping[str, ToolType] = TOOL_TYPES
) -> Json:
    """The input that `call_tool` gives to the tool: filled with defaults, losslessly coerced, and checked.

    Null stands for an object without members. Without secrets, so fit for the journal.

    Raises:
        ToolRefused: It does not fit the input schema (code `tool-input`): `path: message`, one per line.
    """
    input_schema, _ = await tool_schemas(tool, context, types=types)
    return _prepared(input_schema, value)


async def tool_schemas(
    tool: ToolSpec, context: ToolContext, *, types: Mapping[str, ToolType] = TOOL_TYPES
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The input and output schema of a tool: its own, else its type's; default input: any object.

    Raises:
        ToolRefused: The type is unknown (code `tool-type`), the config is wrong (`tool-config`), or the
            function that gives the schemas cannot be used.
    """
    tool_type, config = _typed(tool, types)
    return await _schemas(tool, tool_type, config, context)


def _typed(tool: ToolSpec, types: Mapping[str, ToolType]) -> tuple[ToolType, SpecModel]:
    tool_type = types.get(tool.type)
    if tool_type is None:
        known = ", ".join(repr(name) for name in sorted(types))
        raise ToolRefused(
            f"tool {tool.slug!r} has the unknown type {tool.type!r}; known are {known}", code="tool-type"
        )
    try:
        return tool_type, tool_type.config_model.model_validate(tool.config)
    except ValidationError as error:
        lines = [
            f"config.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)
        ]
        message = "\n".join(lines)
    raise ToolRefused(f"tool {tool.slug!r}: {message}", code="tool-config")


async def _schemas(
    tool: ToolSpec, tool_type: ToolType, config: SpecModel, context: ToolContext
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    given_input, given_output = tool.input_schema, tool.output_schema
    if given_input is None or given_output is None:
        derived_input, derived_output = await tool_type.schemas(config, context)
        given_input = derived_input if given_input is None else given_input
        given_output = derived_output if given_output is None else given_output
    return dict(ANY_OBJECT) if given_input is None else given_input, given_output


def _prepared(schema: dict[str, Any], value: Json) -> Json:
    if value is None and schema.get("type") == "object":
        value = {}
    filled = fill_and_coerce(schema, value)
    problems = _problems(schema, filled, "input")
    if problems:
        raise ToolRefused(problems, code="tool-input")
    return filled


def _problems(schema: dict[str, Any], value: Json, name: str) -> str:
    return "\n".join(f"{issue.path or name}: {issue.message}" for issue in validate_value(schema, value))


async def _call(tool: ToolSpec, value: Json, context: ToolContext, types: Mapping[str, ToolType]) -> Json:
    tool_type, config = _typed(tool, types)
    input_schema, output_schema = await _schemas(tool, tool_type, config, context)
    prepared = _prepared(input_schema, value)
    bounds = [bound for bound in (tool.timeout_s, context.timeout_s) if bound is not None]
    bound_s = min(bounds) if bounds else None
    try:
        output = await within(tool_type.call(tool, config, prepared, context), bound_s)
    except DeadlinePassed:
        output = _TIMED_OUT
    if output is _TIMED_OUT:
        raise ToolFailure(
            f"tool {tool.slug!r} took longer than {bound_s:g} s",
            code="tool-timeout",
            retryable=tool.may_repeat,
            answer_lost=context.outgoing.is_unanswered,
        )
    if output_schema is not None:
        problems = _problems(output_schema, output, "output")
        if problems:
            # What it was called for may be done; a person who is asked sees what it gave.
            raise ToolFailure(
                f"tool {tool.slug!r} gave output that does not fit its schema\n{problems}\nIt gave: {_shown(output)}",
                code="tool-output",
                answer_lost=True,
            )
    return output


def _shown(output: Json) -> str:
    text = json.dumps(output, ensure_ascii=False)
    return text if len(text) <= _OUTPUT_SHOWN else f"{text[:_OUTPUT_SHOWN]}..."


_TIMED_OUT: Final = object()
