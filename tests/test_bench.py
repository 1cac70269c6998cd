"""Each benchmark still runs: at its smallest size, in a process of its own. What it measures is for `make bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS

ROOT = Path(__file__).resolve().parent.parent


# `gates` waits for rounds of two daemons.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_a_benchmark_runs_at_its_smallest_size(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--smoke", "--json", "--only", name],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert lines
    assert {line["benchmark"] for line in lines} == {name}
    assert all(line["ours"]["count"] >= 1 for line in lines)
