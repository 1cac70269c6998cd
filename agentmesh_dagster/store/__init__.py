"""The store: the only importer of SQLAlchemy. Alembic is imported when a schema has to be upgraded, and not before."""

from __future__ import annotations

from agentmesh_dagster.store.claims import Poll
from agentmesh_dagster.store.failures import StoreUnavailable
from agentmesh_dagster.store.run_stats import RunStats
from agentmesh_dagster.store.runs import UnfinishedRun
from agentmesh_dagster.store.schema import SchemaStatus
from agentmesh_dagster.store.store import Store, open_store, schema_status

__all__ = [
    "Poll",
    "RunStats",
    "SchemaStatus",
    "Store",
    "StoreUnavailable",
    "UnfinishedRun",
    "open_store",
    "schema_status",
]
