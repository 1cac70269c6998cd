"""Who runs, who is skipped, which edges are live: the one owner of that rule, pure.

A node runs when all its incoming edges are decided and its join rule holds; it is skipped when they are decided and
it does not hold. Edges of a finished node were decided when it finished: its row lists the live ones. Dagster's ops,
the finishing op and the graph walker all ask here, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from agentmesh_dagster.records import Step, StepStatus
from agentmesh_dagster.specs.graph import Edge, Graph


class NodeState(Enum):
    """Where a node stands, as far as the journal's rows tell."""

    FINISHED = "finished"
    """It has a row that is an answer."""
    READY = "ready"
    """All incoming edges are decided and its join rule holds."""
    SKIPPED = "skipped"
    """All incoming edges are decided and its join rule does not hold."""
    UNDECIDED = "undecided"
    """A node before it has not finished."""


class EdgeState(Enum):
    """Whether an edge carries the run on."""

    LIVE = "live"
    DEAD = "dead"
    UNDECIDED = "undecided"


def live_edges(row: Step) -> frozenset[int]:
    """The numbers of the live outgoing edges of a finished node."""
    decision = row.routing_decision
    return frozenset(decision["edges"]) if decision else frozenset()


def settle(
    graph: Graph, rows: Mapping[str, Step], nodes: Iterable[str] | None = None
) -> dict[str, NodeState]:
    """The state of each node.

    Args:
        graph: The workflow's graph.
        rows: Rows by node id; nodes without a row are decided by those before them.
        nodes: The nodes asked for, in topological order, with all their ancestors; default all.
    """
    states: dict[str, NodeState] = {}
    for name in graph.order if nodes is None else nodes:
        row = rows.get(name)
        if row is not None and row.is_finished:
            states[name] = NodeState.FINISHED
            continue
        found = [edge_state(edge, rows, states) for edge in graph.incoming[name]]
        if EdgeState.UNDECIDED in found:
            states[name] = NodeState.UNDECIDED
        else:
            states[name] = NodeState.READY if _joins(graph, name, found) else NodeState.SKIPPED
    return states


def state_after(graph: Graph, node_id: str, finished: Mapping[str, Step]) -> NodeState:
    """Whether a node runs, all of whose ancestors are decided: `READY` or `SKIPPED`."""
    found = [EdgeState.LIVE if is_live(e, finished) else EdgeState.DEAD for e in graph.incoming[node_id]]
    return NodeState.READY if _joins(graph, node_id, found) else NodeState.SKIPPED


def _joins(graph: Graph, name: str, found: list[EdgeState]) -> bool:
    """Whether a node's join rule holds, all of whose incoming edges are decided; a root's does."""
    join = graph.nodes[name].join
    needed = {"any": min(1, len(found)), "all": len(found)}[join] if isinstance(join, str) else join
    return found.count(EdgeState.LIVE) >= needed


def is_live(edge: Edge, finished: Mapping[str, Step]) -> bool:
    """Whether an edge is live, all of whose ancestors are decided.

    Args:
        edge: The edge.
        finished: Finished rows by node id; a decided node without one was skipped.
    """
    row = finished.get(edge.source)
    return row is not None and row.status is not StepStatus.SKIPPED and edge.number in live_edges(row)


def edge_state(edge: Edge, rows: Mapping[str, Step], states: Mapping[str, NodeState]) -> EdgeState:
    """The state of an edge whose source is settled."""
    state = states[edge.source]
    if state is NodeState.SKIPPED:
        return EdgeState.DEAD
    if state is not NodeState.FINISHED:
        return EdgeState.UNDECIDED
    return EdgeState.LIVE if is_live(edge, rows) else EdgeState.DEAD
