"""Documents, schemas, exports, forms, prompts and outputs keep the author's order of keys, on both databases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from test_decide_job import Waiting

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.orchestration.code_location import build_published_job, named_executors
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.records import WaitKind
from agentmesh_dagster.specs.schema import fill_and_coerce
from agentmesh_dagster.store import Store

ANSWER = {
    "type": "object",
    "required": ["reasoning", "answer"],
    "properties": {"reasoning": {"type": "string"}, "answer": {"type": "string"}},
}
DOCUMENTS = """
slug: asks
kind: workflow
input_schema: {type: object, properties: {zone: {type: string}, amount: {type: number}, from: {type: string}}}
metadata: {z: 1.0e+22, a: -0.0}
nodes:
  - {id: start, type: start}
  - id: ask
    type: agent
    config:
      agent: clerk
      prompt: "{{ input | tojson }}"
      output_schema:
        type: object
        required: [reasoning, answer]
        properties: {reasoning: {type: string}, answer: {type: string}}
  - id: both
    type: parallel
    config:
      branches:
        second: {nodes: [{id: say, type: transform, config: {output: {two: 2, one: 1}}}]}
        first: {nodes: [{id: say, type: transform, config: {output: 1}}]}
  - {id: end, type: end, config: {output: {zeta: "{{ steps.both.output }}", alpha: "{{ steps.ask.output.object }}"}}}
edges:
  - {source: start, target: ask}
  - {source: ask, target: both}
  - {source: both, target: end}
