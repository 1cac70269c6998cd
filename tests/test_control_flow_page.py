"""The examples of docs/control-flow.md do what the page says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from cli_project import call
from gate_project import GateProject, gate_project

from agentmesh_dagster.records import RunStatus, StepStatus
from agentmesh_dagster.testing import WorkflowResult, publish_documents, run_workflow

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "control-flow.md").read_text(encoding="utf-8")


def example(slug: str) -> str:
    """The block that has the workflow."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (text,) = [block for block in blocks if f"\nslug: {slug}\n" in f"\n{block}"]
    return text


def result_of(slug: str, input: Any = None) -> WorkflowResult:
    return run_workflow(example(slug), input, slug=slug)


def ops_of(result: WorkflowResult) -> set[str]:
    """The steps that Dagster ran."""
    return {event.step_key for event in result.dagster_result.all_events if event.is_step_success} - {None}


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


def published(project: GateProject, slug: str) -> dg.RepositoryDefinition:
    publish_documents(project.store, example(slug))
    return project.load()


def test_branches_are_ops_of_a_nested_graph():
    result = result_of("check-order", {"amount": 500, "country": "FR"})
    assert result.run.output == {"ship": True}
    inside = {"agentmesh_begin", "credit.score", "credit.verdict", "export.listed", "agentmesh_end"}
    assert ops_of(result) == {"start", "done", "agentmesh_finish", *(f"checks.{name}" for name in inside)}
    refused = result_of("check-order", {"amount": 700, "country": "FR"})
    assert refused.run.output == {"ship": False}
    assert refused.steps["checks"].output == {"credit": False, "export": True}


def test_items_are_named_by_their_key_and_one_that_fails_stands_in_its_place():
    lines = [{"sku": "x/1", "amount": 4}, {"sku": "none", "amount": 0}, {"sku": "y", "amount": 5}]
    result = result_of("price-lines", {"lines": lines})
    first, failed, last = result.run.output
    assert (first, last) == (25, 20)
    assert failed["error"]["code"] == "expression-failed"
    keys = {key for key, step in result.steps.items() if step.kind == "item"}
    assert keys == {"price[x%2F1]", "price[none]", "price[y]"}
    assert ops_of(result) == {"start", "price", "done", "agentmesh_finish"}
    many = [{"sku": str(n), "amount": 0} for n in range(11)]
    refused = result_of("price-lines", {"lines": many}).run
    assert refused.error is not None
    assert refused.error["code"] == "too-many-failures"


def test_a_loop_goes_on_with_what_the_iteration_before_gave():
    result = result_of("shorten", {"text": "one two three four five"})
    assert result.run.output == {"text": "one two three", "rounds": 2}
    assert result.steps["cut"].output == {"output": "one two three", "iterations": 2}
    # `until` is asked after the first iteration.
    assert result_of("shorten", {"text": "one two"}).run.output == {"text": "one", "rounds": 1}
    words = " ".join("abcdefghijklmnopqrstuvwxyz")
    assert result_of("shorten", {"text": words}).steps["cut"].output["iterations"] == 10


def test_a_called_workflow_stands_under_its_callers_key():
    result = result_of("quote", {"price": 10})
    assert result.run.output == "11.0 USD"
    assert result.steps["call/start"].output == {"amount": 10, "rate": 1.1}
    assert {"call.start", "call.times", "call.converted"} <= ops_of(result)


def test_a_run_of_its_own_is_awaited_by_its_end(project: GateProject):
    location = published(project, "order-report")
    run = project.waiting(location, job="order_report")
    assert project.store.runs.children(run.id)[0].status is RunStatus.PENDING

    assert project.settled(location) == ["build_report", "order_report"]

    assert project.store.runs.get(run.id).output == {"status": "succeeded", "pages": 12}


@pytest.mark.parametrize(
    ("divisors", "values", "note"),
    [([1, 2, 0], [12, 6], "1 failed"), ([1, 2, 3], [12, 6, 4], None), ([0, 2, 0], None, "2 failed")],
)
def test_a_join_of_two_of_three(divisors: list[int], values: Any, note: Any):
    result = result_of("two-of-three", {"divisors": divisors})
    assert result.run.output == {"values": values, "note": note}
    assert (result.steps["enough"].status is StepStatus.SKIPPED) == (values is None)


@pytest.mark.parametrize(
    ("rows", "status", "told"),
    [(4, "succeeded", []), (0, "failed", ["failed: expression-failed"])],
)
def test_what_runs_when_a_run_has_ended(project: GateProject, rows: int, status: str, told: list[str]):
    location = published(project, "import-orders")
    run = project.run(location, "import_orders", config={"rows": rows})

    assert project.settled(location) == ["agentmesh_finalize"]

    ended = project.store.runs.get(run.id)
    assert ended.status.value == status
    steps = {step.key: step.output for step in project.store.runs.steps(run.id)}
    assert steps["@finally/unlock"] == f"lock-7 released after a run that {status}"
    assert [output for key, output in steps.items() if key == "@on_failure/tell"] == told


def test_items_add_to_the_state_in_their_order():
    assert result_of("collect").run.output == {"names": ["ink", "paper"], "total": 10}
    document = yaml.safe_load(example("collect"))
    del document["state_schema"]["properties"]["names"]["reducer"]
    with pytest.raises(Exception, match="nothing was stored") as raised:
        run_workflow([document])
    assert "state-conflict" in str(getattr(raised.value, "problems", raised.value))


def test_step_keys_are_as_in_the_table():
    result = result_of("translate-batch", {"texts": [{"id": "a", "text": "hello"}]})
    table = PAGE.partition("## Step keys")[2].partition("| step |")[2].partition("\n\n")[0]
    keys = re.findall(r"\| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(keys) == 8
    assert set(keys) <= set(result.steps)


def test_an_inline_workflow_is_one_op_with_the_same_journal():
    document = yaml.safe_load(example("check-order"))
    order = {"amount": 500, "country": "FR"}
    inline = run_workflow([{**document, "settings": {"execution": "inline"}}], order)
    assert ops_of(inline) == {"agentmesh_run"}
    usual = run_workflow([document], order)
    assert {k: s.output for k, s in inline.steps.items()} == {k: s.output for k, s in usual.steps.items()}


def test_the_worst_case_is_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("AGENTMESH_DATABASE_URL", f"sqlite:///{tmp_path}/agentmesh.db")
    monkeypatch.chdir(tmp_path)
    Path("translate-batch.yaml").write_text(example("translate-batch"))
    shown = call(capsys, "validate", "--explain", "translate-batch.yaml").out
    (block,) = re.findall(r"^```text\n(workflow .*?)^```", PAGE, re.MULTILINE | re.DOTALL)

    def words(text: str) -> list[list[str]]:
        return [line.split() for line in text.splitlines()]

    assert words(shown)[-len(words(block)) :] == words(block)
