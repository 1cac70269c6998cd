"""Checks of JSON Schemas, and of values against them (draft 2020-12).

Only local references (`#/...`) are followed; nothing is ever fetched. `jsonschema` is imported at the first
use, because importing it takes a tenth of a second.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.patterns import refusal_of
from agentmesh_dagster.specs.schema_keywords import (
    CheckRefused,
    construct_validator,
    errors_of,
    unknown_fields,
)
from agentmesh_dagster.specs.schema_parts import (
    MAX_SCHEMA_DEPTH,
    path_text,
    resolve_reference,
    show,
    type_word,
)

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

MAX_ISSUES: Final = 50
_MAX_PARTS: Final = 10_000
_MAX_SHOWN: Final = 60

_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_LISTS: Final = (*_IN_PLACE, "prefixItems")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLES: Final = (
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)


@dataclass(frozen=True, slots=True)
class SchemaIssue:
    """What is wrong in a schema; `path` is as `properties.amount.minimum`, `$` for the root."""

    path: str
    message: str
    code: str = "schema-invalid"
    """`pattern-refused`: a regular expression that cannot be searched for in linear time."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, slots=True)
class ValueIssue:
    """What is wrong in a value; `path` is the place in it, such as `items[3].amount`, `$` for the root."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


# Schemas ----------------------------------------------------------------------------------------------------


def check_schema(schema: Json) -> list[SchemaIssue]:
    """All that keeps a value from being a usable schema: empty when it is one.

    Beyond the metaschema: references must be local and lead somewhere without going in a circle, regular
    expressions are those that `patterns` can search for, and nesting is bounded.
    """
    if not isinstance(schema, (dict, bool)):
        return [SchemaIssue("$", f"must be an object, is {type_word(schema)}")]
    if _depth_over(schema, MAX_SCHEMA_DEPTH):
        return [SchemaIssue("$", f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")]
    from jsonschema import Draft202012Validator

    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    issues = {
        SchemaIssue(path_text(error.absolute_path), _message(error))
        for error in cast("Any", meta).iter_errors(schema)
    }
    if not issues:
        issues = set(_own_rules(schema))
    return sorted(issues, key=lambda issue: (issue.path, issue.message))[:MAX_ISSUES]


def _depth_over(value: Json, limit: int) -> bool:
    level: list[Json] = [value]
    for _ in range(limit + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (
                cast("dict[str, Json]", item).values() if isinstance(item, dict) else cast("list[Json]", item)
            )
        ]
        if not level:
            return False
    return True


def _own_rules(schema: Json) -> Iterator[SchemaIssue]:
    for path, part in _subschemas(schema, ()):
        for key in ("$dynamicRef", "$anchor", "$dynamicAnchor"):
            if key in part:
                yield SchemaIssue(path_text((*path, key)), f"{key} is not supported; use $ref to #/$defs/...")
        if "$id" in part and path:
            yield SchemaIssue(
                path_text((*path, "$id")), "$id is not supported inside a schema; use #/$defs/..."
            )
        if "$ref" in part:
            yield from _reference_rules(schema, part["$ref"], (*path, "$ref"))
        patterns = [(("pattern",), part.get("pattern"))]
        patterns += [
            (("patternProperties", p), p) for p in cast("dict[str, Json]", part.get("patternProperties", {}))
        ]
        for place, pattern in patterns:
            problem = None if pattern is None else refusal_of(pattern)
            if problem:
                yield SchemaIssue(path_text((*path, *place)), problem, "pattern-refused")


def _reference_rules(schema: Json, target: str, path: tuple[str | int, ...]) -> Iterator[SchemaIssue]:
    if not target.startswith("#"):
        yield SchemaIssue(
            path_text(path), f"refers to {show(target)}; only local references (#/...) are followed"
        )
        return
    try:
        resolve_reference(schema, target)
    except LookupError:
        yield SchemaIssue(path_text(path), f"refers to {show(target)}, which is not in this schema")
        return
    parts = _parts_in_place(schema, {"$ref": target}, (), {})
    if parts is None:
        yield SchemaIssue(path_text(path), f"refers to {show(target)}, which refers back to itself")
    elif parts > _MAX_PARTS:
        problem = f"refers to {show(target)}, which stands for more than {_MAX_PARTS} schemas"
        yield SchemaIssue(path_text(path), problem)


def _parts_in_place(
    schema: Json, part: Json, open_targets: tuple[str, ...], known: dict[str, int | None]
) -> int | None:
    """How many schemas one value is checked against; `None` when a reference comes back to itself."""
    if not isinstance(part, dict):
        return 1
    node = cast("dict[str, Json]", part)
    inner = [item for key in _IN_PLACE for item in node.get(key, ())]
    inner += [node[key] for key in ("not", "if", "then", "else") if key in node]
    total = 1
    for item in inner:
        count = _parts_in_place(schema, item, open_targets, known)
        if count is None:
            return None
        total += count
    if "$ref" in node:
        target = cast("str", node["$ref"])
        if target in open_targets:
            return None
        if target not in known:
            try:
                found = resolve_reference(schema, target)
            except LookupError:
                return total  # the reference itself is reported where it stands
            known[target] = _parts_in_place(schema, found, (*open_targets, target), known)
        count = known[target]
        return None if count is None else total + count
    return total


def _subschemas(
    schema: Json, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], dict[str, Json]]]:
    if not isinstance(schema, dict):
        return
    node = cast("dict[str, Json]", schema)
    yield path, node
    for key in _SINGLES:
        if key in node:
            yield from _subschemas(node[key], (*path, key))
    for key in _LISTS:
        for index, item in enumerate(node.get(key, ())):
            yield from _subschemas(item, (*path, key, index))
    for key in _MAPS:
        for name, item in node.get(key, {}).items():
            yield from _subschemas(item, (*path, key, name))


def require_usable(schema: Json) -> None:
    """Raises `DefinitionError` with the first issue of a schema that cannot be used."""
    issues = check_schema(schema)
    if issues:
        raise DefinitionError(
            f"the schema cannot be used: {issues[0]}", code=issues[0].code, path=issues[0].path
        )


# Values -----------------------------------------------------------------------------------------------------


def validate_value(schema: Json, value: Json) -> list[ValueIssue]:
    """All that a schema refuses in a value, sorted by path; empty when the value is valid.

    Messages name what was asked and what is there, cut to a bounded length, fit for a person and for a model.
    Of the formats, `date`, `date-time`, `email`, `ipv4`, `ipv6`, `regex` and `uuid` are checked.

    Raises:
        DefinitionError: The schema is none (see `check_schema`).
    """
    validator = _validator(_encode(schema))
    try:
        errors = itertools.islice(errors_of(validator, value), 1000)
        issues = {issue for error in errors for issue in _issues_of(error)}
    except RecursionError:
        return [ValueIssue("$", "is nested too deeply")]
    except CheckRefused as refusal:
        return [ValueIssue("$", f"cannot be checked: {refusal}")]
    ordered = sorted(issues, key=lambda pair: (pair[0], pair[1]))
    return [ValueIssue(path, message) for _, path, message in ordered[:MAX_ISSUES]]


# The encoder that `json.dumps` would make at each call.
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


@functools.lru_cache(maxsize=512)
def _validator(text: str) -> Draft202012Validator:
    schema = json.loads(text)
    require_usable(schema)
    return construct_validator(schema)


def _issues_of(error: ValidationError) -> Iterator[tuple[tuple[tuple[bool, Any], ...], str, str]]:
    """Sort key, path and message of what one error says; one that is about a field stands at the field."""
    from jsonschema import exceptions

    keyword, asked, value = (
        cast("str", error.validator),
        cast("Any", error.validator_value),
        cast("Any", error.instance),
    )
    path = tuple(error.absolute_path)
    if keyword == "required":
        found = [((*path, name), "is required") for name in asked if name not in value]
    elif keyword == "dependentRequired":
        found = [
            ((*path, name), f"is required when {trigger!r} is given")
            for trigger, names in asked.items()
            if trigger in value
            for name in names
            if name not in value
        ]
    elif keyword == "additionalProperties" and asked is False:
        known: dict[str, Json] = cast("dict[str, Any]", error.schema).get("properties", {})
        names = ", ".join(sorted(known)[:12]) or "none"
        extra = unknown_fields(cast("dict[str, Any]", error.schema), value)
        found = [
            ((*path, name[:_MAX_SHOWN]), f"is not a known field; known: {names}")
            for name in extra[:MAX_ISSUES]
        ]
    elif keyword in ("anyOf", "oneOf") and error.context:
        # Of the alternatives, the one that got furthest is what was meant.
        near = cast("ValidationError | None", cast("Any", exceptions).best_match(iter(error.context)))
        inner = list(_issues_of(near)) if near is not None else []
        message = f"matches none of the {len(asked)} allowed forms"
        found = [(path, f"{message}; the nearest: {inner[0][1]}: {inner[0][2]}" if inner else message)]
    else:
        found = [(path, _message(error))]
    for place, message in found:
        yield tuple((isinstance(part, str), part) for part in place), path_text(place), message


_BOUNDS: Final[Mapping[str, str]] = {
    "minimum": "must be >= {asked}, is {value}",
    "maximum": "must be <= {asked}, is {value}",
    "exclusiveMinimum": "must be > {asked}, is {value}",
    "exclusiveMaximum": "must be < {asked}, is {value}",
    "multipleOf": "must be a multiple of {asked}, is {value}",
    "minLength": "must have at least {asked} characters, has {size}",
    "maxLength": "must have at most {asked} characters, has {size}",
    "minItems": "must have at least {asked} items, has {size}",
    "maxItems": "must have at most {asked} items, has {size}",
    "minProperties": "must have at least {asked} fields, has {size}",
    "maxProperties": "must have at most {asked} fields, has {size}",
    "pattern": "must match the regular expression {asked}, is {value}",
    "format": "must be in the format {asked}, is {value}",
    "const": "must be {asked}, is {value}",
    "uniqueItems": "must not hold the same item twice",
    "contains": "holds no item of the kind that it must",
    "propertyNames": "holds a field whose name is not allowed",
    "not": "is a value that is excluded",
    "oneOf": "matches more than one of the forms of which exactly one is allowed",
    "unevaluatedProperties": "holds a field that is not known",
    "unevaluatedItems": "holds more items than are known",
}


def _message(error: ValidationError) -> str:
    keyword, asked, value = (
        cast("str", error.validator),
        cast("Any", error.validator_value),
        cast("Any", error.instance),
    )
    if keyword == "type":
        types = [asked] if isinstance(asked, str) else list(asked)
        told = (
            show(value)
            if value is None or isinstance(value, (list, dict))
            else f"{type_word(value)} {show(value)}"
        )
        return f"must be of type {' or '.join(types)}, is {told}"
    if keyword == "enum":
        choices = ", ".join(show(item) for item in asked[:12]) + (", ..." if len(asked) > 12 else "")
        return f"must be one of {choices}, is {show(value)}"
    if keyword not in _BOUNDS:
        return "is not allowed" if error.schema is False else f"does not meet {keyword}"
    size = len(cast("list[Json]", value)) if isinstance(value, (str, list, dict)) else 0
    return _BOUNDS[keyword].format(asked=show(asked), value=show(value), size=size)
