"""Excerpts of what steps read, asked and were answered: bounded, for rows, events and people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.expressions import references, strings_of
from agentmesh_dagster.specs.fields import as_list, as_object

READ_CHARS: Final = 8_000
"""How much a row keeps of what a node read that only computes."""
EVENT_CHARS: Final = 4_000
"""How much an event carries of a prompt, a text, arguments or a result."""
_SMALL_CHARS: Final = 8
"""What a number, a truth value, or the signs around a member count for."""


@dataclass
class _Budget:
    left: int


def excerpt(value: Json, max_chars: int) -> Json:
    """A copy of a JSON value that holds about `max_chars` characters at most.

    Longer texts end in `... (<n> characters)`; of longer lists and objects the last member says how many more there
    are. The work is bounded as the result is.
    """
    return _cut(value, _Budget(max_chars))


def _cut(value: Any, budget: _Budget) -> Json:
    if isinstance(value, str):
        shown = value[: max(0, budget.left)]
        budget.left -= len(shown)
        return value if len(shown) == len(value) else f"{shown}... ({len(value)} characters)"
    budget.left -= _SMALL_CHARS
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Json]", value)
        found: dict[str, Json] = {}
        for name, member in members.items():
            if budget.left <= 0:
                found["..."] = f"{len(members) - len(found)} more"
                break
            budget.left -= len(name)
            found[name] = _cut(member, budget)
        return found
    if isinstance(value, list | tuple):
        items = cast("Sequence[Json]", value)
        listed: list[Json] = []
        for item in items:
            if budget.left <= 0:
                listed.append(f"... ({len(items) - len(listed)} more)")
                break
            listed.append(_cut(item, budget))
        return listed
    return value


def values_read(texts: Sequence[str], names: Mapping[str, Json], *, bare: bool = False) -> dict[str, Json]:
    """What templates, or bare expressions, look up, by dotted name: `{"steps.ask.output.risk": "high"}`.

    What is not there is left out: the expression itself says what that means.
    """
    found: dict[str, Json] = {}
    for path in _paths(tuple(texts), bare):
        value: Any = names
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                break
            value = cast("Mapping[str, Json]", value)[name]
        else:
            found[".".join(path)] = value
    return cast("dict[str, Json]", excerpt(found, READ_CHARS))


@lru_cache(maxsize=1024)
def _paths(texts: tuple[str, ...], bare: bool) -> tuple[tuple[str, ...], ...]:
    """The names that expressions look up, in order; `steps.a` stands for all that is below it."""
    paths = {path for text in texts for path in references(text, bare=bare)}
    return tuple(
        sorted(path for path in paths if not any(path[:end] in paths for end in range(1, len(path))))
    )


def values_rendered(template: Json, names: Mapping[str, Json]) -> dict[str, Json]:
    """What the templates in a JSON value look up; see `values_read`."""
    return values_read(list(strings_of(template)), names)


def asked(kind: str, request: Json) -> dict[str, Json]:
    """What the event that begins a call carries of its request.

    Args:
        kind: `llm` or `tool`.
        request: As the row keeps it, without secrets. A plugin's may have another shape than our own nodes'.
    """
    fields = as_object(request)
    if kind == "tool":
        if fields is None or "tool" not in fields:
            return {"arguments": excerpt(request, EVENT_CHARS)}
        return {"tool": fields["tool"], "arguments": excerpt(fields.get("input"), EVENT_CHARS)}
    messages = [as_object(message) or {} for message in as_list((fields or {}).get("messages")) or []]
    prompts = [message.get("content") for message in messages if message.get("role") == "user"]
    prompt = prompts[-1] if prompts else request
    return {"messages": len(messages), "prompt": excerpt(prompt, EVENT_CHARS)}


def answered(kind: str, output: Json) -> dict[str, Json]:
    """What the event that ends a call carries of its answer; arguments as of `asked`."""
    fields = as_object(output)
    if kind == "tool" or fields is None or "text" not in fields:
        return {"result" if kind == "tool" else "text": excerpt(output, EVENT_CHARS)}
    found: dict[str, Json] = {"text": excerpt(fields["text"], EVENT_CHARS)}
    if fields.get("tool_calls"):
        found["tool_calls"] = excerpt(fields["tool_calls"], EVENT_CHARS)
    return found
