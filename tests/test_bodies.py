"""Bodies: nodes inside of nodes, found and told apart at every depth, from a file to the closure of a run."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentmesh_dagster.specs.base import Body
from agentmesh_dagster.specs.canonical import canonical, dump_json, dump_yaml
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import AgentSpec, BodySpec, NodeSpec, WorkflowSpec
from agentmesh_dagster.specs.fields import raw_marks
from agentmesh_dagster.specs.levels import (
    PlacedBody,
    all_nodes,
    all_parts,
    bodies_in,
    body_graph,
    called_workflow,
    is_walked,
)
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, ForeachConfig, NodeConfig
from agentmesh_dagster.specs.normalize import normalize
from agentmesh_dagster.specs.resolve import DocumentLibrary, references_of, resolve_closure

Json = Any

STEP = {"id": "a", "type": "transform", "config": {"output": 1}}
AGENT = {"id": "ask", "type": "agent", "config": {"agent": "triage"}}


def each(*nodes: Json, name: str = "each", **more: Json) -> Json:
    return {"id": name, "type": "foreach", "config": {"items": [1], "body": {"nodes": list(nodes)}, **more}}


def loop(*nodes: Json, name: str = "again") -> Json:
    config = {"while": "true", "max_iterations": 3, "body": {"nodes": list(nodes)}}
    return {"id": name, "type": "loop", "config": config}


def both(name: str = "both", **branches: Json) -> Json:
    return {"id": name, "type": "parallel", "config": {"branches": branches}}


def flow(slug: str, *nodes: Json, **more: Json) -> WorkflowSpec:
    return WorkflowSpec.model_validate({"slug": slug, "nodes": list(nodes), "edges": [], **more})


DEEP = flow(
    "w",
    {"id": "start", "type": "start"},
    each(loop(both(right={"workflow": "other@2"}, left={"nodes": [STEP, AGENT]})), STEP),
    {"id": "end", "type": "end"},
    on_failure={"nodes": [{**AGENT, "config": {"agent": "reporter"}}]},
    **{"finally": {"workflow": "cleaner"}},
)


def test_nodes_of_all_depths_are_found_at_their_places() -> None:
    body = "nodes[1].config.body"
    branches = f"{body}.nodes[0].config.body.nodes[0].config.branches"
    assert [(part.path, type(part).__name__) for part in all_parts(DEEP)] == [
        ("nodes[0]", "PlacedNode"),
        ("nodes[1]", "PlacedNode"),
        (body, "PlacedBody"),
        (f"{body}.nodes[0]", "PlacedNode"),
        (f"{body}.nodes[0].config.body", "PlacedBody"),
        (f"{body}.nodes[0].config.body.nodes[0]", "PlacedNode"),
        (f"{branches}.right", "PlacedBody"),
        (f"{branches}.left", "PlacedBody"),
        (f"{branches}.left.nodes[0]", "PlacedNode"),
        (f"{branches}.left.nodes[1]", "PlacedNode"),
        (f"{body}.nodes[1]", "PlacedNode"),
        ("nodes[2]", "PlacedNode"),
        ("on_failure", "PlacedBody"),
        ("on_failure.nodes[0]", "PlacedNode"),
        ("finally", "PlacedBody"),
    ]
    found = {placed.path: placed for placed in all_nodes(DEEP)}
    assert found["on_failure.nodes[0]"].node.id == "ask"
    assert isinstance(found["nodes[1]"].config, ForeachConfig)


def test_what_is_wrong_in_one_node_hides_no_other() -> None:
    unknown = {"id": "x", "type": "nothing", "config": {"body": {"nodes": [STEP]}}}
    wrong = {"id": "y", "type": "loop", "config": {"body": {"nodes": [STEP]}}}
    found = list(all_nodes(flow("w", each(unknown, wrong, STEP))))
    assert [(p.node.id, p.config is None) for p in found] == [
        ("each", False),
        ("x", True),
        ("y", True),
        ("a", False),
    ]


def test_a_plugins_bodies_are_found_by_their_mark() -> None:
    class Either(NodeConfig):
        first: Annotated[BodySpec, Body()]
        second: Annotated[BodySpec | None, Body(names=("error",))] = None
        others: Annotated[dict[str, BodySpec] | None, Body()] = None

    body = {"nodes": [AGENT]}
    config = {"first": body, "others": {"b": {"workflow": "other"}, "a": body}}
    assert [placed.path for placed in bodies_in(Either.model_validate(config), "c")] == [
        "c.first",
        "c.others.b",
        "c.others.a",
    ]
    document = flow("w", {"id": "n", "type": "either", "config": config})
    found = references_of(document, node_configs={**BUILTIN_NODE_CONFIGS, "either": Either})
    assert [(r.path, r.slug) for r in found] == [
        ("nodes[0].config.first.nodes[0].config.agent", "triage"),
        ("nodes[0].config.others.b.workflow", "other"),
        ("nodes[0].config.others.a.nodes[0].config.agent", "triage"),
    ]


def test_marks_of_a_raw_config_name_its_bodies_and_stop_there() -> None:
    raw = each(AGENT, key="item.id")["config"]
    found = [(m.path, type(m.mark).__name__) for m in raw_marks(ForeachConfig, raw, "config")]
    assert found == [("config.items", "Template"), ("config.body", "Body"), ("config.key", "Condition")]
    parts = raw_marks(BodySpec, {"nodes": [{**STEP, "set": {"k": "{{ item }}"}}], "edges": []}, "body")
    assert [(m.path, type(m.mark).__name__) for m in parts] == [("body.nodes[0].set", "Template")]


def closure_of(document: WorkflowSpec, *others: Any) -> Closure:
    return resolve_closure(document, 1, DocumentLibrary(others))


def test_the_graph_of_a_body_is_its_own_or_that_of_the_workflow_it_calls() -> None:
    edges = [{"source": "start", "target": "end"}]
    called = flow("other", {"id": "start", "type": "start"}, {"id": "end", "type": "end"}, edges=edges)
    own = {"nodes": [STEP, {**STEP, "id": "b"}], "edges": [{"source": "a", "target": "b"}]}
    closure = closure_of(flow("w", both(left=own, right={"workflow": "other@1"})), called)
    [left, right] = [part.body for part in all_parts(closure.workflow) if isinstance(part, PlacedBody)]
    assert body_graph(left, closure).order == ("a", "b")
    assert body_graph(left, closure).sinks == ("b",)
    assert body_graph(right, closure).order == ("start", "end")
    with pytest.raises(KeyError, match="gone"):
        called_workflow("gone", closure)


def walked(node: Json, *called: WorkflowSpec) -> bool:
    closure = closure_of(flow("w", node), *called)
    [placed, *_] = all_nodes(closure.workflow)
    assert placed.config is not None
    return is_walked(placed.node, placed.config, closure)


CALL = {"id": "call", "type": "workflow", "config": {"workflow": "other"}}
BRANCH = {"nodes": [STEP]}
EACH = each(STEP)
SPREAD = each(STEP, fanout=True)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (STEP, False),
        ({**STEP, "on_error": "continue"}, False),
        (loop(STEP), True),
        (EACH, True),
        (SPREAD, False),
        ({**SPREAD, "retry": {}}, True),
        ({**SPREAD, "timeout_s": 5}, True),
        ({**SPREAD, "on_error": "continue"}, True),
        (both(a=BRANCH), False),
        (both(a={"nodes": [EACH]}), False),
        ({**both(a=BRANCH), "on_error": "route"}, True),
        ({**both(a=BRANCH), "retry": {}}, True),
        ({**both(a=BRANCH), "timeout_s": 5}, True),
        *(
            ({"id": "p", "type": "parallel", "config": {"branches": {"a": BRANCH}, "wait": wait}}, walks)
            for wait, walks in (("all", False), ("any", True), ("first", True), (1, True))
        ),
        (CALL, False),
        ({**CALL, "on_error": "continue"}, True),
        ({**CALL, "config": {**CALL["config"], "async": True}}, True),
    ],
)
def test_which_containers_are_one_op(node: Json, expected: bool) -> None:
    assert walked(node, flow("other")) is expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, False),
        ({"settings": {"max_steps": 3, "node_timeout_s": 9}}, False),
        ({"settings": {"timeout_s": 5}}, True),
        ({"settings": {"execution": "inline"}}, True),
        ({"on_failure": BRANCH}, True),
        ({"finally": BRANCH}, True),
    ],
)
def test_a_called_workflow_with_rules_for_itself_is_kept_together(rule: Json, expected: bool) -> None:
    other = flow("other", **rule)
    assert walked(CALL, other) is expected
    assert walked(both(a=BRANCH, b={"workflow": "other"}), other) is expected
    # The items of a list are walked one by one, whatever they call.
    spread = {"items": [1], "fanout": True, "body": {"workflow": "other"}}
    assert walked({"id": "each", "type": "foreach", "config": spread}, other) is False


def test_a_closure_with_bodies_is_read_back() -> None:
    documents = [AgentSpec(slug=slug, model="offline/echo") for slug in ("triage", "reporter")]
    other = flow("other", loop(AGENT), **{"finally": {"nodes": [AGENT]}})
    closure = closure_of(flow("w", each(both(a={"workflow": "other"})), on_failure=BRANCH), other, *documents)
    again = Closure.model_validate(closure.to_json())
    assert again == closure
    assert again.hash() == closure.hash()
    finalizer = again.workflows["other"].document.finally_
    assert finalizer is not None
    assert finalizer.nodes == [NodeSpec.model_validate(AGENT)]


node_ids = st.from_regex(r"\A[a-z][a-z0-9]{0,3}\Z")


def nested(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    bodies = st.lists(inner, min_size=1, max_size=2).map(lambda nodes: {"nodes": nodes})
    bodies = bodies | st.just({"workflow": "other", "input": {"b": 1, "a": None}})
    return st.one_of(
        st.builds(
            lambda name, body, more: {
                "id": name,
                "type": "foreach",
                "config": {"items": [], "body": body, **more},
            },
            node_ids,
            bodies,
            st.fixed_dictionaries({}, optional={"fanout": st.booleans(), "concurrency": st.just(8)}),
        ),
        st.builds(
            lambda name, body, word: {
                "id": name,
                "type": "loop",
                "config": {"body": body, word: "true", "max_iterations": 2, "delay_s": "2s"},
            },
            node_ids,
            bodies,
            st.sampled_from(["while", "until"]),
        ),
        st.builds(
            lambda name, branches: both(name, **branches),
            node_ids,
            st.dictionaries(node_ids, bodies, min_size=1, max_size=3),
        ),
    )


trees = st.recursive(
    st.sampled_from([STEP, AGENT, {**CALL, "config": {"workflow": "other", "async": True}}]),
    nested,
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(trees, min_size=1, max_size=3), trees)
def test_an_export_with_bodies_is_the_same_after_every_import(nodes: list[Json], last: Json) -> None:
    first = canonical(flow("w", *nodes, **{"finally": {"nodes": [last]}}))
    for dump in (dump_yaml, dump_json):
        text = dump(first)
        [raw] = load_documents(text, source="export")
        [again] = normalize(raw).documents
        assert again == raw
        assert dump(canonical(WorkflowSpec.model_validate(again))) == text
