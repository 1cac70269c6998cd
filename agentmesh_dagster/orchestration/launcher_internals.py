"""The private Dagster names of the run launcher, as `dagster_internals` holds those of the executor.

`tests/test_dagster_internals.py` says which one moved, when a Dagster release moves one.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.launcher.base import (
    CheckRunHealthResult,
    LaunchRunContext,
    RunLauncher,
    WorkerStatus,
)
from dagster._core.origin import JobPythonOrigin
from dagster._serdes import ConfigurableClass, ConfigurableClassData, serialize_value

__all__ = [
    "CheckRunHealthResult",
    "ConfigurableClass",
    "ConfigurableClassData",
    "JobPythonOrigin",
    "LaunchRunContext",
    "RunLauncher",
    "WorkerStatus",
    "serialized_reference",
]


def serialized_reference(instance: dg.DagsterInstance) -> str:
    """The Dagster instance as text, from which another process opens it. It may hold passwords."""
    return serialize_value(instance.get_ref())
