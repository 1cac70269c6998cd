"""The publication log: what became live, and what ceased to be. Rows are only ever added."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import Connection, Row, RowMapping, and_, func, insert, select, tuple_

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound, StoreError
from agentmesh_dagster.records import Json, LiveJob, Publication
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.store.audit import write_audit
from agentmesh_dagster.store.catalog_rows import find_version, is_newest_publication, require_definition
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import definitions, publication_members, publications

_LOG_COLUMNS = tuple(column for column in publications.columns if column.name != "closure")


def load_live(
    connection: Connection, project: str, kind: str, slug: str, at: int | None = None
) -> Publication | None:
    """The live row of one definition with its closure; None where none is."""
    row = _newest_row(connection, project, kind, slug, at)
    if row is None or row["action"] != "publish":
        return None
    is_offered = connection.execute(
        select(definitions.c.id).where(
            definitions.c.project == project,
            definitions.c.kind == kind,
            definitions.c.slug == slug,
            definitions.c.is_active,
            definitions.c.archived_at.is_(None),
        )
    ).first()
    return _record(row) if is_offered is not None else None


class Publications:
    """Publishes. Within a project numbers grow in the order in which the rows became visible."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def publish(
        self,
        project: str,
        kind: str,
        slug: str,
        version: int,
        closure: Closure,
        *,
        by: str,
        message: str = "",
    ) -> Publication:
        """Makes a version live, with all that it reaches; what is live already in this form stays, and is returned.

        Raises:
            NotFound: There is no such definition or version.
            StoreError: Something in the closure was deleted meanwhile (code `reference-deleted`).
        """
        digest = closure.hash()
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            definition = require_definition(connection, project, kind, slug)
            find_version(connection, definition, version)
            live = _newest_row(connection, project, kind, slug, None)
            if (
                live is not None
                and live["action"] == "publish"
                and live["version"] == version
                and live["closure_hash"] == digest
            ):
                return _record(live)
            members = _members(closure)
            _refuse_deleted(connection, project, kind, slug, members)
            number = write_publication(
                connection,
                self._clock,
                project,
                kind,
                slug,
                version=version,
                action="publish",
                by=by,
                message=message,
                closure=closure.to_json(),
                closure_hash=digest,
            )
            connection.execute(
                insert(publication_members),
                [
                    {"publication_id": number, "kind": member[0], "slug": member[1], "version": pinned}
                    for member, pinned in members.items()
                ],
            )
            return self._get(connection, number)

    def unpublish(self, project: str, kind: str, slug: str, *, by: str, message: str = "") -> Publication:
        """Ends what is live; returns the row that says so.

        Raises:
            NotFound: There is no such definition.
            StoreError: It is not published (code `not-published`).
        """
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            require_definition(connection, project, kind, slug, archived=True)
            live = _newest_row(connection, project, kind, slug, None)
            if live is None or live["action"] != "publish":
                raise StoreError(f"the {kind} {slug!r} is not published", code="not-published")
            number = write_publication(
                connection,
                self._clock,
                project,
                kind,
                slug,
                version=live["version"],
                action="unpublish",
                by=by,
                message=message,
            )
            return self._get(connection, number)

    def get(self, number: int) -> Publication:
        """The row of that number, with its closure.

        Raises:
            NotFound: There is none.
        """
        with self._database.read() as connection:
            return self._get(connection, number)

    def newest_id(self, project: str) -> int:
        """The number of the project's newest row; 0 where nothing was ever published."""
        query = select(func.coalesce(func.max(publications.c.id), 0)).where(publications.c.project == project)
        with self._database.read() as connection:
            return connection.execute(query).scalar_one()

    def live(self, project: str, at: int | None = None, *, include_withdrawn: bool = False) -> list[LiveJob]:
        """What is live, by kind and slug; without closures.

        Args:
            project: The project's slug.
            at: As the log stood at this publication number; None for now.
            include_withdrawn: Whether those are told too that are inactive or deleted now: a run that has started goes
                on with what it started with.
        """
        query = (
            select(
                publications.c.id,
                publications.c.kind,
                publications.c.slug,
                publications.c.version,
                publications.c.closure_hash,
            )
            .select_from(definitions)
            .join(publications, is_newest_publication(at))
            .where(
                definitions.c.project == project,
                publications.c.action == "publish",
            )
            .order_by(definitions.c.kind, definitions.c.slug)
        )
        if not include_withdrawn:
            query = query.where(definitions.c.is_active, definitions.c.archived_at.is_(None))
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [
            LiveJob(
                publication_id=number,
                project=project,
                kind=kind,
                slug=slug,
                version=version,
                closure_hash=digest,
            )
            for number, kind, slug, version, digest in rows
        ]

    def live_one(self, project: str, kind: str, slug: str, at: int | None = None) -> Publication | None:
        """The live row of one definition with its closure, by the rule of `live`; None where none is."""
        with self._database.read() as connection:
            return load_live(connection, project, kind, slug, at)

    def log(
        self, project: str, kind: str | None = None, slug: str | None = None, *, limit: int | None = None
    ) -> list[Publication]:
        """The rows, the newest first, without closures (`closure` is None)."""
        query = select(*_LOG_COLUMNS).where(publications.c.project == project)
        if kind is not None:
            query = query.where(publications.c.kind == kind)
        if slug is not None:
            query = query.where(publications.c.slug == slug)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(publications.c.id.desc()).limit(limit)).mappings().all()
        return [_record(row) for row in rows]

    def _get(self, connection: Connection, number: int) -> Publication:
        row = connection.execute(select(publications).where(publications.c.id == number)).mappings().first()
        if row is None:
            raise NotFound(f"there is no publication {number}", code="no-publication")
        return _record(row)


