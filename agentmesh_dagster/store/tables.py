"""The tables. A change here needs a migration, and its revision at the end of `REVISIONS`."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
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

REVISIONS: Final = ("0001",)
"""The schema's revisions, oldest first; the last one is what this code works on."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only in columns of the exact type INTEGER, which holds 64 bits there.
_Serial = BigInteger().with_variant(Integer(), "sqlite")

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
    Column("exact", Text),
)

publications = Table(
    "publications",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
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
    Column("exact", Text),
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
    Column("publication_id", _Serial, ForeignKey("publications.id", ondelete="CASCADE"), primary_key=True),
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

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("project", Text, ForeignKey("projects.slug"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("slug", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("publication", BigInteger, nullable=False),
    Column("definition_hash", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("triggered_by", Text, nullable=False),
    Column("trigger_id", Text),
    Column("parent_run_id", Text),
    Column("parent_step_key", Text),
    Column("thread_id", Text),
    Column("resource_id", Text),
    Column("status", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("queued_at", UtcDateTime),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    Column("duration_ms", BigInteger),
    Column("suspended_at", UtcDateTime),
    Column("suspended_steps", JsonColumn, nullable=False),
    Column("resumed_at", UtcDateTime),
    Column("steps_executed", Integer, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cost_usd", Double[float](), nullable=False),
    Column("input", JsonColumn),
    Column("request_context", JsonColumn),
    Column("output", JsonColumn),
    Column("error", JsonColumn),
    Column("exact", Text),
)
Index("ix_runs_project_kind_slug_created_at", runs.c.project, runs.c.kind, runs.c.slug, runs.c.created_at)
Index("ix_runs_project_created_at", runs.c.project, runs.c.created_at)
Index("ix_runs_status_created_at", runs.c.status, runs.c.created_at)
Index("ix_runs_parent_run_id", runs.c.parent_run_id)

dagster_runs = Table(
    "dagster_runs",
    metadata,
    Column("dagster_run_id", Text, primary_key=True),
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("bound_at", UtcDateTime, nullable=False),
    UniqueConstraint("run_id", "ordinal"),
)

steps = Table(
    "steps",
    metadata,
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("node_id", Text, nullable=False),
    Column("node_type", Text, nullable=False),
    Column("node_name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("parent_key", Text),
    Column("predecessor_keys", JsonColumn, nullable=False),
    Column("iteration_index", Integer),
    Column("attempt", Integer, nullable=False),
    Column("status", Text, nullable=False),
    # `Step.is_finished` when the row was written: such a row is never replaced.
    Column("finished", Boolean, nullable=False),
    # Whether the row has been added to the run's `steps_executed`.
    Column("counted", Boolean, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("model_used", Text),
    Column("child_run_id", Text),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cost_usd", Double[float](), nullable=False),
    Column("queued_at", UtcDateTime),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    Column("duration_ms", BigInteger),
    Column("dagster_run_id", Text, nullable=False),
    Column("input", JsonColumn),
    Column("output", JsonColumn),
    Column("error", JsonColumn),
    Column("routing_decision", JsonColumn),
    Column("exact", Text),
)

events = Table(
    "events",
    metadata,
    # The order in which a run's events were committed, and where a follower goes on.
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("at", UtcDateTime, nullable=False),
    Column("project", Text, nullable=False),
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("step_key", Text),
    Column("type", Text, nullable=False),
    Column("payload", JsonColumn),
    Column("exact", Text),
    sqlite_autoincrement=True,
)
Index("ix_events_run_id_seq", events.c.run_id, events.c.seq)

leases = Table(
    "leases",
    metadata,
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("dagster_run_id", Text, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)
Index("ix_leases_expires_at", leases.c.expires_at)

audit = Table(
    "audit",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("at", UtcDateTime, nullable=False),
    Column("project", Text, ForeignKey("projects.slug"), nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("entity", Text, nullable=False),
    Column("version", Integer),
    Column("detail", JsonColumn),
    Column("exact", Text),
    sqlite_autoincrement=True,
)
Index("ix_audit_project_seq", audit.c.project, audit.c.seq)
Index("ix_audit_project_entity_seq", audit.c.project, audit.c.entity, audit.c.seq)
