"""The warm run launcher, with real processes on a persistent instance."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext
from dagster._core.execution.api import create_execution_plan
from dagster._core.launcher.base import WorkerStatus
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._serdes import deserialize_value
from dagster_server import DevServer, Project, is_alive, parent_of, wait_until

from agentmesh_dagster.orchestration import worker_internals
from agentmesh_dagster.orchestration.launcher import DEFAULT_PRELOAD, LaunchFailed, WarmRunLauncher
from agentmesh_dagster.orchestration.launcher_internals import serialized_reference
from agentmesh_dagster.orchestration.location_internals import reconstructable_from_file
from agentmesh_dagster.orchestration.worker_identity import TAG_WORKER, WorkerIdentity
from agentmesh_dagster.orchestration.worker_internals import CANCEL_POLL_S, LIBRARIES
from agentmesh_dagster.testing import publish_documents

ROOT = Path(__file__).resolve().parent.parent
Status = dg.DagsterRunStatus

pytestmark = pytest.mark.timeout(120)

HOME = """\
telemetry: {{enabled: false}}
code_servers: {{wait_for_local_processes_on_shutdown: true}}
run_coordinator: {{module: dagster._core.run_coordinator, class: DefaultRunCoordinator}}
run_launcher:
  module: agentmesh_dagster.orchestration.launcher
  class: WarmRunLauncher
  config: {{preload: {preload}}}
"""

JOBS = f"""\
import asyncio, json, os, sys, time
from pathlib import Path
import dagster as dg
from agentmesh_dagster.orchestration.executor import build_executor
from agentmesh_dagster.runtime.loop import run_on_loop

FOLDER = Path(os.environ["LAUNCHER_TEST_DIR"])


def write(name, text=""):
    (FOLDER / f"{{name}}.new").write_text(text)
    (FOLDER / f"{{name}}.new").rename(FOLDER / name)


@dg.op
def tell(context):
    facts = {{"pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "folder": os.getcwd()}}
    facts |= {{"variable": os.environ.get("LAUNCHER_TEST_VARIABLE"), "preloaded": "preloaded" in sys.modules}}
    write(context.run_id, json.dumps(facts))


@dg.op
def hold(context):
    async def wait():
        try:
            while not (FOLDER / "release").exists():
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            # The cleanup takes longer than the worker's watch waits until it asks again.
            await asyncio.sleep({CANCEL_POLL_S + 1})
            write("cleaned")
            raise

    write("held", str(os.getpid()))
    run_on_loop(wait())


@dg.job(executor_def=build_executor())
def facts():
    tell()


@dg.job(executor_def=build_executor())
def holding():
    hold()


@dg.job(executor_def=dg.multiprocess_executor)
def apart():
    tell()


jobs = dg.Definitions(jobs=[facts, holding, apart])
"""


class Launching:
    """An instance whose runs start warm, and a file of jobs."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.folder = folder
        self.instance = instance
        self.file = folder / "project" / "definitions" / "jobs.py"

    @property
    def launcher(self) -> WarmRunLauncher:
        launcher = self.instance.run_launcher
        assert isinstance(launcher, WarmRunLauncher)
        return launcher

    def create(self, job: str, tags: dict[str, str] | None = None) -> str:
        found = reconstructable_from_file(self.file, job)
        run = self.instance.create_run_for_job(
            found.get_definition(),
            execution_plan=create_execution_plan(found),
            job_code_origin=found.get_python_origin(),
            tags=tags,
        )
        return run.run_id

    def launch(self, run_id: str) -> str:
        self.instance.launch_run(run_id, workspace=None)  # pyright: ignore[reportArgumentType] - it uses none
        return run_id

    def facts(self, job: str = "facts") -> dict[str, Any]:
        """Launches a run, and gives what it tells of its process."""
        run_id = self.launch(self.create(job))
        assert self.end(run_id) is Status.SUCCESS
        return json.loads((self.folder / run_id).read_text())

    def hold(self) -> tuple[str, int]:
        """Launches a run that waits; its id and its process."""
        held = self.folder / "held"
        held.unlink(missing_ok=True)
        run_id = self.launch(self.create("holding"))
        return run_id, int(wait_until("the run holds", lambda: held.exists() and held.read_text()))

    def release(self) -> None:
        (self.folder / "release").touch()

    def status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def end(self, run_id: str) -> dg.DagsterRunStatus:
        ended = (Status.SUCCESS, Status.FAILURE, Status.CANCELED)
        wait_until(f"run {run_id} has ended", lambda: self.status(run_id) in ended, 60)
        return self.status(run_id)

    def messages(self, run_id: str, kind: dg.DagsterEventType) -> list[str]:
        events = [entry.dagster_event for entry in self.instance.all_logs(run_id)]
        return [event.message or "" for event in events if event and event.event_type is kind]


def gone(pid: int) -> None:
    wait_until(f"process {pid} is gone", lambda: not is_alive(pid))


@pytest.fixture
def preload() -> list[str]:
    return []


@pytest.fixture
def launching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preload: list[str]) -> Iterator[Launching]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(HOME.format(preload=json.dumps(preload)))
    definitions = tmp_path / "project" / "definitions"
    definitions.mkdir(parents=True)
    (definitions / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("LAUNCHER_TEST_DIR", str(tmp_path))
    monkeypatch.setenv("LAUNCHER_TEST_VARIABLE", "yes")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path), os.environ["PYTHONPATH"]]))
    with dg.DagsterInstance.get() as instance:
        opened = Launching(tmp_path, instance)
        yield opened
        opened.release()
        opened.launcher.join(60)


