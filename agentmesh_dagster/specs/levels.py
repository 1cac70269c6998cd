"""Levels: the bodies of containers, the graphs that run in them, and which of them Dagster does not see.

Everything here is pure; run workers and the compiler ask the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel, ValidationError

from agentmesh_dagster.specs.base import Body, marked_fields
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import BodySpec, NodeSpec, WorkflowSpec
from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.nodes import (
    BUILTIN_NODE_CONFIGS,
    ForeachConfig,
    NodeConfig,
    ParallelConfig,
    WorkflowConfig,
)
from agentmesh_dagster.specs.problems import child_path

__all__ = [
    "PlacedBody",
    "PlacedNode",
    "all_nodes",
    "all_parts",
    "bodies_in",
    "body_graph",
    "called_workflow",
    "is_walked",
]


@dataclass(frozen=True)
class PlacedBody:
    """A body and its place in a document: `nodes[2].config.branches.left`, `finally`."""

    body: BodySpec
    path: str


@dataclass(frozen=True)
class PlacedNode:
    """A node of any level and its place in a document: `nodes[2].config.body.nodes[0]`."""

    node: NodeSpec
    path: str
    config: NodeConfig | None
    """None where the type is unknown or the config does not fit it."""


def called_workflow(reference: str, closure: Closure) -> WorkflowSpec:
    """The workflow that a reference (`triage`, `triage@3`) names.

    Raises:
        KeyError: It is not in the closure, which then is not that of the document with the reference.
    """
    return closure.workflows[reference.partition("@")[0]].document


def body_graph(body: BodySpec, closure: Closure) -> Graph:
    """The graph that a body runs: its own nodes and edges, or those of the workflow that it calls.

    Args:
        body: The body of a valid document.
        closure: The closure of that document.
    """
    if body.workflow is not None:
        called = called_workflow(body.workflow, closure)
        return Graph.of(called.nodes, called.edges)
    return Graph.of(body.nodes or [], body.edges)


def is_walked(node: NodeSpec, config: NodeConfig, closure: Closure) -> bool:
    """Whether a container is one op, which runs all that is in it, when it stands where Dagster sees its level.

    Dagster sees the top level of a workflow, and the levels of the containers that this answers False for: they become
    nested graphs, or dynamic outputs. What stands inside a walked container is walked, whatever this says of it.

    Args:
        node: A valid node.
        config: Its config.
        closure: The closure of the document that it stands in.

    Returns:
        False for what is no container, too: its op has no levels.
    """
    if not config.is_container:
        return False
    if node.retry is not None or node.timeout_s is not None or node.on_error != "fail":
        # Dagster cannot catch, repeat or end what fails inside of a nested graph.
        return True
    if isinstance(config, ParallelConfig):
        return config.wait != "all" or any(
            body.workflow is not None and _is_kept_together(called_workflow(body.workflow, closure))
            for body in config.branches.values()
        )
    if isinstance(config, WorkflowConfig):
        return config.async_ or _is_kept_together(called_workflow(config.workflow, closure))
    return not (isinstance(config, ForeachConfig) and config.fanout)


def _is_kept_together(called: WorkflowSpec) -> bool:
    """Whether a called workflow has rules for itself as a whole, which no nested graph can follow."""
    return (
        called.on_failure is not None
        or called.finally_ is not None
        or called.settings.timeout_s is not None
        or called.settings.execution == "inline"
    )


def bodies_in(model: BaseModel, path: str = "") -> Iterator[PlacedBody]:
    """The bodies that a node's config or a workflow holds itself, in the order of its fields.

    Args:
        model: A config, or a workflow (`on_failure`, `finally`).
        path: Its place in the document.
    """
    for marked in marked_fields(model, path):
        if not isinstance(marked.mark, Body):
            continue
        if isinstance(marked.value, BodySpec):
            yield PlacedBody(marked.value, marked.path)
        else:
            for name, body in cast("Mapping[str, BodySpec]", marked.value).items():
                yield PlacedBody(body, child_path(marked.path, name))


def all_parts(
    workflow: WorkflowSpec, node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS
) -> Iterator[PlacedBody | PlacedNode]:
    """All nodes and bodies of a workflow's document, of any depth, in document order; a container before its bodies.

    Workflows that it calls are documents of their own.

    Args:
        workflow: The workflow; its node configs may be wrong.
        node_configs: Config models of the node types.
    """
    nodes = ((node, child_path("nodes", index)) for index, node in enumerate(workflow.nodes))
    return _parts([*nodes, *bodies_in(workflow)], node_configs)


def node_parts(
    node: NodeSpec, node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS
) -> Iterator[PlacedBody | PlacedNode]:
    """A node with all nodes and bodies in it, as `all_parts`; their paths begin at the node."""
    return _parts([(node, "")], node_configs)


def _parts(
    parts: Sequence[PlacedBody | tuple[NodeSpec, str]], node_configs: Mapping[str, type[NodeConfig]]
) -> Iterator[PlacedBody | PlacedNode]:
    # A stack of what is still to come, and no recursion: nothing bounds the depth of a document made in Python.
    waiting = list(reversed(parts))
    while waiting:
        part = waiting.pop()
        if isinstance(part, PlacedBody):
            yield part
            place = child_path(part.path, "nodes")
            below = [(node, child_path(place, index)) for index, node in enumerate(part.body.nodes or [])]
            waiting.extend(reversed(below))
        else:
            node, path = part
            config = _config_of(node, node_configs)
            yield PlacedNode(node, path, config)
            if config is not None:
                waiting.extend(reversed(list(bodies_in(config, f"{path}.config"))))


def all_nodes(
    workflow: WorkflowSpec, node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS
) -> Iterator[PlacedNode]:
    """All nodes of a workflow's document, of any depth; see `all_parts`."""
    return (part for part in all_parts(workflow, node_configs) if isinstance(part, PlacedNode))


def _config_of(node: NodeSpec, node_configs: Mapping[str, type[NodeConfig]]) -> NodeConfig | None:
    model = node_configs.get(node.type)
    if model is None:
        return None
    try:
        return model.model_validate(node.config)
    except ValidationError:
        # A wrong config is a problem of its own, which the validation tells.
        return None
