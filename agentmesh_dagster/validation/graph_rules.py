"""Rules of nodes and edges: names, ends, handles, and that every way leads from the start to an end."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.constants import FINISH_OP, HANDLE_ERROR
from agentmesh_dagster.specs.base import NODE_ID_PATTERN
from agentmesh_dagster.specs.nodes import BranchConfig
from agentmesh_dagster.specs.problems import Problem, Suggestions, suggestion
from agentmesh_dagster.validation.reach import Reach
from agentmesh_dagster.validation.view import EdgeView, NodeView, WorkflowView

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SHOWN: Final = 8


@dataclass(frozen=True)
class GraphFacts:
    """What the rules after these may rely on."""

    reach: Reach
    uncertain: frozenset[str]
    """Nodes of which it is not known what runs before them, because an edge or a node there is wrong."""


def graph_problems(view: WorkflowView, problems: list[Problem]) -> GraphFacts:
    """Finds all problems of a workflow's graph; a consequence of one problem is not told as another."""
    nodes = view.nodes
    near = Suggestions(nodes)
    problems += _node_names(view)
    problems += _ends(view)
    sound = _sound_edges(view, near, problems)
    problems += _repeated(view.edges)
    problems += _handles(view)
    problems += _node_settings(view)
    reach = Reach.of(nodes, ((str(e.source), str(e.target)) for e in sound))
    problems += _cycles(view, reach)
    numbers = {e.index for e in sound}
    broken = [e for e in view.edges if e.index not in numbers]
    # A name that is nearly a node's is most likely meant for it.
    cut_targets = {name for e in broken if (name := _meant(e.target, nodes, near)) is not None}
    cut_sources = {name for e in broken if (name := _meant(e.source, nodes, near)) is not None}
    if not view.has_edges:
        return GraphFacts(reach, frozenset(nodes))
    lost = dict(_unreachable(view, reach, cut_targets))
    problems += lost.values()
    problems += _dead_ends(view, reach, cut_sources | set(lost))
    return GraphFacts(reach, frozenset(reach.reached_from(cut_targets | set(lost))))


def _meant(name: str | None, nodes: Mapping[str, NodeView], near: Suggestions) -> str | None:
    if name is None or name in nodes:
        return name
    return near.nearest(name)


def _node_names(view: WorkflowView) -> Iterator[Problem]:
    by_id: dict[str, NodeView] = {}
    by_name: dict[str, NodeView] = {}
    for node in view.all_nodes:
        path = f"{node.path}.id"
        if not NODE_ID_PATTERN.match(node.id):
            yield Problem.of(
                "node-id-invalid",
                path,
                f"The node id {node.id[:80]!r} is not well-formed",
                "Begin with a letter, then up to 62 letters, digits, '-' or '_', no two '-' or '_' side by side",
            )
        first = by_id.setdefault(node.id, node)
        if first is not node:
            yield Problem.of(
                "node-id-duplicate",
                path,
                f"{first.path} has the id {node.id!r} already",
                "Give one of them another id",
            )
            continue
        if node.name == FINISH_OP:
            yield Problem.of(
                "node-id-collision",
                path,
                f"{node.id!r} is the name of the op that ends every run",
                "Give the node another id",
            )
        same = by_name.setdefault(node.name, node)
        if same is not node:
            yield Problem.of(
                "node-id-collision",
                path,
                f"The ids {same.id!r} ({same.path}) and {node.id!r} are both {node.name!r} in expressions",
                "Rename one of them",
            )


def _ends(view: WorkflowView) -> Iterator[Problem]:
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


def _sound_edges(view: WorkflowView, near: Suggestions, problems: list[Problem]) -> list[EdgeView]:
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


def _handles(view: WorkflowView) -> Iterator[Problem]:
    leaving: dict[str, list[EdgeView]] = defaultdict(list)
    for edge in view.edges:
        if edge.source is not None:
            leaving[edge.source].append(edge)
    for node in view.nodes.values():
        if node.config is None or node.is_end:
            continue
        faulty = not view.has_edges
        for edge in leaving[node.id]:
            for problem in _handle_of(node, edge):
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
                        f"No edge leaves {node.id!r} by its handle {handle!r}",
                        f"Add an edge {{source: {node.id}, source_handle: {handle}, target: ...}}",
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


def _handle_of(node: NodeView, edge: EdgeView) -> Iterator[Problem]:
    if node.config is None:
        return
    offered = node.config.handles()
    if edge.handle is None:
        if not node.config.has_default_handle:
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


def _node_settings(view: WorkflowView) -> Iterator[Problem]:
    for node in view.all_nodes:
        keys = node.raw.get("set")
        if isinstance(keys, dict):
            for key in keys:  # pyright: ignore[reportUnknownVariableType] - any JSON
                if isinstance(key, str) and (not _IDENTIFIER.match(key) or key == "last_output"):
                    yield Problem.of(
                        "set-key-invalid",
                        f"{node.path}.set",
                        f"{key[:80]!r} cannot be written as context.{key[:80]}",
                        "Use letters, digits and '_', not beginning with a digit; 'last_output' is taken",
                    )
        if node.is_start or node.is_end:
            for name, default in (
                ("retry", None),
                ("timeout_s", None),
                ("on_error", "fail"),
                ("on_unknown", "human"),
            ):
                if node.raw.get(name) not in (None, default):
                    yield Problem.of(
                        "setting-without-effect",
                        f"{node.path}.{name}",
                        f"{name!r} does nothing on a node of type {node.type!r}",
                        "Remove it",
                    )


def _cycles(view: WorkflowView, reach: Reach) -> Iterator[Problem]:
    for cycle in reach.cycles:
        shown = [repr(name) for name in cycle[:_SHOWN]]
        more = ["..."] if len(cycle) > _SHOWN else []
        yield Problem.of(
            "cycle",
            view.nodes[cycle[0]].path,
            f"The nodes {' -> '.join([*shown, *more, repr(cycle[0])])} form a cycle",
            "Remove an edge, or put what repeats into the body of a loop node",
        )


def _unreachable(view: WorkflowView, reach: Reach, cut: set[str]) -> Iterator[tuple[str, Problem]]:
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


def _dead_ends(view: WorkflowView, reach: Reach, told: set[str]) -> Iterator[Problem]:
    """Nodes after which nothing comes; what leads to them alone is a consequence."""
    if not any(node.is_end for node in view.all_nodes):
        return
    for node in view.nodes.values():
        if (
            not reach.successors[node.id]
            and not node.is_end
            and node.config_type is not None
            and node.id not in told
        ):
            yield Problem.of(
                "node-dead-end",
                node.path,
                f"No way leads from {node.id!r} to an end node",
                "Add an edge out of it",
            )


def ungated(view: WorkflowView, reach: Reach, gates: Mapping[str, bool]) -> set[str]:
    """Nodes that some way reaches from the start without passing a gate."""
    starts = [node.id for node in view.nodes.values() if node.is_start]
    return reach.reached_from(starts, through=[name for name in view.nodes if not gates.get(name, False)])
