"""The kill matrix: workflows, killed at each of their fault points, and brought to their end by what a daemon would do.

`kill_cases` has the workflows. A plan names the processes that are killed, and where. The harness starts worker
processes one after the other (`kill_worker`): what was killed is reconciled, what failed is retried, gates are decided,
the run claimed and continued, until it has succeeded; then `kill_verdict` looks at it. Leases and claims of killed
processes run out at once, because the harness's clock is ahead.

Fault points are those that an undisturbed run passes; `llm.call.during` and `tool.call.during` are added: the server
has got the call, and kills the worker before it answers.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dagster as dg
from fake_http import FakeHttp
from fake_provider import FakeProvider
from kill_cases import CASES
from kill_databases import Databases
from kill_plans import Kill, Outcome, Plan
from kill_verdict import Killed, Served, Verdict, look_at
from kill_worker import LaterClock
from store_samples import end_leases

from agentmesh_dagster.constants import ENV_DATABASE_URL, ENV_FAULT, ENV_FAULT_LOG, ENV_HTTP_ALLOW
from agentmesh_dagster.orchestration.event_groups import EVENT_GROUP_S
from agentmesh_dagster.orchestration.reconcile import is_dagster_run_over, reconcile
from agentmesh_dagster.records import RunStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store import Store, open_store
from agentmesh_dagster.testing import publish_documents

TESTS = Path(__file__).parent
PROJECT = "default"
MAX_PROCESSES = 30
# Alembic's context is one for the process, and not for many threads.
_migrating = threading.Lock()
# More than a lease, the time that a claim has, and its misses together.
AHEAD_S = 7200.0
KILLED = -9
LAG_S = 0.3


class Workers:
    """The process from which worker processes are forked."""

    def __init__(self) -> None:
        paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        self._server = subprocess.Popen(
            [sys.executable, str(TESTS / "kill_worker.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"
        self.pid: int | None = None
        """Of the worker that is at work."""

    def run(self, job: dict[str, Any]) -> int:
        """Runs a worker to its end; its exit code, or -9 where it was killed."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        self.pid = int(self._line())
        try:
            return int(self._line())
        finally:
            self.pid = None

    def kill_at_work(self) -> None:
        """Kills the worker that is at work."""
        while self.pid is None:  # its number is on the way
            time.sleep(0.001)
        os.kill(self.pid, 9)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the process that starts the workers has ended"
        return line.strip()


RESOURCES = """\
from pathlib import Path

from agentmesh_dagster import AgentMesh, Endpoint

agentmesh = AgentMesh.of_project(Path(__file__).parent, endpoints={{"openai": Endpoint(api_base={!r})}})
"""


class Lane:
    """Carries out plans one after the other, with servers of its own. A context manager."""

    def __init__(self, databases: Databases, folder: Path) -> None:
        self.databases = databases
        self.folder = folder
        self.provider = FakeProvider(default={"text": "hello"})
        self.tools = FakeHttp()
        self._stack = ExitStack()
        self._made: dict[str, int] = {}

    def __enter__(self) -> Lane:
        self.folder.mkdir(parents=True)
        self._stack.enter_context(self.provider)
        self._stack.enter_context(self.tools)
        self.workers = Workers()
        self._stack.callback(self.workers.close)
        self._home = self.folder / "dagster-home"
        self._home.mkdir()
        _write_dagster_yaml(self._home)
        with dg.DagsterInstance.from_config(str(self._home)) as instance:
            # Makes the tables, so that the copies need not.
            instance.get_runs(limit=1)
            instance.all_logs("none")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def carry_out(self, plan: Plan) -> Outcome:
        """Carries out a plan, and looks at what it came to."""
        outcome = Outcome(plan, self.databases.name)
        began = time.monotonic()
        name = f"{self.folder.name}-{plan.variant}"
        if name not in self._made:
            with _migrating:
                url = self.databases.make(name)
            with open_store(url) as store:
                published = publish_documents(store, CASES[plan.variant].documents(self.tools))
            # The last workflow is the one that runs; what it calls stands before it.
            self._made[name] = [p.id for p in published if p.kind == "workflow"][-1]
        folder = self.folder / uuid.uuid4().hex
        folder.mkdir()
        (folder / "resources").mkdir()
        (folder / "resources" / "__init__.py").write_text(RESOURCES.format(self.provider.base_url))
        shutil.copytree(self._home, folder / "home")
        _write_dagster_yaml(folder / "home")
        log = folder / "log"
        try:
            with (
                self.databases.copied(name) as url,
                open_store(url) as store,
                dg.DagsterInstance.from_config(str(folder / "home")) as instance,
            ):
                scenario = _Scenario(self, outcome, folder, url, store, instance)
                scenario.drive(self._made[name])
                scenario.verify()
        except Exception:  # noqa: BLE001 - one plan that goes wrong does not end the matrix
            outcome.problems.append(traceback.format_exc())
        if outcome.problems and log.exists():
            outcome.problems.append(log.read_text(errors="replace")[-6000:])
        shutil.rmtree(folder)
        outcome.seconds = time.monotonic() - began
        return outcome


