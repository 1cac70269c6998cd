"""What steps are about, and the hash of their node apart from that of what was asked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_INDEXES = (("entity_kind", "entity_slug", "finished_at"), ("model_used", "finished_at"), ("finished_at",))


def upgrade() -> None:
    op.add_column("steps", sa.Column("node_hash", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("steps", sa.Column("entity_kind", sa.Text(), nullable=True))
    op.add_column("steps", sa.Column("entity_slug", sa.Text(), nullable=True))
    where = sa.text("model_used IS NOT NULL")
    for columns in _INDEXES:
        name = f"ix_steps_{'_'.join(columns)}"
        op.create_index(name, "steps", [*columns], unique=False, sqlite_where=where, postgresql_where=where)
