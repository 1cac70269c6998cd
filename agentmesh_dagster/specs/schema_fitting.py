"""Whether what one schema describes can fit another: only misfits that are sure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, cast

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.schema_parts import (
    MAX_SCHEMA_DEPTH,
    canonical,
    path_text,
    target_of,
    types_of,
)

_UNSURE: Final = ("allOf", "anyOf", "oneOf", "not", "if", "$dynamicRef", "unevaluatedProperties")
# Types that coercion may turn into each other; whether it can depends on the value.
_TURNS_INTO: Final = {
    "string": frozenset(("integer", "number", "boolean")),
    "integer": frozenset(("number", "string")),
    "number": frozenset(("integer",)),
}


def is_static_subset(output_schema: Json, input_schema: Json) -> list[str]:
    """Sure misfits between what a step gives and what the next one takes, as sentences.

    Both are schemas. Reported are types of which no value can fit (coercion considered), closed outputs that
    lack a required field without a default, required outputs that a closed input refuses, and choices without
    a common value.
    """
    return list(_misfits(output_schema, output_schema, input_schema, input_schema, (), 0))


def _misfits(
    out_root: Json, out_schema: Json, in_root: Json, in_schema: Json, path: tuple[str | int, ...], depth: int
) -> Iterator[str]:
    if depth > MAX_SCHEMA_DEPTH or in_schema is True or out_schema is True:
        return
    out_node, in_node = target_of(out_root, out_schema), target_of(in_root, in_schema)
    if any(key in node for node in (out_node, in_node) for key in _UNSURE):
        return
    place = path_text(path)
    out_types, in_types = types_of(out_root, out_node), types_of(in_root, in_node)
    if out_types is not None and in_types is not None:
        reachable = out_types.union(*(_TURNS_INTO.get(word, frozenset()) for word in out_types))
        if not reachable & in_types:
            given, taken = " or ".join(sorted(out_types)), " or ".join(sorted(in_types))
            yield f"{place}: gives {given}, and {taken} is taken"
            return
    if out_types == in_types:
        out_choices, in_choices = _choices(out_node), _choices(in_node)
        if out_choices is not None and in_choices is not None and not out_choices & in_choices:
            yield f"{place}: gives none of the values that are taken"
    if out_types == frozenset(("object",)) and in_types == out_types:
        yield from _object_misfits(out_root, out_node, in_root, in_node, path, depth)
    filled = out_types == frozenset(("array",)) and in_types == out_types and out_node.get("minItems", 0) > 0
    if filled and "prefixItems" not in out_node and "prefixItems" not in in_node:
        out_items, in_items = out_node.get("items", True), in_node.get("items", True)
        yield from _misfits(out_root, out_items, in_root, in_items, (*path, 0), depth + 1)


def _choices(node: dict[str, Json]) -> frozenset[str] | None:
    values = [node["const"]] if "const" in node else node.get("enum")
    return None if values is None else frozenset(canonical(value) for value in values)


def _object_misfits(
    out_root: Json,
    out_node: dict[str, Json],
    in_root: Json,
    in_node: dict[str, Json],
    path: tuple[str | int, ...],
    depth: int,
) -> Iterator[str]:
    given = cast("dict[str, Json]", out_node.get("properties", {}))
    taken = cast("dict[str, Json]", in_node.get("properties", {}))
    always = cast("list[str]", out_node.get("required", []))
    out_closed = out_node.get("additionalProperties") is False and "patternProperties" not in out_node
    in_closed = in_node.get("additionalProperties") is False and "patternProperties" not in in_node
    for name in cast("list[str]", in_node.get("required", [])):
        has_default = name in taken and "default" in target_of(in_root, taken[name])
        if out_closed and name not in given and not has_default:
            yield f"{path_text((*path, name))}: is required, and never given"
    for name in always:
        if in_closed and name not in taken:
            yield f"{path_text((*path, name))}: is always given, and not a known field of what takes it"
        elif name in given and name in taken:
            yield from _misfits(out_root, given[name], in_root, taken[name], (*path, name), depth + 1)