def _write_dagster_yaml(home: Path) -> None:
    # One file for the events of all runs: a file for each would be made anew in each process.
    (home / "dagster.yaml").write_text(
        "telemetry: {enabled: false}\n"
        "event_log_storage:\n"
        "  module: dagster._core.storage.event_log\n"
        "  class: ConsolidatedSqliteEventLogStorage\n"
        f"  config: {{base_dir: {home / 'events'}}}\n"
    )


class _Scenario:
    """One plan under way."""

    def __init__(
        self,
        lane: Lane,
        outcome: Outcome,
        folder: Path,
        url: str,
        store: Store,
        instance: dg.DagsterInstance,
    ) -> None:
        self.lane, self.outcome, self.folder = lane, outcome, folder
        self.url, self.store, self.instance = url, store, instance
        self.number = 0
        self.began_at: list[float] = []
        """When the processes began, by `time.monotonic()`."""
        self.killed: list[Killed] = []
        self._calls = CASES[outcome.plan.variant].calls
        self._is_concurrent = CASES[outcome.plan.variant].is_concurrent
        self._served = Served(lane.provider, lane.tools)

    def drive(self, publication_id: int) -> None:
        kills = list(self.outcome.plan.kills)
        while (step := self._next_step(publication_id)) is not None:
            self.number += 1
            if self.number > MAX_PROCESSES:
                raise AssertionError(f"{MAX_PROCESSES} processes did not bring the run to its end")
            phase, arguments = step
            kill = kills.pop(0) if kills and self._is_due(kills[0], phase) else None
            self.outcome.phases.append(phase)
            self.began_at.append(time.monotonic())
            code = self._process(phase, arguments, kill)
            if kill is not None and code == 0 and self._may_differ:
                self.outcome.missed = True
            elif code != (0 if kill is None else KILLED) or (kill is not None and kill.phase != phase):
                expected = "its end" if kill is None else f"a kill at {kill.point} of {kill.phase}"
                raise AssertionError(
                    f"process {self.number} ({phase}) ended with {code} in place of {expected}"
                )
            elif kill is not None:
                self.outcome.phases[-1] += " (killed)"
                runs = self.store.runs.list(PROJECT)
                steps = self.store.runs.steps(runs[0].id) if runs else []
                self.killed.append(Killed(self.number, look_at(self._calls, steps)))
        if kills and not self._may_differ:
            raise AssertionError(f"these processes never came: {list(map(str, kills))}")
        self.outcome.missed |= bool(kills)

    @property
    def _may_differ(self) -> bool:
        """Whether the processes from here on may be others than those that the plan was made from."""
        return self._is_concurrent and bool(self.killed)

    def _is_due(self, kill: Kill, phase: str) -> bool:
        if self._may_differ:
            return kill.process <= self.number and kill.phase == phase
        return kill.process == self.number

    def _process(self, phase: str, arguments: dict[str, Any], kill: Kill | None) -> int:
        passed = self.folder / f"passed-{self.number}"
        passed.touch()
        environment = {
            "DAGSTER_HOME": str(self.folder / "home"),
            ENV_DATABASE_URL: self.url,
            ENV_HTTP_ALLOW: "127.0.0.1",
            ENV_FAULT_LOG: str(passed),
            ENV_FAULT: "",
        }
        if kill is not None and ".call.during" in kill.point:
            self._kill_during(kill)
        elif kill is not None:
            environment[ENV_FAULT] = kill.point
        job = {
            "phase": phase,
            "arguments": arguments,
            "environment": environment,
            "folder": str(self.folder),
            "log": str(self.folder / "log"),
            # The log from which Dagster chooses the steps of its retry lags behind, as on a machine with much to do.
            "event_group_s": LAG_S if self.outcome.plan.retry == "rerun" else EVENT_GROUP_S,
        }
        try:
            code = self.lane.workers.run(job)
        finally:
            self.lane.provider.on_request = self.lane.tools.on_call = None
        for point in passed.read_text().split():
            self.outcome.passed.append(Kill(self.number, phase, point))
            if ".call.before#" in point:
                during = point.replace(".call.before#", ".call.during#")
                self.outcome.passed.append(Kill(self.number, phase, during))
        return code

    def _kill_during(self, kill: Kill) -> None:
        number = int(kill.point.partition("#")[2])
        came = itertools.count(1)  # the servers answer in many threads

        def come() -> None:
            if next(came) == number:
                self.lane.workers.kill_at_work()

        if kill.point.startswith("llm."):
            self.lane.provider.on_request = come
        else:
            self.lane.tools.on_call = come

    def _next_step(self, publication_id: int) -> tuple[str, dict[str, Any]] | None:
        """What a daemon would do now, with what people would."""
        ahead_s = AHEAD_S * (self.number + 1)
        self._report_lost_launches()
        end_leases(self.store)
        reconcile(self.store, self.instance, PROJECT, LaterClock(ahead_s))
        runs = self.store.runs.list(PROJECT)
        if not runs:
            return "start", {"publication_id": publication_id}
        (run,) = runs
        if run.status is RunStatus.SUCCEEDED:
            return None
        if run.status is RunStatus.FAILED:
            return self.outcome.plan.retry, {"run_id": run.id}
        if run.status is not RunStatus.WAITING:
            raise AssertionError(f"the reconciler left the run {run.status.value}")
        waits = self.store.waits.list(PROJECT, run_id=run.id, limit=None)
        open_waits = [wait for wait in waits if wait.status is WaitStatus.OPEN]
        unknown = [wait for wait in open_waits if wait.kind is WaitKind.UNKNOWN]
        if unknown:
            # People say first, of all that were cut off, whether they happened.
            return "decide", self._decision(unknown[0])
        if any(wait.status is WaitStatus.DECIDED and wait.used_at is None for wait in waits):
            if not is_dagster_run_over(self.store, self.instance, run, LaterClock(ahead_s)):
                raise AssertionError(
                    "its Dagster run is not over, so that the gate sensor would hold it back"
                )
            return "resume", {"run_id": run.id, "ahead_s": ahead_s}
        if not open_waits:
            raise AssertionError("the run waits for nothing")
        # Gates that wait at once are answered in the opposite order, each with a continuation of its own.
        return "decide", self._decision(max(open_waits, key=lambda wait: wait.step_key))

    def _decision(self, wait: Wait) -> dict[str, Any]:
        if wait.kind is WaitKind.HUMAN:
            return {"wait_id": wait.id, "decision": "approved", "data": None}
        assert wait.kind is WaitKind.UNKNOWN
        call = next(call for call in self._calls if f"{wait.step_key}/".startswith(f"{call.step}/"))
        if self._served.times(call):
            return {"wait_id": wait.id, "decision": "happened", "data": call.answer}
        return {"wait_id": wait.id, "decision": "repeat", "data": None}

    def _report_lost_launches(self) -> None:
        """A Dagster run that was killed before it was bound: whoever started its process sees that it is gone."""
        bound = {name for run in self.store.runs.list(PROJECT) for name in run.dagster_run_ids}
        for dagster_run in self.instance.get_runs():
            if not dagster_run.is_finished and dagster_run.run_id not in bound:
                self.instance.report_run_failed(dagster_run, "its process is gone")

    def verify(self) -> None:
        """Looks whether the run ended right, with exactly one of each."""
        reconcile(self.store, self.instance, PROJECT, LaterClock(AHEAD_S * (self.number + 2)))
        self._report_lost_launches()
        (run,) = self.store.runs.list(PROJECT)
        verdict = Verdict(self.outcome, self._served, self.began_at, self.killed)
        verdict.on_run(self.store, self.instance, run)


class Matrix:
    """All plans on one kind of database, over several lanes at once. A context manager."""

    def __init__(self, databases: Databases, folder: Path, lanes: int) -> None:
        self.databases = databases
        self._lanes = [Lane(databases, folder / f"lane{number}") for number in range(lanes)]
        self._stack = ExitStack()

    def __enter__(self) -> Matrix:
        for lane in self._lanes:
            self._stack.enter_context(lane)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def carry_out(self, plans: Iterable[Plan], until: float | None = None) -> list[Outcome]:
        """Carries out plans, each once, in the order of their ends.

        Args:
            plans: The plans.
            until: By `time.monotonic()`: plans that have not begun then are left out, but for the first of each lane.
        """
        left: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        for plan in plans:
            left.put(plan)
        outcomes: list[Outcome] = []

        def work(lane: Lane) -> None:
            is_first = True
            while is_first or until is None or time.monotonic() < until:
                is_first = False
                try:
                    plan = left.get_nowait()
                except queue.Empty:
                    return
                outcomes.append(lane.carry_out(plan))

        threads = [threading.Thread(target=work, args=(lane,)) for lane in self._lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes
