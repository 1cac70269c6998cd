"""Many stored workflows against one: a run must not notice the others."""

from __future__ import annotations

from bench.measure import Spread, Times, in_turns, time_process
from bench.probe import load_code_location
from bench.projects import Project, chain_workflow, make_project, temporary_folder
from bench.report import Findings, Line, compared
from bench.sizes import sized

NAME = "scale"
STORED = sized(1_000, 3)
NODES = 10
REPETITIONS = sized(9, 1)
TARGET = 1.1


def run() -> Findings:
    """Measures."""
    with temporary_folder() as folder:
        # The same slug in both projects, and neither the first nor the last among the many.
        slug = f"flow-{STORED // 2}"
        one = make_project(folder / "one", [chain_workflow(slug, NODES)])
        many = make_project(folder / "many", [chain_workflow(f"flow-{n}", NODES) for n in range(STORED)])
        job = slug.replace("-", "_")
        command = ["-m", "dagster", "job", "execute", "-f", "definitions/code_location.py", "-j", job]

        def executed(project: Project) -> Times:
            return time_process(command, project.root, project.env)

        times = in_turns(lambda: executed(many), lambda: executed(one), REPETITIONS)
        loaded = [load_code_location(many, job) for _ in range(3)]
    execute = compared(
        NAME, f"`dagster job execute`, {STORED} stored against 1", "s", times, factor=1, target=TARGET
    )
    lines = (
        execute,
        _value("jobs built by the import of the code location", "", [x.built_at_import for x in loaded], 0),
        _value("jobs built when one is asked for", "", [len(x.built) for x in loaded], 1),
        _value(f"import of the code location, {STORED} stored", "s", [x.import_s for x in loaded], None),
        _value(f"`agentmesh import --publish` of {STORED} workflows", "s", [many.import_s], None),
    )
    assert all(found.workflows == STORED for found in loaded)
    return Findings(lines=lines)


def _value(what: str, unit: str, values: list[float], target: float | None) -> Line:
    return Line(benchmark=NAME, what=what, unit=unit, ours=Spread.of(values), target=target)
