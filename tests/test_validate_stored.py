"""`validate` says what `publish` would say: of stored documents, of mappings onto them, and of functions."""

from __future__ import annotations

import pytest

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.errors import DocumentInvalid, NotFound
from agentmesh_dagster.store import open_store


def workflow(*nodes, slug="sample", **more):
    nodes = [{"id": "start", "type": "start"}, *nodes, {"id": "done", "type": "end"}]
    edges = [{"source": a["id"], "target": b["id"]} for a, b in zip(nodes, nodes[1:], strict=False)]  # noqa: RUF007
    return {"kind": "workflow", "slug": slug, "nodes": nodes, "edges": edges, **more}


def code(function, input=None):
    config = {"function": function, **({} if input is None else {"input": input})}
    return {"id": "work", "type": "code", "config": config, "timeout_s": 9}


def call(tool, **input):
    return {"id": "call", "type": "tool", "config": {"tool": tool, "input": input}, "timeout_s": 9}


TOOL = {
    "kind": "tool",
    "slug": "pay",
    "type": "builtin",
    "config": {"name": "now"},
    "input_schema": {
        "type": "object",
        "required": ["amount"],
        "properties": {"amount": {"type": "number"}},
        "additionalProperties": False,
    },
}


@pytest.fixture
def authoring(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/agentmesh.db") as store:
        made = Authoring(store, "default", actor="test")
        made.import_documents([TOOL], publish=True)
        yield made


def codes(report):
    return {problem.code: problem.severity for document in report.documents for problem in document.problems}


@pytest.mark.parametrize(
    ("input", "code"),
    [
        ({}, "mapping-missing"),
        ({"amount": "much"}, "mapping-mismatch"),
        ({"amount": 1, "x": 1}, "mapping-unknown"),
    ],
)
def test_mappings_onto_stored_tools_are_checked(authoring, input, code):
    document = workflow(call("pay", **input))
    assert codes(authoring.check_documents([document]))[code] == "error"
    # It may be stored all the same; what it is to be published with may come later.
    (stored,) = authoring.import_documents([document])
    assert [(warning.code, warning.severity) for warning in stored.warnings] == [(code, "warning")]
    with pytest.raises(DocumentInvalid) as refused:
        authoring.publish("workflow", "sample")
    assert [problem["code"] for problem in refused.value.problems] == [code]
    assert codes(authoring.check_stored("workflow", "sample")) == {code: "error"}


def test_mappings_onto_stored_workflows_are_checked(authoring):
    inner = workflow(slug="inner", input_schema={**TOOL["input_schema"]})
    authoring.import_documents([inner], publish=True)
    outer = workflow(
        {"id": "call", "type": "workflow", "config": {"workflow": "inner", "input": {"amount": "much"}}}
    )
    assert codes(authoring.check_documents([outer]))["mapping-mismatch"] == "error"


def test_what_is_not_there_yet_is_a_warning_that_names_the_nearest(authoring):
    report = authoring.check_documents([workflow(call("pai", amount=1))])
    (problem,) = report.documents[0].problems
    assert (problem.code, problem.severity) == ("reference-missing", "warning")
    assert "'pay'" in problem.mend
    authoring.import_documents([workflow(call("pai", amount=1))])
    assert codes(authoring.check_stored("workflow", "sample")) == {"reference-missing": "error"}


@pytest.mark.parametrize(
    ("function", "input", "expected"),
    [
        ("workflow_functions:double", {"number": 2}, {}),
        ("workflow_functions:duoble", {"number": 2}, {"function-unknown": "error"}),
        ("nonsense", {}, {"function-unknown": "error"}),
        ("workflow_functions:double", {}, {"mapping-missing": "error"}),
        ("workflow_functions:double", {"number": "two"}, {"mapping-mismatch": "error"}),
        ("os:system", {"command": "x"}, {"function-unavailable": "warning"}),
        ("workflow_functions.absent:f", {}, {"function-unavailable": "warning"}),
    ],
)
def test_functions_are_looked_up(authoring, monkeypatch, function, input, expected):
    monkeypatch.setenv("AGENTMESH_FUNCTION_MODULES", "workflow_functions")
    assert codes(authoring.check_documents([workflow(code(function, input))])) == expected
    tool = {"kind": "tool", "slug": "work", "type": "function", "config": {"function": function}}
    found = codes(authoring.check_documents([tool, workflow(call("work", **input))]))
    assert found == expected


def test_where_no_module_is_allowed_functions_are_not_looked_up(authoring, monkeypatch):
    monkeypatch.delenv("AGENTMESH_FUNCTION_MODULES", raising=False)
    assert codes(authoring.check_documents([workflow(code("shop.tools:find", {}))])) == {}


def test_a_version_that_is_not_there(authoring):
    with pytest.raises(NotFound):
        authoring.check_stored("tool", "pai")
    with pytest.raises(NotFound):
        authoring.check_stored("tool", "pay", version=7)


@pytest.mark.parametrize(
    ("document", "mend"),
    [
        (workflow({"id": "x", "type": "paralel"}), "Did you mean 'parallel'"),
        ({**TOOL, "type": "bultin"}, "Did you mean 'builtin'"),
        (workflow({"id": "x", "type": "zzz"}), "Known types are 'agent'"),
        (workflow(slug="über"), "ASCII letter"),
        (workflow({"id": "é", "type": "transform", "config": {"output": 1}}), "ASCII letter"),
    ],
)
def test_hints(authoring, document, mend):
    problems = authoring.check_documents([document]).documents[0].problems
    assert any(mend in problem.mend for problem in problems), problems
