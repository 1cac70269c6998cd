"""What a step was asked, of which node, and what it is about: two hashes that an edit elsewhere leaves as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import workflow_functions
from gate_project import GateProject, gate_project
from sqlalchemy import text

from agentmesh_dagster.orchestration.gate_poll import Offered
from agentmesh_dagster.records import ReadyRun, RunStatus, Step
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.testing import run_workflow

EDITED = """
kind: workflow
slug: two
metadata: {note: META}
nodes:
  - {id: start, type: start}
  - id: first
    type: agent
    name: NAME
    config: {agent: clerk, prompt: hello}
  - id: call
    type: workflow
    config: {workflow: inner, input: {}}
  - id: both
    type: parallel
    config:
      branches:
        one: {nodes: [{id: say, type: transform, config: {output: ONE}}]}
        two: {nodes: [{id: say, type: tool, config: {tool: now, input: {}}}]}
  - {id: second, type: transform, config: {output: LAST}}
  - {id: end, type: end, config: {output: "{{ steps.second.output }}"}}
edges:
  - {source: start, target: first}
  - {source: first, target: call}
  - {source: call, target: both}
  - {source: both, target: second}
  - {source: second, target: end}
---
{kind: agent, slug: clerk, model: offline/echo, instructions: BRIEF}
---
{kind: tool, slug: now, type: builtin, config: {name: now}}
---
kind: workflow
slug: inner
nodes:
  - {id: start, type: start}
  - {id: ask, type: agent, config: {agent: other, prompt: inner}}
  - {id: end, type: end}
edges: [{source: start, target: ask}, {source: ask, target: end}]
---
{kind: agent, slug: other, model: offline/echo, instructions: OTHER}
"""
GATED = """
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: noted, type: code, config: {{function: "workflow_functions:note", input: {{name: called, value: 7}}}}}}
  - id: each
    type: foreach
    config:
      items: [1, 2]
      body: {{nodes: [{{id: inner, type: transform, config: {{output: "{{{{ item }}}}"}}}}]}}
  - {{id: ask, type: human, config: {{title: Pay}}}}
  - {{id: end, type: end, config: {{output: "{{{{ steps.noted.output }}}}"}}}}
edges:
  - {{source: start, target: noted}}
  - {{source: noted, target: each}}
  - {{source: each, target: ask}}
  - {{source: ask, target: end, source_handle: approved}}
