"""Runs that wait, and `agentmesh runs resume`, where no daemon runs: whole commands in processes of their own."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from cli_project import Outcome, run

from agentmesh_dagster.store import open_store

# `before` counts its calls in a file.
GATE = """\
kind: workflow
slug: pay
input_schema: {type: object}
nodes:
  - {id: start, type: start}
  - {id: before, type: code, config: {function: "flaky_code:before", input: {}}, timeout_s: 60}
  - {id: review, type: human, config: {title: "Pay {{ input.amount }}?", timeout: 30d, on_timeout: route}}
  - {id: paid, type: end, config: {output: {version: 1, by: "{{ steps.review.output.by }}"}}}
  - {id: late, type: end, config: {output: nobody came}}
edges:
  - {source: start, target: before}
  - {source: before, target: review}
  - {source: review, target: paid, source_handle: approved}
  - {source: review, target: late, source_handle: timeout}
"""

ASKING = """\
kind: workflow
slug: asking
input_schema: {type: object}
nodes:
  - {id: start, type: start}
  - {id: ask, type: code, config: {function: "flaky_code:ask", input: {}}, timeout_s: 60}
  - {id: end, type: end, config: {output: "{{ steps.ask.output }}"}}
edges:
  - {source: start, target: ask}
  - {source: ask, target: end}
"""

LATER = """\
kind: workflow
slug: later
input_schema: {type: object}
nodes:
  - {id: start, type: start}
  - {id: sleep, type: delay, config: {until: "2099-01-01T00:00:00Z"}}
  - {id: payment, type: webhook, config: {event: paid, key: "{{ input.order }}"}}
  - {id: end, type: end, config: {output: {amount: "{{ steps.payment.output.amount }}"}}}
edges:
  - {source: start, target: sleep}
  - {source: start, target: payment}
  - {source: sleep, target: end}
  - {source: payment, target: end}
"""

BROKEN = """\
kind: workflow
slug: broken
input_schema: {type: object}
nodes:
  - {id: start, type: start}
  - {id: second, type: code, config: {function: "flaky_code:second", input: {}}, timeout_s: 60}
  - {id: review, type: human, config: {title: "Really?"}}
  - {id: end, type: end, config: {output: "{{ steps.review.output.by }}"}}
edges:
  - {source: start, target: second}
  - {source: start, target: review}
  - {source: second, target: end}
  - {source: review, target: end}
"""

CODE = """\
from pathlib import Path

from agentmesh_dagster import StepContext


def before():
    with open("calls", "a") as file:
        file.write("x")


def ask(step: StepContext):
    first = step.suspend({"page": 1}, label="first", resume_schema={"type": "object", "required": ["name"]})
    return [first, step.suspend(label="second")]


def second():
    if not Path("mended").exists():
        raise ValueError("not mended yet")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    for name, text in (("pay", GATE), ("asking", ASKING), ("later", LATER), ("broken", BROKEN)):
        Path(f"docs/{name}.yaml").write_text(text)
    Path("flaky_code.py").write_text(CODE)
    done = run("import", "docs", "--publish")
    assert done.code == 0, done.err
    return tmp_path


def waiting(slug: str, input: str = "{}") -> Any:
    done = run("run", "workflow", slug, "--input", input, "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "waiting"
    return done.json


def refused(outcome: Outcome, code: str) -> Any:
    assert (outcome.code, outcome.error["code"]) == (2, code)
    return outcome.error


def let_time_pass(folder: Path) -> None:
    """All that waits for a moment has come to it."""
    database = sqlite3.connect(folder / ".agentmesh" / "agentmesh.db")
    past = "2020-01-01 00:00:00.000000"
    database.execute(
        "UPDATE waits SET deadline_at = ?, next_at = ? WHERE deadline_at IS NOT NULL AND status = 'open'",
        (past, past),
    )
    database.commit()
    database.close()


def test_a_gate_waits_is_decided_and_goes_on_here(folder: Path):
    ran = waiting("pay", '{"amount": 20}')
    run_id = ran["run_id"]
    [approval] = ran["approvals"]
    assert set(approval) == {
        "id", "kind", "step_key", "label", "title", "data", "options", "form_schema", "prefill", "assignees",
        "delegations", "deadline_at", "how_to_decide",
    }  # fmt: skip
    assert (approval["kind"], approval["step_key"], approval["title"]) == ("human", "review", "Pay 20?")
    assert ran["suspended"] == []
    shown = run("runs", "show", run_id[:8]).out
    assert "review waits for people: Pay 20?" in shown
    assert f"agentmesh approvals approve {approval['id'][:8]}" in shown

    error = refused(run("runs", "resume", run_id, "--json"), "nothing-to-resume")
    assert f"agentmesh approvals approve {approval['id'][:8]}" in error["message"]
    assert [wait["id"] for wait in error["context"]["waits"]] == [approval["id"]]
    error = refused(run("runs", "retry", run_id, "--json"), "run-not-failed")
    assert f"agentmesh runs resume {run_id[:8]}" in error["message"]

    decided = run("approvals", "approve", approval["id"][:8], "--as", "jane")
    assert decided.code == 0, decided.err
    assert f"agentmesh runs resume {run_id[:8]}" in decided.out
    assert "has come" in run("runs", "show", run_id).out
    done = run("runs", "resume", run_id[:8], "--json")
    assert done.code == 0, done.err
    assert (done.json["run_id"], done.json["status"]) == (run_id, "succeeded")
    assert done.json["output"] == {"version": 1, "by": "jane"}
    assert (done.json["approvals"], len(done.json["dagster_run_ids"])) == ([], 2)
    assert Path("calls").read_text() == "x"
    error = refused(run("runs", "resume", run_id, "--json"), "nothing-to-resume")
    assert "nothing left" in error["message"]


def test_it_goes_on_as_the_version_that_it_started_with(folder: Path):
    assert run("init", ".").code == 0
    ran = waiting("pay", '{"amount": 20}')
    without = (
        GATE.replace("version: 1", "version: 2")
        .replace(
            'type: human, config: {title: "Pay {{ input.amount }}?", timeout: 30d, on_timeout: route}',
            'type: branch, config: {conditions: [{when: "true", handle: approved}], default: timeout}',
        )
        .replace('by: "{{ steps.review.output.by }}"', "by: nobody")
    )
    Path("docs/pay.yaml").write_text(without)
    done = run("import", "docs/pay.yaml", "--publish")
    assert done.code == 0, done.err
    assert run("approvals", "approve", ran["approvals"][0]["id"], "--as", "jane").code == 0
    done = run("runs", "resume", ran["run_id"], "--json")
    assert done.code == 0, done.err
    assert done.json["output"] == {"version": 1, "by": "jane"}


def test_a_function_that_suspends_twice_is_answered_twice(folder: Path):
    ran = waiting("asking")
    assert ran["suspended"] == [{"step": "ask", "label": "first"}]
    assert ran["approvals"][0]["data"] == {"page": 1}
    resume = ("runs", "resume", ran["run_id"], "--label")
    refused(run(*resume, "first", "--data", "{}", "--json"), "form")
    refused(run(*resume, "second", "--data", "{}", "--json"), "no-approval")
    assert run("runs", "show", ran["run_id"], "--json").json["dagster_run_ids"] == ran["dagster_run_ids"]

    again = run(*resume, "first", "--data", '{"name": "Ada"}')
    assert again.code == 0, again.err
    assert "ask waits for data: " in again.out
    assert "--label second" in again.out
    assert run(*resume, "second", "--data", "[2]", "--no-run").code == 0
    done = run("runs", "resume", ran["run_id"], "--json")
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["output"]) == ("succeeded", [{"name": "Ada"}, [2]])
    refused(run(*resume, "second", "--data", "[3]", "--json"), "already-decided")


