"""Foreign spellings are taken and come out as the one form; free data is never touched."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentmesh_dagster.specs.normalize import normalize
from agentmesh_dagster.specs.normalize.expressions import canonical_condition, canonical_template
from agentmesh_dagster.validation import validate_document, validate_raw

Json = Any


def normal(raw: Json) -> Json:
    return normalize(raw).documents[0]


def node(kind: str, **config: Json) -> Json:
    """The config of a node of a type, normalised."""
    raw = {
        "kind": "workflow",
        "slug": "w",
        "nodes": [{"id": "n", "type": kind, "config": config}],
        "edges": [],
    }
    return normal(raw)["nodes"][0]["config"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("${input.x}", "{{ input.x }}"),
        ("a ${ input.x } b ${steps.a.output}", "a {{ input.x }} b {{ steps.a.output }}"),
        ("costs ${{ input.x }}", "costs ${{ input.x }}"),
        ("${user_input.x}", "{{ input.x }}"),
        ("{{ user_input.x }} user_input", "{{ input.x }} user_input"),
        ("{{ 'user_input' }}", "{{ 'user_input' }}"),
        ("{{ steps.user_input.output }}", "{{ steps.user_input.output }}"),
        ("{{ my_user_input + user_input_2 }}", "{{ my_user_input + user_input_2 }}"),
        ("{{ '${x}' }}", "{{ '${x}' }}"),
        ("{{ '}}' ~ user_input }}", "{{ '}}' ~ input }}"),
        ("${ {'a': 1}.a }", "{{ {'a': 1}.a }}"),
        ("${ '}' }", "{{ '}' }}"),
        ("{% if user_input.x %}a{% endif %}", "{% if input.x %}a{% endif %}"),
        ("{# ${x} #}", "{# ${x} #}"),
        ("{{ loopItem.a }} {{ loopIndex }}", "{{ item.a }} {{ index }}"),
        ("open ${x", "open ${x"),
        ("{{ open", "{{ open"),
        ("$5 {a}", "$5 {a}"),
        ("${}", "${}"),
    ],
)
def test_templates_are_spelled_one_way(written: str, meant: str) -> None:
    assert canonical_template(written) == meant
    assert canonical_template(meant) == meant
    assert node("transform", output={"deep": [written]}) == {"output": {"deep": [meant]}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("user_input.x > 5", "input.x > 5"),
        ("${user_input.x}", "input.x"),
        ("${input.x} > 5 and ${a or b}", "input.x > 5 and (a or b)"),
        ("x == 'user_input ${y}'", "x == 'user_input ${y}'"),
    ],
)
def test_conditions_are_spelled_one_way(written: str, meant: str) -> None:
    assert canonical_condition(written) == meant
    raw = {
        "kind": "workflow",
        "slug": "w",
        "nodes": [],
        "edges": [{"source": "a", "target": "b", "condition": written}],
    }
    assert normal(raw)["edges"][0]["condition"] == meant


@pytest.mark.parametrize(
    ("kind", "written", "meant"),
    [
        ("agent", {"agentId": "a"}, {"agent": "a"}),
        ("agent", {"agentSlug": "a"}, {"agent": "a"}),
        ("agent", {"promptTemplate": "p"}, {"prompt": "p"}),
        ("agent", {"systemPrompt": "p"}, {"instructions": "p"}),
        ("agent", {"maxTokens": 5}, {"max_tokens": 5}),
        ("agent", {"modelProvider": "openai", "modelName": "gpt"}, {"model": "openai/gpt"}),
        ("agent", {"modelProvider": "openai", "modelName": "openai/gpt"}, {"model": "openai/gpt"}),
        ("agent", {"modelName": "gpt"}, {"model": "gpt"}),
        ("agent", {"outputFormat": {"type": "object"}}, {"output_schema": {"type": "object"}}),
        ("agent", {"outputFormat": "json"}, {"output_schema": {"type": "object"}}),
        ("agent", {"outputFormat": "text"}, {}),
        ("agent", {"inputMapping": {"prompt": "${input.x}"}}, {"prompt": "{{ input.x }}"}),
        ("agent", {"inputMapping": {"a": "${input.x}", "n": 3}}, {"prompt": "a: {{ input.x }}\nn: 3"}),
        ("tool", {"toolId": "t"}, {"tool": "t"}),
        ("tool", {"toolKey": "t"}, {"tool": "t"}),
        ("tool", {"parameterMappings": {"aB": 1}}, {"input": {"aB": 1}}),
        ("tool", {"inputMapping": {"aB": 1}}, {"input": {"aB": 1}}),
        ("code", {"functionName": "m:f"}, {"function": "m:f"}),
        ("transform", {"inputMapping": {"aB": 1}}, {"output": {"aB": 1}}),
        (
            "branch",
            {"conditions": [{"expression": "a", "handle": "h"}]},
            {"conditions": [{"when": "a", "handle": "h"}]},
        ),
    ],
)
def test_words_of_node_configs(kind: str, written: Json, meant: Json) -> None:
    assert node(kind, **written) == meant


def test_words_of_documents_nodes_and_edges() -> None:
    raw = {
        "kind": "workflow",
        "slug": "w",
        "inputSchema": {"type": "object", "properties": {"someKey": {"maxLength": 3}}},
        "isTemplate": True,
        "settings": {"maxConcurrent": 3},
        "metadata": {"someKey": "${x} user_input"},
        "nodes": [
            {"id": "a", "type": "conditional", "label": "Size", "onError": "fail", "metadata": {"label": 1}},
            {"id": "b", "type": "human_approval", "config": {"formSchema": 1}},
            {"id": "c", "type": "dowhile"},
        ],
        "edges": [{"fromNodeId": "a", "toNodeId": "b", "sourceHandle": "x"}],
    }
    before = copy.deepcopy(raw)
    done = normal(raw)
    assert raw == before
    assert done == {
        "kind": "workflow",
        "slug": "w",
        "input_schema": {"type": "object", "properties": {"someKey": {"maxLength": 3}}},
        "is_template": True,
        "settings": {"max_concurrent": 3},
        "metadata": {"someKey": "${x} user_input"},
        "nodes": [
            {"id": "a", "type": "branch", "name": "Size", "on_error": "fail", "metadata": {"label": 1}},
            {"id": "b", "type": "human", "config": {"form_schema": 1}},
            {"id": "c", "type": "loop"},
        ],
        "edges": [{"source": "a", "target": "b", "source_handle": "x"}],
    }


def test_words_of_agents_and_tools() -> None:
    written = {
        "kind": "agent",
        "slug": "a",
        "systemPrompt": "${user_input}",
        "modelProvider": "x",
        "modelName": "y",
    }
    assert normal({**written, "modelSettings": {"topP": 1}}) == {
        "kind": "agent",
        "slug": "a",
        "instructions": "{{ input }}",
        "model": "x/y",
        "model_settings": {"topP": 1},
    }
    written = {"kind": "tool", "slug": "t", "type": "http", "sideEffects": True}
    done = normal(
        {**written, "config": {"url": "http://e/${user_input.id}", "timeoutS": 3, "json": {"aB": "${x}"}}}
    )
    assert done["config"] == {"url": "http://e/{{ input.id }}", "timeout_s": 3, "json": {"aB": "{{ x }}"}}
    assert done["side_effects"] is True
    assert normal({"kind": "tool", "slug": "t", "type": "function", "config": {"functionName": "m:f"}})[
        "config"
    ] == {"function": "m:f"}


def test_a_key_that_is_there_in_both_spellings_is_refused_by_name() -> None:
    raw = {"kind": "agent", "slug": "a", "model": "m", "instructions": "one", "systemPrompt": "two"}
    [result] = validate_raw([raw])
    assert [(p.code, p.path) for p in result.checked.problems] == [("field-unknown", "systemPrompt")]


def test_nodes_as_a_map_with_an_entry_point() -> None:
    raw = {
        "kind": "workflow",
        "slug": "w",
        "entryPoint": "one",
        "nodes": {
            "one": {"type": "transform", "config": {"output": 1}},
            "two": {"type": "transform", "config": {"output": 2}},
        },
        "edges": [{"source": "one", "target": "two"}],
    }
    done = normal(raw)
    assert [n["id"] for n in done["nodes"]] == ["one", "two", "start", "end"]
    assert {(e["source"], e["target"]) for e in done["edges"]} == {
        ("start", "one"),
        ("one", "two"),
        ("two", "end"),
    }
    assert validate_document(done).errors == ()


def test_a_list_of_steps_becomes_a_chain() -> None:
    raw = {
        "slug": "w",
        "entry_step": "fetch",
        "steps": [
            {"id": "fetch", "type": "tool", "toolId": "search", "inputMapping": {"q": "${user_input.q}"}},
            {"id": "sum", "agentId": "writer", "promptTemplate": "${steps.fetch.output}", "label": "Sum up"},
            {"id": "end", "type": "transform", "config": {"output": "x"}},
        ],
    }
    done = normal(raw)
    assert done["kind"] == "workflow"
    assert done["nodes"] == [
        {"id": "fetch", "type": "tool", "config": {"tool": "search", "input": {"q": "{{ input.q }}"}}},
        {
            "id": "sum",
            "type": "agent",
            "name": "Sum up",
            "config": {"agent": "writer", "prompt": "{{ steps.fetch.output }}"},
        },
        {"id": "end", "type": "transform", "config": {"output": "x"}},
        {"id": "start", "type": "start"},
        {"id": "end_2", "type": "end"},
    ]
    assert [(e["source"], e["target"]) for e in done["edges"]] == [
        ("start", "fetch"),
        ("fetch", "sum"),
        ("sum", "end"),
        ("end", "end_2"),
    ]
    assert validate_document(done).errors == ()


@pytest.mark.parametrize("as_text", [False, True])
def test_a_graph_under_definition_json(as_text: bool) -> None:
    graph = {"nodes": [{"id": "start", "type": "start"}], "edges": [], "inputSchema": {"type": "object"}}
    raw = {"kind": "workflow", "slug": "w", "definitionJson": json.dumps(graph) if as_text else graph}
    done = normal(raw)
    assert done == {
        "kind": "workflow",
        "slug": "w",
        "nodes": graph["nodes"],
        "edges": [],
        "input_schema": {"type": "object"},
    }
    both = normal({**raw, "nodes": [{"id": "other", "type": "start"}]})
    assert both["definitionJson"] == {"nodes": graph["nodes"]}


def test_targets_of_branch_conditions_become_edges() -> None:
    raw = {
        "kind": "workflow",
        "slug": "w",
        "nodes": [
            {"id": "start", "type": "start"},
            {
                "id": "b",
                "type": "conditional",
                "config": {
                    "conditions": [
                        {"expression": "${user_input.x} > 1", "targetNodeId": "many"},
                        {"expression": "input.x == 1", "targetNodeId": "one", "handle": "single"},
                    ],
                    "defaultTarget": "none",
                },
            },
            *({"id": name, "type": "end"} for name in ("many", "one", "none")),
        ],
        "edges": [{"source": "start", "target": "b"}, {"source": "b", "target": "many"}],
    }
    before = copy.deepcopy(raw)
    done = normal(raw)
    assert raw == before
    assert done["nodes"][1]["config"] == {
        "conditions": [
            {"when": "input.x > 1", "handle": "many"},
            {"when": "input.x == 1", "handle": "single"},
        ],
        "default": "none",
    }
    assert done["edges"][1:] == [
        {"source": "b", "target": "many", "source_handle": "many"},
        {"source": "b", "target": "one", "source_handle": "single"},
        {"source": "b", "target": "none", "source_handle": "none"},
    ]
    assert validate_document(done).problems == ()


def test_an_agent_or_tool_inline_becomes_a_document_of_its_own() -> None:
    raw = {
        "kind": "workflow",
        "slug": "refund-review",
        "nodes": [
            {"id": "start", "type": "start"},
            {"id": "ask", "type": "agent", "config": {"agent": {"model": "m", "systemPrompt": "hi"}}},
            {"id": "pay", "type": "tool", "config": {"tool": {"type": "builtin", "config": {"name": "now"}}}},
            {"id": "end", "type": "end"},
        ],
        "edges": [{"source": a, "target": b} for a, b in (("start", "ask"), ("ask", "pay"), ("pay", "end"))],
    }
    main, agent, tool = normalize(raw).documents
    assert main["nodes"][1]["config"] == {"agent": "refund-review__ask"}
    assert agent == {"kind": "agent", "slug": "refund-review__ask", "model": "m", "instructions": "hi"}
    assert (tool["kind"], tool["slug"]) == ("tool", "refund-review__pay")
    assert all(source.checked.errors == () for source in validate_raw([raw]))
    # What was normalised once stays as it is.
    assert [normal(d) for d in (main, agent, tool)] == [main, agent, tool]


def test_steps_point_back_to_what_the_author_wrote() -> None:
    raw = {"slug": "w", "steps": [{"id": "a", "agentId": "x y", "promptTemplate": "${nope}"}]}
    [result] = validate_raw([raw])
    assert {(p.code, p.path) for p in result.checked.errors} == {
        ("reference-invalid", "steps[0].agentId"),
        ("name-unknown", "steps[0].promptTemplate"),
    }


@pytest.mark.parametrize("raw", [None, 3, [], "text", {"kind": "pack"}, {"kind": ["workflow"]}, {1: 2}])
def test_what_is_not_understood_is_left(raw: Json) -> None:
    assert normalize(raw).documents == (raw,)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="${}'\"%# .auser_input\\", max_size=40))
def test_any_text_can_be_respelled_and_comes_to_rest(text: str) -> None:
    assert isinstance(canonical_condition(text), str)
    once = canonical_template(text)
    assert canonical_template(canonical_template(once)) == canonical_template(once)


def test_a_human_approval_is_a_human_node() -> None:
    raw = {
        "kind": "workflow",
        "slug": "w",
        "nodes": [
            {
                "id": "ask",
                "type": "human_approval",
                "onUnknown": "fail",
                "config": {
                    "title": "${user_input.order}?",
                    "formSchema": {"type": "object", "properties": {"someKey": {"type": "string"}}},
                    "prefill": {"someKey": "${steps.a.output}"},
                    "onTimeout": "reject",
                    "timeout": "3d",
                    "timeoutData": {"someKey": "late"},
                    "remindAfter": "1d",
                    "escalateAfter": "2d",
                    "escalateTo": ["boss"],
                    "cancelSiblings": True,
                },
            },
            {"id": "paid", "type": "webhook", "config": {"event": "paid", "payloadSchema": {"aB": 1}}},
        ],
        "edges": [],
    }
    ask, paid = normal(raw)["nodes"]
    assert ask == {
        "id": "ask",
        "type": "human",
        "on_unknown": "fail",
        "config": {
            "title": "{{ input.order }}?",
            "form_schema": {"type": "object", "properties": {"someKey": {"type": "string"}}},
            "prefill": {"someKey": "{{ steps.a.output }}"},
            "on_timeout": "reject",
            "timeout": "3d",
            "timeout_data": {"someKey": "late"},
            "remind_after": "1d",
            "escalate_after": "2d",
            "escalate_to": ["boss"],
            "cancel_siblings": True,
        },
    }
    assert paid["config"] == {"event": "paid", "payload_schema": {"aB": 1}}
    tool = {"kind": "tool", "slug": "t", "type": "http", "config": {"url": "u"}}
    spelled = normal(
        {**tool, "requiresApproval": "user_input.a > 3", "approval": {"onTimeout": "reject", "timeout": 9}}
    )
    assert spelled["requires_approval"] == "input.a > 3"
    assert spelled["approval"] == {"on_timeout": "reject", "timeout": 9}
