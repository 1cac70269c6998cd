"""A run from a fresh process: what a person at the command line waits for."""

from __future__ import annotations

from pathlib import Path

from bench import baseline
from bench.measure import in_turns, time_process
from bench.projects import chain_workflow, make_baseline_home, make_project, temporary_folder
from bench.report import Findings, compared
from bench.sizes import sized

NAME = "cold"
REPETITIONS = sized(5, 1)
TARGET = 1.0


def run() -> Findings:
    """Measures."""
    file = Path(baseline.__file__)
    with temporary_folder() as folder:
        project = make_project(folder / "project", [chain_workflow("bench-chain", baseline.CHAIN_LENGTH)])
        home = make_baseline_home(folder / "baseline")
        ours = ["-m", "agentmesh_dagster", "run", "workflow", "bench-chain"]
        theirs = ["-m", "dagster", "job", "execute", "-f", str(file), "-a", "chain_of_ops"]
        times = in_turns(
            lambda: time_process(ours, project.root, project.env),
            lambda: time_process(theirs, home, {**project.env, "DAGSTER_HOME": str(home)}),
            REPETITIONS,
        )
    what = "cold `agentmesh run` of the chain"
    return Findings(lines=(compared(NAME, what, "s", times, factor=1, target=TARGET),))
