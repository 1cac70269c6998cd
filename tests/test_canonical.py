"""The canonical form: the same bytes from every database, and again after every import."""

from __future__ import annotations

import json
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from agentmesh_dagster.specs.canonical import canonical, dump_json, dump_yaml
from agentmesh_dagster.specs.documents import document_model
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.specs.normalize import normalize
from agentmesh_dagster.validation import validate_document

Json = Any

TRAPS = [
    "yes", "no", "on", "off", "Yes", "NO", "y", "n", "null", "~", "Null", "true", "False", "", " ", "1", "1e3", "1.5",
    "0o7", "0x1F", "1_000", "12:30:45", "2024-01-02", "2024-01-02T03:04:05Z", ".inf", "-.INF", ".nan", "nan", "+1", "=",
    "<<", "- a", "a: b", "a #b", "#a", "a:", "*a", "&a", "!a", "%a", "@a", "`a`", "{a}", "[a]", "|", ">", "'a'", '"a"',
    "a\\b", "a\tb", " a", "a ", "a\nb", "a\nb\n", "a\n\n", "\na", " a\nb", "a \nb", "a\r\nb", "a\x85b", "a\u2028b",
    "\ufeffa", "\x07", "üñï", "😀", "中文 text", "---", "...", "a\n---\nb", "{{ input.x }}", "\x1b\n",
    "{% if a %}\n  b\n{% endif %}",
    "x" * 300 + " " + "y" * 300, "? a", "a, b", "tab\t\nnext",
]  # fmt: skip


def read(text: str) -> Json:
    return YAML(typ="safe", pure=True).load(StringIO(text))


def stored(document: Json) -> Json:
    """What comes out of a JSON column."""
    return json.loads(json.dumps(document))


def of(raw: Json) -> dict[str, Json]:
    result = validate_document(raw)
    assert result.errors == ()
    assert result.document is not None
    return canonical(result.document)


def assert_stable(first: dict[str, Json]) -> None:
    """Export, import, export: the same bytes, as YAML, as JSON, and out of either database."""
    for dump in (dump_yaml, dump_json):
        text = dump(first)
        [raw] = load_documents(text, source="export")
        [again] = normalize(raw).documents
        assert dump(of(again)) == text
        from_database = document_model(first["kind"]).model_validate(stored(first))
        assert dump(canonical(from_database)) == text


@pytest.mark.parametrize("text", TRAPS)
def test_text_is_read_back_as_text_by_every_yaml(text: str) -> None:
    document = {"a": text, "b": [text, {"c": text}], text or "empty": "key"}
    written = dump_yaml(document)
    assert read(written) == document
    if "\ufeff" not in text:
        assert yaml.safe_load(written) == document
    assert json.loads(dump_json(document)) == document


@pytest.mark.parametrize("number", [0, -1, 2**70, 1.5, -0.25, 1e-7, 1.5e-10, 123456.789, True, False, None])
def test_numbers_are_read_back_the_same_by_every_yaml(number: Json) -> None:
    written = dump_yaml({"a": number})
    for found in (read(written)["a"], yaml.safe_load(written)["a"]):
        assert found == number
        assert type(found) is type(number)


def test_the_form() -> None:
    document = of(
        {
            "nodes": [
                {"type": "start", "id": "start", "join": "any", "config": {}},
                {
                    "config": {"seconds": "30s"},
                    "type": "delay",
                    "id": "wait",
                    "retry": {"delay_s": "1m", "max_attempts": 2},
                    "position": {"y": 2.0, "x": 1.5},
                },
                {
                    "id": "size",
                    "type": "branch",
                    "config": {
                        "default": "b",
                        "mode": "first",
                        "conditions": [{"handle": "a", "when": "true"}],
                    },
                },
                {"id": "end", "type": "end", "config": {"output": {"b": 1, "a": None}}},
            ],
            "edges": [
                {"target": "wait", "source": "start"},
                {"target": "size", "source": "wait", "condition": None},
                {"target": "end", "source_handle": "a", "source": "size"},
                {"target": "end", "source_handle": "b", "source": "size"},
            ],
            "settings": {"max_steps": 50},
            "description": "Two\nlines\n",
            "name": "yes",
            "slug": "w",
            "metadata": {"b": 1, "a": [{"d": 1, "c": 2}]},
            "kind": "workflow",
        }
    )
    assert dump_yaml(document) == (
        'kind: workflow\nslug: w\nname: "yes"\ndescription: |\n  Two\n  lines\n'
        "metadata:\n  b: 1\n  a:\n  - d: 1\n    c: 2\n"
        "nodes:\n- id: start\n  type: start\n"
        "- id: wait\n  type: delay\n  config:\n    seconds: 30\n  retry:\n    max_attempts: 2\n    delay_s: 60\n"
        '  position:\n    x: 1.5\n    "y": 2.0\n'
        '- id: size\n  type: branch\n  config:\n    conditions:\n    - when: "true"\n      handle: a\n    default: b\n'
        "- id: end\n  type: end\n  config:\n    output:\n      b: 1\n      a: null\n"
        "edges:\n- source: start\n  target: wait\n- source: wait\n  target: size\n"
        "- source: size\n  target: end\n  source_handle: a\n- source: size\n  target: end\n  source_handle: b\n"
    )
    assert_stable(document)