def write_publication(
    connection: Connection,
    clock: Clock,
    project: str,
    kind: str,
    slug: str,
    *,
    version: int,
    action: str,
    by: str,
    message: str,
    closure: Json = None,
    closure_hash: str = "",
) -> int:
    """Adds a row, and its audit row; the caller holds the project's lock. Returns its number."""
    inserted = connection.execute(
        insert(publications).values(
            project=project,
            kind=kind,
            slug=slug,
            version=version,
            action=action,
            by=by,
            at=clock.now(),
            message=message,
            closure_hash=closure_hash,
            closure=closure,
        )
    )
    write_audit(
        connection,
        clock,
        project,
        action,
        actor=by,
        entity=f"{kind}/{slug}",
        version=version,
        detail={"message": message} if message else None,
    )
    return int(cast("Row[Any]", inserted.inserted_primary_key)[0])


def live_users(connection: Connection, project: str, kind: str, slug: str) -> list[str]:
    """Who, of what is published and not deleted, reaches a definition: `<kind> '<slug>'`, itself left out."""
    query = (
        select(publications.c.kind, publications.c.slug)
        .select_from(definitions)
        .join(publications, is_newest_publication())
        .join(publication_members, publication_members.c.publication_id == publications.c.id)
        .where(
            definitions.c.project == project,
            publications.c.action == "publish",
            definitions.c.archived_at.is_(None),
            publication_members.c.kind == kind,
            publication_members.c.slug == slug,
            ~and_(publications.c.kind == kind, publications.c.slug == slug),
        )
        .order_by(publications.c.kind, publications.c.slug)
    )
    return [f"{user_kind} {user_slug!r}" for user_kind, user_slug in connection.execute(query)]


def _newest_row(
    connection: Connection, project: str, kind: str, slug: str, at: int | None
) -> RowMapping | None:
    query = select(publications).where(
        publications.c.project == project, publications.c.kind == kind, publications.c.slug == slug
    )
    if at is not None:
        query = query.where(publications.c.id <= at)
    return connection.execute(query.order_by(publications.c.id.desc()).limit(1)).mappings().first()


def _members(closure: Closure) -> dict[tuple[str, str], int]:
    """Everything in a closure: kind and slug to version."""
    by_kind = (
        ("agent", closure.agents),
        ("tool", closure.tools),
        ("workflow", closure.workflows),
        ("network", closure.networks),
    )
    return {(kind, slug): pinned.version for kind, group in by_kind for slug, pinned in group.items()}


def _refuse_deleted(
    connection: Connection, project: str, kind: str, slug: str, members: dict[tuple[str, str], int]
) -> None:
    deleted = connection.execute(
        select(definitions.c.kind, definitions.c.slug)
        .where(
            definitions.c.project == project,
            definitions.c.archived_at.is_not(None),
            tuple_(definitions.c.kind, definitions.c.slug).in_(list(members)),
        )
        .order_by(definitions.c.kind, definitions.c.slug)
    ).first()
    if deleted is not None:
        raise StoreError(
            f"the {kind} {slug!r} cannot be published: the {deleted[0]} {deleted[1]!r} that it refers to was deleted",
            code="reference-deleted",
        )


def _record(row: RowMapping) -> Publication:
    return Publication(
        id=row["id"],
        project=row["project"],
        kind=row["kind"],
        slug=row["slug"],
        version=row["version"],
        action=row["action"],
        by=row["by"],
        at=row["at"],
        message=row["message"],
        closure=row.get("closure"),
        closure_hash=row["closure_hash"],
    )
