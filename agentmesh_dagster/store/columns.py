"""The column types: moments in UTC and JSON, with the same meaning on SQLite and PostgreSQL.

JSON comes back as it was written: the order of keys, `1e16`, `-0.0`, NUL characters and lone surrogates. A replayed
prompt must be the same text as the first one. So PostgreSQL's columns are `json`, which keeps text, and not `jsonb`.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import DateTime, Double, Text
from sqlalchemy.dialects.postgresql import JSON
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeDecorator, TypeEngine

from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Json


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


def from_text(text: str) -> Json:
    """The value of what `to_text` wrote."""
    return json.loads(text)


class JsonColumn(TypeDecorator[Json]):
    """A JSON value: `json` on PostgreSQL, text on SQLite. Python's `None` is SQL NULL; nulls inside are JSON nulls."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(JSON(none_as_null=True) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: Json, dialect: Dialect) -> Any:
        # On PostgreSQL the engine's `json_serializer` makes the text.
        return value if value is None or dialect.name == "postgresql" else to_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Json:
        return value if value is None or dialect.name == "postgresql" else from_text(value)


class database_moment(GenericFunction[datetime]):
    """The present moment by the database's own clock, so many seconds later.

    Leases are measured by it: the clocks of workers differ, and a lease must run out for all of them at once.
    """

    type = UtcDateTime()
    inherit_cache = True


@compiles(database_moment, "sqlite")
def _sqlite_moment(element: database_moment, compiler: SQLCompiler, **options: Any) -> str:
    (seconds,) = (compiler.process(clause, **options) for clause in element.clauses)
    # As `moment_to_text` writes it; SQLite knows milliseconds.
    return f"(strftime('%Y-%m-%dT%H:%M:%f', 'now', ({seconds}) || ' seconds') || '000+00:00')"


@compiles(database_moment, "postgresql")
def _postgresql_moment(element: database_moment, compiler: SQLCompiler, **options: Any) -> str:
    (seconds,) = (compiler.process(clause, **options) for clause in element.clauses)
    return f"(clock_timestamp() + ({seconds}) * interval '1 second')"


class seconds_until(GenericFunction[float]):
    """How many seconds lie between the present moment, by the database's own clock, and another one."""

    type = Double[float]()
    inherit_cache = True


@compiles(seconds_until, "sqlite")
def _sqlite_seconds(element: seconds_until, compiler: SQLCompiler, **options: Any) -> str:
    (moment,) = (compiler.process(clause, **options) for clause in element.clauses)
    return f"((julianday({moment}) - julianday('now')) * 86400.0)"


@compiles(seconds_until, "postgresql")
def _postgresql_seconds(element: seconds_until, compiler: SQLCompiler, **options: Any) -> str:
    (moment,) = (compiler.process(clause, **options) for clause in element.clauses)
    return f"CAST(EXTRACT(EPOCH FROM {moment} - clock_timestamp()) AS DOUBLE PRECISION)"
