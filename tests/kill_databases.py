"""Databases of the kill matrix: made once with the workflow in them, and copied for each run."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from store_fixtures import _TEMPLATE, _execute

from agentmesh_dagster.store import open_store


class Databases(Protocol):
    """Makes databases, and copies of them."""

    name: str

    def make(self, name: str) -> str:
        """An empty database with AgentMesh's tables; its URL."""
        ...

    def copied(self, name: str) -> Any:
        """A context manager of the URL of a copy, which is dropped at the end."""
        ...


class SqliteDatabases:
    """Files in a folder."""

    name = "SQLite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, name: str) -> str:
        url = f"sqlite:///{self._folder / name}.db"
        open_store(url).close()
        return url

    @contextmanager
    def copied(self, name: str) -> Iterator[str]:
        copy = self._folder / uuid.uuid4().hex
        copy.mkdir()
        shutil.copy(self._folder / f"{name}.db", copy / "agentmesh.db")
        try:
            yield f"sqlite:///{copy / 'agentmesh.db'}"
        finally:
            shutil.rmtree(copy)


class PostgresDatabases:
    """On the server of the test session."""

    name = "PostgreSQL"

    def __init__(self, server: Callable[[str], str]) -> None:
        self._server = server
        self._made: dict[str, str] = {}

    def make(self, name: str) -> str:
        self._made[name] = database = f"kill_{uuid.uuid4().hex}"
        _execute(self._server("postgres"), f"CREATE DATABASE {database} TEMPLATE {_TEMPLATE}")
        return self._server(database)

    def make_empty(self, name: str) -> str:
        """A database without tables; its URL."""
        self._made[name] = database = f"kill_{uuid.uuid4().hex}"
        _execute(self._server("postgres"), f"CREATE DATABASE {database} TEMPLATE template0")
        return self._server(database)

    @contextmanager
    def copied(self, name: str) -> Iterator[str]:
        database = f"kill_{uuid.uuid4().hex}"
        _execute(self._server("postgres"), f"CREATE DATABASE {database} TEMPLATE {self._made[name]}")
        try:
            yield self._server(database)
        finally:
            _execute(self._server("postgres"), f"DROP DATABASE {database} WITH (FORCE)")

    def close(self) -> None:
        for database in self._made.values():
            _execute(self._server("postgres"), f"DROP DATABASE {database} WITH (FORCE)")
