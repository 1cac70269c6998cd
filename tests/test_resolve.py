"""Closures: all that a document reaches, at fixed versions."""

from __future__ import annotations

from typing import Any

import pytest

from agentmesh_dagster.errors import DocumentInvalid
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import AgentSpec, Document, NetworkSpec, ToolSpec, WorkflowSpec
from agentmesh_dagster.specs.resolve import (
    DocumentLibrary,
    PinnedDocument,
    check_references,
    references_of,
    resolve_closure,
)


class Versions:
    """A library of several versions; the newest is its choice."""

    def __init__(self, *pinned: PinnedDocument) -> None:
        self._pinned = pinned

    def get(self, kind: str, slug: str, version: int | None) -> PinnedDocument | None:
        found = [p for p in self._pinned if (p.document.kind, p.document.slug) == (kind, slug)]
        found = [p for p in found if version is None or p.version == version]
        return max(found, key=lambda p: p.version, default=None)


def flow(slug: str, *configs: dict[str, Any]) -> WorkflowSpec:
    kinds = {"agent": "agent", "tool": "tool", "workflow": "workflow"}
    nodes = [{"id": f"n{i}", "type": kinds[next(iter(c))], "config": c} for i, c in enumerate(configs)]
    return WorkflowSpec.model_validate({"slug": slug, "nodes": nodes, "edges": []})


def agent(slug: str, **more: Any) -> AgentSpec:
    return AgentSpec.model_validate({"slug": slug, "model": "offline/echo", **more})


def tool(slug: str) -> ToolSpec:
    return ToolSpec.model_validate({"slug": slug, "type": "builtin", "config": {"name": "now"}})


def at(version: int, document: Document, *, is_active: bool = True) -> PinnedDocument:
    return PinnedDocument(version=version, document=document, is_active=is_active)


def problems_of(document: Document, library: Any) -> list[dict[str, Any]]:
    with pytest.raises(DocumentInvalid) as caught:
        resolve_closure(document, 1, library)
    told = [p.to_json() for p in check_references(document, library)]
    assert told == caught.value.problems
    assert str(caught.value).startswith(f"{document.kind} {document.slug!r}: ")
    return told


def test_the_closure_holds_all_that_is_reached_and_nothing_else() -> None:
    root = flow("root", {"agent": "lead"}, {"tool": "clock"}, {"workflow": "inner"})
    library = DocumentLibrary(
        [agent("lead", agents=["helper"]), agent("helper", tools=["search"]), tool("clock"), tool("search"),
         tool("unused"), flow("inner", {"agent": "other"}), agent("other")]
    )  # fmt: skip
    closure = resolve_closure(root, 7, library)
    assert (closure.kind, closure.slug) == ("workflow", "root")
    assert closure.workflow == root
    assert sorted(closure.agents) == ["helper", "lead", "other"]
    assert sorted(closure.tools) == ["clock", "search"]
    assert {slug: pinned.version for slug, pinned in closure.workflows.items()} == {"inner": 1, "root": 7}
    assert Closure.model_validate(closure.to_json()).hash() == closure.hash()


def test_a_reference_pins_a_version_or_takes_the_librarys_choice() -> None:
    library = Versions(*(at(n, agent("triage", description=str(n))) for n in (1, 2, 3)))
    free = resolve_closure(flow("w", {"agent": "triage"}), 1, library)
    pinned = resolve_closure(flow("w", {"agent": "triage@2"}), 1, library)
    assert (free.agents["triage"].version, free.agents["triage"].document.description) == (3, "3")
    assert (pinned.agents["triage"].version, pinned.agents["triage"].document.description) == (2, "2")
    assert free.hash() != pinned.hash()


@pytest.mark.parametrize("second", ["triage@2", "triage"])
@pytest.mark.parametrize("turned", [False, True])
def test_two_versions_of_one_document_are_refused(second: str, turned: bool) -> None:
    library = Versions(*(at(n, agent("triage")) for n in (1, 2)))
    configs = [{"agent": "triage@1"}, {"agent": second}]
    [problem] = problems_of(flow("w", *(reversed(configs) if turned else configs)), library)
    assert problem["code"] == "reference-conflict"
    assert "nodes[0].config.agent" in problem["message"]
    assert problem["path"] == "nodes[1].config.agent"


