"""The examples of docs/patterns.md do what the page says of them: what they give, and which steps ran."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from gate_project import GateProject, gate_project
from workflow_project import open_project

from agentmesh_dagster.orchestration.cancellation import cancel_run
from agentmesh_dagster.records import Run, RunStatus, Step, StepStatus, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.testing import Answer, WorkflowResult, publish_documents, run_workflow
from agentmesh_dagster.validation import validate_document

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "patterns.md").read_text(encoding="utf-8")
SECTIONS = {
    int(number): (title, body)
    for number, title, body in re.findall(
        r"^## (\d+)\. (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
}
NOT_RUN = (StepStatus.SKIPPED, StepStatus.CANCELED, StepStatus.WAITING)


def examples(number: int) -> list[str]:
    """The documents of a pattern's section."""
    return re.findall(r"^```yaml\n(.*?)^```", SECTIONS[number][1], re.MULTILINE | re.DOTALL)


def example(number: int) -> str:
    (text,) = examples(number)
    return text


def pattern(number: int, input: Any = None, slug: str | None = None, **options: Any) -> WorkflowResult:
    """Runs a pattern's only example."""
    return run_workflow(example(number), input, slug=slug, **options)


def ran(steps: dict[str, Step] | Any) -> set[str]:
    """The keys of the steps that ran to an end of their own, but for `start`."""
    return {key for key, step in steps.items() if step.status not in NOT_RUN} - {"start"}


def said(**answers: Answer) -> Callable[[Wait], Answer | None]:
    """Answers waits by the last part of their steps' keys; others stay open."""
    return lambda wait: answers.get(wait.step_key.rpartition("/")[2].replace("-", "_"))


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


def published(project: GateProject, number: int) -> dg.RepositoryDefinition:
    publish_documents(project.store, example(number))
    return project.load()


def decide(project: GateProject, run: Run, decision: str, data: Any = None) -> None:
    vote = Vote(by="ann", decision=decision, data=data, at=project.clock.now())
    project.store.waits.decide(run.project, project.gate(run).id, vote)


def test_each_of_the_twenty_has_a_section_with_an_example_and_a_test():
    assert list(SECTIONS) == list(range(1, 21))
    tests = {int(name[5:7]) for name in globals() if re.match(r"test_\d\d_", name)}
    assert tests == set(SECTIONS)
    assert all(examples(number) for number in SECTIONS)


def test_01_sequence():
    result = pattern(1)
    assert result.run.output == "picked, packed"
    assert ran(result.steps) == {"pick", "pack", "done"}
    assert result.steps["pack"].predecessor_keys == ("pick",)


def test_02_parallel_split():
    result = pattern(2)
    assert result.run.output == ["packed", "billed"]
    assert ran(result.steps) == {"pack", "bill", "done"}
    assert result.steps["pack"].predecessor_keys == result.steps["bill"].predecessor_keys == ("start",)


def test_03_synchronization():
    result = pattern(3)
    assert result.run.output == "shipped"
    assert ran(result.steps) == {"credit", "stock", "ship", "done"}
    assert set(result.steps["ship"].predecessor_keys) == {"credit", "stock"}
    kept = pattern(3, {"stock": False})
    assert kept.run.output == "kept"
    assert kept.steps["ship"].status is StepStatus.SKIPPED


@pytest.mark.parametrize(("amount", "taken"), [(900, "checked"), (20, "paid")])
def test_04_exclusive_choice(amount: int, taken: str):
    result = pattern(4, {"amount": amount})
    assert ran(result.steps) == {"size", taken}
    assert result.run.output == {"checked": "checked by hand", "paid": "paid at once"}[taken]


@pytest.mark.parametrize(("amount", "taken"), [(900, "check"), (20, "trust")])
def test_05_simple_merge(amount: int, taken: str):
    result = pattern(5, {"amount": amount})
    assert ran(result.steps) == {"size", taken, "pay", "done"}
    assert result.steps["pay"].predecessor_keys == (taken,)
    assert result.run.output == f"{taken}ed and paid"


@pytest.mark.parametrize(
    ("input", "output"),
    [
        ({"fire": True, "hurt": True}, {"engine": "sent", "ambulance": "sent"}),
        ({"hurt": True}, "sent"),
        ({}, "noted"),
    ],
)
def test_06_multi_choice(input: Any, output: Any):
    result = pattern(6, input)
    assert result.run.output == output
    taken = {"fire": "engine", "hurt": "ambulance"}
    assert ran(result.steps) == {"call", *({taken[name] for name in input} or {"noted"})}


