"""Opening a database: fresh, old, new, unreachable, by several at once; and the schema that migrations make."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import forked
import pytest
from sqlalchemy import Connection, create_engine, insert, inspect, text
from store_samples import a_step, a_vote, a_wait

from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Entry, RunStatus, StepStatus
from agentmesh_dagster.store import open_store, schema_status
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import REVISIONS, metadata, votes, waits
from agentmesh_dagster.store.wait_rows import _values

_EARLIER = "2026-01-31T12:00:00.000000+00:00"


def _set_revision(url: str, revision: str) -> None:
    database = Database(url)
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    database.close()


def _describe(url: str) -> dict[str, Any]:
    engine = create_engine(Database(url).url)
    inspector = inspect(engine)
    tables = {}
    for table in sorted(set(inspector.get_table_names()) - {"alembic_version"}):
        tables[table] = {
            "columns": [
                (column["name"], str(column["type"]), column["nullable"], column["default"])
                for column in inspector.get_columns(table)
            ],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(map(str, inspector.get_foreign_keys(table))),
            "unique": sorted(map(str, inspector.get_unique_constraints(table))),
            "indexes": sorted(map(_index, inspector.get_indexes(table))),
        }
    engine.dispose()
    return tables


def _index(index: Any) -> str:
    options = {name: str(option) for name, option in index.get("dialect_options", {}).items()}
    return str({**index, "dialect_options": options})


def test_the_migrations_make_the_tables_of_the_code(empty_database_url: str, tmp_path: Path):
    open_store(empty_database_url, upgrade=True).close()
    migrated = _describe(empty_database_url)
    if empty_database_url.startswith("sqlite"):
        fresh_url = f"sqlite:///{tmp_path / 'fresh.db'}"
    else:
        # The server has one more empty database to give: the same one, emptied.
        fresh_url = empty_database_url
        database = Database(fresh_url)
        with database.write() as connection:
            metadata.drop_all(connection)
        database.close()
    database = Database(fresh_url)
    with database.write() as connection:
        metadata.create_all(connection)
    database.close()

    assert _describe(fresh_url) == migrated
    assert "steps" in migrated


def test_alembic_finds_no_difference(database_url: str):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    open_store(database_url).close()
    database = Database(database_url)
    with database.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
    database.close()


def test_the_known_revisions_are_alembics():
    from alembic.script import ScriptDirectory

    import agentmesh_dagster.store.schema as schema

    scripts = ScriptDirectory(str(Path(schema.__file__).parent / "migrations"))
    assert tuple(script.revision for script in scripts.walk_revisions())[::-1] == REVISIONS


def _migrate(connection: Connection, revision: str) -> None:
    from alembic import command
    from alembic.config import Config

    import agentmesh_dagster.store.schema as schema

    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _make_revision_1(url: str) -> None:
    """A database as the first release left it, with a project and a run that waits."""
    database = Database(url)
    database.make_folder()
    run = {
        "id": "run-1",
        "project": "default",
        "kind": "workflow",
        "slug": "refunds",
        "version": 1,
        "publication": 1,
        "definition_hash": "abc",
        "mode": "dagster",
        "source": "ui",
        "triggered_by": "ann",
        "status": "waiting",
        "created_at": _EARLIER,
        "suspended_steps": '["gate"]',
        "steps_executed": 2,
        "input_tokens": 3,
        "output_tokens": 4,
        "cost_usd": 0.5,
        "input": '{"b":1}',
    }
    with database.write() as connection:
        _migrate(connection, "0001")
        connection.execute(
            text("INSERT INTO projects (slug, name, created_at) VALUES ('default', 'default', :at)"),
            {"at": _EARLIER},
        )
        names = ", ".join(run)
        values = ", ".join(f":{name}" for name in run)
        connection.execute(text(f"INSERT INTO runs ({names}) VALUES ({values})"), run)
        connection.execute(
            text(
                "INSERT INTO dagster_runs (dagster_run_id, run_id, ordinal, bound_at)"
                " VALUES ('run-1', 'run-1', 0, :at)"
            ),
            {"at": _EARLIER},
        )
    database.close()


def test_a_database_of_the_first_revision_is_upgraded_with_its_rows(empty_database_url: str):
    _make_revision_1(empty_database_url)
    if not empty_database_url.startswith("sqlite"):
        with pytest.raises(StoreError, match="run `agentmesh db upgrade`"):
            open_store(empty_database_url)
    upgrade = None if empty_database_url.startswith("sqlite") else True
    with open_store(empty_database_url, upgrade=upgrade) as store:
        assert store.status().current == REVISIONS[-1]
        run = store.runs.get("run-1")
        assert (run.status, run.input, run.suspended_steps) == (RunStatus.WAITING, {"b": 1}, ("gate",))
        assert (run.steps_executed, run.input_tokens, run.cost_usd) == (2, 3, 0.5)
        assert (run.retries_left, run.dagster_run_ids) == (0, ("run-1",))
        # The rows of before work with the tables of now.
        gate = a_wait()
        asyncio.run(
            store.journal.record([Entry(step=a_step("gate", status=StepStatus.WAITING), opened=(gate,))])
        )
        store.waits.decide("default", gate.id, a_vote())
        claim = store.claims.claim("run-1", reason="gate")
        assert claim is not None
        bound = asyncio.run(store.journal.bind_run(run, "second", claim=claim.id))
        assert bound.dagster_run_ids == ("run-1", "second")


def test_votes_of_before_delegations_are_read(empty_database_url: str):
    _make_revision_1(empty_database_url)
    gate = a_wait(created_at=datetime.fromisoformat(_EARLIER))
    row = {name: value for name, value in _values(gate).items() if name != "delegations"}
    given = a_vote()
    vote = {name: getattr(given, name) for name in ("by", "at", "comment", "decision", "data")}
    database = Database(empty_database_url)
    with database.write() as connection:
        _migrate(connection, "0007")
        connection.execute(insert(waits).values(**row))
        connection.execute(insert(votes).values(wait_id=gate.id, **vote))
    database.close()
    with open_store(empty_database_url, upgrade=True) as store:
        assert store.waits.get("default", gate.id) == gate
        assert store.waits.votes(gate.id) == [given]


def test_runs_that_ended_before_the_second_upgrade_ask_for_nothing(empty_database_url: str):
    _make_revision_1(empty_database_url)
    database = Database(empty_database_url)
    with database.write() as connection:
        connection.execute(
            text("UPDATE runs SET status = 'failed', started_at = :at, finished_at = :at"), {"at": _EARLIER}
        )
    database.close()
    with open_store(empty_database_url, upgrade=True) as store:
        run = store.runs.get("run-1")
        assert (run.endings, run.finalized, run.finalizers, run.worked_ms) == (1, 1, "", 0)
        assert store.claims.poll("default", run.finished_at).ready == ()
        bound = asyncio.run(store.journal.bind_run(run, "second"))
        assert (bound.status, bound.worked_ms) == (RunStatus.RUNNING, 0)


def test_json_that_jsonb_had_changed_comes_back_as_it_was_written(empty_database_url: str):
    _make_revision_1(empty_database_url)
    database = Database(empty_database_url)
    written = {"b": 1e16, "a": -0.0, "nul\0": ["\ud800", {"z": 1, "y": "Grüße"}]}
    # As revision 3 wrote it: SQLite the text, PostgreSQL what JSONB takes, and beside it the text of the column.
    kept = json.dumps({"output": written, "input": {"longer": 1, "b": 2}})
    values = {"input": '{"longer":1,"b":2}', "output": json.dumps(written), "exact": None}
    if not database.is_sqlite:
        values = {"input": '{"b":2,"longer":1}', "output": '{"a":0.0,"b":10000000000000000}', "exact": kept}
    with database.write() as connection:
        _migrate(connection, "0003")
        connection.execute(
            text("UPDATE runs SET input = :input, output = :output, exact = :exact, status = 'failed'"),
            values,
        )
    database.close()
    with open_store(empty_database_url, upgrade=True) as store:
        run = store.runs.get("run-1")
    assert json.dumps(run.output) == json.dumps(written)
    assert json.dumps(run.input) == '{"longer": 1, "b": 2}'


def test_a_fresh_sqlite_is_made_with_its_folder(empty_sqlite_url: str):
    with open_store(empty_sqlite_url) as store:
        assert store.status().is_up_to_date
        assert [project.slug for project in store.catalog.list_projects()] == ["default"]


def test_sqlite_is_opened_with_wal_foreign_keys_and_a_busy_timeout(empty_sqlite_url: str):
    open_store(empty_sqlite_url).close()
    database = Database(empty_sqlite_url)
    with database.read() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
        }
    database.close()
    assert settings == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 10_000, "synchronous": 1}


def test_an_empty_postgresql_is_upgraded_only_when_asked(empty_postgres_url: str):
    with pytest.raises(StoreError, match="run `agentmesh db upgrade`") as refused:
        open_store(empty_postgres_url)
    assert refused.value.code == "database-older"
    before = schema_status(empty_postgres_url)
    assert (before.current, before.is_up_to_date, before.is_newer_than_code) == (None, False, False)

    with open_store(empty_postgres_url, upgrade=True) as store:
        assert store.status().current == REVISIONS[-1]
        assert store.upgrade().is_up_to_date
    open_store(empty_postgres_url).close()


def test_asking_for_the_status_makes_no_file(empty_sqlite_url: str, tmp_path: Path):
    assert schema_status(empty_sqlite_url).current is None
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_sqlite_is_not_upgraded_when_told_not_to(empty_sqlite_url: str):
    with pytest.raises(StoreError) as refused:
        open_store(empty_sqlite_url, upgrade=False)
    assert refused.value.code == "database-older"


@pytest.mark.parametrize("upgrade", [None, True, False])
def test_a_newer_database_is_refused_by_name(database_url: str, upgrade: bool | None):
    open_store(database_url).close()
    _set_revision(database_url, "9999")
    with pytest.raises(StoreError) as refused:
        open_store(database_url, upgrade=upgrade)
    assert refused.value.code == "database-newer"
    assert "'9999'" in refused.value.message
    assert repr(REVISIONS[-1]) in refused.value.message
    assert schema_status(database_url).is_newer_than_code


def test_a_server_that_is_not_there_is_said_in_two_lines_without_the_password():
    with pytest.raises(StoreError) as refused:
        open_store("postgresql://someone:hush-hush@127.0.0.1:1/agentmesh")
    error = refused.value
    assert error.code == "unreachable"
    assert error.retryable
    assert "hush-hush" not in str(error.to_json())
    assert "postgresql://someone:***@127.0.0.1:1/agentmesh" in error.message
    assert "AGENTMESH_DATABASE_URL" in error.message
    assert len(error.message.splitlines()) <= 2


def test_a_folder_in_place_of_a_sqlite_file(tmp_path: Path):
    with pytest.raises(StoreError) as refused:
        open_store(f"sqlite:///{tmp_path}")
    assert refused.value.code == "unreachable"
    assert len(refused.value.message.splitlines()) <= 2


def test_a_file_that_is_no_database(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("not a database, but long enough to have a header " * 20)
    with pytest.raises(StoreError, match="not a database"):
        open_store(f"sqlite:///{tmp_path / 'notes.txt'}")


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "mysql://u:hush-hush@h/d",
        "sqlite://",
        "sqlite:///:memory:",
        "postgresql://u:hush-hush@h:port/d",
    ],
)
def test_a_url_that_cannot_be_used(url: str):
    with pytest.raises(StoreError) as refused:
        open_store(url)
    assert refused.value.code == "bad-url"
    assert "hush-hush" not in refused.value.message


def _open_when_told(url: str, barrier: Any, results: Any) -> None:
    barrier.wait(30)
    try:
        with open_store(url, upgrade=True) as store:
            results.put(store.status().current)
    except Exception as error:  # noqa: BLE001 - the parent shows it
        results.put(repr(error))


def test_four_processes_upgrade_a_fresh_database_at_once(empty_database_url: str):
    context = forked.context()
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_open_when_told, args=(empty_database_url, barrier, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert found == [REVISIONS[-1]] * 4


def test_opening_an_up_to_date_store_is_quick_and_needs_no_alembic(empty_sqlite_url: str):
    open_store(empty_sqlite_url).close()
    program = (
        "import sys, time\n"
        "from agentmesh_dagster.store import open_store\n"
        "begun = time.perf_counter()\n"
        f"open_store({empty_sqlite_url!r}).close()\n"
        "print(time.perf_counter() - begun, 'alembic' in sys.modules)\n"
    )
    took, has_alembic = min(
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    )
    assert has_alembic == "False"
    assert float(took) < 0.1


def test_a_locked_sqlite_is_named_and_may_be_tried_again(
    empty_sqlite_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentmesh_dagster.store.engine.BUSY_TIMEOUT_S", 0.2)
    with open_store(empty_sqlite_url) as store:
        holder = Database(empty_sqlite_url)
        begun = time.monotonic()
        with holder.write(), pytest.raises(StoreError, match="locked") as refused:
            store.catalog.create_project("late")
        assert time.monotonic() - begun < 5
        assert refused.value.code == "busy"
        assert refused.value.retryable
        holder.close()
