"""The catalog: definitions, versions, the optimistic lock, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentmesh_dagster.errors import AgentMeshError, DefinitionError, NotFound, StoreError
from agentmesh_dagster.specs.closure import Closure, PinnedAgent, PinnedWorkflow, content_hash
from agentmesh_dagster.specs.documents import AgentSpec, EdgeSpec, NodeSpec, WorkflowSpec
from agentmesh_dagster.store import Store


def agent(slug: str = "triage", **fields: Any) -> dict[str, Any]:
    return {"kind": "agent", "slug": slug, "model": "offline/echo", **fields}


def workflow(slug: str = "refunds") -> WorkflowSpec:
    return WorkflowSpec(
        slug=slug,
        nodes=[NodeSpec(id="start", type="start"), NodeSpec(id="end", type="end")],
        edges=[EdgeSpec(source="start", target="end")],
    )


def publish_workflow_with_agent(store: Store, slug: str = "refunds") -> None:
    store.catalog.save("default", agent(), by="ann")
    version = store.catalog.save("default", workflow(slug), by="ann")
    closure = Closure(
        kind="workflow",
        slug=slug,
        workflows={slug: PinnedWorkflow(version=version.number, document=workflow(slug))},
        agents={"triage": PinnedAgent(version=1, document=AgentSpec(slug="triage", model="offline/echo"))},
    )
    store.publications.publish("default", "workflow", slug, version.number, closure, by="ann")


def race(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls at once; gives what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        barrier.wait(30)
        try:
            results[index] = calls[index]()
        except AgentMeshError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_a_saved_document_comes_back_as_it_was(store: Store):
    document = agent(
        name="Triage", description="Sorts", category="support", tags=["b", "a"], metadata={"z": 1, "a": 2}
    )
    version = store.catalog.save("default", document, by="ann", message="first")

    found = store.catalog.get_version("default", "agent", "triage")
    assert found == version
    assert list(found.document) == list(document)
    assert list(found.document["metadata"]) == ["z", "a"]
    assert (found.number, found.hash, found.message, found.created_by) == (
        1,
        content_hash(document),
        "first",
        "ann",
    )
    definition = store.catalog.get("default", "agent", "triage")
    assert (definition.name, definition.description, definition.category) == ("Triage", "Sorts", "support")
    assert definition.tags == ("b", "a")
    assert (definition.owner, definition.created_by, definition.revision) == ("ann", "ann", 1)
    assert definition.created_at.utcoffset() is not None
    assert definition.created_at.utcoffset().total_seconds() == 0


def test_a_model_is_stored_canonically(store: Store):
    version = store.catalog.save("default", workflow(), by="ann")
    assert version.document["kind"] == "workflow"
    assert version.document["slug"] == "refunds"
    assert "settings" not in version.document
    assert WorkflowSpec.model_validate(version.document) == workflow()
    assert store.catalog.get("default", "workflow", "refunds").name == "refunds"


def test_a_changed_document_is_a_new_version_and_an_equal_one_is_not(store: Store):
    first = store.catalog.save("default", agent(), by="ann")
    again = store.catalog.save("default", agent(), by="bob")
    second = store.catalog.save("default", agent(instructions="Be kind."), by="bob", message="kinder")
    back = store.catalog.save("default", agent(), by="ann")

    assert again == first
    assert (second.number, back.number) == (2, 3)
    assert [version.number for version in store.catalog.versions("default", "agent", "triage")] == [3, 2, 1]
    assert store.catalog.get_version("default", "agent", "triage", 2).document["instructions"] == "Be kind."
    with pytest.raises(NotFound, match="has no version 4; it has 1 to 3"):
        store.catalog.get_version("default", "agent", "triage", 4)


def test_an_edit_of_an_older_revision_is_refused_and_says_who(store: Store):
    store.catalog.save("default", agent(), by="ann")
    edited = store.catalog.get("default", "agent", "triage").revision
    store.catalog.save("default", agent(instructions="Bob's"), by="bob", expected_revision=edited)
    with pytest.raises(StoreError, match="changed by 'bob'") as refused:
        store.catalog.save("default", agent(instructions="Ann's"), by="ann", expected_revision=edited)
    assert refused.value.code == "edit-conflict"
    assert store.catalog.get_version("default", "agent", "triage").document["instructions"] == "Bob's"
    with pytest.raises(StoreError) as refused:
        store.catalog.save("default", agent(), by="ann", expected_revision=0)
    assert refused.value.code == "edit-conflict"


def test_eight_saves_at_once_make_eight_versions(store: Store):
    def save(index: int) -> Callable[[], Any]:
        return lambda: store.catalog.save(
            "default", agent(instructions=f"number {index}"), by=f"author {index}"
        )

    results = race(*(save(index) for index in range(8)))

    assert sorted(result.number for result in results) == list(range(1, 9))
    stored = store.catalog.versions("default", "agent", "triage")
    assert {version.document["instructions"] for version in stored} == {
        f"number {index}" for index in range(8)
    }


def test_of_two_edits_of_one_revision_at_once_one_wins(store: Store, other_store: Store):
    store.catalog.save("default", agent(), by="ann")
    results = race(
        lambda: store.catalog.save("default", agent(instructions="a"), by="ann", expected_revision=1),
        lambda: other_store.catalog.save("default", agent(instructions="b"), by="bob", expected_revision=1),
    )
    lost = [result for result in results if isinstance(result, StoreError)]
    assert [error.code for error in lost] == ["edit-conflict"]
    assert store.catalog.get("default", "agent", "triage").latest_version == 2


def test_a_pack_is_stored_whole_or_not_at_all(store: Store):
    with pytest.raises(StoreError) as refused:
        store.catalog.save_many("default", [agent("a-b"), agent("other"), agent("a_b")], by="ann")
    assert refused.value.code == "name-collision"
    assert "'a-b'" in refused.value.message
    assert store.catalog.list("default") == []
    assert store.audit.list("default") == []

    versions = store.catalog.save_many("default", [agent("one"), workflow("two")], by="ann", message="pack")
    assert [(version.kind, version.slug, version.number) for version in versions] == [
        ("agent", "one", 1),
        ("workflow", "two", 1),
    ]
    assert [(row.action, row.entity) for row in store.audit.list("default")] == [
        ("import", "workflow/two"),
        ("import", "agent/one"),
    ]


def test_two_slugs_with_one_job_name_are_refused_also_at_once(store: Store, other_store: Store):
    results = race(
        lambda: store.catalog.save("default", agent("a-b"), by="ann"),
        lambda: other_store.catalog.save("default", agent("a_b"), by="bob"),
    )
    assert [result.code for result in results if isinstance(result, StoreError)] == ["name-collision"]
    # Another kind, another project: no collision.
    store.catalog.save("default", workflow("a_b"), by="ann")
    store.catalog.create_project("second")
    store.catalog.save("second", agent("a_b"), by="ann")
    store.catalog.save("second", workflow("a-b"), by="ann")


def test_the_slug_of_a_deleted_definition_may_be_used_by_its_neighbour(store: Store):
    store.catalog.save("default", agent("a-b"), by="ann")
    store.catalog.delete("default", "agent", "a-b", by="ann")
    store.catalog.save("default", agent("a_b"), by="ann")
    with pytest.raises(StoreError) as refused:
        store.catalog.save("default", agent("a-b"), by="ann")
    assert refused.value.code == "name-collision"


def test_lists_are_filtered(store: Store):
    publish_workflow_with_agent(store)
    store.catalog.save(
        "default", agent("writer", category="text", tags=["beta"], description="Schreibt ÜBERALL"), by="b"
    )
    store.catalog.save(
        "default", agent("reader", is_template=True, tags=["beta", "x"], category="text"), by="b"
    )
    store.catalog.set_active("default", "agent", "reader", False, by="b")
    store.catalog.save("default", agent("gone"), by="b")
    store.catalog.delete("default", "agent", "gone", by="b")

    def slugs(**filters: Any) -> list[str]:
        return [definition.slug for definition in store.catalog.list("default", **filters)]

    assert slugs() == ["reader", "triage", "writer", "refunds"]
    assert slugs(kind="workflow") == ["refunds"]
    assert slugs(category="text") == ["reader", "writer"]
    assert slugs(tag="x") == ["reader"]
    assert slugs(text="überall") == ["writer"]
    assert slugs(text="100%") == []
    assert slugs(active=False) == ["reader"]
    assert slugs(published=True) == ["refunds"]
    assert slugs(kind="agent", published=False, active=True) == ["triage", "writer"]
    assert slugs(template=True) == ["reader"]
    assert slugs(kind="agent", include_archived=True) == ["gone", "reader", "triage", "writer"]


def test_a_template_is_copied_and_remembered(store: Store):
    store.catalog.save("default", agent("base", is_template=True, instructions="Hello"), by="ann")
    template = store.catalog.get("default", "agent", "base")
    version = store.catalog.copy("default", "agent", "base", "mine", by="bob")
    copied = store.catalog.get("default", "agent", "mine")
    assert version.document == agent("mine", instructions="Hello")
    assert (copied.source_template_id, copied.is_template, copied.owner) == (template.id, False, "bob")

    store.catalog.copy("default", "agent", "mine", "third", by="bob")
    assert store.catalog.get("default", "agent", "third").source_template_id is None
    with pytest.raises(StoreError) as refused:
        store.catalog.copy("default", "agent", "base", "mine", by="bob")
    assert refused.value.code == "slug-taken"
    with pytest.raises(DefinitionError) as wrong:
        store.catalog.copy("default", "agent", "base", "../mine", by="bob")
    assert wrong.value.code == "bad-slug"


def test_what_something_published_refers_to_cannot_be_deleted(store: Store):
    publish_workflow_with_agent(store)
    with pytest.raises(StoreError, match="workflow 'refunds' refers to it") as refused:
        store.catalog.delete("default", "agent", "triage", by="ann")
    assert refused.value.code == "still-referenced"
    assert store.catalog.get("default", "agent", "triage").archived_at is None

    store.publications.unpublish("default", "workflow", "refunds", by="ann")
    store.catalog.delete("default", "agent", "triage", by="ann")
    assert store.catalog.get("default", "agent", "triage").archived_at is not None
    assert len(store.catalog.versions("default", "agent", "triage")) == 1


def test_deleting_what_is_live_ends_it_and_importing_it_again_does_not_make_it_live(store: Store):
    publish_workflow_with_agent(store)
    store.catalog.delete("default", "workflow", "refunds", by="bob")
    assert store.publications.live("default") == []
    assert store.publications.log("default")[0].action == "unpublish"
    with pytest.raises(NotFound, match="was deleted"):
        store.catalog.copy("default", "workflow", "refunds", "other", by="bob")

    back = store.catalog.save("default", workflow(), by="ann")
    definition = store.catalog.get("default", "workflow", "refunds")
    assert (back.number, definition.archived_at, definition.published_version) == (1, None, None)
    assert store.publications.live("default") == []


def test_documents_of_code_are_not_edited_or_deleted(store: Store):
    store.catalog.save("default", agent("builtin"), by="code", type="system")
    for refused_call in (
        lambda: store.catalog.save("default", agent("builtin", instructions="Mine"), by="ann"),
        lambda: store.catalog.delete("default", "agent", "builtin", by="ann"),
    ):
        with pytest.raises(StoreError) as refused:
            refused_call()
        assert refused.value.code == "system-document"
    assert (
        store.catalog.save("default", agent("builtin", instructions="v2"), by="code", type="system").number
        == 2
    )
    store.catalog.copy("default", "agent", "builtin", "mine", by="ann")
    assert store.catalog.get("default", "agent", "mine").type == "user"
    with pytest.raises(StoreError) as refused:
        store.catalog.save("default", agent("mine"), by="code", type="system")
    assert refused.value.code == "slug-taken"


def test_every_change_is_audited_with_its_transaction(store: Store):
    publish_workflow_with_agent(store)
    store.catalog.set_active("default", "workflow", "refunds", False, by="bob")
    store.catalog.set_active("default", "workflow", "refunds", False, by="bob")
    store.catalog.set_active("default", "workflow", "refunds", True, by="bob")
    store.catalog.copy("default", "agent", "triage", "other", by="carl")
    store.catalog.delete("default", "agent", "other", by="carl")
    store.publications.unpublish("default", "workflow", "refunds", by="dora", message="broken")

    rows = store.audit.list("default")
    assert [(row.actor, row.action, row.entity) for row in reversed(rows)] == [
        ("ann", "edit", "agent/triage"),
        ("ann", "edit", "workflow/refunds"),
        ("ann", "publish", "workflow/refunds"),
        ("bob", "deactivate", "workflow/refunds"),
        ("bob", "activate", "workflow/refunds"),
        ("carl", "copy", "agent/other"),
        ("carl", "delete", "agent/other"),
        ("dora", "unpublish", "workflow/refunds"),
    ]
    assert rows[0].detail == {"message": "broken"}
    assert [row.action for row in store.audit.list("default", entity="agent/other", actor="carl")] == [
        "delete",
        "copy",
    ]
    assert len(store.audit.list("default", limit=3)) == 3


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({"kind": "agent", "slug": "../etc"}, "bad-slug"),
        ({"kind": "agent", "slug": "a" * 101}, "bad-slug"),
        ({"kind": "robot", "slug": "a"}, "bad-document"),
        ({"kind": "agent"}, "bad-document"),
        (agent(name="nul\0"), "nul-character"),
        (agent(metadata={"nested": ["nul\0"]}), "nul-character"),
        (agent(metadata={"not": {1, 2}}), "not-json"),
        (agent(temperature=float("nan")), "not-json"),
    ],
)
def test_what_cannot_be_stored_is_refused_alike(store: Store, document: dict[str, Any], code: str):
    with pytest.raises(AgentMeshError) as refused:
        store.catalog.save("default", document, by="ann")
    assert refused.value.code == code
    assert store.catalog.list("default") == []


def test_projects_keep_apart(store: Store):
    store.catalog.create_project("second", "The second")
    store.catalog.save("second", agent(), by="ann")
    assert store.catalog.list("default") == []
    assert [project.name for project in store.catalog.list_projects()] == ["default", "The second"]
    with pytest.raises(StoreError) as refused:
        store.catalog.create_project("second")
    assert refused.value.code == "slug-taken"
    with pytest.raises(NotFound, match="agentmesh project create third"):
        store.catalog.save("third", agent(), by="ann")
    with pytest.raises(NotFound):
        store.catalog.get("default", "agent", "triage")
