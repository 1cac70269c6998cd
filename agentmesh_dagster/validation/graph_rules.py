"""Rules of nodes and edges: ends, handles, and that every way leads from the start to an end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from agentmesh_dagster.constants import HANDLE_ERROR
from agentmesh_dagster.specs.nodes import BranchConfig, NodeConfig
from agentmesh_dagster.specs.problems import Problem, Suggestions, suggestion
from agentmesh_dagster.validation.level import GraphFacts
from agentmesh_dagster.validation.reach import Reach
from agentmesh_dagster.validation.view import EdgeView, LevelView, NodeView

_SHOWN: Final = 8


def graph_problems(view: LevelView, problems: list[Problem]) -> GraphFacts:
    """Finds all problems of the graph of one level; a consequence of one problem is not told as another."""
    is_body = view.path != ""
    nodes = view.nodes
    near = Suggestions(nodes)
    problems += _body_ends(view) if is_body else _ends(view)
    sound = _sound_edges(view, near, problems)
    problems += _repeated(view.edges)
    problems += _handles(view)
    reach = Reach.of(nodes, ((str(e.source), str(e.target)) for e in sound))
    problems += _cycles(view, reach)
    problems += _joins(view, sound)
    places = {e.path for e in sound}
    broken = [e for e in view.edges if e.path not in places]
    # A name that is nearly a node's is most likely meant for it.
    cut_targets = {name for e in broken if (name := _meant(e.target, nodes, near)) is not None}
    cut_sources = {name for e in broken if (name := _meant(e.source, nodes, near)) is not None}
    if not view.has_edges:
        return GraphFacts(reach, frozenset(nodes))
    if is_body:
        # Its roots begin with it, and what nothing comes after ends it.
        return GraphFacts(reach, frozenset(reach.reached_from(cut_targets)))
    lost = dict(_unreachable(view, reach, cut_targets))
    problems += lost.values()
    problems += _dead_ends(view, reach, cut_sources | set(lost))
    return GraphFacts(reach, frozenset(reach.reached_from(cut_targets | set(lost))))


def _meant(name: str | None, nodes: Mapping[str, NodeView], near: Suggestions) -> str | None:
    if name is None or name in nodes:
        return name
    return near.nearest(name)


def _body_ends(view: LevelView) -> Iterator[Problem]:
    for node in view.all_nodes:
        if node.is_start or node.is_end:
            yield Problem.of(
                "body-start-end",
                node.path,
                f"{node.id!r}, of type {node.type!r}, stands in a body",
                "Remove it: a body begins at the nodes that no edge leads into, and ends at those that none leaves",
            )


def _ends(view: LevelView) -> Iterator[Problem]:
    starts = [node for node in view.all_nodes if node.is_start]
    for extra in starts[1:]:
        yield Problem.of(
            "start-duplicate",
            extra.path,
            f"There is a start node already, {starts[0].id!r} ({starts[0].path})",
            "Keep one start node, and lead its edges to both places",
        )
    # A node whose type is not known may be meant as the missing one.
    if not view.is_complete:
        return
    if not starts:
        yield Problem.of(
            "start-missing", "nodes", "There is no start node", "Add {id: start, type: start} and an edge"
        )
    if not any(node.is_end for node in view.all_nodes):
        yield Problem.of(
            "end-missing", "nodes", "There is no end node", "Add {id: end, type: end} and an edge to it"
        )


def _sound_edges(view: LevelView, near: Suggestions, problems: list[Problem]) -> list[EdgeView]:
    """The edges that begin and end at nodes where edges may."""
    nodes = view.nodes
    sound: list[EdgeView] = []
    for edge in view.edges:
        dangling = False
        for end, name in (("source", edge.source), ("target", edge.target)):
            if name is None or name in nodes:
                dangling = dangling or name is None
                continue
            dangling = True
            verb = "begins" if end == "source" else "ends"
            problems.append(
                Problem.of(
                    "edge-dangling",
                    f"{edge.path}.{end}",
                    f"The edge {verb} at {name[:80]!r}, and there is no such node",
                    near.mend(name),
                )
            )
        if dangling:
            continue
        is_placed = True
        if view.path:
            sound.append(edge)  # its start and end nodes are told as such
            continue
        if nodes[str(edge.target)].is_start:
            is_placed = False
            problems.append(
                Problem.of(
                    "edge-into-start",
                    f"{edge.path}.target",
                    f"An edge leads from {edge.source!r} into the start node {edge.target!r}",
                    "Lead it to the node after the start, or repeat nodes with a loop node",
                )
            )
        if nodes[str(edge.source)].is_end:
            is_placed = False
            problems.append(
                Problem.of(
                    "edge-out-of-end",
                    f"{edge.path}.source",
                    f"An edge leads out of the end node {edge.source!r}",
                    "Lead it from the node before the end",
                )
            )
        if is_placed:
            sound.append(edge)
    return sound


def _repeated(edges: Sequence[EdgeView]) -> Iterator[Problem]:
    seen: dict[tuple[str, str, str | None, str], EdgeView] = {}
    for edge in edges:
        if edge.source is None or edge.target is None:
            continue
        key = (edge.source, edge.target, edge.handle, repr(edge.raw.get("condition")))
        first = seen.setdefault(key, edge)
        if first is not edge:
            yield Problem.of(
                "edge-duplicate",
                edge.path,
                f"{first.path} leads from {edge.source!r} to {edge.target!r} already, by the same handle",
                "Remove one of them",
            )


def _handles(view: LevelView) -> Iterator[Problem]:
    leaving: dict[str, list[EdgeView]] = defaultdict(list)
    for edge in view.edges:
        if edge.source is not None:
            leaving[edge.source].append(edge)
    for node in view.nodes.values():
        if node.config is None or node.is_end:
            continue
        faulty = not view.has_edges
        offered = dict.fromkeys(node.config.handles())
        for edge in leaving[node.id]:
            for problem in _handle_of(node, node.config, edge, offered):
                faulty = True
                yield problem
        used = {edge.handle for edge in leaving[node.id]}
        if isinstance(node.config, BranchConfig) and node.config.default is None:
            yield Problem.of(
                "branch-no-default",
                f"{node.path}.config",
                f"The branch {node.id!r} has no 'default': when no condition is true, nothing after it runs",
                "Give it a default handle, with an edge",
            )
        # A handle that is misspelled on the edge is told there.
        # Of a node that nothing leaves, that is told.
        if (used or node.config.must_cover_handles) and not faulty:
            for handle in node.config.needed_handles(has_default_edge=None in used):
                if handle not in used:
                    yield Problem.of(
                        "handle-uncovered",
                        f"{node.path}.config",
                        f"No edge leaves {node.id!r} by its handle {handle!r}: that way ends there",
                        f"Add an edge {{source: {node.id}, source_handle: {handle}, target: ...}}, unless it is to end",
                    )
        if view.has_edges and _routes(node) and HANDLE_ERROR not in used:
            yield Problem.of(
                "error-edge-missing",
                f"{node.path}.on_error",
                f"{node.id!r} routes its errors, and no edge leaves it by the handle 'error'",
                f"Add an edge {{source: {node.id}, source_handle: error, target: ...}}",
            )


def _routes(node: NodeView) -> bool:
    return node.spec is not None and node.spec.on_error == "route"


def _handle_of(
    node: NodeView, config: NodeConfig, edge: EdgeView, offered: Collection[str]
) -> Iterator[Problem]:
    if edge.handle is None:
        if config.never_succeeds:
            yield Problem.of(
                "handle-missing",
                edge.path,
                f"The edge leaves {node.id!r}, of type {node.type!r}, which never leads on",
                "Remove the edge, or give it source_handle: error and the node on_error: route",
            )
        elif not config.has_default_handle:
            yield Problem.of(
                "handle-missing",
                edge.path,
                f"The edge leaves {node.id!r}, of type {node.type!r}, by no handle",
                f"Add source_handle, one of {', '.join(repr(h) for h in offered)}",
            )
    elif edge.handle == HANDLE_ERROR and HANDLE_ERROR not in offered:
        if not _routes(node):
            yield Problem.of(
                "handle-error-unrouted",
                f"{edge.path}.source_handle",
                f"The edge leaves {node.id!r} by the handle 'error', which it does not use",
                f"Give the node {node.id!r} on_error: route",
            )
    elif edge.handle not in offered:
        mend = suggestion(edge.handle, offered) if offered else "Leave source_handle out"
        yield Problem.of(
            "handle-unknown",
            f"{edge.path}.source_handle",
            f"{node.id!r}, of type {node.type!r}, has no handle {edge.handle[:80]!r}",
            mend,
        )


def _cycles(view: LevelView, reach: Reach) -> Iterator[Problem]:
    for cycle in reach.cycles:
        shown = [repr(name) for name in cycle[:_SHOWN]]
        more = ["..."] if len(cycle) > _SHOWN else []
        yield Problem.of(
            "cycle",
            view.nodes[cycle[0]].path,
            f"The nodes {' -> '.join([*shown, *more, repr(cycle[0])])} form a cycle",
            "Remove an edge, or put what repeats into the body of a loop node",
        )


def _joins(view: LevelView, sound: Sequence[EdgeView]) -> Iterator[Problem]:
    """Joins that wait for more edges than there are."""
    if not view.has_edges or len(sound) != len(view.edges):
        return
    incoming = Counter(edge.target for edge in sound)
    for node in view.nodes.values():
        join = node.spec.join if node.spec is not None else "any"
        if not incoming[node.id] and not view.path and not node.is_start:
            continue  # that nothing leads to it is told
        if isinstance(join, int) and join > max(incoming[node.id], 1):
            yield Problem.of(
                "join-too-many",
                f"{node.path}.join",
                f"{node.id!r} runs when {join} of its edges are live, and {_edges(incoming[node.id])} into it",
                "Write a smaller number, or 'all', or add an edge",
            )


def _edges(number: int) -> str:
    return "no edge leads" if number == 0 else "1 edge leads" if number == 1 else f"{number} edges lead"


def _unreachable(view: LevelView, reach: Reach, cut: set[str]) -> Iterator[tuple[str, Problem]]:
    """Nodes that nothing leads to; what comes after them is a consequence."""
    if not any(node.is_start for node in view.all_nodes):
        return
    for node in view.nodes.values():
        if not reach.predecessors[node.id] and not node.is_start and node.id not in cut:
            yield (
                node.id,
                Problem.of(
                    "node-unreachable",
                    node.path,
                    f"No way leads from the start to {node.id!r}",
                    "Add an edge into it, or remove the node",
                ),
            )


def _dead_ends(view: LevelView, reach: Reach, told: set[str]) -> Iterator[Problem]:
    """Nodes after which nothing comes; what leads to them alone is a consequence."""
    if not any(node.is_end for node in view.all_nodes):
        return
    for node in view.nodes.values():
        if (
            not reach.successors[node.id]
            and not node.is_end
            and node.config_type is not None
            and not node.config_type.never_succeeds
            and node.id not in told
        ):
            yield Problem.of(
                "node-dead-end",
                node.path,
                f"No edge leaves {node.id!r}: that way ends there, without an output",
                "Add an edge out of it, unless it is to end",
            )
