"""The column types: moments in UTC and JSON, with the same meaning on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import DateTime, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine

from agentmesh_dagster.records import Json
from agentmesh_dagster.store.exact import from_text, to_text


def moment_to_text(moment: datetime) -> str:
    """A moment as SQLite stores it: `2026-01-31T12:00:00.000000+00:00`, so that text order is time order.

    Raises:
        ValueError: The moment has no zone.
    """
    if moment.tzinfo is None:
        raise ValueError(f"a stored time needs a zone, and {moment.isoformat()} has none")
    return moment.astimezone(timezone.utc).isoformat(timespec="microseconds")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment with a zone: `timestamptz` on PostgreSQL, ISO text in UTC on SQLite."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(DateTime(timezone=True) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        text = moment_to_text(value)
        return value if dialect.name == "postgresql" else text

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment: datetime = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return moment.astimezone(timezone.utc)


class JsonColumn(TypeDecorator[Json]):
    """A JSON value: JSONB on PostgreSQL, text on SQLite. Python's `None` is SQL NULL; nulls inside are JSON nulls."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(JSONB(none_as_null=True) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: Json, dialect: Dialect) -> Any:
        # On PostgreSQL the engine's `json_serializer` makes the text.
        return value if value is None or dialect.name == "postgresql" else to_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Json:
        return value if value is None or dialect.name == "postgresql" else from_text(value)
