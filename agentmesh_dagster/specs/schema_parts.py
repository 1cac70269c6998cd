"""What all schema modules share: references, types, and how places and values are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, cast

from agentmesh_dagster.records import Json

MAX_SCHEMA_DEPTH: Final = 64
_MAX_SHOWN: Final = 60
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def target_of(root: Json, schema: Json) -> dict[str, Json]:
    """A schema with its reference followed; what stands beside the reference comes first."""
    merged: dict[str, Json] = {}
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(schema, dict):
            break
        node = cast("dict[str, Json]", schema)
        merged = {**node, **{key: item for key, item in merged.items() if key != "$ref"}}
        if "$ref" not in node:
            break
        merged.pop("$ref", None)
        try:
            schema = resolve_reference(root, node["$ref"])
        except LookupError:
            break
    return merged


_ABOUT_FIELDS: Final = frozenset(
    (
        *("properties", "patternProperties", "required", "propertyNames", "minProperties", "enum", "const"),
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if"),
    )
)


def says_fields(schema: Mapping[str, Json]) -> bool:
    """Whether a schema says anything of what a value holds, besides that it is an object."""
    if schema.get("type", "object") != "object" or isinstance(schema.get("additionalProperties"), dict):
        return True
    return any(schema.get(word) for word in _ABOUT_FIELDS)


def types_of(root: Json, schema: Json) -> frozenset[str] | None:
    """The type words that a schema names, `None` when it names none."""
    node = target_of(root, schema)
    if "type" in node:
        named = node["type"]
        return frozenset((named,)) if isinstance(named, str) else frozenset(cast("list[str]", named))
    if "const" in node:
        return frozenset((type_word(node["const"]),))
    if "enum" in node:
        return frozenset(type_word(item) for item in node["enum"])
    return None


def copy_json(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: copy_json(item) for key, item in cast("dict[str, Json]", value).items()}
    if isinstance(value, list):
        return [copy_json(item) for item in cast("list[Json]", value)]
    return value


def resolve_reference(schema: Json, target: str) -> Json:
    """What a local reference names; raises `LookupError`."""
    found = schema
    if target not in ("#", "#/"):
        if not target.startswith("#/"):
            raise LookupError(target)
        for part in target[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~").replace("%25", "%").replace("%24", "$")
            if isinstance(found, dict):
                found = cast("dict[str, Json]", found)[key]
            elif isinstance(found, list) and key.isdecimal():
                found = cast("list[Json]", found)[int(key)]
            else:
                raise LookupError(target)
    if isinstance(found, (dict, bool)):
        return cast("Json", found)
    raise LookupError(target)


def type_word(value: Json) -> str:
    """The JSON Schema word for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    words = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return words.get(value.__class__, "something that is not JSON")


def canonical(schema: Json) -> str:
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))


def show(value: Json) -> str:
    """A value as JSON, cut to a length fit for an error."""
    if isinstance(value, int) and value.bit_length() > 1_000:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, dict)):
        return f"{type_word(value)} of {len(cast('list[Json]', value))}"
    text = json.dumps(value[: _MAX_SHOWN + 1] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def path_text(parts: Iterable[str | int]) -> str:
    """`("items", 3, "amount")` as `items[3].amount`; nothing as `$`."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif len(part) > _MAX_SHOWN:
            text += f"[{json.dumps(part[: _MAX_SHOWN - 3] + '...')}]"
        elif _NAME.match(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part)}]"
    return text or "$"
