"""Bad documents through an import: each is refused with its reason, and nothing is written, not even what was good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.errors import AgentMeshError, DocumentInvalid
from agentmesh_dagster.store import Store

GOOD = "kind: agent\nslug: good\nmodel: offline/echo\n"


def workflow(**changes: Any) -> dict[str, Any]:
    document = {
        "kind": "workflow",
        "slug": "bad",
        "nodes": [
            {"id": "start", "type": "start"},
            {"id": "work", "type": "transform", "config": {"output": 1}},
            {"id": "end", "type": "end"},
        ],
        "edges": [{"source": "start", "target": "work"}, {"source": "work", "target": "end"}],
    }
    return {**document, **changes}


def with_node(**node: Any) -> dict[str, Any]:
    document = workflow()
    return {**document, "nodes": [*document["nodes"], node]}


def with_edge(source: str, target: str) -> dict[str, Any]:
    document = workflow()
    return {**document, "edges": [*document["edges"], {"source": source, "target": target}]}


def nested(levels: int) -> str:
    return '{"kind": "workflow", "metadata": ' + '{"a": ' * levels + "1" + "}" * levels + "}"


def laughs() -> str:
    lines = [
        "kind: agent",
        "slug: bad",
        "model: offline/echo",
        "metadata:",
        "  a0: &a0 [x, x, x, x, x, x, x, x, x]",
    ]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines)


BAD: dict[str, tuple[Any, str]] = {
    "unknown field": (workflow(colour="red"), "field-unknown"),
    "duplicate id": (with_node(id="work", type="transform", config={"output": 2}), "node-id-duplicate"),
    "cycle": (
        workflow(
            nodes=[*workflow()["nodes"], {"id": "again", "type": "transform", "config": {"output": 2}}],
            edges=[
                *workflow()["edges"],
                {"source": "work", "target": "again"},
                {"source": "again", "target": "work"},
            ],
        ),
        "cycle",
    ),
    "dangling edge": (with_edge("work", "nowhere"), "edge-dangling"),
    "bad schema": (
        workflow(input_schema={"type": "object", "properties": {"a": {"type": 3}}}),
        "schema-invalid",
    ),
    "slug that climbs": (workflow(slug="../bad"), "slug-invalid"),
    "10 MB document": (json.dumps(workflow(description="x" * 10_000_000)), "document-too-large"),
    "deep nesting": (nested(100_000), "document-too-deep"),
    "invalid UTF-8": (b"kind: agent\nslug: \xff\xfe\n", "document-encoding"),
    "anchors that explode": (laughs(), "document-alias"),
    "duplicate key": ("kind: agent\nslug: bad\nslug: worse\nmodel: offline/echo\n", "document-duplicate-key"),
}


def codes(error: AgentMeshError) -> set[str]:
    if isinstance(error, DocumentInvalid):
        return {problem["code"] for problem in error.problems}
    return {error.code}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "documents"
    made.mkdir()
    (made / "a_good.yaml").write_text(GOOD)
    return made


@pytest.fixture
def written(store: Store) -> Callable[[], tuple[Any, ...]]:
    """All that an import could have written."""
    return lambda: (
        store.catalog.list("default", include_archived=True),
        store.publications.log("default"),
        store.audit.list("default"),
    )


@pytest.mark.parametrize("name", sorted(BAD))
def test_it_is_refused_and_nothing_is_written(name: str, folder: Path, store: Store, written):
    content, code = BAD[name]
    data = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    (folder / "bad.yaml").write_bytes(data)
    before = written()
    with pytest.raises(AgentMeshError) as refused:
        Authoring(store, "default", actor="ada").import_paths([folder], publish=True)
    assert code in codes(refused.value)
    assert "bad.yaml" in refused.value.message or any(
        "bad.yaml" in problem["source"] for problem in refused.value.context["problems"]
    )
    assert len(refused.value.message) < 1000
    assert written() == before == ([], [], [])


def test_the_good_document_alone_is_stored(folder: Path, store: Store, written):
    Authoring(store, "default", actor="ada").import_paths([folder], publish=True)
    definitions, log, audit = written()
    assert [definition.slug for definition in definitions] == ["good"]
    assert len(log) == 1
    assert {row.action for row in audit} == {"import", "publish"}
