"""The state of a workflow: what a further write of a key does to what was written before.

A property of `state_schema` may carry `reducer`; without one a write replaces, and two writes of which neither comes
after the other are a conflict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, get_args

from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.fields import as_list, as_object

Reducer = Literal["replace", "append", "merge", "sum"]
REDUCERS: Final[tuple[str, ...]] = get_args(Reducer)
REDUCER_KEYWORD: Final = "reducer"
"""The keyword of a property in `state_schema`."""


@dataclass(frozen=True)
class StateRules:
    """The keys of a workflow's state: first values, and how writes come together."""

    schema: Mapping[str, Json] | None = None
    defaults: Mapping[str, Json] = field(default_factory=dict[str, Any])
    reducers: Mapping[str, Reducer] = field(default_factory=dict[str, Reducer])
    """Of the keys that name one; `replace`, where it is named, settles conflicts: the later in topological order
    counts."""

    @staticmethod
    def of(schema: Mapping[str, Json] | None) -> StateRules:
        """The rules of a valid `state_schema`."""
        properties = as_object((schema or {}).get("properties")) or {}
        parts = {key: as_object(part) or {} for key, part in properties.items()}
        return StateRules(
            schema,
            {key: part["default"] for key, part in parts.items() if "default" in part},
            {
                key: cast("Reducer", part[REDUCER_KEYWORD])
                for key, part in parts.items()
                if REDUCER_KEYWORD in part
            },
        )

    def delta(self, key: str, value: Json) -> Json:
        """One write of a node as it is kept: of `append`, a list of what is added.

        Raises:
            NodeError: The value does not suit the reducer (code `state`).
        """
        reducer = self.reducers.get(key)
        if reducer == "append":
            return [value]
        if reducer == "merge" and as_object(value) is None:
            raise NodeError(f"context.{key} takes objects (reducer: merge), not {value!r:.80}", code="state")
        if reducer == "sum" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise NodeError(f"context.{key} takes numbers (reducer: sum), not {value!r:.80}", code="state")
        return value

    def joined(self, older: Mapping[str, Json], newer: Mapping[str, Json]) -> dict[str, Json]:
        """A state, or kept writes, with further kept writes over it."""
        state = dict(older)
        for key, value in newer.items():
            reducer = self.reducers.get(key)
            before = state.get(key)
            if key not in state or before is None or reducer in (None, "replace"):
                state[key] = value
            elif reducer == "append":
                state[key] = [*(as_list(before) or []), *value]
            elif reducer == "merge":
                state[key] = {**(as_object(before) or {}), **value}
            else:
                state[key] = before + value
        return state
