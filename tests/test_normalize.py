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


NESTED = {
    "slug": "w",
    "entryPoint": "each",
    "onFailure": {"steps": [{"id": "tell", "toolId": "page", "inputMapping": {"text": "${run.error.message}"}}]},
    "finally": {"nodes": {"sum": {"type": "agent", "config": {"agent": {"model": "m", "systemPrompt": "hi"}}}}},
    "nodes": {
        "each": {
            "type": "foreach",
            "config": {
                "items": "${user_input.orders}",
                "key": "${loopItem.id}",
                "onItemError": "skip",
                "body": {
                    "nodes": {
                        "size": {
                            "type": "conditional",
                            "label": "Size",
                            "config": {
                                "conditions": [{"expression": "${loopItem.n} > 1", "targetNodeId": "again"}],
                                "defaultTarget": "small",
                            },
                        },
                        "small": {"type": "transform", "config": {"output": "${loopIndex}"}, "set": {"aB": "${x}"}},
                        "again": {
                            "type": "dowhile",
                            "config": {
                                "condition": "${steps.both.output.a.n} < 8",
                                "maxIterations": 3,
                                "body": {
                                    "steps": [
                                        {"id": "draft", "agentId": "writer", "promptTemplate": "${iteration}"},
                                        {
                                            "id": "both",
                                            "type": "parallel",
                                            "branches": {
                                                "b": {"workflowSlug": "c", "inputMapping": {"aB": "${item}"}},
                                                "a": {"nodes": [{"id": "ask", "type": "human_approval"}]},
                                            },
                                        },
                                    ],
                                    "edges": [{"fromNodeId": "draft", "toNodeId": "both", "sourceHandle": "error"}],
                                },
                            },
                        },
                    },
                    "edges": [{"fromNodeId": "size", "toNodeId": "small", "condition": "${loopItem.a}"}],
                },
            },
        },
    },
    "edges": [],
}  # fmt: skip


def test_everything_is_respelled_in_bodies_of_every_depth() -> None:
    before = copy.deepcopy(NESTED)
    done = normal(NESTED)
    assert before == NESTED
    inner = {
        "nodes": [
            {"id": "draft", "type": "agent", "config": {"agent": "writer", "prompt": "{{ iteration }}"}},
            {
                "id": "both",
                "type": "parallel",
                "config": {
                    "branches": {
                        "b": {"workflow": "c", "input": {"aB": "{{ item }}"}},
                        "a": {"nodes": [{"id": "ask", "type": "human"}]},
                    }
                },
            },
        ],
        "edges": [
            {"source": "draft", "target": "both"},
            {"source": "draft", "target": "both", "source_handle": "error"},
        ],
    }
    loop = {"until": "not (steps.both.output.a.n < 8)", "max_iterations": 3, "body": inner}
    assert done["nodes"][0]["config"] == {
        "items": "{{ input.orders }}",
        "key": "item.id",
        "on_item_error": "skip",
        "body": {
            "nodes": [
                {
                    "id": "size",
                    "type": "branch",
                    "name": "Size",
                    "config": {
                        "conditions": [{"when": "item.n > 1", "handle": "again"}],
                        "default": "small",
                    },
                },
                {
                    "id": "small",
                    "type": "transform",
                    "config": {"output": "{{ index }}"},
                    "set": {"aB": "{{ x }}"},
                },
                {"id": "again", "type": "loop", "config": loop},
            ],
            "edges": [
                {"source": "size", "target": "small", "condition": "item.a", "source_handle": "small"},
                {"source": "size", "target": "again", "source_handle": "again"},
            ],
        },
    }
    assert done["on_failure"] == {
        "nodes": [
            {
                "id": "tell",
                "type": "tool",
                "config": {"tool": "page", "input": {"text": "{{ run.error.message }}"}},
            }
        ],
        "edges": [],
    }
    assert done["finally"] == {
        "nodes": [{"id": "sum", "type": "agent", "config": {"agent": "w__finally__sum"}}]
    }
    assert normal(done) == done


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("on_failure.nodes[0].config.input.text", "onFailure.steps[0].inputMapping.text"),
        ("finally.nodes[0].config.agent", "finally.nodes.sum.config.agent"),
        ("nodes[0].config.on_item_error", "nodes.each.config.onItemError"),
        ("nodes[0].config.body.nodes[0].name", "nodes.each.config.body.nodes.size.label"),
        (
            "nodes[0].config.body.nodes[0].config.conditions[0].when",
            "nodes.each.config.body.nodes.size.config.conditions[0].expression",
        ),
        ("nodes[0].config.body.edges[0].source", "nodes.each.config.body.edges[0].fromNodeId"),
        ("nodes[0].config.body.nodes[2].config.until", "nodes.each.config.body.nodes.again.config.condition"),
        (
            "nodes[0].config.body.nodes[2].config.body.nodes[0].config.prompt",
            "nodes.each.config.body.nodes.again.config.body.steps[0].promptTemplate",
        ),
        (
            "nodes[0].config.body.nodes[2].config.body.edges[1].source_handle",
            "nodes.each.config.body.nodes.again.config.body.edges[0].sourceHandle",
        ),
        (
            "nodes[0].config.body.nodes[2].config.body.nodes[1].config.branches.b.input.aB",
            "nodes.each.config.body.nodes.again.config.body.steps[1].branches.b.inputMapping.aB",
        ),
        (
            "nodes[0].config.body.nodes[2].config.body.nodes[1].config.branches.a.nodes[0].type",
            "nodes.each.config.body.nodes.again.config.body.steps[1].branches.a.nodes[0].type",
        ),
    ],
)
def test_places_in_bodies_point_back_to_what_the_author_wrote(path: str, written: str) -> None:
    assert normalize(NESTED).origins[0].author_path(path) == written
    lifted = {"slug": "w", "definitionJson": {k: v for k, v in NESTED.items() if k != "slug"}}
    assert normalize(lifted).origins[0].author_path(path) == f"definitionJson.{written}"


