"""The private Dagster name of the graphs: a dependency on all steps of a dynamic fan-out.

`tests/test_dagster_internals.py` says which one moved, when a Dagster release moves one.
"""

from __future__ import annotations

from dagster._core.definitions.dependency import DynamicCollectDependencyDefinition

__all__ = ["DynamicCollectDependencyDefinition"]
