"""What the models of all documents share: the base model, slugs, durations, and marks for expressions and references.

A field that holds an expression or names another document says so in its annotation, and nowhere else:

    prompt: Annotated[str, Template()]        rendered before the node runs
    when: Annotated[str, Condition()]         a bare expression
    body: Annotated[BodySpec, Body()]         nodes whose expressions see names of their own
    agent: Annotated[str, Reference("agent")] the slug of a stored document

Validation, rendering, and the resolving of closures all read these marks, so a plugin's node type gets the same
checks as a built-in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from agentmesh_dagster.records import Json

SLUG_PATTERN = re.compile(r"[A-Za-z](?!.*[-_]{2})[A-Za-z0-9_-]{0,99}\Z")
NODE_ID_PATTERN = re.compile(r"[A-Za-z](?!.*[-_]{2})[A-Za-z0-9_-]{0,62}\Z")

_DURATION = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(s|m|h|d)\Z", re.ASCII)
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"(\d{1,18}(?:[.,]\d{1,18})?)"
# Years and months have no fixed length, and are left out.
_ISO_DURATION = re.compile(
    rf"P(?=[\dT])(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=\d)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?\Z",
    re.ASCII,
)
_ISO_UNITS_S = (604800.0, 86400.0, 3600.0, 60.0, 1.0)
DURATION_FORMS: Final = "a number of seconds or such as '30s', '5m', '2h', '3d', 'PT5M', 'P3D'"


class SpecModel(BaseModel):
    """Base of all document models: frozen, unknown fields refused, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, populate_by_name=True, hide_input_in_errors=True
    )


@dataclass(frozen=True)
class Template:
    """Marks a field whose strings are templates; the value is any JSON around them."""


@dataclass(frozen=True)
class Condition:
    """Marks a field that is a bare expression."""

    names: tuple[str, ...] = ()
    """What it sees besides what the node sees."""
    body: str = ""
    """The field of the body whose steps it sees too, as they stood after the last pass."""


@dataclass(frozen=True)
class Reference:
    """Marks a field that holds the slug (or a list of slugs) of stored documents of a kind."""

    kind: str


@dataclass(frozen=True)
class Body:
    """Marks a field that holds a `BodySpec`, or an object of them by name."""

    names: tuple[str, ...] = ()
    """What its expressions see besides what the node sees."""


@dataclass(frozen=True)
class SchemaField:
    """Marks a field that is a JSON Schema."""


def parse_duration(value: object) -> object:
    """Seconds as a number, `30s`, `5m`, `2h`, `3d`, or ISO 8601 (`PT5M`, `P3D`); pydantic refuses anything else.

    Raises:
        ValueError: It is text of another form; ISO 8601's years and months are none, as their length differs.
    """
    if isinstance(value, str):
        text = value.strip()
        if (found := _DURATION.match(text)) is not None:
            return float(found.group(1)) * _UNIT_S[found.group(2)]
        if (found := _ISO_DURATION.match(text)) is not None:
            numbers = [float((part or "0").replace(",", ".")) for part in found.groups()]
            return sum(number * unit_s for number, unit_s in zip(numbers, _ISO_UNITS_S, strict=True))
        raise ValueError(f"a duration is {DURATION_FORMS}")
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value


def write_number(value: float) -> int | float:
    """Whole numbers of seconds are written without a fraction."""
    return int(value) if value.is_integer() else value


Duration = Annotated[float, BeforeValidator(parse_duration), PlainSerializer(write_number)]
"""Seconds; written as `30s`, `5m`, `2h`, `3d`, ISO 8601 (`PT5M`) or a number."""

JsonSchema = Annotated[dict[str, Any], SchemaField()]
OptionalJsonSchema = Annotated[dict[str, Any] | None, SchemaField()]


@dataclass(frozen=True)
class MarkedField:
    """A value in a model that carries a mark, and its path below the model (`conditions[0].when`)."""

    path: str
    value: Json
    mark: Template | Condition | Reference | Body | SchemaField


def marked_fields(model: BaseModel, prefix: str = "") -> Iterator[MarkedField]:
    """All marked fields of a model and of the models in it that are set, depth first, in field order."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if value is None:
            continue
        path = f"{prefix}.{info.alias or name}" if prefix else (info.alias or name)
        marks = [
            m for m in info.metadata if isinstance(m, Template | Condition | Reference | Body | SchemaField)
        ]
        for mark in marks:
            yield MarkedField(path, value, mark)
        if not marks:
            yield from _nested(value, path)


def _nested(value: object, path: str) -> Iterator[MarkedField]:
    if isinstance(value, BaseModel):
        yield from marked_fields(value, path)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - any JSON
            yield from _nested(item, f"{path}[{index}]")  # pyright: ignore[reportUnknownArgumentType] - any JSON
