"""A workflow's graph, indexed for walking. Pure and immutable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Literal

from agentmesh_dagster.specs.documents import EdgeSpec, NodeSpec


@dataclass(frozen=True)
class Edge:
    """An edge with its number in the document, which names it in the journal."""

    number: int
    source: str
    target: str
    handle: str | None
    condition: str | None


@dataclass(frozen=True)
class Graph:
    """Nodes and edges of a valid workflow (or body): ends exist, no cycle."""

    node_specs: tuple[NodeSpec, ...]
    edges: tuple[Edge, ...]

    @staticmethod
    def of(nodes: Sequence[NodeSpec], edges: Sequence[EdgeSpec]) -> Graph:
        """The graph of a document's nodes and edges."""
        return Graph(
            tuple(nodes),
            tuple(Edge(n, e.source, e.target, e.source_handle, e.condition) for n, e in enumerate(edges)),
        )

    @cached_property
    def nodes(self) -> dict[str, NodeSpec]:
        """Nodes by id, in document order."""
        return {node.id: node for node in self.node_specs}

    @cached_property
    def incoming(self) -> dict[str, tuple[Edge, ...]]:
        """Edges into each node, in document order."""
        return self._grouped("target")

    @cached_property
    def outgoing(self) -> dict[str, tuple[Edge, ...]]:
        """Edges out of each node, in document order."""
        return self._grouped("source")

    def _grouped(self, end: Literal["source", "target"]) -> dict[str, tuple[Edge, ...]]:
        groups: dict[str, list[Edge]] = {name: [] for name in self.nodes}
        for edge in self.edges:
            groups[edge.source if end == "source" else edge.target].append(edge)
        return {name: tuple(edges) for name, edges in groups.items()}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Node ids in topological order; document order among equals."""
        sorter = TopologicalSorter({n: [e.source for e in self.incoming[n]] for n in self.nodes})
        sorter.prepare()
        position = {name: index for index, name in enumerate(self.nodes)}
        done: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=position.__getitem__)
            done.extend(ready)
            sorter.done(*ready)
        return tuple(done)

    @cached_property
    def ancestors(self) -> dict[str, tuple[str, ...]]:
        """All nodes before each node, in topological order."""
        found: dict[str, set[str]] = {}
        for name in self.order:
            above = {e.source for e in self.incoming[name]}
            found[name] = above.union(*(found[a] for a in above))
        rank = {name: index for index, name in enumerate(self.order)}
        return {name: tuple(sorted(above, key=rank.__getitem__)) for name, above in found.items()}

    @cached_property
    def before(self) -> dict[str, int]:
        """How many nodes have edges into each node."""
        return {name: len({edge.source for edge in edges}) for name, edges in self.incoming.items()}

    @cached_property
    def after(self) -> dict[str, tuple[str, ...]]:
        """The nodes that edges lead to from each node, each once."""
        return {
            name: tuple(dict.fromkeys(edge.target for edge in edges)) for name, edges in self.outgoing.items()
        }

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """Nodes that no edge leads to, in topological order."""
        return tuple(name for name in self.order if not self.before[name])

    @cached_property
    def sinks(self) -> tuple[str, ...]:
        """Nodes that no edge leaves."""
        return tuple(name for name in self.nodes if not self.outgoing[name])
