"""A level in its surroundings: which level encloses it, what its nodes may name, and who writes the state in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.validation.reach import Reach
from agentmesh_dagster.validation.view import BodyView, LevelView, NodeView, set_path


@dataclass(frozen=True)
class GraphFacts:
    """What the rules after those of the graph may rely on."""

    reach: Reach
    uncertain: frozenset[str]
    """Nodes of which it is not known what runs before them, because an edge or a node there is wrong."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of a workflow: its own, or a body's."""

    view: LevelView
    facts: GraphFacts
    body: BodyView | None = None
    """None for the workflow's own level."""
    parent: Level | None = None
    """The level that encloses it."""
    owner: NodeView | None = None
    """The node of the enclosing level that runs it; None for `on_failure` and `finally`, which see all its nodes."""
    names: frozenset[str] = frozenset()
    """What its expressions see besides what every workflow's see: `item`, `index`, `iteration`."""
    is_ending: bool = False
    """Whether it runs when the run has ended: it belongs to `on_failure` or `finally`."""

    @cached_property
    def by_name(self) -> dict[str, NodeView]:
        """Nodes by their name in expressions."""
        found: dict[str, NodeView] = {}
        for node in self.view.nodes.values():
            found.setdefault(node.name, node)
        return found

    @cached_property
    def inside(self) -> dict[str, NodeView]:
        """The nodes of this level by the names of those that stand inside of them."""
        return {name: node for node in self.view.nodes.values() for name in _names_inside(node)}

    @cached_property
    def writes(self) -> dict[str, Mapping[str, str]]:
        """For each node that writes the state, itself or by what it runs: its keys, with the places of the writes."""
        found = {node.id: writes_of(node) for node in self.view.nodes.values()}
        return {name: keys for name, keys in found.items() if keys}

    @cached_property
    def writers(self) -> dict[str, tuple[str, ...]]:
        """Each key of the state that is written here, to the ids of the nodes that do."""
        found: dict[str, list[str]] = {}
        for name, keys in self.writes.items():
            for key in keys:
                found.setdefault(key, []).append(name)
        return {key: tuple(names) for key, names in found.items()}

    @cached_property
    def writer_masks(self) -> dict[str, int]:
        """The same, as sets of `Reach`."""
        return {key: self.facts.reach.mask(names) for key, names in self.writers.items()}

    @property
    def repeats(self) -> bool:
        """Whether one pass through it comes after another, which has written the state."""
        return self.owner is not None and self.owner.repeats

    def enclosing(self) -> Iterator[Level]:
        """The levels around it, the nearest first."""
        level = self.parent
        while level is not None:
            yield level
            level = level.parent


def own_writes(node: NodeView) -> dict[str, str]:
    """The keys of a node's own `set`, with their places."""
    return {key: set_path(node, key) for key in as_object(node.raw.get("set")) or {}}


def body_writes(node: NodeView) -> dict[str, str]:
    """The keys that a node's bodies write, of any depth, each with the place of the first write."""
    found: dict[str, str] = {}
    for body in node.bodies:
        for key, path in level_writes(body.level).items():
            found.setdefault(key, path)
    return found


def level_writes(view: LevelView) -> dict[str, str]:
    """The keys that the nodes of a level write, with what they run, each with the place of the first write."""
    found: dict[str, str] = {}
    for node in view.all_nodes:
        for key, path in writes_of(node).items():
            found.setdefault(key, path)
    return found


def writes_of(node: NodeView) -> Mapping[str, str]:
    """The keys that a node writes, itself or by what it runs, each with the place of the first write."""
    return body_writes(node) | own_writes(node) if node.bodies else own_writes(node)


def _names_inside(node: NodeView) -> Iterator[str]:
    waiting = list(node.bodies)
    while waiting:
        for inner in waiting.pop().level.all_nodes:
            yield inner.name
            waiting += inner.bodies