def test_aliases_and_version_suffixes_are_kept() -> None:
    tool = of(
        {
            "kind": "tool",
            "slug": "t",
            "type": "http",
            "config": {"json": {"b": 1}, "url": "https://e", "retries": 2},
        }
    )
    assert tool == {
        "kind": "tool",
        "slug": "t",
        "type": "http",
        "config": {"url": "https://e", "json": {"b": 1}},
    }
    assert_stable(tool)
    agent = of({"kind": "agent", "slug": "a", "model": ["x", "y"], "tools": ["t@3"], "agents": []})
    assert agent == {"kind": "agent", "slug": "a", "model": ["x", "y"], "tools": ["t@3"]}
    assert_stable(agent)


def test_gates_are_written_with_the_question_first() -> None:
    gate = {
        "assignees": ["anna"],
        "form_schema": {"type": "object"},
        "timeout": "3d",
        "on_timeout": "reject",
        "required": 1,
        "options": None,
        "title": "Pay?",
    }
    notify = [{"url": "https://e.com", "type": "webhook", "timeout_s": "5s"}]
    document = of(
        {
            "kind": "workflow",
            "slug": "w",
            "nodes": [
                {"id": "start", "type": "start"},
                {"id": "ask", "type": "human", "config": gate, "notify": notify, "on_unknown": "human"},
                {"id": "paid", "type": "webhook", "config": {"key": "a", "event": "paid", "timeout": "90s"}},
                {"id": "end", "type": "end"},
            ],
            "edges": [
                {"source": "start", "target": "ask"},
                {"source": "ask", "target": "paid"},
                {"source": "paid", "target": "end"},
            ],
        }
    )
    assert dump_yaml(document["nodes"][1]) == (
        'id: ask\ntype: human\nconfig:\n  title: "Pay?"\n  form_schema:\n    type: object\n'
        "  assignees:\n  - anna\n  timeout: 259200\n  on_timeout: reject\n"
        'notify:\n- url: "https://e.com"\n  type: webhook\n  timeout_s: "5s"\n'
    )
    assert_stable(document)
    approval = {"timeout": "1h", "on_timeout": "reject", "assignees": ["group:a"], "separation": False}
    config = {"url": "https://e"}
    tool = of(
        {
            "kind": "tool",
            "slug": "t",
            "type": "http",
            "config": config,
            "approval": approval,
            "requires_approval": True,
        }
    )
    assert tool["approval"] == {"assignees": ["group:a"], "timeout": 3600, "on_timeout": "reject"}
    assert_stable(tool)


def test_bodies_are_written_like_workflows_and_branches_in_the_authors_order() -> None:
    draft = {"id": "draft", "type": "transform", "config": {"output": {"b": 1, "a": 2}}, "join": "any"}
    document = of(
        {
            "kind": "workflow",
            "slug": "w",
            "finally": {"edges": [], "nodes": [{"type": "transform", "id": "log", "config": {"output": 1}}]},
            "settings": {"execution": "dagster", "timeout_s": "1h", "max_iterations": 1000},
            "nodes": [
                {"id": "start", "type": "start"},
                {
                    "id": "both",
                    "type": "parallel",
                    "join": 1,
                    "config": {
                        "wait": "all",
                        "branches": {
                            "zeta": {"nodes": [{**draft, "retry": {"delay_s": "1m"}}]},
                            "al": {
                                "nodes": [
                                    {
                                        "id": "again",
                                        "type": "loop",
                                        "config": {
                                            "body": {"nodes": [draft], "edges": []},
                                            "on_limit": "fail",
                                            "max_iterations": 3,
                                            "delay_s": 0,
                                            "while": "iteration < 2",
                                        },
                                    }
                                ]
                            },
                        },
                    },
                },
                {"id": "end", "type": "end"},
            ],
            "edges": [{"source": "start", "target": "both"}, {"source": "both", "target": "end"}],
        }
    )
    assert dump_yaml(document) == (
        "kind: workflow\nslug: w\nsettings:\n  timeout_s: 3600\n"
        "nodes:\n- id: start\n  type: start\n"
        "- id: both\n  type: parallel\n  config:\n    branches:\n"
        "      zeta:\n        nodes:\n        - id: draft\n          type: transform\n"
        "          config:\n            output:\n              b: 1\n              a: 2\n"
        "          retry:\n            delay_s: 60\n"
        "      al:\n        nodes:\n        - id: again\n          type: loop\n          config:\n"
        '            while: "iteration < 2"\n            max_iterations: 3\n'
        "            body:\n              nodes:\n              - id: draft\n                type: transform\n"
        "                config:\n                  output:\n                    b: 1\n                    a: 2\n"
        "  join: 1\n"
        "- id: end\n  type: end\n"
        "edges:\n- source: start\n  target: both\n- source: both\n  target: end\n"
        "finally:\n  nodes:\n  - id: log\n    type: transform\n    config:\n      output: 1\n"
    )
    assert_stable(document)


