"""Notices: messages to people about approvals, on their way to notifiers. Whoever sends one takes it first."""

from __future__ import annotations

import builtins
from datetime import datetime

from sqlalchemy import case, exists, literal, select, update

from agentmesh_dagster.records import Notice, WaitStatus
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import notices, waits
from agentmesh_dagster.store.wait_rows import notice_record

_MAX_ERROR = 500


class Notices:
    """What is to be sent, and how it went. A notice is given up when its approval closes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def due(self, project: str, now: datetime, *, limit: int = 50) -> builtins.list[Notice]:
        """The notices to send at a moment, those first that have waited longest."""
        query = (
            select(notices)
            .where(notices.c.project == project, notices.c.next_at <= now)
            .order_by(notices.c.next_at, notices.c.id)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [notice_record(row) for row in connection.execute(query).mappings()]

    def list(self, wait_id: str) -> builtins.list[Notice]:
        """The notices about an approval."""
        query = select(notices).where(notices.c.wait_id == wait_id).order_by(notices.c.id)
        with self._database.read() as connection:
            return [notice_record(row) for row in connection.execute(query).mappings()]

    def take(self, notice_id: str, *, now: datetime, until: datetime) -> bool:
        """Takes a notice that is due, so that nobody else sends it before `until`; counts as an attempt.

        Returns:
            False where somebody else has taken it, or it is not due any more.
        """
        with self._database.write() as connection:
            taken = connection.execute(
                update(notices)
                .where(notices.c.id == notice_id, notices.c.next_at <= now)
                .values(next_at=until, attempts=notices.c.attempts + 1)
            )
        return taken.rowcount == 1

    def sent(self, notice_id: str, at: datetime) -> None:
        """Says that a notice has arrived at its notifier."""
        with self._database.write() as connection:
            connection.execute(
                update(notices).where(notices.c.id == notice_id).values(sent_at=at, next_at=None, error="")
            )

    def failed(self, notice_id: str, error: str, next_at: datetime | None) -> None:
        """Says that an attempt failed.

        Args:
            notice_id: The notice.
            error: Why, without secrets; cut to 500 characters.
            next_at: When to try again, where its approval is still open by now; None: never.
        """
        is_open = exists().where(waits.c.id == notices.c.wait_id, waits.c.status == WaitStatus.OPEN.value)
        with self._database.write() as connection:
            connection.execute(
                update(notices)
                .where(notices.c.id == notice_id, notices.c.sent_at.is_(None))
                .values(
                    error=error.replace("\0", "")[:_MAX_ERROR],
                    next_at=case((is_open, literal(next_at, notices.c.next_at.type)), else_=None),
                )
            )
