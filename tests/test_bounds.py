"""The static worst case of workflows, against numbers counted by hand, and against what agents really ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pytest
from cli_project import Outcome, call
from hypothesis import given, settings
from hypothesis import strategies as st

from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.llm.litellm_client import LiteLLMClient
from agentmesh_dagster.records import StepStatus
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest
from agentmesh_dagster.specs.base import Body
from agentmesh_dagster.specs.documents import AgentSpec, BodySpec, Document, ToolSpec, WorkflowSpec
from agentmesh_dagster.specs.graph import Edge, Graph
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, ContainerConfig, NodeConfig
from agentmesh_dagster.specs.resolve import DocumentLibrary
from agentmesh_dagster.testing import Answer, run_workflow
from agentmesh_dagster.validation.bounds import Explanation, NodeBound, explain
from agentmesh_dagster.validation.counts import Bound, Count, ways_out, worst_pass

Json = Any

OUTPUT = {"type": "object", "properties": {"risk": {"type": "string"}}}
AGENTS = [
    AgentSpec(slug="plain", model="offline/echo"),
    AgentSpec(slug="tooled", model="offline/echo", tools=["sum"], max_steps=4),
    AgentSpec(slug="asking", model="offline/echo", tools=["sum", "pay"], max_steps=4),
    AgentSpec(slug="careful", model=["openai/a", "openai/b", "offline/echo"]),
]
TOOLS = [
    ToolSpec(slug="sum", type="builtin", config={"name": "calculator"}),
    ToolSpec(slug="pay", type="http", config={"url": "https://example.com"}, requires_approval=True),
    ToolSpec(
        slug="find",
        type="builtin",
        config={"name": "json_path"},
        output_schema={
            "type": "object",
            "properties": {"page": {"properties": {"hits": {"type": "array", "maxItems": 7}}}},
        },
    ),
]


def ask(id: str, agent: str = "plain", **fields: Json) -> dict[str, Json]:
    config = fields.pop("config", {})
    return {"id": id, "type": "agent", "config": {"agent": agent, "prompt": "?", **config}, **fields}


def give(id: str, output: Json = None, **fields: Json) -> dict[str, Json]:
    return {"id": id, "type": "transform", "config": {"output": output}, **fields}


def node(id: str, type: str, **config: Json) -> dict[str, Json]:
    return {"id": id, "type": type, "config": config}


def body(*nodes: dict[str, Json]) -> dict[str, Json]:
    """Nodes one after the other."""
    return {"nodes": list(nodes), "edges": chain(nodes)}


def chain(nodes: Json) -> list[dict[str, Json]]:
    ids = [one["id"] for one in nodes]
    return [{"source": a, "target": b} for a, b in pairwise(ids)]


def workflow(*nodes: dict[str, Json], edges: Json = None, **fields: Json) -> WorkflowSpec:
    """A workflow of nodes one after the other, between start and end, or joined by edges `source [handle] target`."""
    all_nodes = [{"id": "start", "type": "start"}, *nodes, {"id": "end", "type": "end"}]
    joined = chain(all_nodes)
    if edges is not None:
        words = [edge.split() for edge in edges]
        joined = [
            {"source": w[0], "target": w[-1], **({"source_handle": w[1]} if len(w) == 3 else {})}
            for w in words
        ]
    return WorkflowSpec.model_validate({"slug": "main", "nodes": all_nodes, "edges": joined, **fields})


def dumped(spec: Document) -> dict[str, Json]:
    """The document as people write it."""
    return {**spec.model_dump(mode="json", by_alias=True, exclude_defaults=True), "kind": spec.kind}


def explained(spec: WorkflowSpec, *beside: Document) -> Explanation:
    return explain(spec, DocumentLibrary([*AGENTS, *TOOLS, *beside, spec]))


def numbers(spec: WorkflowSpec, *beside: Document) -> tuple[int | None, int | None]:
    """Steps and model calls."""
    count = explained(spec, *beside).count
    return count.steps.number, count.model_calls.number


def found(explanation: Explanation, key: str) -> NodeBound:
    stack = list(explanation.nodes)
    while stack:
        one = stack.pop()
        if one.key == key:
            return one
        stack += one.nodes
    raise KeyError(key)


# Agents.


@pytest.mark.parametrize(
    ("agent", "config", "attempts", "calls"),
    [
        ("plain", {}, 1, 1),
        ("plain", {}, 3, 3),
        # The answer and its repair, in each attempt.
        ("plain", {"output_schema": OUTPUT}, 1, 2),
        ("plain", {"output_schema": OUTPUT}, 3, 6),
        # Three answers that call tools are replayed; what comes after them is asked anew.
        ("tooled", {}, 1, 4),
        ("tooled", {}, 3, 3 + 3),
        # Answer, object and repair.
        ("tooled", {"output_schema": OUTPUT}, 1, 3 + 3),
        ("tooled", {"output_schema": OUTPUT}, 2, 3 + 2 * 3),
        # Each of three waits for the approval gives the attempts anew: 4 x 3 calls.
        ("asking", {}, 1, 4),
        ("asking", {}, 3, 4 * 3),
        # Each call may try three models.
        ("careful", {}, 2, 2 * 3),
        ("careful", {"model": "offline/echo"}, 2, 2),
        ("plain", {"model": ["openai/a", "openai/b"]}, 2, 2 * 2),
    ],
)
def test_the_model_calls_of_an_agent(agent: str, config: dict[str, Json], attempts: int, calls: int):
    spec = workflow(ask("ask", agent, config=config, retry={"max_attempts": attempts}))
    assert numbers(spec) == (3, calls)
    assert found(explained(spec), "ask").count.model_calls.number == calls


def test_an_agent_that_is_not_there_leaves_the_calls_open_and_the_steps_not():
    explanation = explained(workflow(ask("ask", "nobody")))
    assert explanation.to_json()["steps"] == 3
    assert explanation.to_json()["model_calls"] is None
    assert explanation.to_json()["unbounded"] == [
        {"what": "model_calls", "path": "nodes[1]", "node": "ask", "why": "there is no agent 'nobody'"}
    ]


def test_an_agent_that_gives_no_object_asks_as_often_as_its_bound_says():
    call_sum = {"tool_calls": [{"tool": "sum", "arguments": {"expression": "1 + 1"}}]}
    agent = AgentSpec(
        slug="clumsy",
        model="offline/script",
        tools=["sum"],
        max_steps=2,
        # By how many answers the conversation holds: a call of the tool, then none that is JSON.
        model_settings={"replies": [call_sum, "no", "no", "no"]},
    )
    retry = {"max_attempts": 2, "delay_s": 0}
    spec = workflow(ask("ask", "clumsy", config={"output_schema": OUTPUT}, retry=retry, timeout_s=60))
    documents = [dumped(one) for one in (agent, TOOLS[0], spec)]
    result = run_workflow(documents)
    assert result.run.error["code"] == "model-bad-object"
    asked = [step for step in result.steps.values() if step.kind == "llm"]
    assert len(asked) == numbers(spec, agent)[1] == 1 + 2 * 3


def test_an_agent_that_waits_for_its_tool_asks_as_often_as_its_bound_says(monkeypatch: pytest.MonkeyPatch):
    call_sum = {"id": "1", "function": {"name": "sum", "arguments": '{"expression": "1 + 1"}'}}
    failure = ModelError("not now", retryable=True)
    replies = [
        failure,
        ModelReply(text="", model="m", tool_calls=(call_sum,)),
        failure,
        ModelReply(text="2", model="m"),
    ]
    asked: list[str] = []

    async def complete(_self: LiteLLMClient, model: str, _request: ModelRequest) -> ModelReply:
        reply = replies[len(asked)]
        asked.append(model)
        if isinstance(reply, ModelError):
            raise reply
        return reply

    # In place of a server: to import LiteLLM takes longer than all that is tested here.
    monkeypatch.setattr(LiteLLMClient, "complete", complete)
    agent = AgentSpec(slug="waiting", model="openai/fake", tools=["sum"], max_steps=2)
    tool = TOOLS[0].model_copy(update={"requires_approval": True})
    retry = {"max_attempts": 2, "delay_s": 0}
    spec = workflow(ask("ask", "waiting", retry=retry, timeout_s=60))
    result = run_workflow([dumped(one) for one in (agent, tool, spec)], answers=lambda _: Answer())
    assert result.succeeded, result.run.error
    assert len(asked) == numbers(spec, agent, tool)[1] == 4


# Ways that exclude each other.


def test_of_the_ways_of_a_branch_the_costliest_counts():
    spec = workflow(
        node("size", "branch", conditions=[{"when": "true", "handle": "large"}], default="small"),
        ask("one"),
        ask("two"),
        ask("three"),
        edges=[
            "start size",
            "size large one",
            "one two",
            "size small three",
            "two end",
            "three end",
        ],
    )
    # start, size, one, two, end; three instead of one and two is less.
    assert numbers(spec) == (5, 2)
    assert "large, small" in found(explained(spec), "size").why


def test_steps_and_calls_are_each_the_worst_of_some_way():
    spec = workflow(
        node("size", "branch", conditions=[{"when": "true", "handle": "long"}], default="dear"),
        give("a"),
        give("b"),
        give("c"),
        ask("d", "careful"),
        edges=["start size", "size long a", "a b", "b c", "c end", "size dear d", "d end"],
    )
    assert numbers(spec) == (6, 3)


def test_all_ways_of_a_branch_that_takes_several_are_summed():
    spec = workflow(
        node(
            "size",
            "branch",
            mode="all",
            conditions=[{"when": "true", "handle": "x"}, {"when": "true", "handle": "y"}],
        ),
        ask("one"),
        ask("two"),
        edges=["start size", "size x one", "size y two", "one end", "two end"],
    )
    assert numbers(spec) == (5, 2)


def test_a_node_behind_two_ways_counts_once_and_with_each():
    spec = workflow(
        node(
            "size",
            "branch",
            conditions=[{"when": "true", "handle": "x"}, {"when": "true", "handle": "y"}],
            default="z",
        ),
        ask("one"),
        ask("two"),
        ask("shared"),
        edges=[
            "start size",
            "size x one",
            "size y two",
            "one shared",
            "two shared",
            "shared end",
            "size z end",
        ],
    )
    # start, size, one of two, shared, end.
    assert numbers(spec) == (5, 2)


def test_a_node_that_another_way_reaches_too_is_summed():
    spec = workflow(
        node("size", "branch", conditions=[{"when": "true", "handle": "x"}], default="y"),
        ask("beside"),
        ask("one"),
        ask("two"),
        edges=["start size", "start beside", "beside one", "size x one", "size y two", "one end", "two end"],
    )
    # `one` runs after `beside`, whatever `size` says.
    assert numbers(spec) == (6, 3)


def test_a_choice_within_a_choice():
    branch = {"conditions": [{"when": "true", "handle": "x"}], "default": "y"}
    spec = workflow(
        node("outer", "branch", **branch),
        node("inner", "branch", **branch),
        ask("one"),
        ask("two", "careful"),
        ask("three"),
        edges=[
            "start outer",
            "outer x inner",
            "inner x one",
            "inner y two",
            "outer y three",
            "one end",
            "two end",
            "three end",
        ],
    )
    assert numbers(spec) == (5, 3)


@pytest.mark.parametrize(
    ("config", "edges", "expected"),
    [
        # approved or rejected; without a handle the approved way goes on too.
        ({}, ["gate approved one", "gate rejected two", "one end", "two end"], (4, 1)),
        ({}, ["gate approved one", "gate two", "one end", "two end"], (5, 2)),
        ({}, ["gate rejected one", "gate two", "one end", "two end"], (4, 1)),
        ({"options": ["a", "b"]}, ["gate a one", "gate b two", "one end", "two end"], (4, 1)),
        (
            {"options": ["a", "b"], "multiple": True},
            ["gate a one", "gate b two", "one end", "two end"],
            (5, 2),
        ),
        (
            {"on_timeout": "route", "timeout": 60},
            ["gate approved one", "gate timeout two", "one end", "two end"],
            (4, 1),
        ),
    ],
)
def test_of_the_decisions_of_a_gate_one_is_made(
    config: dict[str, Json], edges: list[str], expected: tuple[int, int]
):
    gate = node("gate", "human", title="?", **config)
    assert numbers(workflow(gate, ask("one"), ask("two"), edges=["start gate", *edges])) == expected


def test_an_event_comes_or_its_time_runs_out():
    hook = node("hook", "webhook", event="paid", timeout=60, on_timeout="route")
    spec = workflow(
        hook,
        ask("one"),
        ask("two"),
        edges=["start hook", "hook one", "hook timeout two", "one end", "two end"],
    )
    assert numbers(spec) == (4, 1)


def test_a_routed_failure_goes_one_way_or_the_other():
    edges = ["start try", "try one", "try error two", "two three", "one end", "three end"]
    spec = workflow(ask("try", on_error="route"), ask("one"), ask("two"), ask("three"), edges=edges)
    assert numbers(spec) == (5, 3)


def random_graphs() -> st.SearchStrategy[tuple[int, list[tuple[int, int, str | None]], list[int]]]:
    """Nodes by number, edges that lead to higher ones by a handle, and what each node costs."""

    def of(size: int) -> Any:
        pairs = [(a, b) for b in range(size) for a in range(b)]
        edge = st.sampled_from(pairs)
        handles = st.sampled_from(["x", "y", None])
        edges = st.lists(st.tuples(edge, handles).map(lambda e: (*e[0], e[1])), max_size=14)
        return st.tuples(st.just(size), edges, st.lists(st.integers(0, 5), min_size=size, max_size=size))

    return st.integers(2, 8).flatmap(of)


@settings(max_examples=100, deadline=None)
@given(random_graphs(), st.integers(0, 255))
def test_no_run_of_a_graph_costs_more_than_its_bound(
    drawn: tuple[int, list[tuple[int, int, str | None]], list[int]], choosing: int
):
    size, drawn_edges, costs = drawn
    choosers = [n for n in range(size) if choosing >> n & 1]
    branch = {"conditions": [{"when": "true", "handle": "x"}], "default": "y"}
    specs = [node(f"n{n}", "branch", **branch) if n in choosers else give(f"n{n}") for n in range(size)]
    edges = tuple(
        Edge(number, f"n{a}", f"n{b}", (handle or "x") if a in choosers else None, None)
        for number, (a, b, handle) in enumerate(drawn_edges)
    )
    graph = Graph(tuple(workflow(*specs).nodes[1:-1]), edges)
    configs = {s.id: BUILTIN_NODE_CONFIGS[s.type].model_validate(s.config) for s in graph.node_specs}
    ways = {name: ways_out(graph.nodes[name], configs[name], graph.outgoing[name]) for name in graph.nodes}
    counts = {f"n{n}": Count(steps=Bound(1), model_calls=Bound(cost)) for n, cost in enumerate(costs)}
    bound = worst_pass(graph, counts, ways)
    worst = (0, 0)
    for taken in range(2 ** len(choosers)):
        chosen = {f"n{n}": "xy"[taken >> at & 1] for at, n in enumerate(choosers)}
        ran: list[str] = []
        for name in graph.order:
            live = [
                e
                for e in graph.incoming[name]
                if e.source in ran and (e.source not in chosen or e.handle == chosen[e.source])
            ]
            if live or not graph.incoming[name]:
                ran.append(name)
        calls = sum(counts[name].model_calls.finite for name in ran)
        worst = (max(worst[0], len(ran)), max(worst[1], calls))
    assert bound.steps.finite >= worst[0]
    assert bound.model_calls.finite >= worst[1]
    if len(choosers) <= 1:
        assert (bound.steps.finite, bound.model_calls.finite) == worst


# Containers.


def test_branches_of_a_parallel_node_are_summed_with_a_row_each():
    both = node("both", "parallel", branches={"left": body(ask("a"), ask("b")), "right": body(ask("c"))})
    spec = workflow(both)
    # start, both, left, a, b, right, c, end.
    assert numbers(spec) == (8, 3)
    explanation = explained(spec)
    assert found(explanation, "both/left").count.steps.number == 3
    assert found(explanation, "both/left/b").path == "nodes[1].config.branches.left.nodes[1]"


def each(items: Json, *nodes: dict[str, Json], id: str = "each") -> dict[str, Json]:
    return node(id, "foreach", items=items, body=body(*nodes))


LINES = {"type": "object", "properties": {"lines": {"type": "array", "maxItems": 5}}}


def test_a_foreach_over_a_literal_list():
    # start, each, 3 x (item, ask, give), end.
    assert numbers(workflow(each([1, "{{ input.x }}", 3], ask("ask"), give("give")))) == (12, 3)


def test_a_foreach_over_an_empty_list_runs_nothing_however_costly():
    unbounded = each("{{ input.more }}", ask("ask"), id="inner")
    assert numbers(workflow(each([], unbounded))) == (3, 0)


@pytest.mark.parametrize(
    ("items", "length"),
    [
        ("{{ input.lines }}", 5),
        ("{{ steps.start.output.lines }}", 5),
        ("{{ input.deep.list }}", 4),
        ("{{ input.referred.list }}", 4),
        ("{{ input.joined }}", 2),
        ("{{ input.perhaps }}", 6),
        ("{{ steps.classify.output.parts }}", 8),
        ("{{ steps.classify.output.object.parts }}", 8),
        ("{{ steps.search.output.page.hits }}", 7),
        ("{{ steps.reshape.output.renamed }}", 5),
        ("{{ steps.reshape.output.two }}", 2),
        ("{{ steps.hook.output.rows }}", 9),
        ("{{ steps.child.output.lines }}", 5),
        ("{{ steps.both.output.left }}", 3),
        # What stands in the way of knowing.
        ("{{ input.open }}", None),
        ("{{ input.other }}", None),
        ("{{ input.lines + input.lines }}", None),
        ("{{ input.lines }} ", None),
        ("{{ steps.classify.output.tool_calls }}", None),
        ("{{ context.lines }}", None),
        ("{{ range(input.n) }}", None),
    ],
)
def test_how_long_a_list_is(items: Json, length: int | None):
    deep = {"type": "object", "properties": {"list": {"type": "array", "maxItems": 4}}}
    schema = {
        "type": "object",
        "$defs": {"deep": deep},
        "properties": {
            **LINES["properties"],
            "deep": deep,
            "referred": {"$ref": "#/$defs/deep"},
            "joined": {"allOf": [{"maxItems": 3}, {"type": "array", "maxItems": 2}]},
            "perhaps": {"anyOf": [{"type": "array", "maxItems": 6}, {"type": "null"}]},
            "open": {"anyOf": [{"type": "array", "maxItems": 6}, {"type": "array"}]},
            "other": {"type": "array"},
        },
    }
    parts = {
        "type": "object",
        "properties": {
            "parts": {"type": "array", "maxItems": 8},
            "tool_calls": {"type": "array", "maxItems": 1},
        },
    }
    rows = {"type": "object", "properties": {"rows": {"type": "array", "maxItems": 9}}}
    before = [
        ask("classify", config={"output_schema": parts}),
        node("search", "tool", tool="find"),
        give("reshape", {"renamed": "{{ input.lines }}", "two": [1, 2]}),
        node("hook", "webhook", event="paid", payload_schema=rows),
        node("child", "workflow", workflow="child"),
        node("both", "parallel", branches={"left": body(give("three", [1, 2, 3]))}),
    ]
    spec = workflow(*before, each(items, give("x")), input_schema=schema)
    bound = found(explained(spec, child(output_schema=LINES)), "each").count.steps
    assert bound.number == (None if length is None else 1 + 2 * length)


def test_a_foreach_over_the_results_of_another_and_over_the_lists_in_its_items():
    groups = {
        "type": "object",
        "properties": {
            "groups": {
                "type": "array",
                "maxItems": 3,
                "items": {"properties": {"members": {"type": "array", "maxItems": 4}}},
            }
        },
    }
    inner = each("{{ item.members }}", ask("ask"), id="inner")
    spec = workflow(
        each("{{ input.groups }}", inner, id="outer"),
        each("{{ steps.outer.output }}", give("x"), id="after"),
        input_schema=groups,
    )
    # outer: 1 + 3 x (1 + inner: 1 + 4 x (1 + 1)); after: 1 + 3 x (1 + 1); start, end.
    assert numbers(spec) == (2 + 31 + 7, 12)


def test_what_has_no_bound_is_named_and_calls_stay_bounded_where_the_body_asks_no_model():
    spec = workflow(ask("first"), each("{{ input.lines }}", give("x")), input_schema={"type": "object"})
    explanation = explained(spec).to_json()
    assert (explanation["steps"], explanation["model_calls"]) == (None, 1)
    assert explanation["unbounded"] == [
        {"what": "steps", "path": "nodes[2]", "node": "each", "why": "no maxItems at input.lines"}
    ]
    [(_, place)] = explained(spec).unbounded
    assert str(place) == "nodes[2] 'each': no maxItems at input.lines"
    asking = workflow(each("{{ input.lines }}", ask("ask")))
    assert numbers(asking) == (None, None)
    assert {one["what"] for one in explained(asking).to_json()["unbounded"]} == {"steps", "model_calls"}


def test_a_loop_runs_its_body_as_often_as_it_may():
    again = node(
        "again", "loop", until="false", max_iterations=10, body=body(ask("draft"), ask("judge", "careful"))
    )
    # start, again, 10 x (iteration, draft, judge), end.
    assert numbers(workflow(again)) == (33, 10 * (1 + 3))
    assert found(explained(workflow(again)), "again#*/judge").count.model_calls.number == 3


def test_containers_in_containers_multiply():
    again = node("again", "loop", until="false", max_iterations=3, body=body(ask("draft")))
    both = node("both", "parallel", branches={"left": body(again), "right": body(give("x"))})
    # each: 1 + 5 x (item + both: 1 + left 1 + (again 1 + 3 x 2) + right 1 + x 1); start, end.
    spec = workflow(each("{{ input.lines }}", both), input_schema=LINES)
    assert numbers(spec) == (2 + 1 + 5 * (1 + 11), 15)


def test_a_container_with_retry_asks_again_and_writes_the_same_rows():
    again = node("again", "loop", until="false", max_iterations=4, body=body(ask("draft")))
    assert numbers(workflow({**again, "retry": {"max_attempts": 3}})) == (11, 12)


class TwiceConfig(ContainerConfig):
    body: Annotated[BodySpec, Body()]


class OtherConfig(NodeConfig):
    pass


def test_a_container_of_a_plugin_has_no_bound_and_another_type_is_one_step():
    configs = {**BUILTIN_NODE_CONFIGS, "other": OtherConfig}
    library = DocumentLibrary(AGENTS)
    other = explain(workflow(node("x", "other")), library, node_configs=configs)
    assert (other.count.steps.number, other.count.model_calls.number) == (3, 0)
    assert "not counted" in found(other, "x").why
    unknown = explain(workflow(node("x", "nowhere")), library)
    assert unknown.count.steps.number == 3

    twice = workflow(node("x", "twice", body=body(ask("ask"))))
    count = explain(twice, library, node_configs={**configs, "twice": TwiceConfig}).count
    assert (count.steps.number, count.model_calls.number) == (None, None)


# Workflows that call workflows.


def child(*nodes: dict[str, Json], **fields: Json) -> WorkflowSpec:
    return workflow(*nodes, slug="child", **fields)


def test_a_called_workflow_counts_with_its_own_start_and_end():
    called = child(ask("x"), ask("y"))
    assert numbers(workflow(node("call", "workflow", workflow="child")), called) == (3 + 4, 2)
    loop = node("again", "loop", until="false", max_iterations=5, body={"workflow": "child"})
    # again + 5 x (iteration + 4).
    assert numbers(workflow(loop), called) == (2 + 1 + 25, 10)
    assert "calls workflow 'child'" in found(explained(workflow(loop), called), "again").why


def test_a_started_run_is_counted_apart():
    called = child(ask("x"))
    call_ = {"workflow": "child", "async": True}
    spec = workflow(each([1, 2, 3], node("call", "workflow", **call_)))
    count = explained(spec, called).count
    assert (count.steps.number, count.model_calls.number, count.starts.number) == (3 + 6, 0, 3)
    assert "3 steps, 1 model call" in found(explained(spec, called), "each[*]/call").why


def test_what_has_no_bound_in_a_called_workflow_is_told_at_the_call():
    called = child(each("{{ input.lines }}", ask("ask")))
    places = {
        str(p) for _, p in explained(workflow(node("call", "workflow", workflow="child")), called).unbounded
    }
    assert places == {"nodes[1] 'call': no maxItems at input.lines (in workflow 'child', nodes[1] 'each')"}


def test_a_workflow_that_is_not_there_has_no_bound():
    spec = workflow(node("call", "workflow", workflow="nowhere"))
    assert numbers(spec) == (None, None)
    assert "there is no workflow 'nowhere'" in {place.why for _, place in explained(spec).unbounded}


def test_a_workflow_that_contains_itself_has_no_bound():
    assert numbers(workflow(node("call", "workflow", workflow="main"))) == (None, None)


def test_chains_of_calls_are_counted_without_walking_every_way():
    levels = [child(ask("x"))]
    for number in range(40):
        below = levels[-1].slug
        twice = [node(f"c{n}", "workflow", workflow=below) for n in range(2)]
        levels.append(workflow(*twice, slug=f"level{number}"))
    assert numbers(levels[-1], *levels[:-1])[1] == 2**40


# The whole run.


def test_max_steps_lets_the_costliest_nodes_run():
    nodes = [ask(f"n{n}", "careful" if n == 4 else "plain") for n in range(8)]
    spec = workflow(*nodes, settings={"max_steps": 4})
    assert numbers(spec) == (4, 3 + 1 + 1 + 1)
    assert "max_steps" in explained(spec).why
    # A body's nodes are not the workflow's own.
    inside = workflow(each([1, 2], *nodes), settings={"max_steps": 4})
    assert numbers(inside) == (3 + 2 * 9, 2 * (7 + 3))
    assert explained(inside).why == ""


def test_on_failure_and_finally_are_in_the_total():
    spec = workflow(
        ask("work"),
        on_failure=body(ask("tell")),
        **{"finally": body(give("clean"), each("{{ input.lines }}", ask("report", "careful")))},
        input_schema=LINES,
    )
    explanation = explained(spec)
    # start, work, end; tell; clean, each, 5 x (item, report).
    assert numbers(spec) == (3 + 1 + 2 + 10, 1 + 1 + 15)
    assert found(explanation, "@on_failure").count.steps.number == 1
    assert found(explanation, "@finally/each[*]/report").path == "finally.nodes[1].config.body.nodes[0]"


@pytest.mark.parametrize("execution", ["dagster", "inline"])
def test_a_run_that_takes_every_way_writes_as_many_rows_as_its_bound(execution: str):
    again = node(
        "again", "loop", until="false", max_iterations=3, on_limit="continue", body=body(ask("draft"))
    )
    spec = workflow(
        node("call", "workflow", workflow="child", input={}),
        node("both", "parallel", branches={"left": body(again), "right": {"workflow": "child", "input": {}}}),
        each("{{ input.lines }}", each(["a", "b"], give("x"), id="inner")),
        node("size", "branch", conditions=[{"when": "true", "handle": "large"}], default="small"),
        ask("one"),
        ask("two"),
        edges=[
            *("start call", "call both", "both each", "each size", "size large one", "one two"),
            *("two end", "size small end"),
        ],
        input_schema=LINES,
        settings={"execution": execution, "node_timeout_s": 60},
    )
    called = child(ask("y"), **{"finally": body(give("z"))})
    documents = [dumped(one) for one in (AGENTS[0], called, spec)]
    result = run_workflow(documents, {"lines": [1, 2, 3, 4, 5]}, slug="main")
    assert result.succeeded, result.run.error
    kinds = [step.kind for step in result.steps.values() if step.status is not StepStatus.SKIPPED]
    assert (len(kinds) - kinds.count("llm"), kinds.count("llm")) == numbers(spec, called)


# The command.

Cli = Callable[..., Outcome]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTMESH_PROJECT", "default")
    return lambda *args: call(capsys, *args)


def write(name: str, spec: Mapping[str, Json]) -> None:
    Path(name).write_text(json.dumps(spec))


def test_validate_explains_with_documents_of_the_files_and_of_the_database(cli: Cli):
    write("agent.json", {"kind": "agent", "slug": "plain", "model": "offline/echo"})
    write("stored.json", {**dumped(child(ask("x", timeout_s=60))), "slug": "stored"})
    assert cli("import", "agent.json", "stored.json", "--publish").code == 0
    beside = workflow(ask("y", timeout_s=60), ask("z", timeout_s=60))
    write("beside.json", {**dumped(beside), "slug": "beside"})
    spec = workflow(
        node("one", "workflow", workflow="stored"),
        node("two", "workflow", workflow="beside"),
        each("{{ input.lines }}", give("x", "{{ item }}")),
    )
    write("main.json", {**dumped(spec), "input_schema": LINES})
    write("broken.json", {**dumped(spec), "slug": "broken", "edges": []})

    done = cli("validate", "main.json", "beside.json", "--explain", "--json")
    assert done.code == 0, done.out
    main, other = done.json["documents"]
    assert (main["explain"]["steps"], main["explain"]["model_calls"]) == (2 + 4 + 5 + 11, 1 + 2)
    assert main["explain"]["unbounded"] == []
    assert [one["key"] for one in main["explain"]["nodes"]] == ["start", "one", "two", "each", "end"]
    assert main["explain"]["nodes"][3]["nodes"][0] == {
        "key": "each[*]/x",
        "path": "nodes[3].config.body.nodes[0]",
        "type": "transform",
        "steps": 1,
        "model_calls": 0,
        "starts": 0,
        "why": "",
        "nodes": [],
    }
    assert other["explain"]["model_calls"] == 2

    shown = cli("validate", "main.json", "beside.json", "--explain").out.splitlines()
    assert "workflow 'main' (main.json), at worst: 22 steps, 3 model calls" in shown
    rows = [line.split("\t") for line in shown if "\t" in line]
    assert rows[0] == ["node", "type", "steps", "model calls", "why"]
    assert ["  each[*]/x", "transform", "1", "0", "-"] in rows

    write("main.json", dumped(spec))
    shown = cli("validate", "main.json", "beside.json", "--explain").out
    assert "unbounded: nodes[3] 'each': no maxItems at input.lines" in shown

    Path("unread.yaml").write_text("a: [")
    wrong = cli("validate", "unread.yaml", "broken.json", "beside.json", "--explain", "--json")
    assert wrong.code == 1
    explains = {one["slug"]: one["explain"] for one in wrong.json["documents"]}
    assert explains[None] is None
    assert explains["broken"] is None
    assert explains["beside"]["steps"] == 4
    assert "explain" not in cli("validate", "beside.json", "--json").json["documents"][0]
