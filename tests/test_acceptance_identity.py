"""Which run a Dagster run works on, asked of a real webserver: re-executions, retries, continuations, selections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster_server import DevServer, Project, wait_until
from fake_provider import FakeProvider

from agentmesh_dagster.records import Run, RunStatus, WaitStatus

FUNCTIONS = '''\
from pathlib import Path


def fail_without(path: str) -> dict:
    """Fails as long as a file is missing."""
    if not Path(path).exists():
        raise ValueError(f"{path} is missing")
    return {"found": True}
'''

WORKFLOW = """\
kind: agent
slug: asker
model: openai/asker
instructions: Answer.
---
kind: workflow
slug: gated
input_schema: {{type: object, required: [path], properties: {{path: {{type: string}}}}}}
nodes:
  - {{id: start, type: start}}
  - {{id: ask, type: agent, config: {{agent: asker, prompt: "Version {version}?"}}}}
{nodes}
  - {{id: review, type: human, config: {{title: Go on?}}}}
  - id: check
    type: code
    config: {{function: "definitions.functions:fail_without", input: {{path: "{{{{ input.path }}}}"}}}}
  - {{id: done, type: end, config: {{output: {{version: {version}, by: "{{{{ steps.review.output.by }}}}"}}}}}}
edges:
  - {{source: start, target: ask}}
  - {{source: ask, target: review}}
{edges}
  - {{source: review, target: check}}
  - {{source: check, target: done}}
"""
# A branch beside the gate that fails as long as the file is missing.
BESIDE_NODES = """\
  - id: beside
    type: code
    config: {{function: "definitions.functions:fail_without", input: {{path: "{{{{ input.path }}}}.beside"}}}}
  - {{id: other, type: end}}
"""
BESIDE_EDGES = """\
  - {source: start, target: beside}
  - {source: beside, target: other}
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as fake:
        yield fake


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, provider: FakeProvider) -> Iterator[DevServer]:
    project = Project.scaffolded(
        tmp_path_factory.mktemp("identity") / "project", AGENTMESH_HTTP_ALLOW="127.0.0.1"
    )
    project.configure(lease_s=20.0, functions=FUNCTIONS, api_base=provider.base_url)
    yaml = project.folder / ".agentmesh" / "dagster.yaml"
    yaml.write_text(yaml.read_text() + "\nrun_retries: {enabled: true}\n")
    publish(project, provider, 1)
    with DevServer(project) as running:
        yield running


def publish(
    project: Project, provider: FakeProvider, version: int, *, beside: bool = False, **tags: str
) -> None:
    text = WORKFLOW.format(
        version=version,
        nodes=BESIDE_NODES.format() if beside else "",
        edges=BESIDE_EDGES if beside else "",
    )
    if tags:
        text += f"settings: {json.dumps({'tags': tags})}\n"
    project.publish("gated", text)


class Case:
    """One run under test, with its file that lets `check` pass."""

    def __init__(self, server: DevServer, folder: Path) -> None:
        self.server = server
        self.store = server.project.open_store()
        self.file = folder / "file"
        self.config = {"path": str(self.file)}
        self.first = ""

    def launch(self) -> str:
        self.first = self.server.launch("gated", self.config)
        return self.first

    def run(self, dagster_run_id: str | None = None) -> Run:
        return self.store.runs.get(dagster_run_id or self.first)

    def wait_for(self, *statuses: RunStatus, run_id: str | None = None, bound: int = 1) -> Run:
        def reached() -> Run | None:
            run = self.run(run_id)
            return run if run.status in statuses and len(run.dagster_run_ids) >= bound else None

        found = wait_until(f"the run is {statuses} after {bound} Dagster runs", reached, 60)
        assert found is not None
        return found

    def wait_until_waiting(self, run_id: str | None = None) -> Run:
        self.server.wait_for_end(run_id or self.first)
        run = self.run(run_id)
        assert run.status is RunStatus.WAITING, run
        return run

    def approve(self, run_id: str | None = None) -> None:
        run = self.run(run_id)
        [wait] = self.store.waits.list(run.project, run_id=run.id, statuses=(WaitStatus.OPEN,))
        self.server.project.agentmesh("approvals", "approve", wait.id, "--as", "anna")

    def continuation(self, run_id: str | None = None, number: int = 1) -> str:
        def bound() -> str | None:
            ids = self.run(run_id).dagster_run_ids
            return ids[number] if len(ids) > number else None

        found = wait_until("the run is continued", bound, 60)
        assert found is not None
        return found


