"""A workflow's input schema as Dagster config types: the typed launch form, at the root of the run config.

What JSON Schema says and Dagster cannot becomes `Any`; nothing is lost, for `start` checks the input against the schema
itself. So a type here may be wider than the schema's, and never narrower.
"""

from __future__ import annotations

from typing import Any, Final

import dagster as dg

from agentmesh_dagster.compiler.config_internals import ConfigScalar, ConfigScalarKind
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.fields import as_list, as_object

# To JSON Schema 5.0 is an integer, and Dagster's own Int refuses it. `start` refuses 5.5.
_INTEGER: Final = ConfigScalar(
    key="AgentMeshInteger",
    given_name="Integer",
    scalar_kind=ConfigScalarKind.FLOAT,
    description="A whole number.",
)
_SCALARS: Final[dict[str, Any]] = {
    "string": dg.String,
    "integer": _INTEGER,
    "number": dg.Float,
    "boolean": dg.Bool,
}
_UNTYPED: Final = ("$ref", "$dynamicRef", "oneOf", "anyOf", "allOf", "not", "const", "if")


def construct_config_schema(job: str, schema: Json) -> dg.Permissive | dg.Shape:
    """The config schema of a job.

    Args:
        job: The job's name; it begins the names of enums.
        schema: The workflow's input schema, `type: object`.
    """
    return _object(job, schema)


def _object(path: str, schema: Json) -> dg.Permissive | dg.Shape:
    required = set(schema.get("required", []))
    fields: dict[str, dg.Field] = {}
    for name, inner in schema.get("properties", {}).items():
        fields[name] = _field(f"{path}__{name}", as_object(inner) or {}, name in required)
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return dg.Shape(fields) if closed else dg.Permissive(fields)  # pyright: ignore[reportUnknownVariableType] - Dagster leaves __new__ untyped


def _field(path: str, schema: Json, required: bool) -> dg.Field:
    # A default is shown here and filled by `start`; Dagster's own default would have to pass Dagster's types.
    described = schema.get("description") or schema.get("title")
    notes = [str(described)] if described else []
    values = as_list(schema.get("enum"))
    if values:
        notes.append(f"One of: {', '.join(map(str, values))}.")
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
    kinds = as_list(kind)
    if kinds is not None:
        others = [name for name in kinds if name != "null"]
        if len(others) != 1 or required or "enum" in schema:
            return dg.Any
        return dg.Noneable(_type(path, {**schema, "type": others[0]}, required))
    if "enum" in schema:
        return _enum(path, schema["enum"], kind)
    if kind == "object":
        return _object(path, schema)
    if kind == "array":
        return dg.Array(_items(path, schema))
    return _SCALARS.get(kind or "", dg.Any)


def _items(path: str, schema: Json) -> Any:
    items = as_object(schema.get("items"))
    # After `prefixItems`, `items` speaks of the rest alone; Dagster's arrays have one type for all.
    found = (
        dg.Any if items is None or "prefixItems" in schema else _type(f"{path}__item", items, required=False)
    )
    # Dagster fails on a null among items of type Any.
    return dg.Noneable(dg.Any) if found is dg.Any else found


def _enum(path: str, values: list[Json], kind: str | None) -> Any:
    choices = list(dict.fromkeys(value for value in values if isinstance(value, str)))
    if not choices or kind not in (None, "string") or not all(isinstance(value, str) for value in values):
        return dg.Any
    # Dagster keeps config types by name for as long as the process lives: the same name with other values, as after
    # publishing again, would get the old values. A path alone is not unique either (`a__b`, and `b` in `a`).
    name = f"{path}_{content_hash(choices)[:8]}"
    return dg.Enum(name, [dg.EnumValue(value) for value in choices])
