"""Where the schema of a database stands, and how it is brought to this code's."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, inspect

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.constants import DEFAULT_PROJECT
from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.store import tables
from agentmesh_dagster.store.engine import Database

# Any number that no other application locks by: "AgentMsh" read as bytes.
_UPGRADE_LOCK = 0x4167656E744D7368
_ALEMBIC: Final = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class SchemaStatus:
    """The revision that a database is at, beside the one that this code works on."""

    database: str
    """The URL without its password."""
    current: str | None
    """None where the database has no AgentMesh tables."""
    head: str

    @property
    def is_up_to_date(self) -> bool:
        return self.current == self.head

    @property
    def is_newer_than_code(self) -> bool:
        """Whether a newer AgentMesh made the schema: this code does not know the revision."""
        return self.current is not None and self.current not in tables.REVISIONS


def read_status(database: Database) -> SchemaStatus:
    """Asks the database for its revision. A SQLite file that is not there is not made.

    Raises:
        StoreError: The database could not be reached.
    """
    if database.is_missing_file:
        return SchemaStatus(database=database.shown, current=None, head=tables.REVISIONS[-1])
    with database.read() as connection:
        return SchemaStatus(database=database.shown, current=_revision(connection), head=tables.REVISIONS[-1])


def check(status: SchemaStatus) -> None:
    """Refuses a database that this code cannot work on.

    Raises:
        StoreError: It is newer (code `database-newer`) or older (`database-older`).
    """
    if status.is_newer_than_code:
        raise StoreError(
            f"the database {status.database} is at revision {status.current!r}, newer than this AgentMesh, "
            f"which knows up to {status.head!r}; upgrade AgentMesh",
            code="database-newer",
            context={"current": status.current, "head": status.head},
        )
    if not status.is_up_to_date:
        found = f"is at revision {status.current!r}" if status.current else "has no AgentMesh tables yet"
        raise StoreError(
            f"the database {status.database} {found}, and this AgentMesh needs {status.head!r}; "
            "run `agentmesh db upgrade`",
            code="database-older",
            context={"current": status.current, "head": status.head},
        )


def upgrade(database: Database, clock: Clock) -> SchemaStatus:
    """Brings the schema to this code's revision, in one transaction; of several at once, one does it.

    Raises:
        StoreError: The database could not be reached, or is newer than this code.
    """
    with database.write() as connection:
        if not database.is_sqlite:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_UPGRADE_LOCK})")
        status = SchemaStatus(
            database=database.shown, current=_revision(connection), head=tables.REVISIONS[-1]
        )
        if not status.is_newer_than_code and not status.is_up_to_date:
            # Alembic keeps its context for the whole process: two threads with two databases would share it.
            with _ALEMBIC:
                _run_migrations(connection)
            status = SchemaStatus(database=database.shown, current=_revision(connection), head=status.head)
        check(status)
        connection.execute(
            database.insert(tables.projects)
            .values(slug=DEFAULT_PROJECT, name=DEFAULT_PROJECT, created_at=clock.now())
            .on_conflict_do_nothing()
        )
    return status


def _revision(connection: Connection) -> str | None:
    if connection.dialect.name == "sqlite":
        known = connection.exec_driver_sql(
            "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
        ).first()
    else:
        known = inspect(connection).has_table("alembic_version") or None
    if known is None:
        return None
    row = connection.exec_driver_sql("SELECT version_num FROM alembic_version").first()
    return None if row is None else str(row[0])


def _run_migrations(connection: Connection) -> None:
    # Imported here: a store that is up to date needs no Alembic.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
