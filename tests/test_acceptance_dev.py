"""`agentmesh dev`: the real webserver and daemon, spoken to as Dagster's UI does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster_server import DevServer, Project, wait_until
from fake_provider import FakeProvider

from agentmesh_dagster import AgentMesh, AgentMeshError, get_run, launch_workflow
from agentmesh_dagster.records import RunStatus, StepStatus

FUNCTIONS = '''\
import asyncio
from pathlib import Path


async def sleep_long(note: str) -> dict:
    """Waits half a minute, and leaves a note of its cleanup."""
    Path(note).with_suffix(".started").touch()
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.1)
        Path(note).write_text("cleaned up")
    return {}
'''

WAITER = """\
kind: workflow
slug: waiter
input_schema: {type: object, required: [note], properties: {note: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: hold, type: code, config: {function: "definitions.functions:sleep_long", input: {note: "{{ input.note }}"}}}
  - {id: pause, type: delay, config: {seconds: 30}}
  - {id: end, type: end}
edges:
  - {source: start, target: hold}
  - {source: start, target: pause}
  - {source: hold, target: end}
  - {source: pause, target: end}
"""

ASKER = """\
kind: agent
slug: slow-thinker
model: openai/slow
instructions: Take your time.
---
kind: workflow
slug: asker
nodes:
  - {id: start, type: start}
  - {id: ask, type: agent, config: {agent: slow-thinker, prompt: "Well?"}, timeout_s: 60}
  - {id: end, type: end}
edges:
  - {source: start, target: ask}
  - {source: ask, target: end}
"""

FRESH = """\
kind: workflow
slug: fresh
nodes:
  - {id: start, type: start}
  - {id: end, type: end, config: {output: {version: %d}}}
edges:
  - {source: start, target: end}
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(default={"hang": True}) as fake:
        yield fake


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, provider: FakeProvider) -> Iterator[DevServer]:
    project = Project.scaffolded(tmp_path_factory.mktemp("dev") / "project", AGENTMESH_HTTP_ALLOW="127.0.0.1")
    project.configure(functions=FUNCTIONS, api_base=provider.base_url)
    (project.folder / "workflows" / "waiter.yaml").write_text(WAITER)
    (project.folder / "workflows" / "asker.yaml").write_text(ASKER)
    project.agentmesh("import", "workflows", "--publish")
    with DevServer(project) as running:
        project.environment["AGENTMESH_DAGSTER_URL"] = running.url
        yield running


def metadata(entries: list[dict[str, Any]]) -> dict[str, Any]:
    def value(entry: dict[str, Any]) -> Any:
        if "jsonString" in entry:
            return json.loads(entry["jsonString"])
        return next((entry[key] for key in ("text", "intValue", "floatValue") if key in entry), None)

    return {entry["label"]: value(entry) for entry in entries}


@pytest.mark.parametrize(
    ("run_config", "reason"),
    [
        ({}, "MISSING_REQUIRED_FIELD"),
        ({"name": 5}, "RUNTIME_TYPE_MISMATCH"),
        ({"name": {"first": "Ada"}}, "RUNTIME_TYPE_MISMATCH"),
    ],
)
def test_wrong_input_is_refused_before_a_run_exists_and_the_field_is_named(
    server: DevServer, run_config: dict[str, Any], reason: str
):
    answer = server.try_launch("hello", run_config)

    assert answer["__typename"] == "RunConfigValidationInvalid"
    assert [error["reason"] for error in answer["errors"]] == [reason]
    assert "name" in answer["errors"][0]["message"]
    count = '{ runsOrError(filter: {pipelineName: "hello"}) { ... on Runs { results { runId } } } }'
    assert server.query(count)["runsOrError"]["results"] == []


def test_the_run_page_shows_every_node_as_an_op_with_what_it_gave(server: DevServer):
    run_id = server.launch("hello", {"name": "Ada"})
    assert server.wait_for_end(run_id) == "SUCCESS"
    page = server.run(run_id)

    nodes = {"start", "greet", "end"}
    assert {step["key"] for step in page["executionPlan"]["steps"]} == nodes | {"agentmesh_finish"}
    assert {step["stepKey"]: step["status"] for step in page["stepStats"]} == dict.fromkeys(
        [*nodes, "agentmesh_finish"], "SUCCESS"
    )
    tags = {tag["key"]: tag["value"] for tag in page["tags"]}
    assert tags["agentmesh/run_id"] == run_id
    assert tags["agentmesh/status"] == "succeeded"
    outputs = {
        event["stepKey"]: metadata(event["metadataEntries"])
        for event in page["eventConnection"]["events"]
        if event["__typename"] == "ExecutionStepOutputEvent"
    }
    assert outputs["greet"]["output"] == "Say hello to Ada."
    assert outputs["greet"]["input_tokens"] > 0
    assert outputs["greet"]["output_tokens"] > 0
    assert outputs["greet"]["cost_usd"] == 0.0
    assert outputs["greet"]["model"] == "offline/echo"
    assert json.loads(outputs["end"]["output"]) == {"greeting": "Say hello to Ada."}
    logged = [e["message"] for e in page["eventConnection"]["events"] if e["__typename"] == "LogMessageEvent"]
    assert any("greet: offline/echo answered" in line for line in logged)

    with server.project.open_store() as store:
        run = store.runs.get(run_id)
        assert run.status is RunStatus.SUCCEEDED
        assert run.output == {"greeting": "Say hello to Ada."}
        live = store.publications.live_one("default", "workflow", "hello")
        assert live is not None
        assert run.publication == live.id
    assert tags["agentmesh/publication"] == str(live.id)


