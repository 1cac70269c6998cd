"""What a plan of the kill matrix came to: whether its run ended right, with exactly one of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dagster as dg
from fake_http import FakeHttp, SeenCall
from fake_provider import FakeProvider
from kill_cases import CASES, Call
from kill_plans import Outcome

from agentmesh_dagster.records import Run, RunStatus, Step, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.store import Store


@dataclass(frozen=True)
class Seen:
    """How one call stood after a kill."""

    finished: bool
    """Its row is finished: it is never made again."""
    in_flight: int | None
    """The attempt that its row says was under way: it may have been made."""


@dataclass(frozen=True)
class Killed:
    """A process that was killed."""

    number: int
    seen: dict[str, Seen]
    """How each call stood, by the step key of its node."""


def look_at(calls: Iterable[Call], steps: Sequence[Step]) -> dict[str, Seen]:
    """How calls stand by the rows of their run, each under the step key of its node."""
    by_node: dict[str | None, list[Step]] = {}
    for step in steps:
        by_node.setdefault(step.parent_key, []).append(step)
    found: dict[str, Seen] = {}
    for call in calls:
        rows = [row for row in by_node.get(call.step, ()) if row.kind == call.kind]
        found[call.step] = Seen(
            finished=any(row.is_finished for row in rows),
            in_flight=next((row.attempt for row in rows if row.status is StepStatus.RUNNING), None),
        )
    return found


class Served:
    """What the two servers have seen since this was made."""

    def __init__(self, provider: FakeProvider, tools: FakeHttp) -> None:
        self._provider, self._tools = provider, tools
        self._before = (provider.count, len(tools.calls))

    @property
    def tool_calls(self) -> list[SeenCall]:
        return self._tools.calls[self._before[1] :]

    def times(self, call: Call) -> list[float]:
        """When a call came, each time that it did; by `time.monotonic()`."""
        if call.kind == "tool":
            return [seen.at for seen in self.tool_calls if call.mark in seen.body]
        requests = self._provider.requests[self._before[0] :]
        return [request.at for request in requests if call.mark in json.dumps(request.body)]


class Verdict:
    """Looks at the run of a plan, and writes what is wrong into its outcome."""

    def __init__(self, outcome: Outcome, served: Served, began_at: Sequence[float], killed: Sequence[Killed]):
        self._outcome, self._served, self._began_at, self._killed = outcome, served, began_at, killed
        self._case = CASES[outcome.plan.variant]
        self._wrong = outcome.problems.append

    def on_run(self, store: Store, instance: dg.DagsterInstance, run: Run) -> None:
        """Looks at everything."""
        if (run.status, run.output) != (RunStatus.SUCCEEDED, self._case.output):
            self._wrong(f"the run is {run.status.value} with the output {run.output}")
        for call in self._case.calls:
            self._on_call(call)
        self._on_idempotency_keys()
        self._on_waits(store, store.waits.list(run.project, run_id=run.id, limit=None))
        self._on_rows(run, store.runs.steps(run.id))
        events = Counter((event.type, event.step_key) for event in store.runs.events(run.id, limit=None))
        again = [key for (type_, key), count in events.items() if type_ == "step.completed" and count > 1]
        if again:
            self._wrong(f"these steps were completed more than once: {again}")
        for type_ in ("run.started", "run.completed"):
            if events[type_, None] != 1:
                self._wrong(f"{events[type_, None]} events {type_}")
        lease = store.runs.lease(run.id)
        if lease is not None:
            self._wrong(f"a lease was left behind: {lease}")
        for dagster_run in instance.get_runs():
            if not dagster_run.is_finished:
                self._wrong(f"the Dagster run {dagster_run.run_id} is still {dagster_run.status.value}")
        last = instance.get_run_by_id(run.dagster_run_ids[-1])
        if last is None or last.status is not dg.DagsterRunStatus.SUCCESS:
            self._wrong(f"the last Dagster run is {last and last.status}")

    def _attempts_cut_off(self, call: Call) -> int:
        """How many attempts at a call were on record as under way when a process was killed."""
        return len({killed.seen[call.step].in_flight for killed in self._killed} - {None})

    def _on_call(self, call: Call) -> None:
        times = self._served.times(call)
        makers = Counter(sum(began <= at for began in self._began_at) for at in times)
        unfinished = {killed.number for killed in self._killed if not killed.seen[call.step].finished}
        if call.asks:
            self._outcome.cut_off += self._attempts_cut_off(call)
        else:
            self._outcome.cut_off += len(unfinished & makers.keys())
        self._outcome.made_again += max(0, len(times) - 1)
        if not times:
            self._wrong(f"{call.step} was never called")
        if call.asks and len(times) > 1:
            self._wrong(f"{call.step} was called {len(times)} times, and must not be called twice")
        if makers and max(makers.values()) > 1:
            self._wrong(f"{call.step} was called twice by one process: {dict(makers)}")
        for maker in sorted(makers)[:-1]:
            # A call that comes again must have been cut off where it came before.
            if maker not in unfinished:
                self._wrong(
                    f"{call.step} was called again after process {maker}, and had not been cut off there"
                )
        for killed in self._killed:
            later = [maker for maker in makers if maker > killed.number]
            if killed.seen[call.step].finished and later:
                self._wrong(
                    f"{call.step} was finished when process {killed.number} was killed, and called by {later}"
                )

    def _on_idempotency_keys(self) -> None:
        tools = [call for call in self._case.calls if call.kind == "tool"]
        keys: list[str | None] = []
        for call in tools:
            sent = {
                seen.headers.get("idempotency-key")
                for seen in self._served.tool_calls
                if call.mark in seen.body
            }
            if len(sent) != 1:
                self._wrong(f"{call.step} was called with the idempotency keys {sent}")
            keys += sent
        if None in keys or len(set(keys)) != len(tools):
            self._wrong(f"{len(tools)} tool calls have the idempotency keys {keys}")

    def _on_waits(self, store: Store, waits: Sequence[Wait]) -> None:
        unknown = [wait for wait in waits if wait.kind is WaitKind.UNKNOWN]
        expected = sum(self._attempts_cut_off(call) for call in self._case.calls if call.asks)
        self._outcome.asked += len(unknown)
        if len(unknown) != expected:
            self._wrong(
                f"{len(unknown)} times a person was asked whether a tool was called, in place of {expected}"
            )
        if sum(wait.kind is WaitKind.HUMAN for wait in waits) != self._case.gates:
            self._wrong(f"not {self._case.gates} gates: {[wait.kind.value for wait in waits]}")
        for wait in waits:
            if wait.status is not WaitStatus.DECIDED or wait.used_at is None:
                self._wrong(f"the wait {wait.step_key!r} is {wait.status.value}, used at {wait.used_at}")
            if len(store.waits.votes(wait.id)) != 1:
                self._wrong(f"the wait {wait.step_key!r} has {len(store.waits.votes(wait.id))} votes")

    def _on_rows(self, run: Run, steps: Sequence[Step]) -> None:
        skipped = {step.key for step in steps if step.status is StepStatus.SKIPPED}
        if skipped != self._case.skipped:
            self._wrong(f"skipped: {sorted(skipped)}")
        others = {step.key: step.status.value for step in steps if step.key not in skipped}
        if set(others.values()) != {StepStatus.SUCCEEDED.value}:
            self._wrong(f"steps stand as {others}")
        tokens = (run.input_tokens, run.output_tokens)
        if (run.steps_executed, tokens) != (self._case.steps, self._case.tokens):
            self._wrong(f"totals: {run.steps_executed} steps, {tokens} tokens")
