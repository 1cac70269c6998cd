"""Runs whose workers were killed, stopped or started twice: real processes, launched as the daemon launches them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import workflow_functions
from dagster._core.execution.api import create_execution_plan
from dagster_server import is_alive, parent_of, wait_until
from store_samples import a_run, a_step, a_wait, end_leases
from workflow_project import TESTS, Project

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.orchestration.launcher import WarmRunLauncher
from agentmesh_dagster.orchestration.reconcile import reconcile, store_launch
from agentmesh_dagster.orchestration.sensors import build_run_status_sensors
from agentmesh_dagster.orchestration.worker_identity import WorkerIdentity
from agentmesh_dagster.records import Entry, RunStatus, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.loop import run_on_loop

Status = dg.DagsterRunStatus

pytestmark = pytest.mark.timeout(180)

HOME = """\
telemetry: {enabled: false}
run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}
run_launcher:
  module: agentmesh_dagster.orchestration.launcher
  class: WarmRunLauncher
  config: {preload: []}
"""


class Launched(Project):
    """A project whose runs are launched in processes of their own."""

    def create(self, slug: str, *, steps: list[str] | None = None, **fields: Any) -> str:
        job = self.job(slug)
        definition = job.get_definition()
        # As a launch from the UI has them.
        tags = {**definition.tags, **fields.pop("tags", {})}
        run = self.instance.create_run_for_job(
            definition,
            execution_plan=create_execution_plan(job, step_keys_to_execute=steps),
            job_code_origin=job.get_python_origin(),
            tags=tags,
            **fields,
        )
        return run.run_id

    def launch(self, run_id: str) -> None:
        self.instance.launch_run(run_id, workspace=None)  # pyright: ignore[reportArgumentType] - it uses none

    def dagster_run(self, run_id: str) -> dg.DagsterRun:
        found = self.instance.get_run_by_id(run_id)
        assert found is not None
        return found

    def worker(self, run_id: str) -> int | None:
        found = WorkerIdentity.of_run(run_id, self.dagster_run(run_id).tags)
        return None if found is None else found.pid

    def says(self, run_id: str, words: str) -> bool:
        return any(words in entry.message for entry in self.instance.all_logs(run_id))

    def ends(self, run_id: str) -> dg.DagsterRunStatus:
        wait_until(f"run {run_id} has ended", lambda: self.dagster_run(run_id).is_finished, 90)
        return self.dagster_run(run_id).status


@pytest.fixture
def project(tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    home = tmp_path / "dagster-home"
    home.mkdir()
    (home / "dagster.yaml").write_text(HOME)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with dg.DagsterInstance.get() as instance:
        yield Launched(tmp_path, sqlite_url, instance)
        workflow_functions.note("go")
        launcher = instance.run_launcher
        assert isinstance(launcher, WarmRunLauncher)
        launcher.join(60)


def code(name: str, function: str, /, **input: Any) -> dict[str, Any]:
    return {
        "id": name,
        "type": "code",
        "config": {"function": f"workflow_functions:{function}", "input": input},
    }


def chain(*nodes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    all_nodes = [{"id": "start", "type": "start"}, *nodes, {"id": "end", "type": "end"}]
    edges = [{"source": above["id"], "target": below["id"]} for above, below in pairwise(all_nodes)]
    return {"kind": "workflow", "slug": "sample", "nodes": all_nodes, "edges": edges, **fields}


HOLD = code("hold", "wait_for_note", name="go", then="held", timeout_s=100)
EFFECT = code("effect", "note", name="effect")


@pytest.mark.parametrize("executor", ["threads", "multiprocess"])
def test_of_two_processes_that_are_told_to_execute_one_run_the_second_does_nothing(
    project: Launched, executor: str
):
    """As two daemons on one project launch a queued run."""
    project.publish(chain(HOLD, EFFECT, settings={"executor": executor}))
    run_id = project.create("sample")
    project.launch(run_id)
    project.launch(run_id)
    refused = "another process is executing the Dagster run"
    wait_until("the second process is refused", lambda: project.says(run_id, refused), 90)
    wait_until("the first one works", lambda: "held begins" in workflow_functions.notes(), 90)
    workflow_functions.note("go")

    assert project.ends(run_id) is Status.SUCCESS
    assert sorted(workflow_functions.notes()) == ["effect", "go", "held", "held begins"]
    assert project.run_row(run_id).status is RunStatus.SUCCEEDED
    types = [type_ for type_, _ in project.events(run_id)]
    assert (types.count("run.started"), types.count("run.completed")) == (1, 1)
    assert "run.failed" not in types
    assert not project.says(run_id, "Marking the run as failed")
    wait_until("the lease is given back", lambda: project.store.runs.lease(run_id) is None)


def test_a_worker_that_was_stopped_for_longer_than_its_lease_writes_nothing_when_it_goes_on(
    project: Launched,
):
    project.publish(chain(HOLD, EFFECT))
    run_id = project.create("sample")
    project.launch(run_id)
    wait_until("the run works", lambda: "held begins" in workflow_functions.notes(), 90)
    worker = project.worker(run_id)
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    try:
        end_leases(project.store)
        (correction,) = reconcile(project.store, project.instance, "default")
        assert correction.status is RunStatus.FAILED
        before = (
            project.events(run_id),
            project.store.runs.steps(run_id),
            project.run_row(run_id),
        )
        workflow_functions.note("go")
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until("the worker has ended", lambda: not is_alive(worker), 60)

    assert (project.events(run_id), project.store.runs.steps(run_id), project.run_row(run_id)) == before
    assert "effect" not in workflow_functions.notes()
    assert project.store.runs.lease(run_id) is None


def kill_while_starting(project: Launched, run_id: str, block: Path, *, with_server: bool) -> None:
    """Launches a run, and kills its worker while it loads its code; the warm server, which would report it, before."""
    block.touch()
    project.launch(run_id)
    worker = wait_until("the worker is there", lambda: project.worker(run_id), 90)
    if with_server:
        os.kill(parent_of(worker), signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_until("the worker is gone", lambda: not is_alive(worker))
    block.unlink()


def blocked(project: Launched) -> Path:
    """Makes the code location wait while a file is there."""
    block = project.folder / "block"
    [*_, file] = sorted((project.folder / "definitions").glob("*.py"))
    lines = f"import pathlib, time\nwhile pathlib.Path({str(block)!r}).exists():\n    time.sleep(0.02)\n"
    file.write_text(lines + file.read_text())
    return block


def retry_of(project: Launched, parent: str) -> dg.ExecuteJobResult:
    """What Dagster's own retry of a Dagster run does."""
    return project.execute(
        "sample",
        project.dagster_run(parent).run_config,
        tags={"dagster/retry_number": "1", "dagster/max_retries": "2"},
        reexecution_options=dg.ReexecutionOptions(parent_run_id=parent),
    )


