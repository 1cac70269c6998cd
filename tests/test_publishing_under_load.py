"""Definitions are edited, unpublished and deleted while 20 runs wait and work: each ends as what it started with."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from dagster_server import DevServer, Project, is_alive, wait_until
from fake_http import FakeHttp
from fake_provider import FakeProvider

from agentmesh_dagster.orchestration.webserver import reload_code_location
from agentmesh_dagster.records import Run, RunStatus, WaitStatus
from agentmesh_dagster.store import Store

VERSIONS = ("first", "second", "third")
WORKFLOWS = ("edited", "unpublished", "deleted", "calling")
RUNS = 20
WORKING = 8
"""How many of them work; the others wait for a person. Dagster launches 10 at once by default."""

_SHARED = """\
kind: agent
slug: writer
model: openai/writer
instructions: "<version>"
---
kind: tool
slug: stamp
type: http
side_effects: true
config: {method: POST, url: "<tools>/json", query: {value: '"<version>"'}, json: {of: "<version> {{ input.of }}"}}
---
kind: workflow
slug: stamping
input_schema: {type: object, required: [of], properties: {of: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: stamp, type: tool, config: {tool: stamp, input: {of: "{{ input.of }}"}}}
  - {id: end, type: end, config: {output: "<version> {{ steps.stamp.output }}"}}
edges: [{source: start, target: stamp}, {source: stamp, target: end}]
"""

_WORKFLOW = """\
---
kind: workflow
slug: <slug>
input_schema:
  type: object
  required: [of, waits]
  properties: {of: {type: string}, waits: {type: boolean}}
nodes:
  - {id: start, type: start}
  - {id: sort, type: branch, config: {conditions: [{when: input.waits, handle: ask}], default: work}}
  - {id: gate, type: human, config: {title: "{{ input.of }}?"}}
  - {id: write, type: agent, config: {agent: writer, prompt: "<version> {{ input.of }}"}}
  - {id: stamp, type: workflow, config: {workflow: stamping, input: {of: "{{ input.of }}"}}}
  - {id: end, type: end, config: {output: {said: "<version>", stamped: "{{ steps.stamp.output }}"}}}
edges:
  - {source: start, target: sort}
  - {source: sort, source_handle: ask, target: gate}
  - {source: sort, source_handle: work, target: write}
  - {source: gate, source_handle: approved, target: write}
  - {source: write, target: stamp}
  - {source: stamp, target: end}
"""


def documents(version: str, tools: str) -> str:
    text = _SHARED + "".join(_WORKFLOW.replace("<slug>", slug) for slug in WORKFLOWS)
    return text.replace("<version>", version).replace("<tools>", tools)


def unfinished(store: Store, status: RunStatus) -> list[Run]:
    return store.runs.list("default", status=status, limit=None)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_20_runs_end_as_what_they_started_with():
    with (
        tempfile.TemporaryDirectory(prefix="p") as root,
        # Every model call hangs until all are let go.
        FakeProvider(default={"hang": True}) as provider,
        FakeHttp() as tools,
    ):
        project = Project.scaffolded(Path(root) / "project", AGENTMESH_HTTP_ALLOW="127.0.0.1")
        project.configure(lease_s=30, api_base=provider.base_url)
        project.publish("load", documents("first", tools.url))
        with DevServer(project) as server, project.open_store() as store:
            # What `agentmesh dev` tells people to set: commands reload the code location by themselves.
            project.environment["AGENTMESH_DAGSTER_URL"] = server.url
            launched = {
                server.launch(
                    WORKFLOWS[number % len(WORKFLOWS)], {"of": f"N{number:02d}", "waits": number >= WORKING}
                ): f"N{number:02d}"
                for number in range(RUNS)
            }
            wait_until(
                "12 runs wait", lambda: len(unfinished(store, RunStatus.WAITING)) == RUNS - WORKING, 240, 0.5
            )
            wait_until("8 runs work", lambda: provider.count == WORKING, 240, 0.5)

            change_everything(project, provider, tools)
            restart_code_server(server)

            assert {"edited", "calling"} <= set(server.jobs())
            assert not {"unpublished", "deleted"} & set(server.jobs())
            newest = server.launch("edited", {"of": "new", "waits": False})
            provider.released.set()
            for wait in store.waits.list("default", statuses=(WaitStatus.OPEN,), limit=None):
                project.agentmesh("approvals", "approve", wait.id, "--as", "anna")
            wait_until(
                "all runs have ended",
                lambda: all(run.status.is_final for run in store.runs.list("default", limit=None)),
                400,
                0.5,
            )

            runs = {run.id: run for run in store.runs.list("default", limit=None)}
            assert runs.keys() == {*launched, newest}
            for run_id, of in launched.items():
                run = runs[run_id]
                assert (run.status, run.version) == (RunStatus.SUCCEEDED, 1), (of, run.slug, run.error)
                assert run.output == {"said": "first", "stamped": "first first"}
                counted = [calls(provider, tools, f"{version} {of}") for version in VERSIONS]
                assert counted == [2, 0, 0]
                statuses = {server.status(dagster_run_id) for dagster_run_id in run.dagster_run_ids}
                assert statuses == {"SUCCESS"}
            assert runs[newest].output == {"said": "third", "stamped": "third third"}


def change_everything(project: Project, provider: FakeProvider, tools: FakeHttp) -> None:
    """Two new versions of all, one workflow unpublished, another one deleted, and what is called made inactive."""
    project.publish("load", documents("second", tools.url))
    project.agentmesh("unpublish", "workflow", "unpublished")
    project.agentmesh("delete", "workflow", "deleted")
    text = documents("third", tools.url)
    kept = [
        part
        for part in text.split("---\n")
        if "slug: unpublished" not in part and "slug: deleted" not in part
    ]
    project.publish("load", "---\n".join(kept))


def restart_code_server(server: DevServer) -> None:
    killed = server.processes("dagster api grpc")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    for pid in killed:
        wait_until(f"code server {pid} is gone", lambda pid=pid: not is_alive(pid))
    reload_code_location(server.url)


def calls(provider: FakeProvider, tools: FakeHttp, mark: str) -> int:
    """How often a model or a tool was called with a text."""
    of_models = sum(mark in json.dumps(request.body) for request in provider.requests)
    return of_models + sum(mark in call.body for call in tools.calls)
