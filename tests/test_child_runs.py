"""Runs that other runs start: begun by the gate sensor or by hand, awaited by their end, canceled with their parent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from cli_project import call, run
from gate_project import GateProject, gate_project, launched

from agentmesh_dagster.orchestration.cancellation import cancel_run
from agentmesh_dagster.orchestration.sensors import build_run_status_sensors
from agentmesh_dagster.records import Run, RunSource, RunStatus, WaitStatus
from agentmesh_dagster.testing import publish_documents

CHILD = """\
kind: workflow
slug: child
input_schema: {type: object, required: [n], properties: {n: {type: integer}}}
nodes:
  - {id: start, type: start}
  - {id: end, type: end, config: {output: "{{ input.n * 2 }}"}}
edges:
  - {source: start, target: end}
"""

GATED_CHILD = """\
kind: workflow
slug: child
input_schema: {type: object, required: [n], properties: {n: {type: integer}}}
nodes:
  - {id: start, type: start}
  - {id: review, type: human, config: {title: "Double it?"}}
  - {id: end, type: end, config: {output: "{{ input.n * 2 }}"}}
edges:
  - {source: start, target: review}
  - {source: review, target: end, source_handle: approved}
"""

PARENT = """\
kind: workflow
slug: parent
nodes:
  - {id: start, type: start}
  - {id: call, type: workflow, config: {workflow: child, input: {n: 4}, async: true}}
  - id: wait
    type: webhook
    config: {event: agentmesh.run.ended, key: "{{ steps.call.output.run_id }}"}
  - {id: end, type: end, config: {output: "{{ steps.wait.output }}"}}
edges:
  - {source: start, target: call}
  - {source: call, target: wait}
  - {source: wait, target: end}
"""

# Starts the one above, and waits for nothing.
GRANDPARENT = """\
kind: workflow
slug: grandparent
nodes:
  - {id: start, type: start}
  - {id: call, type: workflow, config: {workflow: parent, async: true}}
  - {id: hold, type: human, config: {title: "Done?"}}
  - {id: end, type: end}
edges:
  - {source: start, target: call}
  - {source: call, target: hold}
  - {source: hold, target: end, source_handle: approved}
