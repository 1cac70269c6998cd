"""The tools that come with AgentMesh: `calculator`, `now`, `generate_id`, `json_path`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.tools.base import ToolContext
from agentmesh_dagster.runtime.tools.calculator import calculate
from agentmesh_dagster.runtime.tools.errors import ToolRefused
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.specs.tools import BuiltinToolConfig

__all__ = ["BUILTINS", "Builtin", "BuiltinTool", "find_path"]

_STEP: Final = re.compile(
    r"""\.(?P<name>[A-Za-z_][\w-]*) | \.(?P<all>\*) | \[(?P<index>-?\d{1,9})\] | \[(?P<items>\*)\]
      | \['(?P<single>[^']*)'\] | \["(?P<double>[^"]*)"\]""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Builtin:
    """One built-in tool: a function of its checked input and the clock."""

    run: Callable[[dict[str, Any], Clock], Json]
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]


class BuiltinTool:
    """Tools of the type `builtin`."""

    config_model: type[SpecModel] = BuiltinToolConfig

    async def schemas(
        self, config: BuiltinToolConfig, context: ToolContext
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        builtin = BUILTINS[config.name]
        return builtin.input_schema, builtin.output_schema

    async def call(
        self, tool: ToolSpec, config: BuiltinToolConfig, value: Json, context: ToolContext
    ) -> Json:
        return BUILTINS[config.name].run(value, context.clock)


def _calculator(value: dict[str, Any], clock: Clock) -> Json:
    return {"result": calculate(value["expression"])}


def _now(value: dict[str, Any], clock: Clock) -> Json:
    name = value.get("timezone", "UTC")
    try:
        zone = ZoneInfo(name)
    # A directory's name gives an OSError, a path outside the zone files a ValueError.
    except (ZoneInfoNotFoundError, ValueError, OSError):
        zone = None
    if zone is None:
        raise ToolRefused(
            f"timezone: there is no zone {name!r}; write such as 'Europe/Berlin'", code="tool-input"
        )
    moment = clock.now()
    return {"now": moment.astimezone(zone).isoformat(), "timezone": name, "unix_s": moment.timestamp()}


def _generate_id(value: dict[str, Any], clock: Clock) -> Json:
    return {"id": f"{value.get('prefix', '')}{clock.new_id()}"}


def _json_path(value: dict[str, Any], clock: Clock) -> Json:
    found = find_path(value["data"], value["path"])
    if found is not _NOTHING:
        return {"value": found}
    if "default" in value:
        return {"value": value["default"]}
    raise ToolRefused(
        f"path: nothing stands at {value['path']!r} in the data; give a 'default' for that", code="tool-input"
    )


_NOTHING: Final = object()


def find_path(data: Json, path: str) -> Json | object:
    """What stands at a path in JSON data.

    The subset of JSONPath (RFC 9535): `$`, `.name`, `['name']`, `[0]`, `[-1]` (from the end), and `[*]` or
    `.*` for all items or values. A path with a wildcard gives a list of what was found, which may be empty; a
    path without gives the value itself, or a mark that is no JSON where there is none.

    Raises:
        ToolRefused: The path is not of this form.
    """
    if not path.startswith("$"):
        raise ToolRefused(
            f"path: {path!r} has to begin with '$', such as '$.orders[0].id'", code="tool-input"
        )
    found: list[Json] = [data]
    has_wildcard = False
    at = 1
    while at < len(path):
        step = _STEP.match(path, at)
        if step is None:
            raise ToolRefused(
                f"path: {path!r} cannot be read at character {at + 1}: use '.name', '[0]' or '[*]'",
                code="tool-input",
            )
        at = step.end()
        if step["all"] or step["items"]:
            has_wildcard = True
            found = [child for value in found for child in _children(value)]
        elif step["index"] is not None:
            index = int(step["index"])
            lists = [cast("list[Json]", value) for value in found if isinstance(value, list)]
            found = [items[index] for items in lists if -len(items) <= index < len(items)]
        else:
            name = next(name for name in (step["name"], step["single"], step["double"]) if name is not None)
            objects = [cast("Mapping[str, Json]", value) for value in found if isinstance(value, Mapping)]
            found = [members[name] for members in objects if name in members]
    if has_wildcard:
        return found
    return found[0] if found else _NOTHING


def _children(value: Json) -> list[Json]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, Json]", value).values())
    return cast("list[Json]", value) if isinstance(value, list) else []


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_TEXT: Final = {"type": "string"}
BUILTINS: Final[Mapping[str, Builtin]] = {
    "calculator": Builtin(
        _calculator,
        "Calculates an arithmetic expression, such as '2 * (3 + 4) ** 2'.",
        _object(
            ["expression"],
            expression={
                "type": "string",
                "minLength": 1,
                "maxLength": 500,
                "description": "+ - * / // % ** and parentheses;"
                " abs, ceil, exp, floor, log, log10, max, min, round, sqrt; pi, e",
            },
        ),
        _object(["result"], result={"type": "number"}),
    ),
    "now": Builtin(
        _now,
        "Tells the present date and time.",
        _object(
            [], timezone={**_TEXT, "default": "UTC", "description": "An IANA zone, such as 'Europe/Berlin'"}
        ),
        _object(
            ["now", "timezone", "unix_s"],
            now={**_TEXT, "description": "ISO 8601 with the zone's offset"},
            timezone=_TEXT,
            unix_s={"type": "number"},
        ),
    ),
    "generate_id": Builtin(
        _generate_id,
        "Makes a fresh unique id.",
        _object([], prefix={**_TEXT, "maxLength": 100, "description": "Put before the id"}),
        _object(["id"], id=_TEXT),
    ),
    "json_path": Builtin(
        _json_path,
        "Takes a value out of JSON data by its path.",
        _object(
            ["data", "path"],
            data={},
            path={**_TEXT, "maxLength": 1000, "description": "Such as '$.orders[0].id' or '$.orders[*].id'"},
            default={"description": "The value where nothing stands at the path"},
        ),
        _object(["value"], value={}),
    ),
}
