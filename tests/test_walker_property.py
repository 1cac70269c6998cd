"""The graph walker and Dagster make the same journal of any graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from graph_strategies import SLUG, Case, cases
from hypothesis import HealthCheck, given, note, settings
from twin_runs import Journal, TwinRuns, twin_runs

from agentmesh_dagster.constants import ENV_CONSOLE_LEVEL
from agentmesh_dagster.records import Json, Step

EXAMPLES = 300


@pytest.fixture(scope="module")
def twins() -> Iterator[TwinRuns]:
    with pytest.MonkeyPatch.context() as patch, twin_runs(("graph_functions",)) as opened:
        # Printing a line for each event takes longer than the runs.
        patch.setenv(ENV_CONSOLE_LEVEL, "CRITICAL")
        yield opened


def shape(step: Step) -> Json:
    """What of a row follows from the documents and the input."""
    decision = step.routing_decision or {}
    return {
        "kind": step.kind,
        "node": (step.node_id, step.node_type),
        "parent": step.parent_key,
        "predecessors": sorted(step.predecessor_keys),
        "index": step.iteration_index,
        "status": step.status.value,
        "output": step.output,
        "input": step.input,
        "decision": decision,
        "attempt": step.attempt,
    }


def errors(journal: Journal) -> dict[str, Json]:
    """The error of each step that failed by itself; of several side by side, a container has the first one's."""
    failed = {key: step.error for key, step in journal.steps.items() if step.error is not None}
    return {
        key: (error["code"], error["message"])
        for key, error in failed.items()
        if not any(other.startswith((f"{key}/", f"{key}[", f"{key}#")) for other in failed)
    }


def check_run_error(journal: Journal) -> None:
    error = journal.run.error
    if error is not None and error["code"] not in ("no-end", "run-output"):
        told = [step.error["message"] for step in journal.steps.values() if step.error is not None]
        assert error["message"] in told


@pytest.mark.timeout(900)  # a minute of work, and machines have other things to do
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(case=cases())
def test_the_walker_and_dagster_make_the_same_journal(twins: TwinRuns, case: Case):
    by_dagster, by_walker = twins.run(case.documents, SLUG, case.input)
    note(f"by Dagster: {by_dagster.run.error}\nby the walker: {by_walker.run.error}")
    assert {key: shape(step) for key, step in by_walker.steps.items()} == {
        key: shape(step) for key, step in by_dagster.steps.items()
    }
    assert errors(by_walker) == errors(by_dagster)
    assert (by_walker.run.status, by_walker.run.output) == (by_dagster.run.status, by_dagster.run.output)
    assert by_walker.continuations == by_dagster.continuations
    assert (by_walker.is_ready, by_dagster.is_ready) == (False, False)
    check_run_error(by_walker)
    check_run_error(by_dagster)
