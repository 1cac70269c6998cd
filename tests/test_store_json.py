"""JSON and times come back exactly as they were written, on both databases."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from store_samples import NOON, a_run, a_step, an_event

from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Entry, RunStatus
from agentmesh_dagster.store import Store, open_store

VALUES: list[Any] = [
    {"long key": 1, "b": 2, "a": {"zz": 1, "y": 2}},
    "Grüße, 世界, 🙂, \u202bRTL\u202c, \u2028",
    [2**63, -(2**64), 10**40, 0, -1],
    [1.0, 0.1, -0.0, 1e16, 1e23, 1.7976931348623157e308, 5e-324, 1e-7, 123456789.123456789],
    {"nested": [None, {"null": None, "empty": {}, "list": []}], "": "empty key"},
    "nul \0 inside",
    {"nul\0key": ["\0", "\\u0000", "\\\0"]},
    "lone \ud800 surrogate",
    {"kéy": 1, "key": 2},
    False,
    0,
    "",
    [],
    {},
    "12345678901234567890",
    12345678901234567890,
    1.5,
    [[[[[[1]]]]]],
]


def text_of(value: Any) -> str:
    return json.dumps(value)


def round_trip(store: Store, value: Any, run_id: str = "run-1") -> None:
    async def work() -> None:
        await store.journal.bind_run(a_run(run_id, input=value, request_context=value), run_id)
        step = a_step(run_id=run_id, input=value, output=value, error=value, routing_decision=value)
        await store.journal.record([Entry(step=step, events=(an_event(run_id=run_id, payload=value),))])
        await store.journal.finish_run(run_id, RunStatus.SUCCEEDED, at=NOON, output=value, error=value)

    asyncio.run(work())
    run = store.runs.get(run_id)
    [step] = store.runs.steps(run_id)
    [event] = store.runs.events(run_id)
    for stored in (
        run.input, run.request_context, run.output, run.error,
        step.input, step.output, step.error, step.routing_decision, event.payload,
    ):  # fmt: skip
        assert text_of(stored) == text_of(value)


def test_json_comes_back_exactly(store: Store):
    for index, value in enumerate(VALUES):
        round_trip(store, value, f"run-{index}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def test_any_json_comes_back_exactly(database_url: str):
    with open_store(database_url) as store:
        count = iter(range(10_000))

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(JSON)
        def check(value: Any) -> None:
            round_trip(store, value, f"run-{next(count)}")

        check()


def test_none_is_sql_null_and_the_empty_values_are_not(store: Store):
    async def work() -> None:
        await store.journal.bind_run(a_run(), "run-1")
        await store.journal.record([Entry(step=a_step("none", output=None))])
        await store.journal.record([Entry(step=a_step("empty", output={}))])

    asyncio.run(work())
    with store._database.read() as connection:
        found = connection.execute(text("SELECT key FROM steps WHERE output IS NULL")).scalars().all()
    assert found == ["none"]


def test_what_is_no_json_is_refused(store: Store):
    asyncio.run(store.journal.bind_run(a_run(), "run-1"))
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (float("nan"), float("inf"), {"a": {1, 2}}, b"bytes", NOON, cyclic):
        with pytest.raises(StoreError) as refused:
            asyncio.run(store.journal.record([Entry(step=a_step(output=value))]))
        assert refused.value.code == "not-json"
    assert store.runs.steps("run-1") == []


def test_times_are_kept_to_the_microsecond_in_utc(store: Store):
    tokyo = timezone(timedelta(hours=9))
    started = datetime(2026, 3, 1, 21, 0, 0, 1, tzinfo=tokyo)
    finished = datetime(2026, 3, 1, 12, 0, 0, 0, tzinfo=timezone.utc) + timedelta(microseconds=999_999)
    asyncio.run(store.journal.bind_run(a_run(started_at=started), "run-1"))
    asyncio.run(store.journal.record([Entry(step=a_step(started_at=started, finished_at=finished))]))
    [step] = store.runs.steps("run-1")
    for moment, wanted in (
        (step.started_at, started),
        (step.finished_at, finished),
        (store.runs.get("run-1").started_at, started),
    ):
        assert moment is not None
        assert moment == wanted
        assert moment.tzinfo is timezone.utc
    naive = started.replace(tzinfo=None)
    with pytest.raises(Exception, match="needs a zone"):
        asyncio.run(store.journal.record([Entry(step=a_step("other", started_at=naive))]))
