"""JSON as it was written: PostgreSQL's columns become `json`, and the copies of what `jsonb` changes end."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_KEYS = {
    "audit": ("seq",),
    "versions": ("definition_id", "number"),
    "publications": ("id",),
    "runs": ("id",),
    "steps": ("run_id", "key"),
    "events": ("seq",),
    "waits": ("id",),
    "votes": ("seq",),
    "notices": ("id",),
    "inbox": ("seq",),
}
_ROWS_AT_ONCE = 200


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        _change_types(connection)
        for table, keys in _KEYS.items():
            _restore(connection, table, keys)
    elif sqlite3.sqlite_version_info < (3, 35):
        # It cannot drop a column. The column stays, empty, and nothing names it.
        return
    for table in _KEYS:
        op.drop_column(table, "exact")


def _change_types(connection: sa.Connection) -> None:
    found = connection.execute(
        sa.text(
            "SELECT table_name, column_name FROM information_schema.columns"
            " WHERE table_schema = current_schema() AND data_type = 'jsonb' AND table_name IN :tables"
        ).bindparams(sa.bindparam("tables", expanding=True)),
        {"tables": [*_KEYS, "definitions"]},
    ).all()
    changes: dict[str, list[str]] = {}
    for table, column in found:
        changes.setdefault(table, []).append(f'ALTER COLUMN "{column}" TYPE json USING "{column}"::json')
    for table, columns in changes.items():
        # In one statement: PostgreSQL writes the whole table anew for each.
        op.execute(f"ALTER TABLE {table} {', '.join(columns)}")


def _restore(connection: sa.Connection, name: str, keys: Sequence[str]) -> None:
    """Puts back the text of the values that `jsonb` had changed."""
    table = sa.table(name, *(_column(key) for key in keys), sa.column("exact", sa.Text()))
    query = sa.select(table).where(table.c.exact.is_not(None))
    rows = connection.execute(query, execution_options={"stream_results": True})
    for part in rows.mappings().partitions(_ROWS_AT_ONCE):
        for row in part:
            # In Python: PostgreSQL's own functions refuse NUL characters.
            values = {column: _text(value) for column, value in json.loads(row["exact"]).items()}
            connection.execute(
                sa.update(sa.table(name, *map(_column, [*keys, *values])))
                .where(*(_column(key) == row[key] for key in keys))
                .values({column: sa.cast(sa.literal(text), _PlainJson()) for column, text in values.items()})
            )


def _column(name: str) -> sa.ColumnClause[Any]:
    return sa.column(name)


class _PlainJson(sa.types.UserDefinedType[str]):
    """PostgreSQL's `json`, given as text."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "json"


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
