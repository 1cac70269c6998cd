"""Runs start warm: a run launcher that forks each run from a process which has the libraries loaded.

In `dagster.yaml`:

    run_launcher:
      module: agentmesh_dagster.orchestration.launcher
      class: WarmRunLauncher

The process that launches (the daemon, or without a run queue the webserver) starts a warm server
(`orchestration/warm_server.py`) with its first run, and runs are forked from that. The code location is loaded in the
run's process, as with Dagster's own launchers, from what the run says of its origin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import dagster as dg

from agentmesh_dagster.orchestration.launcher_internals import (
    CheckRunHealthResult,
    ConfigurableClass,
    ConfigurableClassData,
    JobPythonOrigin,
    LaunchRunContext,
    RunLauncher,
    WorkerStatus,
    serialized_reference,
)
from agentmesh_dagster.orchestration.warm_client import LaunchFailed, WarmServer
from agentmesh_dagster.orchestration.worker_identity import WorkerIdentity

__all__ = ["DEFAULT_PRELOAD", "LaunchFailed", "WarmRunLauncher"]

DEFAULT_PRELOAD: Final = ("agentmesh_dagster.llm.litellm_client:preload",)
_JOIN_POLL_S: Final = 0.05
_OWN_IMAGE: Final = "DAGSTER_CURRENT_IMAGE"
"""The environment variable in which Dagster's deployments say which image a container was made from."""


class WarmRunLauncher(RunLauncher[dg.DagsterInstance], ConfigurableClass):
    """Launches runs in processes of this machine, forked from one that has the libraries loaded.

    Args:
        preload: What that process loads beyond the libraries of every run, in the background.
        inst_data: Dagster's record of where it was configured.
    """

    def __init__(
        self, preload: tuple[str, ...] = DEFAULT_PRELOAD, inst_data: ConfigurableClassData | None = None
    ) -> None:
        self._inst_data = inst_data
        self._preload = preload
        self._servers: dict[str, WarmServer] = {}
        self._launched: set[str] = set()
        super().__init__()

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> Any:
        return {
            "preload": dg.Field(
                [str],
                default_value=list(DEFAULT_PRELOAD),
                description="What the process that runs are forked from loads beyond the libraries of every run: "
                "'module', or 'module:function' to call. Libraries only, never definitions.",
            )
        }

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]
    ) -> WarmRunLauncher:
        return cls(preload=tuple(config_value["preload"]), inst_data=inst_data)

    def launch_run(self, context: LaunchRunContext) -> None:
        """Forks the run's process.

        Raises:
            LaunchFailed: Its code cannot be loaded by a process of this machine, or no process can be started.
        """
        run = context.dagster_run
        executable = _executable(run.run_id, context.job_code_origin)
        # Atomic, for the queue may launch from several threads.
        server = self._servers.setdefault(executable, WarmServer(executable, self._preload))
        server.start_run(serialized_reference(self._instance), run.run_id)
        self._launched.add(run.run_id)

    def terminate(self, run_id: str) -> bool:
        """Cancels a run, from any process, whoever launched it: its worker asks once a second whether it is canceled.

        Returns:
            Whether the run ends by this: the worker was asked, or is dead and its run reported as canceled.
        """
        if not self.has_instance:
            return False
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        worker = WorkerIdentity.of_run(run.run_id, run.tags)
        if worker is None or worker.is_alive() is not False:
            self._instance.report_run_canceling(run)
            return True
        # It may have ended the run between the two looks.
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceled(run, f"Canceled; its worker, {worker}, was dead.")
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        worker = WorkerIdentity.of_run(run.run_id, run.tags)
        is_alive = worker.is_alive() if worker is not None else None
        if is_alive is False:
            return CheckRunHealthResult(WorkerStatus.FAILED, f"{worker} is dead", run_worker_id=str(worker))
        if is_alive is None:
            # Dagster ends a run whose worker is unknown, and this one may be at work on another machine.
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, f"{worker or 'its worker'} cannot be seen from here"
            )
        return CheckRunHealthResult(WorkerStatus.RUNNING, run_worker_id=str(worker))

    def get_run_worker_debug_info(
        self, run: dg.DagsterRun, include_container_logs: bool | None = True
    ) -> str | None:
        worker = WorkerIdentity.of_run(run.run_id, run.tags)
        return None if worker is None else f"The run's worker is {worker}."

    def join(self, timeout: int = 30) -> None:
        """Waits until the runs that this launcher launched are over.

        Raises:
            TimeoutError: Some are not, after `timeout` seconds.
        """
        if not self.has_instance:
            return
        deadline = time.monotonic() + timeout
        while self._launched:
            self._launched = {run_id for run_id in self._launched if not self._is_over(run_id)}
            if self._launched and time.monotonic() >= deadline:
                raise TimeoutError(f"after {timeout} s these runs are not over: {sorted(self._launched)}")
            time.sleep(_JOIN_POLL_S)

    def _is_over(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        return run is None or run.is_finished

    def dispose(self) -> None:
        """Lets the warm servers end. Runs go on."""
        for server in self._servers.values():
            server.close()


def _executable(run_id: str, origin: JobPythonOrigin | None) -> str:
    """The Python whose process can load the run's code, or why none of this machine can."""
    if origin is None:
        raise LaunchFailed(
            f"run {run_id} does not say where its code is: WarmRunLauncher launches runs of code locations only",
            code="no-code-origin",
        )
    repository = origin.repository_origin
    image = repository.container_image
    if image is not None and image != os.environ.get(_OWN_IMAGE):
        raise LaunchFailed(
            f"the code of run {run_id} is in the container image {image!r}, and WarmRunLauncher runs it in a process "
            f"beside the launcher: set {_OWN_IMAGE} there if that has the same image, or choose another run launcher",
            code="other-image",
        )
    if not os.access(repository.executable_path, os.X_OK):
        raise LaunchFailed(
            f"the code location of run {run_id} runs in {repository.executable_path!r}, which this machine does not "
            "have: run the code server on the launcher's machine, or choose another run launcher",
            code="other-python",
        )
    return repository.executable_path
