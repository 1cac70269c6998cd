"""Functions that random graphs call, as `graph_functions:<name>`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from agentmesh_dagster import StepContext

_calls: Counter[str] = Counter()


def fails_first(step: StepContext, failures: int, value: Any) -> Any:
    """Fails as often as told, and gives the value then; counts the calls of each step of each run."""
    _calls[step.idempotency_key] += 1
    if _calls[step.idempotency_key] <= failures:
        raise ValueError(f"{step.step_key} fails on purpose")
    return value
