"""The tables. A change here needs a migration, and its revision at the end of `REVISIONS`."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from agentmesh_dagster.store.catalog_tables import (
    definitions,
    metadata,
    projects,
    publication_members,
    publications,
    serial,
    versions,
)
from agentmesh_dagster.store.columns import JsonColumn, UtcDateTime

__all__ = [
    "KEPT_EVENTS",
    "MODEL_STEPS",
    "OPEN_EVENT_WAITS",
    "OVERDUE_RUNS",
    "READY_WAITS",
    "RETRIED_RUNS",
    "REVISIONS",
    "STARTING_RUNS",
    "UNFINALIZED_RUNS",
    "audit",
    "claims",
    "dagster_runs",
    "definitions",
    "events",
    "group_members",
    "inbox",
    "leases",
    "metadata",
    "notices",
    "projects",
    "publication_members",
    "publications",
    "runs",
    "steps",
    "versions",
    "votes",
    "waits",
]

REVISIONS: Final = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
"""The schema's revisions, oldest first; the last one is what this code works on."""

# SQLite takes a partial index only where a query repeats its condition word for word: each stands here once.
READY_WAITS: Final = "ready_at IS NOT NULL"
"""Waits with an answer that no Dagster run has taken up."""
OPEN_EVENT_WAITS: Final = "status = 'open' AND kind = 'event'"
RETRIED_RUNS: Final = "status = 'failed' AND by_claim AND retries_left > 0"
"""Failed runs that AgentMesh itself retries: Dagster never retries a Dagster run that came by a claim."""
STARTING_RUNS: Final = "status = 'pending' AND parent_run_id IS NOT NULL"
"""Runs that another run started, and that have not begun."""
UNFINALIZED_RUNS: Final = "finalized < endings AND status IN ('succeeded', 'failed', 'canceled')"
"""Ended runs whose `on_failure` or `finally` is still to be run; a failed one of them may yet be retried."""
OVERDUE_RUNS: Final = "status = 'waiting' AND deadline_at IS NOT NULL"
"""Waiting runs that fail when their time is over."""
KEPT_EVENTS: Final = "is_kept"
MODEL_STEPS: Final = "model_used IS NOT NULL"
"""Steps that have used a model."""

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
    Column("retries_left", Integer, nullable=False, server_default=text("0")),
    # Whether the last Dagster run that was bound came by a claim.
    Column("by_claim", Boolean, nullable=False, server_default=false()),
    # The claim that nobody has bound yet, since when it counts, and how many before it were never bound.
    Column("claim_id", Text),
    Column("claimed_at", UtcDateTime),
    Column("claim_misses", Integer, nullable=False, server_default=text("0")),
    Column("worked_ms", BigInteger, nullable=False, server_default=text("0")),
    # When the lease of a worker ran out that another one has taken over since: its work ended then at the latest.
    Column("cut_off_at", UtcDateTime),
    Column("deadline_at", UtcDateTime),
    Column("finalizers", Text, nullable=False, server_default=text("''")),
    Column("endings", Integer, nullable=False, server_default=text("0")),
    Column("finalized", Integer, nullable=False, server_default=text("0")),
)
Index("ix_runs_project_kind_slug_created_at", runs.c.project, runs.c.kind, runs.c.slug, runs.c.created_at)
Index("ix_runs_project_created_at", runs.c.project, runs.c.created_at)
# The project comes second: SQLite, which keeps no counts, would take these for polls that ask for a project alone.
Index("ix_runs_source_project_created_at", runs.c.source, runs.c.project, runs.c.created_at)
Index("ix_runs_triggered_by_project_created_at", runs.c.triggered_by, runs.c.project, runs.c.created_at)
Index("ix_runs_status_created_at", runs.c.status, runs.c.created_at)
Index("ix_runs_parent_run_id", runs.c.parent_run_id)
Index(
    "ix_runs_project_retried",
    runs.c.project,
    sqlite_where=text(RETRIED_RUNS),
    postgresql_where=text(RETRIED_RUNS),
)
Index(
    "ix_runs_project_starting",
    runs.c.project,
    sqlite_where=text(STARTING_RUNS),
    postgresql_where=text(STARTING_RUNS),
)
Index(
    "ix_runs_project_unfinalized",
    runs.c.project,
    sqlite_where=text(UNFINALIZED_RUNS),
    postgresql_where=text(UNFINALIZED_RUNS),
)
Index(
    "ix_runs_project_deadline_at",
    runs.c.project,
    runs.c.deadline_at,
    sqlite_where=text(OVERDUE_RUNS),
    postgresql_where=text(OVERDUE_RUNS),
)

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
    Column("node_hash", Text, nullable=False, server_default=text("''")),
    Column("entity_kind", Text),
    Column("entity_slug", Text),
)