def test_all_missing_references_are_told_at_once() -> None:
    root = flow("root", {"agent": "triag"}, {"tool": "clock"}, {"agent": "lead"}, {"agent": "lead@9"})
    library = DocumentLibrary([agent("triage"), agent("lead", tools=["nothing"])])
    problems = problems_of(root, library)
    assert [(p["code"], p["path"]) for p in problems] == [
        ("reference-missing", "nodes[0].config.agent"),
        ("reference-missing", "nodes[1].config.tool"),
        ("reference-missing", "nodes[3].config.agent"),
        ("reference-missing", "nodes[2].config.agent"),
    ]
    assert "'triage'" in problems[0]["mend"]
    assert "version 9" in problems[2]["message"]
    assert "agent 'lead', tools[0]" in problems[3]["message"]


def test_what_is_inactive_is_refused() -> None:
    [problem] = problems_of(flow("w", {"agent": "old"}), Versions(at(1, agent("old"), is_active=False)))
    assert (problem["code"], problem["path"]) == ("reference-inactive", "nodes[0].config.agent")


def test_a_workflow_that_contains_itself_names_the_chain() -> None:
    library = DocumentLibrary(
        [flow("b", {"workflow": "c"}), flow("c", {"agent": "x"}, {"workflow": "a"}), agent("x")]
    )
    [problem] = problems_of(flow("a", {"workflow": "b"}), library)
    assert (problem["code"], problem["path"]) == ("reference-cycle", "nodes[0].config.workflow")
    assert "workflow 'a' -> workflow 'b' -> workflow 'c' -> workflow 'a'" in problem["message"]
    [direct] = problems_of(flow("a", {"workflow": "a"}), library)
    assert (direct["code"], direct["path"]) == ("reference-cycle", "nodes[0].config.workflow")
    [below] = problems_of(flow("root", {"workflow": "p"}), DocumentLibrary([flow("p", {"workflow": "p"})]))
    assert "workflow 'p' -> workflow 'p'" in below["message"]


BODIES = {
    "item": {"type": "foreach", "config": {"items": [], "body": {"workflow": "a"}}},
    "branch": {"type": "parallel", "config": {"branches": {"left": {"workflow": "a"}}}},
    "node": {
        "type": "loop",
        "config": {
            "until": "true",
            "max_iterations": 1,
            "body": {"nodes": [{"id": "call", "type": "workflow", "config": {"workflow": "a"}}]},
        },
    },
}
PLACES = {
    "item": "nodes[0].config.body.workflow",
    "branch": "nodes[0].config.branches.left.workflow",
    "node": "nodes[0].config.body.nodes[0].config.workflow",
}


@pytest.mark.parametrize("where", list(BODIES))
def test_a_workflow_that_contains_itself_in_a_body_names_the_chain(where: str) -> None:
    nodes = [{"id": "n", **BODIES[where]}]
    b = WorkflowSpec.model_validate({"slug": "b", "nodes": nodes, "edges": []})
    [problem] = problems_of(flow("a", {"workflow": "b"}), DocumentLibrary([b]))
    assert (problem["code"], problem["path"]) == ("reference-cycle", "nodes[0].config.workflow")
    assert "workflow 'a' -> workflow 'b' -> workflow 'a'" in problem["message"]
    root = WorkflowSpec.model_validate({"slug": "a", "nodes": nodes, "edges": []})
    [direct] = problems_of(root, DocumentLibrary([]))
    assert (direct["code"], direct["path"]) == ("reference-cycle", PLACES[where])


