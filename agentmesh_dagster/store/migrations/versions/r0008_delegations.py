"""Votes that were delegated, and in whose place a delegate voted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from agentmesh_dagster.store.columns import JsonColumn

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("waits", sa.Column("delegations", JsonColumn(), nullable=True))
    op.add_column("votes", sa.Column("delegator", sa.Text(), nullable=False, server_default=sa.text("''")))
