"""The private Dagster names of the gate sensor, as `dagster_internals` holds those of the executor.

`tests/test_dagster_internals.py` says which one moved, when a Dagster release moves one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import dagster as dg
from dagster._core.definitions.target import AutomationTarget

__all__ = ["is_stopping", "location_name", "sensor_timeout_s", "sensor_workers", "set_targets"]

_TERMINATION_THREAD: Final = "grpc-server-termination"
_TIMEOUTS: Final = ("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "DAGSTER_GRPC_TIMEOUT_SECONDS")
_DEFAULT_TIMEOUT_S: Final = 60.0
_DEFAULT_WORKERS: Final = 5


def set_targets(sensor: dg.SensorDefinition, jobs: Sequence[str]) -> None:
    """Lets a sensor request runs of these jobs, by their names.

    A sensor takes several jobs only as objects, and those would have to be built.
    """
    sensor._targets = [AutomationTarget(job) for job in jobs]  # pyright: ignore[reportPrivateUsage]


def is_stopping() -> bool:
    """Whether this process's code server was asked to stop, as when the code location is loaded anew.

    It waits for the calls that it has taken on, so that a tick which ends early lets it go. A process without a code
    server is never asked.
    """
    if not threading.main_thread().is_alive():
        return True
    for thread in threading.enumerate():
        if thread.name == _TERMINATION_THREAD:
            # It waits for the server's termination event, the first of its arguments, and then for the calls.
            arguments: Any = getattr(thread, "_args", None) or ()
            return any(event.is_set() for event in arguments[:1] if isinstance(event, threading.Event))
    return False


def sensor_workers(instance: dg.DagsterInstance) -> int:
    """How many sensors the daemon of an instance evaluates side by side; 1 where it uses no threads."""
    settings: Any = instance.get_settings("sensors") or {}
    if not settings.get("use_threads"):
        return 1
    # Dagster gives a number that is missing to the thread pool, which then takes at least five.
    return int(settings.get("num_workers") or _DEFAULT_WORKERS)


def sensor_timeout_s() -> float:
    """How long the daemon waits for a tick: what the environment says, which code servers and daemon mostly share."""
    stated = next((value for name in _TIMEOUTS if (value := os.environ.get(name))), None)
    return float(stated) if stated is not None and stated.isdecimal() else _DEFAULT_TIMEOUT_S


def location_name(context: dg.SensorEvaluationContext) -> str | None:
    """The name of the code location in the workspace; None outside of a code server."""
    origin = context.code_location_origin
    return None if origin is None else origin.location_name
