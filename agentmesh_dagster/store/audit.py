"""The audit trail: who did what, written in the transaction that did it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.records import Audit, Json
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import audit


def write_audit(
    connection: Connection,
    clock: Clock,
    project: str,
    action: str,
    *,
    actor: str,
    entity: str,
    version: int | None = None,
    detail: Json = None,
) -> None:
    """Adds a row, in the caller's transaction."""
    connection.execute(
        insert(audit).values(
            id=clock.new_id(),
            at=clock.now(),
            project=project,
            actor=actor,
            action=action,
            entity=entity,
            version=version,
            detail=detail,
        )
    )


class AuditLog:
    """The audit trail; what the catalog and the publications do writes its own rows."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def add(
        self,
        project: str,
        action: str,
        *,
        actor: str,
        entity: str,
        version: int | None = None,
        detail: Json = None,
    ) -> None:
        """Adds a row for what was done outside of the catalog.

        Args:
            project: The project's slug.
            action: One of the words of `records.Audit`, such as `cancel`.
            actor: Who did it.
            entity: `<kind>/<slug>` or `run/<id>`.
            version: Of the definition.
            detail: Further JSON.
        """
        with self._database.write() as connection:
            write_audit(
                connection,
                self._clock,
                project,
                action,
                actor=actor,
                entity=entity,
                version=version,
                detail=detail,
            )

    def list(
        self,
        project: str,
        *,
        entity: str | None = None,
        actor: str | None = None,
        action: str | None = None,
        limit: int | None = 100,
    ) -> list[Audit]:
        """The newest rows first.

        Args:
            project: The project's slug.
            entity: `<kind>/<slug>` or `run/<id>`.
            actor: Who did it.
            action: What was done, such as `publish`.
            limit: At most so many rows; None for all.
        """
        query = select(audit).where(audit.c.project == project)
        for column, wanted in ((audit.c.entity, entity), (audit.c.actor, actor), (audit.c.action, action)):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.read() as connection:
            rows: Sequence[Row[Any]] = connection.execute(
                query.order_by(audit.c.seq.desc()).limit(limit)
            ).all()
        return [_record(row) for row in rows]


def _record(row: Row[Any]) -> Audit:
    return Audit(
        id=row.id,
        at=row.at,
        project=row.project,
        actor=row.actor,
        action=row.action,
        entity=row.entity,
        version=row.version,
        detail=row.detail,
    )
