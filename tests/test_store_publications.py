"""The publication log: numbers in commit order, what is live at a number, and two publishes at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import forked
import pytest
from test_store_catalog import agent, publish_workflow_with_agent, race, workflow

from agentmesh_dagster.errors import NotFound, StoreError
from agentmesh_dagster.specs.closure import Closure, PinnedAgent, PinnedWorkflow
from agentmesh_dagster.specs.documents import AgentSpec
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import publications


def closure_of(slug: str, version: int, **metadata: Any) -> Closure:
    document = workflow(slug).model_copy(update={"metadata": metadata})
    return Closure(
        kind="workflow", slug=slug, workflows={slug: PinnedWorkflow(version=version, document=document)}
    )


def test_a_publication_keeps_its_closure(store: Store):
    store.catalog.save("default", workflow(), by="ann")
    closure = closure_of("refunds", 1, z="ü", a=[1, None, 1.5])
    published = store.publications.publish(
        "default", "workflow", "refunds", 1, closure, by="ann", message="go"
    )

    found = store.publications.get(published.id)
    assert found == published
    assert found.closure == closure.to_json()
    assert Closure.model_validate(found.closure).hash() == found.closure_hash == closure.hash()
    assert (found.action, found.by, found.message, found.version) == ("publish", "ann", "go", 1)
    assert store.publications.live_one("default", "workflow", "refunds") == found
    definition = store.catalog.get("default", "workflow", "refunds")
    assert (definition.published_version, definition.publication_id) == (1, found.id)


def test_publishing_the_same_again_writes_nothing(store: Store):
    store.catalog.save("default", workflow(), by="ann")
    first = store.publications.publish(
        "default", "workflow", "refunds", 1, closure_of("refunds", 1), by="ann"
    )
    again = store.publications.publish(
        "default", "workflow", "refunds", 1, closure_of("refunds", 1), by="bob"
    )
    other = store.publications.publish(
        "default", "workflow", "refunds", 1, closure_of("refunds", 1, new=True), by="bob"
    )
    assert again == first
    assert other.id > first.id
    assert len(store.publications.log("default")) == 2
    assert store.publications.newest_id("default") == other.id


def test_what_was_live_at_a_number_stays_known(store: Store):
    for slug in ("one", "two"):
        store.catalog.save("default", workflow(slug), by="ann")
    assert store.publications.newest_id("default") == 0
    first = store.publications.publish("default", "workflow", "one", 1, closure_of("one", 1), by="ann")
    second = store.publications.publish("default", "workflow", "two", 1, closure_of("two", 1), by="ann")
    third = store.publications.publish("default", "workflow", "one", 1, closure_of("one", 1, new=1), by="ann")
    fourth = store.publications.unpublish("default", "workflow", "two", by="ann")

    def live(at: int | None) -> list[tuple[str, int]]:
        return [(job.slug, job.publication_id) for job in store.publications.live("default", at)]

    assert live(0) == []
    assert live(first.id) == [("one", first.id)]
    assert live(second.id) == [("one", first.id), ("two", second.id)]
    assert live(third.id) == [("one", third.id), ("two", second.id)]
    assert live(fourth.id) == live(None) == [("one", third.id)]
    assert store.publications.live_one("default", "workflow", "two", at=third.id) == second
    assert store.publications.live_one("default", "workflow", "two") is None
    assert store.publications.newest_id("default") == fourth.id
    assert fourth.version == 1
    with pytest.raises(StoreError) as refused:
        store.publications.unpublish("default", "workflow", "two", by="ann")
    assert refused.value.code == "not-published"

    store.catalog.set_active("default", "workflow", "one", False, by="ann")
    assert live(None) == live(first.id) == []
    assert store.publications.live_one("default", "workflow", "one") is None


def test_only_what_is_stored_can_be_published(store: Store):
    with pytest.raises(NotFound):
        store.publications.publish("default", "workflow", "refunds", 1, closure_of("refunds", 1), by="ann")
    store.catalog.save("default", workflow(), by="ann")
    with pytest.raises(NotFound, match="no version 2"):
        store.publications.publish("default", "workflow", "refunds", 2, closure_of("refunds", 2), by="ann")
    with pytest.raises(NotFound):
        store.publications.get(12345)
    assert store.publications.log("default") == []


def test_a_reference_that_was_deleted_meanwhile_stops_the_publication(store: Store):
    store.catalog.save("default", workflow(), by="ann")
    store.catalog.save("default", agent(), by="ann")
    document = AgentSpec(slug="triage", model="offline/echo")
    closure = closure_of("refunds", 1).model_copy(
        update={"agents": {"triage": PinnedAgent(version=1, document=document)}}
    )
    store.catalog.delete("default", "agent", "triage", by="bob")
    with pytest.raises(StoreError, match="agent 'triage'") as refused:
        store.publications.publish("default", "workflow", "refunds", 1, closure, by="ann")
    assert refused.value.code == "reference-deleted"
    assert store.publications.newest_id("default") == 0


def test_a_delete_and_a_publish_at_once_never_leave_a_dangling_reference(store: Store, other_store: Store):
    for round_number in range(5):
        slug = f"flow{round_number}"
        results = race(
            lambda slug=slug: publish_workflow_with_agent(store, slug),
            lambda: other_store.catalog.delete("default", "agent", "triage", by="bob"),
        )
        failed = [result for result in results if result is not None]
        is_live = bool(store.publications.live_one("default", "workflow", slug))
        is_deleted = store.catalog.list("default", "agent") == []
        assert not (is_live and is_deleted), failed
        if is_live:
            store.publications.unpublish("default", "workflow", slug, by="ann")


def _publish_many(url: str, name: str, barrier: Any, results: Any) -> None:
    with open_store(url) as store:
        barrier.wait(30)
        numbers = []
        for index in range(10):
            closure = closure_of("refunds", 1, by=name, index=index)
            numbers.append(
                store.publications.publish("default", "workflow", "refunds", 1, closure, by=name).id
            )
        results.put(numbers)


def test_two_processes_publish_at_once(store: Store, database_url: str):
    store.catalog.save("default", workflow(), by="ann")
    context = forked.context()
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_publish_many, args=(database_url, name, barrier, results))
        for name in ("ann", "bob")
    ]
    for process in processes:
        process.start()
    barrier.wait(60)
    # Whoever looks meanwhile never sees a smaller number appear after a larger one.
    seen: list[int] = []
    deadline = time.monotonic() + 60
    while len(seen) < 20 and time.monotonic() < deadline:
        now = sorted(row.id for row in store.publications.log("default"))
        assert now[: len(seen)] == seen
        seen = now
    numbers = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    assert sorted(numbers[0] + numbers[1]) == seen
    assert all(mine == sorted(mine) for mine in numbers)
    newest = store.publications.live_one("default", "workflow", "refunds")
    assert newest is not None
    assert newest.id == max(seen)


def test_a_thousand_live_jobs_are_listed_quickly(store: Store, database_url: str):
    slugs = [f"flow{index}" for index in range(1000)]
    store.catalog.save_many("default", [workflow(slug) for slug in slugs], by="ann")
    closure = closure_of("flow0", 1).to_json() | {"ballast": "x" * 5_000}
    now = store.catalog.get("default", "workflow", "flow0").created_at
    database = Database(database_url)
    with database.write() as connection:
        # As `publish` writes them, in one go.
        connection.execute(
            publications.insert(),
            [
                {
                    "project": "default",
                    "kind": "workflow",
                    "slug": slug,
                    "version": 1,
                    "action": "publish",
                    "by": "ann",
                    "at": now,
                    "message": "",
                    "closure_hash": "0",
                    "closure": closure,
                }
                for slug in slugs * 2
            ],
        )
    database.close()

    def quickest(call: Callable[[], Any]) -> float:
        durations = []
        for _ in range(10):
            begun = time.perf_counter()
            call()
            durations.append(time.perf_counter() - begun)
        return min(durations)

    live = store.publications.live("default")
    assert len(live) == 1000
    assert store.publications.newest_id("default") == max(job.publication_id for job in live)
    assert quickest(lambda: store.publications.live("default")) < 0.1
    assert quickest(lambda: store.publications.newest_id("default")) < 0.02
    assert quickest(lambda: store.publications.live_one("default", "workflow", "flow7")) < 0.02