@pytest.mark.parametrize("where", ["on_failure", "finally"])
def test_what_runs_at_the_end_is_reached_too(where: str) -> None:
    body = {"nodes": [{"id": "tell", "type": "tool", "config": {"tool": "page"}}]}
    root = WorkflowSpec.model_validate({"slug": "w", "nodes": [], "edges": [], where: body})
    assert list(resolve_closure(root, 1, DocumentLibrary([tool("page")])).tools) == ["page"]
    [gone] = problems_of(root, DocumentLibrary([]))
    assert (gone["code"], gone["path"]) == ("reference-missing", f"{where}.nodes[0].config.tool")
    again = WorkflowSpec.model_validate({"slug": "w", "nodes": [], "edges": [], where: {"workflow": "w"}})
    [cycle] = problems_of(again, DocumentLibrary([]))
    assert (cycle["code"], cycle["path"]) == ("reference-cycle", f"{where}.workflow")


def test_a_missing_document_is_told_at_its_place_in_a_body() -> None:
    inner = {"id": "ask", "type": "agent", "config": {"agent": "gone"}}
    config = {"items": [], "body": {"nodes": [inner]}}
    nodes = [
        {"id": "both", "type": "parallel", "config": {"branches": {"left": {"nodes": [
            {"id": "each", "type": "foreach", "config": config},
        ]}}}},
    ]  # fmt: skip
    below = WorkflowSpec.model_validate({"slug": "below", "nodes": nodes, "edges": []})
    place = "nodes[0].config.branches.left.nodes[0].config.body.nodes[0].config.agent"
    [problem] = problems_of(below, DocumentLibrary([]))
    assert (problem["code"], problem["path"]) == ("reference-missing", place)
    [through] = problems_of(flow("root", {"workflow": "below"}), DocumentLibrary([below]))
    assert through["path"] == "nodes[0].config.workflow"
    assert f"workflow 'below', {place}" in through["message"]


def test_agents_may_hand_over_to_each_other() -> None:
    library = DocumentLibrary([agent("a", agents=["b"]), agent("b", agents=["a"])])
    assert sorted(resolve_closure(flow("w", {"agent": "a"}), 1, library).agents) == ["a", "b"]


def test_a_diamond_is_no_cycle() -> None:
    library = DocumentLibrary(
        [
            flow("l", {"workflow": "end"}),
            flow("r", {"workflow": "end"}),
            flow("end", {"tool": "t"}),
            tool("t"),
        ]
    )
    closure = resolve_closure(flow("top", {"workflow": "l"}, {"workflow": "r"}), 1, library)
    assert sorted(closure.workflows) == ["end", "l", "r", "top"]


def test_a_network_reaches_its_primitives() -> None:
    network = NetworkSpec.model_validate(
        {"slug": "n", "model": "m", "primitives": {"agents": ["a"], "tools": ["t"], "workflows": ["gone"]}}
    )
    found = [(r.path, r.kind, r.slug) for r in references_of(network)]
    assert ("primitives.agents[0]", "agent", "a") in found
    [problem] = problems_of(network, DocumentLibrary([agent("a"), tool("t")]))
    assert problem["path"] == "primitives.workflows[0]"


def test_a_long_chain_of_workflows_is_followed() -> None:
    documents = [flow(f"w{i}", {"workflow": f"w{i + 1}"}) for i in range(1, 1500)]
    library = DocumentLibrary([*documents, flow("w1500")])
    closure = resolve_closure(flow("w0", {"workflow": "w1"}), 1, library)
    assert len(closure.workflows) == 1501


def test_documents_in_memory_stand_before_the_library_beneath() -> None:
    beneath = Versions(at(4, agent("a", description="stored")), at(2, agent("b")))
    library = DocumentLibrary([agent("a", description="new")], beneath)
    assert [p and (p.version, p.document.description) for p in (library.get("agent", "a", None),)] == [
        (1, "new")
    ]
    stored = library.get("agent", "a", 4)
    assert stored is not None
    assert stored.document.description == "stored"
    assert library.get("agent", "b", None) is not None
    assert library.get("agent", "a", 9) is None
    assert library.get("tool", "a", None) is None
