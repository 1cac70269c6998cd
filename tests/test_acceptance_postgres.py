"""A project whose Dagster storage and AgentMesh database are both PostgreSQL."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest
from dagster_server import DevServer, Project, wait_until

from agentmesh_dagster.records import RunStatus


@pytest.fixture
def databases(postgres_server: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Two empty databases: Dagster's and AgentMesh's."""
    names = [f"{purpose}_{uuid.uuid4().hex}" for purpose in ("dagster", "agentmesh")]

    def execute(statement: str) -> None:
        connection = psycopg2.connect(postgres_server("postgres"))
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
        finally:
            connection.close()

    for name in names:
        execute(f"CREATE DATABASE {name}")
    yield postgres_server(names[0]), postgres_server(names[1])
    for name in names:
        execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_postgres_project_from_init_to_the_dagster_ui(databases: tuple[str, str], tmp_path: Path):
    dagster_url, agentmesh_url = databases
    project = Project.scaffolded(
        tmp_path / "project",
        "--postgres",
        DAGSTER_POSTGRES_URL=dagster_url.replace("postgresql://", "postgresql+psycopg2://"),
        AGENTMESH_DATABASE_URL=agentmesh_url,
    )

    # Unlike the embedded SQLite, a PostgreSQL database is upgraded when somebody says so.
    early = project.command("agentmesh_dagster", "import", "workflows", "--publish")
    assert early.returncode != 0
    assert "agentmesh db upgrade" in early.stderr
    assert project.command("agentmesh_dagster", "db", "status").returncode == 1
    project.agentmesh("db", "upgrade")
    assert "up to date" in project.agentmesh("db", "status")

    project.agentmesh("import", "workflows", "--publish")
    ran = json.loads(project.agentmesh("run", "workflow", "hello", "--input", '{"name": "Ada"}', "--json"))
    assert ran["status"] == "succeeded"
    with DevServer(project) as server:
        # What the command ran stands in the same history.
        assert server.status(ran["run_id"]) == "SUCCESS"
        run_id = server.launch("hello", {"name": "Grace"})
        assert server.wait_for_end(run_id) == "SUCCESS"
        with project.open_store() as store:
            wait_until("the run row ends", lambda: store.runs.get(run_id).status is RunStatus.SUCCEEDED)
            assert store.runs.get(run_id).output == {"greeting": "Say hello to Grace."}
        states = server.sensors().values()
        assert not [tick for state in states for tick in state["ticks"] if tick["status"] == "FAILURE"]
    # Nothing fell back to files.
    assert sorted(path.suffix for path in (project.folder / ".agentmesh").rglob("*.db")) == []
