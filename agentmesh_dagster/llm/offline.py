"""Stand-ins for models, for demos and tests: no network, no LiteLLM, no intelligence.

`offline/echo` answers with the last user message, or with the smallest valid instance of the `output_schema`.
`offline/script` answers from a list of replies in the agent's `model_settings.replies`: the reply's index is
the number of assistant messages that the conversation already holds. A reply is

- a text, or any other JSON value, which is answered as JSON text;
- `{"text": "...", "delay_s": 0.1}`, or the same with `object` for a JSON value;
- `{"tool_calls": [{"tool": "pay", "arguments": {"amount": 5}}]}`, with or without a `text`, of an agent with tools;
- `{"error": {"message": "...", "code": "model-rate-limited", "retryable": true}}`.

Tokens are estimates: one for every four characters. Nothing costs anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest
from agentmesh_dagster.specs.schema import smallest_instance

__all__ = ["OFFLINE_PREFIX", "complete_offline"]

OFFLINE_PREFIX: Final = "offline/"
_PROVIDER: Final = "offline"
_CHARACTERS_PER_TOKEN: Final = 4
_REPLY_FIELDS: Final = frozenset(("text", "object", "delay_s", "error", "tool_calls"))


async def complete_offline(model: str, request: ModelRequest) -> ModelReply:
    """Answers in place of a model.

    Args:
        model: `offline/echo` or `offline/script`.
        request: The request; its `models` are not looked at.

    Returns:
        The reply; its `model` says that a stand-in answered.

    Raises:
        ModelError: The model is neither of the two, the script has no reply left or none of this form
            (code `model-bad-request`), or the script asks for a failure.
    """
    if model == "offline/echo":
        return _reply(model, request, _echo(request))
    if model == "offline/script":
        return await _scripted(model, request)
    raise ModelError(
        f"there is no model {model!r}: the stand-ins are 'offline/echo' and 'offline/script'",
        provider=_PROVIDER,
        model=model,
        code="model-bad-request",
    )


def _echo(request: ModelRequest) -> str:
    if request.output_schema is not None:
        return json.dumps(smallest_instance(dict(request.output_schema)), ensure_ascii=False)
    for message in reversed(request.messages):
        if message.get("role") == "user":
            content: Json = message.get("content")
            return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return ""


async def _scripted(model: str, request: ModelRequest) -> ModelReply:
    replies: Json = request.settings.get("replies")
    if not isinstance(replies, list):
        raise _bad_script(model, "needs a list of replies in the agent's model_settings: replies: ['Hello']")
    script = cast("list[Json]", replies)
    index = sum(1 for message in request.messages if message.get("role") == "assistant")
    if index >= len(script):
        raise _bad_script(
            model,
            f"has no reply left: it holds {len(script)}, and this is call {index + 1} of the conversation",
        )
    entry = script[index]
    if (
        not isinstance(entry, Mapping)
        or not _REPLY_FIELDS.issuperset(cast("Mapping[str, Json]", entry))
        or not entry
    ):
        return _reply(model, request, _as_text(entry))
    fields = cast("Mapping[str, Json]", entry)
    if "delay_s" in fields:
        await _wait(float(fields["delay_s"]), model, request.timeout_s)
    if "error" in fields:
        raise _scripted_error(model, fields["error"])
    text = _as_text(fields["object"]) if "object" in fields else _as_text(fields.get("text", ""))
    return _reply(model, request, text, _calls(model, request, fields.get("tool_calls", []), index))


def _calls(model: str, request: ModelRequest, scripted: Json, index: int) -> list[Mapping[str, Json]]:
    """Calls of tools as a provider would ask for them; their ids are the same whenever the reply is given."""
    if scripted and not (request.tools and request.may_call):
        raise _bad_script(
            model,
            "asks for tools in a reply to a call that offers none: give the agent tools, or another reply",
        )
    calls: list[Mapping[str, Json]] = []
    for place, fields in enumerate(_objects(scripted)):
        if not isinstance(fields.get("tool"), str) or not {"tool", "arguments"}.issuperset(fields):
            raise _bad_script(model, "takes calls as tool_calls: [{tool: <slug>, arguments: {...}}]")
        function: Json = {"name": fields["tool"], "arguments": _as_text(fields.get("arguments", {}))}
        calls.append({"id": f"call_{index}_{place}", "type": "function", "function": function})
    return calls


def _objects(value: Json) -> list[Mapping[str, Json]]:
    """A list's entries; an empty object for what is none."""
    entries = cast("list[Json]", value) if isinstance(value, list) else [value]
    return [cast("Mapping[str, Json]", entry) if isinstance(entry, Mapping) else {} for entry in entries]


async def _wait(delay_s: float, model: str, timeout_s: float | None) -> None:
    if timeout_s is None or delay_s < timeout_s:
        await asyncio.sleep(delay_s)
        return
    await asyncio.sleep(timeout_s)
    raise ModelError(
        f"the model {model!r} did not answer within {timeout_s:g} s",
        provider=_PROVIDER,
        model=model,
        retryable=True,
        code="model-timeout",
    )


def _scripted_error(model: str, error: Json) -> ModelError:
    fields = cast("Mapping[str, Any]", error) if isinstance(error, Mapping) else {"message": _as_text(error)}
    return ModelError(
        str(fields.get("message", "a failure that the script asks for")),
        provider=_PROVIDER,
        model=model,
        retryable=bool(fields.get("retryable", False)),
        code=str(fields.get("code", "model-unavailable")),
    )


def _bad_script(model: str, problem: str) -> ModelError:
    return ModelError(
        f"the stand-in model {model!r} {problem}", provider=_PROVIDER, model=model, code="model-bad-request"
    )


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _reply(
    model: str, request: ModelRequest, text: str, tool_calls: Sequence[Mapping[str, Json]] = ()
) -> ModelReply:
    asked = sum(len(_as_text(message.get("content") or "")) for message in request.messages)
    return ModelReply(
        text=text,
        model=model,
        input_tokens=_tokens(asked),
        output_tokens=_tokens(len(text) + sum(len(call["function"]["arguments"]) for call in tool_calls)),
        finish_reason="tool_calls" if tool_calls else "stop",
        tool_calls=tuple(tool_calls),
    )


def _tokens(characters: int) -> int:
    return -(-characters // _CHARACTERS_PER_TOKEN)