def test_runs_are_forked_from_one_process_that_is_kept(launching: Launching):
    first, second = launching.facts(), launching.facts()

    assert first["parent"] == second["parent"] != os.getpid()
    assert first["pid"] != second["pid"]
    assert parent_of(first["parent"]) == os.getpid()
    # Ctrl-C in the launcher's terminal reaches them.
    assert first["group"] == os.getpgid(0)
    assert Path(first["folder"]) == launching.folder / "project"
    assert first["variable"] == "yes"

    launching.launcher.dispose()
    gone(first["parent"])


def test_a_run_of_the_multiprocess_executor_works(launching: Launching):
    facts = launching.facts("apart")

    assert facts["variable"] == "yes"


def test_the_worker_gets_what_the_code_server_loaded_and_builds_one_job(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
):
    notes = tmp_path / "notes"
    file = tmp_path / "code_location.py"
    file.write_text(f"""\
import os
from agentmesh_dagster import AgentMesh, build_code_location
from agentmesh_dagster.constants import METADATA_PUBLICATION
from agentmesh_dagster.orchestration.location_internals import handed_metadata

def note(live):
    with open({str(notes)!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{live.slug}} {{handed_metadata(METADATA_PUBLICATION)}}\\n")
    return "https://example.com/"

location = build_code_location(AgentMesh(database_url={sqlite_url!r}), link=note)
""")

    def workflow(slug: str, version: int) -> dict[str, Any]:
        return {
            "kind": "workflow",
            "slug": slug,
            "nodes": [
                {"id": "start", "type": "start"},
                {"id": "end", "type": "end", "config": {"output": {"version": version}}},
            ],
            "edges": [{"source": "start", "target": "end"}],
        }

    from agentmesh_dagster.store import open_store

    built: dict[str, list[list[str]]] = {}
    with open_store(sqlite_url, upgrade=True) as store:
        publish_documents(store, [workflow("one", 1), workflow("other", 1)])
        number = store.publications.newest_id("default")
        for launcher in ("default", "warm"):
            home = tmp_path / launcher
            home.mkdir()
            text = HOME.format(preload=[])
            (home / "dagster.yaml").write_text(text if launcher == "warm" else text.split("run_launcher")[0])
            monkeypatch.setenv("DAGSTER_HOME", str(home))
            with (
                dg.DagsterInstance.get() as instance,
                WorkspaceProcessContext(instance, PythonFileTarget(str(file), None, None, None)) as server,
            ):
                context = server.create_request_context()
                [location] = context.code_locations
                [repository] = location.get_repositories().values()
                job = repository.get_full_job("one")
                plan = location.get_execution_plan(job, {}, None, None, instance)
                if launcher == "default":
                    # Published, and not loaded by the code server.
                    publish_documents(store, [workflow("one", 2)])
                run = instance.create_run(
                    job_name="one",
                    run_id=None,
                    run_config={},
                    status=None,
                    tags={},
                    root_run_id=None,
                    parent_run_id=None,
                    step_keys_to_execute=None,
                    execution_plan_snapshot=plan.execution_plan_snapshot,
                    job_snapshot=job.job_snapshot,
                    parent_job_snapshot=job.parent_job_snapshot,
                    remote_job_origin=job.get_remote_origin(),
                    job_code_origin=job.get_python_origin(),
                    asset_selection=None,
                    asset_check_selection=None,
                    op_selection=None,
                    resolved_op_selection=None,
                    asset_graph=repository.asset_graph,
                )
                if launcher == "warm":
                    publish_documents(store, [workflow("one", 3)])
                notes.write_text("")
                instance.submit_run(run.run_id, context)
                instance.run_launcher.join(60)
                ran = store.runs.get(run.run_id)
                assert ran.output == {"version": 1 if launcher == "default" else 2}
                [worker] = {
                    line.split()[0] for line in notes.read_text().splitlines() if not line.endswith("None")
                }
                built[launcher] = [
                    line.split()[1:] for line in notes.read_text().splitlines() if line.startswith(worker)
                ]
        newer = store.publications.newest_id("default")
    assert built["default"] == [["one", str(number)]]
    assert built["warm"] == [["one", str(newer - 1)]]


