"""Many nodes side by side that only wait: what concurrency is worth."""

from __future__ import annotations

from bench import baseline
from bench.jobs import prepared_jobs
from bench.measure import in_turns, time_here
from bench.projects import fan_workflow
from bench.report import Findings, compared
from bench.sizes import sized

NAME = "parallel"
REPETITIONS = sized(5, 1)
TARGET = 0.25


def run() -> Findings:
    """Measures."""
    workflow = fan_workflow("bench-fan", baseline.FAN_WIDTH, baseline.PAUSE_S)
    with prepared_jobs(workflow, baseline.fan_of_ops) as jobs:
        times = in_turns(lambda: time_here(jobs.ours), lambda: time_here(jobs.baseline), REPETITIONS)
    what = f"{baseline.FAN_WIDTH} parallel nodes of {baseline.PAUSE_S * 1000:.0f} ms, a run"
    return Findings(lines=(compared(NAME, what, "s", times, factor=1, target=TARGET),))
