"""The frozen record in the middle: a publication row becomes what a job is built from."""

from __future__ import annotations

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Publication
from agentmesh_dagster.runtime.session import Pinned
from agentmesh_dagster.specs.closure import Closure


def construct_pinned(publication: Publication) -> Pinned:
    """What the runs of a publication are pinned to.

    Raises:
        DefinitionError: The row is of an `unpublish`, or its closure was written by a newer AgentMesh.
    """
    if publication.closure is None:
        raise DefinitionError(f"publication {publication.id} published nothing", code="not-published")
    if publication.closure.get("format") != 1:
        raise DefinitionError(
            f"publication {publication.id} has closure format {publication.closure.get('format')!r}, and this "
            "AgentMesh reads format 1: upgrade agentmesh-dagster",
            code="closure-format",
        )
    return Pinned(
        project=publication.project,
        kind=publication.kind,
        slug=publication.slug,
        version=publication.version,
        publication=publication.id,
        definition_hash=publication.closure_hash,
        closure=Closure.model_validate(publication.closure),
    )
