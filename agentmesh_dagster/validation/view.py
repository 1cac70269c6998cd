"""A raw workflow as the rules see it: every node and edge that is well-formed enough, with its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from agentmesh_dagster.specs.documents import NodeSpec, WorkflowSettings
from agentmesh_dagster.specs.fields import JsonObject
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.nodes import LoopConfig, NodeConfig
from agentmesh_dagster.specs.problems import child_path


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node that has an id."""

    path: str
    """Where the node stands in the document: `nodes[2].config.body.nodes[0]`."""
    id: str
    type: str | None
    """None where it is missing or no text."""
    raw: JsonObject
    spec: NodeSpec | None
    """The node without its wrong fields, or None where too much is wrong."""
    config_type: type[NodeConfig] | None
    """None for an unknown type."""
    config: NodeConfig | None
    """None where the config is wrong: then nothing is known of the handles. Its bodies are hollow: see `bodies`."""
    bodies: tuple[BodyView, ...] = ()
    """What it runs, in document order."""

    @property
    def name(self) -> str:
        """The node in expressions and in Dagster."""
        return identifier(self.id)

    @property
    def is_start(self) -> bool:
        """Whether runs begin here."""
        return self.config_type is not None and self.config_type.is_start

    @property
    def is_end(self) -> bool:
        """Whether runs end here."""
        return self.config_type is not None and self.config_type.is_end

    @property
    def repeats(self) -> bool:
        """Whether its body runs again and again, each time after the time before."""
        return self.config_type is not None and issubclass(self.config_type, LoopConfig)


@dataclass(frozen=True, kw_only=True)
class EdgeView:
    """One edge; an end that is missing or no text is None."""

    path: str
    """Where the edge stands in the document."""
    source: str | None
    target: str | None
    handle: str | None
    raw: JsonObject


@dataclass(frozen=True, kw_only=True)
class LevelView:
    """Nodes that stand side by side, and the edges between them: a workflow's own, or a body's."""

    path: str
    """Where it stands in the document; empty for the workflow itself."""
    all_nodes: tuple[NodeView, ...] = ()
    """In document order, those with an id that another one has too."""
    edges: tuple[EdgeView, ...] = ()
    is_complete: bool = True
    """Whether every node has an id and a type that is known."""
    has_edges: bool = True
    """Whether `edges` is a list of objects."""

    @cached_property
    def nodes(self) -> dict[str, NodeView]:
        """Nodes by id; of several with one id the first."""
        found: dict[str, NodeView] = {}
        for node in self.all_nodes:
            found.setdefault(node.id, node)
        return found

    @cached_property
    def attached(self) -> dict[str, set[str | None]]:
        """The handles that edges leave each node by; None for those by no handle."""
        found: dict[str, set[str | None]] = {}
        for edge in self.edges:
            if edge.source is not None:
                found.setdefault(edge.source, set()).add(edge.handle)
        return found


@dataclass(frozen=True, kw_only=True)
class BodyView:
    """One body: what a container runs, or a workflow when its run has ended."""

    field: str
    """The field of its owner that holds it: `body`, `branches`, `on_failure`, `finally`."""
    branch: str | None
    """Its name, where the field holds several."""
    names: frozenset[str]
    """What its expressions see besides what its owner sees."""
    raw: JsonObject
    level: LevelView
    """Empty for a body that is a workflow."""

    @property
    def path(self) -> str:
        """Where it stands in the document."""
        return self.level.path


@dataclass(frozen=True, kw_only=True)
class WorkflowView:
    """What is known of a workflow, whatever else is wrong with it."""

    raw: JsonObject
    top: LevelView
    """Its own nodes and edges."""
    endings: tuple[BodyView, ...] = ()
    """`on_failure` and `finally`."""
    input_schema: JsonObject | None
    state_schema: JsonObject | None
    settings: WorkflowSettings
    """Without the wrong ones."""

    def every_node(self) -> Iterator[NodeView]:
        """All nodes of all levels, in document order; a container before what it runs."""
        waiting = [*self.top.all_nodes, *(node for body in self.endings for node in body.level.all_nodes)]
        waiting.reverse()
        while waiting:
            node = waiting.pop()
            yield node
            waiting += [inner for body in reversed(node.bodies) for inner in reversed(body.level.all_nodes)]


def set_path(node: NodeView, key: str) -> str:
    """The place where a node writes a key of the state."""
    return child_path(f"{node.path}.set", key)