# Usage by agent, model and day; steps that used no model cost nothing.
for _columns in (
    ("entity_kind", "entity_slug", "finished_at"),
    ("model_used", "finished_at"),
    ("finished_at",),
):
    Index(
        f"ix_steps_{'_'.join(_columns)}",
        *(steps.c[name] for name in _columns),
        sqlite_where=text(MODEL_STEPS),
        postgresql_where=text(MODEL_STEPS),
    )

events = Table(
    "events",
    metadata,
    # The order in which a run's events were committed, and where a follower goes on.
    Column("seq", serial, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("at", UtcDateTime, nullable=False),
    Column("project", Text, nullable=False),
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("step_key", Text),
    Column("type", Text, nullable=False),
    Column("payload", JsonColumn),
    sqlite_autoincrement=True,
)
Index("ix_events_run_id_seq", events.c.run_id, events.c.seq)

leases = Table(
    "leases",
    metadata,
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("dagster_run_id", Text, nullable=False),
    # By the database's clock.
    Column("expires_at", UtcDateTime, nullable=False),
    # The process that works on the run. Its step processes say the same.
    Column("holder", Text, nullable=False, server_default=text("''")),
    Column("length_s", Double[float](), nullable=False, server_default=text("60")),
)
Index("ix_leases_expires_at", leases.c.expires_at)

claims = Table(
    "claims",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("reason", Text, nullable=False),
    Column("made_at", UtcDateTime, nullable=False),
    Column("dagster_run_id", Text),
    Column("is_current", Boolean, nullable=False),
    # Of a claim to finalize: which ending of the run.
    Column("ending", Integer),
)
Index("ix_claims_run_id", claims.c.run_id)

waits = Table(
    "waits",
    metadata,
    Column("id", Text, primary_key=True),
    Column("project", Text, ForeignKey("projects.slug"), nullable=False),
    Column("run_id", Text, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("step_key", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("closed_by", Text, nullable=False),
    Column("node_id", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("deadline_at", UtcDateTime),
    Column("remind_at", UtcDateTime),
    Column("escalate_at", UtcDateTime),
    # The earliest of the three while the wait is open, and NULL otherwise.
    Column("next_at", UtcDateTime),
    Column("decided_at", UtcDateTime),
    # `decided_at` while the wait has an answer that no Dagster run has taken up, and NULL otherwise.
    Column("ready_at", UtcDateTime),
    Column("used_at", UtcDateTime),
    Column("event_name", Text, nullable=False),
    Column("event_key", Text, nullable=False),
    Column("binding", Text, nullable=False),
    Column("launcher", Text, nullable=False),
    Column("multiple", Boolean, nullable=False),
    Column("required", Integer, nullable=False),
    Column("ordered", Boolean, nullable=False),
    Column("separation", Boolean, nullable=False),
    Column("cancel_siblings", Boolean, nullable=False),
    Column("on_timeout", Text, nullable=False),
    Column("options", JsonColumn, nullable=False),
    Column("assignees", JsonColumn, nullable=False),
    Column("escalate_to", JsonColumn, nullable=False),
    Column("title", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("data", JsonColumn),
    Column("form_schema", JsonColumn),
    Column("prefill", JsonColumn),
    Column("timeout_data", JsonColumn),
    Column("notify", JsonColumn),
    Column("answer", JsonColumn),
    # NULL where nobody has delegated a vote.
    Column("delegations", JsonColumn),
    UniqueConstraint("run_id", "step_key", "label"),
)
Index("ix_waits_project_status_created_at", waits.c.project, waits.c.status, waits.c.created_at)
Index(
    "ix_waits_project_next_at",
    waits.c.project,
    waits.c.next_at,
    sqlite_where=text("next_at IS NOT NULL"),
    postgresql_where=text("next_at IS NOT NULL"),
)
Index(
    "ix_waits_project_run_id_ready_at",
    waits.c.project,
    waits.c.run_id,
    waits.c.ready_at,
    sqlite_where=text(READY_WAITS),
    postgresql_where=text(READY_WAITS),
)
Index(
    "ix_waits_project_event_name_event_key",
    waits.c.project,
    waits.c.event_name,
    waits.c.event_key,
    sqlite_where=text(OPEN_EVENT_WAITS),
    postgresql_where=text(OPEN_EVENT_WAITS),
)

votes = Table(
    "votes",
    metadata,
    Column("seq", serial, primary_key=True, autoincrement=True),
    Column("wait_id", Text, ForeignKey("waits.id", ondelete="CASCADE"), nullable=False),
    Column("by", Text, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("comment", Text, nullable=False),
    Column("decision", JsonColumn),
    Column("data", JsonColumn),
    Column("delegator", Text, nullable=False, server_default=text("''")),
)
Index("ix_votes_wait_id_seq", votes.c.wait_id, votes.c.seq)

notices = Table(
    "notices",
    metadata,
    Column("id", Text, primary_key=True),
    Column("wait_id", Text, ForeignKey("waits.id", ondelete="CASCADE"), nullable=False),
    Column("project", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_at", UtcDateTime),
    Column("sent_at", UtcDateTime),
    Column("error", Text, nullable=False),
    Column("channel", JsonColumn),
)
Index("ix_notices_wait_id", notices.c.wait_id)
Index(
    "ix_notices_project_next_at",
    notices.c.project,
    notices.c.next_at,
    sqlite_where=text("next_at IS NOT NULL"),
    postgresql_where=text("next_at IS NOT NULL"),
)

# Events that came before their wait, and the ids of those delivered, by which one that comes twice is known.
inbox = Table(
    "inbox",
    metadata,
    Column("seq", serial, primary_key=True, autoincrement=True),
    Column("project", Text, ForeignKey("projects.slug"), nullable=False),
    Column("event_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("is_kept", Boolean, nullable=False),
    Column("sent_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("data", JsonColumn),
    UniqueConstraint("project", "event_id"),
)
Index("ix_inbox_project_expires_at", inbox.c.project, inbox.c.expires_at)
Index(
    "ix_inbox_project_name_key",
    inbox.c.project,
    inbox.c.name,
    inbox.c.key,
    sqlite_where=text(KEPT_EVENTS),
    postgresql_where=text(KEPT_EVENTS),
)

group_members = Table(
    "group_members",
    metadata,
    Column("project", Text, ForeignKey("projects.slug"), primary_key=True),
    Column("group_name", Text, primary_key=True),
    Column("member", Text, primary_key=True),
    Column("ordinal", Integer, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("seq", serial, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("at", UtcDateTime, nullable=False),
    Column("project", Text, ForeignKey("projects.slug"), nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("entity", Text, nullable=False),
    Column("version", Integer),
    Column("detail", JsonColumn),
    sqlite_autoincrement=True,
)
Index("ix_audit_project_seq", audit.c.project, audit.c.seq)
Index("ix_audit_project_entity_seq", audit.c.project, audit.c.entity, audit.c.seq)
