"""Alembic's entry: runs the migrations on the connection, and in the transaction, that the store hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from agentmesh_dagster.store import tables

connection: Connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=tables.metadata, transactional_ddl=False)
context.run_migrations()