---
kind: agent
slug: clerk
model: offline/echo
"""


def text_of(value: Any) -> str:
    return json.dumps(value)


def import_text(store: Store, folder: Path, text: str, *, publish: bool = True) -> Authoring:
    file = folder / "documents.yaml"
    file.write_text(text)
    authoring = Authoring(store, "default", actor="ada")
    authoring.import_paths([file], publish=publish)
    return authoring


def test_what_is_stored_published_and_exported_is_in_the_authors_order(store: Store, tmp_path: Path):
    authoring = import_text(store, tmp_path, DOCUMENTS)
    live = store.publications.live_one("default", "workflow", "asks")
    assert live is not None
    published = live.closure["workflows"]["asks"]["document"]
    exported = json.loads(authoring.export("workflow", "asks", format="json"))
    for document in (store.catalog.get_version("default", "workflow", "asks").document, published, exported):
        nodes = {node["id"]: node.get("config") for node in document["nodes"]}
        assert list(document["input_schema"]["properties"]) == ["zone", "amount", "from"]
        assert text_of(document["metadata"]) == '{"z": 1e+22, "a": -0.0}'
        assert list(nodes["ask"]["output_schema"]["properties"]) == ["reasoning", "answer"]
        assert list(nodes["both"]["branches"]) == ["second", "first"]
        assert list(nodes["end"]["output"]) == ["zeta", "alpha"]
        # The fields of a document itself have one order, whatever the author's.
        assert list(document)[:2] == ["kind", "slug"] if document is not published else True


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_an_export_is_imported_as_the_same_version_and_exported_as_the_same_bytes(
    store: Store, tmp_path: Path, format: Any
):
    authoring = import_text(store, tmp_path, DOCUMENTS)
    file = tmp_path / f"export.{format}"
    file.write_text(authoring.export("workflow", "asks", format=format))
    [again] = authoring.import_paths([file])
    assert (again.version, again.is_new) == (1, False)
    assert authoring.export("workflow", "asks", format=format) == file.read_text()


def test_another_order_of_a_schemas_keys_is_a_new_version_that_takes_effect(store: Store, tmp_path: Path):
    authoring = import_text(store, tmp_path, DOCUMENTS)
    before = store.publications.live_one("default", "workflow", "asks")
    turned = DOCUMENTS.replace(
        "{reasoning: {type: string}, answer: {type: string}}",
        "{answer: {type: string}, reasoning: {type: string}}",
    )
    import_text(store, tmp_path, turned)
    live = store.publications.live_one("default", "workflow", "asks")
    assert before is not None
    assert live is not None
    assert (live.version, live.id > before.id, live.closure_hash == before.closure_hash) == (2, True, False)
    ask = live.closure["workflows"]["asks"]["document"]["nodes"][1]["config"]
    assert list(ask["output_schema"]["properties"]) == ["answer", "reasoning"]
    # Hashes sort, so that the change is one of order alone.
    first, second = (store.catalog.get_version("default", "workflow", "asks", n) for n in (1, 2))
    assert first.hash == second.hash
    assert "reasoning" in authoring.diff("workflow", "asks", 1, 2)


def test_another_order_of_a_documents_own_fields_is_none(store: Store, tmp_path: Path):
    import_text(store, tmp_path, "kind: agent\nslug: clerk\nmodel: offline/echo\nname: Clerk\n")
    import_text(store, tmp_path, "name: Clerk\nmodel: offline/echo\nslug: clerk\nkind: agent\n")
    assert store.catalog.get("default", "agent", "clerk").latest_version == 1


def test_a_deleted_document_that_comes_back_in_another_order_is_a_new_version(store: Store, tmp_path: Path):
    agent = "kind: agent\nslug: clerk\nmodel: offline/echo\nmetadata: "
    import_text(store, tmp_path, agent + "{b: 1, a: 2}\n", publish=False)
    store.catalog.delete("default", "agent", "clerk", by="ada")
    import_text(store, tmp_path, agent + "{a: 2, b: 1}\n", publish=False)
    assert list(store.catalog.get_version("default", "agent", "clerk").document["metadata"]) == ["a", "b"]
    import_text(store, tmp_path, agent + "{a: 2, b: 1}\n", publish=False)
    assert store.catalog.get("default", "agent", "clerk").latest_version == 2


def test_input_prompts_requests_and_outputs_are_in_the_authors_order(database_url: str, tmp_path: Path):
    agentmesh = AgentMesh(database_url=database_url)
    store = agentmesh.store()
    import_text(store, tmp_path, DOCUMENTS)
    live = store.publications.live_one("default", "workflow", "asks")
    assert live is not None
    job = build_published_job(live, resource=agentmesh.resource(), executors=named_executors())
    # In the order in which Dagster stores what a run is launched with.
    given = {"amount": 2, "extra": {"y": 1, "x": 2}, "from": "A", "zone": "EU"}
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(run_config=given, instance=instance)
    run = store.runs.get(result.run_id)
    steps = {step.key: step for step in store.runs.steps(run.id)}
    assert text_of(run.input) == '{"zone": "EU", "amount": 2, "from": "A", "extra": {"y": 1, "x": 2}}'
    asked = steps["ask/llm/1"].input
    assert (
        '{"zone": "EU", "amount": 2, "from": "A", "extra": {"y": 1, "x": 2}}'
        in asked["messages"][-1]["content"]
    )
    assert text_of(asked["output_schema"]) == text_of(ANSWER)
    assert list(steps["both"].output) == ["second", "first"]
    assert list(steps["both"].output["second"]) == ["two", "one"]
    assert list(run.output) == ["zeta", "alpha"]
    assert list(run.output["alpha"]) == ["reasoning", "answer"]


def test_what_a_form_gives_is_in_the_forms_order(database_url: str):
    waiting = Waiting(database_url)
    form = {"type": "object", "properties": {"reason": {"type": "string"}, "amount": {"type": "integer"}}}
    wait = waiting.open(kind=WaitKind.HUMAN, form_schema=form, prefill={"reason": "r", "amount": 1})
    data = {"amount": 3, "reason": "late"}
    assert waiting.launch({"approval": wait.id, "decision": "approved", "by": "ann", "data": data}).success
    stands = waiting.stands(wait)
    assert list(stands.form_schema["properties"]) == ["reason", "amount"]
    assert list(stands.prefill) == ["reason", "amount"]
    assert text_of(stands.answer["data"]) == '{"reason": "late", "amount": 3}'
    waiting.store.close()


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"properties": {"c": {}, "b": {"default": 1}}}, ["c", "b", "z", "a"]),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {}}}]}, ["b", "a", "z", "c"]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"c": {}}}}}, ["c", "z", "b", "a"]),
        ({}, ["z", "b", "a", "c"]),
    ],
)
def test_objects_are_filled_in_the_order_of_their_schema(schema: Any, names: list[str]):
    assert list(fill_and_coerce(schema, {"z": 1, "b": 1, "a": 1, "c": 1})) == names


def test_a_schema_that_refers_to_itself_has_an_end():
    assert fill_and_coerce({"allOf": [{"$ref": "#"}]}, {"a": 1}) == {"a": 1}
