"""The rules for the state: reducers, and two writes of one key of which neither comes after the other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from agentmesh_dagster.validation import validate_document

Json = Any

START, END = {"id": "start", "type": "start"}, {"id": "done", "type": "end"}


def writer(name: str, *keys: str, **fields: Json) -> dict[str, Json]:
    """A node that writes keys of the state."""
    return {"id": name, "type": "transform", "config": {"output": 1}, "set": dict.fromkeys(keys, 1), **fields}


def edges(*lines: str) -> list[dict[str, Json]]:
    """Edges from lines such as `a -> b` or `a:handle -> b if condition`."""
    found: list[dict[str, Json]] = []
    for line in lines:
        way, _, condition = line.partition(" if ")
        source, target = way.split(" -> ")
        source, _, handle = source.partition(":")
        edge = {"source": source, "target": target}
        found.append(
            edge
            | ({"source_handle": handle} if handle else {})
            | ({"condition": condition} if condition else {})
        )
    return found


def graph(nodes: list[dict[str, Json]], *lines: str, **changes: Json) -> dict[str, Json]:
    return {
        "kind": "workflow",
        "slug": "state",
        "nodes": [START, *nodes, END],
        "edges": edges(*lines),
        **changes,
    }


def found(document: Json) -> list[tuple[str, str]]:
    return [(problem.code, problem.path) for problem in validate_document(document).problems]


def schema(**properties: Json) -> dict[str, Json]:
    return {"state_schema": {"type": "object", "properties": properties}}


def fork(one: Json, other: Json, *more: str, **changes: Json) -> dict[str, Json]:
    """A workflow of two nodes side by side: `nodes[1]` and `nodes[2]`."""
    ways = [
        f"start -> {one['id']}",
        f"start -> {other['id']}",
        f"{one['id']} -> done",
        f"{other['id']} -> done",
    ]
    return graph([one, other], *ways, *more, **changes)


CONFLICT = [("state-conflict", "nodes[2].set.k")]


# Reducers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("", {"reducer": "append", "type": "array"}),
        ("", {"reducer": "merge", "type": ["object", "null"]}),
        ("", {"reducer": "sum", "type": "integer"}),
        ("", {"reducer": "sum", "type": ["integer", "number"]}),
        ("", {"reducer": "sum"}),
        ("", {"reducer": "replace", "type": "string"}),
        ("reducer-unknown", {"reducer": "apend"}),
        ("reducer-unknown", {"reducer": ["append"]}),
        ("reducer-unknown", {"reducer": None}),
        ("reducer-unfit", {"reducer": "append", "type": "object"}),
        ("reducer-unfit", {"reducer": "merge", "type": "array"}),
        ("reducer-unfit", {"reducer": "sum", "type": "string"}),
        ("reducer-unfit", {"reducer": "sum", "type": ["number", "string"]}),
    ],
)
def test_a_reducer_is_known_and_suits_its_key(code: str, part: Json) -> None:
    document = graph([writer("a", "k")], "start -> a", "a -> done", **schema(k=part))
    assert found(document) == ([(code, "state_schema.properties.k.reducer")] if code else [])


def test_a_misspelled_reducer_is_suggested() -> None:
    [problem] = validate_document(
        graph([writer("a")], "start -> a", "a -> done", **schema(k={"reducer": "apend"}))
    ).problems
    assert "'append'" in problem.mend


# Nodes of one level ----------------------------------------------------------------------------------------


def test_two_nodes_side_by_side_may_not_write_one_key() -> None:
    document = fork(writer("a", "k"), writer("b", "k"))
    assert found(document) == CONFLICT
    [problem] = validate_document(document).problems
    for word in ("'a'", "'b'", "context.k", "'done'", "reducer"):
        assert word in str(problem)


@pytest.mark.parametrize("reducer", ["replace", "append", "merge", "sum"])
def test_a_reducer_settles_it(reducer: str) -> None:
    assert found(fork(writer("a", "k"), writer("b", "k"), **schema(k={"reducer": reducer}))) == []
    assert found(fork(writer("a", "k"), writer("b", "k"), **schema(k={"default": 1}))) == CONFLICT


def test_an_order_settles_it() -> None:
    assert found(fork(writer("a", "k"), writer("b", "k"), "a -> b")) == []
    assert found(fork(writer("a", "k"), writer("b", "j"))) == []
    assert found(graph([writer("a", "k"), writer("b", "k")], "start -> a", "a -> b", "b -> done")) == []


def test_writes_that_nobody_sees_together_are_no_conflict() -> None:
    document = graph(
        [writer("a", "k"), writer("b", "k")], "start -> a", "start -> b", "a -> done", "b -> over"
    )
    document["nodes"].append({"id": "over", "type": "end"})
    assert found(document) == []


def test_each_further_writer_is_told_once() -> None:
    nodes = [writer(name, "k", "j") for name in "abc"]
    ways = [way for name in "abc" for way in (f"start -> {name}", f"{name} -> done")]
    assert set(found(graph(nodes, *ways))) == {
        ("state-conflict", f"nodes[{n}].set.{key}") for n in (2, 3) for key in "kj"
    }


BRANCH = {
    "id": "size",
    "type": "branch",
    "config": {
        "conditions": [{"when": "true", "handle": "x"}, {"when": "true", "handle": "y"}],
        "default": "z",
    },
}
GATE = {"id": "size", "type": "human", "config": {"title": "?", "options": ["x", "y", "z"]}}


def chosen(node: Json, *ways: str, nodes: Json = None, **changes: Json) -> list[tuple[str, str]]:
    """Problems of `size` before the writers `a` (`nodes[2]`) and `b` (`nodes[3]`) of one key, besides warnings."""
    inner = nodes or [writer("a", "k"), writer("b", "k")]
    document = graph([node, *inner], "start -> size", *ways, "a -> done", "b -> done", **changes)
    return [(p.code, p.path) for p in validate_document(document).errors]


TOLD = [("state-conflict", "nodes[3].set.k")]


@pytest.mark.parametrize("node", [BRANCH, GATE], ids=["branch", "human"])
def test_nodes_on_different_handles_of_one_choice_are_no_conflict(node: Json) -> None:
    assert chosen(node, "size:x -> a", "size:y -> b", "size:z -> done") == []
    assert chosen(node, "size:x -> a", "size:z -> a", "size:y -> b") == []
    # One handle in common.
    assert chosen(node, "size:x -> a", "size:y -> a", "size:y -> b", "size:z -> b") == TOLD
    # A way around the choice.
    assert chosen(node, "size:x -> a", "size:y -> b", "size:z -> done", "start -> b") == TOLD
    far = [writer("a", "k"), writer("b", "k"), writer("m"), writer("n")]
    assert chosen(node, "size:x -> m", "m -> a", "size:y -> n", "n -> b", "size:z -> done", nodes=far) == []
    assert (
        chosen(node, "size:x -> m", "m -> a", "size:y -> n", "n -> b", "size:z -> done", "n -> a", nodes=far)
        == TOLD
    )


@pytest.mark.parametrize(
    "node",
    [
        BRANCH | {"config": BRANCH["config"] | {"mode": "all"}},
        GATE | {"config": GATE["config"] | {"multiple": True}},
    ],
    ids=["branch", "human"],
)
def test_a_node_that_takes_several_handles_does_not_settle_it(node: Json) -> None:
    assert chosen(node, "size:x -> a", "size:y -> b", "size:z -> done") == TOLD


def test_the_default_edge_of_a_gate_goes_with_every_option_and_with_no_rejection() -> None:
    gate = {"id": "size", "type": "human", "config": {"title": "?", "timeout": 9, "on_timeout": "route"}}
    assert chosen(gate, "size:approved -> a", "size -> b", "size:timeout -> done") == TOLD
    assert chosen(gate, "size:rejected -> a", "size -> b", "size:timeout -> done") == []
    assert chosen(gate, "size:timeout -> a", "size -> b") == []
    event = {
        "id": "size",
        "type": "webhook",
        "config": {"event": "paid", "timeout": 9, "on_timeout": "route"},
    }
    assert chosen(event, "size:timeout -> a", "size -> b") == []


def test_errors_lead_another_way_than_success() -> None:
    routed = writer("size", on_error="route")
    assert chosen(routed, "size:error -> a", "size -> b") == []
    assert chosen(routed, "size:error -> a", "size:error -> b", "size -> done") == TOLD
    both = {**BRANCH, "on_error": "route"}
    assert chosen(both, "size:error -> a", "size:x -> b", "size:y -> b", "size:z -> b") == []
    assert chosen(both, "size:error -> a", "size:x -> a", "size:x -> b", "size:y -> b", "size:z -> b") == TOLD


def test_what_depends_on_a_condition_is_left_to_the_run() -> None:
    a, b = writer("a", "k"), writer("b", "k")
    ways = ("start -> a if input.x", "start -> b", "a -> done", "b -> done")
    assert found(graph([a, b], *ways)) == []
    assert found(graph([a, b, writer("m")], *ways, "start -> m", "m -> a", "m -> done")) == CONFLICT
    joined = [{**a, "join": "all"}, b, writer("m")]
    assert found(graph(joined, *ways, "start -> m", "m -> a", "m -> done")) == []


def test_a_join_of_all_runs_only_where_each_edge_is_live() -> None:
    nodes = [{**writer("a", "k"), "join": "all"}, writer("b", "k"), writer("m")]
    ways = ("size:x -> a", "start -> m", "m -> a", "size:y -> b", "size:z -> done")
    assert chosen(BRANCH, *ways, nodes=nodes) == []
    nodes[0] = writer("a", "k")
    assert chosen(BRANCH, *ways, nodes=nodes) == TOLD
    nodes[0] = writer("a", "k", join=2)
    assert chosen(BRANCH, *ways, nodes=nodes) == []


def test_what_can_never_run_is_in_nobodys_way() -> None:
    nodes = [writer("b", "k"), {**writer("a", "k"), "join": "all"}]
    ways = ("start -> b", "size:x -> a", "size:y -> a", "size:z -> done")
    assert chosen(BRANCH, *ways, nodes=nodes) == []
    nodes[1] = writer("a", "k")
    assert chosen(BRANCH, *ways, nodes=nodes) == TOLD


def test_of_a_wrong_graph_no_conflict_is_told() -> None:
    assert found(fork(writer("a", "k"), writer("b", "k"), "a -> bb")) == [
        ("edge-dangling", "edges[4].target")
    ]
    assert [code for code, _ in found(fork(writer("a", "k"), writer("b", "k"), "a -> b", "b -> a"))] == [
        "cycle"
    ]


# Bodies ----------------------------------------------------------------------------------------------------


def body(*nodes: Json, ways: tuple[str, ...] = ()) -> dict[str, Json]:
    return {"nodes": list(nodes), "edges": edges(*ways)}


def foreach(name: str, inner: Json, items: Json = "{{ input.rows }}") -> dict[str, Json]:
    return {"id": name, "type": "foreach", "config": {"items": items, "body": inner}}


def loop(name: str, inner: Json, **config: Json) -> dict[str, Json]:
    config = {
        "max_iterations": 3,
        "body": inner,
        **({} if "while" in config else {"until": "true"}),
        **config,
    }
    return {"id": name, "type": "loop", "config": config}


def parallel(name: str, branches: Json, **config: Json) -> dict[str, Json]:
    return {"id": name, "type": "parallel", "config": {"branches": branches, **config}}


def after_start(*nodes: Json, **changes: Json) -> dict[str, Json]:
    ids = ["start", *(node["id"] for node in nodes), "done"]
    return graph(list(nodes), *(f"{a} -> {b}" for a, b in pairwise(ids)), **changes)


def test_items_that_write_one_key_side_by_side_are_a_conflict() -> None:
    inner = body(writer("x", "k"))
    place = [("state-conflict", "nodes[1].config.body.nodes[0].set.k")]
    assert found(after_start(foreach("each", inner))) == place
    assert found(after_start(foreach("each", inner, [1, 2]))) == place
    assert found(after_start(foreach("each", inner, [1]))) == []
    assert found(after_start(foreach("each", inner, []))) == []
    assert found(after_start(foreach("each", inner), **schema(k={"reducer": "append"}))) == []
    deep = body(loop("again", body(foreach("inner", inner))))
    assert found(after_start(foreach("each", deep))) == [
        (
            "state-conflict",
            "nodes[1].config.body.nodes[0].config.body.nodes[0].config.body.nodes[0].set.k",
        )
    ]


def test_iterations_come_one_after_another() -> None:
    assert found(after_start(loop("again", body(writer("x", "k"))))) == []


def test_branches_that_write_one_key_are_a_conflict() -> None:
    branches = {"left": body(writer("x", "k")), "right": body(loop("again", body(writer("y", "k", "j"))))}
    place = "nodes[1].config.branches.right.nodes[0].config.body.nodes[0].set.k"
    assert found(after_start(parallel("both", branches))) == [("state-conflict", place)]
    assert found(after_start(parallel("both", branches, wait="any"))) == [("state-conflict", place)]
    # One branch alone comes to its end.
    assert found(after_start(parallel("both", branches, wait="first"))) == []
    assert found(after_start(parallel("both", branches), **schema(k={"reducer": "sum"}))) == []


def test_the_end_of_a_body_sees_what_its_nodes_wrote() -> None:
    inner = body(writer("x", "k"), writer("y", "k"))
    assert found(after_start(loop("again", inner))) == [
        ("state-conflict", "nodes[1].config.body.nodes[1].set.k")
    ]
    inner["edges"] = edges("x -> y")
    assert found(after_start(loop("again", inner))) == []


def test_a_container_writes_what_its_bodies_write() -> None:
    container = loop("again", body(writer("x", "k")))
    assert found(fork(writer("a", "k"), container)) == [
        ("state-conflict", "nodes[2].config.body.nodes[0].set.k")
    ]
    assert found(fork(container, writer("a", "k"))) == CONFLICT
    # A called workflow has a state of its own.
    assert found(fork(writer("a", "k"), loop("again", {"workflow": "other"}))) == []


def reads(name: str, text: str) -> dict[str, Json]:
    return {"id": name, "type": "transform", "config": {"output": f"{{{{ {text} }}}}"}}


def test_what_a_body_wrote_is_there_after_its_container() -> None:
    container = loop("again", body(writer("x", "k")))
    assert found(after_start(container, reads("z", "context.k"))) == []
    assert found(after_start(reads("z", "context.k"), container)) == [
        ("context-unknown", "nodes[1].config.output")
    ]
    document = after_start(container | {"set": {"j": "{{ context.k }}"}}, reads("z", "context.j"))
    assert found(document) == []
    document["nodes"][1]["set"] = {"j": "{{ context.j }}"}
    assert found(document) == [("context-unknown", "nodes[1].set.j")]
    document = after_start(container, **{"finally": body(reads("z", "context.k"))})
    assert found(document) == []


def test_an_iteration_sees_what_the_one_before_wrote() -> None:
    inner = body(reads("x", "context.k | default(0)"), writer("y", "k"), ways=("x -> y",))
    assert found(after_start(loop("again", inner, **{"while": "context.k != 1"}))) == []
    assert found(after_start(foreach("each", inner, [1]))) == [
        ("context-unknown", "nodes[1].config.body.nodes[0].config.output")
    ]
    outer = body(
        foreach("each", body(reads("x", "context.k | default(0)"))), writer("y", "k"), ways=("each -> y",)
    )
    assert found(after_start(loop("again", outer))) == []
