"""The tables of what people publish, and what all tables share; `tables` has the rest and names all."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from agentmesh_dagster.store.columns import JsonColumn, UtcDateTime

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in columns of the exact type INTEGER, which holds 64 bits there.
serial = BigInteger().with_variant(Integer(), "sqlite")

projects = Table(
    "projects",
    metadata,
    Column("slug", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

definitions = Table(
    "definitions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("project", Text, ForeignKey("projects.slug"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("slug", Text, nullable=False),
    Column("job_name", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("category", Text, nullable=False),
    Column("tags", JsonColumn, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("is_template", Boolean, nullable=False),
    Column("source_template_id", Text, ForeignKey("definitions.id")),
    Column("owner", Text, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("updated_by", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("archived_at", UtcDateTime),
    Column("revision", Integer, nullable=False),
    Column("latest_version", Integer, nullable=False),
    UniqueConstraint("project", "kind", "slug"),
)
Index(
    "ix_definitions_project_kind_updated_at",
    definitions.c.project,
    definitions.c.kind,
    definitions.c.updated_at,
)
# Two slugs that make the same Dagster job cannot both be there; archived ones do not count.
Index(
    "uq_definitions_project_job_name",
    definitions.c.project,
    definitions.c.job_name,
    unique=True,
    sqlite_where=text("archived_at IS NULL"),
    postgresql_where=text("archived_at IS NULL"),
)

versions = Table(
    "versions",
    metadata,
    Column("definition_id", Text, ForeignKey("definitions.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("hash", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("document", JsonColumn, nullable=False),
)

publications = Table(
    "publications",
    metadata,
    Column("id", serial, primary_key=True, autoincrement=True),
    Column("project", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("slug", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("action", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("message", Text, nullable=False),
    Column("closure_hash", Text, nullable=False),
    # Last, so that listing what is live never reads the pages that a closure fills.
    Column("closure", JsonColumn),
    ForeignKeyConstraint(
        ["project", "kind", "slug"], ["definitions.project", "definitions.kind", "definitions.slug"]
    ),
    # A number is never used twice: it names what a code location has loaded.
    sqlite_autoincrement=True,
)
Index(
    "ix_publications_project_kind_slug_id",
    publications.c.project,
    publications.c.kind,
    publications.c.slug,
    publications.c.id,
)
Index("ix_publications_project_id", publications.c.project, publications.c.id)

publication_members = Table(
    "publication_members",
    metadata,
    Column("publication_id", serial, ForeignKey("publications.id", ondelete="CASCADE"), primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("slug", Text, primary_key=True),
    Column("version", Integer, nullable=False),
)
Index(
    "ix_publication_members_kind_slug",
    publication_members.c.kind,
    publication_members.c.slug,
    publication_members.c.publication_id,
)
