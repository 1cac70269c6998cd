"""INSERTs that do nothing, or something else, where a row is there: compiled once.

SQLAlchemy compiles a statement with ON CONFLICT anew each time it is executed, because it cannot tell two of them apart
by its cache key. That takes longer than the database needs for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import Table, TextClause, bindparam, text
from sqlalchemy.dialects import postgresql, sqlite

from agentmesh_dagster.store.engine import Database

OnConflict = Callable[["sqlite.Insert | postgresql.Insert"], "sqlite.Insert | postgresql.Insert"]


_CAST: Final = re.compile(r"::[A-Z]+(?: [A-Z]+)*")


class CompiledInsert:
    """An INSERT into some columns of a table; its parameters are those columns."""

    def __init__(self, table: Table, columns: Sequence[str], on_conflict: OnConflict) -> None:
        self._table = table
        self._columns = list(columns)
        self._on_conflict = on_conflict
        self._statements: dict[bool, TextClause] = {}

    def of(self, database: Database) -> TextClause:
        """The statement for a database."""
        found = self._statements.get(database.is_sqlite)
        if found is None:
            found = self._statements[database.is_sqlite] = self._compiled(database)
        return found

    def _compiled(self, database: Database) -> TextClause:
        dialect = (sqlite if database.is_sqlite else postgresql).dialect(paramstyle="named")
        statement = self._on_conflict(database.insert(self._table)).inline()
        compiled = statement.compile(dialect=dialect, column_keys=self._columns)
        types = {name: self._table.c[name].type for name in self._columns}
        # The types of the parameters write PostgreSQL's casts again.
        return text(_CAST.sub("", str(compiled))).bindparams(
            *(bindparam(name, type_=kind) for name, kind in types.items())
        )
