"""The invoice pack, run to its end with answers, and canceled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from gate_project import GateProject, gate_project

from agentmesh_dagster.orchestration.cancellation import cancel_run
from agentmesh_dagster.records import Run, RunStatus, Step, Vote, Wait, WaitStatus
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.testing import publish_documents

PACK = Path(__file__).resolve().parent.parent / "packs" / "invoice_batch"
BATCH: Any = json.loads((PACK / "inputs" / "batch.json").read_text())
DOCUMENTS = [
    document
    for path in sorted(PACK.glob("*.yaml"))
    for document in load_documents(path.read_bytes(), source=path.name)
]


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


@pytest.fixture
def location(project: GateProject) -> dg.RepositoryDefinition:
    publish_documents(project.store, DOCUMENTS)
    return project.load()


def started(project: GateProject, location: dg.RepositoryDefinition) -> Run:
    return project.waiting(location, job="invoice_batch", config=BATCH)


def gates(project: GateProject, run: Run) -> dict[str, Wait]:
    """The open gates by the keys of their steps."""
    found = project.store.waits.list(run.project, run_id=run.id, statuses=(WaitStatus.OPEN,))
    return {wait.step_key: wait for wait in found}


def decide(project: GateProject, gate: Wait, decision: str, comment: str = "") -> None:
    vote = Vote(by="ann", decision=decision, comment=comment, at=project.clock.now())
    project.store.waits.decide(gate.project, gate.id, vote)


def next_job(project: GateProject, location: dg.RepositoryDefinition) -> str:
    """Runs the only thing that the gate sensor asks for."""
    (request,) = project.tick(location).requests
    assert request.job_name is not None
    job = location.get_job(request.job_name)
    run_config = dict(request.run_config or {})
    job.execute_in_process(instance=project.instance, tags=dict(request.tags), run_config=run_config)
    return request.job_name


def steps(project: GateProject, run: Run) -> dict[str, Step]:
    return {step.key: step for step in project.store.runs.steps(run.id)}


def test_large_lines_wait_side_by_side_and_the_letter_is_drafted_until_it_is_right(
    project: GateProject, location: dg.RepositoryDefinition
):
    run = started(project, location)
    drill, gloves = "lines[DRILL-2]/check/review", "lines[GLOVE-L]/check/review"
    assert set(gates(project, run)) == {drill, gloves}
    first = steps(project, run)
    assert first["lines[SCREW-8]"].output["amount"] == 54

    decide(project, gates(project, run)[gloves], "rejected", "ten too many")
    assert next_job(project, location) == "invoice_batch"
    assert set(gates(project, run)) == {drill}
    decide(project, gates(project, run)[drill], "approved")
    assert next_job(project, location) == "invoice_batch"

    ended = project.store.runs.get(run.id)
    assert ended.status is RunStatus.SUCCEEDED
    screws, drills, glove, freight = ended.output["lines"]
    assert screws == {"sku": "SCREW-8", "status": "accepted", "amount": 54, "account": "material"}
    assert (drills["status"], drills["amount"]) == ("accepted", 1467)
    assert glove == {"sku": "GLOVE-L", "status": "refused", "amount": 0, "why": "ten too many"}
    assert freight["error"]["code"] == "run-input"
    assert ended.output["payable"] == 1521
    assert all(part in ended.output["letter"] for part in ("2026-117", "1521.0 EUR", "Refused: GLOVE-L."))
    found = steps(project, run)
    assert found["letter#1/judge"].output["missing"] == ["1521.0 EUR"]
    assert found["letter"].output["iterations"] == 2
    # What had finished before the gates was not done again.
    calls = {key for key in first if "/llm/" in key}
    assert len(calls) == 3
    assert all(found[key].finished_at == first[key].finished_at for key in calls)

    assert next_job(project, location) == "agentmesh_finalize"
    assert steps(project, run)["@finally/report"].output == (
        "Invoice 2026-117 of Muster Ltd: succeeded, 1521.0 EUR of 4 lines are payable."
    )


def test_a_canceled_batch_reports_too(project: GateProject, location: dg.RepositoryDefinition):
    run = started(project, location)

    cancel_run(project.store, project.instance, run, by="bob")

    assert gates(project, run) == {}
    assert next_job(project, location) == "agentmesh_finalize"
    assert "canceled, 0 EUR of 4 lines" in steps(project, run)["@finally/report"].output
