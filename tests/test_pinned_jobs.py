"""Jobs of older publications: which ones a code location offers, to whom, and that runs end as what they began as."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import dagster as dg
import pytest
from dagster_server import DevServer, Project, wait_until
from gate_project import GATED, UNGATED, GateProject, gate_project

from agentmesh_dagster import build_code_location
from agentmesh_dagster.constants import METADATA_PINNED, METADATA_PUBLICATION
from agentmesh_dagster.orchestration.location_internals import hand_over
from agentmesh_dagster.records import Run, RunStatus, Vote, WaitStatus
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.store import Store


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


def names(location: dg.RepositoryDefinition) -> list[str]:
    """The jobs of workflows."""
    own = ("agentmesh_decide", "agentmesh_finalize")
    return sorted(name for name in location.job_names if name not in own)


def test_a_run_that_waits_ends_as_the_version_that_it_began_as_though_the_next_one_has_no_gate(
    project: GateProject,
):
    first = project.publish(version=1)
    run = project.waiting(project.load())
    project.publish(version=2, text=UNGATED)

    location = project.load()
    assert names(location) == ["gated", f"gated__p{first}"]
    project.decide(run)
    (request,) = project.tick(location).requests
    assert request.job_name == f"gated__p{first}"
    assert request.tags["agentmesh/publication"] == str(first)
    ended = project.run_request(location, request)

    assert (ended.id, ended.status, ended.output) == (run.id, RunStatus.SUCCEEDED, {"version": 1})
    assert names(project.load()) == ["gated"]
    assert project.run(location).output == {"version": 2}


def test_no_job_is_pinned_that_the_live_one_can_stand_for(project: GateProject):
    first = project.store.publications.get(project.publish(version=1))
    run = project.waiting(project.load())
    project.publish(version=2)
    # Version 1 is live again, under a number of its own.
    closure = Closure.model_validate(first.closure)
    again = project.store.publications.publish("default", "workflow", "gated", 1, closure, by="test")
    assert again.id != first.id
    location = project.load()
    assert names(location) == ["gated"]
    project.decide(run)
    (request,) = project.tick(location).requests
    ended = project.run_request(location, request)
    assert (ended.output, ended.publication) == ({"version": 1}, first.id)


def test_each_publication_in_use_has_a_job(project: GateProject):
    pinned: list[str] = []
    for version in (1, 2):
        publication = project.publish(version=version)
        project.waiting(project.load())
        pinned.append(f"gated__p{publication}")
    project.publish(version=3)
    location = project.load()
    assert names(location) == ["gated", *pinned]
    sensor = location.get_sensor_def("agentmesh_gates")
    assert sorted(target.job_name for target in sensor.targets) == ["agentmesh_finalize", "gated", *pinned]


def test_what_is_withdrawn_stays_for_the_runs_that_wait(project: GateProject):
    publication = project.publish()
    run = project.waiting(project.load())
    project.store.publications.unpublish("default", "workflow", "gated", by="test")
    location = project.load()
    assert names(location) == [f"gated__p{publication}"]
    project.decide(run)
    (request,) = project.tick(location).requests
    assert project.run_request(location, request).status is RunStatus.SUCCEEDED


def test_the_job_of_a_failed_run_stays_for_a_while(project: GateProject):
    publication = project.publish(more="timeout: 1h, on_timeout: fail")
    run = project.waiting(project.load())
    project.clock.advance(4000)
    (request,) = project.tick(project.load()).requests
    assert project.run_request(project.load(), request).status is RunStatus.FAILED
    project.publish(version=2)
    assert names(project.load()) == ["gated", f"gated__p{publication}"]
    assert names(build_code_location(project.agentmesh, pin_retention_d=0)) == ["gated"]
    assert project.store.runs.get(run.id).status is RunStatus.FAILED


def test_a_run_worker_offers_what_the_code_server_did(project: GateProject):
    first = project.publish(version=1)
    run = project.waiting(project.load())
    second = project.publish(version=2)
    handed = {METADATA_PUBLICATION: str(second), METADATA_PINNED: f"gated__p{first}"}
    # Meanwhile the run has ended, and something else is live.
    project.decide(run)
    (request,) = project.tick(project.load()).requests
    project.run_request(project.load(), request)
    project.publish(version=3)
    assert names(project.load()) == ["gated"]

    hand_over(handed)
    location = project.load()

    assert names(location) == ["gated", f"gated__p{first}"]
    assert location.get_job(f"gated__p{first}").metadata["agentmesh/version"].value == 1
    assert location.get_job("gated").metadata["agentmesh/version"].value == 2
    data = location.repository_load_data
    assert data is not None
    assert {key: value.value for key, value in data.reconstruction_metadata.items()} == handed


def test_a_command_that_loads_one_publication_is_offered_no_pinned_jobs(project: GateProject):
    first = project.publish(version=1)
    project.waiting(project.load())
    project.publish(version=2)
    hand_over({METADATA_PUBLICATION: str(first)})
    assert names(project.load()) == ["gated"]


def test_a_job_of_another_definition_refuses_the_run_and_names_the_pinned_job(project: GateProject):
    first = project.publish(version=1)
    run = project.waiting(project.load())
    project.publish(version=2)
    location = project.load()
    project.decide(run)
    (request,) = project.tick(location).requests
    result = location.get_job("gated").execute_in_process(
        instance=project.instance, tags=dict(request.tags), raise_on_error=False
    )
    assert not result.success
    failure = result.failure_data_for_node("start")
    assert failure is not None
    assert f"gated__p{first}" in str(failure.user_failure_data)


def test_publications_in_use_are_those_of_unfinished_and_lately_failed_runs(store: Store):
    now = datetime.now(timezone.utc)
    for number, status in enumerate(RunStatus, 1):
        for copy in range(2):
            run = Run(
                id=f"run-{number}-{copy}",
                project="default",
                kind="workflow",
                slug="sample",
                version=1,
                publication=number,
                definition_hash=f"hash-{number}",
                status=RunStatus.RUNNING,
                dagster_run_ids=(f"run-{number}-{copy}",),
            )
            run_on_loop(store.journal.bind_run(run, run.id))
            if status is not RunStatus.RUNNING:
                store.runs.set_status(run.id, [RunStatus.RUNNING], status, at=now)

    def pinned(failed_since: datetime) -> list[int]:
        return [row[0] for row in store.runs.pinned_publications("default", failed_since=failed_since)]

    numbers = {status: number for number, status in enumerate(RunStatus, 1)}
    unfinished = [numbers[status] for status in RunStatus if not status.is_final]
    assert pinned(now + timedelta(seconds=1)) == unfinished
    assert pinned(now) == sorted([*unfinished, numbers[RunStatus.FAILED]])
    found = store.runs.pinned_publications("default", failed_since=now)
    assert found[0] == (unfinished[0], "sample", "workflow", f"hash-{unfinished[0]}")
    assert store.runs.pinned_publications("nobody", failed_since=now) == []


def text(version: int) -> str:
    return GATED.format(version=version, more="")


def waiting(store: Store, run_id: str) -> None:
    wait_until("it waits", lambda: store.runs.get(run_id).status is RunStatus.WAITING)


def approve(store: Store, run_id: str) -> None:
    (wait,) = store.waits.list("default", run_id=run_id, statuses=(WaitStatus.OPEN,))
    vote = Vote(by="ann", decision="approved", at=datetime.now(timezone.utc))
    store.waits.decide("default", wait.id, vote)


def ended(store: Store, run_id: str) -> Run:
    wait_until("it ends", lambda: store.runs.get(run_id).status.is_final, 120)
    return store.runs.get(run_id)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.scaffolded(tmp_path_factory.mktemp("pinned") / "project")


def test_under_the_daemon_runs_end_as_they_began_across_publishing_and_restarts(home: Project):
    home.publish("gated", text(1))
    with home.open_store() as store:
        first = store.publications.newest_id("default")
        with DevServer(home) as server:
            run_id = server.launch("gated", {})
            assert server.wait_for_end(run_id) == "SUCCESS"
            waiting(store, run_id)
            server.stop()
            # Version 2 comes while nothing runs, and the decision too.
            home.publish("gated", text(2))
            approve(store, run_id)
            server.start()
            run = ended(store, run_id)
            assert (run.status, run.output) == (RunStatus.SUCCEEDED, {"version": 1})
            group = "query G($id: ID!) { runGroupOrError(runId: $id) { ... on RunGroup { runs { runId } } } }"
            runs = server.query(group, id=run_id)["runGroupOrError"]["runs"]
            assert [each["runId"] for each in runs] == list(run.dagster_run_ids)
            name = "query N($id: ID!) { runOrError(runId: $id) { ... on Run { pipelineName } } }"
            jobs = [server.query(name, id=each)["runOrError"]["pipelineName"] for each in run.dagster_run_ids]
            assert jobs == ["gated", f"gated__p{first}"]

            # Published behind the code server's back, and waiting: the sensor has the location loaded anew.
            home.publish("gated", text(3))
            executed = json.loads(home.agentmesh("run", "workflow", "gated", "--json"))
            assert executed["status"] == "waiting"
            approve(store, executed["run_id"])
            run = ended(store, executed["run_id"])
            assert (run.status, run.output) == (RunStatus.SUCCEEDED, {"version": 3})
            said = server.log.read_text()
            assert "is not loaded yet" in said
            assert "Sensor tick caught an error" not in said


def test_dagster_executes_a_pinned_job_by_its_name(home: Project):
    home.publish("lasting", text(1).replace("slug: gated", "slug: lasting"))
    with home.open_store() as store:
        publication = store.publications.newest_id("default")
        done = json.loads(home.agentmesh("run", "workflow", "lasting", "--json"))
        assert done["status"] == "waiting"
        home.publish("lasting", text(2).replace("slug: gated", "slug: lasting"))
        before = {run.id for run in store.runs.list("default", limit=None)}
        options = ("-f", "definitions/code_location.py", "-j", f"lasting__p{publication}")
        home.environment["DAGSTER_HOME"] = str(home.folder / ".agentmesh")

        executed = home.command("dagster", "job", "execute", *options)

        assert executed.returncode == 0, executed.stdout + executed.stderr
        (run,) = [run for run in store.runs.list("default", limit=None) if run.id not in before]
        assert (run.version, run.publication, run.status) == (1, publication, RunStatus.WAITING)
