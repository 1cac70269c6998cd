"""The code location: a lazy repository whose jobs are the live publications.

Listing costs one query; a job is compiled when somebody asks for it. The number of the newest publication that the
code server saw is handed to run workers as reconstruction metadata, so that a run is built from what was live when it
was launched; `dagster job execute` has nobody to hand it over, and reads the newest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dagster as dg

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.compiler.job import build_broken_job, build_job
from agentmesh_dagster.compiler.snapshot import construct_pinned
from agentmesh_dagster.constants import METADATA_PUBLICATION
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.orchestration.executor import agentmesh_executor
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.location_internals import handed_metadata, with_metadata
from agentmesh_dagster.records import LiveJob, Publication
from agentmesh_dagster.runtime.registry import node_types
from agentmesh_dagster.specs.names import job_name

_log = logging.getLogger(__name__)


def build_code_location(
    agentmesh: AgentMesh,
    *,
    sensors: Sequence[dg.SensorDefinition] = (),
    schedules: Sequence[dg.ScheduleDefinition] = (),
    jobs: Sequence[dg.JobDefinition] = (),
    default_executor: dg.ExecutorDefinition = agentmesh_executor,
    link: Callable[[LiveJob], str] | None = None,
    name: str = "__repository__",
) -> dg.RepositoryDefinition:
    """A repository with a job for every live workflow of a project.

    Args:
        agentmesh: Database and project.
        sensors: Sensors beside the jobs.
        schedules: Schedules beside the jobs.
        jobs: Further jobs of your own.
        default_executor: The executor of workflows whose settings name none.
        link: Gives the URL of a job's source, shown in the UI.
        name: The repository's name; by default Dagster's own for a location's only one, which its UI leaves out.

    Raises:
        StoreError: The database cannot be read.
        DefinitionError: A job of your own has a workflow's name (code `name-collision`).
    """
    publications = agentmesh.store().publications
    handed = handed_metadata(METADATA_PUBLICATION)
    if handed is None:
        Authoring(agentmesh.store(), agentmesh.project, actor="agentmesh").sync_system()
    number = int(handed) if handed is not None else publications.newest_id(agentmesh.project)
    executors = named_executors(default_executor)
    resource = agentmesh.resource()

    def lazy_job(live: LiveJob) -> Callable[[], dg.JobDefinition]:
        def build() -> dg.JobDefinition:
            try:
                return build_published_job(
                    publications.get(live.publication_id),
                    resource=resource,
                    executors=executors,
                    link=link(live) if link else None,
                )
            except Exception as error:  # noqa: BLE001 - one job must not take the others down
                name = job_name(live.kind, live.slug)
                _log.warning("the job %s cannot be built: %s", name, error)
                return build_broken_job(name, error)

        return build

    found: dict[str, Any] = {
        job_name(live.kind, live.slug): lazy_job(live)
        for live in publications.live(agentmesh.project, at=number, include_withdrawn=handed is not None)
        if live.kind == "workflow"
    }
    for job in jobs:
        if job.name in found:
            raise DefinitionError(
                f"the job {job.name!r} of the code location has the name of a published workflow: rename one",
                code="name-collision",
            )
        found[job.name] = job

    @dg.repository(name=name)  # pyright: ignore[reportUnknownMemberType] - Dagster leaves a type argument open
    def location() -> dict[str, Any]:
        return {
            "jobs": found,
            "sensors": {sensor.name: sensor for sensor in sensors},
            "schedules": {schedule.name: schedule for schedule in schedules},
        }

    return with_metadata(location, {METADATA_PUBLICATION: str(number)})


def build_published_job(
    publication: Publication,
    *,
    resource: dg.ResourceDefinition,
    executors: Mapping[str, dg.ExecutorDefinition],
    link: str | None = None,
) -> dg.JobDefinition:
    """The job of one publication."""
    return build_job(
        construct_pinned(publication),
        node_types=node_types(),
        resource=resource,
        executors=executors,
        link=link,
    )


def named_executors(default: dg.ExecutorDefinition = agentmesh_executor) -> dict[str, dg.ExecutorDefinition]:
    """Executors by the names of `settings.executor`."""
    return {
        "default": default,
        "threads": agentmesh_executor,
        "in_process": dg.in_process_executor,
        "multiprocess": dg.multiprocess_executor,
    }
