"""Lists of runs by source and by who triggered them, without reading all runs of the project."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in ("source", "triggered_by"):
        op.create_index(
            f"ix_runs_{column}_project_created_at", "runs", [column, "project", "created_at"], unique=False
        )
