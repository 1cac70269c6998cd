"""The rules for documents: each is broken once, and the problem names its place and a mend."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentmesh_dagster.deployment import AllowedSecret, Deployment, Endpoint
from agentmesh_dagster.specs.documents import AgentSpec, ToolSpec, WorkflowSpec
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS
from agentmesh_dagster.specs.notify import BUILTIN_NOTIFY_CONFIGS, NotifyConfig
from agentmesh_dagster.specs.resolve import DocumentLibrary
from agentmesh_dagster.validation import (
    RULES,
    Problem,
    Target,
    rules_table,
    validate_document,
    validate_raw,
    validate_set,
)

Json = Any


def workflow(**changes: Json) -> dict[str, Json]:
    """A valid workflow: start -> ask -> size -(large)-> big -> done, and -(small)-> done."""
    return {
        "kind": "workflow",
        "slug": "refund-review",
        "input_schema": {
            "type": "object",
            "properties": {"amount": {"type": "number"}},
            "additionalProperties": False,
        },
        "settings": {"node_timeout_s": 60},
        "nodes": [
            {"id": "start", "type": "start"},
            {"id": "ask", "type": "agent", "config": {"agent": "triage", "prompt": "{{ input.amount }}?"}},
            {
                "id": "size",
                "type": "branch",
                "config": {
                    "conditions": [{"when": "input.amount > 500", "handle": "large"}],
                    "default": "small",
                },
            },
            {"id": "big", "type": "transform", "config": {"output": {"a": "{{ steps.ask.output.text }}"}}},
            {"id": "done", "type": "end"},
        ],
        "edges": [
            {"source": "start", "target": "ask"},
            {"source": "ask", "target": "size"},
            {"source": "size", "target": "big", "source_handle": "large"},
            {"source": "size", "target": "done", "source_handle": "small"},
            {"source": "big", "target": "done"},
        ],
        **changes,
    }


def agent(**changes: Json) -> dict[str, Json]:
    return {"kind": "agent", "slug": "triage", "model": "offline/echo", **changes}


def tool(**changes: Json) -> dict[str, Json]:
    return {
        "kind": "tool",
        "slug": "pay",
        "type": "http",
        "config": {"url": "https://example.com"},
        **changes,
    }


def changed(base: dict[str, Json], path: str, value: Json) -> dict[str, Json]:
    """The document with one value set; the path is dotted, numbers are places in lists, `+` appends."""
    done = copy.deepcopy(base)
    owner: Json = done
    *way, last = path.split(".")
    for key in way:
        owner = owner[int(key)] if key.isdigit() else owner.setdefault(key, {})
    if last == "+":
        owner.append(value)
    elif last.isdigit():
        owner[int(last)] = value
    else:
        owner[last] = value
    return done


def without(base: dict[str, Json], path: str) -> dict[str, Json]:
    done = copy.deepcopy(base)
    owner: Json = done
    *way, last = path.split(".")
    for key in way:
        owner = owner[int(key)] if key.isdigit() else owner[key]
    del owner[int(last) if last.isdigit() else last]
    return done


def found(document: Json, **options: Json) -> list[tuple[str, str]]:
    return [(problem.code, problem.path) for problem in validate_document(document, **options).problems]


def nested(levels: int) -> Json:
    value: Json = 1
    for _ in range(levels):
        value = [value]
    return value


def gate(**config: Json) -> dict[str, Json]:
    """A valid workflow with a gate: start -> gate -(approved)-> big -> done, and -(rejected)-> done."""
    return workflow(
        nodes=[
            {"id": "start", "type": "start"},
            {"id": "gate", "type": "human", "config": {"title": "Pay {{ input.amount }}?", **config}},
            {"id": "big", "type": "transform", "config": {"output": 1}},
            {"id": "done", "type": "end"},
        ],
        edges=[
            {"source": "start", "target": "gate"},
            {"source": "gate", "target": "big", "source_handle": "approved"},
            {"source": "gate", "target": "done", "source_handle": "rejected"},
            {"source": "big", "target": "done"},
        ],
    )


def choice(*options: str, edges: tuple[str | None, ...] = (), **config: Json) -> dict[str, Json]:
    """A workflow whose gate has options, with an edge for each, or for those named; None is an edge by no handle."""
    document = gate(options=list(options), **config)
    document["edges"] = [document["edges"][0], document["edges"][3]]
    for handle in edges or options:
        edge = {"source": "gate", "target": "big"}
        document["edges"].append(edge if handle is None else {**edge, "source_handle": handle})
    return document


FORM = {
    "type": "object",
    "required": ["note"],
    "properties": {"note": {"type": "string"}, "level": {"type": "integer", "minimum": 1}},
}
W, A, T, G = workflow(), agent(), tool(), gate()
EVENT = workflow(
    nodes=[
        {"id": "start", "type": "start"},
        {"id": "paid", "type": "webhook", "config": {"event": "paid", "key": "{{ input.amount }}"}},
        {"id": "done", "type": "end"},
    ],
    edges=[{"source": "start", "target": "paid"}, {"source": "paid", "target": "done"}],
)
NODE = {"id": "x", "type": "transform", "config": {"output": 1}}

CASES: list[tuple[str, str, Json]] = [
    ("not-an-object", "", [1]),
    ("not-json", "metadata.x", changed(W, "metadata.x", float("nan"))),
    ("not-json", "metadata.x", changed(W, "metadata.x", "a\x00b")),
    ("not-json", "metadata.x", changed(W, "metadata.x", "\ud800")),
    ("not-json", "metadata.x", changed(W, "metadata.x", {1, 2})),
    ("too-deep", "", changed(W, "metadata.x", nested(70))),
    ("too-many-nodes", "nodes", changed(W, "nodes", [NODE] * 2001)),
    ("too-many-edges", "edges", changed(W, "edges", [{"source": "a", "target": "b"}] * 10_001)),
    ("kind-unknown", "kind", without(W, "kind")),
    ("kind-unknown", "kind", changed(W, "kind", "workflw")),
    ("field-unknown", "nodes[1].timout_s", changed(W, "nodes.1.timout_s", 1)),
    ("field-unknown", "nodes[1].config.promt", changed(W, "nodes.1.config.promt", "x")),
    (
        "field-unknown",
        "nodes[2].config.conditions[0].wen",
        changed(W, "nodes.2.config.conditions.0.wen", "x"),
    ),
    ("field-unknown", "settings.max_step", changed(W, "settings.max_step", 1)),
    ("field-missing", "nodes[1].config.agent", without(W, "nodes.1.config.agent")),
    ("field-missing", "slug", without(W, "slug")),
    ("field-invalid", "nodes[1].retry.max_attempts", changed(W, "nodes.1.retry", {"max_attempts": 99})),
    ("field-invalid", "nodes[1].join", changed(W, "nodes.1.join", "al")),
    ("field-invalid", "nodes[1].timeout_s", changed(W, "nodes.1.timeout_s", "soon")),
    ("field-invalid", "model", changed(A, "model", 3)),
    ("field-invalid", "model[0]", changed(A, "model", [3])),
    ("slug-invalid", "slug", changed(W, "slug", "../etc")),
    ("slug-invalid", "slug", changed(W, "slug", "a--b")),
    ("slug-invalid", "slug", changed(W, "slug", "refund__classify")),
    ("slug-reserved", "slug", changed(W, "slug", "input")),
    ("node-type-unknown", "nodes[3].type", changed(W, "nodes.3.type", "transfrom")),
    ("tool-type-unknown", "type", changed(T, "type", "htp")),
    (
        "schema-invalid",
        "input_schema.properties.amount.type",
        changed(W, "input_schema.properties.amount.type", "nr"),
    ),
    (
        "pattern-refused",
        "nodes[1].config.form_schema.pattern",
        gate(form_schema={"type": "object", "pattern": "(?=a)b"}),
    ),
    ("input-schema-not-object", "input_schema.type", changed(W, "input_schema", {"type": "array"})),
    ("node-id-duplicate", "nodes[5].id", changed(W, "nodes.+", {**NODE, "id": "ask"})),
    (
        "start-missing",
        "nodes",
        changed(W, "nodes.0", {"id": "start", "type": "transform", "config": {"output": 1}}),
    ),
    (
        "start-duplicate",
        "nodes[5]",
        changed(
            changed(W, "nodes.+", {"id": "start2", "type": "start"}),
            "edges.+",
            {"source": "start2", "target": "ask"},
        ),
    ),
    (
        "end-missing",
        "nodes",
        changed(W, "nodes.4", {"id": "done", "type": "transform", "config": {"output": 1}}),
    ),
    ("edge-dangling", "edges[1].target", changed(W, "edges.1.target", "sise")),
    ("edge-dangling", "edges[1].source", changed(W, "edges.1.source", "aks")),
    ("edge-duplicate", "edges[5]", changed(W, "edges.+", {"source": "start", "target": "ask"})),
    ("edge-into-start", "edges[5].target", changed(W, "edges.+", {"source": "ask", "target": "start"})),
    ("edge-out-of-end", "edges[5].source", changed(W, "edges.+", {"source": "done", "target": "big"})),
    ("handle-unknown", "edges[2].source_handle", changed(W, "edges.2.source_handle", "larg")),
    ("handle-missing", "edges[2]", without(W, "edges.2.source_handle")),
    ("handle-uncovered", "nodes[2].config", changed(W, "edges.3.source_handle", "large")),
    (
        "handle-error-unrouted",
        "edges[5].source_handle",
        changed(W, "edges.+", {"source": "ask", "target": "done", "source_handle": "error"}),
    ),
    ("error-edge-missing", "nodes[1].on_error", changed(W, "nodes.1.on_error", "route")),
    ("node-dead-end", "nodes[3]", without(W, "edges.4")),
    ("cycle", "nodes[1]", changed(W, "edges.+", {"source": "big", "target": "ask"})),
    ("cycle", "nodes[3]", changed(W, "edges.+", {"source": "big", "target": "big"})),
    ("set-key-invalid", "nodes[1].set", changed(W, "nodes.1.set", {"a-b": 1})),
    ("set-key-invalid", "nodes[1].set", changed(W, "nodes.1.set", {"last_output": 1})),
    ("setting-without-effect", "nodes[0].timeout_s", changed(W, "nodes.0.timeout_s", 3)),
    ("expression-invalid", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ input. }}")),
    ("expression-invalid", "edges[0].condition", changed(W, "edges.0.condition", "{{ input.amount > 3 }}")),
    ("name-unknown", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ inptu.amount }}")),
    ("name-unknown", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ run.name }}")),
    ("name-unknown", "config.url", changed(T, "config.url", "https://e.com/{{ steps.a.output }}")),
    ("name-unknown", "instructions", changed(A, "instructions", "{{ steps.a.output }}")),
    ("name-outside-body", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ item.x }}")),
    (
        "step-unknown",
        "nodes[3].config.output.a",
        changed(W, "nodes.3.config.output.a", "{{ steps.aks.output }}"),
    ),
    (
        "step-not-upstream",
        "nodes[1].config.prompt",
        changed(W, "nodes.1.config.prompt", "{{ steps.big.output }}"),
    ),
    (
        "step-not-upstream",
        "nodes[1].config.prompt",
        changed(W, "nodes.1.config.prompt", "{{ steps.ask.output }}"),
    ),
    ("step-not-upstream", "edges[0].condition", changed(W, "edges.0.condition", "steps.ask.output.x == 1")),
    (
        "step-field-unknown",
        "nodes[3].config.output.a",
        changed(W, "nodes.3.config.output.a", "{{ steps.ask.text }}"),
    ),
    ("context-unknown", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ context.risk }}")),
    ("input-unknown", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ input.amuont }}")),
    ("secret-misplaced", "nodes[1].config.prompt", changed(W, "nodes.1.config.prompt", "{{ secret('K') }}")),
    ("secret-misplaced", "instructions", changed(A, "instructions", "{{ secret('K') }}")),
    ("reference-invalid", "nodes[1].config.agent", changed(W, "nodes.1.config.agent", "no such")),
    ("not-in-effect", "memory", changed(A, "memory", {"last": 3})),
    ("setting-without-effect", "nodes[0].on_unknown", changed(W, "nodes.0.on_unknown", "fail")),
    ("field-invalid", "nodes[1].on_unknown", changed(W, "nodes.1.on_unknown", "ask")),
    ("field-missing", "nodes[1].config.title", without(G, "nodes.1.config.title")),
    ("field-invalid", "nodes[1].config.required", gate(required=0)),
    ("field-invalid", "nodes[1].config.options", gate(options=[])),
    ("name-unknown", "nodes[1].config.body", gate(body="{{ amount }}")),
    ("step-not-upstream", "nodes[1].config.prefill", gate(prefill="{{ steps.big.output }}")),
    (
        "schema-invalid",
        "nodes[1].config.form_schema.required",
        gate(form_schema={"type": "object", "required": 1}),
    ),
    (
        "handle-unknown",
        "edges[4].source_handle",
        changed(G, "edges.+", {"source": "gate", "target": "done", "source_handle": "timeout"}),
    ),
    ("handle-uncovered", "nodes[1].config", changed(G, "edges.1", {"source": "start", "target": "big"})),
    ("handle-uncovered", "nodes[1].config", gate(timeout="3d", on_timeout="route")),
    ("handle-uncovered", "nodes[1].config", choice("red", "blue", edges=("red",))),
    ("gate-options", "nodes[1].config.options[1]", choice("red", "red", edges=("red",))),
    ("gate-options", "nodes[1].config.options[0]", choice("timeout", "red")),
    ("gate-options", "nodes[1].config.options[0]", choice(" red", "blue")),
    ("gate-options", "nodes[1].config.options[0]", choice("", "blue")),
    ("gate-options", "nodes[1].config.options[0]", choice("x" * 64)),
    ("gate-options", "nodes[1].config.multiple", gate(multiple=True)),
    ("gate-assignees", "nodes[1].config.assignees[1]", gate(assignees=["anna", "group:"])),
    ("gate-assignees", "nodes[1].config.assignees[1]", gate(assignees=["anna", "anna"])),
    ("gate-assignees", "nodes[1].config.escalate_to[0]", gate(escalate_after="1d", escalate_to=[" "])),
    ("gate-quorum", "nodes[1].config.required", gate(required=2)),
    ("gate-quorum", "nodes[1].config.required", gate(required=3, assignees=["anna", "bob"])),
    ("gate-quorum", "nodes[1].config.required", gate(required=2, assignees=["group:a"], ordered=True)),
    ("gate-quorum", "nodes[1].config.ordered", gate(ordered=True)),
    (
        "gate-quorum",
        "nodes[1].config.required",
        choice("red", "blue", multiple=True, required=2, assignees=["anna", "bob"]),
    ),
    ("gate-timeout", "nodes[1].config.on_timeout", gate(on_timeout="reject")),
    ("gate-timeout", "nodes[1].config.timeout_data", gate(timeout_data={"a": 1})),
    ("gate-timeout", "nodes[1].config.on_timeout", choice("red", timeout="1h", on_timeout="approve")),
    ("gate-timeout", "nodes[1].config.timeout_data", changed(EVENT, "nodes.1.config.timeout_data", 3)),
    (
        "handle-uncovered",
        "nodes[1].config",
        changed(changed(EVENT, "nodes.1.config.timeout", 9), "nodes.1.config.on_timeout", "route"),
    ),
    (
        "event-reserved",
        "nodes[1].config.event",
        changed(changed(EVENT, "nodes.1.type", "emit"), "nodes.1.config", {"event": "agentmesh.run.ended"}),
    ),
    ("gate-escalation", "nodes[1].config", gate(escalate_after="1d")),
    ("gate-escalation", "nodes[1].config", gate(escalate_to=["boss"])),
    ("gate-form", "nodes[1].config.form_schema.type", gate(form_schema={"type": "array"})),
    ("gate-form", "nodes[1].config.form_schema.type", gate(form_schema={})),
    ("gate-form", "nodes[1].config.prefill", gate(prefill=["a"])),
    ("gate-form", "nodes[1].config.prefill.level", gate(form_schema=FORM, prefill={"level": 0})),
    (
        "gate-form",
        "nodes[1].config.timeout_data.note",
        gate(form_schema=FORM, timeout="1h", on_timeout="approve", timeout_data={"level": 3}),
    ),
    ("gate-form", "nodes[1].config.timeout_data", gate(timeout="1h", on_timeout="approve", timeout_data=3)),
    ("gate-form", "nodes[1].config.on_timeout", gate(form_schema=FORM, timeout="1h", on_timeout="approve")),
    ("setting-without-effect", "nodes[1].config.timeout_data", gate(timeout="1h", timeout_data={"a": 1})),
    ("setting-without-effect", "nodes[1].config.ordered", gate(ordered=True, assignees=["anna", "bob"])),
    ("setting-without-effect", "nodes[1].config.remind_after", gate(timeout="1h", remind_after="1h")),
    ("setting-without-effect", "nodes[2].notify", changed(G, "nodes.2.notify", [{"type": "log"}])),
    ("setting-without-effect", "approval", changed(T, "approval", {"assignees": ["anna"]})),
    ("gate-quorum", "approval.required", tool(requires_approval=True, approval={"required": 2})),
    ("field-invalid", "approval.on_timeout", tool(requires_approval=True, approval={"on_timeout": "route"})),
    (
        "gate-form",
        "approval.timeout_data.note",
        tool(
            requires_approval=True,
            input_schema=FORM,
            approval={"timeout": 9, "on_timeout": "approve", "timeout_data": {}},
        ),
    ),
    ("name-unknown", "requires_approval", tool(requires_approval="run.id == 'x'")),
    ("name-unknown", "requires_approval", tool(requires_approval="amount > 3")),
    (
        "input-unknown",
        "requires_approval",
        tool(requires_approval="input.amuont > 3", input_schema={**FORM, "additionalProperties": False}),
    ),
    ("notifier-unknown", "nodes[1].notify[0].type", changed(G, "nodes.1.notify", [{"type": "pager"}])),
    ("field-missing", "nodes[1].notify[0].type", changed(G, "nodes.1.notify", [{"url": "https://e.com"}])),
    ("field-invalid", "nodes[1].notify[0].type", changed(G, "nodes.1.notify", [{"type": 3}])),
    ("field-missing", "nodes[1].notify[0].url", changed(G, "nodes.1.notify", [{"type": "webhook"}])),
    ("field-invalid", "nodes[1].notify", changed(G, "nodes.1.notify", {"type": "log"})),
    ("field-invalid", "nodes[1].notify[0]", changed(G, "nodes.1.notify", ["log"])),
    (
        "name-unknown",
        "nodes[1].notify[0].url",
        changed(G, "nodes.1.notify", [{"type": "webhook", "url": "https://e.com/{{ input.amount }}"}]),
    ),
    (
        "secret-literal",
        "nodes[1].notify[0].secret",
        changed(G, "nodes.1.notify", [{"type": "webhook", "url": "https://e.com", "secret": "abc"}]),
    ),
    (
        "output-unknown",
        "nodes[2].config.output",
        changed(G, "nodes.2.config.output", "{{ steps.gate.output.note }}"),
    ),
    ("reference-invalid", "tools[1]", changed(A, "tools", ["pay", "../pay"])),
]


NOTIFY = [
    {"type": "log"},
    {
        "type": "webhook",
        "url": "https://example.com/{{ approval.id }}",
        "secret": "{{ secret('HOOK') }}",
        "headers": {"X-Run": "{{ approval.run_id }}"},
    },
    {
        "type": "email",
        "to": ["anna@example.com"],
        "sender": "mesh@example.com",
    },
]
RIGHT = {
    "workflow": W,
    "agent": A,
    "tool": T,
    "gate": G,
    "event": EVENT,
    "rejection-unattached": without(G, "edges.2"),
    "options-and-default-edge": choice("red", "blue", edges=("red", None)),
    "options-rejected": changed(
        choice("red", "blue", required=2, assignees=["anna", "bob"]),
        "edges.+",
        {"source": "gate", "target": "done", "source_handle": "rejected"},
    ),
    "several-options": choice("red", "blue", multiple=True),
    "timeout-routed": changed(
        gate(timeout="3d", on_timeout="route", timeout_data={"a": 1}),
        "edges.+",
        {"source": "gate", "target": "done", "source_handle": "timeout"},
    ),
    "policy": gate(
        assignees=["anna", "group:finance"],
        required=2,
        ordered=True,
        separation=True,
        timeout="3d",
        on_timeout="approve",
        timeout_data={"note": "late"},
        remind_after="1d",
        escalate_after="2d",
        escalate_to=["boss"],
        form_schema=FORM,
        prefill={"level": "{{ input.amount }}"},
        cancel_siblings=True,
    ),
    "prefill-in-part": gate(form_schema=FORM, prefill={"level": 3}),
    "notify": changed(G, "nodes.1.notify", NOTIFY),
    "approval": tool(
        requires_approval="input.level > 3",
        input_schema=FORM,
        approval={"assignees": ["group:finance"], "required": 2, "timeout": "1h", "on_timeout": "reject"},
    ),
    "outputs": changed(
        gate(form_schema=FORM),
        "nodes.2.config.output",
        "{{ steps.gate.output.decision }} {{ steps.gate.output.data.note }} {{ steps.gate.output.by }}"
        " {{ steps.gate.output.at }} {{ steps.gate.output.comment }}",
    ),
}


@pytest.mark.parametrize("document", RIGHT.values(), ids=RIGHT)
def test_a_right_document_has_no_problem(document: Json) -> None:
    result = validate_document(document)
    assert result.problems == ()
    assert result.document is not None
    assert result.document.slug == document["slug"]


@pytest.mark.parametrize(("code", "path", "document"), CASES, ids=[f"{c}:{p}" for c, p, _ in CASES])
def test_one_mistake_is_one_problem_at_its_place(code: str, path: str, document: Json) -> None:
    result = validate_document(document)
    # A field that this release does nothing about is told beside whatever is wrong in it.
    assert [(p.code, p.path) for p in result.problems if p.code != "not-in-effect" or code == p.code] == [
        (code, path)
    ]
    problem = result.problems[0]
    assert problem.severity == RULES[code].severity
    assert (result.document is None) == (problem.severity == "error")
    assert problem.mend
    assert "\n" not in str(problem)
    for word in ("pydantic", "Input should", "__"):
        assert word not in str(problem).replace("refund__classify", "")


def after_start(node: Json) -> dict[str, Json]:
    return changed(changed(W, "nodes.+", node), "edges.+", {"source": "start", "target": node["id"]})


def test_node_ids_are_held_to_their_form() -> None:
    document = after_start({**NODE, "id": "1st"})
    document["edges"].append({"source": "1st", "target": "done"})
    assert found(document) == [("node-id-invalid", "nodes[5].id")]


def test_ids_that_are_the_same_identifier_name_both() -> None:
    document = after_start({**NODE, "id": "a-b"})
    document["nodes"].append({**NODE, "id": "a_b"})
    document["edges"] += [
        {"source": "a-b", "target": "a_b"},
        {"source": "a_b", "target": "done"},
    ]
    [problem] = validate_document(document).problems
    assert problem.code == "node-id-collision"
    assert "'a-b'" in problem.message
    assert "'a_b'" in problem.message


def test_of_what_cannot_be_reached_only_the_beginning_is_told() -> None:
    document = changed(W, "nodes.+", NODE)
    document["nodes"].append({**NODE, "id": "y", "config": {"output": "{{ steps.ask.output }}"}})
    document["edges"] += [{"source": "x", "target": "y"}, {"source": "y", "target": "done"}]
    assert found(document) == [("node-unreachable", "nodes[5]")]


def test_a_branch_without_default_is_a_warning() -> None:
    document = without(without(W, "nodes.2.config.default"), "edges.3")
    result = validate_document(document)
    assert [(p.code, p.path) for p in result.warnings] == [("branch-no-default", "nodes[2].config")]
    assert result.errors == ()
    assert result.document is not None


def test_an_undeclared_input_is_a_warning_where_the_schema_is_open() -> None:
    document = without(
        changed(W, "nodes.1.config.prompt", "{{ input.nope }}"), "input_schema.additionalProperties"
    )
    assert found(document) == [("input-undeclared", "nodes[1].config.prompt")]
    document["input_schema"]["additionalProperties"] = True
    assert found(document) == []


def test_a_missing_timeout_is_a_warning() -> None:
    document = without(W, "settings")
    assert found(document) == [("timeout-missing", "nodes[1]")]
    assert found(changed(document, "nodes.1.timeout_s", "5m")) == []


def test_eight_mistakes_in_one_file_are_all_named() -> None:
    document = workflow(
        slug="a b",
        colour="red",
        nodes=[
            {"id": "start", "type": "start"},
            {
                "id": "ask",
                "type": "agent",
                "config": {"agent": "triage", "prompt": "{{ steps.nobody.output }}"},
            },
            {"id": "ask", "type": "transform", "config": {"output": "{{ 1 + }}"}},
            {"id": "odd", "type": "agnt"},
            {"id": "calc", "type": "tool", "config": {"tool": "pay"}, "retry": {"max_attempts": 0}},
            {"id": "done", "type": "end"},
        ],
        edges=[
            {"source": "start", "target": "ask"},
            {"source": "ask", "target": "odd"},
            {"source": "odd", "target": "calc"},
            {"source": "calc", "target": "done"},
            {"source": "calc", "target": "nowhere"},
        ],
    )
    assert set(found(document)) == {
        ("slug-invalid", "slug"),
        ("field-unknown", "colour"),
        ("step-unknown", "nodes[1].config.prompt"),
        ("node-id-duplicate", "nodes[2].id"),
        ("expression-invalid", "nodes[2].config.output"),
        ("node-type-unknown", "nodes[3].type"),
        ("field-invalid", "nodes[4].retry.max_attempts"),
        ("edge-dangling", "edges[4].target"),
    }


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed(W, "nodes.1.timout_s", 1), ["'timout_s'", "'timeout_s'"]),
        (changed(W, "nodes.3.type", "transfrom"), ["'transfrom'", "Did you mean 'transform'"]),
        (changed(W, "nodes.3.type", "qqq"), ["'qqq'", "'branch'", "'transform'"]),
        (changed(T, "type", "htp"), ["'htp'", "Did you mean 'http'"]),
        (changed(T, "type", "qqq"), ["'builtin'", "'function'", "'http'"]),
        (changed(W, "edges.1.target", "sise"), ["'sise'", "'size'"]),
        (changed(W, "edges.2.source_handle", "larg"), ["'larg'", "'large'"]),
        (changed(W, "nodes.3.config.output.a", "{{ steps.aks.output }}"), ["steps.aks", "'ask'"]),
        (changed(W, "nodes.1.config.prompt", "{{ inptu.x }}"), ["'inptu'", "context, input, run, steps"]),
        (
            changed(W, "edges.+", {"source": "big", "target": "ask"}),
            ["'ask' -> 'size' -> 'big' -> 'ask'", "loop"],
        ),
        (changed(W, "nodes.1.join", "al"), ["'any'", "'all'", "'al'"]),
        (changed(A, "model", 3), ["text or a list", "3"]),
        (changed(W, "nodes.1.timeout_s", "soon"), ["'30s'"]),
        (changed(W, "kind", "workflw"), ["'workflow'"]),
    ],
)
def test_a_problem_says_what_is_wrong_and_what_to_do(document: Json, words: list[str]) -> None:
    [problem] = validate_document(document).problems
    for word in words:
        assert word in str(problem)


def test_a_node_sees_its_own_output_in_its_set_and_on_its_edges() -> None:
    document = changed(W, "nodes.1.set", {"risk": "{{ steps.ask.output.text }}"})
    document["edges"][1]["condition"] = "context.risk == steps.ask.output.text"
    document["nodes"][3]["config"]["output"]["b"] = "{{ context.risk }} {{ context.last_output }}"
    assert found(document) == []


def test_state_is_seen_after_it_is_set_or_where_the_schema_has_it() -> None:
    document = changed(W, "nodes.1.config.prompt", "{{ context.risk }}")
    document["nodes"][3]["set"] = {"risk": 1}
    [problem] = validate_document(document).problems
    assert problem.code == "context-unknown"
    assert "'big'" in problem.message
    document["state_schema"] = {"type": "object", "properties": {"risk": {"default": 0}}}
    assert found(document) == []


def test_an_error_route_is_right_with_its_edge() -> None:
    document = changed(W, "nodes.1.on_error", "route")
    document["edges"].append({"source": "ask", "target": "done", "source_handle": "error"})
    document["nodes"][4]["config"] = {"output": "{{ steps.ask.error }} {{ steps.ask.status }}"}
    assert found(document) == []


def test_a_wrong_edge_is_not_told_again_by_its_consequences() -> None:
    # Without this edge neither 'size' nor what comes after it is reached, and steps.ask is no ancestor of 'big'.
    assert found(changed(W, "edges.1.target", "sise")) == [("edge-dangling", "edges[1].target")]
    assert found(changed(W, "edges.1", "ask -> size")) == [("field-invalid", "edges[1]")]
    assert found(changed(W, "edges", "none")) == [("field-invalid", "edges")]


@pytest.mark.parametrize("kind", ["workflow", "agent", "tool", "network"])
def test_a_bare_kind_is_told_what_is_missing(kind: str) -> None:
    assert ("field-missing", "slug") in found({"kind": kind})


def test_secrets_that_are_not_configured_are_warned_of() -> None:
    document = tool(config={"url": "https://e.com", "headers": {"X": "{{ secret('K') }}"}})
    assert found(document) == []
    known = validate_document(document, target=Target(has_secret=lambda name: name == "K"))
    assert known.problems == ()
    [problem] = validate_document(document, target=Target(has_secret=lambda _: False)).problems
    assert (problem.code, problem.path, problem.severity) == (
        "secret-unconfigured",
        "config.headers.X",
        "warning",
    )


def pay_flow(*, gate: bool) -> dict[str, Json]:
    middle = [{"id": "gate", "type": "human", "config": {"title": "Pay?"}}] if gate else []
    first = (
        [
            {"source": "start", "target": "gate"},
            {"source": "gate", "target": "pay", "source_handle": "approved"},
            {"source": "gate", "target": "done", "source_handle": "rejected"},
        ]
        if gate
        else [{"source": "start", "target": "pay"}]
    )
    return workflow(
        nodes=[
            {"id": "start", "type": "start"},
            *middle,
            {"id": "pay", "type": "tool", "config": {"tool": "pay", "input": {}}},
            {"id": "done", "type": "end"},
        ],
        edges=[*first, {"source": "pay", "target": "done"}],
    )


def test_a_side_effect_without_a_gate_is_warned_of() -> None:
    library = DocumentLibrary([ToolSpec.model_validate(tool(side_effects=True))])
    assert found(pay_flow(gate=False), library=library) == [("side-effect-ungated", "nodes[1]")]
    assert found(pay_flow(gate=True), library=library) == []
    around = changed(pay_flow(gate=True), "edges.+", {"source": "start", "target": "pay"})
    assert found(around, library=library) == [("side-effect-ungated", "nodes[2]")]
    asks = DocumentLibrary([ToolSpec.model_validate(tool(side_effects=True, requires_approval=True))])
    assert found(pay_flow(gate=False), library=asks) == []


def test_an_agent_may_bring_a_side_effect() -> None:
    library = DocumentLibrary(
        [ToolSpec.model_validate(tool(side_effects=True)), AgentSpec.model_validate(agent(tools=["pay"]))]
    )
    assert found(W, library=library) == [("side-effect-ungated", "nodes[1]")]


SCHEMA = {
    "type": "object",
    "required": ["amount", "order"],
    "additionalProperties": False,
    "properties": {
        "amount": {"type": "number"},
        "order": {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.mark.parametrize(
    ("mapped", "expected"),
    [
        ({"amount": 5, "order": {"id": "a"}, "tags": ["a"]}, []),
        ({"amount": "5", "order": {"id": "{{ input.x }}"}}, []),
        ({"amount": "{{ steps.first.output.total }}", "order": "{{ steps.first.output.order }}"}, []),
        ({"amount": 5}, [("mapping-missing", "nodes[2].config.input")]),
        ({"amount": 5, "order": {}}, [("mapping-missing", "nodes[2].config.input.order")]),
        (
            {"amount": 5, "order": {"id": "a"}, "amuont": 3},
            [("mapping-unknown", "nodes[2].config.input.amuont")],
        ),
        ({"amount": "much", "order": {"id": "a"}}, [("mapping-mismatch", "nodes[2].config.input.amount")]),
        ({"amount": 5, "order": "a-1"}, [("mapping-mismatch", "nodes[2].config.input.order")]),
        (
            {"amount": 5, "order": "{{ steps.first.output.total }}"},
            [("mapping-mismatch", "nodes[2].config.input.order")],
        ),
        ({"amount": 5, "order": "no {{ input.x }}"}, [("mapping-mismatch", "nodes[2].config.input.order")]),
        (
            {"amount": 5, "order": {"id": "a"}, "tags": ["{{ input.x }}", {}]},
            [("mapping-mismatch", "nodes[2].config.input.tags[1]")],
        ),
        ("{{ steps.first.output.order }}", []),
        ("{{ steps.first.output }}", [("mapping-mismatch", "nodes[2].config.input")]),
        ("{{ steps.first.output.total }}", [("mapping-mismatch", "nodes[2].config.input")]),
    ],
)
def test_a_mapped_input_fits_its_target_where_both_are_known(
    mapped: Json, expected: list[tuple[str, str]]
) -> None:
    first = tool(
        slug="first",
        output_schema={
            "type": "object",
            "required": ["total", "order"],
            "properties": {"total": {"type": "number"}, "order": {"type": "object"}},
        },
    )
    library = DocumentLibrary(
        [ToolSpec.model_validate(first), ToolSpec.model_validate(tool(input_schema=SCHEMA))]
    )
    document = workflow(
        input_schema={"type": "object"},
        nodes=[
            {"id": "start", "type": "start"},
            {"id": "first", "type": "tool", "config": {"tool": "first", "input": {}}},
            {"id": "pay", "type": "tool", "config": {"tool": "pay", "input": mapped}},
            {"id": "done", "type": "end"},
        ],
        edges=[
            {"source": "start", "target": "first"},
            {"source": "first", "target": "pay"},
            {"source": "pay", "target": "done"},
        ],
    )
    assert found(document, library=library) == expected


@pytest.mark.parametrize(
    ("mapped", "rejects_to_pay", "expected"),
    [
        ({"amount": "{{ steps.gate.output.data.level }}", "order": {"id": "a"}}, False, []),
        (
            {"amount": "{{ steps.gate.output.data.order }}", "order": {"id": "a"}},
            False,
            [("mapping-mismatch", "nodes[2].config.input.amount")],
        ),
        # What is rejected need not fit the form.
        ({"amount": "{{ steps.gate.output.data.order }}", "order": {"id": "a"}}, True, []),
        (
            {"amount": 1, "order": "{{ steps.gate.output.by }}"},
            True,
            [("mapping-mismatch", "nodes[2].config.input.order")],
        ),
        ({"amount": "{{ steps.nap.output.waited_s }}", "order": {"id": "a"}}, False, []),
        (
            {"amount": 1, "order": "{{ steps.nap.output.waited_s }}"},
            False,
            [("mapping-mismatch", "nodes[2].config.input.order")],
        ),
        ({"amount": "{{ steps.paid.output.total }}", "order": {"id": "a"}}, False, []),
        (
            {"amount": "{{ steps.paid.output }}", "order": {"id": "a"}},
            False,
            [("mapping-mismatch", "nodes[2].config.input.amount")],
        ),
    ],
)
def test_outputs_of_gates_delays_and_events_are_known(
    mapped: Json, rejects_to_pay: bool, expected: list[tuple[str, str]]
) -> None:
    form = {"type": "object", "properties": {"level": {"type": "number"}, "order": {"type": "object"}}}
    payload = {"type": "object", "properties": {"total": {"type": "number"}}}
    document = workflow(
        nodes=[
            {"id": "start", "type": "start"},
            {"id": "gate", "type": "human", "config": {"title": "Pay?", "form_schema": form}},
            {"id": "pay", "type": "tool", "config": {"tool": "pay", "input": mapped}},
            {"id": "nap", "type": "delay", "config": {"seconds": "2d"}},
            {"id": "paid", "type": "webhook", "config": {"event": "paid", "payload_schema": payload}},
            {"id": "done", "type": "end"},
        ],
        edges=[
            {"source": "start", "target": "nap"},
            {"source": "nap", "target": "paid"},
            {"source": "paid", "target": "gate"},
            {"source": "gate", "target": "pay", "source_handle": "approved"},
            *([{"source": "gate", "target": "pay", "source_handle": "rejected"}] if rejects_to_pay else []),
            {"source": "pay", "target": "done"},
        ],
    )
    library = DocumentLibrary([ToolSpec.model_validate(tool(input_schema=SCHEMA))])
    assert found(document, library=library) == expected


def test_a_plugins_notifier_is_known_where_it_is_installed() -> None:
    class Pager(NotifyConfig):
        number: str

    document = changed(G, "nodes.1.notify", [{"type": "pager", "number": "1"}])
    assert found(document, notify_configs={**BUILTIN_NOTIFY_CONFIGS, "pager": Pager}) == []
    [problem] = validate_document(document).problems
    for word in ("'pager'", "'email'", "'log'", "'webhook'"):
        assert word in str(problem)
    [checked] = validate_raw([document], notify_configs={"pager": Pager})
    assert checked.checked.problems == ()


def test_an_email_notifier_names_no_server() -> None:
    notify = [{"type": "email", "to": "a@e.com", "sender": "b@e.com", "host": "h", "user": "u"}]
    problems = validate_document(changed(G, "nodes.1.notify", notify)).problems
    assert [(p.code, p.path, p.severity) for p in problems] == [
        ("mail-server", "nodes[1].notify[0].host", "error"),
        ("mail-server", "nodes[1].notify[0].user", "error"),
    ]
    assert all("mail=MailServer" in str(problem) for problem in problems)


def of_deployment(document: Json, **allowed: Any) -> list[tuple[str, str, str]]:
    """What a deployment says of a document that is published."""
    target = Target(deployment=Deployment.of(**allowed), project="shop", is_publishing=True)
    return [(p.code, p.path, p.severity) for p in validate_document(document, target=target).problems]


def test_what_the_deployment_does_not_allow_is_an_error_when_published_and_a_warning_before() -> None:
    document = tool(config={"url": "https://a.e.com/x", "headers": {"X": "{{ secret('CRM_KEY') }}"}})
    place = ("secret-refused", "config.headers.X", "error")
    assert of_deployment(document) == [place]
    stored = validate_document(document, target=Target(deployment=Deployment(), project="shop"))
    assert [problem.severity for problem in stored.problems] == ["warning"]
    assert stored.document is not None
    assert "secrets=['CRM_KEY']" in str(stored.problems[0])
    assert "resources/__init__.py" in str(stored.problems[0])
    for secret in ("CRM_KEY", "CRM_*", AllowedSecret("CRM_*", hosts=("*.e.com",), projects=("shop",))):
        assert of_deployment(document, secrets=[secret]) == []
    elsewhere = AllowedSecret("CRM_KEY", projects=("other",))
    assert of_deployment(document, secrets=[elsewhere]) == [place]
    for hosts in (("b.e.com",), ("e.com",), ("a.e.com:444",)):
        allowed = AllowedSecret("CRM_KEY", hosts=hosts)
        assert of_deployment(document, secrets=[allowed]) == [("secret-host", *place[1:])]


@pytest.mark.parametrize("name", ["AGENTMESH_DATABASE_URL", "DAGSTER_POSTGRES_URL", "agentmesh_token"])
def test_secrets_of_agentmesh_and_dagster_are_never_allowed(name: str) -> None:
    document = tool(config={"url": "https://e.com", "headers": {"X": f"{{{{ secret('{name}') }}}}"}})
    for pattern in ("*", name, f"{name[:4]}*"):
        assert of_deployment(document, secrets=[pattern]) == [("secret-refused", "config.headers.X", "error")]


@pytest.mark.parametrize(
    "model",
    [
        "ollama/llama3",
        "custom/x",
        "custom_openai/x",
        "gpt-5-mini",
        "huggingface/https://evil.example/x",
        "openai/../../x",
        "openai/x?key=1",
        "openai/x y",
        "gemini/models/../x",
        "offline/other",
        "os.environ/OPENAI_API_KEY",
        "local/llama3",
    ],
)
def test_models_that_neither_the_deployment_nor_a_provider_has(model: str) -> None:
    assert of_deployment(agent(model=["openai/gpt-5-mini", model])) == [
        ("model-refused", "model[1]", "error")
    ]
    in_node = {
        "kind": "workflow",
        "slug": "w",
        "nodes": [
            {"id": "start", "type": "start"},
            {
                "id": "a",
                "type": "agent",
                "config": {"agent": "b", "prompt": "?", "model": model},
                "timeout_s": 5,
            },
            {"id": "end", "type": "end"},
        ],
        "edges": [{"source": "start", "target": "a"}, {"source": "a", "target": "end"}],
    }
    assert of_deployment(in_node) == [("model-refused", "nodes[1].config.model", "error")]


def test_an_endpoint_is_named_before_the_slash() -> None:
    local = Endpoint(api_base="http://127.0.0.1:11434/v1", projects=("shop",))
    assert of_deployment(agent(model="local/llama3"), endpoints={"local": local}) == []
    others = replace(local, projects=("other",))
    assert of_deployment(agent(model="local/llama3"), endpoints={"local": others}) == [
        ("model-refused", "model", "error")
    ]


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("api_base", "http://127.0.0.1:1/v1", "endpoints="),
        ("base_url", "http://127.0.0.1:1/v1", "endpoints="),
        ("api_key", "{{ secret('K') }}", "endpoints="),
        ("extra_headers", {"X": "y"}, "endpoints="),
        ("aws_secret_access_key", "x", "endpoints="),
        ("vertex_credentials", "/etc/passwd", "endpoints="),
        ("custom_llm_provider", "openai", "endpoints="),
        ("fallbacks", [{"model": "openai/x"}], "There are"),
        ("mock_response", "x", "There are"),
        ("metadata", {"x": "y"}, "There are"),
        ("stream", True, "There are"),
        ("top_p", 2, "less than or equal"),
        ("stop", {"a": "b"}, "valid"),
    ],
)
def test_settings_that_are_not_a_documents_to_make(setting: str, value: Json, word: str) -> None:
    problems = validate_document(agent(model_settings={setting: value})).problems
    found_at = [(p.code, p.path, p.severity) for p in problems if p.code == "model-setting"]
    assert found_at == [("model-setting", f"model_settings.{setting}", "error")]
    assert word in str(next(p for p in problems if p.code == "model-setting"))


def test_values_of_the_deployment_that_are_not_there() -> None:
    document = agent(
        instructions="You sell in {{ config.region }}.", model_settings={"top_p": "{{ config.top_p }}"}
    )
    assert of_deployment(document, config={"region": "EU"}) == [
        ("config-missing", "model_settings.top_p", "error")
    ]
    assert found(document) == []


def test_secrets_of_notifiers_are_looked_for() -> None:
    document = changed(G, "nodes.1.notify", NOTIFY)
    assert found(document, target=Target(has_secret=lambda _: False)) == [
        ("secret-unconfigured", "nodes[1].notify[1].secret"),
    ]


def test_methods_of_outputs_are_no_fields() -> None:
    document = changed(G, "nodes.2.config.output", "{{ steps.gate.output.items() | list }}")
    assert "output-unknown" not in [code for code, _ in found(document)]


def test_documents_of_one_import_may_not_collide() -> None:
    [one, two, three] = validate_set([workflow(slug="a-b"), workflow(slug="a_b"), workflow(slug="a-b")])
    assert one == ()
    assert [p.code for p in two] == ["job-name-collision"]
    assert "'a-b'" in two[0].message
    assert [p.code for p in three] == ["document-duplicate"]


def test_documents_of_one_import_find_each_other_in_any_order() -> None:
    results = validate_raw([workflow(), agent()], library=DocumentLibrary([]))
    assert [r.checked.problems for r in results] == [(), ()]
    [alone] = validate_raw([workflow()], library=DocumentLibrary([]))
    assert [(p.code, p.path) for p in alone.checked.problems] == [
        ("reference-missing", "nodes[1].config.agent")
    ]
    [unasked] = validate_raw([workflow()])
    assert unasked.checked.problems == ()


def test_other_mistakes_do_not_hide_a_missing_reference() -> None:
    library = DocumentLibrary([AgentSpec.model_validate(agent(slug="triag"))])
    problems = validate_document(changed(W, "colour", "red"), library=library).problems
    assert [(p.code, p.path) for p in problems] == [
        ("field-unknown", "colour"),
        ("reference-missing", "nodes[1].config.agent"),
    ]
    assert "'triag'" in problems[1].mend


def test_paths_are_those_that_the_author_wrote() -> None:
    document = {
        "kind": "workflow",
        "slug": "w",
        "definitionJson": {
            "entryPoint": "ask",
            "nodes": {"ask": {"type": "agent", "config": {"agentId": "t", "promptTemplate": "${nope.x}"}}},
        },
    }
    [result] = validate_raw([document])
    [problem] = result.checked.errors
    assert (problem.code, problem.path) == ("name-unknown", "definitionJson.nodes.ask.config.promptTemplate")
    inline = workflow()
    inline["nodes"][1]["config"]["agent"] = {"model": "m", "systemPrompt": "{{ nope }}"}
    [_, extracted] = validate_raw([inline])
    assert [p.path for p in extracted.checked.errors] == ["nodes[1].config.agent.systemPrompt"]


def test_problems_are_plain_data() -> None:
    problem = Problem.of("cycle", "nodes[1]", "A cycle", "Remove an edge")
    assert problem.to_json() == {
        "code": "cycle",
        "severity": "error",
        "path": "nodes[1]",
        "message": "A cycle",
        "mend": "Remove an edge",
    }
    assert str(problem) == "error cycle: nodes[1]: A cycle. Remove an edge."


def test_every_rule_stands_in_the_table_and_is_tested() -> None:
    table = rules_table()
    assert all(f"`{code}`" in table for code in RULES)
    elsewhere = {
        # Tested above by themselves, in test_resolve.py, or in the other files test_validation_*.py.
        "node-id-invalid", "node-id-collision", "node-unreachable", "branch-no-default", "input-undeclared",
        "timeout-missing", "secret-unconfigured", "secret-refused", "secret-host", "model-setting", "model-refused",
        "mail-server", "mail-unconfigured", "config-missing", "side-effect-ungated", "mapping-missing",
        "mapping-unknown", "mapping-mismatch", "document-duplicate", "job-name-collision",
        "reference-missing", "reference-inactive",
        "reference-conflict", "reference-cycle", "too-many-for-max-steps", "output-schema-shadowed", "join-too-many",
        "function-unknown", "function-unavailable",
            "body-start-end", "node-id-shadows", "branch-name-invalid", "wait-too-many", "too-many-iterations",
        "wait-in-finally", "reducer-unknown", "reducer-unfit", "state-conflict",
    }  # fmt: skip
    assert {code for code, _, _ in CASES} | elsewhere == set(RULES)


def chain(length: int) -> dict[str, Json]:
    names = [f"n{i}" for i in range(length - 2)]
    ids = ["start", *names, "end"]
    before = dict(zip(names, ids, strict=False))
    return {
        "kind": "workflow",
        "slug": "chain",
        "settings": {"max_steps": length},
        "nodes": [
            {"id": "start", "type": "start"},
            *(
                {"id": n, "type": "transform", "config": {"output": f"{{{{ steps.{before[n]}.output }}}}"}}
                for n in names
            ),
            {"id": "end", "type": "end"},
        ],
        "edges": [{"source": a, "target": b} for a, b in pairwise(ids)],
    }


def test_fields_that_an_agents_other_outputs_hide_are_a_warning() -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "risk": {"type": "string"}}}
    document = changed(W, "nodes.1.config.output_schema", schema)
    assert ("output-schema-shadowed", "nodes[1].config.output_schema.properties.text") in found(document)
    assert "properties.risk" not in str(found(document))


def test_a_delay_may_be_long() -> None:
    document = changed(chain(3), "nodes.1", {"id": "n0", "type": "delay", "config": {"seconds": "30d"}})
    assert found(document) == []


def test_more_nodes_than_may_run_are_a_warning() -> None:
    assert found(without(chain(51), "settings")) == [("too-many-for-max-steps", "settings.max_steps")]
    assert found(without(chain(50), "settings")) == []


def test_the_longest_chain_is_checked() -> None:
    assert found(chain(2000)) == []
    circle = changed(chain(2000), "edges.+", {"source": "n1997", "target": "n0"})
    assert found(circle) == [("cycle", "nodes[1]")]


def test_a_graph_that_is_wrong_everywhere_is_told_everywhere() -> None:
    document = chain(2000)
    for edge in document["edges"]:
        edge["target"] += "x"
    told = found(document)
    assert told.count(("edge-dangling", "edges[0].target")) == 1
    assert len([code for code, _ in told if code == "edge-dangling"]) == 1999


def test_work_grows_no_faster_than_the_graph() -> None:
    def calls_for(length: int) -> int:
        import sys

        count = 0

        def tracer(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            if event == "call" and "agentmesh_dagster/validation" in frame.f_code.co_filename:
                count += 1

        document = chain(length)
        before = sys.getprofile()
        sys.setprofile(tracer)
        try:
            validate_document(document)
        finally:
            sys.setprofile(before)
        return count

    short, long = calls_for(100), calls_for(800)
    assert short > 100
    assert long < 10 * short


words = st.sampled_from(
    ["kind", "workflow", "slug", "nodes", "edges", "id", "type", "start", "end", "a", "config", "source", "target",
     "branch", "conditions", "when", "handle", "source_handle", "set", "{{ steps.a.output }}", "{{", "input_schema",
     "agent", "tool", "model", "tools", "retry", "metadata", "steps", "definitionJson", "input", "${x}", "output"]
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=25,
)
nodes = st.fixed_dictionaries(
    {"id": words | scalars, "type": st.sampled_from([*BUILTIN_NODE_CONFIGS, "odd"]) | scalars},
    optional={"config": values, "set": values, "on_error": words, "retry": values, "join": values},
)
edges = st.fixed_dictionaries(
    {"source": words | scalars, "target": words | scalars},
    optional={"source_handle": words, "condition": words},
)
graphs = st.fixed_dictionaries(
    {
        "kind": st.just("workflow"),
        "slug": words,
        "nodes": st.lists(nodes | values, max_size=7) | values,
        "edges": st.lists(edges | values, max_size=8) | values,
    },
    optional={"input_schema": values, "state_schema": values, "settings": values, "colour": values},
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values | graphs | graphs)
def test_garbage_is_refused_and_never_crashes(raw: Json) -> None:
    library = DocumentLibrary([ToolSpec.model_validate(tool(slug="tool", input_schema=SCHEMA))])
    direct = validate_document(raw, library=library, target=Target(has_secret=lambda _: False))
    for result in (direct, *(source.checked for source in validate_raw([raw], library=library))):
        assert (result.document is None) == bool(result.errors)
        assert all(problem.code in RULES and str(problem) for problem in result.problems)


def test_a_reused_config_is_a_document_model() -> None:
    result = validate_document(W)
    assert isinstance(result.document, WorkflowSpec)
    assert result.document.nodes[1].config == {"agent": "triage", "prompt": "{{ input.amount }}?"}
