"""How long a list can be at most, as far as documents tell: by a literal, or by `maxItems` of an enforced schema.

A run's input, an agent's object, what a tool answers, an event's payload and a workflow's output are checked against
their schemas when they come, so what these say of lengths holds. Whatever else a value is made of is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.expressions import is_template, references
from agentmesh_dagster.specs.fields import as_list, as_object
from agentmesh_dagster.specs.schema_parts import MAX_SCHEMA_DEPTH, target_of, types_of

AGENT_OUTPUTS: Final = ("text", "object", "usage", "tool_calls")
"""Fields of an agent's output, which hide those of its object that are called likewise."""


class Shape:
    """What is known of a value; this one knows nothing."""

    def below(self, key: str) -> Shape:
        """Of a field of it."""
        return UNKNOWN

    @property
    def item(self) -> Shape:
        """Of an item of it."""
        return UNKNOWN

    @property
    def max_length(self) -> int | None:
        """How many items it has at most, where it is a list; None where nothing says."""
        return None


UNKNOWN: Final = Shape()


@dataclass(frozen=True)
class ObjectShape(Shape):
    """An object whose fields are known."""

    fields: Mapping[str, Shape]

    def below(self, key: str) -> Shape:
        return self.fields.get(key, UNKNOWN)


@dataclass(frozen=True)
class ListShape(Shape):
    """A list whose length is known."""

    length: int | None
    of: Shape = UNKNOWN

    @property
    def item(self) -> Shape:
        return self.of

    @property
    def max_length(self) -> int | None:
        return self.length


@dataclass(frozen=True)
class SchemaShape(Shape):
    """A value that fits each of some parts of a schema; the root is for their references."""

    root: Json
    parts: tuple[Json, ...]

    @staticmethod
    def of(schema: Mapping[str, Json] | None) -> Shape:
        """What fits a schema; anything, where there is none."""
        return UNKNOWN if schema is None else SchemaShape(dict(schema), (dict(schema),))

    def below(self, key: str) -> Shape:
        found = [(as_object(part.get("properties")) or {}).get(key) for part in self._all_parts()]
        return self._inner(found)

    @property
    def item(self) -> Shape:
        return self._inner([part.get("items") for part in self._all_parts() if "prefixItems" not in part])

    @property
    def max_length(self) -> int | None:
        return _longest(self.root, self.parts, 0)

    def _all_parts(self) -> Iterator[dict[str, Json]]:
        for part in self.parts:
            yield from _joined_parts(self.root, part, 0)

    def _inner(self, found: list[Json]) -> Shape:
        parts = tuple(part for part in found if as_object(part) is not None)
        return SchemaShape(self.root, parts) if parts else UNKNOWN


def _joined_parts(root: Json, schema: Json, depth: int) -> Iterator[dict[str, Json]]:
    """The parts of a schema that all hold: itself, with references followed, and those of `allOf`."""
    if depth > MAX_SCHEMA_DEPTH:
        return
    node = target_of(root, schema)
    yield node
    for part in as_list(node.get("allOf")) or []:
        yield from _joined_parts(root, part, depth + 1)


def _longest(root: Json, parts: tuple[Json, ...], depth: int) -> int | None:
    """The smallest bound among parts that all hold."""
    found: list[int] = []
    for node in (node for part in parts for node in _joined_parts(root, part, depth)):
        if "maxItems" in node:
            # A whole number may be written as 3.0.
            found.append(int(node["maxItems"]))
        for word in ("anyOf", "oneOf"):
            options = as_list(node.get(word)) or []
            each = [_option_length(root, option, depth + 1) for option in options]
            known = [length for length in each if length is not None]
            if each and len(known) == len(each):
                found.append(max(known))
    return min(found, default=None)


def _option_length(root: Json, option: Json, depth: int) -> int | None:
    """The bound of one of several choices; one that is no list has no items."""
    if depth > MAX_SCHEMA_DEPTH:
        return None
    words = types_of(root, option)
    return 0 if words is not None and "array" not in words else _longest(root, (option,), depth)


def agent_shape(output_schema: Mapping[str, Json] | None) -> Shape:
    """An agent's output: the fields of its object stand beside the agent's own, which hide those of their names."""
    found = SchemaShape.of(output_schema)
    fields: dict[str, Shape] = dict.fromkeys(AGENT_OUTPUTS, UNKNOWN)
    return _Over({**fields, "object": found}, found)


@dataclass(frozen=True)
class _Over(Shape):
    """Fields that are known by themselves, before those of a shape."""

    fields: Mapping[str, Shape]
    beneath: Shape

    def below(self, key: str) -> Shape:
        return self.fields[key] if key in self.fields else self.beneath.below(key)


@dataclass(frozen=True)
class Known:
    """What is known of the values that the expressions of a level see."""

    input: Shape = UNKNOWN
    steps: Mapping[str, Shape] = field(default_factory=dict[str, Any])
    """Outputs, by the nodes' names in expressions."""
    item: Shape = UNKNOWN

    def of(self, template: Json) -> Shape:
        """What is known of the value that a template gives."""
        items = as_list(template)
        if items is not None:
            return ListShape(len(items))
        fields = as_object(template)
        if fields is not None:
            return ObjectShape({key: self.of(value) for key, value in fields.items()})
        return self._named(named_in(template))

    def _named(self, name: tuple[str, ...]) -> Shape:
        match name:
            case ("input", *keys):
                found = self.input
            case ("item", *keys):
                found = self.item
            case ("steps", step, "output", *keys):
                found = self.steps.get(step, UNKNOWN)
            case _:
                return UNKNOWN
        for key in keys:
            found = found.below(key)
        return found


def named_in(template: Json) -> tuple[str, ...]:
    """The one name that a template looks up and does nothing with; empty where it is anything else.

    `"{{ steps.ask.output.lines }}"` gives `("steps", "ask", "output", "lines")`.
    """
    if not isinstance(template, str) or not is_template(template):
        return ()
    if not (template.startswith("{{") and template.endswith("}}")):
        return ()
    keys = tuple(template[2:-2].strip().split("."))
    try:
        found = references(template, bare=False)
    except ExpressionError:
        return ()
    return keys if found == frozenset((keys,)) else ()
