"""The private Dagster names of the launch config: scalars of our own, between Dagster's `Int` and `Float`.

`tests/test_dagster_internals.py` says which one moved, when a Dagster release moves one.
"""

from __future__ import annotations

from dagster._config import ConfigScalar, ConfigScalarKind

__all__ = ["ConfigScalar", "ConfigScalarKind"]
