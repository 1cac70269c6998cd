"""The forms in which editors and other products write workflows, from the raw document to the finished run."""

from __future__ import annotations

import json

import pytest
from fake_http import FakeHttp

from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.specs.normalize import normalize
from agentmesh_dagster.testing import run_workflow
from agentmesh_dagster.validation import validate_raw


def flow_node(id, kind, **data):
    """A node as React Flow saves it."""
    return {
        "id": id,
        "type": kind,
        "position": {"x": 1, "y": 2},
        "data": {"label": id.title(), **data},
        "width": 120,
        "selected": False,
    }


def flow_edge(source, target, **more):
    return {
        "id": f"{source}-{target}",
        "source": source,
        "target": target,
        "type": "smoothstep",
        "animated": True,
        **more,
    }


SEED = {
    "slug": "seed",
    "name": "Seed",
    "kind": "workflow",
    "inputSchemaJson": json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}}),
    "maxSteps": 20,
    "graph": {
        "nodes": [
            flow_node("start", "start"),
            flow_node(
                "twice",
                "transform",
                config={"output": {"n": "{{ input.n * 2 }}"}},
                retryConfig={"maxRetries": 2, "delayMs": 500},
            ),
            flow_node("large", "conditional", condition="{{ steps.twice.result.n > 10 }}"),
            flow_node("yes", "end", output="large: {{ steps.twice.result.n }}"),
            flow_node("no", "end", output="small"),
        ],
        "edges": [
            flow_edge("start", "twice"),
            flow_edge("twice", "large"),
            flow_edge("large", "yes", sourceHandle="true", label="large"),
            flow_edge("large", "no", sourceHandle="false"),
        ],
        "viewport": {"x": 0, "y": 0, "zoom": 1},
    },
}


@pytest.mark.parametrize(("n", "output"), [(6, "large: 12"), (5, "small")])
def test_a_graph_of_react_flow_runs(n, output):
    assert run_workflow([SEED], {"n": n}).run.output == output


def test_its_parts_find_their_places():
    document = normalize(SEED).documents[0]
    assert document["settings"] == {"max_steps": 20}
    assert document["input_schema"]["properties"] == {"n": {"type": "integer"}}
    twice = document["nodes"][1]
    assert twice["retry"] == {"max_attempts": 3, "delay_s": 0.5}
    assert (twice["name"], twice["position"]) == ("Twice", {"x": 1, "y": 2})
    assert document["edges"][2]["metadata"] == {"label": "large"}
    # What is in the form of the models comes to rest.
    assert normalize(document).documents[0] == document


def test_problems_stand_where_the_author_wrote_them():
    broken = json.loads(json.dumps(SEED))
    broken["graph"]["nodes"][1]["data"]["config"] = {"outputt": 1}
    broken["graph"]["nodes"][2]["data"]["nonsense"] = 1
    paths = {problem.path for found in validate_raw([broken]) for problem in found.checked.errors}
    assert "graph.nodes[1].data.config.outputt" in paths
    assert "graph.nodes[2].data.nonsense" in paths


def sent(body):
    return json.loads(body) if isinstance(body, str) else body


def level(branch, edges):
    ends = [{"id": name, "type": "end", "config": {"output": name}} for name in ("a", "b")]
    nodes = [{"id": "start", "type": "start"}, {"id": "pick", "type": "branch", **branch}, *ends]
    return {
        "kind": "workflow",
        "slug": "pick",
        "nodes": nodes,
        "edges": [{"source": "start", "target": "pick"}, *edges],
    }


@pytest.mark.parametrize(
    ("branch", "edges"),
    [
        (
            {"config": {"condition": "${input.n > 1}"}},
            [
                {"source": "pick", "target": "a", "condition": "true"},
                {"source": "pick", "target": "b", "condition": "false"},
            ],
        ),
        (
            {"data": {"condition": "input.n > 1"}},
            [
                {"source": "pick", "target": "a", "sourceHandle": "yes"},
                {"source": "pick", "target": "b", "data": {"condition": False}},
            ],
        ),
        (
            {},
            [
                {"source": "pick", "target": "a", "condition": "input.n > 1"},
                {"source": "pick", "target": "b"},
            ],
        ),
        (
            {},
            [
                {"source": "pick", "target": "a", "data": {"condition": "{{ input.n > 1 }}"}},
                {"source": "pick", "target": "b", "condition": "else"},
            ],
        ),
    ],
    ids=["edges-say-true", "handles-say-yes", "edges-have-conditions", "else"],
)
def test_branches_with_a_condition_or_conditional_edges(branch, edges):
    document = level(branch, edges)
    assert [run_workflow([document], {"n": n}).run.output for n in (2, 1)] == ["a", "b"]


def test_an_llm_node_is_an_agent():
    ask = {
        "id": "ask",
        "type": "llm",
        "config": {
            "provider": "offline",
            "model": "echo",
            "systemPrompt": "Be brief.",
            "prompt": "Hello {{ input.name }}",
        },
    }
    nodes = [
        {"id": "start", "type": "start"},
        ask,
        {"id": "done", "type": "end", "config": {"output": "{{ steps.ask.result.text }}"}},
    ]
    edges = [{"source": "start", "target": "ask"}, {"source": "ask", "target": "done"}]
    document = {"kind": "workflow", "slug": "hello", "nodes": nodes, "edges": edges}
    assert "Hello Ann" in run_workflow([document], {"name": "Ann"}).run.output
    agent = normalize(document).documents[1]
    assert (agent["kind"], agent["model"]) == ("agent", "offline/echo")


def test_an_http_node_is_a_tool(monkeypatch):
    monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
    with FakeHttp() as server:
        send = {
            "id": "send",
            "type": "http",
            "config": {
                "method": "POST",
                "url": f"{server.url}/echo",
                "headers": {"X-Order": "{{ input.order }}"},
                "body": {"order": "{{ input.order }}", "twice": "{{ steps.two.output }}"},
            },
        }
        nodes = [
            {"id": "start", "type": "start"},
            {"id": "two", "type": "transform", "config": {"output": 2}},
            send,
            {"id": "done", "type": "end", "config": {"output": "{{ steps.send.output.body }}"}},
        ]
        edges = [{"source": a["id"], "target": b["id"]} for a, b in zip(nodes, nodes[1:], strict=False)]  # noqa: RUF007
        document = {"kind": "workflow", "slug": "post", "nodes": nodes, "edges": edges}
        result = run_workflow([document], {"order": "A-1"})
    assert result.run.status is RunStatus.SUCCEEDED, result.run.error
    assert sent(result.run.output) == {"order": "A-1", "twice": 2}
    tool = normalize(document).documents[1]
    assert (tool["kind"], tool["side_effects"]) == ("tool", True)
    assert tool["config"]["headers"] == {"X-Order": "{{ input.value_1 }}"}
