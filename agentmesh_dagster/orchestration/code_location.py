"""The code location: a lazy repository whose jobs are the live publications, and older ones that runs still need.

Listing costs two queries; a job is compiled when somebody asks for it. The number of the newest publication that the
code server saw is handed to run workers as reconstruction metadata, so that a run is built from what was live when it
was launched; `dagster job execute` has nobody to hand it over, and reads the newest. So are the names of the pinned
jobs, `<job>__p<publication>`, with which runs are continued whose definitions have moved on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.compiler.job import build_broken_job, build_job
from agentmesh_dagster.compiler.snapshot import construct_pinned
from agentmesh_dagster.constants import DECIDE_JOB, FINALIZE_JOB, METADATA_PINNED, METADATA_PUBLICATION
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.orchestration.decide_job import build_decide_job
from agentmesh_dagster.orchestration.executor import agentmesh_executor
from agentmesh_dagster.orchestration.finalize_job import build_finalize_job
from agentmesh_dagster.orchestration.gate_poll import Offered
from agentmesh_dagster.orchestration.gate_sensor import with_offered
from agentmesh_dagster.orchestration.host import AgentMesh, AgentMeshResource, HostedRun
from agentmesh_dagster.orchestration.location_internals import handed_metadata, with_metadata
from agentmesh_dagster.orchestration.run_holder import HoldingExecutor
from agentmesh_dagster.orchestration.step_processes import multiprocess_executor
from agentmesh_dagster.records import LiveJob, Publication
from agentmesh_dagster.runtime.registry import node_types
from agentmesh_dagster.specs.names import job_name, pinned_job_name, pinned_publication

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

_log = logging.getLogger(__name__)


def build_code_location(
    agentmesh: AgentMesh,
    *,
    sensors: Sequence[dg.SensorDefinition] = (),
    schedules: Sequence[dg.ScheduleDefinition] = (),
    jobs: Sequence[dg.JobDefinition] = (),
    default_executor: dg.ExecutorDefinition = agentmesh_executor,
    link: Callable[[LiveJob], str] | None = None,
    pin_retention_d: float = 30,
    decide_job: bool = True,
    name: str = "__repository__",
) -> dg.RepositoryDefinition:
    """A repository with a job for every live workflow of a project, and one for every older publication in use.

    A publication is in use while runs of it are unfinished, and for some time after they have failed. Beside them are
    the jobs `agentmesh_decide`, and `agentmesh_finalize` for `on_failure` and `finally`.

    Args:
        agentmesh: Database and project.
        sensors: Sensors beside the jobs; gate sensors continue runs with its jobs.
        schedules: Schedules beside the jobs.
        jobs: Further jobs of your own.
        default_executor: The executor of workflows whose settings name none.
        link: Gives the URL of a job's source, shown in the UI.
        pin_retention_d: For how many days after the failure of a run the job of its publication stays.
        decide_job: Whether `agentmesh_decide` is offered. Its `by` is what the launcher writes: leave it out where
            whoever may launch jobs may not decide in another's name.
        name: The repository's name; by default Dagster's own for a location's only one, which its UI leaves out.

    Raises:
        StoreError: The database cannot be read.
        DefinitionError: A job of your own has a workflow's name (code `name-collision`).
    """
    publications = agentmesh.store().publications
    handed = handed_metadata(METADATA_PUBLICATION)
    if handed is None:
        Authoring(
            agentmesh.store(), agentmesh.project, actor="agentmesh", deployment=agentmesh.deployment
        ).sync_system()
    number = int(handed) if handed is not None else publications.newest_id(agentmesh.project)
    executors = named_executors(default_executor)
    resource = agentmesh.resource()

    def lazy_job(job: str, publication_id: int) -> Callable[[], dg.JobDefinition]:
        def build() -> dg.JobDefinition:
            try:
                publication = publications.get(publication_id)
                return build_published_job(
                    publication,
                    resource=resource,
                    executors=executors,
                    name=job,
                    link=link(_listed(publication)) if link else None,
                )
            except Exception as error:  # noqa: BLE001 - one job must not take the others down
                _log.warning("the job %s cannot be built: %s", job, error)
                return build_broken_job(job, error)

        return build

    live = {
        job_name(live.kind, live.slug): live
        for live in publications.live(agentmesh.project, at=number, include_withdrawn=handed is not None)
        if live.kind == "workflow"
    }
    pinned = pinned_jobs(agentmesh.store(), agentmesh.project, live.values(), pin_retention_d=pin_retention_d)
    found: dict[str, Any] = {job: lazy_job(job, each.publication_id) for job, each in live.items()}
    found |= {job: lazy_job(job, publication_id) for publication_id, job in pinned.items()}
    if decide_job:
        found[DECIDE_JOB] = lambda: build_decide_job(agentmesh)
    found[FINALIZE_JOB] = lambda: build_finalize_job(agentmesh)
    for job in jobs:
        if job.name in found:
            raise DefinitionError(
                f"the job {job.name!r} of the code location has the name of a published workflow, or of a job that "
                "AgentMesh adds: rename one",
                code="name-collision",
            )
        found[job.name] = job

    offered = Offered(
        live={(each.kind, each.slug): (each.closure_hash, job) for job, each in live.items()},
        pinned=pinned,
        finalize=FINALIZE_JOB,
    )
    all_sensors = with_offered(sensors, offered)

    @dg.repository(name=name)  # pyright: ignore[reportUnknownMemberType] - Dagster leaves a type argument open
    def location() -> dict[str, Any]:
        return {
            "jobs": found,
            "sensors": {sensor.name: sensor for sensor in all_sensors},
            "schedules": {schedule.name: schedule for schedule in schedules},
        }

    handed_on = {METADATA_PUBLICATION: str(number), METADATA_PINNED: ",".join(pinned.values())}
    return with_metadata(location, handed_on)


def pinned_jobs(
    store: Store, project: str, live: Collection[LiveJob], *, pin_retention_d: float
) -> dict[int, str]:
    """The pinned jobs of a code location, by publication.

    A run worker offers those that the code server that launched it did. A process that loads a publication which it
    was told by name, as a command does, offers none.
    """
    if handed_metadata(METADATA_PUBLICATION) is not None:
        names = (handed_metadata(METADATA_PINNED) or "").split(",")
        return {number: name for name in names if (number := pinned_publication(name)) is not None}
    hashes = {(each.kind, each.slug): each.closure_hash for each in live}
    failed_since = SystemClock().now() - timedelta(days=pin_retention_d)
    return {
        number: pinned_job_name(job_name(kind, slug), number)
        for number, slug, kind, digest in store.runs.pinned_publications(project, failed_since=failed_since)
        if kind == "workflow" and hashes.get((kind, slug)) != digest
    }


def _listed(publication: Publication) -> LiveJob:
    return LiveJob(
        publication_id=publication.id,
        project=publication.project,
        kind=publication.kind,
        slug=publication.slug,
        version=publication.version,
        closure_hash=publication.closure_hash,
    )


def build_published_job(
    publication: Publication,
    *,
    resource: AgentMeshResource,
    executors: Mapping[str, dg.ExecutorDefinition],
    name: str | None = None,
    link: str | None = None,
) -> dg.JobDefinition:
    """The job of one publication; its name is that of the slug, where none is given."""
    pinned = construct_pinned(publication)

    def held(executor: dg.ExecutorDefinition) -> dg.ExecutorDefinition:
        return HoldingExecutor(executor, HostedRun(agentmesh=resource.agentmesh, pinned=pinned))

    return build_job(
        pinned,
        node_types=node_types(),
        resource=resource,
        executors=executors,
        name=name,
        link=link,
        held=held,
    )


def named_executors(default: dg.ExecutorDefinition = agentmesh_executor) -> dict[str, dg.ExecutorDefinition]:
    """Executors by the names of `settings.executor`."""
    return {
        "default": default,
        "threads": agentmesh_executor,
        "in_process": dg.in_process_executor,
        "multiprocess": multiprocess_executor,
    }
