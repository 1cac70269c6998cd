"""JSON Schema (draft 2020-12) for run input, tools and forms: the functions that the rest of AgentMesh uses.

Only local references (`#/...`) are followed; nothing is ever fetched. `jsonschema` is imported at the first
use, because importing it takes a tenth of a second.
"""

from __future__ import annotations

from agentmesh_dagster.specs.schema_checks import SchemaIssue, ValueIssue, check_schema, validate_value
from agentmesh_dagster.specs.schema_coercion import fill_and_coerce
from agentmesh_dagster.specs.schema_fitting import is_static_subset
from agentmesh_dagster.specs.schema_instances import smallest_instance

__all__ = [
    "SchemaIssue",
    "ValueIssue",
    "check_schema",
    "fill_and_coerce",
    "is_static_subset",
    "smallest_instance",
    "validate_value",
]
