"""JSON in columns, byte for byte.

SQLite keeps the text as it is. PostgreSQL's JSONB keeps the value only: it sorts keys, turns `1e16` into an integer,
and refuses NUL characters and lone surrogates. A replayed prompt must be the same text as the first one, so a row whose
JSON would not survive also carries the exact text of those values, in its column `exact`; JSONB stays for queries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Json

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def to_text(value: Json) -> str:
    """A JSON value as compact text that any database's encoding can hold; keys keep their order.

    Raises:
        StoreError: The value is no JSON, such as NaN, a set or a date (code `not-json`).
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:  # a lone surrogate: only its escape can be stored
                text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"a value cannot be stored, because it is not JSON: {error}", code="not-json"
        ) from None
    return text


def to_jsonb_text(value: Json) -> str:
    """As `to_text`, with U+FFFD for the characters that JSONB refuses."""
    text = to_text(value)
    return to_text(_printable(value)) if "\\u" in text else text


def from_text(text: str) -> Json:
    """The value of what `to_text` wrote."""
    return json.loads(text)


def exact_text(values: Mapping[str, Json]) -> str | None:
    """The text for the column `exact`: those of the named values that JSONB would change, or None."""
    changed = {name: value for name, value in values.items() if not survives_jsonb(value)}
    # ASCII, because PostgreSQL's text refuses what JSON can only escape.
    return json.dumps(changed, separators=(",", ":")) if changed else None


def exact_values(text: str | None) -> dict[str, Json]:
    """What `exact_text` kept: column name to value."""
    return {} if text is None else json.loads(text)


def survives_jsonb(value: Json) -> bool:
    """Whether PostgreSQL's JSONB gives the value back with its types, its text and the order of its keys."""
    if value is None or value is True or value is False:
        return True
    if isinstance(value, str):
        return value.isprintable() or not _has_refused(value)
    if isinstance(value, float):
        # Whole numbers from 1e16 on are written with an exponent, and JSONB writes them out as integers.
        return abs(value) < 1e16 and not (value == 0.0 and math.copysign(1.0, value) < 0)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        last: tuple[int, bytes] = (-1, b"")
        for key, item in items.items():
            if _has_refused(key):
                return False
            raw = key.encode()
            if (len(raw), raw) < last:
                return False
            last = (len(raw), raw)
            if not survives_jsonb(item):
                return False
        return True
    if isinstance(value, list | tuple):
        return all(survives_jsonb(item) for item in cast("list[Any]", value))
    return True


def has_nul(value: Json) -> bool:
    """Whether a string anywhere in the value, keys included, has a NUL character."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(has_nul(key) or has_nul(item) for key, item in cast("dict[str, Any]", value).items())
    if isinstance(value, list | tuple):
        return any(has_nul(item) for item in cast("list[Any]", value))
    return False


def _has_refused(text: str) -> bool:
    if text.isascii():
        return "\0" in text
    return any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text)


def _printable(value: Json) -> Json:
    if isinstance(value, str):
        if not _has_refused(value):
            return value
        return "".join(
            _REPLACEMENT if char == "\0" or "\ud800" <= char <= "\udfff" else char for char in value
        )
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in cast("list[Any]", value)]
    return value
