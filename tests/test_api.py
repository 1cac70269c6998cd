"""AgentMesh from Python: what `docs/python.md` does not show."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentmesh_dagster
from agentmesh_dagster import (
    AgentMesh,
    AgentMeshError,
    cancel_run,
    check_documents,
    decide_approval,
    delegate_approval,
    execute_workflow,
    export_document,
    get_run,
    import_documents,
    launch_workflow,
    list_approvals,
    list_runs,
    publish_document,
    resume_run,
    retry_run,
    unpublish_document,
)
from agentmesh_dagster.errors import DefinitionError, DocumentInvalid, NotFound, RunRefused
from agentmesh_dagster.records import RunSource, RunStatus

HELLO = {
    "kind": "workflow",
    "slug": "hello",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string", "default": "you"}}},
    "nodes": [
        {"id": "start", "type": "start"},
        {"id": "end", "type": "end", "config": {"output": {"greeting": "Hello {{ input.name }}"}}},
    ],
    "edges": [{"source": "start", "target": "end"}],
}
GATE = {
    "kind": "workflow",
    "slug": "gate",
    "nodes": [
        {"id": "start", "type": "start"},
        {"id": "ask", "type": "human", "config": {"title": "Go on?"}},
        {"id": "end", "type": "end"},
    ],
    "edges": [{"source": "start", "target": "ask"}, {"source": "ask", "target": "end"}],
}


@pytest.fixture
def agentmesh(tmp_path: Path) -> AgentMesh:
    return AgentMesh.of_project(tmp_path)


def test_every_public_name_is_there():
    for name in agentmesh_dagster.__all__:
        assert getattr(agentmesh_dagster, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'publish_everything'"):
        _ = agentmesh_dagster.publish_everything


def test_documents_come_as_objects_text_and_files(agentmesh: AgentMesh, tmp_path: Path):
    [first] = import_documents(agentmesh, [HELLO], by="anna")
    text = export_document(agentmesh, "workflow", "hello")
    [same] = import_documents(agentmesh, text, by="anna")
    file = tmp_path / "hello.yaml"
    file.write_text(text)
    [again] = import_documents(agentmesh, file, by="anna")
    [both] = import_documents(agentmesh, [file], by="anna")

    assert (first.is_new, first.version) == (True, 1)
    assert [(each.is_new, each.version) for each in (same, again, both)] == [(False, 1)] * 3


def test_problems_name_the_document(agentmesh: AgentMesh):
    broken = {**HELLO, "slug": "broken", "nodes": HELLO["nodes"][:1]}
    report = check_documents(agentmesh, [HELLO, broken])

    assert {source for source, _ in report.errors} == {"documents#2"}
    with pytest.raises(DocumentInvalid, match="documents#2; nothing was stored"):
        import_documents(agentmesh, [HELLO, broken], by="anna")
    assert agentmesh.store().catalog.list("default") == []


@pytest.mark.parametrize(
    "document", [{**HELLO, "metadata": {"at": object()}}, {**HELLO, "metadata": {"x": float("nan")}}, ["a"]]
)
def test_what_is_not_a_json_object_is_refused(agentmesh: AgentMesh, document: object):
    with pytest.raises(DefinitionError, match="documents#1") as refused:
        import_documents(agentmesh, [document], by="anna")
    assert refused.value.code in ("document-not-json", "document-not-object")


def test_a_run_is_executed_with_defaults_and_known_as_of_the_api(agentmesh: AgentMesh):
    import_documents(agentmesh, [HELLO], by="anna")
    with pytest.raises(DefinitionError, match="is not published"):
        execute_workflow(agentmesh, "hello", by="anna")
    published = publish_document(agentmesh, "workflow", "hello", by="anna")

    run = execute_workflow(agentmesh, "hello", by="anna", tags={"team": "sales"})

    assert run.output == {"greeting": "Hello you"}
    assert (run.source, run.triggered_by, run.publication) == (
        RunSource.API,
        "anna",
        published.publication.id,
    )
    assert [each.id for each in list_runs(agentmesh, slug="hello", status=RunStatus.SUCCEEDED)] == [run.id]
    with pytest.raises(RunRefused, match="only failed and canceled runs"):
        retry_run(agentmesh, run.id, by="anna")
    unpublish_document(agentmesh, "workflow", "hello", by="anna")
    with pytest.raises(DefinitionError, match="is not published"):
        execute_workflow(agentmesh, "hello", by="anna")


def test_a_waiting_run_is_canceled(agentmesh: AgentMesh):
    import_documents(agentmesh, [GATE], by="anna", publish=True)
    run = execute_workflow(agentmesh, "gate", by="anna")

    done = cancel_run(agentmesh, run.id, by="bob")

    assert done.run.status is RunStatus.CANCELED
    assert get_run(agentmesh, run.id).status is RunStatus.CANCELED


def test_runs_of_other_projects_are_not_there(agentmesh: AgentMesh, tmp_path: Path):
    import_documents(agentmesh, [HELLO], by="anna", publish=True)
    run = execute_workflow(agentmesh, "hello", by="anna")
    other = AgentMesh(database_url=agentmesh.database_url, project="other", root=tmp_path)

    with pytest.raises(NotFound, match="in the project 'other'"):
        get_run(other, run.id)
    assert list_runs(other) == []


def test_launching_needs_a_webserver(agentmesh: AgentMesh):
    import_documents(agentmesh, [HELLO], by="anna", publish=True)
    with pytest.raises(NotFound, match="no webserver is named"):
        launch_workflow(agentmesh, "hello", by="anna")
    with pytest.raises(AgentMeshError, match="no Dagster webserver answers"):
        launch_workflow(agentmesh, "hello", by="anna", webserver="http://127.0.0.1:9")


def test_a_delegate_decides_and_the_run_knows_for_whom(agentmesh: AgentMesh):
    said = "{{ steps.ask.output.by }} for {{ steps.ask.output.for }}"
    start, ask, end = GATE["nodes"]
    document = {
        **GATE,
        "nodes": [
            start,
            {**ask, "config": {"title": "Go on?", "assignees": ["bob"]}},
            {**end, "config": {"output": {"said": said}}},
        ],
    }
    import_documents(agentmesh, [document], by="anna", publish=True)
    run = execute_workflow(agentmesh, "gate", by="anna")
    [gate] = list_approvals(agentmesh, run_id=run.id, assignee="bob")

    changed = delegate_approval(agentmesh, gate.id, "dora", by="bob", comment="on holiday")

    assert [(each.by, each.to, each.comment) for each in changed.delegations] == [
        ("bob", "dora", "on holiday")
    ]
    assert list_approvals(agentmesh, assignee="bob") == []
    assert list_approvals(agentmesh, assignee="dora") == [changed]
    decide_approval(agentmesh, gate.id, "approved", by="dora")
    assert len(list_approvals(agentmesh, status=None, assignee="dora")) == 1
    assert resume_run(agentmesh, run.id, by="dora").output == {"said": "dora for bob"}