def test_agents_and_tools_inline_in_bodies_are_named_by_their_place() -> None:
    ask = {"id": "ask", "type": "agent", "config": {"agent": {"model": "m", "systemPrompt": "hi"}}}
    now = {"id": "now", "type": "tool", "config": {"tool": {"type": "builtin", "config": {"name": "now"}}}}
    branches = {"left": {"nodes": [ask]}, "right": {"nodes": [ask, now]}}
    both = {"id": "both", "type": "parallel", "config": {"branches": branches}}
    each = {"id": "each", "type": "foreach", "config": {"items": [], "body": {"nodes": [both, ask]}}}
    chosen = {**ask, "config": {"agent": {"slug": "mine", "model": "m"}}}
    raw = {
        "kind": "workflow",
        "slug": "my-flow",
        "nodes": [{"id": "start", "type": "start"}, each, ask],
        "edges": [],
        "on_failure": {"nodes": [ask]},
        "finally": {"nodes": [chosen]},
    }
    result = normalize(raw)
    main, *others = result.documents
    assert {d["slug"]: d["kind"] for d in others} == {
        "my-flow__each__both__left__ask": "agent",
        "my-flow__each__both__right__ask": "agent",
        "my-flow__each__both__right__now": "tool",
        "my-flow__each__ask": "agent",
        "my-flow__ask": "agent",
        "my-flow__on_failure__ask": "agent",
        "mine": "agent",
    }
    assert all(validate_document(d).errors == () for d in others)
    places = {
        d["slug"]: o.author_path("instructions") for d, o in zip(others, result.origins[1:], strict=True)
    }
    assert places["my-flow__each__both__right__ask"] == (
        "nodes[1].config.body.nodes[0].config.branches.right.nodes[0].config.agent.systemPrompt"
    )
    assert places["my-flow__on_failure__ask"] == "on_failure.nodes[0].config.agent.systemPrompt"
    assert main["finally"]["nodes"][0]["config"] == {"agent": "mine"}
    assert [normal(d) for d in result.documents] == list(result.documents)


@pytest.mark.parametrize("slug", ["w__", "w__each__", "w__a____b", "w__each__1", "__a__b", "w__" + "a" * 64])
def test_other_slugs_with_two_underscores_are_refused(slug: str) -> None:
    checked = validate_document({"kind": "agent", "slug": slug, "model": "m"})
    assert [p.code for p in checked.problems] == ["slug-invalid"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"condition": "${user_input.x} > 1"}, {"until": "not (input.x > 1)"}),
        ({"while": "a or b"}, {"until": "not (a or b)"}),
        ({"until": "${loopItem.x}"}, {"until": "item.x"}),
        ({"condition": True}, {"until": True}),
        ({"condition": "a", "until": "b"}, {"condition": "a", "until": "b"}),
        ({"maxIterations": 3, "delayS": "5s", "onLimit": "continue"},
         {"max_iterations": 3, "delay_s": "5s", "on_limit": "continue"}),
    ],
)  # fmt: skip
def test_a_dowhile_is_a_loop_that_asks_after_each_pass(written: Json, meant: Json) -> None:
    assert node("dowhile", **written) == meant
    raw = {"slug": "w", "steps": [{"id": "n", "type": "dowhile", **written}]}
    again = normal(raw)["nodes"][0]
    assert (again["type"], again["config"]) == ("loop", meant)


def test_a_loop_that_is_written_as_one_keeps_its_condition() -> None:
    assert node("loop", **{"while": "${user_input.x}"}) == {"while": "input.x"}
    assert node("loop", condition="a") == {"condition": "a"}


