"""The node types of this process: the built-in ones, and those of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentmesh_dagster.constants import GROUP_NODES
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.nodes import NodeConfig

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.nodes.base import NodeType


@cache
def node_types() -> Mapping[str, NodeType[Any]]:
    """Node types by name.

    A plugin offers a `NodeType` subclass under the entry-point group `agentmesh_dagster.nodes`; the entry point's name
    is the type's name.

    Raises:
        DefinitionError: A plugin cannot be loaded, is no node type, or takes a built-in name (code `bad-plugin`).
    """
    from agentmesh_dagster.runtime.nodes.agent import AgentNode
    from agentmesh_dagster.runtime.nodes.base import NodeType
    from agentmesh_dagster.runtime.nodes.code import CodeNode
    from agentmesh_dagster.runtime.nodes.emit import EmitNode
    from agentmesh_dagster.runtime.nodes.flow import (
        BranchNode,
        DelayNode,
        EndNode,
        FailNode,
        StartNode,
        TransformNode,
    )
    from agentmesh_dagster.runtime.nodes.foreach import ForeachNode
    from agentmesh_dagster.runtime.nodes.human import HumanNode
    from agentmesh_dagster.runtime.nodes.loop import LoopNode
    from agentmesh_dagster.runtime.nodes.parallel import ParallelNode
    from agentmesh_dagster.runtime.nodes.tool import ToolNode
    from agentmesh_dagster.runtime.nodes.webhook import WebhookNode
    from agentmesh_dagster.runtime.nodes.workflow import WorkflowNode

    builtin = (
        StartNode,
        EndNode,
        AgentNode,
        ToolNode,
        TransformNode,
        FailNode,
        EmitNode,
        CodeNode,
        BranchNode,
        DelayNode,
        HumanNode,
        WebhookNode,
        ParallelNode,
        ForeachNode,
        LoopNode,
        WorkflowNode,
    )
    found: dict[str, NodeType[Any]] = {cls.name: cls() for cls in builtin}
    for point in entry_points(group=GROUP_NODES):
        try:
            cls = point.load()
        except Exception as error:
            raise _bad_plugin(point.name, f"cannot be loaded: {type(error).__name__}: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, NodeType)):
            raise _bad_plugin(point.name, f"is {cls!r}, no subclass of NodeType")
        if point.name in found:
            raise _bad_plugin(point.name, "takes a name that is taken")
        found[point.name] = cls()
    return MappingProxyType(found)


def node_type_of(node: NodeSpec, types: Mapping[str, NodeType[Any]]) -> NodeType[Any]:
    """The type of a node of a stored workflow.

    Raises:
        DefinitionError: No installed package offers it any more (code `node-type-missing`).
    """
    found = types.get(node.type)
    if found is None:
        raise DefinitionError(
            f"node {node.id!r} has the type {node.type!r}, which nothing that is installed here offers (known: "
            f"{', '.join(sorted(types))}): install the package that brings it under the entry-point group "
            f"{GROUP_NODES!r}",
            code="node-type-missing",
        )
    return found


def node_configs() -> dict[str, type[NodeConfig]]:
    """Config models by node type, for the validation."""
    return {name: node_type.config_model for name, node_type in node_types().items()}


def _bad_plugin(name: str, what: str) -> DefinitionError:
    return DefinitionError(
        f"the node type {name!r} of the entry-point group {GROUP_NODES!r} {what}: mend or uninstall the plugin",
        code="bad-plugin",
    )
