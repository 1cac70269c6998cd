"""Dagster's multiprocess executor, with step processes that are forked from one that has loaded the libraries.

By default Dagster starts each step's process anew, mostly imports: a step that does nothing took 2.8 to 4.0 s. Here the
first one pays for them, and each further one took 0.6 to 0.9 s. The process that they are forked from belongs to the
one that executes the run: it has the environment of that one's first step, and ends with it. It loads libraries, never
definitions, so that each step sees the project's code as it stands.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from typing import Any, Final

import dagster as dg

from agentmesh_dagster.orchestration import warm_server
from agentmesh_dagster.orchestration.worker_internals import LIBRARIES

__all__ = ["multiprocess_executor"]

_PRELOADED: Final = (*LIBRARIES, *warm_server.LIBRARIES, "agentmesh_dagster.orchestration.step_parent")
# Python listens on a socket in the folder for temporary files; a socket's path has 107 characters at most.
_LONGEST_FOLDER: Final = 70


def _configured(config: dict[str, Any]) -> dict[str, Any]:
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    if not can_fork or len(tempfile.gettempdir()) > _LONGEST_FOLDER:
        return config
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
