"""Waits with their votes and notices, claims, the inbox of events, groups; and what a run's continuations need."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

from agentmesh_dagster.store.columns import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _extend_runs()
    _create_claims()
    _create_waits()
    _create_votes_and_notices()
    _create_inbox()
    op.create_table(
        "group_members",
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("group_name", sa.Text(), nullable=False),
        sa.Column("member", sa.Text(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.slug"], name=op.f("fk_group_members_project")),
        sa.PrimaryKeyConstraint("project", "group_name", "member", name=op.f("pk_group_members")),
    )


def _partial_index(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, table, columns, unique=False, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )


def _serial() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _extend_runs() -> None:
    op.add_column(
        "runs", sa.Column("retries_left", sa.Integer(), nullable=False, server_default=sa.text("0"))
    )
    op.add_column("runs", sa.Column("by_claim", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("runs", sa.Column("claim_id", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("claimed_at", UtcDateTime(), nullable=True))
    op.add_column(
        "runs", sa.Column("claim_misses", sa.Integer(), nullable=False, server_default=sa.text("0"))
    )
    _partial_index(
        "ix_runs_project_retried", "runs", ["project"], "status = 'failed' AND by_claim AND retries_left > 0"
    )


def _create_claims() -> None:
    op.create_table(
        "claims",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("dagster_run_id", sa.Text(), nullable=True),
        sa.Column("is_current", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_claims_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claims")),
    )
    op.create_index("ix_claims_run_id", "claims", ["run_id"], unique=False)


def _create_waits() -> None:
    op.create_table(
        "waits",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step_key", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("closed_by", sa.Text(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("deadline_at", UtcDateTime(), nullable=True),
        sa.Column("remind_at", UtcDateTime(), nullable=True),
        sa.Column("escalate_at", UtcDateTime(), nullable=True),
        sa.Column("next_at", UtcDateTime(), nullable=True),
        sa.Column("decided_at", UtcDateTime(), nullable=True),
        sa.Column("ready_at", UtcDateTime(), nullable=True),
        sa.Column("used_at", UtcDateTime(), nullable=True),
        sa.Column("event_name", sa.Text(), nullable=False),
        sa.Column("event_key", sa.Text(), nullable=False),
        sa.Column("binding", sa.Text(), nullable=False),
        sa.Column("launcher", sa.Text(), nullable=False),
        sa.Column("multiple", sa.Boolean(), nullable=False),
        sa.Column("required", sa.Integer(), nullable=False),
        sa.Column("ordered", sa.Boolean(), nullable=False),
        sa.Column("separation", sa.Boolean(), nullable=False),
        sa.Column("cancel_siblings", sa.Boolean(), nullable=False),
        sa.Column("on_timeout", sa.Text(), nullable=False),
        sa.Column("options", _json(), nullable=False),
        sa.Column("assignees", _json(), nullable=False),
        sa.Column("escalate_to", _json(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("data", _json(), nullable=True),
        sa.Column("form_schema", _json(), nullable=True),
        sa.Column("prefill", _json(), nullable=True),
        sa.Column("timeout_data", _json(), nullable=True),
        sa.Column("notify", _json(), nullable=True),
        sa.Column("answer", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.slug"], name=op.f("fk_waits_project")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_waits_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_waits")),
        sa.UniqueConstraint("run_id", "step_key", "label", name=op.f("uq_waits_run_id_step_key_label")),
    )
    op.create_index(
        "ix_waits_project_status_created_at", "waits", ["project", "status", "created_at"], unique=False
    )
    _partial_index("ix_waits_project_next_at", "waits", ["project", "next_at"], "next_at IS NOT NULL")
    _partial_index(
        "ix_waits_project_run_id_ready_at",
        "waits",
        ["project", "run_id", "ready_at"],
        "ready_at IS NOT NULL",
    )
    _partial_index(
        "ix_waits_project_event_name_event_key",
        "waits",
        ["project", "event_name", "event_key"],
        "status = 'open' AND kind = 'event'",
    )


def _create_votes_and_notices() -> None:
    op.create_table(
        "votes",
        sa.Column("seq", _serial(), autoincrement=True, nullable=False),
        sa.Column("wait_id", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("decision", _json(), nullable=True),
        sa.Column("data", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["wait_id"], ["waits.id"], name=op.f("fk_votes_wait_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_votes")),
    )
    op.create_index("ix_votes_wait_id_seq", "votes", ["wait_id", "seq"], unique=False)
    op.create_table(
        "notices",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("wait_id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", UtcDateTime(), nullable=True),
        sa.Column("sent_at", UtcDateTime(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("channel", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["wait_id"], ["waits.id"], name=op.f("fk_notices_wait_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
    )
    op.create_index("ix_notices_wait_id", "notices", ["wait_id"], unique=False)
    _partial_index("ix_notices_project_next_at", "notices", ["project", "next_at"], "next_at IS NOT NULL")


def _create_inbox() -> None:
    op.create_table(
        "inbox",
        sa.Column("seq", _serial(), autoincrement=True, nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("is_kept", sa.Boolean(), nullable=False),
        sa.Column("sent_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.Column("data", _json(), nullable=True),
        sa.Column("exact", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.slug"], name=op.f("fk_inbox_project")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_inbox")),
        sa.UniqueConstraint("project", "event_id", name=op.f("uq_inbox_project_event_id")),
    )
    op.create_index("ix_inbox_project_expires_at", "inbox", ["project", "expires_at"], unique=False)
    _partial_index("ix_inbox_project_name_key", "inbox", ["project", "name", "key"], "is_kept")


def _json() -> sa.types.TypeEngine[Any]:
    return sa.Text().with_variant(JSONB(none_as_null=True), "postgresql")
