"""Random kills under a real `agentmesh dev`: runs are launched, processes killed and gates decided, all by chance.

The harness does what a service manager and an operator do, and no more: it starts again what it killed, reloads the
code location, decides gates, says of calls that were cut off whether they happened, and retries runs that failed for
good. `random_kill_case` has the workflows; `random_kill_verdict` looks at what each run came to. One seed gives one
order of decisions; when exactly they meet the runs depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import dagster as dg
from dagster_server import DevServer, Project, is_alive, parent_of, wait_until
from fake_http import FakeHttp
from fake_provider import FakeProvider
from random_kill_case import calls

from agentmesh_dagster.orchestration.webserver import WebserverError, reload_code_location
from agentmesh_dagster.orchestration.worker_identity import WorkerIdentity
from agentmesh_dagster.records import Run, RunStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store import Store

PROJECT: Final = "default"
CALL_S: Final = 0.25
"""How long each model and tool takes: the longer, the more calls a kill cuts off."""
FANNED: Final = 0.15
"""The share of runs with a process for each step."""
STALLED_S: Final = 180.0
"""How long a run may stand still while all services are there, before it is called lost."""
MAX_OPERATOR_RETRIES: Final = 8

# What is killed, and how often in relation to the others.
ALL_TARGETS: Final[Mapping[str, int]] = {
    "worker": 45,
    "worker and code server": 10,
    "worker and warm server": 12,
    "warm server": 8,
    "code server": 8,
    "daemon": 4,
    "worker and daemon": 4,
    "webserver": 2,
    "everything": 7,
}


@dataclass(frozen=True)
class Kill:
    """Processes that were killed at once."""

    at: float
    """By `time.monotonic()`: when the last of them was dead."""
    target: str
    pids: frozenset[int]
    """What was killed, and the ancestors of each: a step process belongs to its run's worker."""


