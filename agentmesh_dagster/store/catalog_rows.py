"""Rows of definitions and versions: finding them, and making records of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, case, insert, select

from agentmesh_dagster.errors import NotFound
from agentmesh_dagster.records import Definition, Json, Version
from agentmesh_dagster.specs.names import job_name
from agentmesh_dagster.specs.problems import nearest
from agentmesh_dagster.store.tables import definitions, publications, versions


def is_newest_publication(at: int | None = None) -> ColumnElement[bool]:
    """Joins each definition to the newest row of its publication log, up to the number `at`.

    One look into the index for each definition, however long the log is, and whatever the planner knows of it.
    """
    log = publications.alias("log")
    newest = select(log.c.id).where(
        log.c.project == definitions.c.project,
        log.c.kind == definitions.c.kind,
        log.c.slug == definitions.c.slug,
    )
    if at is not None:
        newest = newest.where(log.c.id <= at)
    newest = newest.order_by(log.c.id.desc()).limit(1).correlate(definitions)
    return publications.c.id == newest.scalar_subquery()


def select_definitions(project: str) -> Select[Any]:
    """The definitions of a project, with `published_version` and `publication_id` of those that are live."""
    is_live = and_(definitions.c.archived_at.is_(None), publications.c.action == "publish")
    return (
        select(
            definitions,
            case((is_live, publications.c.version)).label("published_version"),
            case((is_live, publications.c.id)).label("publication_id"),
        )
        .select_from(definitions)
        .outerjoin(publications, is_newest_publication())
        .where(definitions.c.project == project)
    )


def find_definition(connection: Connection, project: str, kind: str, slug: str) -> Definition | None:
    """The definition, archived or not; None where there is none."""
    query = select_definitions(project).where(definitions.c.kind == kind, definitions.c.slug == slug)
    row = connection.execute(query).mappings().first()
    return None if row is None else definition_record(row)


def require_definition(
    connection: Connection, project: str, kind: str, slug: str, *, archived: bool = False
) -> Definition:
    """The definition.

    Args:
        connection: In a transaction.
        project: The project's slug.
        kind: One of `constants.KINDS`.
        slug: The definition's.
        archived: Whether an archived one will do.

    Raises:
        NotFound: There is none, or it is archived.
    """
    found = find_definition(connection, project, kind, slug)
    if found is None:
        there = select(definitions.c.slug).where(
            definitions.c.project == project, definitions.c.kind == kind, definitions.c.archived_at.is_(None)
        )
        near = nearest(slug[:120], connection.execute(there).scalars())
        hint = f"did you mean {near!r}?" if near else f"`agentmesh list {kind}` shows what is"
        raise NotFound(f"there is no {kind} {slug!r} in the project {project!r}; {hint}")
    if found.archived_at is not None and not archived:
        raise NotFound(
            f"the {kind} {slug!r} was deleted from the project {project!r}; import it again to bring it back"
        )
    return found


def find_version(connection: Connection, definition: Definition, number: int | None) -> Version:
    """A version of a definition, the newest one where no number is given.

    Raises:
        NotFound: There is none of that number.
    """
    wanted = definition.latest_version if number is None else number
    query = select(versions).where(versions.c.definition_id == definition.id, versions.c.number == wanted)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFound(
            f"the {definition.kind} {definition.slug!r} has no version {wanted}; "
            f"it has 1 to {definition.latest_version}",
            code="no-version",
        )
    return version_record(row, definition)


def definition_record(row: RowMapping) -> Definition:
    """A row of `select_definitions`."""
    return Definition(
        id=row["id"],
        project=row["project"],
        kind=row["kind"],
        slug=row["slug"],
        name=row["name"],
        type=row["type"],
        description=row["description"],
        category=row["category"],
        tags=tuple(row["tags"]),
        is_active=row["is_active"],
        is_template=row["is_template"],
        source_template_id=row["source_template_id"],
        owner=row["owner"],
        created_by=row["created_by"],
        updated_by=row["updated_by"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        archived_at=row["archived_at"],
        revision=row["revision"],
        latest_version=row["latest_version"],
        published_version=row["published_version"],
        publication_id=row["publication_id"],
    )


def version_record(row: RowMapping, definition: Definition) -> Version:
    """A row of `versions`."""
    return Version(
        definition_id=definition.id,
        project=definition.project,
        kind=definition.kind,
        slug=definition.slug,
        number=row["number"],
        document=row["document"],
        hash=row["hash"],
        message=row["message"],
        created_by=row["created_by"],
        created_at=row["created_at"],
    )


def described_by(content: Mapping[str, Json]) -> dict[str, Any]:
    """The columns of a definition that its newest document fills."""
    return {
        "name": content.get("name") or content["slug"],
        "description": content.get("description", ""),
        "category": content.get("category", ""),
        "tags": list(content.get("tags", ())),
        "is_template": bool(content.get("is_template", False)),
    }


def insert_definition(connection: Connection, first: Version, **columns: Any) -> None:
    """Adds the row of a definition whose first version this is."""
    connection.execute(
        insert(definitions).values(
            id=first.definition_id,
            project=first.project,
            kind=first.kind,
            slug=first.slug,
            job_name=job_name(first.kind, first.slug),
            is_active=True,
            created_by=first.created_by,
            updated_by=first.created_by,
            created_at=first.created_at,
            updated_at=first.created_at,
            revision=1,
            **columns,
        )
    )


def insert_version(connection: Connection, version: Version) -> None:
    """Adds the row of a version."""
    connection.execute(
        insert(versions).values(
            definition_id=version.definition_id,
            number=version.number,
            hash=version.hash,
            message=version.message,
            created_by=version.created_by,
            created_at=version.created_at,
            document=version.document,
        )
    )
