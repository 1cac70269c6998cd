"""A `foreach` over many items: the memory of a fresh process, and whether an item costs more where there are more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench import peak
from bench.inline import Walks, inline, prepared_walks
from bench.measure import Spread, Times, in_turns
from bench.projects import Project, code_node, foreach_workflow, make_project, temporary_folder
from bench.report import Findings, Line, compared
from bench.sizes import sized

NAME: Final = "many"
REPETITIONS: Final = sized(3, 1)
MANY: Final = sized(10_000, 40)
FEW: Final = sized(1_000, 20)
CONCURRENCY: Final = 16
TARGET_MB: Final = 300.0
TARGET_COST: Final = 1.2

_SLUG: Final = "foreach-kilobyte"
_WORKFLOW: Final = foreach_workflow(
    _SLUG, code_node("text", "kilobyte", {"value": "{{ item }}"}), CONCURRENCY
)


def run() -> Findings:
    """Measures."""
    return Findings(lines=(*_memory(), _cost()))


def _memory() -> list[Line]:
    with temporary_folder() as folder:
        project = make_project(folder / "project", [inline(_WORKFLOW)])
        bare = Spread.of([_said_by([str(Path(peak.__file__))], project) for _ in range(REPETITIONS)])
        empty = Spread.of([_peak_mb(project, 0) for _ in range(REPETITIONS)])
        many = [_peak_mb(project, MANY) for _ in range(REPETITIONS)]
    what = f"foreach of {MANY:,}, outputs of 1 KB: peak memory above"
    return [
        _line(f"{what} a run of an empty list", Spread.of([mb - empty.median for mb in many]), TARGET_MB),
        _line(f"{what} a Python that does nothing", Spread.of([mb - bare.median for mb in many]), None),
        _line("peak memory of a run of an empty list", empty, None),
        _line("peak memory of a Python that does nothing", bare, None),
    ]


def _cost() -> Line:
    with prepared_walks([_WORKFLOW]) as walks:
        times = in_turns(lambda: _per_item(walks, MANY), lambda: _per_item(walks, FEW), REPETITIONS)
    what = f"foreach of {MANY:,} against {FEW:,}, outputs of 1 KB, per item"
    return compared(NAME, what, "ms", times, factor=1000, target=TARGET_COST)


def _per_item(walks: Walks, count: int) -> Times:
    walk = walks.run(_SLUG, {"items": list(range(count))}).walk
    return Times(walk.wall_s / count, walk.cpu_s / count)


def _line(what: str, megabytes: Spread, target: float | None) -> Line:
    return Line(benchmark=NAME, what=what, unit="MB", ours=megabytes, target=target)


def _peak_mb(project: Project, items: int) -> float:
    publication = str(project.publications[_SLUG])
    return _said_by(["-m", "bench.peak_run", str(project.root), _SLUG, publication, str(items)], project)


def _said_by(command: list[str], project: Project) -> float:
    said = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **project.env},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return float(said)