def test_a_call_is_written_with_its_alias() -> None:
    call = {"id": "call", "type": "workflow", "config": {"async": True, "workflow": "other@2"}}
    child = {"id": "child", "type": "workflow", "config": {"async": False, "workflow": "other"}}
    ids = ["start", "call", "child", "end"]
    document = of(
        {
            "kind": "workflow",
            "slug": "w",
            "nodes": [{"id": "start", "type": "start"}, call, child, {"id": "end", "type": "end"}],
            "edges": [{"source": a, "target": b} for a, b in pairwise(ids)],
        }
    )
    assert [node.get("config") for node in document["nodes"][1:3]] == [
        {"workflow": "other@2", "async": True},
        {"workflow": "other"},
    ]
    assert_stable(document)


def test_numbers_of_free_data_are_kept_as_they_are() -> None:
    agent = of(
        {"kind": "agent", "slug": "a", "model": "m", "metadata": {"big": 1e22, "zero": -0.0, "one": 1.0}}
    )
    assert dump_json(agent["metadata"]) == '{\n  "big": 1e+22,\n  "zero": -0.0,\n  "one": 1.0\n}\n'
    assert_stable(agent)


words = st.sampled_from([*TRAPS, "a", "b", "user_input", "maxTokens", "${x}", "type"])
texts = words | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
free = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=10
)
bags = st.dictionaries(texts, free, max_size=3)
slugs = st.from_regex(r"\A[A-Za-z][a-z0-9]{0,8}\Z")
common = {
    "name": texts.filter(lambda text: len(text) <= 200),
    "description": texts,
    "tags": st.lists(texts, max_size=3),
    "metadata": bags,
}
agents = st.fixed_dictionaries(
    {"kind": st.just("agent"), "slug": slugs, "model": texts | st.lists(texts, min_size=1, max_size=2)},
    optional={
        **common,
        "temperature": st.floats(0, 2) | st.integers(0, 2),
        "max_tokens": st.integers(1, 10**6),
        "memory": st.none() | bags,
        "guardrails": st.lists(bags, max_size=2),
    },
)
durations = st.sampled_from([1, 2.5, "30s", "5m", "0.5h"])
steps = st.fixed_dictionaries(
    {
        "type": st.just("transform"),
        "config": st.fixed_dictionaries({"output": st.integers() | st.booleans()}),
    },
    optional={
        **{key: common[key] for key in ("name", "description", "metadata")},
        "timeout_s": durations,
        "retry": st.none()
        | st.fixed_dictionaries({}, optional={"delay_s": durations, "max_attempts": st.just(3)}),
        "on_error": st.sampled_from(["fail", "continue"]),
        "set": st.dictionaries(slugs, st.integers() | st.floats(0, 1), max_size=2),
        "position": st.fixed_dictionaries({"x": st.floats(-1e3, 1e3), "y": st.integers(-9, 9)}),
    },
)


def chained(parts: list[dict[str, Json]], more: dict[str, Json]) -> dict[str, Json]:
    ids = ["start", *(f"s{i}" for i in range(len(parts))), "end"]
    inner = [{"id": name, **part} for name, part in zip(ids[1:-1], parts, strict=True)]
    return {
        **more,
        "kind": "workflow",
        "nodes": [{"id": "start", "type": "start"}, *inner, {"id": "end", "type": "end"}],
        "edges": [{"source": a, "target": b} for a, b in pairwise(ids)],
    }


workflows = st.builds(
    chained,
    st.lists(steps, max_size=3),
    st.fixed_dictionaries({"slug": slugs.map(lambda s: f"w0{s}")}, optional=common),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(agents | workflows)
def test_importing_an_export_gives_the_same_bytes_again(raw: Json) -> None:
    assert_stable(of(raw))


@settings(max_examples=200, deadline=None)
@given(bags)
def test_any_data_is_read_back_the_same(data: Json) -> None:
    written = dump_yaml(data)
    assert read(written) == data
    assert [dict(d) for d in load_documents(written, source="x")] == [data] if data else True
