"""Shape rules: known fields, right types. Each part is checked by itself, so that one fault hides no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import loading
from agentmesh_dagster.specs.fields import (
    accepted_keys,
    as_list,
    as_object,
    deeper_than,
    model_of,
    written_keys,
)
from agentmesh_dagster.specs.problems import Problem, child_path, nearest, suggestion

ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_DEPTH: Final = loading.MAX_DEPTH

_EXPECTED: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "none_required": "null",
}
_KEY: Final = re.compile(r"[A-Za-z_][\w-]*\Z")


@dataclass(frozen=True)
class _Found:
    """One error of pydantic, at a path of the raw value."""

    keys: tuple[str | int, ...]
    in_union: bool
    kind: str
    sentence: str
    model: type[BaseModel]


def json_problems(value: Json) -> Iterator[Problem]:
    """What JSON, UTF-8 or the database could not hold; the first such value of each kind of place."""
    if deeper_than(value, MAX_DEPTH):
        yield Problem.of(
            "too-deep",
            "",
            f"Lists and objects are nested more than {MAX_DEPTH} levels deep",
            "Flatten the document",
        )
        return
    stack: list[tuple[str, Json]] = [("", value)]
    while stack:
        path, item = stack.pop()
        reason = _not_json(item)
        if reason:
            yield Problem.of(
                "not-json", path, f"{reason} cannot be stored", "Write it as text or as a plain number"
            )
        elif isinstance(item, dict):
            for key, inner in cast("dict[Any, Any]", item).items():
                if not isinstance(key, str) or _not_json(key):
                    yield Problem.of("not-json", path, f"The key {key!r} is no text", "Quote it")
                else:
                    stack.append((child_path(path, key), inner))
        elif isinstance(item, list):
            stack.extend((child_path(path, n), inner) for n, inner in enumerate(cast("list[Any]", item)))


def _not_json(value: Json) -> str:
    if isinstance(value, str):
        if "\x00" in value:
            return "Text with the character NUL"
        try:
            value.encode()
        except UnicodeEncodeError:
            return "Text with half a surrogate pair"
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return f"The number {value}"
    elif isinstance(value, int):
        if value.bit_length() > 1024:
            return "A whole number of more than 308 digits"
    elif value is not None and not isinstance(value, (dict, list)):
        return f"A value of Python's type {type(value).__name__!r}"
    return ""


def checked(
    model: type[ModelT], raw: Mapping[str, Json], path: str, problems: list[Problem]
) -> tuple[ModelT | None, frozenset[str]]:
    """Checks one raw object against a model.

    Returns:
        The model, or where fields are wrong what is left without them, or None where nothing is; and the keys of the
        wrong fields.
    """
    try:
        return model.model_validate(raw), frozenset()
    except ValidationError as error:
        found = _problems(model, raw, path, error)
    problems += [problem for _, problem in found]
    wrong = frozenset(str(keys[0]) for keys, _ in found if keys)
    try:
        return model.model_validate({k: v for k, v in raw.items() if k not in wrong}), wrong
    except ValidationError:
        return None, wrong


def _problems(
    model: type[BaseModel], raw: Mapping[str, Json], path: str, error: ValidationError
) -> list[tuple[tuple[str | int, ...], Problem]]:
    by_place: dict[tuple[str | int, ...], list[_Found]] = {}
    for detail in error.errors(include_url=False):
        found = _found(model, raw, detail)
        by_place.setdefault(found.keys, []).append(found)
    deepest = {place[:n] for place in by_place for n in range(len(place))}
    done: list[tuple[tuple[str | int, ...], Problem]] = []
    for place, group in by_place.items():
        # A value that fits one way of a union but for something inside it: only the inside is told.
        if place in deepest and all(found.in_union for found in group):
            continue
        done.append((place, _problem(raw, path, place, group)))
    return done


def _found(model: type[BaseModel], raw: Mapping[str, Json], detail: ErrorDetails) -> _Found:
    keys: list[str | int] = []
    in_union = False
    value: Json = raw
    owner = model
    location = detail["loc"]
    for number, part in enumerate(location):
        items = as_list(cast("object", value))
        entries = cast("dict[Any, Any] | None", value if isinstance(value, dict) else None)
        if isinstance(part, int) and items is not None and part < len(items):
            keys.append(part)
            value = items[part]
        elif entries is not None and part in entries:
            owner = _owner(owner, part)
            keys.append(part)
            value = entries[part]
        elif detail["type"] == "missing" and number == len(location) - 1:
            keys.append(part)
        else:
            in_union = True
    return _Found(tuple(keys), in_union, detail["type"], _sentence(detail), owner)


def _owner(model: type[BaseModel], key: object) -> type[BaseModel]:
    """The model below a key, where there is one; else the same."""
    info = accepted_keys(model).get(str(key))
    if info is None:
        return model
    inner = model_of(info.annotation, None)
    if inner is None:
        for argument in getattr(info.annotation, "__args__", ()):
            inner = inner or model_of(argument, None)
    return inner or model


def _sentence(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    bounds = {
        "greater_than": f"must be greater than {_bound(context.get('gt'))}",
        "greater_than_equal": f"must be at least {_bound(context.get('ge'))}",
        "less_than": f"must be less than {_bound(context.get('lt'))}",
        "less_than_equal": f"must be at most {_bound(context.get('le'))}",
        "string_too_long": f"must have at most {context.get('max_length')} characters",
        "string_too_short": f"must have at least {context.get('min_length')} characters",
        "too_short": f"must hold at least {context.get('min_length')}",
        "too_long": f"must hold at most {context.get('max_length')}",
        "literal_error": f"must be one of {context.get('expected')}".replace(" or ", ", "),
        "enum": f"must be one of {context.get('expected')}".replace(" or ", ", "),
        "finite_number": "must be a finite number",
    }
    if kind in bounds:
        return bounds[kind]
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", detail["msg"])).strip()
    return detail["msg"].replace("Input should be", "must be").replace("Value error, ", "")


def _bound(limit: object) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _problem(
    raw: Mapping[str, Json], path: str, place: tuple[str | int, ...], group: Sequence[_Found]
) -> Problem:
    where = path
    value: Json = raw
    for key in place:
        where = child_path(where, key)
        value = _below(value, key)
    first = group[0]
    name = next((k for k in reversed(place) if isinstance(k, str)), "the value")
    if first.kind == "extra_forbidden":
        near = nearest(str(place[-1]), written_keys(first.model))
        mend = (
            f"Did you mean {near!r}" if near else f"Known fields are {', '.join(written_keys(first.model))}"
        )
        return Problem.of("field-unknown", where, f"Unknown field {place[-1]!r}", mend)
    if first.kind == "missing":
        return Problem.of("field-missing", where, f"The field {name!r} is missing", f"Add {name!r}")
    if not place:
        return Problem.of("field-invalid", where, _capital(first.sentence), "Correct the value")
    expected = list(dict.fromkeys(_EXPECTED[f.kind] for f in group if f.kind in _EXPECTED))
    others = list(dict.fromkeys(f.sentence for f in group if f.kind not in _EXPECTED))
    if others:
        told = max(others, key=len)
        message = f"{name!r} {told}" if told.startswith("must") else f"{name!r}: {told}"
        if "characters" not in told:
            message += f", not {_shown(value)}"
    else:
        message = f"{name!r} must be {' or '.join(expected)}, not {_shown(value)}"
    mend = "Correct the value"
    if first.kind in ("literal_error", "enum") and isinstance(value, str):
        options = re.findall(r"'([^']*)'", first.sentence)
        mend = suggestion(value, options)
    return Problem.of("field-invalid", where, message, mend)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _below(value: Json, key: str | int) -> Json:
    items, found = as_list(value), as_object(value)
    if isinstance(key, int):
        return items[key] if items is not None and key < len(items) else None
    return found.get(key) if found is not None else None


def _shown(value: Json) -> str:
    """What a value is, in words; long text is not shown, it may be a secret that stands in the wrong place."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"{value!r}"[:40]
    if isinstance(value, str):
        return repr(value) if len(value) <= 12 or (len(value) <= 30 and _KEY.match(value)) else "this text"
    return "a list" if isinstance(value, list) else "an object"
