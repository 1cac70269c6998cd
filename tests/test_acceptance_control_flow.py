"""Branches, items, called workflows and what runs after the end, under `agentmesh dev`: launched, decided, killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from dagster_server import DevServer, Project, is_alive, wait_until
from fake_provider import FakeProvider

from agentmesh_dagster.records import Run, RunStatus, Step, StepStatus, Wait, WaitStatus

LEASE_S = 4.0
WITHIN_S = 150.0
"""How long a run may take on a loaded machine: with `multiprocess` each of its steps starts a process."""

pytestmark = pytest.mark.timeout(400)

FUNCTIONS = '''\
import os


def process(**_given: object) -> int:
    """The number of the process that it runs in."""
    return os.getpid()
'''

DOCUMENTS = """\
kind: agent
slug: slow
model: openai/slow
---
kind: workflow
slug: packing
input_schema: {type: object, required: [items], properties: {items: {type: array}}}
nodes:
  - {id: start, type: start}
  - {id: count, type: transform, config: {output: "{{ input.items | length }} parcels"}}
  - {id: end, type: end}
edges:
  - {source: start, target: count}
  - {source: count, target: end}
---
kind: workflow
slug: orders
nodes:
  - {id: start, type: start}
  - id: both
    type: parallel
    config:
      branches:
        left:
          nodes:
            - {id: x, type: transform, config: {output: 1}}
            - {id: y, type: transform, config: {output: "{{ steps.x.output + 1 }}"}}
          edges: [{source: x, target: y}]
        right:
          nodes: [{id: z, type: transform, config: {output: 3}}]
  - id: each
    type: foreach
    config:
      items: [pen, safe, cup]
      body:
        nodes:
          - id: sort
            type: branch
            config: {conditions: [{when: "item == 'safe'", handle: heavy}], default: light}
          - {id: gate, type: human, config: {title: "Send {{ item }}?"}}
          - {id: sent, type: transform, config: {output: "{{ item }} sent"}}
        edges:
          - {source: sort, source_handle: heavy, target: gate}
          - {source: sort, source_handle: light, target: sent}
          - {source: gate, source_handle: approved, target: sent}
  - {id: call, type: workflow, config: {workflow: packing, input: {items: "{{ steps.each.output }}"}}}
  - id: end
    type: end
    config:
      output:
        both: "{{ steps.both.output }}"
        sent: "{{ steps.each.output }}"
        packed: "{{ steps.call.output }}"
edges:
  - {source: start, target: both}
  - {source: both, target: each}
  - {source: each, target: call}
  - {source: call, target: end}
on_failure:
  nodes: [{id: tell, type: transform, config: {output: "{{ run.error.code }}"}}]
finally:
  nodes: [{id: clean, type: transform, config: {output: "{{ run.status }}: {{ steps.call.output }}"}}]
---
kind: workflow
slug: fanned
settings: {executor: multiprocess, max_concurrent: 2}
nodes:
  - {id: start, type: start}
  - id: each
    type: foreach
    config:
      items: [pen, cup]
      key: item
      fanout: true
      body:
        nodes:
          - {id: where, type: code, config: {function: "definitions.functions:process", input: {}}}
          - id: done
            type: transform
            config: {output: {item: "{{ item }}", pid: "{{ steps.where.output }}"}}
        edges: [{source: where, target: done}]
  - {id: end, type: end}
edges:
  - {source: start, target: each}
  - {source: each, target: end}
---
kind: workflow
slug: asking
nodes:
  - {id: start, type: start}
  - {id: who, type: code, config: {function: "definitions.functions:process", input: {}}}
  - id: each
    type: foreach
    config:
      items: [one, two, three]
      concurrency: 1
      body:
        nodes: [{id: ask, type: agent, config: {agent: slow, prompt: "{{ item }}?"}}]
  - {id: end, type: end, config: {output: "{{ steps.each.output | map(attribute='text') | list }}"}}
edges:
  - {source: start, target: who}
  - {source: who, target: each}
  - {source: each, target: end}
on_failure:
  nodes: [{id: tell, type: transform, config: {output: "{{ run.error.code }}"}}]
finally:
  nodes: [{id: clean, type: transform, config: {output: "{{ run.status }}"}}]
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider() as fake:
        yield fake


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, provider: FakeProvider) -> Iterator[DevServer]:
    folder = tmp_path_factory.mktemp("control") / "project"
    project = Project.scaffolded(folder, AGENTMESH_HTTP_ALLOW="127.0.0.1")
    project.configure(lease_s=LEASE_S, functions=FUNCTIONS, api_base=provider.base_url)
    project.publish("control", DOCUMENTS)
    with DevServer(project) as running:
        yield running


def run_when(server: DevServer, run_id: str, status: RunStatus, *, finalized: int | None = None) -> Run:
    """The run, once it stands so, and has been finalized so many times."""

    def stands() -> Run | None:
        with server.project.open_store() as store:
            found = store.runs.with_prefix("default", run_id)
        run = found[0] if found and found[0].status is status else None
        return run if run is not None and finalized in (None, run.finalized) else None

    run = wait_until(f"run {run_id} is {status.value}, finalized: {finalized}", stands, WITHIN_S)
    assert run is not None
    return run