def test_a_run_killed_with_the_warm_server_before_it_had_begun_is_reported_and_retried_under_its_id(
    project: Launched,
):
    project.publish(chain(EFFECT, input_schema={"type": "object", "properties": {"n": {"type": "integer"}}}))
    block = blocked(project)
    run_id = project.create("sample", run_config={"n": 7}, tags={"dagster/max_retries": "2"})
    kill_while_starting(project, run_id, block, with_server=True)
    assert project.dagster_run(run_id).status is Status.STARTING

    (correction,) = reconcile(project.store, project.instance, "default")

    assert (correction.run_id, correction.status) == (run_id, RunStatus.FAILED)
    assert project.dagster_run(run_id).status is Status.FAILURE
    run = project.run_row(run_id)
    assert (run.status, run.input) == (RunStatus.FAILED, {"n": 7})
    assert run.error["code"] == "worker-lost"
    assert "before it had begun" in run.error["message"]
    assert reconcile(project.store, project.instance, "default") == []

    retried = retry_of(project, run_id)

    assert retried.success
    [again] = project.store.runs.list("default")
    assert (again.id, again.status) == (run_id, RunStatus.SUCCEEDED)
    assert again.dagster_run_ids == (run_id, retried.run_id)


def test_a_launch_that_never_bound_keeps_its_id_though_nobody_has_given_it_a_row(project: Launched):
    """The warm server reports the death at once, and Dagster may retry the run before any sensor has looked."""
    project.publish(chain(EFFECT))
    block = blocked(project)
    run_id = project.create("sample", tags={"dagster/max_retries": "2"})
    kill_while_starting(project, run_id, block, with_server=False)
    assert project.ends(run_id) is Status.FAILURE
    assert project.store.runs.list("default") == []

    retried = retry_of(project, run_id)

    [run] = project.store.runs.list("default")
    assert (run.id, run.status, run.dagster_run_ids) == (run_id, RunStatus.SUCCEEDED, (retried.run_id,))
    assert run.retries_left == 1


def test_the_failed_sensor_gives_a_launch_that_never_began_a_row(project: Launched):
    project.publish(chain(EFFECT))
    run_id = project.create("sample")
    dagster_run = project.dagster_run(run_id)
    project.instance.report_run_failed(dagster_run, "its process was killed before it had begun")
    sensor, _ = build_run_status_sensors(project.agentmesh)
    context = dg.build_run_status_sensor_context(
        sensor_name=sensor.name,
        dagster_event=dg.DagsterEvent(
            event_type_value="PIPELINE_FAILURE", job_name=dagster_run.job_name, message=""
        ),
        dagster_instance=project.instance,
        dagster_run=project.dagster_run(run_id),
    )

    said = sensor(context)

    assert f"run {run_id} is failed" in said.skip_message
    assert project.run_row(run_id).status is RunStatus.FAILED
    # A launch that was refused has none.
    refused = project.create("sample", steps=["effect"])
    assert store_launch(project.store, project.instance, project.dagster_run(refused)) is None


