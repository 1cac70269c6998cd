"""The job `agentmesh_decide`: approvals and suspensions decided from Dagster's launch form."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import dagster as dg
import pytest
from store_samples import a_run, a_step

from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.orchestration.decide_job import build_decide_job
from agentmesh_dagster.orchestration.decisions import (
    decide_approval,
    list_approvals,
    resume_suspended,
    send_event,
)
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.records import Entry, RunStatus, StepStatus, Wait, WaitKind, WaitStatus

NOW = datetime.now(timezone.utc)


class Waiting:
    """A run that waits, and the job."""

    def __init__(self, url: str) -> None:
        self.agentmesh = AgentMesh(database_url=url)
        self.store = self.agentmesh.store()
        self.job = build_decide_job(self.agentmesh)
        self._opened = 0
        asyncio.run(self.store.journal.bind_run(a_run(triggered_by="laura"), "run-1"))

    def open(self, step_key: str = "review", **fields: Any) -> Wait:
        self._opened += 1
        values: dict[str, Any] = {
            "id": f"{self._opened:06d}ab-1111",
            "project": "default",
            "run_id": "run-1",
            "step_key": step_key,
            "kind": WaitKind.HUMAN,
            "title": "Pay 20?",
            "launcher": "laura",
            "created_at": NOW,
        }
        wait = Wait(**{**values, **fields})
        row = a_step(step_key, status=StepStatus.WAITING, finished_at=None, duration_ms=None)
        asyncio.run(self.store.journal.record([Entry(step=row, opened=(wait,))]))
        asyncio.run(self.store.journal.finish_run("run-1", RunStatus.WAITING, at=NOW))
        return wait

    def launch(self, config: dict[str, Any], **tags: str) -> dg.ExecuteInProcessResult:
        return self.job.execute_in_process(run_config=config, tags=tags, raise_on_error=False)

    def stands(self, wait: Wait) -> Wait:
        return self.store.waits.get("default", wait.id)


@pytest.fixture
def waiting(sqlite_url: str) -> Iterator[Waiting]:
    made = Waiting(sqlite_url)
    yield made
    made.store.close()


def metadata(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    [output] = result.get_step_success_events() and [
        event.event_specific_data for event in result.all_events if event.event_type_value == "STEP_OUTPUT"
    ]
    return {name: value.value for name, value in output.metadata.items()}


def failure(result: dg.ExecuteInProcessResult) -> Any:
    assert not result.success
    return result.failure_data_for_node("decide").user_failure_data


def test_a_launch_decides_and_shows_what_came_of_it(waiting: Waiting):
    wait = waiting.open()
    result = waiting.launch(
        {"approval": wait.id[:6], "decision": "approved", "data": {"note": "ok"}, "comment": "seen"},
        user="jane",
    )
    assert result.success
    stands = waiting.stands(wait)
    assert stands.status is WaitStatus.DECIDED
    assert (stands.answer["by"], stands.answer["data"], stands.answer["comment"]) == (
        "jane",
        {"note": "ok"},
        "seen",
    )
    shown = metadata(result)
    assert (shown["approval"], shown["run"], shown["status"]) == (wait.id, "run-1", "decided")
    assert shown["answer"]["decision"] == "approved"
    assert "agentmesh_gates" in shown["next"]
    # It is no run of AgentMesh.
    assert [run.id for run in waiting.store.runs.list("default")] == ["run-1"]


def test_options_quorums_and_calls(waiting: Waiting):
    several = waiting.open("several", options=("mail", "phone", "fax"), multiple=True)
    assert waiting.launch({"approval": several.id, "decision": ["fax", "mail"], "by": "jane"}).success
    assert waiting.stands(several).answer["decision"] == ["mail", "fax"]

    quorum = waiting.open("quorum", assignees=("jane", "bob"), required=2)
    result = waiting.launch({"approval": quorum.id, "decision": "approved", "by": "jane"})
    assert (metadata(result)["votes"], metadata(result)["next"]) == ("1 of 2", "more people must agree")

    call = waiting.open("call", kind=WaitKind.TOOL, binding="h1", data={"tool": "pay", "arguments": {}})
    config = {"approval": call.id, "decision": "approved", "by": "jane"}
    assert failure(waiting.launch({**config, "binding": "h0"})).metadata["code"].value == "stale"
    assert waiting.launch({**config, "binding": "h1", "data": {"amount": 3}}).success
    assert waiting.stands(call).answer["data"] == {"amount": 3}


def test_a_launch_delegates_a_vote(waiting: Waiting):
    gate = waiting.open(assignees=("jane",))
    config = {"approval": gate.id, "delegate_to": "dora", "comment": "on holiday"}
    shown = metadata(waiting.launch(config, user="jane"))
    assert (shown["delegated"], shown["status"]) == ("by jane to dora", "open")
    assert shown["next"] == "it stays open until somebody decides"
    [delegation] = waiting.stands(gate).delegations
    assert (delegation.by, delegation.to, delegation.comment) == ("jane", "dora", "on holiday")
    refused = failure(waiting.launch({**config, "by": "jane", "decision": "approved"}))
    assert refused.metadata["code"].value == "bad-delegation"
    assert "leave out `decision`" in refused.description
    stranger = failure(waiting.launch({**config, "by": "eve"}))
    assert stranger.metadata["code"].value == "not-assignee"
    assert waiting.launch({"approval": gate.id, "decision": "approved", "by": "dora"}).success
    assert (waiting.stands(gate).answer["by"], waiting.stands(gate).answer["for"]) == ("dora", "jane")


def test_a_suspension_takes_data_of_any_type_and_no_decision(waiting: Waiting):
    for number, data in enumerate(({"seen": [1, None]}, "text", 7, [1, 2], None)):
        wait = waiting.open(f"step-{number}", kind=WaitKind.SUSPEND, label="receipt")
        result = waiting.launch({"approval": wait.id, "data": data, "by": "jane"})
        assert result.success
        assert waiting.stands(wait).answer["data"] == data
    wait = waiting.open("last", kind=WaitKind.SUSPEND)
    refused = failure(waiting.launch({"approval": wait.id, "decision": "approved", "by": "jane"}))
    assert refused.metadata["code"].value == "bad-decision"
    assert waiting.stands(wait).status is WaitStatus.OPEN
    [event] = waiting.store.runs.events("run-1", type="suspension.refused")
    assert (event.step_key, event.payload["code"]) == ("last", "bad-decision")


def test_a_refusal_fails_the_run_with_its_reason(waiting: Waiting):
    form = {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer"}}}
    wait = waiting.open(form_schema=form, assignees=("jane",))
    config = {"approval": wait.id, "decision": "approved"}
    unfit = failure(waiting.launch({**config, "data": {"amount": "much"}}, user="jane"))
    assert unfit.metadata["code"].value == "form"
    assert "\namount: " in unfit.description
    assert "jane" in failure(waiting.launch(config, user="bob")).description
    nobody = failure(waiting.launch(config))
    assert nobody.metadata["code"].value == "no-name"
    assert "by" in nobody.description
    missing = failure(waiting.launch({**config, "approval": "123456"}, user="jane"))
    assert missing.metadata["code"].value == "no-approval"
    assert waiting.stands(wait).status is WaitStatus.OPEN


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"decision": "approved"},
        {"approval": 7},
        {"approval": "x", "decision": {"a": 1}},
        {"approval": "x", "more": 1},
    ],
)
def test_dagster_refuses_what_the_form_does_not_have(waiting: Waiting, config: dict[str, Any]):
    with pytest.raises(dg.DagsterInvalidConfigError):
        waiting.launch(config)


def test_the_python_functions(waiting: Waiting):
    agentmesh = waiting.agentmesh
    gate = waiting.open("gate")
    step = waiting.open("step", kind=WaitKind.SUSPEND, label="receipt")
    event = waiting.open("event", kind=WaitKind.EVENT, event_name="paid", event_key="A-1")
    assert list_approvals(agentmesh) == [gate]
    assert list_approvals(agentmesh, run_id="run-2") == []
    assert list_approvals(agentmesh, status=WaitStatus.DECIDED) == []
    decided = decide_approval(agentmesh, gate.id, "approved", by="jane", data={"a": 1}, comment="fine")
    assert decided == waiting.stands(gate)
    assert list_approvals(agentmesh, status=None, assignee="bob") == [decided]
    with pytest.raises(ApprovalError, match="jane"):
        decide_approval(agentmesh, gate.id, "approved", by="bob")
    with pytest.raises(ApprovalError, match="receipt"):
        resume_suspended(agentmesh, "run-1", "other", {}, by="jane")
    assert resume_suspended(agentmesh, "run-1", "receipt", {"x": 1}, by="jane").id == step.id
    assert send_event(agentmesh, "paid", "A-1", {"amount": 1}, by="jane").completed == (event.id,)
    assert send_event(agentmesh, "paid", "A-1", {"amount": 1}, by="jane", event_id="e").is_kept


def test_data_that_differs_from_an_earlier_votes_is_said_with_its_fields(waiting: Waiting):
    wait = waiting.open(assignees=("ann", "bob", "carl"), required=2)
    config = {"approval": wait.id, "decision": "approved"}
    assert waiting.launch({**config, "by": "ann", "data": {"amount": 90}}).success
    result = waiting.launch({**config, "by": "bob", "data": {"amount": 9}})
    assert not result.success
    failure = next(event for event in result.all_events if event.is_step_failure)
    told = failure.step_failure_data.user_failure_data
    assert "data differs from what ann decided, in amount" in told.description
    assert told.metadata["code"].value == "data-conflict"
    assert waiting.stands(wait).status is WaitStatus.OPEN
