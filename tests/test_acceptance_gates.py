"""A refund that waits for a person under `agentmesh dev`: restarts in between, a new version, workers that die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster_server import DevServer, Project, is_alive, wait_until
from fake_provider import FakeProvider

from agentmesh_dagster.orchestration.webserver import reload_code_location
from agentmesh_dagster.records import Run, RunStatus, Wait, WaitStatus
from agentmesh_dagster.store import Store

PACK = Path(__file__).resolve().parent.parent / "packs" / "refund_review"
LEASE_S = 8.0


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(default={"object": {"risk": "high"}}) as fake:
        yield fake


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, provider: FakeProvider) -> Project:
    """The pack as it is, but for its model: the one that counts what it is asked."""
    made = Project.scaffolded(tmp_path_factory.mktemp("gates") / "project", AGENTMESH_HTTP_ALLOW="127.0.0.1")
    made.configure(lease_s=LEASE_S, api_base=provider.base_url)
    yaml = made.folder / ".agentmesh" / "dagster.yaml"
    yaml.write_text(yaml.read_text() + "\nrun_retries: {enabled: true, max_retries: 3}\n")
    for source in PACK.glob("*.yaml"):
        text = source.read_text()
        if "offline/script" in text:
            head, _, tail = text.partition("model: offline/script")
            text = f"{head}model: openai/risk\n{tail[tail.index('instructions') :]}"
        (made.folder / "workflows" / source.name).write_text(text)
    made.agentmesh("import", "workflows", "--publish")
    return made


class Office:
    """A server, its store, and what people do there."""

    def __init__(self, server: DevServer) -> None:
        self.server = server
        self.project = server.project

    @property
    def store(self) -> Store:
        return self.project.open_store()

    def launch(self, order: str, amount: float = 900) -> str:
        return self.server.launch("refund_review", {"order_id": order, "amount": amount})

    def run(self, run_id: str) -> Run:
        with self.store as store:
            return store.runs.get(run_id)

    def gate(self, run_id: str) -> Wait:
        self.server.wait_for_end(run_id)

        def opened() -> Wait | None:
            with self.store as store:
                run = store.runs.get(run_id)
                found = store.waits.list(run.project, run_id=run_id, statuses=(WaitStatus.OPEN,))
            return found[0] if found and run.status is RunStatus.WAITING else None

        wait = wait_until("the gate waits", opened, 60)
        assert wait is not None
        return wait

    def approve(self, wait: Wait, *options: str) -> None:
        self.project.agentmesh("approvals", "approve", wait.id[:8], "--as", "anna", *options)

    def end(self, run_id: str, status: RunStatus = RunStatus.SUCCEEDED) -> Run:
        def ended() -> Run | None:
            with self.store as store:
                found = store.runs.with_prefix("default", run_id)
            return found[0] if found and found[0].status is status else None

        found = wait_until(f"run {run_id} is {status.value}", ended, 90)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def server(project: Project) -> Iterator[DevServer]:
    with DevServer(project) as running:
        yield running


@pytest.fixture
def office(server: DevServer) -> Office:
    return Office(server)


def asked_for(provider: FakeProvider, order: str) -> int:
    return sum(1 for request in provider.requests if order in json.dumps(request.body))


def op_events(server: DevServer, run_id: str, step: str) -> list[dict[str, Any]]:
    events = server.run(run_id)["eventConnection"]["events"]
    return [event for event in events if event.get("stepKey") == step]


def test_a_refund_from_launch_to_payment(office: Office, provider: FakeProvider):
    run_id = office.launch("ORDER-1")
    wait = office.gate(run_id)
    # The run page shows a success that waits, and at the op the question and how to decide it.
    assert office.server.status(run_id) == "SUCCESS"
    assert office.server.tags(run_id)["agentmesh/status"] == "waiting"
    [shown] = [
        event["metadataEntries"]
        for event in op_events(office.server, run_id, "review")
        if event.get("outputName") == "waiting"
    ]
    words = json.dumps(shown)
    assert "Refund 900" in words
    assert f"approvals approve {wait.id[:8]}" in words
    assert "deadline" in words
    assert "agentmesh_decide" in words
    office.approve(wait, "--data", '{"note": "known customer"}')
    run = office.end(run_id)
    assert run.output["status"] == "paid"
    assert run.output["receipt"].startswith("R-")
    assert len(run.dagster_run_ids) == 2
    assert set(office.server.group(run_id)) == set(run.dagster_run_ids)
    assert office.server.wait_for_end(run.dagster_run_ids[1]) == "SUCCESS"
    assert asked_for(provider, "ORDER-1") == 1


def test_a_decision_in_dagsters_ui_alone(office: Office):
    run_id = office.launch("ORDER-2")
    wait = office.gate(run_id)
    config = {"approval": wait.id[:8], "decision": "rejected", "comment": "no receipt", "by": "bob"}
    decision = office.server.launch("agentmesh_decide", config)
    assert office.server.wait_for_end(decision) == "SUCCESS"
    output = office.end(run_id).output
    assert (output["status"], output["by"], output["comment"]) == ("declined", "bob", "no receipt")
    refused = office.server.launch("agentmesh_decide", config)
    assert office.server.wait_for_end(refused) == "FAILURE"
    assert "already decided by bob" in json.dumps(office.server.run(refused)["eventConnection"]["events"])


def test_version_2_without_the_gate_leaves_a_waiting_run_with_version_1(office: Office):
    run_id = office.launch("ORDER-3")
    wait = office.gate(run_id)
    original = (office.project.folder / "workflows" / "refund-review.yaml").read_text()
    try:
        without = original.replace(
            "when: \"input.amount > 500 or steps.classify.output.risk == 'high'\"", "when: 'false'"
        )
        assert without != original
        office.project.publish("refund-review", without)
        reload_code_location(office.server.url)
        # And the code server is a new process, after it was killed.
        for pid in office.server.processes("dagster api grpc"):
            os.kill(pid, signal.SIGKILL)
        reload_code_location(office.server.url)
        office.approve(wait)
        run = office.end(run_id)
        assert run.output["status"] == "paid"
        continuation = run.dagster_run_ids[1]
        job = office.server.query(
            "query J($id: ID!) { runOrError(runId: $id) { ... on Run { jobName } } }", id=continuation
        )
        assert job["runOrError"]["jobName"] == f"refund_review__p{run.publication}"
        # A new run is of version 2: it asks nobody.
        newer = office.end(office.launch("ORDER-4"))
        assert newer.output["status"] == "paid"
        assert newer.version == run.version + 1
    finally:
        office.project.publish("refund-review", original)
        reload_code_location(office.server.url)


def test_restart_of_everything_between_question_and_answer(
    project: Project, server: DevServer, provider: FakeProvider
):
    office = Office(server)
    run_id = office.launch("ORDER-5")
    wait = office.gate(run_id)
    server.kill()
    office.approve(wait)
    server.start()
    assert office.end(run_id).output["status"] == "paid"
    assert asked_for(provider, "ORDER-5") == 1


@pytest.mark.parametrize("with_code_server", [False, True], ids=["worker", "worker and code server"])
def test_a_killed_worker_is_reported_and_retried_by_policy(
    office: Office, provider: FakeProvider, with_code_server: bool
):
    order = f"ORDER-KILL-{int(with_code_server)}"
    before = len(provider.requests)
    provider.push({"hang": True}, {"object": {"risk": "low"}})
    run_id = office.launch(order, amount=20)
    wait_until("the model is asked", lambda: len(provider.requests) > before, 60)
    victims = [worker_pid(office.server, run_id)]
    if with_code_server:
        victims += office.server.processes("dagster api grpc")
        assert len(victims) > 1
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until("they are gone", lambda: not any(map(is_alive, victims)), 10)
    if with_code_server:
        reload_code_location(office.server.url)
    run = office.end(run_id)
    assert run.output["status"] == "paid"
    assert len(run.dagster_run_ids) == 2
    assert office.server.status(run_id) == "FAILURE"
    assert len(office.server.events(run_id, "RunFailureEvent")) == 1


def worker_pid(server: DevServer, run_id: str) -> int:
    """The process that executes a run, as its own engine events say."""
    for event in server.run(run_id)["eventConnection"]["events"]:
        message = event.get("message") or ""
        if "pid:" in message:
            return int(message.split("pid:")[1].split(")")[0].strip())
    raise AssertionError(f"run {run_id} does not say in which process it executes")