@pytest.mark.parametrize(
    "taken", [{"fire": "engine", "hurt": "ambulance"}, {"hurt": "ambulance"}, {}], ids=len
)
def test_07_structured_synchronizing_merge(taken: dict[str, str]):
    result = pattern(7, dict.fromkeys(taken, True))
    assert result.run.output == list(taken.values())
    assert ran(result.steps) == {*taken.values(), "report", "done"}
    assert set(result.steps["report"].predecessor_keys) == (set(taken.values()) or {"start"})


def test_08_multi_merge():
    result = pattern(8, slug="multi-merge")
    assert result.run.output == {"credit": "credit recorded", "stock": "stock recorded"}
    recorded = {key for key in ran(result.steps) if key.endswith("/record/recorded")}
    assert recorded == {"checks/credit/record/recorded", "checks/stock/record/recorded"}


def test_09_structured_discriminator():
    result = pattern(9)
    assert result.run.output == "quick"
    assert ran(result.steps) == {"ask", "ask/quick", "ask/quick/quick", "use", "done"}
    assert result.steps["ask/slow/slow"].status is StepStatus.CANCELED
    assert result.steps["ask"].output["slow"] is None


def test_10_arbitrary_cycles():
    result = pattern(10, {"good_at": 3})
    assert result.run.output == {"text": "draft 3", "iterations": 3}
    judged = {key for key in ran(result.steps) if key.endswith(("/keep", "/mark"))}
    assert judged == {"rounds#1/mark", "rounds#2/mark", "rounds#3/keep"}
    back = yaml.safe_load(example(1))
    back["edges"].append({"source": "pack", "target": "pick"})
    assert "cycle" in [problem.code for problem in validate_document(back).errors]


@pytest.mark.parametrize("gift", [True, False])
def test_11_implicit_termination(gift: bool):
    result = pattern(11, {"gift": gift})
    assert result.run.output == ({"shipped": "shipped", "wrapped": "wrapped"} if gift else "shipped")
    assert ran(result.steps) == ({"shipped", "wrapped"} if gift else {"shipped"})


def test_12_multiple_instances_without_synchronization(project: GateProject):
    location = published(project, 12)
    run = project.run(location, "instances_unsynchronized", config={"tickets": ["a", "b", "c"]})
    assert (run.status, run.output) == (RunStatus.SUCCEEDED, {"started": 3})
    children = project.store.runs.children(run.id)
    assert [child.status for child in children] == [RunStatus.PENDING] * 3

    assert project.settled(location) == ["handle_ticket"] * 3

    ended = [project.store.runs.get(child.id) for child in children]
    assert {child.output for child in ended} == {"a handled", "b handled", "c handled"}
    assert {child.parent_step_key for child in ended} == {f"each[{n}]/handle" for n in range(3)}


def test_13_multiple_instances_number_known_at_design_time():
    first = pattern(13, answers=lambda w: Answer() if "notary" not in w.step_key else None)
    assert first.run.status is RunStatus.WAITING
    assert ran(first.steps) == {
        f"signatures[{who}]{step}" for who in ("buyer", "seller") for step in ("", "/sign")
    }
    result = pattern(13, answers=lambda _: Answer())
    assert result.run.output == ["approved"] * 3
    assert len(result.waits) == 3


@pytest.mark.parametrize("prices", [[8, 4, 2], [8], []], ids=len)
def test_14_multiple_instances_number_known_at_run_time(prices: list[int]):
    lines = [{"id": f"line {n}", "price": price} for n, price in enumerate(prices)]
    result = pattern(14, {"lines": lines})
    assert result.run.output == {"lines": [price * 1.25 for price in prices], "total": sum(prices) * 1.25}
    assert {key for key in ran(result.steps) if key.endswith("/gross")} == {
        f"each[line {n}]/gross" for n in range(len(prices))
    }


def test_15_multiple_instances_number_not_known_beforehand(project: GateProject):
    location = published(project, 15)
    run = project.waiting(location, job="instances_open")
    decide(project, run, "another", {"name": "Ada"})
    # Ada is heard before anybody knows of Ben.
    assert project.settled(location) == ["instances_open", "hear_witness"]
    assert [child.output for child in project.store.runs.children(run.id)] == ["Ada heard"]
    decide(project, run, "another", {"name": "Ben"})
    project.run_request(location, project.tick(location).requests[0])
    decide(project, run, "enough")

    assert "hear_witness" in project.settled(location)

    ended = project.store.runs.get(run.id)
    assert (ended.status, ended.output) == (RunStatus.SUCCEEDED, ["Ada heard", "Ben heard"])
    started = {key for key in ran(steps_of(project, run)) if key.endswith(("/hear", "/close"))}
    assert started == {"witnesses#1/hear", "witnesses#2/hear", "witnesses#3/close"}


def steps_of(project: GateProject, run: Run) -> dict[str, Step]:
    return {step.key: step for step in project.store.runs.steps(run.id)}


