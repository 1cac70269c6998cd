"""Workers, code servers and whole machines that die: the run is reported once, and its retry repeats nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster_server import DevServer, Project, is_alive, wait_until
from fake_provider import FakeProvider

from agentmesh_dagster.orchestration.webserver import reload_code_location
from agentmesh_dagster.records import RunStatus

LEASE_S = 3.0

FUNCTIONS = '''\
import os
from pathlib import Path


def note(path: str) -> dict:
    """Leaves a line with the number of the process that works on the run."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return {"pid": os.getpid()}
'''

WORKFLOW = """\
kind: agent
slug: first
model: openai/first
instructions: Answer at once.
---
kind: agent
slug: second
model: openai/second
instructions: Take your time.
---
kind: workflow
slug: durable
input_schema: {{type: object, required: [path], properties: {{path: {{type: string}}}}}}
nodes:
  - {{id: start, type: start}}
  - {{id: ask, type: agent, config: {{agent: first, prompt: "First?"}}}}
  - id: note
    type: code
    config: {{function: "definitions.functions:note", input: {{path: "{{{{ input.path }}}}"}}}}
  - {{id: think, type: agent, config: {{agent: second, prompt: "Second?"}}}}
  - {{id: end, type: end, config: {{output: {{answer: "{{{{ steps.think.output.text }}}}"}}}}}}
edges:
  - {{source: start, target: ask}}
  - {{source: ask, target: note}}
  - {{source: note, target: think}}
  - {{source: think, target: end}}
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as fake:
        yield fake


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, provider: FakeProvider) -> Iterator[DevServer]:
    project = Project.scaffolded(
        tmp_path_factory.mktemp("kill") / "project", AGENTMESH_HTTP_ALLOW="127.0.0.1"
    )
    project.configure(lease_s=LEASE_S, functions=FUNCTIONS, api_base=provider.base_url)
    project.publish("durable", WORKFLOW.format())
    with DevServer(project) as running:
        yield running


class Victim:
    """A run that hangs in its second model call."""

    def __init__(self, server: DevServer, provider: FakeProvider, path: Path) -> None:
        provider.push({"text": "at once"}, {"hang": True}, {"text": "the second answer"})
        self.server, self.provider, self.path = server, provider, path
        self._before = {model: provider.count_of(model) for model in ("first", "second")}
        self.run_id = server.launch("durable", {"path": str(path)})
        wait_until("the second model is asked", lambda: self.asked("second") == 1, 60)
        self.pid = int(path.read_text())

    def asked(self, model: str) -> int:
        return self.provider.count_of(model) - self._before[model]

    def assert_failed(self) -> None:
        """In Dagster and in the run row."""
        assert self.server.wait_for_end(self.run_id) == "FAILURE"
        with self.server.project.open_store() as store:
            wait_until(
                "the run row is failed", lambda: store.runs.get(self.run_id).status is RunStatus.FAILED
            )
            assert store.runs.get(self.run_id).error["code"] == "worker-lost"

    def assert_retry_finishes_and_repeats_nothing(self) -> None:
        again = self.server.reexecute_from_failure(self.run_id)
        assert self.server.wait_for_end(again) == "SUCCESS"
        with self.server.project.open_store() as store:
            run = store.runs.get(self.run_id)
            steps = {step.key: step for step in store.runs.steps(self.run_id)}
            events = [event.type for event in store.runs.events(self.run_id)]
        assert run.status is RunStatus.SUCCEEDED
        assert run.dagster_run_ids == (self.run_id, again)
        assert run.output == {"answer": "the second answer"}
        assert self.path.read_text().split() == [str(self.pid)]
        assert (self.asked("first"), self.asked("second")) == (1, 2)
        assert steps["think"].attempt == 2
        assert steps["ask"].dagster_run_id == self.run_id
        # The sensors have gone on ticking since the run was found out.
        assert events.count("run.failed") == 1
        assert len(self.server.events(self.run_id, "RunFailureEvent")) == 1
        assert self.server.status(self.run_id) == "FAILURE"


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_until(f"process {pid} is gone", lambda pid=pid: not is_alive(pid), 10)


def test_a_killed_worker_is_reported_once_and_its_run_retried(
    server: DevServer, provider: FakeProvider, tmp_path: Path
):
    victim = Victim(server, provider, tmp_path / "notes")
    kill(victim.pid)

    victim.assert_failed()
    victim.assert_retry_finishes_and_repeats_nothing()


def test_worker_and_code_server_killed_together(server: DevServer, provider: FakeProvider, tmp_path: Path):
    victim = Victim(server, provider, tmp_path / "notes")
    code_server = server.processes("dagster api grpc")
    assert code_server
    kill(victim.pid, *code_server)
    # `dagster dev` starts no new one by itself, and sensors run there.
    reload_code_location(server.url)

    victim.assert_failed()
    victim.assert_retry_finishes_and_repeats_nothing()


def test_a_machine_that_dies_and_starts_again(server: DevServer, provider: FakeProvider, tmp_path: Path):
    victim = Victim(server, provider, tmp_path / "notes")
    server.kill()
    assert not is_alive(victim.pid)
    server.start()

    victim.assert_failed()
    victim.assert_retry_finishes_and_repeats_nothing()
