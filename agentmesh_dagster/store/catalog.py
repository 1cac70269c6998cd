"""The catalog: projects, definitions and their immutable versions."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from sqlalchemy import Connection, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import StoreError
from agentmesh_dagster.records import Definition, Json, Project, Version
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.store.audit import write_audit
from agentmesh_dagster.store.catalog_checks import (
    Document,
    canonical,
    check_collision,
    check_revision,
    check_slug,
    check_type,
    supplied_by_code,
)
from agentmesh_dagster.store.catalog_rows import (
    definition_record,
    described_by,
    find_definition,
    find_version,
    insert_definition,
    insert_version,
    require_definition,
    select_definitions,
    version_record,
)
from agentmesh_dagster.store.columns import to_text
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.publications import live_users, write_publication
from agentmesh_dagster.store.tables import definitions, projects, versions


class Catalog:
    """Stores documents that the caller has validated. Every change is one transaction, with its audit rows."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    # --- projects

    def create_project(self, slug: str, name: str = "") -> Project:
        """Adds a project.

        Raises:
            DefinitionError: The slug is none (code `bad-slug`).
            StoreError: It is taken (code `slug-taken`).
        """
        check_slug(slug)
        project = Project(slug=slug, name=name or slug, created_at=self._clock.now())
        with self._database.write() as connection:
            added = connection.execute(
                self._database.insert(projects)
                .values(slug=project.slug, name=project.name, created_at=project.created_at)
                .on_conflict_do_nothing()
            )
            if added.rowcount != 1:
                raise StoreError(f"there is a project {slug!r} already", code="slug-taken")
        return project

    def list_projects(self) -> builtins.list[Project]:
        """All projects, by slug."""
        with self._database.read() as connection:
            rows = connection.execute(select(projects).order_by(projects.c.slug)).mappings().all()
        return [Project(slug=row["slug"], name=row["name"], created_at=row["created_at"]) for row in rows]

    # --- writing

    def save(
        self,
        project: str,
        document: Document,
        *,
        by: str,
        message: str = "",
        expected_revision: int | None = None,
        type: str = "user",
        owner: str | None = None,
        action: str = "edit",
    ) -> Version:
        """Stores a document: a new definition, or a new version of one.

        A document equal to the newest version makes no new version, and that one is returned. One that differs in the
        order of keys is a new version: a model is asked for fields in that order. A deleted definition comes back, with
        its versions.

        Args:
            project: The project's slug.
            document: Validated; a mapping is stored as it is.
            by: Who saves.
            message: Why.
            expected_revision: The revision that was edited; 0 where the definition must be new; None for any.
            type: `user`, or `system` for what code supplies.
            owner: Set where given; a new definition's default is `by`.
            action: The word for the audit: `edit` or `import`.

        Raises:
            StoreError: `edit-conflict`, `system-document`, `slug-taken` (a user's document where code supplies one),
                `name-collision` (another slug makes the same Dagster job), `nul-character`.
            NotFound: There is no such project (code `no-project`).
        """
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            return self._save(
                connection,
                project,
                document,
                by=by,
                message=message,
                expected_revision=expected_revision,
                type=type,
                owner=owner,
                action=action,
            )

    def save_many(
        self,
        project: str,
        documents: Sequence[Document],
        *,
        by: str,
        message: str = "",
        type: str = "user",
        action: str = "import",
    ) -> builtins.list[Version]:
        """Stores many documents in one transaction, all or none; see `save`."""
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            return [
                self._save(connection, project, document, by=by, message=message, type=type, action=action)
                for document in documents
            ]

    def copy(self, project: str, kind: str, slug: str, new: str, *, by: str) -> Version:
        """Stores the newest version of a definition under another slug; a template's copy remembers the template.

        Raises:
            DefinitionError: The new slug is none (code `bad-slug`).
            StoreError: It is taken (code `slug-taken`), or makes another's Dagster job (code `name-collision`).
            NotFound: There is no such definition.
        """
        check_slug(new)
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            source = require_definition(connection, project, kind, slug)
            taken = find_definition(connection, project, kind, new)
            if taken is not None:
                found = "there is" if taken.archived_at is None else "there was, now deleted,"
                raise StoreError(f"{found} a {kind} {new!r} already; choose another slug", code="slug-taken")
            document = {**find_version(connection, source, None).document, "slug": new}
            document.pop("is_template", None)
            version = self._save(
                connection,
                project,
                document,
                by=by,
                message=f"copy of {slug}",
                action="copy",
                detail={"source": slug},
            )
            if source.is_template:
                connection.execute(
                    update(definitions)
                    .where(definitions.c.id == version.definition_id)
                    .values(source_template_id=source.id)
                )
            return version

    def set_active(self, project: str, kind: str, slug: str, active: bool, *, by: str) -> Definition:
        """Lets a definition be launched, or not; its publications stay.

        Raises:
            NotFound: There is no such definition.
        """
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            found = require_definition(connection, project, kind, slug)
            if found.is_active != active:
                self._change(connection, found, by=by, is_active=active)
                self._audit(connection, found, "activate" if active else "deactivate", by)
            return require_definition(connection, project, kind, slug)

    def delete(self, project: str, kind: str, slug: str, *, by: str) -> None:
        """Archives a definition: versions and run history stay, what was live ceases to be.

        Raises:
            StoreError: Something published refers to it (code `still-referenced`), or code supplies it
                (code `system-document`).
            NotFound: There is no such definition.
        """
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            found = require_definition(connection, project, kind, slug)
            if found.type == "system":
                raise supplied_by_code(kind, slug, "deleted")
            users = live_users(connection, project, kind, slug)
            if users:
                raise StoreError(
                    f"the {kind} {slug!r} cannot be deleted: {', '.join(users)} refers to it and is published; "
                    "unpublish that first, or publish a version without it",
                    code="still-referenced",
                    context={"users": users},
                )
            if found.published_version is not None:
                write_publication(
                    connection,
                    self._clock,
                    project,
                    kind,
                    slug,
                    version=found.published_version,
                    action="unpublish",
                    by=by,
                    message="deleted",
                )
            self._change(connection, found, by=by, archived_at=self._clock.now())
            self._audit(connection, found, "delete", by)

    # --- reading

    def get(self, project: str, kind: str, slug: str) -> Definition:
        """The definition, deleted or not (see `archived_at`).

        Raises:
            NotFound: There is none.
        """
        with self._database.read() as connection:
            return require_definition(connection, project, kind, slug, archived=True)

    def get_version(self, project: str, kind: str, slug: str, number: int | None = None) -> Version:
        """A version with its document, the newest one where no number is given.

        Raises:
            NotFound: There is no such definition, or no such version (code `no-version`).
        """
        with self._database.read() as connection:
            return find_version(
                connection, require_definition(connection, project, kind, slug, archived=True), number
            )

    def versions(self, project: str, kind: str, slug: str) -> builtins.list[Version]:
        """All versions, the newest first.

        Raises:
            NotFound: There is no such definition.
        """
        with self._database.read() as connection:
            found = require_definition(connection, project, kind, slug, archived=True)
            query = (
                select(versions)
                .where(versions.c.definition_id == found.id)
                .order_by(versions.c.number.desc())
            )
            return [version_record(row, found) for row in connection.execute(query).mappings()]

    def list(
        self,
        project: str,
        kind: str | None = None,
        *,
        category: str | None = None,
        tag: str | None = None,
        text: str | None = None,
        active: bool | None = None,
        published: bool | None = None,
        template: bool | None = None,
        type: str | None = None,
        include_archived: bool = False,
    ) -> builtins.list[Definition]:
        """The definitions that fit all that is asked, by kind and slug.

        Args:
            project: The project's slug.
            kind: One of `constants.KINDS`.
            category: Exactly this category.
            tag: Has this tag.
            text: Stands in slug, name or description, in any case.
            active: Whether it may be launched.
            published: Whether a version is live.
            template: Whether it is a template.
            type: `user` or `system`.
            include_archived: Deleted ones too.
        """
        query = select_definitions(project).order_by(definitions.c.kind, definitions.c.slug)
        for column, wanted in (
            (definitions.c.kind, kind),
            (definitions.c.category, category),
            (definitions.c.is_active, active),
            (definitions.c.is_template, template),
            (definitions.c.type, type),
        ):
            if wanted is not None:
                query = query.where(column == wanted)
        if not include_archived:
            query = query.where(definitions.c.archived_at.is_(None))
        with self._database.read() as connection:
            found = [definition_record(row) for row in connection.execute(query).mappings()]
        # Here and not in SQL: the databases differ in what they take for the same letter.
        needle = None if text is None else text.casefold()
        return [
            definition
            for definition in found
            if (tag is None or tag in definition.tags)
            and (published is None or (definition.published_version is not None) == published)
            and (
                needle is None
                or any(
                    needle in field.casefold()
                    for field in (definition.slug, definition.name, definition.description)
                )
            )
        ]

    # --- inside a transaction that holds the project's lock

    def _save(
        self,
        connection: Connection,
        project: str,
        document: Document,
        *,
        by: str,
        message: str,
        action: str,
        expected_revision: int | None = None,
        type: str = "user",
        owner: str | None = None,
        detail: Json = None,
    ) -> Version:
        content = canonical(document)
        kind, slug = content["kind"], content["slug"]
        found = find_definition(connection, project, kind, slug)
        check_type(found, kind, slug, type)
        check_revision(found, kind, slug, expected_revision)
        digest = content_hash(content)
        newest = None if found is None else find_version(connection, found, None)
        # The hash does not tell the order of keys; the text does.
        is_same = (
            newest is not None and newest.hash == digest and to_text(newest.document) == to_text(content)
        )
        if newest is not None and is_same and found is not None and found.archived_at is None:
            return newest
        check_collision(connection, project, kind, slug)
        version = Version(
            definition_id=self._clock.new_id() if found is None else found.id,
            project=project,
            kind=kind,
            slug=slug,
            number=1 if found is None else found.latest_version + 1,
            document=content,
            hash=digest,
            message=message,
            created_by=by,
            created_at=self._clock.now(),
        )
        if newest is not None and is_same:
            version = newest
        described = described_by(content) | {"type": type, "latest_version": version.number}
        if found is None:
            insert_definition(connection, version, owner=by if owner is None else owner, **described)
        else:
            if owner is not None:
                described["owner"] = owner
            self._change(connection, found, by=by, archived_at=None, **described)
        if version is not newest:
            insert_version(connection, version)
        write_audit(
            connection,
            self._clock,
            project,
            action,
            actor=by,
            entity=f"{kind}/{slug}",
            version=version.number,
            detail=detail,
        )
        return version

    def _change(self, connection: Connection, found: Definition, *, by: str, **values: object) -> None:
        connection.execute(
            update(definitions)
            .where(definitions.c.id == found.id)
            .values(revision=found.revision + 1, updated_by=by, updated_at=self._clock.now(), **values)
        )

    def _audit(self, connection: Connection, found: Definition, action: str, by: str) -> None:
        write_audit(
            connection,
            self._clock,
            found.project,
            action,
            actor=by,
            entity=f"{found.kind}/{found.slug}",
            version=found.latest_version,
        )