@dataclass
class Launched:
    """One run, from its launch."""

    workflow: str
    order: str
    """The input, which stands in the request of each call."""
    run_id: str
    """Which the launch answered."""
    state: tuple[Any, ...] = ()
    """How it stood at the last look."""
    stood_s: float = 0.0
    """How long it has stood so while all services were there."""
    retries: int = 0
    """How often the operator retried it."""
    is_done: bool = False
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What a session of random kills does."""

    seed: int
    runs: int
    at_once: int
    """How many runs are under way at a time."""
    mean_calls: float
    """The mean number of calls of models and tools between two kills."""
    targets: Mapping[str, int]
    """What is killed, each with a weight."""
    retried_by_dagster: bool
    """Whether the instance retries failed runs by itself; otherwise the operator does all of it."""


class RandomKills:
    """One session. A context manager that leaves no process behind.

    Args:
        project: With the documents of `random_kill_case` published.
        provider: The models' server.
        tools: The tools' server.
        plan: What is done.
        say: Takes lines that tell how far it is.
    """

    def __init__(
        self,
        project: Project,
        provider: FakeProvider,
        tools: FakeHttp,
        plan: Plan,
        say: Callable[[str], None],
    ) -> None:
        self.project, self.provider, self.tools, self.plan, self._say = project, provider, tools, plan, say
        self.random = random.Random(plan.seed)
        self.server = DevServer(project)
        self.launched: list[Launched] = []
        self.kills: list[Kill] = []
        self.log: list[str] = []
        self.workers: dict[str, set[int]] = {}
        """The processes that have worked on each Dagster run."""
        self.began = time.monotonic()
        self._process_groups: set[int] = set()
        self._groups_of_runs: dict[str, list[dg.DagsterRun]] = {}
        """Dagster runs in their order, by the id of the first."""
        self._due: dict[str, float] = {}
        """When a person decides each wait."""
        self._reload_at: float | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RandomKills:
        try:
            self.tools.on_call = lambda: self.tools.closing.wait(CALL_S) and None
            self._stack.callback(setattr, self.tools, "on_call", None)
            # Last of all what an earlier server has started and the last one does not end.
            self._stack.callback(self._end_all)
            self._stack.callback(self.server.stop)
            self._start()
            self.store: Store = self._stack.enter_context(self.project.open_store())
            home = self.project.folder / ".agentmesh"
            self.instance = self._stack.enter_context(dg.DagsterInstance.from_config(str(home)))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def carry_out(self) -> None:
        """Launches, kills, operates, until all runs have ended or are given up."""
        self._plan_kill()
        next_word = 15.0
        last_turn = self._now()
        while not (len(self.launched) == self.plan.runs and all(run.is_done for run in self.launched)):
            self._look_at_dagster()
            # Only time in which all services are there counts.
            passed_s, last_turn = self._now() - last_turn, self._now()
            if self._reload_at is None:
                for launched in self.launched:
                    launched.stood_s += passed_s
            if self._is_kill_due() and self._at_work():
                self._kill(self._choose_target())
                self._plan_kill()
                last_turn = self._now()
            if self._reload_at is not None and self._now() >= self._reload_at:
                self._reload()
            self._operate()
            self._launch_more()
            if self._now() >= next_word:
                next_word = self._now() + 15
                self._say(self.progress())
            time.sleep(0.1)
        # What is at work even then is seen by the verdict.
        with contextlib.suppress(AssertionError):
            wait_until("nothing is at work in Dagster", self._is_quiet, STALLED_S, every_s=0.5)

    def progress(self) -> str:
        """How far it is, in a line."""
        targets = ", ".join(f"{target} {n}" for target, n in Counter(k.target for k in self.kills).items())
        done = sum(run.is_done for run in self.launched)
        return (
            f"seed {self.plan.seed}, {self._now():.0f} s: {done} of {self.plan.runs} runs ended, "
            f"{len(self.kills)} kills ({targets or 'none'})"
        )

    # Kills

    def _plan_kill(self) -> None:
        """Chooses the moment of the next kill: so many calls from now, and a moment after the last of them.

        Calls tell how far the runs are, however slow the machine is; in that moment a run may begin, wait or end.
        """
        self._kill_after_calls = self._calls() + self.random.expovariate(1 / self.plan.mean_calls)
        self._kill_delay_s = self.random.choice((0.0, self.random.uniform(0, 1), self.random.uniform(0, 8)))
        self._kill_at: float | None = None

    def _is_kill_due(self) -> bool:
        if self._kill_at is None and self._calls() >= self._kill_after_calls:
            self._kill_at = self._now() + self._kill_delay_s
        return self._kill_at is not None and self._now() >= self._kill_at

    def _calls(self) -> int:
        """How many calls the models and the tools have got."""
        return self.provider.count + len(self.tools.calls)

    def _choose_target(self) -> str:
        (target,) = self.random.choices(list(self.plan.targets), list(self.plan.targets.values()))
        return target

    def _kill(self, target: str) -> None:
        if target == "everything":
            self._kill_pids(target, self._processes())
            self._restart()
            return
        chosen: set[int] = set()
        if "worker" in target and (worker := self._choose_worker()) is not None:
            chosen.add(worker)
        if "warm server" in target:
            chosen |= self._warm_servers()
        if "code server" in target:
            chosen |= self._processes("dagster api grpc")
        if "daemon" in target:
            chosen |= self._processes("dagster._daemon")
        if "webserver" in target:
            chosen |= self._processes("dagster_webserver")
        if not chosen:
            return
        self._kill_pids(target, chosen)
        if "daemon" in target or "webserver" in target:
            # `dagster dev` ends when one of them does.
            self._restart()
        elif "code server" in target:
            # For that long nobody notices.
            self._reload_at = self._now() + self.random.uniform(0, 4)

    def _kill_pids(self, target: str, pids: set[int]) -> None:
        with_ancestors = {ancestor for pid in pids for ancestor in _lineage(pid)}
        self._look_at_dagster()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            wait_until(f"process {pid} is gone", lambda pid=pid: not is_alive(pid), 20, every_s=0.01)
        at_work = [f"{run.run_id[:8]} {run.status.value}" for run in self._at_work()]
        self.kills.append(Kill(time.monotonic(), target, frozenset(with_ancestors)))
        self._note(f"killed {target}: {sorted(pids)}; at work were {', '.join(at_work) or 'none'}")

    def _choose_worker(self) -> int | None:
        """The worker of a run at work, or now and then one of its step processes."""
        servers = self._warm_servers()
        workers = sorted(self._processes("agentmesh_dagster.orchestration.warm_server") - servers)
        steps = sorted(self._processes("multiprocessing.forkserver"))
        if steps and (not workers or self.random.random() < 0.3):
            return self.random.choice(steps)
        return self.random.choice(workers) if workers else None

    def _warm_servers(self) -> set[int]:
        """The processes that runs are forked from; the successor that is still loading, too."""
        known = {pid for pids in self.workers.values() for pid in pids}
        found = self._processes("agentmesh_dagster.orchestration.warm_server")
        daemons = self._processes("dagster._daemon")
        return {pid for pid in found if pid not in known and _parent(pid) in daemons}

    def _processes(self, containing: str = "") -> set[int]:
        """The living processes of all groups that were started whose command line contains a text."""
        found: set[int] = set()
        for path in Path("/proc").iterdir():
            if not path.name.isdigit():
                continue
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z" and int(fields[2]) in self._process_groups and containing in words:
                found.add(int(path.name))
        return found

    def _look_at_dagster(self) -> None:
        """Notes which process works on which Dagster run, and which Dagster runs belong together."""
        first_of: dict[str, str] = {}
        self._groups_of_runs = {}
        for run in reversed(self.instance.get_runs()):
            parent = run.tags.get("dagster/parent_run_id", "")
            # Dagster starts another group where a continuation is executed again.
            first = first_of[run.run_id] = first_of.get(parent, run.run_id)
            self._groups_of_runs.setdefault(first, []).append(run)
            if (worker := WorkerIdentity.of_run(run.run_id, run.tags)) is not None:
                self.workers.setdefault(run.run_id, set()).add(worker.pid)

    def _start(self) -> None:
        self.server.start()
        self._process_groups.add(self.server.process_group)

    def _restart(self) -> None:
        """As a service manager does: what is left of the services ends, runs go on, and the services start again."""
        self._note("restarts the services")
        self.server.wait()
        for words in ("dagster_webserver", "dagster._daemon", "dagster code-server", "dagster api grpc"):
            for pid in self._processes(words):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._reload_at = None
        self._start()
        self._note("the services are up")

    def _reload(self) -> None:
        try:
            reload_code_location(self.server.url)
            self._reload_at = None
            self._note("the code location is loaded")
        except WebserverError as error:
            self._note(f"the code location does not load yet: {error}")
            self._reload_at = self._now() + 1

    def _end_all(self) -> None:
        for _ in range(100):
            left = self._processes()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        raise AssertionError(f"these processes do not end: {self._processes()}")

    # The operator

    def _launch_more(self) -> None:
        under_way = sum(not run.is_done for run in self.launched)
        if (
            self._reload_at is not None
            or len(self.launched) == self.plan.runs
            or under_way >= self.plan.at_once
        ):
            return
        workflow = "fanned" if self.random.random() < FANNED else "order"
        order = f"O{len(self.launched):03d}"
        run_id = self.server.launch(workflow, {"order": order})
        self.launched.append(Launched(workflow, order, run_id))
        self._note(f"launched {order} ({workflow}) as {run_id}")

    def _operate(self) -> None:
        rows = {run.input["order"]: run for run in self.store.runs.list(PROJECT, limit=None)}
        for launched in self.launched:
            if not launched.is_done:
                self._look_after(launched, rows.get(launched.order))

    def _look_after(self, launched: Launched, run: Run | None) -> None:
        state = self._state(launched, run)
        if state != launched.state:
            launched.state, launched.stood_s = state, 0.0
        if run is None:
            self._look_after_unbound(launched)
        elif run.status is RunStatus.SUCCEEDED and run.finalized == run.endings:
            launched.is_done = True
            return
        elif run.status is RunStatus.WAITING:
            self._decide(launched, run)
        elif run.status is RunStatus.FAILED:
            self._decide(launched, run)
            # Who has retries left is left to them for a while.
            if launched.stood_s > (2 if run.retries_left == 0 and not self.plan.retried_by_dagster else 40):
                self._retry(launched, run.dagster_run_ids)
        if launched.stood_s > STALLED_S:
            self._give_up(launched, f"it has not moved for {STALLED_S:g} s: {state}")

    def _look_after_unbound(self, launched: Launched) -> None:
        """A launch that has no row yet: where Dagster says that it failed, it is retried."""
        group = self.group(launched)
        last = group[-1] if group else None
        if last is None:
            self._give_up(launched, "Dagster does not know the run that it launched")
        elif last.status in (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED):
            patience_s = 40 if self.plan.retried_by_dagster else 2
            if launched.stood_s > patience_s:
                self._retry(launched, (last.run_id,))

    def _retry(self, launched: Launched, dagster_run_ids: tuple[str, ...]) -> None:
        """Presses 're-execute from failure' on the last Dagster run that worked on it."""
        group = self.group(launched)
        if self._reload_at is not None or not all(run.is_finished for run in group):
            return
        launched.retries += 1
        launched.stood_s = 0.0
        if launched.retries > MAX_OPERATOR_RETRIES:
            self._give_up(launched, f"it was retried {MAX_OPERATOR_RETRIES} times and fails again")
            return
        working = [
            run
            for run in map(self.instance.get_run_by_id, dagster_run_ids)
            if run is not None and run.job_name != "agentmesh_finalize"
        ]
        last = working[-1]
        try:
            again = self.server.reexecute_from_failure(last.run_id)
            self._note(f"retried {launched.order} from {last.run_id[:8]} as {again[:8]}")
        except (AssertionError, OSError) as error:
            self._note(f"{launched.order} cannot be retried from {last.run_id[:8]}: {str(error)[:300]}")

    def _decide(self, launched: Launched, run: Run) -> None:
        for wait in self.store.waits.list(PROJECT, run_id=run.id, statuses=(WaitStatus.OPEN,), limit=None):
            due = self._due.setdefault(wait.id, self._now() + self.random.uniform(0, 3))
            if self._now() < due:
                continue
            try:
                self._answer(launched, wait)
            except AssertionError as error:
                # A kill may have closed it meanwhile; where it stays open, it is tried again.
                self._note(f"{launched.order} {wait.step_key} cannot be decided: {str(error)[:300]}")
                self._due[wait.id] = self._now() + 2

    def _answer(self, launched: Launched, wait: Wait) -> None:
        if wait.kind is WaitKind.HUMAN:
            self.project.agentmesh("approvals", "approve", wait.id, "--as", "anna")
            self._note(f"approved {launched.order} {wait.step_key}")
            return
        assert wait.kind is WaitKind.UNKNOWN, wait
        call = next(
            call
            for call in calls(launched.workflow, launched.order)
            if f"{wait.step_key}/".startswith(f"{call.step}/")
        )
        if any(call.mark in seen.body for seen in self.tools.calls):
            data = json.dumps(call.answer)
            self.project.agentmesh("approvals", "decide", wait.id, "happened", "--data", data, "--as", "olga")
            self._note(f"said that {launched.order} {wait.step_key} happened")
        else:
            self.project.agentmesh("approvals", "decide", wait.id, "repeat", "--as", "olga")
            self._note(f"said that {launched.order} {wait.step_key} did not happen")

    def _give_up(self, launched: Launched, why: str) -> None:
        launched.is_done = True
        launched.problems.append(why)
        self._note(f"gave up {launched.order}: {why}")
        self._say(f"{launched.order}: {why}")

    # What is seen

    def _state(self, launched: Launched, run: Run | None) -> tuple[Any, ...]:
        if run is None:
            return tuple((dagster.run_id, dagster.status.value) for dagster in self.group(launched))
        # A step that ends counts as movement too.
        last = (run.resumed_at, run.started_at, run.steps_executed, run.endings, run.finalized)
        return (run.status.value, run.dagster_run_ids, *last)

    def group(self, launched: Launched) -> list[dg.DagsterRun]:
        """The Dagster runs of a launch, in their order; also those that bound no run."""
        return self._groups_of_runs.get(launched.run_id, [])

    def _at_work(self) -> list[dg.DagsterRun]:
        return [run for group in self._groups_of_runs.values() for run in group if not run.is_finished]

    def _is_quiet(self) -> bool:
        self._look_at_dagster()
        return not self._at_work()

    def kills_of(self, dagster_run_ids: Collection[str]) -> list[Kill]:
        """The kills that hit a process that worked on one of these Dagster runs."""
        pids = {pid for run_id in dagster_run_ids for pid in self.workers.get(run_id, ())}
        return [kill for kill in self.kills if kill.pids & pids]

    def _note(self, line: str) -> None:
        self.log.append(f"{self._now():7.1f} {line}")
        with (self.project.folder / "kills.log").open("a") as file:
            file.write(f"{self.log[-1]}\n")

    def _now(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.began


def _parent(pid: int) -> int | None:
    try:
        return parent_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None


def _lineage(pid: int) -> list[int]:
    """A process and its ancestors."""
    found: list[int] = []
    current: int | None = pid
    while current is not None and current > 1 and current not in found:
        found.append(current)
        current = _parent(current)
    return found


def failure_report(kills: RandomKills, launched: Launched) -> str:
    """All that there is to see of a run: its rows, its Dagster runs."""
    lines = [f"{launched.order} ({launched.workflow}), launched as {launched.run_id}"]
    lines += [f"  {problem}" for problem in launched.problems]
    try:
        rows = [
            run for run in kills.store.runs.list(PROJECT, limit=None) if run.input["order"] == launched.order
        ]
        for run in rows:
            lines.append(f"  run {run.id} {run.status.value} {run.dagster_run_ids} {run.error}")
            lines += [
                f"    {step.key} {step.status.value} attempt {step.attempt} {step.dagster_run_id[:8]} "
                f"{step.started_at:%H:%M:%S.%f}-{step.finished_at and step.finished_at.strftime('%H:%M:%S.%f')} "
                f"{step.error and step.error.get('code')}"
                for step in kills.store.runs.steps(run.id)
                if step.started_at is not None
            ]
            lines += [
                f"    wait {wait.step_key} {wait.kind.value} {wait.status.value} {wait.answer}"
                for wait in kills.store.waits.list(PROJECT, run_id=run.id, limit=None)
            ]
            lines += [
                f"    {event.at:%H:%M:%S.%f} {event.type} {json.dumps(event.payload)[:160]}"
                for event in kills.store.runs.events(run.id, type="run.*")
            ]
        for dagster in kills.group(launched):
            tags = {tag: value for tag, value in dagster.tags.items() if not tag.startswith(".dagster/repo")}
            lines.append(f"  Dagster run {dagster.run_id} {dagster.job_name} {dagster.status.value} {tags}")
            lines += [
                f"    {record.timestamp:.2f} {record.message[:200]}"
                for record in kills.instance.all_logs(dagster.run_id)
                if record.dagster_event is None
                or record.dagster_event.event_type_value.startswith(
                    ("RUN", "PIPELINE", "ENGINE", "STEP_FAIL")
                )
            ]
    except Exception:  # noqa: BLE001 - what can be told is told
        lines.append(traceback.format_exc())
    return "\n".join(lines)
