"""What a node waited for never asks for a continuation once the node is finished, or has taken the answer up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from store_samples import a_run, a_step, a_vote, a_wait
from test_agent_tools import function, pay, scripted, workflow

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Entry, RunStatus, StepStatus, Vote, WaitStatus
from agentmesh_dagster.runtime.journalled import StepAnswer, StepAsk, journalled_step
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.specs.documents import WorkflowSpec
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.testing import Answer, run_workflow

REVIEW = {"id": "review", "type": "human", "config": {"title": "Go on?"}}


@pytest.fixture(autouse=True)
def _notes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def two_approvals(database_url, *after, **node):
    """An agent asks for two approvals at once; the time of the first runs out, and fails the node."""
    tools = [
        pay(requires_approval=True, approval={"timeout": "1h"}),
        function("double", "double", requires_approval=True),
    ]
    wanted = {
        "tool_calls": [
            {"tool": "pay", "arguments": {"name": "a", "value": 1}},
            {"tool": "double", "arguments": {"number": 2}},
        ]
    }
    return run_workflow(
        [
            scripted(wanted, {"text": "Done."}, tools=["pay", "double"]),
            workflow(None, *after, **node),
            *tools,
        ],
        function_modules=("workflow_functions",),
        database_url=database_url,
        answers=lambda wait: Answer(decision="timeout") if wait.deadline_at else None,
    )


def approve(store: Store, wait_id: str) -> None:
    store.waits.decide("default", wait_id, Vote(by="ann", decision="approved", at=SystemClock().now()))


def test_a_node_that_finishes_closes_what_it_still_waits_for(database_url):
    result = two_approvals(database_url, REVIEW, on_error="continue")
    assert result.run.status is RunStatus.WAITING, result.run.error
    assert (result.steps["ask"].status, result.steps["review"].status) == (
        StepStatus.FAILED,
        StepStatus.WAITING,
    )
    late, other, gate = sorted(result.waits, key=lambda wait: (wait.step_key == "review", wait.step_key))
    assert late.used_at is not None
    assert (other.status, other.closed_by, gate.status) == (
        WaitStatus.CANCELED,
        "superseded",
        WaitStatus.OPEN,
    )
    with open_store(database_url) as store:
        with pytest.raises(ApprovalError) as refused:
            approve(store, other.id)
        assert refused.value.code == "gate-closed"
        assert not store.claims.is_ready(result.run.id)
        assert store.claims.poll("default", SystemClock().now()).ready == ()


def test_an_answer_that_came_while_the_finishing_row_was_written_is_taken_up(store: Store):
    decided, open_ = a_wait("decided"), a_wait("open")
    waiting = a_step("gate", status=StepStatus.WAITING, finished_at=None)

    async def work() -> None:
        await store.journal.bind_run(a_run(), "run-1")
        await store.journal.record([Entry(step=waiting, opened=(decided, open_))])
        store.waits.decide("default", decided.id, a_vote())
        assert store.claims.is_ready("run-1")
        ids = [decided.id, open_.id]
        await store.journal.record([Entry(step=a_step("gate"), used=tuple(ids), superseded=tuple(ids))])

    asyncio.run(work())
    first, second = (store.waits.get("default", wait.id) for wait in (decided, open_))
    assert (first.status, first.used_at is not None) == (WaitStatus.DECIDED, True)
    assert (second.status, second.used_at) == (WaitStatus.CANCELED, None)
    assert not store.claims.is_ready("run-1")


@pytest.mark.parametrize("status", [StepStatus.RUNNING, StepStatus.FAILED, StepStatus.CANCELED])
def test_a_node_that_did_not_wait_last_takes_its_answers_up(store: Store, status: StepStatus):
    """As after a worker that was killed, and as an approval that was given while its run had failed."""
    wait = a_wait()

    async def work() -> None:
        await store.journal.bind_run(a_run(), "run-1")
        await store.journal.record([Entry(step=a_step("gate", status=StepStatus.WAITING), opened=(wait,))])
        await store.journal.record([Entry(step=a_step("gate", status=status))])
        store.waits.decide("default", wait.id, a_vote())
        assert store.claims.is_ready("run-1")
        environment: Any = SimpleNamespace(
            journal=store.journal,
            clock=SystemClock(),
            secrets=SimpleNamespace(redact=lambda value: value),
            lease_s=60.0,
        )
        pinned: Any = SimpleNamespace(workflow=WorkflowSpec(slug="sample", nodes=[], edges=[]))
        session = RunSession(environment, store.runs.get("run-1"), pinned, "run-1")
        await session.take_lease()
        await session.load()
        ask = StepAsk(
            key="gate",
            kind="node",
            node_id="gate",
            node_type="human",
            request=None,
            definition_hash="abc",
            idempotent=True,
            announce=True,
        )

        async def call(_progress: object) -> StepAnswer:
            assert store.waits.get("default", wait.id).used_at is not None
            return StepAnswer()

        await journalled_step(session, ask, call)

    asyncio.run(work())
    assert not store.claims.is_ready("run-1")