"""


def steps_of(**edits: str) -> dict[str, Step]:
    document = EDITED
    for word, value in {"ONE": "1", "LAST": "2", **edits}.items():
        document = document.replace(word, value)
    result = run_workflow(document, slug="two")
    assert result.succeeded
    return dict(result.steps)


def hashes(steps: dict[str, Step]) -> dict[str, tuple[str, str]]:
    return {key: (step.fingerprint, step.node_hash) for key, step in steps.items()}


@pytest.fixture(scope="module")
def before() -> dict[str, Step]:
    return steps_of()


@pytest.mark.parametrize(
    ("edits", "changed"),
    [
        ({"META": "more", "NAME": "A name"}, set()),
        ({"LAST": "3"}, {"second"}),
        ({"ONE": "9"}, {"both", "both/one", "both/one/say", "both/two"}),
        ({"OTHER": "Be kind"}, {"call", "call/ask", "call/ask/llm/1"}),
        ({"BRIEF": "Be kind"}, {"first", "first/llm/1"}),
    ],
)
def test_an_edit_changes_the_hashes_of_what_refers_to_it_alone(
    before: dict[str, Step], edits: dict[str, str], changed: set[str]
):
    after = hashes(steps_of(**edits))
    # What is computed from a changed output is asked another thing, and its node is the same.
    found = {key for key, (_, node_hash) in after.items() if node_hash != before[key].node_hash}
    assert found == changed
    assert {
        key for key, both in after.items() if both[1] == before[key].node_hash and both != hashes(before)[key]
    } <= {"end"}


def test_what_was_asked_is_apart_from_of_whom(before: dict[str, Step]):
    after = steps_of(OTHER="Be kind")
    assert after["call"].fingerprint == before["call"].fingerprint
    assert after["call"].node_hash != before["call"].node_hash
    assert all(len(step.node_hash) == len(step.fingerprint) == 64 for step in after.values())


def test_steps_say_what_they_are_about(before: dict[str, Step]):
    found = {key: (s.entity_kind, s.entity_slug) for key, s in before.items() if s.entity_kind is not None}
    assert found == {
        "first": ("agent", "clerk"),
        "first/llm/1": ("agent", "clerk"),
        "call": ("workflow", "inner"),
        "call/ask": ("agent", "other"),
        "call/ask/llm/1": ("agent", "other"),
        "both/two/say": ("tool", "now"),
        "both/two/say/tool/1": ("tool", "now"),
    }


def test_the_tools_of_an_agent_are_what_their_calls_are_about():
    script = {"replies": [{"tool_calls": [{"tool": "now", "arguments": {}}]}, {"text": "done"}]}
    documents: list[Any] = [
        {
            "kind": "workflow",
            "slug": "w",
            "nodes": [
                {"id": "start", "type": "start"},
                {"id": "ask", "type": "agent", "config": {"agent": "clerk", "prompt": "p"}},
                {"id": "end", "type": "end"},
            ],
            "edges": [{"source": "start", "target": "ask"}, {"source": "ask", "target": "end"}],
        },
        {
            "kind": "agent",
            "slug": "clerk",
            "model": "offline/script",
            "model_settings": script,
            "tools": ["now"],
        },
        {"kind": "tool", "slug": "now", "type": "builtin", "config": {"name": "now"}},
    ]
    result = run_workflow(documents)
    about = {key: (s.entity_kind, s.entity_slug) for key, s in result.steps.items() if "/" in key}
    assert about == {
        "ask/llm/1": ("agent", "clerk"),
        "ask/tool/1.0": ("tool", "now"),
        "ask/llm/2": ("agent", "clerk"),
    }


def as_before_the_upgrade(project: GateProject, definition_hash: str) -> None:
    """Rewrites the rows as the release before wrote them: one hash, with that of the whole closure in it."""
    database = project.store._database
    with database.write() as connection:
        for run_id in connection.execute(text("SELECT id FROM runs")).scalars().all():
            for step in project.store.runs.steps(run_id):
                old = content_hash([step.node_type, step.kind, step.input, definition_hash])
                connection.execute(
                    text(
                        "UPDATE steps SET fingerprint = :old, node_hash = '', entity_kind = NULL WHERE key = :key"
                    ),
                    {"old": old, "key": step.key},
                )


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


@pytest.mark.usefixtures("noted")
def test_a_run_that_waits_across_the_upgrade_goes_on(database_url: str, tmp_path: Path):
    with gate_project(database_url, tmp_path / "home") as project:
        project.publish(text=GATED)
        location = project.load()
        run = project.waiting(location)
        as_before_the_upgrade(project, run.definition_hash)
        project.decide(run)
        project.settled(location)
        ended = project.store.runs.get(run.id)
        assert (ended.status, ended.output) == (RunStatus.SUCCEEDED, 7), ended.error
        assert workflow_functions.notes() == ["called"]
        # What was finished before is left as it was.
        steps = {step.key: step.node_hash for step in project.store.runs.steps(run.id)}
        assert (steps["noted"], bool(steps["ask"])) == ("", True)


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("change", ["fingerprint = 'other'", "node_hash = 'other'", "node_hash = ''"])
def test_a_row_that_answers_another_question_is_refused(sqlite_url: str, tmp_path: Path, change: str):
    with gate_project(sqlite_url, tmp_path / "home") as project:
        project.publish(text=GATED)
        location = project.load()
        run = project.waiting(location)
        with project.store._database.write() as connection:
            connection.execute(text(f"UPDATE steps SET {change} WHERE key = 'noted'"))
        project.decide(run)
        project.settled(location)
        assert project.store.runs.get(run.id).error["code"] == "fingerprint"


def test_usage_is_found_by_index(database_url: str):
    from agentmesh_dagster.store import open_store

    queries = {
        "ix_steps_entity_kind_entity_slug_finished_at": "entity_kind = 'agent' AND entity_slug = 'clerk'",
        "ix_steps_model_used_finished_at": "model_used = 'openai/x' AND finished_at > '2026-01-01'",
        "ix_steps_finished_at": "finished_at > '2026-01-01'",
    }
    with open_store(database_url) as store, store._database.write() as connection:
        is_sqlite = store._database.is_sqlite
        if not is_sqlite:
            # Empty tables are scanned.
            connection.execute(text("SET LOCAL enable_seqscan = off"))
        for index, where in queries.items():
            query = f"SELECT sum(cost_usd) FROM steps WHERE model_used IS NOT NULL AND {where}"
            plan = connection.execute(text(f"EXPLAIN {'QUERY PLAN ' if is_sqlite else ''}{query}"))
            assert index in str(plan.all())


@pytest.mark.parametrize(("kind", "job"), [("workflow", "triage"), ("network", "network__triage")])
def test_jobs_of_ready_runs_are_found_by_kind_and_slug(kind: str, job: str):
    live = {("workflow", "triage"): ("one", "triage"), ("network", "triage"): ("two", "network__triage")}
    run = ReadyRun(
        run_id="run-1",
        kind=kind,
        slug="triage",
        publication=1,
        definition_hash=live[kind, "triage"][0],
        dagster_run_ids=(),
        reason="gate",
    )
    assert Offered(live=live).job_of(run) == job
