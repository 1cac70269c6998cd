"""Dagster's own retry of a run whose worker was killed: it re-executes what its log does not say is done.

A worker's last events are lost with it (`event_groups`), so that Dagster re-executes steps whose rows are finished, and
that stand under finished rows.
"""

from __future__ import annotations

import pytest
from test_nested_graphs import body, chain, fail_first, foreach, note, parallel, steps_of, transform
from workflow_functions import notes
from workflow_project import open_project

from agentmesh_dagster.records import RunStatus

CALLED = chain(note("called", 1), output={"got": "{{ steps.called.output }}"}, slug="called")


def called(name):
    return {"id": name, "type": "workflow", "config": {"workflow": "called", "input": {}}}


INNER = parallel("inner", only=body(note("deep", "{{ input.x }}")))
BOTH = parallel(
    "both", left=body(note("one"), note("two"), INNER), right=body(transform("t", 7), called("inside"))
)
EACH = foreach("each", note("seen", "{{ item }}"), transform("done", "{{ steps.seen.output + 1 }}"))
NESTED = chain(
    BOTH,
    called("call"),
    EACH,
    fail_first("last"),
    output={name: f"{{{{ steps.{name}.output }}}}" for name in ("both", "call", "each")},
)
OUTPUT = {
    "both": {"left": {"only": 5}, "right": {"got": 1}},
    "call": {"got": 1},
    "each": [2, 3],
}


@pytest.fixture
def project(tmp_path, sqlite_url, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))
    with open_project(tmp_path, sqlite_url, monkeypatch) as opened:
        yield opened


def lose_events(instance, run_id, after):
    """Leaves of a Dagster run's log what came up to the begin of a step."""
    storage = instance.event_log_storage
    entries = instance.all_logs(run_id)
    began = next(
        number
        for number, entry in enumerate(entries)
        if entry.dagster_event
        and (entry.dagster_event.event_type_value, entry.dagster_event.step_key) == ("STEP_START", after)
    )
    storage.delete_events(run_id)
    for entry in entries[: began + 1]:
        storage.store_event(entry)


@pytest.mark.parametrize(
    "last_known",
    [
        "start",
        "both.agentmesh_begin",
        "both.left.one",
        "both.left.two",
        "both.left.inner.agentmesh_begin",
        "both.left.inner.only.deep",
        "both.left.inner.agentmesh_end",
        "both.right.inside.called",
        "both.right.inside.agentmesh_end",
        "both.agentmesh_end",
        "call.called",
        "call.agentmesh_end",
        "each.agentmesh_begin",
        "each.agentmesh_item[0]",
        "each.agentmesh_item[1]",
        "each.agentmesh_end",
    ],
)
def test_steps_in_ended_containers_are_replayed(project, last_known):
    project.publish(CALLED, NESTED)
    first = project.execute("nested", {"x": 5, "items": [1, 2]})
    assert steps_of(first, "STEP_FAILURE") == {"last"}
    rows = project.steps(first.run_id)
    lose_events(project.instance, first.run_id, last_known)
    second = project.retry("nested", first.run_id)
    run = project.run_row(first.run_id)
    assert second.success, run.error
    assert last_known in steps_of(second)
    assert (run.status, run.output) == (RunStatus.SUCCEEDED, OUTPUT)
    assert run.dagster_run_ids == (first.run_id, second.run_id)
    assert sorted(notes()) == ["called", "called", "deep", "last", "last", "one", "seen", "seen", "two"]
    left = project.steps(first.run_id)
    assert {key: left[key] for key, row in rows.items() if row.is_finished} == {
        key: row for key, row in rows.items() if row.is_finished
    }
