"""Runs that were launched and that no worker has bound yet: Dagster alone knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.constants import TAG_CLAIM, TAG_PROJECT, TAG_PUBLICATION
from agentmesh_dagster.orchestration.host import run_source, run_trigger
from agentmesh_dagster.orchestration.reconcile import find_run
from agentmesh_dagster.records import Run, RunStatus

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

_ON_THEIR_WAY: Final = (
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
)
_RETRY_TAGS: Final = ("dagster/is_resume_retry", "dagster/retry_number", TAG_CLAIM)
"""A Dagster run with one of them goes on with a run that is known already."""


def launched_runs(store: Store, instance: dg.DagsterInstance, project: str, *, limit: int) -> list[Run]:
    """The launched runs of a project that no worker has bound, as pending runs; the newest first.

    Args:
        store: Knows the bound ones.
        instance: Where the runs were launched.
        project: The project's slug.
        limit: How many unfinished Dagster runs are looked at.
    """
    wanted = dg.RunsFilter(statuses=list(_ON_THEIR_WAY), tags={TAG_PROJECT: project})
    found: list[Run] = []
    for record in instance.get_run_records(wanted, limit=limit):
        run = record.dagster_run
        publication = run.tags.get(TAG_PUBLICATION, "")
        if any(tag in run.tags for tag in _RETRY_TAGS) or not publication.isdecimal():
            continue
        if find_run(store, run.run_id) is not None:
            continue
        of = store.publications.get(int(publication))
        found.append(
            Run(
                id=run.run_id,
                project=project,
                kind=of.kind,
                slug=of.slug,
                version=of.version,
                publication=of.id,
                definition_hash=of.closure_hash,
                source=run_source(run, run.tags),
                triggered_by=run_trigger(run.tags),
                dagster_run_ids=(run.run_id,),
                input=run.run_config,
                status=RunStatus.PENDING,
                queued_at=record.create_timestamp,
            )
        )
    return found