@pytest.mark.parametrize("kind", ["foreach", "loop", "dowhile"])
def test_a_body_may_stand_in_the_config_itself(kind: str) -> None:
    a = {"id": "a", "type": "transform", "config": {"output": "${user_input.x}"}}
    done = {**a, "config": {"output": "{{ input.x }}"}}
    b = {**done, "id": "b"}
    edge = {"source": "a", "target": "b"}
    listed = {"nodes": [a, b], "edges": [{"fromNodeId": "a", "toNodeId": "b"}]}
    assert node(kind, concurrency=3, **listed) == {
        "concurrency": 3,
        "body": {"nodes": [done, b], "edges": [edge]},
    }
    named = {"nodes": {"a": {k: v for k, v in a.items() if k != "id"}, "b": b}, "entryPoint": "a"}
    assert node(kind, **named, edges=[edge]) == {"body": {"nodes": [done, b], "edges": [edge]}}
    assert node(kind, steps=[a, b]) == {"body": {"nodes": [done, b], "edges": [edge]}}
    assert node(kind, workflowSlug="other", inputMapping={"aB": "${item}"}) == {
        "body": {"workflow": "other", "input": {"aB": "{{ item }}"}}
    }
    both = {"body": {"workflow": "other"}, "nodes": [a]}
    assert node(kind, **both) == {"body": {"workflow": "other"}, "nodes": [a]}

    raw = {"slug": "w", "steps": [{"id": "n", "type": kind, "steps": [{"id": "x", "agentId": "w"}]}]}
    origin = normalize(raw).origins[0]
    assert origin.author_path("nodes[0].config.body.nodes[0].config.agent") == "steps[0].steps[0].agentId"
    assert origin.author_path("nodes[0].config.body") == "steps[0].config"
    direct = {"nodes": [{"id": "n", "type": kind, "config": listed}], "kind": "workflow", "slug": "w"}
    origin = normalize(direct).origins[0]
    assert origin.author_path("nodes[0].config.body.edges[0].source") == "nodes[0].config.edges[0].fromNodeId"
    assert origin.author_path("nodes[0].config.body.nodes[1].id") == "nodes[0].config.nodes[1].id"


def test_the_entry_of_a_body_is_a_node_that_nothing_leads_to() -> None:
    nodes = [{"id": name, "type": "transform", "config": {"output": 1}} for name in ("a", "b")]
    edges = [{"fromNodeId": "a", "toNodeId": "b"}]
    assert (
        "entryPoint" not in node("foreach", body={"nodes": nodes, "edges": edges, "entryPoint": "a"})["body"]
    )
    for wrong in ("b", "gone", 3):
        left = node("foreach", body={"nodes": nodes, "edges": edges, "entryPoint": wrong})["body"]
        assert left["entryPoint"] == wrong


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="${}'\"%# .auser_input\\", max_size=40), st.sampled_from(["foreach", "parallel"]))
def test_text_in_bodies_is_respelled_once(text: str, kind: str) -> None:
    body: Json = {
        "nodes": [{"id": "n", "type": "transform", "config": {"output": text}, "set": {"k": text}}],
        "edges": [{"source": "n", "target": "n", "condition": text}],
    }
    for _ in range(3):
        held = {"body": body} if kind == "foreach" else {"branches": {"x": body}}
        body = {"nodes": [{"id": "n", "type": kind, "config": held}]}
    done = normal({"kind": "workflow", "slug": "w", "nodes": [], "edges": [], "finally": body})["finally"]
    for _ in range(3):
        config = done["nodes"][0]["config"]
        done = config["body"] if kind == "foreach" else config["branches"]["x"]
    assert done["nodes"][0]["config"]["output"] == canonical_template(text)
    assert done["nodes"][0]["set"]["k"] == canonical_template(text)
    assert done["edges"][0]["condition"] == canonical_condition(text)


@pytest.mark.parametrize("body", [None, 3, "text", [], {}, {"nodes": 3}, {"nodes": [3]}, {"steps": {}}])
def test_what_is_no_body_is_left(body: Json) -> None:
    for kind, held in (("foreach", {"body": body}), ("parallel", {"branches": {"x": body}})):
        assert node(kind, **held) == held
    assert node("parallel", branches=body) == {"branches": body}
    raw = {"kind": "workflow", "slug": "w", "nodes": [], "edges": [], "finally": body}
    assert normal(raw) == raw


def steps_within_steps(depth: int) -> Json:
    step: Json = {"id": "n", "type": "transform", "output": "${x}"}
    for level in range(depth):
        step = {"id": f"n{level}", "type": "foreach", "items": "${x}", "steps": [step]}
    return {"slug": "w", "steps": [step]}


def test_bodies_nest_as_deep_as_a_document_may() -> None:
    # Each level of nodes is a list, a node, its config and a body.
    fits = normalize(steps_within_steps(14)).documents[0]
    assert "too-deep" not in {p.code for p in validate_document(fits).problems}
    for depth in (16, 31):
        [result] = validate_raw([steps_within_steps(depth)])
        assert [p.code for p in result.checked.errors] == ["too-deep"]
    # What is too deep as it was written is not looked into.
    raw = steps_within_steps(40)
    assert normalize(raw).documents == (raw,)


@pytest.mark.parametrize(("depth", "code"), [(70, "too-deep"), (300, "too-deep"), (100_000, "field-unknown")])
def test_text_that_holds_a_deep_graph_is_refused(depth: int, code: str) -> None:
    text = '{"nodes": ' + "[" * depth + "]" * depth + "}"
    [result] = validate_raw([{"kind": "workflow", "slug": "w", "definitionJson": text}])
    assert code in {p.code for p in result.checked.errors}
