"""`agentmesh approvals`, `events` and `groups`: what is shown, who may decide what, and how refusals read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from cli_project import Outcome, call
from store_samples import a_run, a_step

from agentmesh_dagster.records import Entry, RunStatus, StepStatus, Wait, WaitKind
from agentmesh_dagster.store import Store, open_store

FORM = {
    "type": "object",
    "required": ["amount"],
    "properties": {"amount": {"type": "integer"}, "note": {"type": "string"}},
    "additionalProperties": False,
}


class Gates:
    """A database with waiting runs, and the commands that are asked about them."""

    def __init__(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        self.store = store
        self._capsys = capsys
        self._opened = 0

    def call(self, *args: str) -> Outcome:
        # `--project` leaves it behind for the command's own children.
        os.environ["AGENTMESH_PROJECT"] = "default"
        return call(self._capsys, *args)

    def run(self, run_id: str = "run-1", project: str = "default") -> None:
        """A run that waits."""
        if project != "default":
            self.store.catalog.create_project(project)
        row = a_run(run_id, project=project, status=RunStatus.RUNNING, triggered_by="laura")
        asyncio.run(self.store.journal.bind_run(row, run_id))

    def open(self, step_key: str = "review", **fields: Any) -> Wait:
        """A wait of the run, which waits from then on."""
        self._opened += 1
        values: dict[str, Any] = {
            "id": f"{self._opened:06d}ab-1111",
            "project": "default",
            "run_id": "run-1",
            "step_key": step_key,
            "kind": WaitKind.HUMAN,
            "node_id": step_key,
            "title": "Pay 20?",
            "launcher": "laura",
            "created_at": datetime.now(timezone.utc),
        }
        wait = Wait(**{**values, **fields})
        row = a_step(step_key, wait.run_id, status=StepStatus.WAITING, finished_at=None, duration_ms=None)
        now = wait.created_at
        asyncio.run(self.store.journal.record([Entry(step=row, opened=(wait,))]))
        asyncio.run(self.store.journal.finish_run(wait.run_id, RunStatus.WAITING, at=now))
        return wait


@pytest.fixture
def gates(sqlite_url: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("AGENTMESH_PROJECT", "default")
    with open_store(sqlite_url) as store:
        made = Gates(store, capsys)
        made.run()
        yield made


def refused(outcome: Outcome, code: str) -> dict[str, Any]:
    """The error of a call with `--json`, whose exit code is that of bad input."""
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.error["code"] == code
    return outcome.error


def test_list_shows_what_is_open_and_for_whom(gates: Gates):
    gates.store.groups.set("default", "finance", ["jane", "john"])
    anybodys = gates.open("a")
    finance = gates.open("b", assignees=("group:finance",))
    bobs = gates.open("c", assignees=("bob",), deadline_at=datetime(2099, 1, 1, tzinfo=timezone.utc))
    gates.open("not-of-people", kind=WaitKind.TIMER)

    listed = gates.call("approvals", "list", "--json").json
    assert [each["id"] for each in listed] == [anybodys.id, finance.id, bobs.id]
    assert listed[0]["options"] == ["approved", "rejected"]
    assert any("agentmesh approvals approve" in line for line in listed[0]["how_to_decide"])
    assert listed[2]["deadline_at"] == "2099-01-01T00:00:00+00:00"

    def of(name: str) -> list[str]:
        return [
            each["step_key"] for each in gates.call("approvals", "list", "--assignee", name, "--json").json
        ]

    assert (of("jane"), of("bob"), of("nobody")) == (["a", "b"], ["a", "c"], ["a"])
    assert gates.call("approvals", "list", "--run", "run-1", "--status", "decided", "--json").json == []
    lines = [line.split("\t") for line in gates.call("approvals", "list").out.splitlines()]
    assert lines[0][:5] == ["approval", "kind", "run", "step", "title"]
    assert [line[3] for line in lines[1:]] == ["a", "b", "c"]
    assert lines[2][6] == "group:finance"


def test_a_vote_that_was_given_leaves_the_voters_list(gates: Gates):
    gates.open(assignees=("jane", "bob"), required=2)
    assert gates.call("approvals", "approve", "000001", "--as", "jane").code == 0
    assert gates.call("approvals", "list", "--assignee", "jane", "--json").json == []
    assert len(gates.call("approvals", "list", "--assignee", "bob", "--json").json) == 1
    gates.call("approvals", "approve", "000001", "--as", "bob")
    assert gates.call("approvals", "list", "--json").json == []
    assert len(gates.call("approvals", "list", "--status", "all", "--assignee", "jane", "--json").json) == 1


def test_show_tells_all_that_helps_to_decide(gates: Gates):
    wait = gates.open(
        body="Look at the **receipt**.",
        data={"amount": 20},
        assignees=("jane", "group:finance"),
        required=2,
        separation=True,
        form_schema=FORM,
        prefill={"amount": 20},
        deadline_at=datetime(2099, 1, 1, tzinfo=timezone.utc),
        on_timeout="reject",
        binding="b1nd1ng",
    )
    gates.call(
        "approvals", "approve", wait.id, "--as", "jane", "--comment", "seen", "--data", '{"amount": 19}'
    )
    shown = gates.call("approvals", "show", wait.id[:6], "--json").json
    assert shown["binding"] == "b1nd1ng"
    assert (shown["form_schema"], shown["prefill"]) == (FORM, {"amount": 20})
    [vote] = shown["votes"]
    assert (vote["by"], vote["decision"], vote["comment"], vote["data"]) == (
        "jane",
        "approved",
        "seen",
        {"amount": 19},
    )
    text = gates.call("approvals", "show", wait.id).out
    for words in (
        "Pay 20?",
        "Look at the **receipt**.",
        "jane, group:finance (2 must agree, not the launcher)",
        "then reject",
        "b1nd1ng",
        '"amount": 20',
        ": seen",
        "agentmesh approvals approve",
    ):
        assert words in text, words


def test_approve_says_what_happens_next(gates: Gates):
    gates.open("a")
    gates.open("b", assignees=("jane", "bob"), required=2)
    done = gates.call("approvals", "approve", "000001ab", "--as", "jane")
    assert done.code == 0, done.err
    assert "a: approved by jane" in done.out
    assert "agentmesh_gates" in done.out
    assert "agentmesh runs resume run-1" in done.out
    counted = gates.call("approvals", "approve", "000002ab", "--as", "jane", "--json").json
    assert (counted["status"], counted["answer"], len(counted["votes"])) == ("open", None, 1)
    assert "approvals show 000002ab" in counted["next"]
    closed = gates.call("approvals", "approve", "000002ab", "--as", "bob", "--json").json
    assert closed["status"] == "decided"
    assert (closed["answer"]["decision"], closed["answer"]["by"]) == ("approved", "bob")


def test_who_decides_is_the_user_where_nobody_says(gates: Gates, monkeypatch: pytest.MonkeyPatch):
    gates.open()
    monkeypatch.setenv("LOGNAME", "ursula")
    done = gates.call("approvals", "reject", "000001", "--comment", "no receipt", "--json").json
    assert (done["answer"]["decision"], done["answer"]["by"]) == ("rejected", "ursula")
    assert done["answer"]["comment"] == "no receipt"
    [row] = gates.call("audit", "--action", "decision", "--json").json
    assert (row["actor"], row["entity"]) == ("ursula", "run/run-1")
    assert row["detail"]["comment"] == "no receipt"


def test_options_are_chosen_and_data_comes_from_a_file(gates: Gates, tmp_path: Any):
    gates.open("one", options=("standard", "express"))
    gates.open("some", options=("mail", "phone", "fax"), multiple=True)
    gates.open("unknown", kind=WaitKind.UNKNOWN)
    file = tmp_path / "data.json"
    file.write_text('{"note": "ü"}')
    one = gates.call("approvals", "decide", "000001", "express", "--data", f"@{file}", "--json").json
    assert (one["answer"]["decision"], one["answer"]["data"]) == ("express", {"note": "ü"})
    some = gates.call("approvals", "decide", "000002", "fax", "mail", "--json").json
    assert some["answer"]["decision"] == ["mail", "fax"]
    happened = gates.call("approvals", "decide", "000003", "happened", "--data", '{"id": 7}', "--json").json
    assert (happened["answer"]["decision"], happened["answer"]["data"]) == ("happened", {"id": 7})


def test_the_way_that_a_wait_shows_is_one_that_works(gates: Gates):
    """The first line of each `how_to_decide` is a command to copy; what stands in capitals is filled in."""
    import shlex

    gates.open("gate")
    gates.open("choice", options=("now", "at noon"))
    gates.open("several", options=("mail", "phone"), multiple=True)
    gates.open("cut-off", kind=WaitKind.UNKNOWN, options=("happened", "repeat", "fail"))
    gates.open(
        "tool", kind=WaitKind.TOOL, data={"tool": "pay", "arguments": {"amount": 20}}, form_schema=FORM
    )
    gates.open("wait-for-event", kind=WaitKind.EVENT, event_name="paid by", event_key="A 1")
    gates.open("asking", kind=WaitKind.SUSPEND, label="the first")
    shown = gates.call("runs", "show", "run-1", "--json").json
    assert len(shown["approvals"]) == 7
    for each in shown["approvals"]:
        command = each["how_to_decide"][0].partition("  # ")[0]
        words = [
            {"OPTION": "mail", "JSON": '{"amount": 3}', "TEXT": "so"}.get(word, word)
            for word in shlex.split(command.replace("[OPTION ...]", ""))
        ]
        assert words[0] == "agentmesh"
        extra = ["--no-run"] if words[1:3] == ["runs", "resume"] else []
        done = gates.call(*words[1:], *extra)
        assert done.code == 0, (command, done.err)
    assert gates.call("runs", "show", "run-1", "--json").json["approvals"] == []


def test_refusals_say_why(gates: Gates):
    gates.open("form", form_schema=FORM)
    gates.open("mine", assignees=("jane",), separation=True)
    gates.open("done")
    gates.open("options", options=("a", "b"))
    gates.open("tool", kind=WaitKind.TOOL, binding="h1", data={"tool": "pay", "arguments": {}})
    gates.run("run-2", project="other")
    gates.open("theirs", project="other", run_id="run-2")
    approve = ("approvals", "approve")

    error = refused(
        gates.call(*approve, "000001", "--data", '{"amount": "much", "more": 1}', "--json"), "form"
    )
    assert {issue["path"] for issue in error["context"]["issues"]} >= {"amount"}
    told = gates.call(*approve, "000001", "--data", '{"amount": "much", "more": 1}')
    assert told.code == 2
    assert told.err.count("amount: ") == 1
    assert "  more: " in told.err
    assert gates.call(*approve, "000001", "--data", "{amount").code == 2

    refused(gates.call(*approve, "000002", "--as", "bob", "--json"), "not-assignee")
    gates.open("launcher", separation=True)
    refused(gates.call(*approve, "000007", "--as", "laura", "--json"), "separation")

    assert gates.call(*approve, "000003", "--as", "jane").code == 0
    error = refused(gates.call("approvals", "reject", "000003", "--as", "bob", "--json"), "already-decided")
    assert "jane" in error["message"]

    refused(gates.call(*approve, "000004", "--json"), "bad-decision")
    refused(gates.call("approvals", "decide", "000004", "c", "--json"), "bad-decision")
    refused(gates.call(*approve, "000005", "--hash", "h0", "--json"), "stale")
    assert gates.call(*approve, "000005", "--hash", "h1").code == 0

    refused(gates.call(*approve, "000006", "--json"), "no-approval")
    assert gates.call("--project", "other", *approve, "000006").code == 0
    refused(gates.call(*approve, "nothing", "--json"), "no-approval")
    refused(gates.call(*approve, "00000", "--json"), "no-approval")

    audited = gates.call("audit", "--action", "decision-refused", "--json").json
    codes = {row["detail"]["code"] for row in audited}
    assert codes >= {"form", "not-assignee", "separation", "already-decided", "bad-decision", "stale"}
    assert "much" not in json.dumps(audited)


def test_a_prefix_of_several_approvals_is_refused(gates: Gates):
    gates.open("a", id="abcdef01-1")
    gates.open("b", id="abcdef02-1")
    refused(gates.call("approvals", "approve", "abcdef", "--json"), "ambiguous-approval")
    assert gates.call("approvals", "approve", "abcdef02").code == 0


def test_a_suspension_is_answered_by_runs_resume(gates: Gates):
    schema = {"type": "object", "required": ["seen"], "properties": {"seen": {"type": "boolean"}}}
    gates.open("first/tool/1", kind=WaitKind.SUSPEND, label="receipt", form_schema=schema)
    gates.open("second", kind=WaitKind.SUSPEND, label="receipt")
    gates.open("third", kind=WaitKind.SUSPEND)
    shown = gates.call("runs", "show", "run-1", "--json").json
    assert shown["suspended"] == [
        {"step": "first/tool/1", "label": "receipt"},
        {"step": "second", "label": "receipt"},
        {"step": "third", "label": ""},
    ]
    resume = ("runs", "resume", "run-1", "--no-run", "--json")
    refused(gates.call("approvals", "approve", "000001", "--json"), "bad-decision")
    refused(gates.call(*resume, "--label", "other", "--data", "1"), "no-approval")
    refused(gates.call(*resume, "--label", "receipt", "--data", "1"), "ambiguous-approval")
    first = (*resume, "--label", "receipt", "--step", "first/tool/1", "--data")
    refused(gates.call(*first, '{"seen": 7}'), "form")
    done = gates.call(*first, '{"seen": true}').json
    assert (done["status"], done["answer"]["data"]) == ("decided", {"seen": True})
    refused(gates.call(*first, '{"seen": true}'), "already-decided")
    # The other step is the only one left under the label; a step without a label needs none.
    assert gates.call(*resume, "--label", "receipt", "--data", "2").json["step_key"] == "second"
    assert gates.call(*resume, "--data", "3").json["answer"]["data"] == 3
    refused(gates.call("runs", "resume", "run-1", "--no-run", "--json"), "usage")


def test_a_run_whose_dagster_runs_are_missing_is_shown_and_refused_with_what_to_do(
    gates: Gates, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setattr("agentmesh_dagster.store.publications.Publications.get", lambda *_: None)
    wait = gates.open("first", kind=WaitKind.SUSPEND)
    said = "the Dagster runs of run 'run-1' are not in this Dagster instance. Set DAGSTER_HOME"
    what = "`agentmesh runs cancel run-1` ends it, and `agentmesh run workflow refunds` starts a new one"

    shown = gates.call("runs", "show", "run-1").out

    assert f"note: {said}" in shown
    assert what in shown
    # To look makes nothing.
    assert not home.exists()
    error = refused(gates.call("runs", "resume", "run-1", "--data", "1", "--json"), "dagster-run-missing")
    assert said in error["message"]
    assert what in error["message"]
    assert gates.store.waits.get("default", wait.id).status.value == "open"
    assert gates.call("runs", "cancel", "run-1").code == 0
    shown = gates.call("runs", "show", "run-1").out
    assert said in shown
    assert "runs retry" not in shown
    assert "runs cancel" not in shown


def test_waiting_runs_are_listed_with_since_when(gates: Gates):
    gates.open()
    [run] = gates.call("runs", "list", "--status", "waiting", "--json").json
    assert (run["status"], run["suspended_at"] is not None) == ("waiting", True)
    header, row = (
        line.split("\t") for line in gates.call("runs", "list", "--status", "waiting").out.splitlines()
    )
    assert header[-1] == "waiting since"
    assert row[-1] != "-"
    shown = gates.call("runs", "show", "run-1").out
    assert "waiting since" in shown
    assert "review waits for people: Pay 20?" in shown


def test_a_vote_is_delegated_and_taken_back(gates: Gates):
    gates.open(assignees=("jane", "group:finance"), required=2)
    gates.store.groups.set("default", "finance", ["bob"])

    def of(name: str) -> int:
        return len(gates.call("approvals", "list", "--assignee", name, "--json").json)

    delegate = ("approvals", "delegate", "000001ab")
    done = gates.call(*delegate, "--to", "dora", "--as", "bob", "--comment", "on holiday")
    assert done.out.strip() == "review: dora may decide for bob, and bob no longer"
    assert (of("dora"), of("bob"), of("jane")) == (1, 0, 1)
    shown = gates.call("approvals", "show", "000001ab")
    assert "by bob to dora (on holiday)" in shown.out
    assert "dora for bob" in gates.call("approvals", "list").out
    [delegation] = gates.call("approvals", "show", "000001ab", "--json").json["delegations"]
    assert (delegation["by"], delegation["to"], delegation["comment"]) == ("bob", "dora", "on holiday")
    approve = ("approvals", "approve", "000001ab", "--json")
    assert "to take it back" in refused(gates.call(*approve, "--as", "bob"), "delegated")["message"]
    refused(gates.call(*delegate, "--to", "jane", "--as", "bob", "--json"), "bad-delegate")

    back = gates.call(*delegate, "--to", "bob", "--as", "bob")
    assert back.out.strip() == "review: bob has taken the vote back, and may decide"
    assert (of("dora"), of("bob")) == (0, 1)
    again = gates.call(*delegate, "--to", "dora", "--as", "bob", "--json").json
    assert [each["to"] for each in again["delegations"]] == ["dora"]

    [vote] = gates.call(*approve, "--as", "dora").json["votes"]
    assert (vote["by"], vote["for"]) == ("dora", "bob")
    assert "dora for bob at " in gates.call("approvals", "show", "000001ab").out
    closed = gates.call("approvals", "reject", "000001ab", "--as", "jane")
    assert closed.code == 0
    run = gates.call("runs", "show", "run-1", "--json").json
    [approval] = [each for step in run["steps"] for each in step["approvals"]]
    assert [(each["by"], each.get("for")) for each in approval["votes"]] == [("dora", "bob"), ("jane", None)]


def test_the_text_of_a_decision_names_delegate_and_delegator(gates: Gates):
    gates.open(assignees=("bob",))
    gates.call("approvals", "delegate", "000001ab", "--to", "dora", "--as", "bob")
    assert (
        "review: approved by dora for bob"
        in gates.call("approvals", "approve", "000001ab", "--as", "dora").out
    )
    assert "approved by dora for bob" in gates.call("approvals", "show", "000001ab").out
    late = refused(gates.call("approvals", "approve", "000001ab", "--as", "bob", "--json"), "already-decided")
    assert "already decided by dora for bob" in late["message"]


def test_events_reach_those_who_wait_or_are_kept(gates: Gates):
    wait = gates.open(
        "paid", kind=WaitKind.EVENT, event_name="paid", event_key="A-1", form_schema=FORM, title=""
    )
    send = ("events", "send", "paid")
    kept = gates.call(*send, "--key", "A-2", "--data", '{"amount": 1}', "--json").json
    assert (kept["completed"], kept["is_kept"]) == ([], True)
    unfit = gates.call(*send, "--key", "A-1", "--data", '{"amount": "x"}', "--id", "e0", "--json")
    assert refused(unfit, "form")["context"]["issues"][0]["path"] == "amount"
    done = gates.call(*send, "--key", "A-1", "--data", '{"amount": 1}', "--id", "e1", "--json").json
    assert done["completed"] == [wait.id]
    again = gates.call(*send, "--key", "A-1", "--data", '{"amount": 1}', "--id", "e1", "--json").json
    assert again["is_duplicate"]
    assert "delivered before" in gates.call(*send, "--key", "A-1", "--id", "e1").out
    assert "is kept for 2h" in gates.call(*send, "--keep", "2h").out
    assert gates.call(*send, "--keep", "0", "--json").json["is_kept"] is False
    assert refused(gates.call("events", "send", " ", "--json"), "bad-event")
    for keep in ("never", "-3", "1.5x"):
        assert refused(gates.call(*send, f"--keep={keep}", "--json"), "usage")


def test_groups_are_set_listed_and_removed(gates: Gates):
    assert gates.call("groups", "list", "--json").json == []
    assert gates.call("groups", "set", "finance", "jane", "john").code == 0
    assert gates.call("groups", "set", "group:legal", "lee", "--json").json == {
        "group": "legal",
        "members": ["lee"],
    }
    assert gates.call("groups", "list", "--json").json == [
        {"group": "finance", "members": ["jane", "john"]},
        {"group": "legal", "members": ["lee"]},
    ]
    gates.open(assignees=("group:finance",))
    refused(gates.call("approvals", "approve", "000001", "--as", "lee", "--json"), "not-assignee")
    gates.call("groups", "set", "finance", "lee")
    assert gates.call("approvals", "approve", "000001", "--as", "lee").code == 0
    assert gates.call("groups", "remove", "finance").code == 0
    assert gates.call("groups", "list").out.splitlines()[1:] == ["legal\tlee"]


def test_an_expired_gate_is_closed_for_late_decisions(gates: Gates):
    past = datetime.now(timezone.utc) - timedelta(hours=1)
    gates.open(created_at=past, deadline_at=past + timedelta(minutes=1))
    refused(gates.call("approvals", "approve", "000001", "--json"), "gate-closed")