def test_timers_events_and_deadlines_come_without_a_daemon(folder: Path):
    ran = waiting("later", '{"order": "A-1"}')
    assert {wait["kind"] for wait in ran["approvals"]} == {"timer", "event"}
    error = refused(run("runs", "resume", ran["run_id"], "--json"), "nothing-to-resume")
    assert "agentmesh events send paid --key A-1" in error["message"]
    sent = run("events", "send", "paid", "--key", "A-1", "--data", '{"amount": 20}', "--json")
    assert len(sent.json["completed"]) == 1
    again = run("runs", "resume", ran["run_id"], "--json").json
    assert (again["status"], [wait["kind"] for wait in again["approvals"]]) == ("waiting", ["timer"])
    let_time_pass(folder)
    done = run("runs", "resume", ran["run_id"], "--json")
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["output"]) == ("succeeded", {"amount": 20})

    gate = waiting("pay", '{"amount": 20}')
    let_time_pass(folder)
    assert run("runs", "resume", gate["run_id"], "--json").json["output"] == "nobody came"


def test_a_run_that_somebody_else_continues_is_left_to_them(folder: Path):
    gate, asking = waiting("pay", '{"amount": 20}'), waiting("asking")
    run("approvals", "approve", gate["approvals"][0]["id"])
    with open_store(f"sqlite:///{folder / '.agentmesh' / 'agentmesh.db'}") as store:
        for each in (gate, asking):
            assert store.claims.claim(each["run_id"], reason="resume") is not None
    error = refused(run("runs", "resume", gate["run_id"], "--json"), "run-claimed")
    assert "somebody else continues" in error["message"]
    data = run("runs", "resume", asking["run_id"], "--label", "first", "--data", '{"name": "A"}', "--json")
    assert data.code == 0
    assert "the data is stored" in data.err
    assert (data.json["status"], data.json["suspended"]) == ("waiting", [])


def test_a_failed_run_keeps_its_gate_and_a_retry_goes_on_with_the_decision(folder: Path):
    ran = run("run", "workflow", "broken", "--json")
    assert (ran.code, ran.json["status"]) == (1, "failed")
    run_id, [approval] = ran.json["run_id"], ran.json["approvals"]
    error = refused(run("runs", "resume", run_id, "--json"), "nothing-to-resume")
    assert "runs retry" in error["message"]
    decided = run("approvals", "approve", approval["id"], "--as", "jane")
    assert f"agentmesh runs retry {run_id[:8]}" in decided.out
    Path("mended").touch()
    done = run("runs", "retry", run_id, "--json")
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["output"]) == ("succeeded", "jane")


def test_a_canceled_run_asks_nobody_any_more(folder: Path):
    ran = waiting("pay", '{"amount": 20}')
    done = run("runs", "cancel", ran["run_id"], "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "canceled"
    assert run("approvals", "list", "--json").json == []
    refused(run("approvals", "approve", ran["approvals"][0]["id"], "--json"), "gate-closed")


def test_after_a_rejection_no_retry_is_advised(folder: Path):
    ran = waiting("pay", '{"amount": 20}')
    assert run("approvals", "reject", ran["approvals"][0]["id"], "--comment", "too much").code == 0
    done = run("runs", "resume", ran["run_id"])
    assert done.code == 1
    assert "the decision stands: start a new run" in done.out
    assert "runs retry" not in done.out
