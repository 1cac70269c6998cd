"""A raw workflow as the rules see it: every node and edge that is well-formed enough, with its place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.fields import JsonObject
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.nodes import NodeConfig


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node that has an id."""

    index: int
    id: str
    type: str | None
    """None where it is missing or no text."""
    raw: JsonObject
    spec: NodeSpec | None
    """The node without its wrong fields, or None where too much is wrong."""
    config_type: type[NodeConfig] | None
    """None for an unknown type."""
    config: NodeConfig | None
    """None where the config is wrong: then nothing is known of the handles."""

    @property
    def path(self) -> str:
        """Where the node stands in the document."""
        return f"nodes[{self.index}]"

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


@dataclass(frozen=True, kw_only=True)
class EdgeView:
    """One edge; an end that is missing or no text is None."""

    index: int
    source: str | None
    target: str | None
    handle: str | None
    raw: JsonObject

    @property
    def path(self) -> str:
        """Where the edge stands in the document."""
        return f"edges[{self.index}]"


@dataclass(frozen=True, kw_only=True)
class WorkflowView:
    """What is known of a workflow, whatever else is wrong with it."""

    raw: JsonObject
    all_nodes: tuple[NodeView, ...]
    """In document order, those with an id that another one has too."""
    edges: tuple[EdgeView, ...]
    is_complete: bool
    """Whether every node has an id and a type that is known."""
    has_edges: bool
    """Whether `edges` is a list of objects."""
    input_schema: JsonObject | None
    state_schema: JsonObject | None
    has_node_timeout: bool
    """Whether `settings.node_timeout_s` is given."""

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