@pytest.mark.parametrize(
    ("first", "answer", "branch", "output"),
    [
        (WaitKind.HUMAN, Answer(decision="take"), "person", "taken"),
        (WaitKind.EVENT, Answer(data={"price": 3}), "market", "sold to another"),
        (WaitKind.TIMER, Answer(), "clock", "expired"),
    ],
)
def test_16_deferred_choice(first: WaitKind, answer: Answer, branch: str, output: str):
    result = pattern(16, answers=lambda wait: answer if wait.kind is first else None)
    assert result.run.output == output
    assert {key for key in ran(result.steps) if key.count("/") == 1} == {f"offer/{branch}"}
    withdrawn = [wait.status for wait in result.waits if wait.kind is not first]
    assert withdrawn == [WaitStatus.CANCELED] * 2


def intervals(steps: Any, *keys: str) -> list[tuple[Any, Any]]:
    """When the steps ran, in the order in which they began."""
    return sorted((steps[key].started_at, steps[key].finished_at) for key in keys)


def overlap(times: list[tuple[Any, Any]]) -> bool:
    return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(times))


def test_17_interleaved_parallel_routing(tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch):
    document = yaml.safe_load(example(17))
    with open_project(tmp_path, sqlite_url, monkeypatch) as project:
        project.publish(document)
        run_id = project.execute("interleaved").run_id
        steps = project.steps(run_id)
        assert project.run_row(run_id).output == "all three"
    assert ran(steps) == {"blood", "x-ray", "ecg", "done"}
    assert not overlap(intervals(steps, "blood", "x-ray", "ecg"))
    # Walked in one op too, where without the bound all three are at work at once.
    bounded = run_workflow([{**document, "settings": {"execution": "inline", "max_concurrent": 1}}])
    assert not overlap(intervals(bounded.steps, "blood", "x-ray", "ecg"))
    unbounded = run_workflow([{**document, "settings": {"execution": "inline"}}])
    assert overlap(intervals(unbounded.steps, "blood", "x-ray", "ecg"))


def test_18_milestone():
    order = {"order": "A-1"}
    before = pattern(18, order)
    # Not before the milestone.
    assert [wait.step_key for wait in before.waits] == ["paid"]

    seen: list[str] = []

    def twice_then_packed(wait: Wait) -> Answer | None:
        if wait.step_key == "paid":
            return Answer()
        is_gate = wait.kind is WaitKind.HUMAN
        if is_gate != wait.step_key.startswith(("changeable#1/", "changeable#2/")):
            return None
        seen.append(wait.step_key)
        return Answer(decision="change")

    result = pattern(18, order, answers=twice_then_packed)
    assert result.run.output == {"changes": 2}
    assert seen == [
        "changeable#1/next/change/ask",
        "changeable#2/next/change/ask",
        "changeable#3/next/packed/pack",
    ]
    # And not after it has ended.
    (last,) = [wait for wait in result.waits if wait.step_key == "changeable#3/next/change/ask"]
    assert last.status is WaitStatus.CANCELED


def test_19_cancel_activity():
    withdrawn, cut_off = examples(19)
    claim = {"claim": "C-1"}
    result = run_workflow(withdrawn, claim, answers=said(withdrawn=Answer(data={"why": "mended"})))
    assert result.run.output == "withdrawn"
    assert "assess/work/estimate" not in ran(result.steps)
    assert {wait.step_key: wait.status for wait in result.waits} == {
        "assess/work/estimate": WaitStatus.CANCELED,
        "assess/stop/withdrawn": WaitStatus.DECIDED,
    }
    done = run_workflow(withdrawn, claim, answers=said(estimate=Answer(decision="estimated")))
    assert done.run.output == "estimated"

    late = run_workflow(cut_off)
    assert late.run.output == "given up: timeout"
    assert late.steps["found"].status is StepStatus.SKIPPED


def test_20_cancel_case(project: GateProject):
    location = published(project, 20)
    run = project.waiting(location, job="cancel_case")
    gate = project.gate(run)

    cancel_run(project.store, project.instance, run, by="bob")

    assert project.settled(location) == ["agentmesh_finalize"]
    stands = project.store.runs.get(run.id)
    assert (stands.status, stands.output) == (RunStatus.CANCELED, None)
    assert project.store.waits.get(run.project, gate.id).status is WaitStatus.CANCELED
    steps = steps_of(project, run)
    assert steps["@finally/release"].output == "canceled: seat 12 is free"
    assert "done" not in ran(steps)

    paid = project.waiting(location, job="cancel_case")
    decide(project, paid, "approved")
    assert project.settled(location) == ["cancel_case", "agentmesh_finalize"]
    assert steps_of(project, paid)["@finally/release"].output == "succeeded: seat 12 is kept"
