"""The outputs of an op: one for each way out of a node that Dagster must tell apart."""

from __future__ import annotations

from dataclasses import dataclass

from agentmesh_dagster.specs.graph import Graph

WAITING = "waiting"
"""The output of a node that waits: nothing hangs on it, it shows what the node waits for."""
DONE = "done"
"""The output that says no more than that the node is decided."""


@dataclass(frozen=True)
class Port:
    """One op output, `h_<n>`: the edges of a node that share handle and condition are live together."""

    name: str
    handle: str | None
    condition: str | None
    edges: tuple[int, ...]

    @property
    def description(self) -> str:
        """The handle and the condition, for people."""
        words = self.handle or "done"
        return f"{words}, when {self.condition}" if self.condition else words

    def is_live(self, live: frozenset[int]) -> bool:
        """Whether the output is yielded; a sink's port always is."""
        return not self.edges or not live.isdisjoint(self.edges)


def construct_ports(graph: Graph, node_id: str, *, is_top: bool = True) -> tuple[Port, ...]:
    """The ports of a node.

    A sink, and a root at the top, have a port without edges, `done`, for what ends their level: it is yielded whatever
    was chosen.

    Args:
        graph: The node's level.
        node_id: The node.
        is_top: Whether the level is the workflow's own. What ends another level hangs on `agentmesh_begin`.
    """
    groups: dict[tuple[str | None, str | None], list[int]] = {}
    for edge in graph.outgoing[node_id]:
        groups.setdefault((edge.handle, edge.condition), []).append(edge.number)
    ports = [
        Port(f"h_{n}", handle, condition, tuple(edges))
        for n, ((handle, condition), edges) in enumerate(groups.items())
    ]
    if not groups or (is_top and not graph.incoming[node_id]):
        ports.append(Port(DONE, None, None, ()))
    return tuple(ports)
