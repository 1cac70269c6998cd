"""What the runs of a session of random kills came to: whether each ended right, with exactly one of each call."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter

import dagster as dg
from random_kill_case import Call, calls, closing_mark, gates, output
from random_kills import PROJECT, Kill, Launched, RandomKills

from agentmesh_dagster.constants import TAG_STATUS
from agentmesh_dagster.records import Run, RunStatus, Step, StepStatus, Wait, WaitKind, WaitStatus

TOKENS = (11, 7)
"""In and out, of each call of the fake model."""

# What `agentmesh/status` may say of a Dagster run that has bound its run, by how Dagster says that it ended.
_AGREED = {
    dg.DagsterRunStatus.SUCCESS: {"succeeded", "waiting"},
    dg.DagsterRunStatus.FAILURE: {"failed"},
    dg.DagsterRunStatus.CANCELED: {"canceled"},
}


class Verdict:
    """Writes what is wrong with a run into its record."""

    def __init__(self, kills: RandomKills, launched: Launched) -> None:
        self._kills, self._launched = kills, launched
        self._wrong = launched.problems.append
        self._group = kills.group(launched)
        self._hits = kills.kills_of([run.run_id for run in self._group])
        # From `time.monotonic()`, by which the servers know when a call came, to the time of the rows.
        self._to_unix = time.time() - time.monotonic()
        self.made_again = 0

    def look(self) -> None:
        """Looks at everything."""
        runs = [
            run
            for run in self._kills.store.runs.list(PROJECT, limit=None)
            if run.input["order"] == self._launched.order
        ]
        if len(runs) != 1:
            self._wrong(f"the launch has {len(runs)} runs: {[run.id for run in runs]}")
            return
        (run,) = runs
        if run.id != self._launched.run_id:
            self._wrong(f"the run has the id {run.id}")
        expected = output(self._launched.workflow, self._launched.order)
        if (run.status, run.output) != (RunStatus.SUCCEEDED, expected):
            self._wrong(f"the run is {run.status.value} with the output {run.output}")
        steps = {step.key: step for step in self._kills.store.runs.steps(run.id)}
        for call in calls(self._launched.workflow, self._launched.order):
            self._on_call(call, steps)
        self._on_other_calls()
        self._on_waits(run)
        self._on_rows(run, list(steps.values()))
        self._on_events(run)
        self._on_dagster_runs(run)

    # Calls

    def _times(self, mark: str) -> list[float]:
        """When a call came, each time that it did, by `time.monotonic()`."""
        of_tools = [seen.at for seen in self._kills.tools.calls if mark in seen.body]
        of_models = [seen.at for seen in self._kills.provider.requests if mark in json.dumps(seen.body)]
        return sorted(of_tools + of_models)

    def _on_call(self, call: Call, steps: dict[str, Step]) -> None:
        times = self._times(call.mark)
        self.made_again += max(0, len(times) - 1)
        if not times:
            self._wrong(f"{call.step} was never called")
            return
        if call.asks and len(times) > 1:
            self._wrong(f"{call.step} was called {len(times)} times, and must not be called twice")
        for before, after in itertools.pairwise(times):
            if not self._hits_between(before, after):
                self._wrong(
                    f"{call.step} was called at {self._clock(before)} and again at {self._clock(after)}, and no worker "
                    "of its run was killed in between"
                )
        rows = [step for step in steps.values() if step.parent_key == call.step and step.kind == call.kind]
        if [row.status for row in rows] != [StepStatus.SUCCEEDED]:
            self._wrong(f"{call.step} has the rows {[(row.key, row.status.value) for row in rows]}")
        for row in rows:
            if (
                row.finished_at is not None
                and times[-1] + self._to_unix > row.finished_at.timestamp() + 0.005
            ):
                self._wrong(f"{call.step} was called after it had finished, at {self._clock(times[-1])}")
        if call.kind == "tool":
            keys = {
                seen.headers.get("idempotency-key")
                for seen in self._kills.tools.calls
                if call.mark in seen.body
            }
            if len(keys) != 1 or None in keys:
                self._wrong(f"{call.step} was called with the idempotency keys {keys}")

    def _hits_between(self, before: float, after: float) -> list[Kill]:
        return [kill for kill in self._hits if before <= kill.at <= after]

    def _on_other_calls(self) -> None:
        """Calls that no run of this workflow makes, and those of its `finally`."""
        order = self._launched.order
        marks = {call.mark for call in calls(self._launched.workflow, order)}
        seen = [seen.body for seen in self._kills.tools.calls]
        seen += [json.dumps(request.body) for request in self._kills.provider.requests]
        ours = [body for body in seen if f" {order}]" in body or f" {order}." in body]
        closing = closing_mark(order)
        strange = [
            body
            for body in ours
            if not any(mark in body for mark in marks)
            and closing not in body
            and ".close-failed]" not in body
        ]
        if strange:
            self._wrong(f"these calls are not of its workflow: {strange}")
        times = self._times(closing)
        if self._launched.workflow == "order" and not times:
            self._wrong("its finally was not run")
        for before, after in itertools.pairwise(times):
            if not self._hits_between(before, after):
                self._wrong(f"its finally was run at {self._clock(before)} and again at {self._clock(after)}")

    # Rows

    def _on_waits(self, run: Run) -> None:
        waits = self._kills.store.waits.list(PROJECT, run_id=run.id, limit=None)
        asked = sorted(wait.step_key for wait in waits if wait.kind is WaitKind.HUMAN)
        if tuple(asked) != gates(self._launched.workflow):
            self._wrong(f"people were asked at {asked}")
        for wait in waits:
            if wait.status is not WaitStatus.DECIDED or wait.used_at is None:
                self._wrong(f"the wait {wait.step_key!r} is {wait.status.value}, used at {wait.used_at}")
            if len(self._kills.store.waits.votes(wait.id)) != 1:
                self._wrong(
                    f"the wait {wait.step_key!r} has {len(self._kills.store.waits.votes(wait.id))} votes"
                )
        self._on_unknown([wait for wait in waits if wait.kind is WaitKind.UNKNOWN])

    def _on_unknown(self, waits: list[Wait]) -> None:
        for step, times in Counter(wait.step_key for wait in waits).items():
            if times > len(self._hits):
                self._wrong(f"{step} was asked about {times} times, and {len(self._hits)} kills hit the run")

    def _on_rows(self, run: Run, steps: list[Step]) -> None:
        bad = {
            step.key: step.status.value
            for step in steps
            if step.status not in (StepStatus.SUCCEEDED, StepStatus.SKIPPED)
            # Of an earlier end that was followed by a retry.
            and not step.key.startswith(("@finally", "@on_failure"))
        }
        if bad:
            self._wrong(f"steps stand as {bad}")
        skipped = {step.key for step in steps if step.status is StepStatus.SKIPPED}
        items = {step.key for step in steps if step.kind == "item"}
        gate = set(gates(self._launched.workflow))
        if skipped != {f"{item}/gate" for item in items} - gate:
            self._wrong(f"skipped are {sorted(skipped)}")
        models = sum(call.kind == "llm" for call in calls(self._launched.workflow, self._launched.order))
        expected = tuple(models * tokens for tokens in TOKENS)
        if (run.input_tokens, run.output_tokens) != expected:
            self._wrong(f"it has used {(run.input_tokens, run.output_tokens)} tokens in place of {expected}")

    def _on_events(self, run: Run) -> None:
        events = self._kills.store.runs.events(run.id, limit=None)
        counts = Counter((event.type, event.step_key) for event in events)
        again = [key for (type_, key), count in counts.items() if type_ == "step.completed" and count > 1]
        if again:
            self._wrong(f"these steps were completed more than once: {again}")
        for type_ in ("run.started", "run.completed"):
            if counts[type_, None] != 1:
                self._wrong(f"{counts[type_, None]} events {type_}")
        lease = self._kills.store.runs.lease(run.id)
        if lease is not None:
            self._wrong(f"a lease was left behind: {lease}")

    # Dagster

    def _on_dagster_runs(self, run: Run) -> None:
        bound = set(run.dagster_run_ids)
        by_id = {dagster.run_id: dagster for dagster in self._group}
        if missing := bound - by_id.keys():
            self._wrong(f"Dagster does not show these of its runs in one group: {sorted(missing)}")
        for dagster in self._group:
            if not dagster.is_finished:
                self._wrong(f"the Dagster run {dagster.run_id} is still {dagster.status.value}")
                continue
            if dagster.run_id not in bound:
                if dagster.status is dg.DagsterRunStatus.SUCCESS:
                    self._wrong(f"the Dagster run {dagster.run_id} is a success, and belongs to no run")
                continue
            says = dagster.tags.get(TAG_STATUS)
            if dagster.job_name != "agentmesh_finalize" and says not in _AGREED[dagster.status]:
                self._wrong(
                    f"the Dagster run {dagster.run_id} is {dagster.status.value}, and AgentMesh says {says}"
                )
        working = [by_id[i] for i in run.dagster_run_ids if i in by_id]
        working = [dagster for dagster in working if dagster.job_name != "agentmesh_finalize"]
        if not working or working[-1].status is not dg.DagsterRunStatus.SUCCESS:
            self._wrong(f"its last Dagster run is {working and working[-1].status}")

    def _clock(self, at: float) -> str:
        return f"{at - self._kills.began:.2f} s"
