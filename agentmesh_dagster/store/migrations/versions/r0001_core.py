"""Projects, definitions, versions, publications, runs, steps, events, leases, audit."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from agentmesh_dagster.store.columns import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("slug", name=op.f("pk_projects")),
    )
    op.create_table(
        "audit",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("entity", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("detail", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.slug"], name=op.f("fk_audit_project")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
        sa.UniqueConstraint("id", name=op.f("uq_audit_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_project_entity_seq", "audit", ["project", "entity", "seq"], unique=False)
    op.create_index("ix_audit_project_seq", "audit", ["project", "seq"], unique=False)
    op.create_table(
        "definitions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("job_name", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("category", sa.Text(), nullable=False),
        sa.Column("tags", _json(), nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
        sa.Column("is_template", sa.Boolean(), nullable=False),
        sa.Column("source_template_id", sa.Text(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("archived_at", UtcDateTime(), nullable=True),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("latest_version", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.slug"], name=op.f("fk_definitions_project")),
        sa.ForeignKeyConstraint(
            ["source_template_id"], ["definitions.id"], name=op.f("fk_definitions_source_template_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_definitions")),
        sa.UniqueConstraint("project", "kind", "slug", name=op.f("uq_definitions_project_kind_slug")),
    )
    op.create_index(
        "ix_definitions_project_kind_updated_at",
        "definitions",
        ["project", "kind", "updated_at"],
        unique=False,
    )
    op.create_index(
        "uq_definitions_project_job_name",
        "definitions",
        ["project", "job_name"],
        unique=True,
        sqlite_where=sa.text("archived_at IS NULL"),
        postgresql_where=sa.text("archived_at IS NULL"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("publication", sa.BigInteger(), nullable=False),
        sa.Column("definition_hash", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("triggered_by", sa.Text(), nullable=False),
        sa.Column("trigger_id", sa.Text(), nullable=True),
        sa.Column("parent_run_id", sa.Text(), nullable=True),
        sa.Column("parent_step_key", sa.Text(), nullable=True),
        sa.Column("thread_id", sa.Text(), nullable=True),
        sa.Column("resource_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("queued_at", UtcDateTime(), nullable=True),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("suspended_at", UtcDateTime(), nullable=True),
        sa.Column("suspended_steps", _json(), nullable=False),
        sa.Column("resumed_at", UtcDateTime(), nullable=True),
        sa.Column("steps_executed", sa.Integer(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_usd", sa.Double[float](), nullable=False),
        sa.Column("input", _json(), nullable=True),
        sa.Column("request_context", _json(), nullable=True),
        sa.Column("output", _json(), nullable=True),
        sa.Column("error", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.slug"], name=op.f("fk_runs_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index("ix_runs_parent_run_id", "runs", ["parent_run_id"], unique=False)
    op.create_index("ix_runs_project_created_at", "runs", ["project", "created_at"], unique=False)
    op.create_index(
        "ix_runs_project_kind_slug_created_at",
        "runs",
        ["project", "kind", "slug", "created_at"],
        unique=False,
    )
    op.create_index("ix_runs_status_created_at", "runs", ["status", "created_at"], unique=False)
    op.create_table(
        "dagster_runs",
        sa.Column("dagster_run_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("bound_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_dagster_runs_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("dagster_run_id", name=op.f("pk_dagster_runs")),
        sa.UniqueConstraint("run_id", "ordinal", name=op.f("uq_dagster_runs_run_id_ordinal")),
    )
    op.create_table(
        "events",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step_key", sa.Text(), nullable=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("payload", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sa.UniqueConstraint("id", name=op.f("uq_events_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_run_id_seq", "events", ["run_id", "seq"], unique=False)
    op.create_table(
        "leases",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("dagster_run_id", sa.Text(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_leases_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_leases")),
    )
    op.create_index("ix_leases_expires_at", "leases", ["expires_at"], unique=False)
    op.create_table(
        "publications",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("closure_hash", sa.Text(), nullable=False),
        sa.Column("closure", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project", "kind", "slug"],
            ["definitions.project", "definitions.kind", "definitions.slug"],
            name=op.f("fk_publications_project"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_publications")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_publications_project_id", "publications", ["project", "id"], unique=False)
    op.create_index(
        "ix_publications_project_kind_slug_id",
        "publications",
        ["project", "kind", "slug", "id"],
        unique=False,
    )
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("node_type", sa.Text(), nullable=False),
        sa.Column("node_name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("parent_key", sa.Text(), nullable=True),
        sa.Column("predecessor_keys", _json(), nullable=False),
        sa.Column("iteration_index", sa.Integer(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("model_used", sa.Text(), nullable=True),
        sa.Column("child_run_id", sa.Text(), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_usd", sa.Double[float](), nullable=False),
        sa.Column("queued_at", UtcDateTime(), nullable=True),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("dagster_run_id", sa.Text(), nullable=False),
        sa.Column("input", _json(), nullable=True),
        sa.Column("output", _json(), nullable=True),
        sa.Column("error", _json(), nullable=True),
        sa.Column("routing_decision", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "key", name=op.f("pk_steps")),
    )
    op.create_table(
        "versions",
        sa.Column("definition_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("document", _json(), nullable=False),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["definition_id"], ["definitions.id"], name=op.f("fk_versions_definition_id")
        ),
        sa.PrimaryKeyConstraint("definition_id", "number", name=op.f("pk_versions")),
    )
    op.create_table(
        "publication_members",
        sa.Column("publication_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("slug", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["publication_id"],
            ["publications.id"],
            name=op.f("fk_publication_members_publication_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("publication_id", "kind", "slug", name=op.f("pk_publication_members")),
    )
    op.create_index(
        "ix_publication_members_kind_slug",
        "publication_members",
        ["kind", "slug", "publication_id"],
        unique=False,
    )


def _json() -> sa.types.TypeEngine[Any]:
    return sa.Text().with_variant(JSONB(none_as_null=True), "postgresql")
