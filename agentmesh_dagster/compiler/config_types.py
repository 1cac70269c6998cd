"""A workflow's input schema as Dagster config types: the typed launch form, at the root of the run config.

What JSON Schema says and Dagster cannot becomes `Any`; nothing is lost, for `start` checks the input against the schema
itself. So a type here may be wider than the schema's, and never narrower.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from agentmesh_dagster.records import Json

_SCALARS: dict[str, Any] = {"string": dg.String, "integer": dg.Int, "number": dg.Float, "boolean": dg.Bool}
_UNTYPED = ("$ref", "oneOf", "anyOf", "allOf", "not", "const", "if")


def construct_config_schema(job: str, schema: Json) -> dg.Permissive | dg.Shape:
    """The config schema of a job.

    Args:
        job: The job's name; it begins the names of enums, which are unique in a code location.
        schema: The workflow's input schema, `type: object`.
    """
    return _object(job, schema)


def _object(path: str, schema: Json) -> dg.Permissive | dg.Shape:
    required = set(schema.get("required", []))
    fields: dict[str, dg.Field] = {}
    for name, inner in schema.get("properties", {}).items():
        fields[name] = _field(f"{path}__{name}", inner if isinstance(inner, dict) else {}, name in required)
    closed = schema.get("additionalProperties") is False and not any(word in schema for word in _UNTYPED)
    return dg.Shape(fields) if closed and "patternProperties" not in schema else dg.Permissive(fields)


def _field(path: str, schema: Json, required: bool) -> dg.Field:
    # A default is shown here and filled by `start`; Dagster's own default would have to pass Dagster's types.
    described = schema.get("description") or schema.get("title")
    notes = [str(described)] if described else []
    if "default" in schema:
        notes.append(f"Default: {schema['default']!r}.")
    return dg.Field(
        _type(path, schema, required),
        is_required=required and "default" not in schema,
        description=" ".join(notes) or None,
    )


def _type(path: str, schema: Json, required: bool) -> Any:
    if any(word in schema for word in _UNTYPED):
        return dg.Any
    kind = schema.get("type")
    if isinstance(kind, list):
        others = [name for name in kind if name != "null"]
        if len(others) != 1 or required or "enum" in schema:
            return dg.Any
        return dg.Noneable(_type(path, {**schema, "type": others[0]}, required))
    if "enum" in schema:
        return _enum(path, schema["enum"], kind)
    if kind == "object":
        return _object(path, schema)
    if kind == "array":
        items = schema.get("items")
        return (
            dg.Array(_type(f"{path}__item", items, required)) if isinstance(items, dict) else dg.Array(dg.Any)
        )
    return _SCALARS.get(kind or "", dg.Any)


def _enum(path: str, values: list[Json], kind: str | None) -> Any:
    if not values or kind not in (None, "string") or not all(isinstance(value, str) for value in values):
        return dg.Any
    return dg.Enum(path, [dg.EnumValue(value) for value in values])
