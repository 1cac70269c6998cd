"""A publication that cannot be built any more is a job that says so, and touches no other."""

from __future__ import annotations

import dagster as dg
import pytest

from agentmesh_dagster import AgentMesh, build_code_location
from agentmesh_dagster.specs.closure import Closure, PinnedWorkflow
from agentmesh_dagster.specs.documents import WorkflowSpec
from agentmesh_dagster.store import open_store


def workflow(slug: str, node_type: str, **settings: object) -> WorkflowSpec:
    nodes = [
        {"id": "start", "type": "start"},
        {"id": "work", "type": node_type, "config": {"output": 1}},
        {"id": "end", "type": "end"},
    ]
    edges = [{"source": "start", "target": "work"}, {"source": "work", "target": "end"}]
    return WorkflowSpec.model_validate({"slug": slug, "nodes": nodes, "edges": edges, "settings": settings})


def publish(url: str, *documents: WorkflowSpec) -> None:
    with open_store(url) as store:
        for document in documents:
            store.catalog.save("default", document, by="ada")
            pinned = {document.slug: PinnedWorkflow(version=1, document=document)}
            closure = Closure(kind="workflow", slug=document.slug, workflows=pinned)
            store.publications.publish("default", "workflow", document.slug, 1, closure, by="ada")


def test_a_node_type_whose_package_is_gone(sqlite_url: str) -> None:
    publish(sqlite_url, workflow("whole", "transform"), workflow("broken", "teleport"))
    location = build_code_location(AgentMesh(database_url=sqlite_url))
    names = {job.name for job in location.get_all_jobs()}
    assert names == {"whole", "broken", "agentmesh_decide", "agentmesh_finalize"}
    assert location.get_job("whole").execute_in_process().success

    broken = location.get_job("broken")
    assert "teleport" in (broken.description or "")
    with pytest.raises(dg.Failure, match=r"'teleport'.*agentmesh_dagster.nodes"):
        broken.execute_in_process()


def test_a_bound_on_nodes_at_once_with_an_executor_that_has_none(sqlite_url: str) -> None:
    publish(sqlite_url, workflow("whole", "transform", max_concurrent=2))
    location = build_code_location(
        AgentMesh(database_url=sqlite_url), default_executor=dg.in_process_executor
    )
    assert location.get_job("whole").execute_in_process().success
