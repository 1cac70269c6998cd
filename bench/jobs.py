"""Running a job in this process again and again: ours and the baseline's, each on its own SQLite instance."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from agentmesh_dagster.orchestration.local_run import reconstructable_job
from bench.projects import Project, make_baseline_home, make_project, temporary_folder

# Printing a coloured line per event would cost both sides alike, and says nothing of either.
_QUIET = "CRITICAL"


@dataclass(frozen=True)
class Jobs:
    """A workflow's job and the baseline's, ready to run."""

    project: Project
    instance: dg.DagsterInstance
    ours: Callable[[], dg.ExecuteJobResult]
    baseline: Callable[[], dg.ExecuteJobResult]


@contextmanager
def prepared_jobs(workflow: dict[str, Any], baseline: dg.JobDefinition) -> Iterator[Jobs]:
    """A temporary project with one workflow, and the baseline's job. Each run raises where it fails."""
    with temporary_folder() as folder:
        project = make_project(folder / "project", [workflow])
        home = make_baseline_home(folder / "baseline")
        os.environ.update(project.env, AGENTMESH_CONSOLE_LOG_LEVEL=_QUIET)
        with _instance(project.home) as ours_instance, _instance(home) as baseline_instance:
            slug = workflow["slug"]
            ours_job = reconstructable_job(project.root, project.publications[slug], slug)
            baseline_job = dg.reconstructable(baseline)
            quiet = {"loggers": {"console": {"config": {"log_level": _QUIET}}}}
            yield Jobs(
                project,
                ours_instance,
                lambda: dg.execute_job(ours_job, ours_instance, run_config={}, raise_on_error=True),
                lambda: dg.execute_job(
                    baseline_job, baseline_instance, run_config=quiet, raise_on_error=True
                ),
            )


def _instance(home: Path) -> dg.DagsterInstance:
    return dg.DagsterInstance.from_config(str(home))
