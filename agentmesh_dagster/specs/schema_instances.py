"""The smallest valid instance of a JSON Schema, for the model that stands in where no network is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.patterns import PatternRefused, shortest_match
from agentmesh_dagster.specs.schema_checks import require_usable, validate_value
from agentmesh_dagster.specs.schema_parts import copy_json, path_text, target_of

_CODE: Final = "schema-no-instance"
_MAX_DEPTH: Final = 24
_MAX_LENGTH: Final = 10_000
_FORMATS: Final = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "email": "a@example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "time": "00:00:00Z",
    "uri": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def smallest_instance(schema: Json) -> Json:
    """A smallest valid value: required fields alone, the first choice of an enum; the same each time.

    Raises:
        DefinitionError: None was found: the schema contradicts itself, or asks for more than this search
        knows. The
            message names the place.
    """
    require_usable(schema)
    search = _Search(copy_json(schema))
    for value in _values(search, search.root, (), 0):
        if not validate_value(search.root, value):
            return value
    raise _not_found(())


def _not_found(path: tuple[str | int, ...]) -> DefinitionError:
    place = path_text(path)
    return DefinitionError(f"{place}: no valid value of this schema was found; simplify it", code=_CODE)


@dataclass(slots=True)
class _Search:
    """The whole schema, and how many parts may still be looked at: recursion can branch without end."""

    root: Json
    left: int = 5_000


def _values(search: _Search, schema: Json, path: tuple[str | int, ...], depth: int) -> Iterator[Json]:
    """Values that may be valid, best first; at most a handful."""
    search.left -= 1
    if depth > _MAX_DEPTH or search.left < 0 or schema is False:
        return
    node = _merged(search.root, schema, 0)
    if "const" in node:
        yield node["const"]
        return
    if "enum" in node:
        yield from node["enum"]
        return
    for keyword in ("anyOf", "oneOf"):
        if keyword in node:
            rest = {key: item for key, item in node.items() if key != keyword}
            # What refers to nothing is smaller than what may refer back to where we are.
            for part in sorted(node[keyword], key=lambda part: bool(_references_of(part))):
                try:
                    yield from _values(search, _merge(rest, _merged(search.root, part, 0)), path, depth + 1)
                except DefinitionError:
                    continue  # this alternative has no instance; when none has, the caller says so
            return
    types = node.get("type", _implied_type(node))
    for word in [types] if isinstance(types, str) else cast("list[str]", types):
        yield from _of_type(search, node, word, path, depth)


def _implied_type(node: dict[str, Json]) -> str:
    for word, keys in (
        ("object", ("properties", "required", "minProperties")),
        ("array", ("items", "prefixItems", "minItems", "contains")),
        ("string", ("minLength", "maxLength", "pattern", "format")),
        ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    ):
        if any(key in node for key in keys):
            return word
    return "null"


def _merged(root: Json, schema: Json, depth: int) -> dict[str, Json]:
    """A schema with its reference and its `allOf` folded in."""
    node = target_of(root, schema)
    if depth > _MAX_DEPTH or "allOf" not in node:
        return node
    merged = {key: item for key, item in node.items() if key != "allOf"}
    for part in node["allOf"]:
        merged = _merge(merged, _merged(root, part, depth + 1))
    return merged


def _merge(one: dict[str, Json], other: dict[str, Json]) -> dict[str, Json]:
    """Both schemas at once, as far as keywords combine simply; the final validation catches the rest."""
    merged = dict(one)
    for key, item in other.items():
        if key not in merged:
            merged[key] = item
        elif key == "properties":
            both = cast("dict[str, Json]", merged[key])
            merged[key] = {
                **both,
                **{n: {"allOf": [both[n], s]} if n in both else s for n, s in item.items()},
            }
        elif key == "required":
            merged[key] = [*merged[key], *(name for name in item if name not in merged[key])]
        elif key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            merged[key] = max(merged[key], item)
        elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            merged[key] = min(merged[key], item)
        elif key == "enum":
            merged[key] = [choice for choice in merged[key] if choice in item]
        elif key == "type":
            merged[key] = _common_types(merged[key], item)
        else:
            merged[key] = item
    return merged


def _common_types(one: Json, other: Json) -> list[str]:
    ones = [one] if isinstance(one, str) else cast("list[str]", one)
    others = [other] if isinstance(other, str) else cast("list[str]", other)
    common = [word for word in ones if word in others]
    if "integer" in [*ones, *others] and "number" in [*ones, *others]:
        common.append("integer")
    return common


def _of_type(
    search: _Search, node: dict[str, Json], word: str, path: tuple[str | int, ...], depth: int
) -> Iterator[Json]:
    if word == "null":
        yield None
    elif word == "boolean":
        yield from (False, True)
    elif word in ("integer", "number"):
        yield from _numbers(node, word)
    elif word == "string":
        yield from _texts(node, path)
    elif word == "array":
        yield _array(search, node, path, depth)
    elif word == "object":
        yield _object(search, node, path, depth)


def _numbers(node: dict[str, Json], word: str) -> Iterator[Json]:
    lows = [node[key] for key in ("minimum", "exclusiveMinimum") if key in node]
    highs = [node[key] for key in ("maximum", "exclusiveMaximum") if key in node]
    step = node.get("multipleOf", 1)
    bounds = [*lows, *highs]
    yield 0
    for bound in bounds:
        nearest = math.floor(bound / step) * step
        for number in (nearest, nearest + step, nearest - step):
            yield int(number) if float(number).is_integer() else number
    if word == "number":
        yield from bounds
        if lows and highs:
            yield (max(lows) + min(highs)) / 2


def _texts(node: dict[str, Json], path: tuple[str | int, ...]) -> Iterator[Json]:
    length = cast("int", node.get("minLength", 0))
    if length > _MAX_LENGTH:
        raise DefinitionError(
            f"{path_text(path)}: minLength {length} is more than the {_MAX_LENGTH} that are made up",
            code=_CODE,
        )
    if "format" in node and node["format"] in _FORMATS:
        yield _FORMATS[node["format"]]
    if "pattern" in node:
        try:
            text = shortest_match(cast("str", node["pattern"]), length)
        except PatternRefused:  # the text became too long for it
            text = None
        if text is None:
            raise DefinitionError(
                f"{path_text(path)}: no text for {node['pattern']!r} could be made up; add an enum",
                code=_CODE,
            )
        yield text
    yield "x" * length


def _first_valid(search: _Search, schema: Json, path: tuple[str | int, ...], depth: int) -> Json:
    root = target_of(search.root, search.root)
    alone = schema
    if isinstance(schema, dict):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        alone = {**definitions, **cast("dict[str, Json]", schema)}
    refers_to_root = "#" in _references_of(schema)
    for value in _values(search, schema, path, depth):
        if refers_to_root or not validate_value(alone, value):
            return value
    raise _not_found(path)


def _references_of(schema: Json) -> set[str]:
    """References that `$defs` alone cannot serve are all shown as `#`."""
    found: set[str] = set()
    stack: list[Json] = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            node = cast("dict[str, Json]", item)
            target = node.get("$ref")
            if isinstance(target, str):
                found.add(target if target.startswith(("#/$defs/", "#/definitions/")) else "#")
            stack.extend(node.values())
        elif isinstance(item, list):
            stack.extend(cast("list[Json]", item))
    return found


def _array(search: _Search, node: dict[str, Json], path: tuple[str | int, ...], depth: int) -> Json:
    count = cast("int", node.get("minItems", 0))
    if count > _MAX_LENGTH:
        raise _not_found(path)
    first = cast("list[Json]", node.get("prefixItems", []))
    rest = node.get("items", True)
    if "contains" in node and count == 0:
        count = 1
    items: list[Json] = []
    for index in range(count):
        part = first[index] if index < len(first) else node.get("contains", rest)
        if node.get("uniqueItems") and items:
            distinct = (
                {"allOf": [part, {"not": {"enum": items}}]} if part is not True else {"type": "integer"}
            )
            choices = (v for v in _distinct(search, part, items, path, depth) if v not in items)
            value = next(choices, None)
            if value is None and None in items:
                value = _first_valid(search, distinct, (*path, index), depth + 1)
            items.append(value)
        else:
            items.append(_first_valid(search, part, (*path, index), depth + 1))
    return items


def _distinct(
    search: _Search, part: Json, items: list[Json], path: tuple[str | int, ...], depth: int
) -> Iterator[Json]:
    """Values for an item that must differ from those before it."""
    for value in _values(search, part, path, depth + 1):
        yield value
        if isinstance(value, str):
            yield from (f"{value}{number}" for number in range(len(items) + 1))
        elif type(value) is int:
            yield from range(value, value + len(items) + 1)
        elif value is None:
            yield from range(len(items) + 1)


def _object(search: _Search, node: dict[str, Json], path: tuple[str | int, ...], depth: int) -> Json:
    known = cast("dict[str, Json]", node.get("properties", {}))
    other = node.get("additionalProperties", True)
    made: dict[str, Json] = {}
    wanted = list(cast("list[str]", node.get("required", [])))
    least = cast("int", node.get("minProperties", 0))
    wanted += [name for name in known if name not in wanted][: max(least - len(wanted), 0)]
    wanted += [f"field_{number}" for number in range(max(least - len(wanted), 0))]
    for name in wanted:
        made[name] = _first_valid(search, known.get(name, other), (*path, name), depth + 1)
    return made
