"""What a workflow becomes in Dagster: which of its containers are nested graphs, and the names of all ops. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.constants import BEGIN_OP, END_OP, FINISH_OP, INLINE_OP, ITEM_OP
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.runtime.nodes.base import AnyNodeType
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.session import Pinned
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.levels import body_graph, called_workflow, is_walked
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.nodes import ParallelConfig, WorkflowConfig


@dataclass(frozen=True)
class Level:
    """Nodes that stand side by side in one Dagster graph."""

    path: tuple[str, ...]
    """The ids that lead to it: none at the top, `("both", "left")` in a branch, `("call",)` in a called workflow."""
    graph: Graph
    nested: Mapping[str, Nested]
    """By node id: the containers that become nested graphs. Every other node is one op."""


@dataclass(frozen=True)
class Branches:
    """A `parallel` node: a graph for each branch, by its name."""

    levels: Mapping[str, Level]


@dataclass(frozen=True)
class Called:
    """A `workflow` node: the ops of the workflow that it calls."""

    level: Level


@dataclass(frozen=True)
class FannedOut:
    """A `foreach` node whose items are dynamic outputs, each a step of its own that walks the body."""


Nested = Branches | Called | FannedOut


MAX_OPS: Final = 5_000
"""So many nodes may be ops of one job; a workflow that is called twice counts twice."""


def construct_levels(pinned: Pinned, node_types: Mapping[str, AnyNodeType]) -> Level:
    """The top level of a workflow, with all below it that Dagster sees.

    Raises:
        DefinitionError: Nothing that is installed offers the type of some node (code `node-type-missing`), or there are
            too many ops (`too-many-ops`).
    """
    workflow = pinned.workflow
    return _Levels(pinned, node_types).of(Graph.of(workflow.nodes, workflow.edges), ())


class _Levels:
    """Makes the levels of one workflow, and counts their nodes."""

    def __init__(self, pinned: Pinned, node_types: Mapping[str, AnyNodeType]) -> None:
        self._slug = pinned.slug
        self._closure = pinned.closure
        self._node_types = node_types
        self._nodes = 0

    def of(self, graph: Graph, path: tuple[str, ...]) -> Level:
        self._nodes += len(graph.nodes)
        if self._nodes > MAX_OPS:
            raise DefinitionError(
                f"the workflow {self._slug!r}, with all that it calls, comes to more than {MAX_OPS:,} ops: give it, or "
                "a workflow that it calls many times, settings.execution: inline",
                code="too-many-ops",
            )
        nested = {name: self._nested(node, (*path, name)) for name, node in graph.nodes.items()}
        return Level(path, graph, {name: found for name, found in nested.items() if found is not None})

    def _nested(self, node: NodeSpec, path: tuple[str, ...]) -> Nested | None:
        node_type = node_type_of(node, self._node_types)
        if not node_type.config_model.is_container:
            return None
        config = node_type.parse(node)
        if is_walked(node, config, self._closure):
            return None
        if isinstance(config, ParallelConfig):
            bodies = config.branches.items()
            return Branches(
                {name: self.of(body_graph(body, self._closure), (*path, name)) for name, body in bodies}
            )
        if isinstance(config, WorkflowConfig):
            called = called_workflow(config.workflow, self._closure)
            return Called(self.of(Graph.of(called.nodes, called.edges), path))
        return FannedOut()


def definition_name(job: str, *path: str) -> str:
    """The name of an op or a graph in a code location, where every definition has one of its own.

    Args:
        job: The job.
        path: The ids that lead to it, and its own. None holds two adjacent underscores, or begins with one, so that
            two paths never give the same name.
    """
    return "__".join([job, *map(identifier, path)])


def op_names(pinned: Pinned, node_types: Mapping[str, AnyNodeType]) -> frozenset[str]:
    """The step keys of the job of a workflow; the items of a fan-out stand as `each.agentmesh_item[?]`."""
    if pinned.workflow.settings.execution == "inline":
        return frozenset([INLINE_OP])
    return frozenset([*_step_keys(construct_levels(pinned, node_types), ""), FINISH_OP])


def _step_keys(level: Level, prefix: str) -> Iterator[str]:
    for name in level.graph.nodes:
        key = prefix + identifier(name)
        nested = level.nested.get(name)
        if nested is None:
            yield key
            continue
        yield f"{key}.{BEGIN_OP}"
        yield f"{key}.{END_OP}"
        if isinstance(nested, FannedOut):
            yield f"{key}.{ITEM_OP}[?]"
        elif isinstance(nested, Called):
            yield from _step_keys(nested.level, f"{key}.")
        else:
            for branch, inner in nested.levels.items():
                yield from _step_keys(inner, f"{key}.{identifier(branch)}.")
