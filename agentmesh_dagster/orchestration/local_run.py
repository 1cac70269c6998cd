"""Runs a published workflow through Dagster in this process: what `agentmesh run` does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.errors import AgentMeshError, DefinitionError
from agentmesh_dagster.orchestration.agentmesh import AgentMesh, agentmesh_of_folder
from agentmesh_dagster.orchestration.code_location import build_published_job, named_executors
from agentmesh_dagster.orchestration.reconcile import find_run, reconcile_run
from agentmesh_dagster.records import Json, Run
from agentmesh_dagster.scaffold import write_dagster_yaml
from agentmesh_dagster.settings import WORKSPACE_FILE, make_private
from agentmesh_dagster.specs.fields import as_list, as_object
from agentmesh_dagster.specs.names import job_name

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.location_internals import ReconstructableJob


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What became of a run."""

    dagster_run_id: str
    dagster_status: str
    run: Run | None
    """None where the run ended before its first step, as when a resource could not be made."""
    note: str = ""
    """Why its `finally` is left to a daemon, where it is."""

    @property
    def started_run(self) -> Run:
        """The run.

        Raises:
            NeverStarted: The Dagster run ended before its first step.
        """
        if self.run is None:
            raise NeverStarted(f"the Dagster run {self.dagster_run_id} ended as {self.dagster_status}")
        return self.run


class NeverStarted(AgentMeshError):
    """A Dagster run ended before its first step."""

    category = "system"
    default_code = "never-started"


def reconstructable_job(root: Path, publication_id: int, slug: str) -> ReconstructableJob:
    """The job of a workflow, such that a step process can build it too.

    From the project's own code location where there is one, so that its resources and executors hold.
    """
    from agentmesh_dagster.orchestration.location_internals import reconstructable_from_file

    file = code_location_file(root)
    if file is not None:
        return reconstructable_from_file(file, job_name("workflow", slug))
    return dg.build_reconstructable_job(
        "agentmesh_dagster.orchestration.local_run",
        "job_of_publication",
        reconstructable_kwargs={"publication_id": publication_id, "root": str(root)},
    )


def job_of_publication(publication_id: int, root: str) -> dg.JobDefinition:
    """The job of a publication, in a folder without a code location."""
    agentmesh = agentmesh_of_folder(Path(root))
    publication = agentmesh.store().publications.get(publication_id)
    return build_published_job(publication, resource=agentmesh.resource(), executors=named_executors())


def code_location_file(root: Path) -> Path | None:
    """The Python file of the project's code location, as `workspace.yaml` names it; None without that file.

    Raises:
        DefinitionError: `workspace.yaml` names no Python file (code `no-code-location`).
    """
    workspace = root / WORKSPACE_FILE
    if not workspace.is_file():
        return None
    import yaml

    content: Any = yaml.safe_load(workspace.read_text(encoding="utf-8"))
    for target in as_list((as_object(content) or {}).get("load_from")) or []:
        entry: Any = (as_object(target) or {}).get("python_file")
        fields = as_object(entry)
        path: Any = entry if fields is None else fields.get("relative_path")
        if isinstance(path, str):
            return root / path
    raise DefinitionError(
        f"{workspace} loads no 'python_file': `agentmesh run` needs the file of the code location there",
        code="no-code-location",
    )


def run_here(
    agentmesh: AgentMesh,
    job: ReconstructableJob,
    run_config: Mapping[str, Json],
    *,
    instance: dg.DagsterInstance,
    tags: Mapping[str, str],
) -> LocalRun:
    """Executes a job in this process and puts the run row right where the run could not.

    An interrupt (Ctrl-C, SIGTERM) ends the run as canceled.
    """
    result = dg.execute_job(
        job, instance=instance, run_config=dict(run_config), tags=dict(tags), raise_on_error=False
    )
    store = agentmesh.store()
    run = find_run(store, result.run_id)
    if run is not None and not run.status.is_final:
        reconcile_run(store, instance, run, store.runs.lease(run.id), SystemClock())
        run = store.runs.get(run.id)
    dagster_run = instance.get_run_by_id(result.run_id)
    status = dagster_run.status.value if dagster_run else "UNKNOWN"
    return LocalRun(dagster_run_id=result.run_id, dagster_status=status, run=run)


def open_instance(home: Path) -> dg.DagsterInstance:
    """The Dagster instance of a project; its home is made if need be."""
    make_private(home)
    write_dagster_yaml(home)
    os.environ["DAGSTER_HOME"] = str(home)
    return dg.DagsterInstance.get()