"""


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


def published(project: GateProject, *texts: str) -> dg.RepositoryDefinition:
    publish_documents(project.store, "---\n".join(texts))
    return project.load()


def child_of(project: GateProject, run: Run) -> Run:
    (child,) = project.store.runs.children(run.id)
    return child


def dagster_run(project: GateProject, dagster_run_id: str) -> dg.DagsterRun:
    found = project.instance.get_run_by_id(dagster_run_id)
    assert found is not None
    return found


class TestStart:
    def test_the_sensor_begins_it_once_and_its_end_answers_its_parent(
        self, database_url: str, tmp_path: Path
    ):
        with gate_project(database_url, tmp_path / "home") as project:
            location = published(project, CHILD, PARENT)
            parent = project.waiting(location, job="parent", tags={"user": "ann"})
            child = child_of(project, parent)
            assert (child.status, child.dagster_run_ids) == (RunStatus.PENDING, ())
            assert (child.source, child.parent_step_key) == (RunSource.WORKFLOW, "call")

            (request,) = project.tick(location).requests

            assert (request.job_name, request.run_config) == ("child", {"n": 4})
            assert request.run_key == request.tags["agentmesh/claim"]
            assert request.tags["agentmesh/run_id"] == child.id
            assert request.tags["agentmesh/parent_run_id"] == parent.id
            # AgentMesh counts the retries of a run that it launched.
            assert request.tags["dagster/max_retries"] == "0"
            assert "dagster/parent_run_id" not in request.tags
            assert project.tick(location).requests == []
            ended = project.run_request(location, request)
            assert (ended.id, ended.status, ended.output) == (child.id, RunStatus.SUCCEEDED, 8)
            assert len(ended.dagster_run_ids) == 1
            assert ended.dagster_run_ids[0] != child.id

            (request,) = project.tick(location).requests
            assert request.tags["agentmesh/run_id"] == parent.id
            ended = project.run_request(location, request)
            assert ended.status is RunStatus.SUCCEEDED
            assert ended.output == {
                "run_id": child.id,
                "status": "succeeded",
                "output": 8,
                "error": None,
            }
            assert project.tick(location).requests == []

    def test_it_goes_on_as_the_group_of_its_first_dagster_run(self, project: GateProject):
        location = published(project, GATED_CHILD, PARENT)
        parent = project.waiting(location, job="parent")
        (request,) = project.tick(location).requests
        child = project.run_request(location, request)
        assert child.status is RunStatus.WAITING
        project.decide(child)

        (request,) = project.tick(location).requests

        assert (request.job_name, request.run_config) == ("child", {"n": 4})
        first = child.dagster_run_ids[0]
        assert request.tags["dagster/parent_run_id"] == request.tags["dagster/root_run_id"] == first
        assert request.tags["agentmesh/parent_run_id"] == parent.id
        ended = project.run_request(location, request)
        assert (ended.id, ended.output) == (child.id, 8)
        # A copy of its Dagster run is a run of its own, and nobody's child.
        copy = project.run(location, "child", request.tags, {"n": 1})
        assert copy.id not in (child.id, parent.id)
        assert copy.parent_run_id is None

    def test_it_is_begun_as_what_was_live_when_it_was_started(self, project: GateProject):
        location = published(project, CHILD, PARENT)
        child = child_of(project, project.waiting(location, job="parent"))
        publish_documents(project.store, CHILD.replace("n * 2", "n * 3"))
        assert "not loaded" not in project.tick(project.load()).skipped
        project.clock.advance(61)

        location = project.load()
        (request,) = project.tick(location).requests

        assert request.job_name == f"child__p{child.publication}"
        assert project.run_request(location, request).output == 8

    def test_one_of_another_dagster_instance_is_left_to_it(self, project: GateProject, tmp_path: Path):
        location = published(project, CHILD, PARENT)
        parent = project.waiting(location, job="parent")
        with dg.DagsterInstance.local_temp(str(tmp_path)) as other:
            tick = GateProject(project.agentmesh, other).tick(location)
        assert tick.requests == []
        assert f"run {child_of(project, parent).id}: the run that started it is not in" in tick.skipped
        assert len(project.tick(location).requests) == 1

    def test_a_failed_one_is_told_to_its_parent(self, project: GateProject):
        location = published(project, CHILD.replace("n * 2", "n / 0"), PARENT)
        parent = project.waiting(location, job="parent")
        (request,) = project.tick(location).requests
        child = project.run_request(location, request)
        assert child.status is RunStatus.FAILED
        (request,) = project.tick(location).requests
        ended = project.run_request(location, request)
        assert (ended.id, ended.output["status"]) == (parent.id, "failed")
        assert "division" in ended.output["error"]["message"]

    def test_it_is_of_what_is_published_then_and_not_of_what_its_parent_was_published_with(
        self, project: GateProject
    ):
        published(project, CHILD, PARENT)
        newer = CHILD.replace("required: [n]", "required: [m]").replace(
            "n: {type: integer}", "n: {type: integer}, m: {type: integer, default: 5}"
        )
        closing = "finally: {nodes: [{id: tidy, type: transform, config: {output: 1}}]}\n"
        settings = "settings: {timeout_s: 60, timeout_includes_waiting: true}\n"
        (live,) = publish_documents(project.store, newer.replace("n * 2", "m * 2") + closing + settings)
        location = project.load()

        child = child_of(project, project.waiting(location, job="parent"))

        assert (child.publication, child.version, child.input) == (live.id, 2, {"n": 4, "m": 5})
        assert child.finalizers == "always"
        assert child.deadline_at is not None

    def test_one_that_is_published_no_more_is_not_started(self, project: GateProject):
        location = published(project, CHILD, PARENT)
        project.store.publications.unpublish("default", "workflow", "parent", by="ann")
        project.store.publications.unpublish("default", "workflow", "child", by="ann")
        run = project.run(location, "parent")
        assert (run.status, run.error["code"]) == (RunStatus.FAILED, "not-published")
        assert project.store.runs.children(run.id) == []


class TestRetries:
    """A run that another one started has the retries of its Dagster instance, and tells its end after the last."""

    def test_its_parent_hears_of_the_last_end_alone(self, sqlite_url: str, tmp_path: Path):
        with gate_project(
            sqlite_url, tmp_path / "home", "run_retries: {enabled: true, max_retries: 1}\n"
        ) as project:
            location = published(project, CHILD.replace("n * 2", "n / 0"), PARENT)
            parent = project.waiting(location, job="parent", tags={"dagster/max_retries": "0"})
            (request,) = project.tick(location).requests
            child = project.run_request(location, request)
            assert (child.status, child.retries_left) == (RunStatus.FAILED, 1)
            assert project.gate(parent).status is WaitStatus.OPEN

            (request,) = project.tick(location).requests

            assert request.tags["agentmesh/run_id"] == child.id
            again = project.run_request(location, request)
            assert (again.id, again.status, again.retries_left) == (child.id, RunStatus.FAILED, 0)
            (request,) = project.tick(location).requests
            ended = project.run_request(location, request)
            assert (ended.id, ended.output["status"]) == (parent.id, "failed")

    def test_its_parent_hears_of_a_failure_that_may_not_be_retried(self, sqlite_url: str, tmp_path: Path):
        settings = "run_retries: {enabled: true, max_retries: 1, retry_on_asset_or_op_failure: false}\n"
        with gate_project(sqlite_url, tmp_path / "home", settings) as project:
            location = published(project, CHILD.replace("n * 2", "n / 0"), PARENT)
            parent = project.waiting(location, job="parent", tags={"dagster/max_retries": "0"})
            (request,) = project.tick(location).requests
            child = project.run_request(location, request)
            assert (child.status, child.retries_left) == (RunStatus.FAILED, 1)
            assert project.gate(parent).status is WaitStatus.OPEN

            # The sensor finds that it is not to be retried, and says so.
            assert project.tick(location).requests == []
            (request,) = project.tick(location).requests
            ended = project.run_request(location, request)
            assert (ended.id, ended.output["status"]) == (parent.id, "failed")


class TestCancel:
    def test_what_nobody_works_on_is_canceled_with_its_parent_at_every_depth(self, project: GateProject):
        location = published(project, GATED_CHILD, PARENT, GRANDPARENT)
        top = project.waiting(location, job="grandparent")
        (request,) = project.tick(location).requests
        middle = project.run_request(location, request)
        bottom = child_of(project, middle)
        assert (middle.status, bottom.status) == (RunStatus.WAITING, RunStatus.PENDING)

        done = cancel_run(project.store, project.instance, top, by="bob")

        assert [each.id for each in done.children.runs] == [middle.id, bottom.id]
        assert {each.status for each in (done.run, *done.children.runs)} == {RunStatus.CANCELED}
        for each in (top, middle, bottom):
            assert project.store.runs.get(each.id).status is RunStatus.CANCELED
            assert project.store.waits.list("default", run_id=each.id, statuses=(WaitStatus.OPEN,)) == []
            (audit,) = project.store.audit.list("default", entity=f"run/{each.id}")
            assert (audit.action, audit.actor) == ("cancel", "bob")
        assert project.tick(location).requests == []

    def test_one_that_was_on_its_way_does_not_begin(self, project: GateProject):
        location = published(project, CHILD, PARENT)
        parent = project.waiting(location, job="parent")
        child = child_of(project, parent)
        (request,) = project.tick(location).requests

        cancel_run(project.store, project.instance, parent, by="bob")

        late = location.get_job("child").execute_in_process(
            instance=project.instance,
            tags=dict(request.tags),
            run_config=dict(request.run_config),
            raise_on_error=False,
        )
        assert not late.success
        assert project.store.runs.get(child.id).status is RunStatus.CANCELED
        assert len(project.store.runs.list("default")) == 2

    def heard(self, project: GateProject, canceled: dg.DagsterRun) -> str:
        """What the sensor says that hears of canceled Dagster runs."""
        (_, sensor) = build_run_status_sensors(project.agentmesh)
        context = dg.build_run_status_sensor_context(
            sensor_name=sensor.name,
            dagster_event=dg.DagsterEvent(
                event_type_value=dg.DagsterEventType.RUN_CANCELED.value, job_name=canceled.job_name
            ),
            dagster_instance=project.instance,
            dagster_run=canceled,
        )
        return sensor(context).skip_message

    def test_a_parent_that_is_canceled_in_dagster_takes_them_with_it(self, project: GateProject):
        location = published(project, CHILD, PARENT)
        parent = project.waiting(location, job="parent")
        child = child_of(project, parent)
        # Terminated in the UI while it worked: its row says so, and knows of no children.
        project.store.runs.set_status(parent.id, (RunStatus.WAITING,), RunStatus.CANCELED)

        self.heard(project, dagster_run(project, parent.id))

        assert project.store.runs.get(child.id).status is RunStatus.CANCELED

    def test_one_whose_first_dagster_run_is_canceled_before_it_began(self, project: GateProject):
        location = published(project, CHILD, PARENT)
        child = child_of(project, project.waiting(location, job="parent"))
        (request,) = project.tick(location).requests
        queued = launched(project, request, dg.DagsterRunStatus.QUEUED)
        project.instance.report_run_canceled(queued)

        said = self.heard(project, dagster_run(project, queued.run_id))

        assert f"run {child.id} is canceled: its first Dagster run" in said
        assert project.store.runs.get(child.id).status is RunStatus.CANCELED


class TestCommands:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        Path("docs").mkdir()
        for name, text in (("child", CHILD), ("parent", PARENT)):
            Path(f"docs/{name}.yaml").write_text(text)
        done = run("import", "docs", "--publish")
        assert done.code == 0, done.err
        return tmp_path

    def test_without_a_daemon(self, folder: Path, capsys: Any):
        parent = run("run", "workflow", "parent", "--json").json
        assert parent["status"] == "waiting"
        shown = call(capsys, "runs", "show", parent["run_id"], "--json").json
        (child,) = shown["children"]
        assert (child["slug"], child["status"], child["parent_step_key"]) == ("child", "pending", "call")
        assert f"started run {child['run_id']}" in call(capsys, "runs", "show", parent["run_id"]).out
        of_child = call(capsys, "runs", "show", child["run_id"]).out
        assert f"started by run  {parent['run_id']} (step call)" in of_child

        done = run("runs", "resume", child["run_id"], "--json")
        assert done.code == 0, done.err
        assert (done.json["run_id"], done.json["output"]) == (child["run_id"], 8)
        done = run("runs", "resume", parent["run_id"], "--json")
        assert done.code == 0, done.err
        assert done.json["output"]["output"] == 8

    def test_one_that_was_canceled_before_it_began_is_begun_by_a_retry(self, folder: Path, capsys: Any):
        parent = run("run", "workflow", "parent", "--json").json["run_id"]
        done = call(capsys, "runs", "cancel", parent, "--json")
        assert done.code == 0, done.err
        (child,) = done.json["children"]
        assert child["status"] == "canceled"
        done = run("runs", "retry", child["run_id"], "--json")
        assert done.code == 0, done.err
        assert (done.json["status"], done.json["output"]) == ("succeeded", 8)