@pytest.fixture
def case(server: DevServer, tmp_path: Path) -> Iterator[Case]:
    made = Case(server, tmp_path)
    yield made
    made.store.close()


def model_calls(provider: FakeProvider) -> int:
    return len(provider.requests)


def test_reexecute_all_of_a_first_run_is_a_new_run(case: Case, provider: FakeProvider):
    case.file.touch()
    case.launch()
    case.wait_until_waiting()
    calls = model_calls(provider)
    again = case.server.reexecute(case.first, "ALL_STEPS")
    case.server.wait_for_end(again)
    assert case.run(again).id == again
    assert case.run(again).status is RunStatus.WAITING
    assert case.run().dagster_run_ids == (case.first,)
    assert model_calls(provider) == calls + 1
    assert case.server.tags(again)["agentmesh/run_id"] == again


def test_reexecute_all_of_a_continuation_is_a_new_run(case: Case, provider: FakeProvider):
    case.file.touch()
    case.launch()
    case.wait_until_waiting()
    case.approve()
    continuation = case.continuation()
    assert case.server.wait_for_end(continuation) == "SUCCESS"
    assert case.wait_for(RunStatus.SUCCEEDED).output == {"version": 1, "by": "anna"}
    assert case.server.tags(continuation)["agentmesh/claim"]
    # Dagster knows the group of a run that a sensor asked for from its first run on.
    assert case.server.group(case.first) == [case.first, continuation]
    calls = model_calls(provider)
    again = case.server.reexecute(continuation, "ALL_STEPS")
    case.server.wait_for_end(again)
    assert case.run(again).id == again
    assert case.run(again).status is RunStatus.WAITING
    assert case.run().status is RunStatus.SUCCEEDED
    assert model_calls(provider) == calls + 1


def test_reexecute_from_failure_of_a_continuation_goes_on_with_the_run(case: Case, provider: FakeProvider):
    case.launch()
    case.wait_until_waiting()
    calls = model_calls(provider)
    case.approve()
    continuation = case.continuation()
    assert case.server.wait_for_end(continuation) == "FAILURE"
    assert case.run().status is RunStatus.FAILED
    case.file.touch()
    again = case.server.reexecute(continuation, "FROM_FAILURE")
    assert case.server.wait_for_end(again) == "SUCCESS"
    assert case.run(again).id == case.first
    assert case.run().dagster_run_ids == (case.first, continuation, again)
    assert case.run().status is RunStatus.SUCCEEDED
    assert model_calls(provider) == calls


def test_a_failed_branch_beside_a_waiting_gate(case: Case, provider: FakeProvider):
    publish(case.server.project, provider, 2, beside=True)
    try:
        from agentmesh_dagster.orchestration.webserver import reload_code_location

        reload_code_location(case.server.url)
        case.launch()
        assert case.server.wait_for_end(case.first) == "FAILURE"
        assert case.run().status is RunStatus.FAILED
        calls = model_calls(provider)
        # The gate stays open and decidable, and nothing goes on by itself.
        case.approve()
        case.file.touch()
        Path(f"{case.file}.beside").touch()
        assert case.run().dagster_run_ids == (case.first,)
        # 'Re-execute from failure' of a first run: it continues, and takes the decision up.
        again = case.server.reexecute(case.first, "FROM_FAILURE")
        assert case.server.wait_for_end(again) == "SUCCESS"
        assert case.run(again).id == case.first
        # To Dagster the gate's op was a success, so that the retry left it out: the sensor takes the decision up.
        run = case.wait_for(RunStatus.SUCCEEDED, bound=3)
        assert run.dagster_run_ids[:2] == (case.first, again)
        assert run.output["done"] == {"version": 2, "by": "anna"}
        assert model_calls(provider) == calls
    finally:
        publish(case.server.project, provider, 1)
        reload_code_location(case.server.url)


