"""Dagster's multiprocess executor, with step processes that are forked from one that has loaded the libraries.

By default Dagster starts each step's process anew: 2 to 3 s of imports. Here a run's first step pays for them, and each
further one takes 0.4 s. The process they are forked from belongs to the run: it has the run's environment, and
ends with it. It loads libraries, never definitions, so that each step sees the project's code as it stands.
"""

from __future__ import annotations

from typing import Any, Final

import dagster as dg

from agentmesh_dagster.orchestration.worker_internals import LIBRARIES

__all__ = ["multiprocess_executor"]

_PRELOADED: Final = (*LIBRARIES, "agentmesh_dagster.orchestration.code_location", "jsonschema")


def _configured(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "start_method": {"forkserver": {"preload_modules": list(_PRELOADED)}}}


multiprocess_executor: Final = dg.multiprocess_executor.configured(
    _configured,
    name="multiprocess",
    config_schema={
        "max_concurrent": dg.Field(
            dg.Noneable(int),
            default_value=None,
            description="How many steps may run at once; by default as many as there are processors.",
        )
    },
)
