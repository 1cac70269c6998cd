"""The rules for bodies: what holds for a workflow's own nodes holds at any depth, and the paths say where."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentmesh_dagster.constants import BEGIN_OP, END_OP, FINISH_OP, INLINE_OP, ITEM_OP
from agentmesh_dagster.specs.documents import AgentSpec, ToolSpec, WorkflowSpec
from agentmesh_dagster.specs.resolve import DocumentLibrary
from agentmesh_dagster.validation import MAX_NODES, RULES, validate_document

Json = Any

OPS = (BEGIN_OP, END_OP, FINISH_OP, ITEM_OP, INLINE_OP)
START, END = {"id": "start", "type": "start"}, {"id": "done", "type": "end"}


def step(name: str, output: Json = 1, **fields: Json) -> dict[str, Json]:
    """A node that only computes."""
    return {"id": name, "type": "transform", "config": {"output": output}, **fields}


def chained(nodes: list[dict[str, Json]]) -> list[dict[str, Json]]:
    return [{"source": a["id"], "target": b["id"]} for a, b in pairwise(nodes)]


def body(*nodes: dict[str, Json], edges: list[dict[str, Json]] | None = None) -> dict[str, Json]:
    """Nodes one after the other, or with these edges."""
    return {"nodes": list(nodes), "edges": chained(list(nodes)) if edges is None else edges}


def foreach(name: str, inner: Json, **config: Json) -> dict[str, Json]:
    return {
        "id": name,
        "type": "foreach",
        "config": {"items": "{{ input.rows }}", "body": inner, **config},
    }


def loop(name: str, inner: Json, **config: Json) -> dict[str, Json]:
    condition = {} if "while" in config else {"until": "iteration >= 3"}
    return {"id": name, "type": "loop", "config": {"max_iterations": 5, "body": inner, **condition, **config}}


def parallel(name: str, branches: Json, **config: Json) -> dict[str, Json]:
    return {"id": name, "type": "parallel", "config": {"branches": branches, **config}}


def call(name: str, slug: Json = "other", **config: Json) -> dict[str, Json]:
    return {"id": name, "type": "workflow", "config": {"workflow": slug, **config}}


def human(name: str) -> dict[str, Json]:
    return {"id": name, "type": "human", "config": {"title": "Well?"}}


def use_tool(name: str, **config: Json) -> dict[str, Json]:
    return {"id": name, "type": "tool", "config": {"tool": "pay", "input": {}, **config}}


def flow(*nodes: dict[str, Json], **changes: Json) -> dict[str, Json]:
    """A workflow of nodes one after the other: its first node is `nodes[1]`."""
    chain = [START, *nodes, END]
    return {"kind": "workflow", "slug": "flow", "nodes": chain, "edges": chained(chain), **changes}


def found(document: Json, **options: Json) -> list[tuple[str, str]]:
    return [(problem.code, problem.path) for problem in validate_document(document, **options).problems]


def library(*documents: dict[str, Json]) -> DocumentLibrary:
    models = {"tool": ToolSpec, "agent": AgentSpec, "workflow": WorkflowSpec}
    return DocumentLibrary([models[d["kind"]].model_validate(d) for d in documents])


def tool(**changes: Json) -> dict[str, Json]:
    return {
        "kind": "tool",
        "slug": "pay",
        "type": "http",
        "config": {"url": "https://e.com"},
        "timeout_s": 9,
        **changes,
    }


PLACES = {
    "foreach": (lambda inner: flow(foreach("each", inner)), "nodes[1].config.body"),
    "loop": (lambda inner: flow(loop("again", inner)), "nodes[1].config.body"),
    "parallel": (
        lambda inner: flow(parallel("both", {"left": body(step("l")), "right": inner})),
        "nodes[1].config.branches.right",
    ),
    "on_failure": (lambda inner: flow(step("a"), on_failure=inner), "on_failure"),
    "finally": (lambda inner: flow(step("a"), **{"finally": inner}), "finally"),
    "deep": (
        lambda inner: flow(
            foreach("each", body(step("e"), parallel("both", {"left": body(loop("again", inner))})))
        ),
        "nodes[1].config.body.nodes[1].config.branches.left.nodes[0].config.body",
    ),
}
GOOD = body(step("x"), step("y", "{{ steps.x.output }} {{ context.last_output }} {{ input.rows }}"))

WRONG: list[tuple[str, str, Json]] = [
    ("field-unknown", ".nodes[0].timout_s", body(step("x", timout_s=3))),
    ("field-unknown", ".nodes[0].config.oputput", body(step("x") | {"config": {"output": 1, "oputput": 2}})),
    ("field-unknown", ".colour", {**GOOD, "colour": "red"}),
    ("field-missing", ".nodes[0].config.output", body({"id": "x", "type": "transform"})),
    ("field-missing", ".nodes[0].id", body({"type": "transform", "config": {"output": 1}})),
    ("field-invalid", ".nodes[0]", {"nodes": ["x"]}),
    ("field-invalid", ".nodes", {"nodes": []}),
    ("field-invalid", ".nodes", {"nodes": "x"}),
    ("field-invalid", ".edges[0]", {**GOOD, "edges": ["x -> y"]}),
    ("field-invalid", "", {}),
    ("field-invalid", "", {**GOOD, "workflow": "other"}),
    ("field-invalid", "", {**GOOD, "input": 1}),
    ("node-type-unknown", ".nodes[0].type", body({"id": "x", "type": "transfrom"})),
    ("node-id-invalid", ".nodes[0].id", body(step("1st"))),
    ("node-id-duplicate", ".nodes[1].id", body(step("x"), step("x"), edges=[])),
    ("node-id-collision", ".nodes[1].id", body(step("a-b"), step("a_b"))),
    *(("node-id-collision", ".nodes[0].id", body(step(op))) for op in OPS),
    ("node-id-shadows", ".nodes[0].id", body(step("done"))),
    ("body-start-end", ".nodes[0]", body(START, step("x"))),
    ("body-start-end", ".nodes[0]", body({"id": "begin", "type": "start"}, step("x"))),
    ("body-start-end", ".nodes[1]", body(step("x"), {"id": "over", "type": "end"})),
    ("edge-dangling", ".edges[0].target", body(step("x"), step("y"), edges=[{"source": "x", "target": "yy"}])),
    # Edges do not lead into bodies, nor out of them.
    ("edge-dangling", ".edges[0].source", body(step("x"), edges=[{"source": "start", "target": "x"}])),
    ("edge-duplicate", ".edges[1]", {**GOOD, "edges": [{"source": "x", "target": "y"}] * 2}),
    ("cycle", ".nodes[0]", {**GOOD, "edges": [{"source": "x", "target": "y"}, {"source": "y", "target": "x"}]}),
    (
        "handle-unknown",
        ".edges[0].source_handle",
        {**GOOD, "edges": [{"source": "x", "target": "y", "source_handle": "red"}]},
    ),
    (
        "handle-uncovered",
        ".nodes[0].config",
        body({"id": "b", "type": "branch", "config": {"conditions": [{"when": "true", "handle": "h"}], "default": "d"}},
             step("x"), edges=[{"source": "b", "target": "x", "source_handle": "h"}]),
    ),
    ("error-edge-missing", ".nodes[0].on_error", body(step("x", on_error="route"))),
    ("handle-error-unrouted", ".edges[0].source_handle",
     {**GOOD, "edges": [{"source": "x", "target": "y", "source_handle": "error"}]}),
    ("join-too-many", ".nodes[1].join", body(step("x"), step("y", join=2))),
    ("join-too-many", ".nodes[0].join", body(step("x", join=2))),
    ("set-key-invalid", ".nodes[0].set", body(step("x", set={"a-b": 1}))),
    ("expression-invalid", ".nodes[0].config.output", body(step("x", "{{ 1 + }}"))),
    ("expression-invalid", ".edges[0].condition",
     {**GOOD, "edges": [{"source": "x", "target": "y", "condition": "{{ true }}"}]}),
    ("name-unknown", ".nodes[0].config.output", body(step("x", "{{ inptu.rows }}"))),
    ("step-unknown", ".nodes[0].config.output", body(step("x", "{{ steps.nobody.output }}"))),
    ("step-not-upstream", ".nodes[0].config.output", body(step("x", "{{ steps.y.output }}"), step("y"))),
    ("step-not-upstream", ".nodes[0].config.output", body(step("x", "{{ steps.x.output }}"))),
    ("step-not-upstream", ".edges[0].condition",
     {**GOOD, "edges": [{"source": "x", "target": "y", "condition": "steps.y.output == 1"}]}),
    ("step-field-unknown", ".nodes[1].set.k", body(step("x"), step("y", set={"k": "{{ steps.x.text }}"}))),
    ("context-unknown", ".nodes[0].config.output", body(step("x", "{{ context.nope }}"))),
    ("secret-misplaced", ".nodes[0].config.output", body(step("x", "{{ secret('K') }}"))),
    ("reference-invalid", ".nodes[0].config.workflow", body(call("x", "no such"))),
    ("reference-invalid", ".workflow", {"workflow": "no such"}),
    ("expression-invalid", ".input.a", {"workflow": "other", "input": {"a": "{{ 1 + }}"}}),
    ("schema-invalid", ".nodes[0].config.form_schema.required",
     body(human("x") | {"config": {"title": "?", "form_schema": {"type": "object", "required": 1}}})),
    ("gate-quorum", ".nodes[0].config.required", body(human("x") | {"config": {"title": "?", "required": 2}})),
    ("notifier-unknown", ".nodes[0].notify[0].type", body(human("x") | {"notify": [{"type": "pager"}]})),
    ("branch-name-invalid", ".nodes[0].config.branches['a b']", body(parallel("p", {"a b": body(step("x"))}))),
    ("branch-name-invalid", ".nodes[0].config.branches.agentmesh_end",
     body(parallel("p", {"agentmesh_end": body(step("x"))}))),
    ("branch-name-invalid", ".nodes[0].config.branches.a_b",
     body(parallel("p", {"a-b": body(step("x")), "a_b": body(step("y"))}))),
    ("wait-too-many", ".nodes[0].config.wait", body(parallel("p", {"a": body(step("x"))}, wait=2))),
    ("too-many-iterations", ".nodes[0].config.max_iterations", body(loop("l", body(step("x")), max_iterations=1001))),
    ("setting-without-effect", ".nodes[0].config.max_failures", body(foreach("f", body(step("x")), max_failures=1))),
    ("timeout-missing", ".nodes[0]", body({"id": "x", "type": "agent", "config": {"agent": "a"}})),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_right_body_has_no_problem(place: str) -> None:
    make, _ = PLACES[place]
    assert found(make(GOOD)) == []
    assert found(make({"nodes": [step("x"), step("y")]})) == []
    assert found(make({"workflow": "other", "input": {"rows": "{{ input.rows }} {{ run.id }}"}})) == []


@pytest.mark.parametrize(("code", "path", "inner"), WRONG, ids=[f"{c}:{p}" for c, p, _ in WRONG])
def test_one_mistake_in_a_body_is_one_problem_at_its_place(code: str, path: str, inner: Json) -> None:
    keys = {"properties": {key: {"reducer": "replace"} for key in ("k", "a-b")}}
    for place, (make, owner) in PLACES.items():
        told = found({**make(inner), "state_schema": keys})
        # A human node is one mistake more there.
        assert [problem for problem in told if problem[0] != "wait-in-finally"] == [(code, owner + path)], (
            place
        )


@pytest.mark.parametrize("place", PLACES)
def test_a_fan_out_does_nothing_where_its_body_is_one_op(place: str) -> None:
    make, owner = PLACES[place]
    fanned = body(foreach("f", body(step("x")), fanout=True))
    # The branches of a workflow's own `parallel` are graphs that Dagster sees.
    problems = [] if place == "parallel" else [("setting-without-effect", f"{owner}.nodes[0].config.fanout")]
    assert found(make(fanned)) == problems
    inside = body(foreach("f", body(foreach("g", body(step("x")), fanout=True)), fanout=True))
    path = f"{owner}.nodes[0].config.body.nodes[0].config.fanout"
    assert ("setting-without-effect", path) in found(make(inside))


def test_mistakes_of_all_levels_are_told_at_once() -> None:
    document = flow(
        step("a", "{{ nope }}"),
        foreach(
            "each", body(step("x", "{{ steps.b.output }}"), loop("again", body(step("y", colour="red"))))
        ),
        parallel("both", {"l": body(step("m"), step("m"), edges=[]), "r": {"workflow": "a b"}}),
        **{"finally": body(human("ask"))},
    )
    inner = "nodes[2].config.body"
    assert set(found(document)) == {
        ("name-unknown", "nodes[1].config.output"),
        ("step-unknown", f"{inner}.nodes[0].config.output"),
        ("field-unknown", f"{inner}.nodes[1].config.body.nodes[0].colour"),
        ("node-id-duplicate", "nodes[3].config.branches.l.nodes[1].id"),
        ("reference-invalid", "nodes[3].config.branches.r.workflow"),
        ("wait-in-finally", "finally.nodes[0]"),
    }


# What expressions see --------------------------------------------------------------------------------------


def test_a_body_sees_what_its_container_sees() -> None:
    deep = "{{ steps.a.output }} {{ steps.e.output }} {{ item }} {{ index }} {{ iteration }} {{ context.k }}"
    inner = body(step("e"), loop("again", body(step("x", deep), step("y", "{{ steps.x.output }}"))))
    document = flow(step("a", set={"k": 1}), foreach("each", inner, key="item.id ~ index"))
    assert found(document) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("steps.later.output", "step-not-upstream"),
        ("steps.each.output", "step-not-upstream"),
        ("steps.aside.output", "step-not-upstream"),
        ("iteration", "name-outside-body"),
        ("run.status", "name-unknown"),
        ("context.late", "context-unknown"),
    ],
)
def test_a_body_sees_no_more_than_its_container(name: str, code: str) -> None:
    document = flow(foreach("each", body(step("x", f"{{{{ {name} }}}}"))), step("later", set={"late": 1}))
    document["nodes"].append(step("aside"))
    document["edges"] += [{"source": "start", "target": "aside"}, {"source": "aside", "target": "done"}]
    assert found(document) == [(code, "nodes[1].config.body.nodes[0].config.output")]


def test_after_a_container_its_steps_are_not_seen_and_its_output_is() -> None:
    document = flow(
        foreach("each-row", body(loop("again", body(step("x"))))), step("b", "{{ steps.x.output }}")
    )
    [problem] = validate_document(document).problems
    assert (problem.code, problem.path) == ("step-unknown", "nodes[2].config.output")
    assert "steps.each_row.output" in problem.mend
    document["nodes"][2] = step("b", "{{ steps.each_row.output }} {{ steps.each_row.output[0] }}")
    assert found(document) == []


def test_branches_see_nothing_of_each_other() -> None:
    branches = {"left": body(step("x")), "right": body(step("y", "{{ steps.x.output }}"))}
    [problem] = validate_document(flow(parallel("both", branches))).problems
    assert (problem.code, problem.path) == (
        "step-unknown",
        "nodes[1].config.branches.right.nodes[0].config.output",
    )
    assert "another body of 'both'" in problem.message
    assert "steps.both" not in problem.mend


def test_a_misspelled_step_is_suggested_from_what_is_seen() -> None:
    branches = {"left": body(step("draft")), "right": body(step("y", "{{ steps.collct.output }}"))}
    [problem] = validate_document(flow(step("collect"), parallel("both", branches))).problems
    assert "'collect'" in problem.mend
    branches["right"] = body(step("y", "{{ steps.drft.output }}"))
    [problem] = validate_document(flow(step("collect"), parallel("both", branches))).problems
    assert "'draft'" not in problem.mend
    assert "'collect'" in problem.mend


@pytest.mark.parametrize("condition", ["while", "until"])
def test_a_loops_condition_sees_all_steps_of_its_body(condition: str) -> None:
    text = (
        "iteration < 3 and steps.y.output and steps.x.output and steps.a.output and context.k and context.j"
    )
    inner = body(step("x", set={"k": 1}), step("y"), edges=[])
    document = flow(step("a", set={"j": 1}), loop("again", inner, **{condition: text}))
    assert found(document) == []
    for name, code in (("again", "step-not-upstream"), ("z", "step-unknown")):
        wrong = loop("again", inner, **{condition: f"steps.{name}.output"})
        assert found(flow(wrong)) == [(code, f"nodes[1].config.{condition}")]
    called = loop("again", {"workflow": "other"}, **{condition: "context.last_output.ok and steps.x.output"})
    assert found(flow(called)) == [("step-unknown", f"nodes[1].config.{condition}")]


def test_an_items_key_sees_the_item_and_no_step_of_the_body() -> None:
    assert found(flow(foreach("each", GOOD, key="item.id"))) == []
    assert found(flow(foreach("each", GOOD, key="iteration"))) == [
        ("name-outside-body", "nodes[1].config.key")
    ]
    assert found(flow(foreach("each", GOOD, key="steps.x.output"))) == [
        ("step-unknown", "nodes[1].config.key")
    ]
    assert found(flow(foreach("each", GOOD, items="{{ item }}"))) == [
        ("name-outside-body", "nodes[1].config.items")
    ]


def test_the_input_of_a_called_body_is_seen_from_inside() -> None:
    inner = {"workflow": "other", "input": {"a": "{{ item }} {{ steps.a.output }} {{ context.last_output }}"}}
    assert found(flow(step("a"), foreach("each", inner))) == []
    wrong = {"workflow": "other", "input": {"a": "{{ iteration }}", "b": "{{ steps.each.output }}"}}
    assert found(flow(foreach("each", wrong))) == [
        ("name-outside-body", "nodes[1].config.body.input.a"),
        ("step-not-upstream", "nodes[1].config.body.input.b"),
    ]


@pytest.mark.parametrize("name", ["on_failure", "finally"])
def test_the_ending_sees_every_step_and_how_the_run_ended(name: str) -> None:
    text = (
        "{{ steps.a.output }} {{ steps.each.status }} {{ run.id }} {{ run.status }} {{ run.error.message }}"
    )
    document = flow(step("a"), foreach("each", body(step("x"))), **{name: body(step("z", text))})
    assert found(document) == []
    document[name] = body(foreach("all", body(step("z", "{{ run.status }} {{ run.name }}"))))
    [problem] = validate_document(document).problems
    assert (problem.code, problem.path) == (
        "name-unknown",
        f"{name}.nodes[0].config.body.nodes[0].config.output",
    )
    assert "run.status" in problem.mend
    document[name] = body(step("z", "{{ steps.x.output }}"))
    [problem] = validate_document(document).problems
    assert (problem.code, problem.path) == ("step-unknown", f"{name}.nodes[0].config.output")
    assert "steps.each.output" in problem.mend


# Containers ------------------------------------------------------------------------------------------------


def test_containers_within_their_bounds_are_right() -> None:
    branches = {"a-b": body(step("x")), "c": body(step("y"), step("z", join=1))}
    document = flow(
        parallel("both", branches, wait=2),
        loop("again", body(step("l")), max_iterations=2000),
        foreach("each", body(step("f")), on_item_error="collect", max_failures=0),
        foreach("spread", body(step("g")), fanout=True),
        call("start-it", **{"async": True}),
        settings={"max_iterations": 2000, "timeout_s": "1h", "timeout_includes_waiting": True},
    )
    assert found(document) == []
    inline = {"execution": "inline", "executor": "threads", "max_concurrent": 3}
    assert found(flow(foreach("each", body(step("f"))), settings=inline)) == []


@pytest.mark.parametrize(
    ("fields", "config", "changes", "field"),
    [
        ({"retry": {"max_attempts": 2}}, {}, {}, "fanout"),
        ({"timeout_s": 3}, {}, {}, "fanout"),
        ({"on_error": "continue"}, {}, {}, "fanout"),
        ({}, {"concurrency": 2}, {}, "concurrency"),
        ({}, {}, {"settings": {"execution": "inline"}}, "fanout"),
    ],
)
def test_a_fanout_that_cannot_spread_is_a_warning(
    fields: Json, config: Json, changes: Json, field: str
) -> None:
    node = foreach("each", body(step("x")), fanout=True, **config) | fields
    result = validate_document(flow(node, **changes))
    assert [(p.code, p.path) for p in result.warnings] == [
        ("setting-without-effect", f"nodes[1].config.{field}")
    ]
    assert result.errors == ()


def test_a_join_counts_the_edges_into_its_node() -> None:
    document = flow(step("a"), step("b", join=2))
    assert found(document) == [("join-too-many", "nodes[2].join")]
    document["edges"].append({"source": "start", "target": "b"})
    assert found(document) == []


def test_a_timeout_that_includes_waiting_needs_a_timeout() -> None:
    document = flow(step("a"), settings={"timeout_includes_waiting": True})
    assert found(document) == [("setting-without-effect", "settings.timeout_includes_waiting")]


def test_outputs_of_containers_are_known() -> None:
    def reading(text: str) -> list[tuple[str, str]]:
        both = parallel("both", {"left": body(step("x")), "right": body(step("y"))})
        nodes = [both, loop("again", body(step("l"))), call("child", **{"async": True}), step("z", text)]
        return found(flow(*nodes))

    assert reading("{{ steps.both.output.left.any }} {{ steps.again.output.iterations }}") == []
    assert reading("{{ steps.again.output.total }} {{ steps.child.output.run_id }}") == []
    assert reading("{{ steps.both.output.middle }}") == [("output-unknown", "nodes[4].config.output")]
    assert reading("{{ steps.child.output.total }}") == [("output-unknown", "nodes[4].config.output")]


OTHER = {
    "kind": "workflow",
    "slug": "other",
    "input_schema": {
        "type": "object",
        "required": ["rows"],
        "properties": {"rows": {"type": "array"}, "count": {"type": "integer"}, "id": {"type": "string"}},
        "additionalProperties": False,
    },
    "output_schema": {"type": "object", "properties": {"total": {"type": "number"}}},
    "nodes": [START, END],
    "edges": [{"source": "start", "target": "done"}],
}


@pytest.mark.parametrize(
    ("mapped", "expected"),
    [
        ({"rows": "{{ steps.each.output }}", "count": "{{ steps.again.output.iterations }}"}, []),
        ({"rows": [], "id": "{{ steps.child.output.run_id }}"}, []),
        ({}, [("mapping-missing", "")]),
        ({"rows": [], "tags": 1}, [("mapping-unknown", ".tags")]),
        ({"rows": "{{ steps.again.output }}"}, [("mapping-mismatch", ".rows")]),
        ({"rows": [], "count": "{{ steps.each.output }}"}, [("mapping-mismatch", ".count")]),
        ({"rows": "{{ steps.child.output }}"}, [("mapping-mismatch", ".rows")]),
        ({"rows": "{{ steps.called.output.total }}"}, [("mapping-mismatch", ".rows")]),
    ],
)
def test_the_input_of_a_called_workflow_fits_where_it_is_known(
    mapped: Json, expected: list[tuple[str, str]]
) -> None:
    before = [
        foreach("each", body(step("x"))),
        loop("again", body(step("y"))),
        call("child", **{"async": True}, input={"rows": []}),
        call("called", input={"rows": []}),
    ]
    called = {"workflow": "other", "input": mapped}
    for node, path in (
        (call("last", input=mapped), "nodes[5].config.input"),
        (foreach("last", called), "nodes[5].config.body.input"),
        (
            parallel("last", {"b": body(call("z", input=mapped))}),
            "nodes[5].config.branches.b.nodes[0].config.input",
        ),
    ):
        told = found(flow(*before, node), library=library(OTHER))
        assert told == [(code, f"{path}{place}") for code, place in expected]


# After the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["on_failure", "finally"])
@pytest.mark.parametrize(
    ("node", "path"),
    [
        (human("x"), ""),
        ({"id": "x", "type": "webhook", "config": {"event": "paid"}}, ""),
        ({"id": "x", "type": "delay", "config": {"seconds": "2m"}}, ".config.seconds"),
        (loop("x", body(step("y")), delay_s="2m"), ".config.delay_s"),
        (use_tool("x"), ""),
        ({"id": "x", "type": "agent", "config": {"agent": "clerk"}, "timeout_s": 5}, ""),
    ],
)
def test_nothing_waits_after_the_end(name: str, node: Json, path: str) -> None:
    held = library(
        tool(requires_approval=True),
        {"kind": "agent", "slug": "clerk", "model": "offline/echo", "tools": ["pay"]},
    )
    assert found(flow(step("a"), **{name: body(node)}), library=held) == [
        ("wait-in-finally", f"{name}.nodes[0]{path}")
    ]
    inside = flow(step("a"), **{name: body(parallel("p", {"b": body(foreach("f", body(node)))}))})
    assert found(inside, library=held) == [
        ("wait-in-finally", f"{name}.nodes[0].config.branches.b.nodes[0].config.body.nodes[0]{path}")
    ]
    assert found(flow(node), library=held) == []


def test_short_delays_and_called_workflows_are_right_after_the_end() -> None:
    ways = chained([START, human("ask"), END])
    ways[1]["source_handle"] = "approved"
    gated = {**OTHER, "nodes": [START, human("ask"), END], "edges": ways}
    ending = body(
        {"id": "x", "type": "delay", "config": {"seconds": 60}},
        {"id": "y", "type": "delay", "config": {"seconds": "{{ input.rows }}"}},
        call("z", input={"rows": []}),
        use_tool("notify"),
    )
    document = flow(step("a"), **{"finally": ending})
    assert found(document, library=library(gated, tool(side_effects=True))) == []
    document["settings"] = {"inline_s": 59}
    assert found(document, library=library(gated, tool())) == [
        ("wait-in-finally", "finally.nodes[0].config.seconds")
    ]


# Prudence --------------------------------------------------------------------------------------------------


def test_a_side_effect_in_a_body_is_warned_of_unless_somebody_is_asked() -> None:
    held = library(tool(side_effects=True))
    place = "nodes[1].config.body.nodes[0]"
    assert found(flow(foreach("each", body(use_tool("x")))), library=held) == [("side-effect-ungated", place)]
    asked = body(human("ask"), use_tool("x"))
    asked["edges"][0]["source_handle"] = "approved"
    assert found(flow(foreach("each", asked)), library=held) == []
    around = flow(human("ask"), foreach("each", body(use_tool("x"))))
    around["edges"][1]["source_handle"] = "approved"
    assert found(around, library=held) == []


def test_a_timeout_around_a_body_bounds_its_nodes() -> None:
    waiting = {"id": "x", "type": "agent", "config": {"agent": "a"}}
    inner = loop("again", body(waiting))
    assert found(flow(foreach("each", body(inner)) | {"timeout_s": 60})) == []
    assert found(flow(foreach("each", body(inner)), settings={"node_timeout_s": 60})) == []
    document = flow(waiting, settings={"timeout_s": 60}, **{"finally": body({**waiting, "id": "y"})})
    assert found(document) == [("timeout-missing", "finally.nodes[0]")]


def test_fields_of_an_agents_object_are_looked_at_in_bodies() -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    node = {"id": "x", "type": "agent", "timeout_s": 3, "config": {"agent": "a", "output_schema": schema}}
    assert found(flow(foreach("each", body(node)))) == [
        ("output-schema-shadowed", "nodes[1].config.body.nodes[0].config.output_schema.properties.text")
    ]


# References, size, garbage ---------------------------------------------------------------------------------


def test_other_mistakes_do_not_hide_a_missing_reference_in_a_body() -> None:
    document = flow(
        foreach("each", body(call("x", "othr"))), loop("again", {"workflow": "othr"}), colour="red"
    )
    assert found(document, library=library(OTHER)) == [
        ("field-unknown", "colour"),
        ("reference-missing", "nodes[1].config.body.nodes[0].config.workflow"),
        ("reference-missing", "nodes[2].config.body.workflow"),
    ]


def test_nodes_of_all_levels_count() -> None:
    def wide(number: int) -> Json:
        half = number // 2
        branches = {
            "l": body(*(step(f"l{n}") for n in range(half))),
            "r": body(*(step(f"r{n}") for n in range(number - half))),
        }
        return flow(foreach("each", body(parallel("both", branches))))

    assert found(wide(MAX_NODES - 4)) == []
    [problem] = validate_document(wide(MAX_NODES - 3)).problems
    assert (problem.code, problem.path) == ("too-many-nodes", "nodes")
    assert "in bodies" in problem.message


def nested(levels: int, width: int) -> Json:
    """Containers in containers, each body with a chain of nodes that name the nodes around them."""
    inner: Json = None
    for level in reversed(range(levels)):
        seen = f"{{{{ steps.n{level - 1}_0.output }}}}" if level else "{{ input.rows }}"
        nodes = [step(f"n{level}_{n}", seen, set={f"k{level}": n}) for n in range(width)]
        inner = body(*nodes, *([loop(f"c{level}", inner)] if inner is not None else []))
    return flow(loop("outer", inner))


def test_the_deepest_document_is_checked() -> None:
    assert found(nested(14, 3)) == []
    wrong = nested(14, 3)
    place, at = wrong["nodes"][1], "nodes[1]"
    for _ in range(13):
        place, at = place["config"]["body"]["nodes"][3], f"{at}.config.body.nodes[3]"
    place["config"]["body"]["nodes"][0]["config"]["output"] = "{{ nope }}"
    assert found(wrong) == [("name-unknown", f"{at}.config.body.nodes[0].config.output")]


def calls_for(document: Json) -> int:
    count = 0

    def tracer(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and "agentmesh_dagster/validation" in frame.f_code.co_filename:
            count += 1

    before = sys.getprofile()
    sys.setprofile(tracer)
    try:
        validate_document(document)
    finally:
        sys.setprofile(before)
    return count


def many_containers(size: int) -> Json:
    nodes = (foreach(f"f{n}", body(step(f"x{n}", "{{ item }}"))) for n in range(size))
    return flow(*nodes, settings={"max_steps": 999})


def exclusive_writers(size: int) -> Json:
    """A branch with a node on each handle, all of which write one key."""
    names = [f"n{n}" for n in range(size)]
    cases = [{"when": "true", "handle": name} for name in names]
    branch = {"id": "pick", "type": "branch", "config": {"conditions": cases, "default": "n0"}}
    nodes = [branch, *(step(name, set={"k": 1}) for name in names), step("last")]
    ways = [{"source": "pick", "target": name, "source_handle": name} for name in names]
    return flow(loop("l", body(*nodes, edges=[*ways, *({"source": n, "target": "last"} for n in names)])))


@pytest.mark.parametrize(
    "document",
    [many_containers, exclusive_writers, lambda size: nested(10, size // 10)],
    ids=["wide", "writers", "deep"],
)
def test_work_grows_no_faster_than_all_levels_together(document: Callable[[int], Json]) -> None:
    short, long = calls_for(document(60)), calls_for(document(480))
    assert short > 100
    assert long < 10 * short


names = st.sampled_from(["x", "y", "start", "done", "item", "a b", "body", "left", "agentmesh_end"])
texts = names | st.sampled_from(
    ["{{ steps.x.output }}", "{{ item", "steps.y.output", "context.k", "iteration > 1"]
)
odd = (
    st.none()
    | st.integers(-1, 3)
    | texts
    | st.lists(texts, max_size=2)
    | st.dictionaries(names, texts, max_size=2)
)


def levels(nodes: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    edges = st.fixed_dictionaries(
        {"source": names, "target": names}, optional={"condition": texts, "source_handle": names}
    )
    return odd | st.fixed_dictionaries(
        {},
        optional={
            "nodes": st.lists(nodes | odd, max_size=3) | odd,
            "edges": st.lists(edges | odd, max_size=3) | odd,
            "workflow": odd,
            "input": odd,
        },
    )


def containers(nodes: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    bodies = levels(nodes)
    config = st.fixed_dictionaries(
        {},
        optional={
            "body": bodies,
            "branches": st.dictionaries(names, bodies, max_size=3) | odd,
            "items": odd,
            "until": texts,
            "while": odd,
            "key": texts,
            "wait": odd,
            "max_iterations": st.integers(0, 2000),
            "fanout": st.booleans(),
        },
    )
    kinds = st.sampled_from(
        ["foreach", "loop", "parallel", "workflow", "transform", "branch", "human", "start", "odd"]
    )
    return st.fixed_dictionaries(
        {"id": names | odd, "type": kinds},
        optional={
            "config": config | odd,
            "set": st.dictionaries(names, texts, max_size=2) | odd,
            "join": odd,
            "on_error": st.sampled_from(["route", "continue", "x"]),
        },
    )


leaves = st.fixed_dictionaries(
    {"id": names, "type": names}, optional={"set": st.dictionaries(names, texts, max_size=2)}
)
everything = st.recursive(leaves, containers, max_leaves=8)
documents = st.fixed_dictionaries(
    {"kind": st.just("workflow"), "slug": names, "nodes": st.lists(everything, max_size=4), "edges": st.just([])},
    optional={
        "on_failure": levels(everything),
        "finally": levels(everything),
        "settings": st.dictionaries(st.sampled_from(["max_iterations", "inline_s", "timeout_includes_waiting"]), odd),
        "state_schema": st.fixed_dictionaries(
            {"properties": st.dictionaries(names, st.dictionaries(st.sampled_from(["reducer", "type"]), odd) | odd)}
        ) | odd,
    },
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(documents)
def test_garbage_in_bodies_is_refused_and_never_crashes(raw: Json) -> None:
    result = validate_document(raw, library=library(OTHER, tool(requires_approval=True)))
    assert (result.document is None) == bool(result.errors)
    assert all(problem.code in RULES and str(problem) for problem in result.problems)


@pytest.mark.parametrize("items", [5, "text", {"a": 1}, None])
def test_items_are_a_list_or_an_expression(items: Json) -> None:
    assert found(flow(foreach("each", body(step("x")), items=items))) == [
        ("field-invalid", "nodes[1].config")
    ]
    for right in ([], [1, "a"], "{{ input.xs }}"):
        assert found(flow(foreach("each", body(step("x")), items=right))) == []
