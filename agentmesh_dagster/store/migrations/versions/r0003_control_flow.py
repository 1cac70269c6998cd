"""What ends of runs ask for, runs that other runs start, and how long a run has been worked on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from agentmesh_dagster.store.columns import UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", _counter("worked_ms", sa.BigInteger()))
    op.add_column("runs", sa.Column("cut_off_at", UtcDateTime(), nullable=True))
    op.add_column("runs", sa.Column("deadline_at", UtcDateTime(), nullable=True))
    op.add_column("runs", sa.Column("finalizers", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("runs", _counter("endings", sa.Integer()))
    op.add_column("runs", _counter("finalized", sa.Integer()))
    op.add_column("claims", sa.Column("ending", sa.Integer(), nullable=True))
    # Workflows had nothing to run at their end.
    op.execute(
        "UPDATE runs SET endings = 1, finalized = 1 WHERE status IN ('succeeded', 'failed', 'canceled')"
    )
    _partial_index(
        "ix_runs_project_starting", ["project"], "status = 'pending' AND parent_run_id IS NOT NULL"
    )
    _partial_index(
        "ix_runs_project_unfinalized",
        ["project"],
        "finalized < endings AND status IN ('succeeded', 'failed', 'canceled')",
    )
    _partial_index(
        "ix_runs_project_deadline_at",
        ["project", "deadline_at"],
        "status = 'waiting' AND deadline_at IS NOT NULL",
    )


def _counter(name: str, type_: sa.types.TypeEngine[int]) -> sa.Column[int]:
    return sa.Column(name, type_, nullable=False, server_default=sa.text("0"))


def _partial_index(name: str, columns: list[str], where: str) -> None:
    op.create_index(
        name, "runs", columns, unique=False, sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )
