"""`agentmesh dev` on a project of its own: the real webserver, daemon and code server, for acceptance tests.

project = Project.scaffolded(tmp_path / "project")
project.agentmesh("import", "workflows", "--publish")
with DevServer(project) as server:
    run = server.launch("hello", {"name": "Ada"})
    assert server.wait_for_end(run) == "SUCCESS"
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import forked

from agentmesh_dagster.store import Store, open_store

T = TypeVar("T")

START_S = 90.0
ENDED = ("SUCCESS", "FAILURE", "CANCELED")

# As a project's own `resources/__init__.py` may say: functions of the project, and a short lease.
RESOURCES = """\
from pathlib import Path

from agentmesh_dagster import AgentMesh, Endpoint

agentmesh = AgentMesh.of_project(
    Path(__file__).parent,
    function_modules=("definitions.functions",),
    lease_s={lease_s},
    endpoints={{"openai": Endpoint(api_base={api_base!r})}},
)
"""

SENSORS = """\
from agentmesh_dagster import build_gate_sensors, build_reconciler_sensor, build_run_status_sensors
from resources import agentmesh

all_sensors = [
    *build_gate_sensors(agentmesh),
    *build_run_status_sensors(agentmesh, minimum_interval_s=1),
    build_reconciler_sensor(agentmesh, minimum_interval_s=1),
]
"""


def wait_until(what: str, look: Callable[[], T], timeout_s: float = 30.0, every_s: float = 0.1) -> T:
    """What `look` gives, once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(every_s)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    children: list[int] = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if path.name.isdigit() and parent_of(int(path.name)) == pid and is_alive(int(path.name)):
                children.append(int(path.name))
    return [found for child in children for found in (child, *descendants(child))]


@dataclass
class Project:
    """A project folder with the environment that its commands run in."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def scaffolded(folder: Path, *options: str, **environment: str) -> Project:
        """What `agentmesh init` writes."""
        project = Project(folder, environment)
        folder.parent.mkdir(parents=True, exist_ok=True)
        project.agentmesh("init", str(folder), *options, cwd=folder.parent)
        return project

    def configure(self, *, lease_s: float = 60.0, functions: str = "", api_base: str | None = None) -> None:
        """Gives the code location functions of its own, a lease, sensors at every turn of the daemon, and the server
        that has the models of `openai/`."""
        (self.folder / "resources" / "__init__.py").write_text(
            RESOURCES.format(lease_s=lease_s, api_base=api_base)
        )
        (self.folder / "sensors" / "__init__.py").write_text(SENSORS)
        (self.folder / "definitions" / "functions.py").write_text(functions)
        self.environment["AGENTMESH_FUNCTION_MODULES"] = "definitions.functions"

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def command(
        self, *arguments: str, cwd: Path | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a Python module with arguments in the project's environment."""
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=cwd or self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def agentmesh(self, *arguments: str, cwd: Path | None = None) -> str:
        """Runs a command that must succeed, and gives its standard output."""
        done = forked.run(
            ["-m", "agentmesh_dagster", *arguments], environ=self.environ, cwd=cwd or self.folder
        )
        assert done.returncode == 0, f"agentmesh {' '.join(arguments)}: {done.out}{done.err}"
        return done.out

    def publish(self, name: str, text: str) -> str:
        """Imports and publishes documents."""
        path = self.folder / "workflows" / f"{name}.yaml"
        path.write_text(text)
        return self.agentmesh("import", str(path), "--publish")

    @property
    def database_url(self) -> str:
        url = self.environment.get("AGENTMESH_DATABASE_URL")
        return url or f"sqlite:///{self.folder / '.agentmesh' / 'agentmesh.db'}"

    def open_store(self) -> Store:
        return open_store(self.database_url)