@pytest.mark.parametrize(
    ("status", "age_s", "is_reported"),
    [
        (Status.STARTING, 60, False),
        (Status.STARTING, 300, True),
        (Status.CANCELING, 300, True),
        (Status.NOT_STARTED, 300, False),
        (Status.NOT_STARTED, 7200, True),
    ],
)
def test_a_launch_without_a_worker_is_reported_when_it_had_its_time(
    project: Launched, status: dg.DagsterRunStatus, age_s: float, is_reported: bool
):
    project.publish(chain(EFFECT))
    run_id = project.create("sample", status=status)

    class Later(SystemClock):
        def now(self) -> datetime:
            return super().now() + timedelta(seconds=age_s)

    corrections = reconcile(project.store, project.instance, "default", Later())

    assert [each.run_id for each in corrections] == ([run_id] if is_reported else [])
    assert project.dagster_run(run_id).is_finished == is_reported
    has_row = is_reported and status is not Status.CANCELING
    assert [run.id for run in project.store.runs.list("default")] == ([run_id] if has_row else [])


@pytest.mark.parametrize("retry_status", [Status.FAILURE, Status.CANCELED])
def test_finally_does_not_wait_for_a_retry_that_never_began(
    project: Launched, retry_status: dg.DagsterRunStatus
):
    project.publish(
        chain(
            code("bad", "fail"), **{"finally": {"nodes": [code("clean", "note", name="clean")], "edges": []}}
        )
    )
    failed = project.execute("sample", tags={"dagster/max_retries": "1"})
    assert project.run_row(failed.run_id).retries_left == 1
    retry = project.create(
        "sample", status=retry_status, parent_run_id=failed.run_id, root_run_id=failed.run_id
    )
    project.instance.add_run_tags(failed.run_id, {"dagster/auto_retry_run_id": retry})
    if retry_status is Status.FAILURE:
        project.instance.add_run_tags(retry, {"dagster/will_retry": "false"})
    assert project.store.claims.poll("default", SystemClock().now()).ready == ()

    reconcile(project.store, project.instance, "default")

    [ready] = project.store.claims.poll("default", SystemClock().now()).ready
    assert (ready.run_id, ready.reason) == (failed.run_id, "finalize")


def test_a_worker_that_dies_right_after_its_run_was_written_as_waiting_leaves_both_with_one_status(
    project: Launched, monkeypatch: pytest.MonkeyPatch
):
    project.publish(chain({"id": "gate", "type": "human", "config": {"title": "Go on?"}}))
    run_id = project.create("sample")
    monkeypatch.setenv("AGENTMESH_FAULT", "journal.finish_run.after#1")
    project.launch(run_id)

    assert project.ends(run_id) is Status.SUCCESS

    run = project.run_row(run_id)
    assert run.status is RunStatus.WAITING
    assert project.dagster_run(run_id).tags["agentmesh/status"] == "waiting"
    assert project.says(run_id, "was waiting when its worker was killed")
    assert project.store.runs.lease(run_id) is None


def wait_for_event(project: Launched, label: str) -> Wait:
    """A wait for the event `paid` in another run."""
    journal = project.store.journal
    wait = a_wait(label, "other", kind=WaitKind.EVENT, event_name="paid", event_key="7")
    step = a_step("gate", "other", status=StepStatus.WAITING, finished_at=None)
    run_on_loop(journal.bind_run(a_run("other"), "other"))
    run_on_loop(journal.record([Entry(step=step, opened=(wait,))]))
    return wait


@pytest.mark.parametrize("side", ["before", "after"])
def test_the_event_of_a_worker_that_was_killed_while_it_sent_it_is_delivered_once(
    project: Launched, monkeypatch: pytest.MonkeyPatch, side: str
):
    tell = {"id": "tell", "type": "emit", "config": {"event": "paid", "key": "7", "data": {"amount": 1}}}
    project.publish(chain(tell))
    run_id = project.create("sample")
    first = wait_for_event(project, "first")
    monkeypatch.setenv("AGENTMESH_FAULT", f"journal.emit.{side}#1")
    project.launch(run_id)
    assert project.ends(run_id) is Status.FAILURE
    monkeypatch.delenv("AGENTMESH_FAULT")

    def status(wait: Wait) -> WaitStatus:
        return project.store.waits.get("default", wait.id).status

    assert status(first) is (WaitStatus.OPEN if side == "before" else WaitStatus.DECIDED)
    second = wait_for_event(project, "second") if side == "after" else None
    corrections = reconcile(project.store, project.instance, "default")
    assert (run_id, RunStatus.FAILED) in [(each.run_id, each.status) for each in corrections]

    assert retry_of(project, run_id).success

    assert status(first) is WaitStatus.DECIDED
    # Sent again, it would answer the wait that was opened meanwhile.
    assert second is None or status(second) is WaitStatus.OPEN
    assert project.store.waits.get("default", first.id).answer["data"] == {"amount": 1}
    assert [event for event, _ in project.events(run_id)].count("event.sent") == 1
