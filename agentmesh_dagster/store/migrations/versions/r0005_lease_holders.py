"""A lease is held by a process, and says how long it lasts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leases", sa.Column("holder", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("leases", sa.Column("length_s", sa.Double(), nullable=False, server_default=sa.text("60")))
    # A lease of before belongs to a worker that the update has ended: it is told from all that come.
    op.execute("UPDATE leases SET holder = dagster_run_id")
