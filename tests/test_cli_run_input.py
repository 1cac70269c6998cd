"""What goes into `agentmesh run` and what comes out: coerced input, refused numbers, prints, a function's traceback."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest
from cli_project import run

WORKFLOW = """\
kind: workflow
slug: typed
input_schema:
  type: object
  properties: {i: {type: integer}, b: {type: boolean}, s: {type: string}, n: {type: number, default: 2}}
nodes:
  - {id: start, type: start}
  - {id: work, type: code, config: {function: "typed_code:work", input: {value: "{{ input.i }}"}}, timeout_s: 60}
  - {id: end, type: end, config: {output: "{{ input }}"}}
edges:
  - {source: start, target: work}
  - {source: work, target: end}
"""

CODE = """\
def work(value):
    print("work was called")
    if value == 13:
        raise RuntimeError("disk on fire")
    return value
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("typed.yaml").write_text(WORKFLOW)
    Path("typed_code.py").write_text(CODE)
    done = run("import", "typed.yaml", "--publish")
    assert done.code == 0, done.err
    return tmp_path


def test_input_is_losslessly_coerced_and_prints_stay_out_of_the_result(folder: Path):
    done = run("run", "workflow", "typed", "--input", '{"i": "5", "b": "true", "s": 7}', "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["output"] == {"i": 5, "b": True, "s": "7", "n": 2}
    assert "work was called" in done.err


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
def test_numbers_that_are_not_finite_are_refused(folder: Path, number: str):
    done = run("run", "workflow", "typed", "--input", f'{{"n": {number}}}', "--json")
    assert done.code == 2
    assert "JSON" in json.loads(done.err)["error"]["message"]


def test_a_function_that_fails_shows_its_own_line_and_a_retry_is_audited(folder: Path):
    done = run("run", "workflow", "typed", "--input", '{"i": 13}', "--json")
    assert done.code == 1
    ran = json.loads(done.out)
    assert ran["error"]["message"] == "typed_code:work failed: RuntimeError: disk on fire"
    assert 'typed_code.py", line 4, in work' in ran["error"]["context"]["traceback"]
    with dg.DagsterInstance.from_config(str(folder / ".agentmesh")) as instance:
        failures = instance.all_logs(ran["run_id"], of_type=dg.DagsterEventType.STEP_FAILURE)
        shown = failures[0].dagster_event.step_failure_data.user_failure_data.metadata
        assert 'typed_code.py", line 4, in work' in shown["traceback"].value

    shown = run("run", "workflow", "typed", "--input", '{"i": 13}').out
    assert "work: function-failed: typed_code:work failed: RuntimeError: disk on fire" in shown
    assert "runs retry" in shown
    assert run("runs", "retry", ran["run_id"]).code == 1
    audited = json.loads(run("audit", "--entity", f"run/{ran['run_id']}", "--json").out)
    assert [row["action"] for row in audited] == ["retry"]
