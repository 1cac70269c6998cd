"""Walks raw documents beside their models: which keys a model has, where models stand in it, and which marks apply.

Works on raw values, so that one wrong field hides nothing that stands beside it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import Body, Condition, MarkedField, Reference, SchemaField, Template
from agentmesh_dagster.specs.problems import child_path

JsonObject = dict[str, Any]


def as_object(value: object) -> JsonObject | None:
    """The value where it is an object with text keys, else None."""
    if isinstance(value, dict):
        found = cast("dict[Any, Any]", value)
        if all(isinstance(key, str) for key in found):
            return found
    return None


def as_list(value: object) -> list[Any] | None:
    """The value where it is a list, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def accepted_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys that a model takes: aliases, and field names."""
    keys: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        keys[name] = info
        if info.alias is not None:
            keys[info.alias] = info
    return keys


def written_keys(model: type[BaseModel]) -> list[str]:
    """The keys as documents spell them, in the model's order."""
    return [info.alias or name for name, info in model.model_fields.items()]


def raw_marks(model: type[BaseModel], raw: Mapping[str, Json], path: str = "") -> Iterator[MarkedField]:
    """All marked fields that a raw object sets, of the model and of the models in it; nulls are left out.

    Bodies are told, and not looked into: their nodes see names of their own.
    """
    keys = accepted_keys(model)
    for key, value in raw.items():
        info = keys.get(key)
        if info is None or value is None:
            continue
        below = child_path(path, key)
        marks = [
            m for m in info.metadata if isinstance(m, (Template, Condition, Reference, Body, SchemaField))
        ]
        for mark in marks:
            yield MarkedField(below, value, mark)
        if not marks:
            for inner, found, place in models_within(info.annotation, value, below):
                yield from raw_marks(inner, found, place)


def models_within(
    annotation: object, value: Json, path: str
) -> Iterator[tuple[type[BaseModel], JsonObject, str]]:
    """Where in a raw value an annotation puts models: model, raw object, path."""
    model = model_of(annotation, value)
    if model is not None:
        found = as_object(value)
        if found is not None:
            yield model, found, path
        return
    for key, item, inner in _parts(annotation, value):
        yield from models_within(inner, item, child_path(path, key))


def map_models(
    annotation: object,
    value: Json,
    path: str,
    change: Callable[[type[BaseModel], JsonObject, str], JsonObject],
) -> Json:
    """The raw value with every object that an annotation takes for a model changed; the rest is left as it is."""
    model = model_of(annotation, value)
    if model is not None:
        found = as_object(value)
        return value if found is None else change(model, found, path)
    parts = list(_parts(annotation, value))
    if not parts:
        return value
    changed = [map_models(inner, item, child_path(path, key), change) for key, item, inner in parts]
    if isinstance(value, dict):
        return {key: new for (key, _, _), new in zip(parts, changed, strict=True)}
    return changed


def model_of(annotation: object, value: Json) -> type[BaseModel] | None:
    """The model that an annotation wants a raw object to be; of several, the one that shares most keys."""
    options = list(_direct_models(annotation))
    if len(options) < 2 or not isinstance(value, dict):
        return options[0] if options else None
    keys = set(cast("dict[Any, Any]", value))
    return max(options, key=lambda option: len(keys & set(accepted_keys(option))))


def _direct_models(annotation: object) -> Iterator[type[BaseModel]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _direct_models(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for option in get_args(annotation):
            yield from _direct_models(option)
    elif isinstance(annotation, type) and origin is None and issubclass(annotation, BaseModel):
        yield annotation


def _parts(annotation: object, value: Json) -> Iterator[tuple[str | int, Json, object]]:
    """The items of a list or an object, each with its annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _parts(args[0], value)
    elif origin is Union or origin is types.UnionType:
        for option in args:
            found = list(_parts(option, value))
            if found:
                yield from found
                return
    elif origin in (list, tuple) and isinstance(value, list) and args:
        for index, item in enumerate(cast("list[Any]", value)):
            yield index, item, args[0]
    elif origin is dict and len(args) == 2:
        for key, item in (as_object(cast("object", value)) or {}).items():
            yield key, item, args[1]


def deeper_than(value: Json, levels: int) -> bool:
    """Whether lists and objects nest more than so many levels deep; answers for cyclic values too."""
    stack: list[tuple[Json, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if isinstance(item, (dict, list)):
            if depth > levels:
                return True
            inner = (
                cast("dict[Any, Any]", item).values() if isinstance(item, dict) else cast("list[Any]", item)
            )
            stack.extend((child, depth + 1) for child in inner)
    return False
