"""The keywords that `jsonschema` would check by Python's `re`, checked by `patterns`; and a bound on one check's work.

`pattern`, `patternProperties`, `additionalProperties`, `unevaluatedProperties` and the format `regex` take regular
expressions of documents. `$ref` is counted: a schema that refers back to itself twice would take a time that doubles
with each level of the value.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.patterns import PatternRefused, Work, is_found, refusal_of
from agentmesh_dagster.specs.schema_parts import resolve_reference

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

    Errors = Iterable[ValidationError] | None
    Keyword = Callable[[Any, Any, Any, Any], Errors]

_MAX_VISITS: Final = 1_000
_MAX_KNOWN_NAME: Final = 100
_MAX_WORK: Final = 200_000_000
_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)\Z")


class CheckRefused(Exception):
    """A value cannot be checked in bounded time; the message says why."""


class _Check(threading.local):
    """The check that a thread is at: its whole schema, and what it has cost."""

    root: Json = None
    work: Work = Work(0)
    visits: dict[tuple[str, int], int]
    """How often a part of the value was checked against a reference."""


_check: Final = _Check()


def errors_of(validator: Draft202012Validator, value: Json) -> Iterator[ValidationError]:
    """All errors of a value, as they are found.

    Args:
        validator: Of `construct_validator`.
        value: Any JSON.

    Raises:
        CheckRefused: A text is too long for a regular expression, or a part of the value is checked against the same
            reference too often.
    """
    _check.root, _check.work, _check.visits = validator.schema, Work(_MAX_WORK), {}
    try:
        yield from cast("Any", validator).iter_errors(value)
    except PatternRefused as refusal:
        raise CheckRefused(str(refusal)) from None


def construct_validator(schema: Json) -> Draft202012Validator:
    """A validator of a schema that follows local references alone."""
    import referencing

    # A registry of its own: the default one would fetch remote references.
    made = _validator_class()(schema, registry=cast("Any", referencing).Registry(), format_checker=_formats())
    return cast("Draft202012Validator", made)


@functools.cache
def _validator_class() -> Any:
    from jsonschema import Draft202012Validator, validators

    return cast("Any", validators).extend(
        Draft202012Validator,
        {
            "$ref": _counted(cast("Any", Draft202012Validator).VALIDATORS["$ref"]),
            "additionalProperties": _additional_properties,
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "unevaluatedProperties": _unevaluated_properties,
        },
    )


@functools.cache
def _formats() -> Any:
    from jsonschema import FormatChecker

    formats = FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))
    formats.checks("date-time")(_is_date_time)
    formats.checks("regex")(_is_pattern)
    return formats


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or refusal_of(value) is None


def _is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    if not _RFC3339.match(value):
        return False
    try:
        datetime.fromisoformat(value[:19].replace("t", "T"))
    except ValueError:
        return False
    return True


def _error(message: str) -> ValidationError:
    from jsonschema.exceptions import ValidationError

    return ValidationError(message)


def _counted(follow: Keyword) -> Keyword:
    def counted(validator: Any, target: Any, instance: Any, schema: Any) -> Errors:
        if isinstance(instance, (dict, list)):
            visits, visit = _check.visits, (target, id(cast("object", instance)))
            visits[visit] = made = visits.get(visit, 0) + 1
            if made > _MAX_VISITS:
                raise CheckRefused(
                    f"the schema checks a part of the value against {target!r} more than {_MAX_VISITS} times; "
                    "simplify its alternatives"
                )
        return follow(validator, target, instance, schema)

    return counted


def _pattern(_validator: Any, pattern: str, instance: Any, _schema: Any) -> Errors:
    if isinstance(instance, str) and not is_found(pattern, instance, _check.work):
        return (_error("does not match"),)
    return None


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Json], instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    fields = cast("dict[str, Json]", instance)
    for pattern, subschema in patterns.items():
        for name, value in fields.items():
            if _names(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def unknown_fields(schema: Mapping[str, Json], instance: Mapping[str, Json]) -> list[str]:
    """The fields that neither `properties` nor `patternProperties` of a schema names."""
    known: Mapping[str, Json] = schema.get("properties", {})
    patterns: Mapping[str, Json] = schema.get("patternProperties", {})
    if not patterns:
        return [name for name in instance if name not in known]
    return [name for name in instance if name not in known and not _is_named(patterns, name)]


def _is_named(patterns: Iterable[str], name: str) -> bool:
    return any(_names(pattern, name) for pattern in patterns)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern is found in the name of a field; the names of fields come again."""
    return (
        _names_known(pattern, name) if len(name) <= _MAX_KNOWN_NAME else is_found(pattern, name, _check.work)
    )


@functools.lru_cache(maxsize=4096)
def _names_known(pattern: str, name: str) -> bool:
    return is_found(pattern, name)


def _additional_properties(
    validator: Any, subschema: Json, instance: Any, schema: Mapping[str, Json]
) -> Iterator[ValidationError]:
    if subschema is True or not isinstance(instance, dict):
        return
    fields = cast("dict[str, Json]", instance)
    extra = unknown_fields(schema, fields)
    if isinstance(subschema, dict):
        for name in extra:
            yield from validator.descend(fields[name], subschema, path=name)
    elif extra:
        yield _error("has unknown fields")


def _unevaluated_properties(
    validator: Any, subschema: Json, instance: Any, schema: Json
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    fields = cast("dict[str, Json]", instance)
    evaluated = _evaluated(validator, fields, schema)
    if any(
        not _holds(validator, value, subschema) for name, value in fields.items() if name not in evaluated
    ):
        yield _error("has fields that are not evaluated")


def _holds(validator: Any, value: Json, subschema: Json) -> bool:
    return next(iter(validator.descend(value, subschema)), None) is None


def _evaluated(validator: Any, fields: dict[str, Json], schema: Json) -> set[str]:
    """The fields that a schema and what applies beside it say something about."""
    if not isinstance(schema, dict):
        return set()
    node = cast("dict[str, Json]", schema)
    found: set[str] = set()
    if "$ref" in node:
        found |= _evaluated(validator, fields, resolve_reference(_check.root, node["$ref"]))
    found |= node.get("properties", {}).keys() & fields.keys()
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        if keyword in node:
            found.update(name for name, value in fields.items() if _holds(validator, value, node[keyword]))
    if "patternProperties" in node:
        found.update(name for name in fields if _is_named(node["patternProperties"], name))
    for name, inner in node.get("dependentSchemas", {}).items():
        if name in fields:
            found |= _evaluated(validator, fields, inner)
    for keyword in ("allOf", "oneOf", "anyOf"):
        for inner in node.get(keyword, ()):
            if _holds(validator, fields, inner):
                found |= _evaluated(validator, fields, inner)
    if "if" in node:
        if _holds(validator, fields, node["if"]):
            found |= _evaluated(validator, fields, node["if"])
            found |= _evaluated(validator, fields, node.get("then", True))
        else:
            found |= _evaluated(validator, fields, node.get("else", True))
    return found
