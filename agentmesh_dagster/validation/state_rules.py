"""Rules of the state: reducers, and writes of one key of which neither comes after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object
from agentmesh_dagster.specs.nodes import ForeachConfig, ParallelConfig
from agentmesh_dagster.specs.problems import Problem, child_path, suggestion
from agentmesh_dagster.specs.state import REDUCER_KEYWORD, REDUCERS
from agentmesh_dagster.validation.exclusion import Exclusion
from agentmesh_dagster.validation.level import Level, level_writes
from agentmesh_dagster.validation.view import BodyView, NodeView, WorkflowView

_FITTING: Final[Mapping[str, frozenset[str]]] = {
    "append": frozenset(("array",)),
    "merge": frozenset(("object",)),
    "sum": frozenset(("number", "integer")),
}
"""The types of the keys that a reducer can join; `replace` suits all."""


def state_problems(view: WorkflowView, levels: Sequence[Level]) -> Iterator[Problem]:
    """Problems of a workflow's reducers, and conflicts between its writes that can be seen before a run."""
    properties = as_object((view.state_schema or {}).get("properties")) or {}
    parts = {key: as_object(part) or {} for key, part in properties.items()}
    yield from _reducers(parts)
    settled = frozenset(key for key, part in parts.items() if REDUCER_KEYWORD in part)
    told: dict[str, Problem] = {}
    # Inner levels first: of a write that conflicts on several levels the innermost is told.
    for level in reversed(levels):
        for problem in _conflicts(level, settled):
            told.setdefault(problem.path, problem)
    yield from told.values()


def _reducers(parts: Mapping[str, JsonObject]) -> Iterator[Problem]:
    for key, part in parts.items():
        reducer: Json = part.get(REDUCER_KEYWORD)
        if REDUCER_KEYWORD not in part:
            continue
        path = f"{child_path('state_schema.properties', key)}.{REDUCER_KEYWORD}"
        if not isinstance(reducer, str) or reducer not in REDUCERS:
            mend = suggestion(reducer, REDUCERS) if isinstance(reducer, str) else suggestion("", REDUCERS)
            yield Problem.of("reducer-unknown", path, f"There is no reducer {str(reducer)[:80]!r}", mend)
            continue
        declared: Json = part.get("type")
        types = [t for t in as_list(declared) or [declared] if isinstance(t, str) and t != "null"]
        fitting = _FITTING.get(reducer)
        wrong = [t for t in types if fitting is not None and t not in fitting]
        if fitting is not None and wrong:
            yield Problem.of(
                "reducer-unfit",
                path,
                f"The reducer {reducer!r} does not suit context.{key[:80]}, of type {wrong[0]!r}",
                f"Write type: {' or '.join(sorted(fitting))}, or another reducer",
            )


def _conflicts(level: Level, settled: Collection[str]) -> Iterator[Problem]:
    for node in level.view.nodes.values():
        yield from _between_passes(node, settled)
    # What comes before what is not known of a graph with a cycle or a wrong edge.
    if not level.facts.reach.cycles and not level.facts.uncertain and level.view.has_edges:
        yield from _between_nodes(level, settled)


def _between_passes(node: NodeView, settled: Collection[str]) -> Iterator[Problem]:
    """Items of one foreach, and branches of one parallel node, that write one key."""
    if isinstance(node.config, ForeachConfig):
        items = as_list(node.config.items)
        if items is not None and len(items) <= 1:
            return
        for body in node.bodies:
            for key, path in level_writes(body.level).items():
                if key not in settled:
                    yield _conflict(
                        key,
                        path,
                        f"Each item of {node.id!r} writes context.{key}, side by side with the others",
                    )
    elif isinstance(node.config, ParallelConfig) and node.config.wait not in ("first", 1):
        first: dict[str, BodyView] = {}
        for body in node.bodies:
            for key, path in level_writes(body.level).items():
                other = first.setdefault(key, body)
                if other is not body and key not in settled:
                    yield _conflict(
                        key,
                        path,
                        f"The branches {other.branch!r} and {body.branch!r} of {node.id!r} both write "
                        f"context.{key}, side by side",
                    )


def _between_nodes(level: Level, settled: Collection[str]) -> Iterator[Problem]:
    """Nodes of one level that write one key."""
    shared = {key: ids for key, ids in level.writers.items() if len(ids) > 1 and key not in settled}
    if not shared:
        return
    reach, exclusion = level.facts.reach, Exclusion.of(level)
    names = list(level.view.nodes)
    for key, ids in shared.items():
        for later, rivals in exclusion.rivals(ids, reach):
            beside = rivals & ~(reach.above(later) | reach.below[later])
            while beside:
                earlier = names[_lowest(beside)]
                common = reach.below[earlier] & reach.below[later]
                if common or level.body is not None:
                    # The end of a body sees what all its nodes have written.
                    reader = repr(names[_lowest(common)]) if common else "the end of the body"
                    yield _conflict(
                        key,
                        level.writes[later][key],
                        f"{earlier!r} and {later!r} both write context.{key}, neither comes before the other, and "
                        f"{reader} comes after both",
                    )
                    break  # one for each place
                beside &= beside - 1


def _lowest(mask: int) -> int:
    """The place of the first node of a set."""
    return (mask & -mask).bit_length() - 1


def _conflict(key: str, path: str, message: str) -> Problem:
    return Problem.of(
        "state-conflict",
        path,
        message,
        f"Give {key[:80]!r} a reducer in state_schema (append, merge, sum, or replace: the last in document order "
        "counts), or let one come after the other",
    )