def test_the_job_page_shows_description_definition_and_kinds(server: DevServer):
    job = server.job("hello")

    assert job["description"] == "Greets somebody."
    shown = metadata(job["metadataEntries"])
    assert shown["agentmesh/version"] == 1
    assert shown["agentmesh/definition"]["slug"] == "hello"
    assert [node["id"] for node in shown["agentmesh/definition"]["nodes"]] == ["start", "greet", "end"]
    ops = {handle["solid"]["name"]: handle["solid"]["definition"] for handle in job["solidHandles"]}
    assert set(ops) == {"start", "greet", "end", "agentmesh_finish"}
    tags = {entry["key"]: entry["value"] for entry in ops["greet"]["metadata"]}
    assert "dagster/kind/ai" in tags
    assert tags["agentmesh/model"] == "offline/echo"
    assert ops["greet"]["pools"] == ["llm_offline"]


def test_publish_makes_a_job_without_a_restart_and_unpublish_ends_it(server: DevServer):
    assert "fresh" not in server.jobs()

    assert "reloaded" in server.project.publish("fresh", FRESH % 1)
    assert "fresh" in server.jobs()
    first = server.launch("fresh", {})
    assert server.wait_for_end(first) == "SUCCESS"

    # Stored and published, but not yet loaded by the code server: a run is built from what that has loaded.
    url = server.project.environment.pop("AGENTMESH_DAGSTER_URL")
    try:
        server.project.publish("fresh", FRESH % 2)
    finally:
        server.project.environment["AGENTMESH_DAGSTER_URL"] = url
    second = server.launch("fresh", {})
    assert server.wait_for_end(second) == "SUCCESS"
    server.project.agentmesh("publish", "workflow", "fresh")
    third = server.launch("fresh", {})
    assert server.wait_for_end(third) == "SUCCESS"
    with server.project.open_store() as store:
        ran = [store.runs.get(run_id) for run_id in (first, second, third)]
    assert [run.version for run in ran] == [1, 1, 2]
    assert [run.output for run in ran] == [{"version": 1}, {"version": 1}, {"version": 2}]
    assert ran[0].publication == ran[1].publication < ran[2].publication

    assert "reloaded" in server.project.agentmesh("unpublish", "workflow", "fresh")
    assert "fresh" not in server.jobs()


def test_a_terminated_run_is_canceled_within_seconds_and_cleans_up(server: DevServer, tmp_path: Path):
    note = tmp_path / "note"
    run_id = server.launch("waiter", {"note": str(note)})
    wait_until("the long step runs", note.with_suffix(".started").exists)

    asked = time.monotonic()
    server.terminate(run_id)
    assert server.wait_for_end(run_id) == "CANCELED"
    assert time.monotonic() - asked < 5
    assert note.read_text() == "cleaned up"
    _assert_canceled_row(server, run_id, {"hold", "pause"})


def test_a_run_terminated_while_a_model_thinks_is_canceled(server: DevServer, provider: FakeProvider):
    run_id = server.launch("asker", {})
    provider.wait_for(1, timeout_s=60)

    asked = time.monotonic()
    server.terminate(run_id)
    assert server.wait_for_end(run_id) == "CANCELED"
    assert time.monotonic() - asked < 5
    provider.wait_for_cut()
    _assert_canceled_row(server, run_id, {"ask"})
    assert provider.count == 1


def _assert_canceled_row(server: DevServer, run_id: str, cut_off: set[str]) -> None:
    with server.project.open_store() as store:
        wait_until("the run row is canceled", lambda: store.runs.get(run_id).status is RunStatus.CANCELED, 30)
        steps = {step.key: step.status for step in store.runs.steps(run_id)}
        kinds = [event.type for event in store.runs.events(run_id) if event.type.startswith("run.")]
    assert StepStatus.RUNNING not in steps.values()
    assert {steps[key] for key in cut_off} <= {StepStatus.CANCELED, StepStatus.UNKNOWN}
    assert kinds == ["run.started", "run.canceled"]
    assert server.status(run_id) == "CANCELED"


def test_the_sensors_run_by_default_and_tick_without_errors(server: DevServer):
    gates = {"agentmesh_gates", "agentmesh_gates_2", "agentmesh_gates_3"}
    names = {"agentmesh_run_failed", "agentmesh_run_canceled", "agentmesh_reconciler", *gates}

    def ticked() -> dict[str, Any] | None:
        sensors = server.sensors()
        # A gate sensor holds its tick open.
        enough = {name: len(state["ticks"]) >= (1 if name in gates else 2) for name, state in sensors.items()}
        return sensors if all(enough.values()) else None

    sensors = wait_until("each sensor has ticked", ticked)
    assert sensors is not None
    assert set(sensors) == names
    for state in sensors.values():
        assert state["status"] == "RUNNING"
        assert {tick["status"] for tick in state["ticks"]} <= {"SKIPPED", "SUCCESS", "STARTED"}, state[
            "ticks"
        ]


def test_dev_says_that_its_port_is_taken(server: DevServer):
    done = server.project.command("agentmesh_dagster", "dev", "--port", str(server.port))

    assert done.returncode == 2
    assert f"port {server.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_launches_through_the_webserver(server: DevServer):
    agentmesh = AgentMesh(database_url=server.project.database_url)

    run_id = launch_workflow(agentmesh, "hello", {"name": "Ada"}, by="anna", webserver=server.url)

    assert server.wait_for_end(run_id) == "SUCCESS"
    stored = get_run(agentmesh, run_id)
    assert (stored.id, stored.output["greeting"]) == (run_id, "Say hello to Ada.")
    assert (stored.source.value, stored.triggered_by) == ("api", "anna")
    with pytest.raises(AgentMeshError, match="name") as refused:
        launch_workflow(agentmesh, "hello", by="anna", webserver=server.url)
    assert refused.value.code == "run-input"
