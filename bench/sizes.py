"""How large benchmarks are: as large as their numbers ask for, or as small as they can be (`--smoke`).

A smoke run shows that a benchmark still works. Its numbers mean nothing.
"""

from __future__ import annotations

import os
from typing import Final

SMOKE_VARIABLE: Final = "AGENTMESH_BENCH_SMOKE"
"""Set in the environment, so that the processes that a benchmark starts have the same sizes."""


def sized(full: int, smallest: int) -> int:
    """The size of a measurement, or the least with which the benchmark can run."""
    return smallest if os.environ.get(SMOKE_VARIABLE) else full
