"""What an import costs, and what it must not bring along."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from bench.measure import Spread
from bench.probe import load_code_location
from bench.projects import chain_workflow, make_project, temporary_folder
from bench.report import Findings, Line
from bench.sizes import sized

NAME = "imports"
REPETITIONS = sized(7, 1)
TARGET_S = 0.4

_CODE: Final = """
import json, sys, time
began = time.perf_counter()
import agentmesh_dagster
print(json.dumps({"s": time.perf_counter() - began, "litellm": "litellm" in sys.modules}))
"""


def run() -> Findings:
    """Measures."""
    package = [_import_package() for _ in range(REPETITIONS)]
    with temporary_folder() as folder:
        project = make_project(folder / "project", [chain_workflow("bench-chain", 20)])
        location = [load_code_location(project, "bench_chain") for _ in range(REPETITIONS)]
    return Findings(
        lines=(
            _line("`import agentmesh_dagster`", "s", [found["s"] for found in package], TARGET_S),
            _line("import of the code location, after Dagster", "s", [x.import_s for x in location], None),
            _line(
                "LiteLLM imported by either",
                "",
                [float(found["litellm"]) for found in package] + [float(x.litellm) for x in location],
                0,
            ),
        )
    )


def _import_package() -> dict[str, float]:
    said = subprocess.run([sys.executable, "-c", _CODE], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said)


def _line(what: str, unit: str, values: list[float], target: float | None) -> Line:
    return Line(benchmark=NAME, what=what, unit=unit, ours=Spread.of(values), target=target)
