"""A workflow as a graph of ops joined by `Nothing` edges; containers that Dagster sees into are graphs in it.

agentmesh_begin -> branch graphs, or the ops of the called workflow -> agentmesh_end
agentmesh_begin -> agentmesh_item[key] for each item                -> agentmesh_end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import dagster as dg

from agentmesh_dagster.compiler.graph_internals import DynamicCollectDependencyDefinition
from agentmesh_dagster.compiler.levels import Branches, Called, Level, Nested, construct_levels
from agentmesh_dagster.compiler.nested_ops import (
    GO,
    ITEMS,
    build_begin_op,
    build_end_op,
    build_fan_op,
    build_item_op,
)
from agentmesh_dagster.compiler.ops import UPSTREAM, Place, build_finish_op, build_inline_op, build_node_op
from agentmesh_dagster.compiler.ports import DONE, Port, construct_ports
from agentmesh_dagster.compiler.shown import construct_op_tags
from agentmesh_dagster.constants import BEGIN_OP, END_OP, FINISH_OP, INLINE_OP, ITEM_OP
from agentmesh_dagster.runtime.nodes.base import AnyNodeType
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.session import Pinned
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.names import identifier

_Wires: TypeAlias = "dict[str, dg.IDependencyDefinition]"
"""By input: what an op or a graph hangs on."""


class _Parts:
    """What a graph is made of."""

    def __init__(self) -> None:
        self.nodes: list[dg.NodeDefinition] = []
        self.wires: dict[dg.NodeInvocation, _Wires] = {}

    def add(self, node: dg.NodeDefinition, alias: str, wires: Mapping[str, dg.IDependencyDefinition]) -> None:
        self.nodes.append(node)
        self.wires[dg.NodeInvocation(node.name, alias=alias)] = dict(wires)


def construct_graph(pinned: Pinned, job: str, node_types: Mapping[str, AnyNodeType]) -> dg.GraphDefinition:
    """The graph of a job: its nodes, and `agentmesh_finish` behind `start` and all sinks; or one op that runs them all.

    Raises:
        DefinitionError: Nothing that is installed offers the type of some node (code `node-type-missing`).
    """
    if pinned.workflow.settings.execution == "inline":
        parts = _Parts()
        parts.add(build_inline_op(pinned, job), INLINE_OP, {})
    else:
        level = construct_levels(pinned, node_types)
        parts = _construct_level(Place(pinned, job, node_types), level)
        # `start` always yields its `done`, so that the fan-in runs when all sinks are decided, even if all are skipped.
        ends = dict.fromkeys([level.graph.order[0], *level.graph.sinks])
        upstream = _all_of([dg.DependencyDefinition(identifier(name), DONE) for name in ends])
        parts.add(build_finish_op(pinned, job), FINISH_OP, {UPSTREAM: upstream})
    return dg.GraphDefinition(
        name=job,
        description=pinned.workflow.description or None,
        node_defs=parts.nodes,
        dependencies=parts.wires,
    )


def _construct_level(place: Place, level: Level, begun_by: dg.DependencyDefinition | None = None) -> _Parts:
    """The ops and graphs of a level.

    Args:
        place: The level's.
        level: The level.
        begun_by: What its roots hang on; None where it is the graph's own input, or nothing (at the top).
    """
    graph = level.graph
    is_top = not level.path
    ports = {name: construct_ports(graph, name, is_top=is_top) for name in graph.nodes}
    parts = _Parts()
    for name, node in graph.nodes.items():
        incoming = graph.incoming[name]
        has_upstream = bool(incoming) or not is_top
        nested = level.nested.get(name)
        sources = [
            dg.DependencyDefinition(identifier(source), port.name)
            for source in dict.fromkeys(edge.source for edge in incoming)
            for port in ports[source]
            if any(edge.number in port.edges for edge in incoming)
        ]
        if not incoming and begun_by is not None:
            sources = [begun_by]
        parts.add(
            build_node_op(place, node, ports[name], has_upstream=has_upstream)
            if nested is None
            else _construct_container(place, node, nested, ports[name], has_upstream=has_upstream),
            identifier(name),
            {UPSTREAM: _all_of(sources)} if sources else {},
        )
    return parts


def _construct_container(
    place: Place, node: NodeSpec, nested: Nested, ports: tuple[Port, ...], *, has_upstream: bool
) -> dg.GraphDefinition:
    """The graph of a container, whose outputs are those of its last op."""
    inner = replace(place, path=(*place.path, node.id))
    go = dg.DependencyDefinition(BEGIN_OP, GO)
    ends = [dg.DependencyDefinition(BEGIN_OP, DONE)]
    collected: _Wires = {}
    if isinstance(nested, Called):
        parts = _construct_level(inner, nested.level, go)
        parts.add(build_begin_op(place, node, has_upstream=has_upstream), BEGIN_OP, {})
        ends += [dg.DependencyDefinition(identifier(name), DONE) for name in nested.level.graph.sinks]
    elif isinstance(nested, Branches):
        parts = _Parts()
        parts.add(build_begin_op(place, node, has_upstream=has_upstream), BEGIN_OP, {})
        for branch, level in nested.levels.items():
            graph = _construct_branch(replace(place, path=level.path), level)
            parts.add(graph, identifier(branch), {UPSTREAM: go})
            ends += [dg.DependencyDefinition(identifier(branch), end.name) for end in graph.output_defs]
    else:
        parts = _Parts()
        parts.add(build_fan_op(place, node, has_upstream=has_upstream), BEGIN_OP, {})
        items = dg.DependencyDefinition(BEGIN_OP, ITEMS)
        parts.add(build_item_op(place, node), ITEM_OP, {UPSTREAM: items})
        collected = {ITEMS: DynamicCollectDependencyDefinition(ITEM_OP, DONE)}
    end = build_end_op(place, node, ports, collects=bool(collected))
    parts.add(end, END_OP, {UPSTREAM: _all_of(ends), **collected})
    node_type = node_type_of(node, place.node_types)
    config = node_type.parse(node)
    return dg.GraphDefinition(
        name=inner.definition_name(),
        description=node.description or node_type.describe(config) or None,
        node_defs=parts.nodes,
        dependencies=parts.wires,
        input_mappings=[_mapped_input(BEGIN_OP)] if has_upstream else [],
        output_mappings=[_mapped_output(port.name, END_OP, port.name, port.description) for port in ports],
        tags=construct_op_tags(place.pinned.closure, node_type, config),
    )


def _construct_branch(place: Place, level: Level) -> dg.GraphDefinition:
    """The graph of a branch: its input begins all roots, and each sink has an output."""
    parts = _construct_level(place, level)
    graph = level.graph
    return dg.GraphDefinition(
        name=place.definition_name(),
        description=f"Branch {place.path[-1]!r} of {place.path[-2]!r}.",
        node_defs=parts.nodes,
        dependencies=parts.wires,
        input_mappings=[_mapped_input(identifier(name)) for name in graph.nodes if not graph.incoming[name]],
        output_mappings=[
            _mapped_output(f"{identifier(name)}__{DONE}", identifier(name), DONE, f"{name} is decided.")
            for name in graph.sinks
        ],
    )


def _all_of(sources: list[dg.DependencyDefinition]) -> dg.IDependencyDefinition:
    if len(sources) == 1:
        # Dagster cannot take a selection of steps apart where a graph has a fan-in of one.
        return sources[0]
    # A list of a wider type in Dagster, and lists are invariant.
    found: list[Any] = [*sources]
    return dg.MultiDependencyDefinition(found)


def _mapped_input(alias: str) -> dg.InputMapping:
    return dg.InputMapping(graph_input_name=UPSTREAM, mapped_node_name=alias, mapped_node_input_name=UPSTREAM)


def _mapped_output(name: str, alias: str, output: str, description: str | None = None) -> dg.OutputMapping:
    return dg.OutputMapping(
        graph_output_name=name,
        mapped_node_name=alias,
        mapped_node_output_name=output,
        graph_output_description=description,
    )