def test_a_step_selected_reexecution_is_refused(case: Case, provider: FakeProvider):
    case.file.touch()
    case.launch()
    case.wait_until_waiting()
    calls = model_calls(provider)
    chosen = case.server.reexecute_steps(case.first, "gated", case.config, ["ask", "review"])
    assert case.server.wait_for_end(chosen) == "FAILURE"
    failures = case.server.events(chosen, "ExecutionStepFailureEvent")
    run = case.run()
    assert run.dagster_run_ids == (case.first,)
    assert run.status is RunStatus.WAITING
    assert model_calls(provider) == calls
    assert failures


def test_an_automatic_retry_goes_on_with_the_run(case: Case, provider: FakeProvider):
    """Of a continuation, by AgentMesh."""
    publish(case.server.project, provider, 3, **{"dagster/max_retries": "3"})
    from agentmesh_dagster.orchestration.webserver import reload_code_location

    reload_code_location(case.server.url)
    try:
        case.launch()
        case.wait_until_waiting()
        calls = model_calls(provider)
        case.approve()
        continuation = case.continuation()
        assert case.server.wait_for_end(continuation) == "FAILURE"
        assert case.server.tags(continuation)["dagster/max_retries"] == "0"
        case.file.touch()
        case.continuation(number=2)
        run = case.wait_for(RunStatus.SUCCEEDED, bound=3)
        assert run.output == {"version": 3, "by": "anna"}
        assert model_calls(provider) == calls
    finally:
        publish(case.server.project, provider, 1)
        reload_code_location(case.server.url)


def test_dagsters_own_retry_of_a_first_run_goes_on_with_the_run(case: Case, provider: FakeProvider):
    from agentmesh_dagster.orchestration.webserver import reload_code_location

    publish(case.server.project, provider, 5, beside=True, **{"dagster/max_retries": "3"})
    reload_code_location(case.server.url)
    try:
        case.launch()
        assert case.server.wait_for_end(case.first) == "FAILURE"
        calls = model_calls(provider)
        Path(f"{case.file}.beside").touch()
        retry = case.continuation()
        tags = case.server.tags(retry)
        assert tags["dagster/retry_number"] == "1"
        assert "agentmesh/claim" not in tags
        # What did not fail is not called again, and the gate still waits.
        run = case.wait_for(RunStatus.WAITING, bound=2)
        assert (run.id, run.retries_left) == (case.first, 4 - len(run.dagster_run_ids))
        case.file.touch()
        case.approve()
        run = case.wait_for(RunStatus.SUCCEEDED, bound=len(run.dagster_run_ids) + 1)
        assert run.output["done"] == {"version": 5, "by": "anna"}
        assert model_calls(provider) == calls
    finally:
        publish(case.server.project, provider, 1)
        reload_code_location(case.server.url)


def test_a_retry_after_version_2_was_published_stays_with_version_1(case: Case, provider: FakeProvider):
    from agentmesh_dagster.orchestration.webserver import reload_code_location

    case.launch()
    case.wait_until_waiting()
    case.approve()
    continuation = case.continuation()
    assert case.server.wait_for_end(continuation) == "FAILURE"
    publication = case.run().publication
    publish(case.server.project, provider, 4)
    reload_code_location(case.server.url)
    try:
        pinned = f"gated__p{publication}"
        wait_until("the pinned job is offered", lambda: pinned in case.server.jobs(), 30)
        # Of the job's new version: refused, with the name of the job that fits.
        again = case.server.reexecute(continuation, "FROM_FAILURE")
        assert case.server.wait_for_end(again) == "FAILURE"
        said: Any = case.server.run(again)["eventConnection"]["events"]
        assert pinned in json.dumps(said)
        case.file.touch()
        case.server.project.agentmesh("runs", "retry", case.first)
        assert case.run().status is RunStatus.SUCCEEDED
        assert case.run().output == {"version": 1, "by": "anna"}
    finally:
        publish(case.server.project, provider, 1)
        reload_code_location(case.server.url)