class DevServer:
    """`agentmesh dev` in a process group of its own; a context manager."""

    def __init__(self, project: Project) -> None:
        self.project = project
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.log = project.folder / f"dev-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._has_ticked = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> DevServer:
        self._began = time.time()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentmesh_dagster", "dev", "--port", str(self.port)],
                cwd=self.project.folder,
                env=self.project.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(f"the webserver answers; its log is {self.log}", self._is_up, START_S, every_s=0.25)
            wait_until("the daemon runs", self._daemon_is_up, START_S, every_s=0.25)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends all its processes, gently first."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
        self.kill()

    @property
    def process_group(self) -> int:
        """The process group of all that it has started."""
        assert self._process is not None
        return self._process.pid

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until `dagster dev` has ended, as it does when its webserver or its daemon has; runs may go on."""
        assert self._process is not None
        self._process.wait(timeout=timeout_s)
        self._process = None

    def kill(self) -> None:
        """Ends all its processes at once, as the end of a machine does."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGKILL)
        process.wait(timeout=10)
        wait_until("its processes are gone", lambda: not self.processes(), 10)
        self._process = None

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __enter__(self) -> DevServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def processes(self, containing: str = "") -> list[int]:
        """The living processes of its group whose command line contains a text."""
        assert self._process is not None
        found: list[int] = []
        for path in Path("/proc").iterdir():
            if not path.name.isdigit():
                continue
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z" and int(fields[2]) == self._process.pid and containing in words:
                found.append(int(path.name))
        return found

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"agentmesh dev ended: {self.log.read_text()[-3000:]}"
        try:
            self.query("{ version }")
        except OSError:
            return False
        return True

    def _daemon_is_up(self) -> bool:
        """The sensor daemon is at work, and knows from where on run-status sensors listen."""
        answer = self.query(
            '{ instance { daemonHealth { daemonStatus(daemonType: "SENSOR") { lastHeartbeatTime } } } }'
        )
        beat = answer["instance"]["daemonHealth"]["daemonStatus"]["lastHeartbeatTime"]
        if beat is None or beat < self._began:
            return False
        # Their first tick of all says it. (Dagster shows no ticks of the time after a restart: they are filed under
        # the address of the code server, which is another one then.)
        sensors = self.sensors()
        if not self._has_ticked:
            self._has_ticked = bool(sensors) and all(sensor["ticks"] for sensor in sensors.values())
        return self._has_ticked

    # GraphQL

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/graphql",
            data=json.dumps({"query": text, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            body = json.load(response)
        assert not body.get("errors"), body["errors"]
        return body["data"]

    def try_launch(self, job: str, run_config: Any) -> dict[str, Any]:
        """The answer to `launchRun`."""
        selector = {**self._repository(), "jobName": job}
        return self.query(_LAUNCH, params={"selector": selector, "runConfigData": run_config})["launchRun"]

    def launch(self, job: str, run_config: Any) -> str:
        """Starts a run and gives its id."""
        answer = self.try_launch(job, run_config)
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]

    def reexecute(self, run_id: str, strategy: str) -> str:
        """What the buttons of the run page do: `ALL_STEPS` or `FROM_FAILURE`."""
        params = {"parentRunId": run_id, "strategy": strategy}
        answer = self.query(_REEXECUTE, params=params)["launchRunReexecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]

    def reexecute_from_failure(self, run_id: str) -> str:
        return self.reexecute(run_id, "FROM_FAILURE")

    def reexecute_steps(self, run_id: str, job: str, run_config: Any, steps: list[str]) -> str:
        """What 'Re-execute selected' does: chosen steps of a run."""
        root = self.tags(run_id).get("dagster/root_run_id", run_id)
        params = {
            "selector": {**self._repository(), "jobName": job},
            "runConfigData": run_config,
            "stepKeys": steps,
            "executionMetadata": {"parentRunId": run_id, "rootRunId": root, "tags": []},
        }
        answer = self.query(_REEXECUTE_STEPS, params=params)["launchRunReexecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]

    def tags(self, run_id: str) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.run(run_id)["tags"]}

    def group(self, run_id: str) -> list[str]:
        """The runs that the run page shows beside a run, the first one first."""
        answer = self.query(_GROUP, id=run_id)["runGroupOrError"]
        return [run["runId"] for run in sorted(answer["runs"], key=lambda run: run["creationTime"])]

    def terminate(self, run_id: str) -> None:
        answer = self.query("mutation T($id: String!) { terminateRun(runId: $id) { __typename } }", id=run_id)
        assert answer["terminateRun"]["__typename"] == "TerminateRunSuccess", answer

    def run(self, run_id: str) -> dict[str, Any]:
        """What the run page asks for."""
        return self.query(_RUN, id=run_id)["runOrError"]

    def status(self, run_id: str) -> str:
        return self.query(
            "query S($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }", id=run_id
        )["runOrError"]["status"]

    def wait_for_status(self, run_id: str, *statuses: str, timeout_s: float = 60.0) -> str:
        def reached() -> str | None:
            status = self.status(run_id)
            return status if status in statuses else None

        found = wait_until(f"run {run_id} is {' or '.join(statuses)}", reached, timeout_s)
        assert found is not None
        return found

    def wait_for_end(self, run_id: str, timeout_s: float = 60.0) -> str:
        return self.wait_for_status(run_id, *ENDED, timeout_s=timeout_s)

    def events(self, run_id: str, kind: str) -> list[dict[str, Any]]:
        """The events of a run that are of a GraphQL type, such as `RunFailureEvent`."""
        events = self.query(_EVENTS, id=run_id)["runOrError"]["eventConnection"]["events"]
        return [event for event in events if event["__typename"] == kind]

    def jobs(self) -> list[str]:
        answer = self.query(
            "{ repositoriesOrError { ... on RepositoryConnection { nodes { jobs { name } } } } }"
        )
        return [job["name"] for node in answer["repositoriesOrError"]["nodes"] for job in node["jobs"]]

    def job(self, name: str) -> dict[str, Any]:
        """What the job page asks for."""
        return self.query(_JOB, selector={**self._repository(), "pipelineName": name})["pipelineOrError"]

    def _repository(self) -> dict[str, str]:
        found = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
        (repository,) = self.query(found)["repositoriesOrError"]["nodes"]
        return {
            "repositoryLocationName": repository["location"]["name"],
            "repositoryName": repository["name"],
        }

    def sensors(self) -> dict[str, dict[str, Any]]:
        """The sensors by name, with status and ticks."""
        answer = self.query(
            "{ repositoriesOrError { ... on RepositoryConnection { nodes { sensors { name sensorState { status "
            "ticks(limit: 100) { status skipReason error { message } } } } } } } }"
        )
        nodes = answer["repositoriesOrError"]["nodes"]
        return {sensor["name"]: sensor["sensorState"] for node in nodes for sensor in node["sensors"]}


_METADATA = """metadataEntries {
  label
  ... on TextMetadataEntry { text }
  ... on MarkdownMetadataEntry { mdStr }
  ... on JsonMetadataEntry { jsonString }
  ... on IntMetadataEntry { intValue }
  ... on FloatMetadataEntry { floatValue }
}"""

_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on RunConfigValidationInvalid { errors { message reason } }
    ... on PythonError { message stack }
  }
}"""

_REEXECUTE = """
mutation Again($params: ReexecutionParams!) {
  launchRunReexecution(reexecutionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message stack }
  }
}"""

_REEXECUTE_STEPS = """
mutation Again($params: ExecutionParams!) {
  launchRunReexecution(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message stack }
  }
}"""

_GROUP = """
query Group($id: ID!) {
  runGroupOrError(runId: $id) { ... on RunGroup { runs { runId creationTime } } }
}"""

_EVENTS = """
query Events($id: ID!) {
  runOrError(runId: $id) { ... on Run { eventConnection { events {
    __typename
    ... on MessageEvent { message stepKey }
  } } } }
}"""

_RUN = (
    """
query Run($id: ID!) {
  runOrError(runId: $id) { ... on Run {
    status
    tags { key value }
    stepStats { stepKey status startTime endTime }
    executionPlan { steps { key metadata { key value } } }
    eventConnection { events {
      __typename
      ... on MessageEvent { message stepKey }
      ... on ExecutionStepFailureEvent { error { message } }
      ... on ExecutionStepOutputEvent { outputName """
    + _METADATA
    + """ }
    } }
  } }
}"""
)

_JOB = (
    """
query Job($selector: PipelineSelector!) {
  pipelineOrError(params: $selector) {
    __typename
    ... on Pipeline {
      description
      """
    + _METADATA
    + """
      solidHandles { solid { name definition {
        name
        description
        metadata { key value }
        ... on SolidDefinition { pools }
      } } }
    }
  }
}"""
)