def success(server: DevServer, dagster_run_id: str) -> None:
    """Waits for a Dagster run's end, which is to be a success."""
    status = server.wait_for_end(dagster_run_id, WITHIN_S)
    assert status == "SUCCESS", server.events(dagster_run_id, "ExecutionStepFailureEvent")


def rows(server: DevServer, run_id: str) -> dict[str, Step]:
    with server.project.open_store() as store:
        return {step.key: step for step in store.runs.steps(run_id)}


def open_wait(server: DevServer, run_id: str) -> Wait:
    with server.project.open_store() as store:
        (wait,) = store.waits.list("default", run_id=run_id, statuses=(WaitStatus.OPEN,))
    return wait


def steps_of(server: DevServer, dagster_run_id: str) -> dict[str, str]:
    """The steps that the run page shows, with their status."""
    return {stats["stepKey"]: stats["status"] for stats in server.run(dagster_run_id)["stepStats"]}


def job_of(server: DevServer, dagster_run_id: str) -> str:
    text = "query J($id: ID!) { runOrError(runId: $id) { ... on Run { jobName } } }"
    found: dict[str, Any] = server.query(text, id=dagster_run_id)["runOrError"]
    return found["jobName"]


def test_a_gate_in_an_item_from_launch_to_finally(server: DevServer):
    run_id = server.launch("orders", {})
    success(server, run_id)
    waiting = run_when(server, run_id, RunStatus.WAITING)
    shown = steps_of(server, run_id)
    branches = {"both.left.x", "both.left.y", "both.right.z"}
    assert {shown[step] for step in branches} == {"SUCCESS"}
    assert waiting.finalized == 0
    wait = open_wait(server, run_id)
    assert wait.step_key == "each[1]/gate"
    before = rows(server, run_id)
    assert {key: before[key].status for key in ("each", "each[0]", "each[1]", "each[2]")} == {
        "each": StepStatus.WAITING,
        "each[0]": StepStatus.SUCCEEDED,
        "each[1]": StepStatus.WAITING,
        "each[2]": StepStatus.SUCCEEDED,
    }

    server.project.agentmesh("approvals", "approve", wait.id[:8], "--as", "anna")

    run = run_when(server, run_id, RunStatus.SUCCEEDED, finalized=1)
    assert run.output == {
        "both": {"left": 2, "right": 3},
        "sent": ["pen sent", "safe sent", "cup sent"],
        "packed": "3 parcels",
    }
    first, continuation, finalizing = run.dagster_run_ids
    assert server.group(run_id) == [first, continuation, finalizing]
    assert [job_of(server, continuation), job_of(server, finalizing)] == ["orders", "agentmesh_finalize"]
    assert steps_of(server, continuation)["call.count"] == "SUCCESS"
    success(server, finalizing)
    found = rows(server, run_id)
    assert found["each[0]"] == before["each[0]"]
    cleaned = found["@finally/clean"]
    assert (cleaned.output, cleaned.dagster_run_id) == ("succeeded: 3 parcels", finalizing)
    assert "@on_failure/tell" not in found


def test_items_that_are_steps_of_processes_of_their_own(server: DevServer):
    run_id = server.launch("fanned", {})
    success(server, run_id)
    run = run_when(server, run_id, RunStatus.SUCCEEDED)
    assert [answer["item"] for answer in run.output] == ["pen", "cup"]
    assert len({answer["pid"] for answer in run.output}) == 2
    items = [status for step, status in steps_of(server, run_id).items() if "agentmesh_item[" in step]
    assert items == ["SUCCESS", "SUCCESS"]
    assert {"each[pen]", "each[cup]"} <= rows(server, run_id).keys()


def test_a_worker_killed_among_items_is_reported_finalized_and_retried(
    server: DevServer, provider: FakeProvider
):
    provider.push({"text": "1"}, {"hang": True}, {"text": "2"}, {"text": "3"})
    run_id = server.launch("asking", {})

    def is_at_work() -> bool:
        assert server.status(run_id) != "FAILURE", server.events(run_id, "ExecutionStepFailureEvent")
        return provider.count_of("slow") == 2

    wait_until("the second item is at work", is_at_work, WITHIN_S)
    worker = rows(server, run_id)["who"].output
    os.kill(worker, signal.SIGKILL)
    wait_until("the worker is gone", lambda: not is_alive(worker), 10)

    failed = run_when(server, run_id, RunStatus.FAILED, finalized=1)

    assert failed.error["code"] == "worker-lost"
    found = rows(server, run_id)
    assert found["@on_failure/tell"].output == "worker-lost"
    assert found["@finally/clean"].output == "failed"
    finalizing = failed.dagster_run_ids[-1]
    assert job_of(server, finalizing) == "agentmesh_finalize"
    assert finalizing in server.group(run_id)

    again = server.reexecute_from_failure(run_id)

    run = run_when(server, run_id, RunStatus.SUCCEEDED, finalized=2)
    assert run.output == ["1", "2", "3"]
    # The first item is done, the second was cut off and comes again.
    assert provider.count_of("slow") == 4
    retried = rows(server, run_id)
    assert retried["each[0]"] == found["each[0]"]
    assert retried["each[1]/ask"].dagster_run_id == again
    assert retried["@finally#2/clean"].output == "succeeded"
    assert "@on_failure#2/tell" not in retried
