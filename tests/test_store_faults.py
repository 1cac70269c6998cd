"""The store under kill, fork, lost connections and many processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import psycopg2
import pytest
from sqlalchemy import make_url
from store_samples import a_run, a_step, an_event

from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Entry
from agentmesh_dagster.store import Store, open_store

_WRITER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from store_samples import a_run, a_step, an_event
from agentmesh_dagster.records import Entry
from agentmesh_dagster.store import open_store

async def work(store, worker):
    for index in range(100_000):
        key = f"w{{worker}}-{{index}}"
        events = (an_event(step_key=key), an_event("x", step_key=key))
        await store.journal.record([Entry(step=a_step(key, input_tokens=1), events=events)])
        print(key, flush=True)

async def main():
    store = open_store({url!r})
    await store.journal.bind_run(a_run(), "run-1")
    await asyncio.gather(*(work(store, worker) for worker in range(4)))

asyncio.run(main())
"""


def wait_for(condition: Callable[[], bool], bound_s: float = 30) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_killed_writer_leaves_what_it_reported_and_nothing_by_halves(
    store: Store, database_url: str, tmp_path: Path
):
    reported = tmp_path / "reported"
    program = _WRITER.format(tests=str(Path(__file__).parent), url=database_url)
    with reported.open("w") as output:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=output)
        try:
            wait_for(lambda: reported.stat().st_size > 2000)
        finally:
            process.kill()
            process.wait(30)
    reported_keys = set(reported.read_text().rpartition("\n")[0].split())
    assert len(reported_keys) > 100

    def is_whole() -> bool:
        keys = {step.key for step in store.runs.steps("run-1")}
        events = [event.step_key for event in store.runs.events("run-1")]
        totals = store.runs.get("run-1")
        return (
            reported_keys <= keys
            and sorted(events, key=str) == sorted([*keys, *keys])
            and totals.steps_executed == totals.input_tokens == len(keys)
        )

    # PostgreSQL may still be ending the killed session's last transaction when the first query comes.
    wait_for(is_whole, 10)
    asyncio.run(store.journal.record([Entry(step=a_step("after"))]))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_uses_connections_of_its_own(store: Store, tmp_path: Path):
    asyncio.run(store.journal.bind_run(a_run(), "run-1"))
    asyncio.run(store.journal.record([Entry(step=a_step("parent-1"))]))
    problem = tmp_path / "problem"
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(store.journal.record([Entry(step=a_step("child"), events=(an_event(),))]))
            assert set(asyncio.run(store.journal.steps("run-1"))) == {"parent-1", "child"}
            assert store.catalog.list_projects()
            store.close()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not go on into pytest
            problem.write_text(traceback.format_exc())
            os._exit(1)
    deadline = time.monotonic() + 60
    done = (0, 0)
    while done[0] == 0:
        done = os.waitpid(child, os.WNOHANG)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert done[1] == 0, problem.read_text()
    # The child's end has not closed the parent's sessions.
    asyncio.run(store.journal.record([Entry(step=a_step("parent-2"))]))
    assert set(asyncio.run(store.journal.steps("run-1"))) == {"parent-1", "child", "parent-2"}


def _terminate_sessions(url: str) -> None:
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    connection.close()


def test_sessions_that_the_server_ended_are_made_anew(postgres_url: str):
    with open_store(postgres_url) as store:
        asyncio.run(store.journal.bind_run(a_run(), "run-1"))
        asyncio.run(store.journal.record([Entry(step=a_step("before"))]))
        _terminate_sessions(postgres_url)
        asyncio.run(store.journal.record([Entry(step=a_step("after"), events=(an_event(),))]))
        assert set(asyncio.run(store.journal.steps("run-1"))) == {"before", "after"}
        _terminate_sessions(postgres_url)
        assert len(store.runs.steps("run-1")) == 2


def test_an_outage_is_an_error_that_may_be_tried_again(
    postgres_url: str, postgres_server: Callable[[str], str]
):
    name = make_url(postgres_url).database

    def rename(old: str, new: str) -> None:
        connection = psycopg2.connect(postgres_server("postgres"))
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER DATABASE {old} RENAME TO {new}")
        connection.close()

    with open_store(postgres_url) as store:
        asyncio.run(store.journal.bind_run(a_run(), "run-1"))
        _terminate_sessions(postgres_url)
        rename(name, f"{name}_away")

        async def work() -> list[Any]:
            writes = (store.journal.record([Entry(step=a_step(f"n{index}"))]) for index in range(5))
            return await asyncio.gather(*writes, store.journal.steps("run-1"), return_exceptions=True)

        try:
            errors = asyncio.run(work())
        finally:
            rename(f"{name}_away", name)
        assert [type(error).__mro__[1] for error in errors] == [StoreError] * 6
        assert all(error.code == "unreachable" and error.retryable for error in errors)
        asyncio.run(store.journal.record([Entry(step=a_step("again"))]))
        assert [step.key for step in store.runs.steps("run-1")] == ["again"]


def _record_many(url: str, worker: int, barrier: Any, done: Any) -> None:
    async def work(store: Store) -> None:
        async def chain(line: int) -> None:
            for index in range(20):
                run_id = f"run-{(index + line) % 3}"
                key = f"{worker}-{line}-{index}"
                step = a_step(key, run_id, input_tokens=1)
                event = an_event(run_id=run_id, step_key=key)
                await store.journal.record([Entry(step=step, events=(event,))])

        await asyncio.gather(*(chain(line) for line in range(4)))

    with open_store(url) as store:
        barrier.wait(30)
        asyncio.run(work(store))
    done.put(worker)


def test_processes_write_to_the_same_runs_at_once(store: Store, database_url: str):
    async def bind() -> None:
        for index in range(3):
            await store.journal.bind_run(a_run(f"run-{index}"), f"run-{index}")

    asyncio.run(bind())
    context = forked.context()
    barrier, done = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_record_many, args=(database_url, worker, barrier, done))
        for worker in range(3)
    ]
    for process in processes:
        process.start()
    barrier.wait(60)
    # A follower asks again and again for what came after the last event it saw.
    followed: list[str] = []
    last: str | None = None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        alive = any(process.is_alive() for process in processes)
        for event in store.runs.events("run-1", after=last):
            followed.append(event.id)
            last = event.id
        if not alive:
            break
    assert sorted(done.get(timeout=30) for _ in processes) == [0, 1, 2]
    for process in processes:
        process.join(30)
    assert sum(store.runs.get(f"run-{index}").input_tokens for index in range(3)) == 240
    assert sum(len(store.runs.steps(f"run-{index}")) for index in range(3)) == 240
    assert followed == [event.id for event in store.runs.events("run-1")]
