"""Running, looking at runs, canceling and retrying them: whole commands in processes of their own."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_project import FLAKY, FLAKY_CODE, run, start, write_documents
from forked import Forked

WAIT_S = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the workflows `greet` and `flaky` published."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "docs")
    Path("docs/flaky.yaml").write_text(FLAKY)
    Path("flaky_code.py").write_text(FLAKY_CODE)
    done = run("import", "docs", "--publish")
    assert done.code == 0, done.err
    return tmp_path


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return found


def start_flaky() -> Forked:
    """`agentmesh run` on `flaky`, held inside its node `second`."""
    Path("hold").touch()
    process = start("run", "workflow", "flaky", "--json")
    until(lambda: Path("held").exists() or process.poll() is not None)
    assert process.poll() is None, process.err
    return process


def statuses(run_object: Any) -> dict[str, str]:
    return {step["key"]: step["status"] for step in run_object["steps"]}


def test_a_run_and_all_that_shows_it(folder: Path):
    (folder / "in.json").write_text('{"name": "Ada"}')
    done = run("run", "workflow", "greet", "--input", "@in.json", "--json", "--tag", "team=x")
    assert done.code == 0, done.err
    ran = done.json
    assert set(ran) == {
        "run_id", "dagster_run_ids", "status", "output", "error", "finalized", "finalize_error", "approvals",
        "suspended", "steps",
    }  # fmt: skip
    assert set(ran["steps"][0]) == {
        "id", "key", "node_id", "node_name", "node_type", "kind", "entity_kind", "entity_slug", "parent_key",
        "predecessor_keys", "iteration_index", "status", "input", "output", "error", "attempt", "replayed",
        "routing_decision", "model_used", "child_run_id", "dagster_run_id", "approvals", "queued_at",
        "started_at", "finished_at", "duration_ms", "tokens", "cost_usd",
    }  # fmt: skip
    assert [step["key"] for step in ran["steps"]] == ["start", "ask", "ask/llm/1", "end"]
    assert ran["output"] == {"text": "Greet Ada"}
    assert ran["dagster_run_ids"] == [ran["run_id"]]
    run_id = ran["run_id"]

    shown = run("runs", "show", run_id[:8], "--json").json
    assert (shown["run_id"], shown["input"], shown["slug"]) == (run_id, {"name": "Ada"}, "greet")
    trace = run("runs", "trace", run_id, "--json").json
    ask = next(step for step in trace["steps"] if step["key"] == "ask")
    assert [child["key"] for child in ask["children"]] == ["ask/llm/1"]
    assert "llm/1" in run("runs", "trace", run_id).out
    events = [
        json.loads(line) for line in run("runs", "events", run_id, "--follow", "--json").out.splitlines()
    ]
    assert (events[0]["type"], events[-1]["type"]) == ("run.started", "run.completed")
    of_type = run(
        "runs", "events", run_id, "--type", "agent.*", "--step", "ask/llm/1", "--json"
    ).out.splitlines()
    assert [json.loads(line)["type"] for line in of_type] == ["agent.request", "agent.response"]
    [listed] = run("runs", "list", "--slug", "greet", "--status", "succeeded", "--json").json
    assert listed["run_id"] == run_id
    assert run("runs", "list", "--status", "failed", "--json").json == []
    assert run("stats", "workflow", "greet", "--json").json["by_status"] == {"succeeded": 1}

    for words, code in (
        (["cancel"], "run-final"),
        (["retry"], "run-not-failed"),
        (["resume"], "nothing-to-resume"),
    ):
        refused = run("runs", *words, run_id, "--json")
        assert (refused.code, refused.error["code"]) == (2, code)
    assert run("--project", "default", "runs", "show", run_id[:5], "--json").error["code"] == "no-run"


def test_input_from_standard_input_and_the_table(folder: Path):
    done = run("run", "workflow", "greet", "--input", "-", input='{"name": "Ada"}')
    assert done.code == 0, done.err
    lines = [line.split("\t") for line in done.out.splitlines() if "\t" in line]
    assert lines[0] == ["step", "type", "status", "time", "tokens"]
    assert [line[0] for line in lines[1:]] == ["start", "ask", "  llm/1", "end"]
    assert "Greet Ada" in done.out


def test_a_failed_run_is_retried_as_the_version_that_it_started_with(folder: Path):
    failed = run("run", "workflow", "flaky", "--json")
    assert (failed.code, failed.json["status"]) == (1, "failed")
    assert "not mended yet" in failed.json["error"]["message"]
    run_id = failed.json["run_id"]
    Path("docs/flaky.yaml").write_text(FLAKY.replace("version: 1", "version: 2"))
    assert run("import", "docs/flaky.yaml", "--publish").code == 0

    again = run("runs", "retry", run_id, "--json")
    assert (again.code, again.json["status"]) == (1, "failed")
    Path("mended").touch()
    mended = run("runs", "retry", run_id[:8], "--json")
    assert mended.code == 0, mended.err
    ran = mended.json
    assert (ran["run_id"], ran["status"], ran["output"]) == (
        run_id,
        "succeeded",
        {"version": 1, "got": "fine"},
    )
    assert len(ran["dagster_run_ids"]) == 3
    replayed = {step["key"]: step["replayed"] for step in ran["steps"]}
    assert (replayed["first"], replayed["second"]) == (True, False)
    assert Path("calls").read_text() == "x"
    assert len(run("runs", "list", "--json").json) == 1


def test_a_project_with_a_code_location_retries_the_version_too(folder: Path):
    assert run("init", ".").code == 0
    assert run("run", "workflow", "flaky").code == 1
    [failed] = run("runs", "list", "--json").json
    Path("docs/flaky.yaml").write_text(FLAKY.replace("version: 1", "version: 2"))
    run("import", "docs/flaky.yaml", "--publish")
    Path("mended").touch()
    done = run("runs", "retry", failed["run_id"], "--json")
    assert done.code == 0, done.err
    assert done.json["output"]["version"] == 1
    assert run("run", "workflow", "flaky", "--json").json["output"]["version"] == 2

    run("deactivate", "workflow", "flaky")
    inactive = run("run", "workflow", "flaky", "--json")
    assert (inactive.code, inactive.error["code"]) == (2, "inactive")
    run("activate", "workflow", "flaky")
    Path("definitions/code_location.py").write_text("import nothing_of_that_name\n")
    broken = run("run", "workflow", "flaky", "--json")
    assert (broken.code, broken.error["code"]) == (2, "job-unloadable")
    assert "nothing_of_that_name" in broken.error["message"]


def test_a_dagster_home_that_dagster_refuses_is_said_in_a_line(folder: Path):
    Path(".agentmesh/dagster.yaml").write_text("nonsense: {x: 1}\n")
    done = run("run", "workflow", "greet", "--input", '{"name": "A"}', "--json")
    assert (done.code, done.error["code"]) == (1, "dagster-instance")
    assert "nonsense" in done.error["message"]


def test_ctrl_c_cancels_a_run_and_a_retry_goes_on(folder: Path):
    process = start_flaky()
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 1, process.err
    assert "Traceback" not in process.err
    canceled = json.loads(process.out)
    assert canceled["status"] == "canceled"
    Path("hold").unlink()
    Path("mended").touch()
    done = run("runs", "retry", canceled["run_id"], "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "succeeded"
    assert Path("calls").read_text() == "x"


def test_a_run_of_another_shell_is_canceled(folder: Path):
    process = start_flaky()
    [at_work] = run("runs", "list", "--json").json
    done = run("runs", "cancel", at_work["run_id"], "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "canceled"
    process.wait(WAIT_S)
    assert json.loads(process.out)["status"] == "canceled"
    assert Path("calls").read_text() == "x"


def test_a_run_at_work_is_not_retried_and_is_followed_to_its_end(folder: Path):
    process = start_flaky()
    [at_work] = run("runs", "list", "--json").json
    busy = run("runs", "retry", at_work["run_id"], "--json")
    assert (busy.code, busy.error["code"]) == (2, "run-at-work")
    follower = start("runs", "events", at_work["run_id"], "--follow", "--json")
    Path("mended").touch()
    Path("hold").unlink()
    process.wait(WAIT_S)
    assert json.loads(process.out)["status"] == "succeeded"
    follower.wait(WAIT_S)
    assert json.loads(follower.out.splitlines()[-1])["type"] == "run.completed"


def test_a_killed_run_is_canceled_once_its_lease_is_over(folder: Path):
    process = start_flaky()
    process.kill()
    [lost] = run("runs", "list", "--json").json
    assert lost["status"] == "running"
    assert run("runs", "cancel", lost["run_id"]).code == 1
    end_lease(folder)
    done = run("runs", "cancel", lost["run_id"], "--json")
    assert done.code == 0, done.err
    assert done.json["status"] == "canceled"
    [row] = run("audit", "--action", "cancel", "--json").json
    assert row["entity"] == f"run/{lost['run_id']}"


def test_a_killed_run_is_retried_once_its_lease_is_over(folder: Path):
    process = start_flaky()
    process.kill()
    end_lease(folder)
    Path("hold").unlink()
    Path("mended").touch()
    [lost] = run("runs", "list", "--json").json
    done = run("runs", "retry", lost["run_id"], "--json")
    assert (done.json["run_id"], done.json["status"]) == (lost["run_id"], "succeeded")
    assert Path("calls").read_text() == "x"


def end_lease(folder: Path) -> None:
    """Lets the time pass that a lease lasts."""
    database = sqlite3.connect(folder / ".agentmesh" / "agentmesh.db")
    changed = database.execute("UPDATE leases SET expires_at = '2020-01-01 00:00:00.000000'").rowcount
    database.commit()
    database.close()
    assert changed == 1


def test_a_prefix_of_several_runs_is_refused_with_their_ids(folder: Path):
    ids = [
        run("run", "workflow", "greet", "--input", '{"name": "A"}', "--json").json["run_id"] for _ in range(2)
    ]
    database = sqlite3.connect(folder / ".agentmesh" / "agentmesh.db")
    database.execute("PRAGMA foreign_keys=OFF")
    for number, run_id in enumerate(ids):
        database.execute("UPDATE runs SET id = ? WHERE id = ?", (f"abcdef-{number}", run_id))
    database.commit()
    database.close()
    refused = run("runs", "show", "abcdef", "--json")
    assert (refused.code, refused.error["code"]) == (2, "ambiguous-run")
    assert "abcdef-0" in refused.error["message"]
