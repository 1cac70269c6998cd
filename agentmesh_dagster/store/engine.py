"""The database connection: URLs, SQLite's settings, transactions, and what a fork must not inherit."""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Connection, Engine, Table, create_engine, event, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from agentmesh_dagster.errors import NotFound, StoreError
from agentmesh_dagster.settings import make_private
from agentmesh_dagster.store import tables
from agentmesh_dagster.store.columns import from_text, to_text
from agentmesh_dagster.store.failures import shown_url, store_error

if TYPE_CHECKING:
    from agentmesh_dagster.store.judging import Judgement

BUSY_TIMEOUT_S: Final = 10.0
"""How long a SQLite connection waits for another writer."""

CONNECT_TIMEOUT_S: Final = 10
"""How long a connection to PostgreSQL may take to be made."""

_WRITES: Final = "agentmesh_writes"
_SQLITE_PRAGMAS: Final = ("PRAGMA foreign_keys=ON", "PRAGMA synchronous=NORMAL")


def parse_url(text: str) -> URL:
    """Reads a database URL and names the driver.

    Args:
        text: `sqlite:///path` or `postgresql://...`.

    Raises:
        StoreError: It is none (code `bad-url`). The text itself is not shown, because it may hold a password.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StoreError(
            "the database URL cannot be read; write sqlite:///path/to/file.db or postgresql://user:password@host/name",
            code="bad-url",
        ) from None
    backend = url.drivername.partition("+")[0]
    if backend != "sqlite" and _has_stray_at(url):
        raise StoreError(
            "the database URL has more than one '@': write one that belongs to the user or the password as %40, and "
            "'/', ':', '?' and '#' in them as %2F, %3A, %3F and %23",
            code="bad-url",
        )
    if backend in ("postgresql", "postgres"):
        # Whatever driver the URL names: the journal sends several statements in one message, as psycopg2 can.
        return url.set(drivername="postgresql+psycopg2")
    if backend != "sqlite":
        raise StoreError(
            f"the database {backend!r} is not supported; use sqlite:///path or postgresql://...",
            code="bad-url",
        )
    if not url.database or url.database == ":memory:":
        raise StoreError(
            "a SQLite database in memory cannot be shared by threads and processes; name a file: sqlite:///path",
            code="bad-url",
        )
    return url


def _has_stray_at(url: URL) -> bool:
    """Whether a part of the password was read as host, database or option, which errors would show."""
    return any("@" in part for part in (url.host or "", url.database or "", *url.query))


class Database:
    """One database, with its connections in this process.

    After a fork the child makes connections of its own; the parent's are left alone.
    """

    def __init__(self, url: str) -> None:
        self.url = parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = self._construct_engine()
        self.judgements: dict[tuple[str, str], Judgement] = {}
        """What `store.judging` has found out, by wait and event."""
        self._at_fork: list[Callable[[], object]] = []
        _databases.add(self)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What SQLAlchemy and the driver raise."""
        return (SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error)

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return shown_url(self.url)

    @contextmanager
    def read(self) -> Generator[Connection, None, None]:
        """A connection in a transaction that only reads.

        Raises:
            StoreError: The database failed.
        """
        with self._transaction(writes=False) as connection:
            yield connection

    @contextmanager
    def write(self) -> Generator[Connection, None, None]:
        """A connection in a transaction that writes; it is committed at the end, or rolled back by an error.

        Raises:
            StoreError: The database failed; nothing was written.
        """
        with self._transaction(writes=True) as connection:
            yield connection

    def connect_for_writes(self) -> Connection:
        """A connection outside any transaction, whose transactions write. The caller closes it."""
        return self.engine.connect().execution_options(**{_WRITES: True})

    def insert(self, table: Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def lock_project(self, connection: Connection, project: str) -> None:
        """Makes this transaction the project's only one that changes definitions or publications.

        So versions and publications get their numbers in the order in which they are committed.

        Raises:
            NotFound: There is no such project.
        """
        self._find_project(connection, project, is_locked=True)

    def require_project(self, connection: Connection, project: str) -> None:
        """Refuses a project that is not there.

        Raises:
            NotFound: There is no such project.
        """
        self._find_project(connection, project, is_locked=False)

    def _find_project(self, connection: Connection, project: str, *, is_locked: bool) -> None:
        query = select(tables.projects.c.slug).where(tables.projects.c.slug == project)
        if is_locked:
            query = query.with_for_update(key_share=True)
        if connection.execute(query).first() is None:
            raise NotFound(
                f"there is no project {project!r}; make it with `agentmesh project create {project}`",
                code="no-project",
            )

    def close(self) -> None:
        """Closes the connections that are not in use."""
        self.engine.dispose()

    def at_fork(self, callback: Callable[[], object]) -> None:
        """Has `callback` called in forked children; what it returns is never garbage collected."""
        self._at_fork.append(callback)

    def leave_to_parent(self) -> None:
        """In a forked child: forgets the parent's connections without closing them."""
        _left_to_parent.extend(callback() for callback in self._at_fork)
        _left_to_parent.append(self.engine.pool)
        self.engine.dispose(close=False)

    @contextmanager
    def _transaction(self, *, writes: bool) -> Generator[Connection, None, None]:
        try:
            with (
                self.engine.connect().execution_options(**{_WRITES: writes}) as connection,
                connection.begin(),
            ):
                yield connection
        except self.errors as error:
            raise store_error(error, self.url) from error

    @property
    def is_missing_file(self) -> bool:
        """Whether this is a SQLite file that is not there yet."""
        return self.is_sqlite and not Path(self.url.database or "").exists()

    def make_folder(self) -> None:
        """Makes the folder of a SQLite file.

        Raises:
            StoreError: It cannot be made (code `unreachable`).
        """
        if not self.is_sqlite:
            return
        folder = Path(self.url.database or "").parent
        try:
            make_private(folder)
        except OSError as error:
            raise StoreError(
                f"the folder of the database {self.shown} cannot be made: {error.strerror}",
                code="unreachable",
            ) from None

    def _construct_engine(self) -> Engine:
        if not self.is_sqlite:
            try:
                return create_engine(
                    self.url,
                    json_serializer=to_text,
                    json_deserializer=from_text,
                    pool_pre_ping=True,
                    hide_parameters=True,
                    connect_args={}
                    if "connect_timeout" in self.url.query
                    else {"connect_timeout": CONNECT_TIMEOUT_S},
                )
            except (ImportError, NoSuchModuleError):
                raise StoreError(
                    f"the driver of the database {self.shown} is not installed; "
                    "`pip install psycopg2-binary` and write postgresql://...",
                    code="bad-url",
                ) from None
        engine = create_engine(
            self.url,
            hide_parameters=True,
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False, "isolation_level": None},
        )
        path = Path(self.url.database or "")
        event.listen(engine, "do_connect", lambda *_: _create_sqlite(path))
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine


def _create_sqlite(path: Path) -> None:
    """Makes a database's file readable by its owner alone; SQLite gives its WAL the same mode."""
    with suppress(OSError):  # it is there already, or cannot be made: connecting says why
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _set_up_sqlite(connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
    for pragma in _SQLITE_PRAGMAS:
        connection.execute(pragma)
    if connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
        return
    # Changing the mode needs the file alone, and does not wait for others by itself.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while not _switch_to_wal(connection, last_attempt=time.monotonic() > deadline):
        time.sleep(0.01)


def _switch_to_wal(connection: sqlite3.Connection, *, last_attempt: bool) -> bool:
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.OperationalError as error:
        if last_attempt or "locked" not in str(error):
            raise
        return False
    return True


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later cannot wait for another writer, so writers say it at once.
    writes = connection.get_execution_options().get(_WRITES, False)
    # Past SQLAlchemy, whose own work takes longer than the statement.
    driver = cast("sqlite3.Connection", connection.connection.driver_connection)
    driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
# Closing an inherited connection would end the parent's session, or drop the parent's WAL: so they are kept for ever.
_left_to_parent: list[Any] = []


def _after_fork_in_child() -> None:
    for database in list(_databases):
        database.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
