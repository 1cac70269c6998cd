"""Defaults and lossless coercion: what JSON Schema says about a value, done to a copy of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, cast

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.schema_parts import (
    MAX_SCHEMA_DEPTH,
    copy_json,
    resolve_reference,
    target_of,
    type_word,
    types_of,
)

_INTEGER_TEXT: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,300})\Z")
_NUMBER_TEXT: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(?:\.[0-9]{1,300})?(?:[eE][-+]?[0-9]{1,3})?\Z")


def fill_and_coerce(schema: Json, value: Json) -> Json:
    """A copy of a value, defaults filled in, and turned to the type asked for where nothing is lost.

    `'5'` becomes 5 and `'true'` becomes true where a number or boolean is asked for; 5.0 becomes 5 for an
    integer, and the integer 5 becomes `'5'` for a string. A value whose type the schema admits stays as it
    is, and so does what cannot be turned: `validate_value` then says why. Goes through `properties`, `items`,
    `prefixItems`, `allOf`, `additionalProperties` and local `$ref`; into `anyOf` and `oneOf` only where one
    alternative alone admits the value's type.

    The keys of an object come in the order in which the schema names them, the others after them as they were given:
    Dagster sorts the keys of what it is launched with, and a prompt or a form is written in the author's order.
    """
    try:
        return _fill(schema, schema, value, 0)
    except RecursionError:
        return value  # nested too deeply to copy; validate_value refuses it with that message


def _fill(root: Json, schema: Json, value: Json, depth: int) -> Json:
    if depth > 4 * MAX_SCHEMA_DEPTH or not isinstance(schema, dict):
        return copy_json(value)
    node = cast("dict[str, Json]", schema)
    if "$ref" in node:
        try:
            value = _fill(root, resolve_reference(root, node["$ref"]), value, depth + 1)
        except LookupError:
            return copy_json(value)
    for part in node.get("allOf", ()):
        value = _fill(root, part, value, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        admitting = [part for part in node.get(keyword, ()) if _admits(types_of(root, part), value)]
        if len(admitting) == 1:
            value = _fill(root, admitting[0], value, depth + 1)
    value = _coerce(node, value)
    if isinstance(value, dict):
        filled = _fill_object(root, node, cast("dict[str, Json]", value), depth)
        named = dict.fromkeys(name for name in _property_names(root, node, depth) if name in filled)
        return {name: filled[name] for name in (*named, *(name for name in filled if name not in named))}
    if isinstance(value, list):
        items = cast("list[Json]", value)
        first = cast("list[Json]", node.get("prefixItems", []))
        rest = node.get("items", True)
        return [
            _fill(root, first[i] if i < len(first) else rest, item, depth + 1) for i, item in enumerate(items)
        ]
    return value


def _property_names(root: Json, schema: Json, depth: int) -> Iterator[str]:
    """The properties that a schema names, in the order in which they stand in it."""
    if depth > 4 * MAX_SCHEMA_DEPTH or not isinstance(schema, dict):
        return
    for keyword, value in cast("dict[str, Json]", schema).items():
        if keyword == "properties":
            yield from cast("dict[str, Json]", value)
        elif keyword == "allOf":
            for part in cast("list[Json]", value):
                yield from _property_names(root, part, depth + 1)
        elif keyword == "$ref":
            try:
                yield from _property_names(root, resolve_reference(root, value), depth + 1)
            except LookupError:
                continue


def _fill_object(root: Json, node: dict[str, Json], value: dict[str, Json], depth: int) -> dict[str, Json]:
    known = cast("dict[str, Json]", node.get("properties", {}))
    other = node.get("additionalProperties", True)
    made = {name: _fill(root, known.get(name, other), item, depth + 1) for name, item in value.items()}
    for name, part in known.items():
        if name in made:
            continue
        target = target_of(root, part)
        if "default" in target:
            made[name] = _fill(root, part, copy_json(target["default"]), depth + 1)
    return made


def _admits(types: frozenset[str] | None, value: Json) -> bool:
    if types is None:
        return True
    word = type_word(value)
    if word == "number" and value.is_integer() and "integer" in types:
        return True
    return word in types or (word == "integer" and "number" in types)


def _coerce(node: dict[str, Json], value: Json) -> Json:
    types = types_of({}, {key: item for key, item in node.items() if key in ("type", "const", "enum")})
    if types is None:
        return value
    if isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        return int(value)
    if _admits(types, value):
        return value
    if isinstance(value, str):
        text = value.strip()
        if "integer" in types or "number" in types:
            if _INTEGER_TEXT.match(text):
                return int(text)
            if _NUMBER_TEXT.match(text):
                number = float(text)
                if "number" in types and abs(number) != float("inf"):
                    return number
                if number.is_integer():
                    return int(number)
        if "boolean" in types and text.lower() in ("true", "false"):
            return text.lower() == "true"
    if type(value) is int and "string" in types:
        return str(value)
    return value
