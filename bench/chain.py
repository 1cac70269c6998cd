"""A chain of no-op nodes: what a step costs."""

from __future__ import annotations

from bench import baseline
from bench.jobs import Jobs, prepared_jobs
from bench.measure import in_turns, time_here
from bench.projects import chain_workflow
from bench.report import Findings, compared
from bench.sizes import sized
from bench.threads import cpu_by_part

NAME = "chain"
REPETITIONS = sized(9, 1)
TARGET = 0.7


def run() -> Findings:
    """Measures."""
    nodes = baseline.CHAIN_LENGTH
    with prepared_jobs(chain_workflow("bench-chain", nodes), baseline.chain_of_ops) as jobs:
        times = in_turns(lambda: time_here(jobs.ours), lambda: time_here(jobs.baseline), REPETITIONS)
        line = compared(
            NAME, f"{nodes} no-op nodes, per node", "ms", times, factor=1000 / nodes, target=TARGET
        )
        return Findings(lines=(line,), notes=(*_phases(jobs), *_profile(jobs, nodes)))


def _phases(jobs: Jobs) -> list[str]:
    """Where a run's time goes by its own events."""
    result = jobs.ours()
    events = [
        (entry.timestamp, entry.dagster_event)
        for entry in jobs.instance.all_logs(result.run_id)
        if entry.dagster_event is not None
    ]
    steps = [at for at, event in events if event.step_key is not None]
    first, last = min(at for at, _ in events), max(at for at, _ in events)
    before_ms, in_ms, after_ms = (
        1000 * (until - since)
        for since, until in ((first, min(steps)), (min(steps), max(steps)), (max(steps), last))
    )
    per_step = len(steps) / len(result.get_step_success_events())
    note = (
        f"One run of the chain, by its Dagster events ({per_step:.1f} a step): {before_ms:.0f} ms before the first "
        f"step, {in_ms:.0f} ms in the steps, {after_ms:.0f} ms after the last"
    )
    return [note]


def _profile(jobs: Jobs, nodes: int) -> list[str]:
    runs = sized(5, 1)
    found = cpu_by_part(lambda: [jobs.ours() for _ in range(runs)])
    if found is None:
        return ["No profile: this system has no clocks of threads"]
    total = sum(found.values())
    lines = [f"Profile of the chain: processor time per node, {total / runs / nodes * 1000:.2f} ms in all"]
    lines += [
        f"  {seconds / runs / nodes * 1000:6.2f} ms {seconds / total:4.0%}  {part}"
        for part, seconds in sorted(found.items(), key=lambda item: -item[1])
    ]
    return lines