# Termination


def test_another_process_terminates_a_run_which_cleans_up(launching: Launching):
    run_id, pid = launching.hold()

    program = (
        "import dagster as dg\nwith dg.DagsterInstance.get() as instance:\n"
        f"    print(instance.run_coordinator.cancel_run({run_id!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert done.stdout.split()[-1] == "True", done.stderr
    assert launching.end(run_id) is Status.CANCELED
    assert (launching.folder / "cleaned").exists()
    gone(pid)
    assert launching.launcher.terminate(run_id) is False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_a_run_and_the_watch_does_not_cut_its_cleanup_off(launching: Launching, number: int):
    run_id, pid = launching.hold()

    os.kill(pid, number)

    assert launching.end(run_id) is Status.CANCELED
    assert (launching.folder / "cleaned").exists()


def test_a_run_that_is_terminated_while_its_code_loads_does_not_begin(launching: Launching):
    run_id = launching.create("facts")
    wait = (
        "import os, pathlib, time\nF = pathlib.Path(os.environ['LAUNCHER_TEST_DIR'])\n(F / 'loading').touch()\n"
        "while not (F / 'load').exists(): time.sleep(0.02)\n"
    )
    launching.file.write_text(wait + JOBS)
    launching.launch(run_id)
    wait_until("the code loads", (launching.folder / "loading").exists)

    assert launching.launcher.terminate(run_id) is True
    (launching.folder / "load").touch()

    assert launching.end(run_id) is Status.CANCELED
    assert not (launching.folder / run_id).exists()


def test_a_run_that_somebody_else_has_ended_is_stopped(launching: Launching):
    run_id, pid = launching.hold()

    run = launching.instance.get_run_by_id(run_id)
    assert run is not None
    launching.instance.report_run_failed(run, "took too long")

    gone(pid)
    assert (launching.folder / "cleaned").exists()
    assert launching.status(run_id) is Status.FAILURE


# Deaths


@pytest.mark.parametrize(
    ("death", "how"),
    [
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; os._exit(0)", "ended with exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_a_process_that_dies_before_its_run_began_is_reported(launching: Launching, death: str, how: str):
    run_id = launching.create("facts")
    launching.file.write_text(death)
    launching.launch(run_id)

    assert launching.end(run_id) is Status.FAILURE
    [message] = launching.messages(run_id, dg.DagsterEventType.RUN_FAILURE)
    assert f"{how} before it had begun" in message


def test_a_death_is_reported_although_the_storage_is_away_for_a_while(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
):
    run_id = launching.create("facts")
    serialized = serialized_reference(launching.instance)
    answers = iter(["{}", "{}", serialized])
    monkeypatch.setattr(worker_internals, "_REPORT_PAUSE_S", 0)
    monkeypatch.setattr(
        worker_internals, "deserialize_value", lambda _, kind: deserialize_value(next(answers), kind)
    )

    assert worker_internals.report_dead_worker(serialized, run_id, 1, -9)
    assert launching.status(run_id) is Status.FAILURE

    answers = iter(["{}"] * 100)
    assert not worker_internals.report_dead_worker(serialized, run_id, 1, -9)


def test_code_that_cannot_be_loaded_is_reported_by_dagster(launching: Launching):
    run_id = launching.create("facts")
    launching.file.write_text("raise RuntimeError('broken code')")
    launching.launch(run_id)

    assert launching.end(run_id) is Status.FAILURE
    told = " ".join(launching.messages(run_id, dg.DagsterEventType.ENGINE_EVENT))
    assert "Could not load job definition" in told
    assert len(launching.messages(run_id, dg.DagsterEventType.RUN_FAILURE)) == 1


def test_a_killed_run_is_reported_and_harms_no_other(launching: Launching):
    first, pid = launching.hold()
    second, other = launching.hold()

    os.kill(pid, signal.SIGKILL)

    assert launching.end(first) is Status.FAILURE
    [message] = launching.messages(first, dg.DagsterEventType.RUN_FAILURE)
    assert f"The run's process (pid {pid}) was killed by SIGKILL before the run's end." in message
    server = parent_of(other)
    assert launching.facts()["parent"] == server
    launching.release()
    assert launching.end(second) is Status.SUCCESS


def test_a_run_that_is_killed_while_it_is_canceled_is_canceled(launching: Launching):
    run_id, pid = launching.hold()
    run = launching.instance.get_run_by_id(run_id)
    assert run is not None
    launching.instance.report_run_canceling(run)

    os.kill(pid, signal.SIGKILL)

    assert launching.end(run_id) is Status.CANCELED


def test_after_a_killed_server_its_run_goes_on_and_the_next_one_gets_another(launching: Launching):
    run_id, pid = launching.hold()
    server = parent_of(pid)

    os.kill(server, signal.SIGKILL)
    gone(server)

    assert launching.facts()["parent"] != server
    launching.release()
    assert launching.end(run_id) is Status.SUCCESS


def test_a_server_outlives_a_killed_launcher_until_its_runs_are_over(launching: Launching):
    run_id = launching.create("holding")
    program = (
        "import dagster as dg, time\nwith dg.DagsterInstance.get() as i:\n"
        f"    i.launch_run({run_id!r}, None)\n    print('launched', flush=True)\n    time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"launched\n"
        wait_until("the run holds", (launching.folder / "held").exists)
        pid = int((launching.folder / "held").read_text())
        server = parent_of(pid)
        assert parent_of(server) == launcher.pid
        launcher.kill()
    assert is_alive(server)

    # And still reports for its runs.
    os.kill(pid, signal.SIGKILL)

    assert launching.end(run_id) is Status.FAILURE
    gone(server)


def test_a_server_that_is_told_to_end_waits_for_its_runs(launching: Launching):
    run_id, pid = launching.hold()
    server = parent_of(pid)

    os.kill(server, signal.SIGTERM)
    # It serves no more.
    other = launching.facts()["parent"]

    assert other != server
    assert is_alive(server)
    launching.release()
    assert launching.end(run_id) is Status.SUCCESS
    gone(server)
    assert is_alive(other)


# What a dead worker's run comes to where nobody is left to report it


def orphan(launching: Launching) -> str:
    run_id, pid = launching.hold()
    server = parent_of(pid)
    os.kill(server, signal.SIGKILL)
    gone(server)
    os.kill(pid, signal.SIGKILL)
    gone(pid)
    assert launching.status(run_id) is Status.STARTED
    return run_id


def test_terminating_a_run_whose_worker_is_dead_cancels_it_at_once(launching: Launching):
    run_id = orphan(launching)

    assert launching.launcher.terminate(run_id) is True

    assert launching.status(run_id) is Status.CANCELED


def test_the_health_of_workers(launching: Launching):
    alive, pid = launching.hold()
    launcher, instance = launching.launcher, launching.instance

    def health(run_id: str) -> WorkerStatus:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        return launcher.check_run_worker_health(run).status

    assert health(alive) is WorkerStatus.RUNNING
    tags = dict(instance.get_run_by_id(alive).tags)  # pyright: ignore[reportOptionalMemberAccess]
    worker = WorkerIdentity.of_run(alive, tags)
    assert worker is not None
    assert worker.pid == pid
    # A later process with the same number is another one.
    instance.add_run_tags(alive, {TAG_WORKER: json.dumps({**json.loads(tags[TAG_WORKER]), "started": "1"})})
    assert health(alive) is WorkerStatus.FAILED
    # Nobody knows what another machine's processes do, and Dagster ends the runs of those it is not sure of.
    instance.add_run_tags(
        alive, {TAG_WORKER: json.dumps({**json.loads(tags[TAG_WORKER]), "machine": "other"})}
    )
    assert health(alive) is WorkerStatus.RUNNING
    instance.add_run_tags(alive, tags)
    # A re-execution copies its parent's tags.
    assert WorkerIdentity.of_run("child", tags) is None

    dead = orphan(launching)
    assert health(dead) is WorkerStatus.FAILED
    assert launcher.terminate(dead)


# Preloading


@pytest.mark.parametrize("preload", [["preloaded", "preloaded:begin"]])
def test_named_modules_are_loaded_in_the_background_once(launching: Launching):
    (launching.folder / "preloaded.py").write_text(
        "import os, pathlib\ndef begin():\n"
        "    with (pathlib.Path(os.environ['LAUNCHER_TEST_DIR']) / 'began').open('a') as f: f.write('x')\n"
    )
    first = launching.facts()
    assert first["preloaded"] is False

    # While runs come one after the other, it is put off.
    wait_until("it is loaded", (launching.folder / "began").exists)
    found = wait_until("runs have it", lambda: (facts := launching.facts())["preloaded"] and facts)

    assert found["parent"] != first["parent"]
    gone(first["parent"])
    assert launching.facts()["parent"] == found["parent"]
    assert (launching.folder / "began").read_text() == "x"
    launching.launcher.dispose()
    gone(found["parent"])


@pytest.mark.parametrize("preload", [["preloaded"]])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise ImportError('not here')", "not here"),
        (
            "import threading as t, time\nt.Thread(target=time.sleep, args=(60,), daemon=True, name='idler').start()",
            "left threads behind: idler",
        ),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_told_and_runs_start_without(
    launching: Launching, text: str, told: str, capfd: pytest.CaptureFixture[str]
):
    (launching.folder / "preloaded.py").write_text(text)
    first = launching.facts()
    said = ""

    def has_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "runs start without them" in said

    wait_until("the console says so", has_said)
    assert told in said
    assert launching.facts() | {"pid": 0} == first | {"pid": 0}


def test_litellm_and_what_dagster_imports_late_can_be_preloaded():
    for name in LIBRARIES:
        import_module(name)
    for name in DEFAULT_PRELOAD:
        module, _, function = name.partition(":")
        assert callable(getattr(import_module(module), function))


# Refusals


def refusal(launching: Launching, monkeypatch: pytest.MonkeyPatch, **origin: Any) -> str:
    run_id = launching.create("facts")
    run = launching.instance.get_run_by_id(run_id)
    assert run is not None
    code = run.job_code_origin
    assert code is not None
    other = code._replace(repository_origin=code.repository_origin._replace(**origin)) if origin else None
    changed = run._replace(job_code_origin=other)
    monkeypatch.setattr(launching.instance, "get_run_by_id", lambda _: changed)
    with pytest.raises(LaunchFailed) as refused:
        launching.launch(run_id)
    monkeypatch.undo()
    assert launching.status(run_id) is Status.FAILURE
    assert refused.value.message in " ".join(launching.messages(run_id, dg.DagsterEventType.ENGINE_EVENT))
    return refused.value.message


def test_code_that_this_machine_cannot_load_is_refused(launching: Launching, monkeypatch: pytest.MonkeyPatch):
    said = refusal(launching, monkeypatch, container_image="registry/code:1")
    assert "the container image 'registry/code:1'" in said
    assert "choose another run launcher" in said


def test_a_python_that_this_machine_does_not_have_is_refused(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
):
    assert "'/nowhere/python', which this machine does not have" in refusal(
        launching, monkeypatch, executable_path="/nowhere/python"
    )


def test_a_python_without_agentmesh_is_refused(launching: Launching, monkeypatch: pytest.MonkeyPatch):
    assert "ended before it had started the run" in refusal(
        launching, monkeypatch, executable_path="/bin/false"
    )


def test_a_run_without_code_is_refused(launching: Launching, monkeypatch: pytest.MonkeyPatch):
    assert "does not say where its code is" in refusal(launching, monkeypatch)


def test_the_image_that_the_launcher_is_in_itself_is_taken(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "registry/code:1")
    run_id = launching.create("facts")
    run = launching.instance.get_run_by_id(run_id)
    assert run is not None
    assert run.job_code_origin is not None
    origin = run.job_code_origin.repository_origin._replace(container_image="registry/code:1")
    changed = run._replace(job_code_origin=run.job_code_origin._replace(repository_origin=origin))
    monkeypatch.setattr(launching.instance, "get_run_by_id", lambda _: changed)
    launching.launch(run_id)
    monkeypatch.undo()
    assert launching.end(run_id) is Status.SUCCESS


# `agentmesh dev`

FUNCTIONS = '''\
import asyncio
import os
from pathlib import Path


async def hold(note: str) -> dict:
    """Waits, and leaves a note of its cleanup."""
    Path(note).with_suffix(".new").write_text(str(os.getpid()))
    Path(note).with_suffix(".new").rename(note)
    try:
        await asyncio.sleep(60)
    finally:
        Path(note).with_suffix(".cleaned").touch()
    return {}
'''

HOLDER = """\
kind: workflow
slug: holder
input_schema: {type: object, required: [note], properties: {note: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: hold, type: code, config: {function: "definitions.functions:hold", input: {note: "{{ input.note }}"}}}
  - {id: end, type: end}
edges:
  - {source: start, target: hold}
  - {source: hold, target: end}
"""


@pytest.mark.timeout(240)  # starts and stops `agentmesh dev` twice
def test_ctrl_c_ends_agentmesh_dev_with_its_runs_and_a_killed_daemon_leaves_no_server(tmp_path: Path):
    project = Project.scaffolded(tmp_path / "project")
    project.configure(functions=FUNCTIONS)
    (project.folder / "workflows" / "holder.yaml").write_text(HOLDER)
    project.agentmesh("import", "workflows", "--publish")
    server = DevServer(project)
    with server:
        notes: list[Path] = []
        runs: list[str] = []
        for number in range(2):
            notes.append(tmp_path / f"note{number}")
            runs.append(server.launch("holder", {"note": str(notes[-1])}))
            wait_until("the run holds", notes[-1].exists)
        [warm] = {parent_of(int(note.read_text())) for note in notes}
        [daemon] = server.processes("dagster._daemon")
        assert server.processes("warm_server")
        assert warm in server.processes("warm_server")

        os.killpg(os.getpgid(daemon), signal.SIGINT)

        wait_until("all processes are gone", lambda: not server.processes(), 30)
        assert all(note.with_suffix(".cleaned").exists() for note in notes)
    with dg.DagsterInstance.from_config(str(project.folder / ".agentmesh")) as instance:
        for run_id in runs:
            run = instance.get_run_by_id(run_id)
            assert run is not None
            assert run.status is Status.CANCELED

    with server:
        run_id = server.launch("hello", {"name": "Ada"})
        assert server.wait_for_end(run_id) == "SUCCESS"
        [daemon] = server.processes("dagster._daemon")
        assert server.processes("warm_server")
        os.kill(daemon, signal.SIGKILL)
        wait_until("no warm server is left", lambda: not server.processes("warm_server"))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    DefinitionsLoadContext._instance = None
