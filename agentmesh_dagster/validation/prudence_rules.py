"""Warnings: what may well be meant, and had better be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel

from agentmesh_dagster.specs.base import Reference, marked_fields
from agentmesh_dagster.specs.documents import AgentSpec, Document, ToolSpec, WorkflowSettings
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object
from agentmesh_dagster.specs.problems import Problem
from agentmesh_dagster.specs.resolve import Library
from agentmesh_dagster.specs.slugs import parse_reference
from agentmesh_dagster.validation.graph_rules import GraphFacts, ungated
from agentmesh_dagster.validation.view import NodeView, WorkflowView

GATE_TYPES: Final = frozenset(("human",))
"""Node types at which a person decides."""
WAITING_TYPES: Final = frozenset(("agent", "tool", "code"))
"""Node types that wait for something outside, for as long as it takes."""


_NOT_YET: Final = {
    "agent": {
        "agents": "an agent calls tools, and no other agents",
        "memory": "an agent remembers nothing between its calls",
        "guardrails": "an agent's prompts and answers are not looked at",
    },
}
"""Fields that are stored and versioned, and that this release does nothing about, with what it does instead."""


def unused_problems(kind: str, raw: JsonObject) -> Iterator[Problem]:
    """Fields whose effect a person would wait for in vain."""
    for name, instead in _NOT_YET.get(kind, {}).items():
        if raw.get(name):
            yield Problem.of(
                "not-in-effect",
                name,
                f"{name!r} has no effect in this release: {instead}",
                "Leave it out, or know it",
            )


def prudence_problems(view: WorkflowView, facts: GraphFacts, library: Library | None) -> Iterator[Problem]:
    """Missing timeouts, and side effects without a gate (as far as the tools are known)."""
    for node in view.nodes.values():
        if node.type in WAITING_TYPES and node.config is not None and not _has_timeout(node, view, library):
            yield Problem.of(
                "timeout-missing",
                node.path,
                f"{node.id!r} may wait for ever: it has no timeout",
                "Give it timeout_s, or the workflow settings.node_timeout_s",
            )
    settings = as_object(view.raw.get("settings")) or {}
    for node in view.nodes.values():
        yield from _shadowed(node)
    bound = settings.get("max_steps", WorkflowSettings().max_steps)
    if isinstance(bound, int) and len(view.nodes) > bound:
        yield Problem.of(
            "too-many-for-max-steps",
            "settings.max_steps",
            f"There are {len(view.nodes)} nodes, and a run ends as failed after {bound} of them",
            "Raise settings.max_steps, unless branches keep every run below it",
        )
    if library is None:
        return
    open_nodes = ungated(
        view, facts.reach, {node.id: node.type in GATE_TYPES for node in view.nodes.values()}
    )
    for node in view.nodes.values():
        if node.id not in open_nodes:
            continue
        tool = _ungated_tool(node, library)
        if tool is not None:
            yield Problem.of(
                "side-effect-ungated",
                node.path,
                f"{node.id!r} may call the tool {tool!r}, which has side effects, and nobody is asked before",
                "Put a human node before it on every way, or give the tool requires_approval",
            )


_AGENT_OUTPUTS: Final = ("text", "object", "usage", "tool_calls")


def _shadowed(node: NodeView) -> Iterator[Problem]:
    """Fields of an agent's object that its other outputs hide, as `steps.x.output.text` is the whole answer."""
    schema = getattr(node.config, "output_schema", None)
    if node.type != "agent" or schema is None:
        return
    for name in as_object((as_object(schema) or {}).get("properties")) or {}:
        if name in _AGENT_OUTPUTS:
            yield Problem.of(
                "output-schema-shadowed",
                f"{node.path}.config.output_schema.properties.{name}",
                f"'output.{name}' of an agent is something else than the field {name!r} of its object",
                f"Read it as 'output.object.{name}', or give the field another name",
            )


def _referred(model: BaseModel, library: Library) -> Iterator[Document]:
    """The documents that a model refers to, as far as the library has them."""
    for marked in marked_fields(model):
        if not isinstance(marked.mark, Reference):
            continue
        for text in as_list(marked.value) or [marked.value]:
            reference = parse_reference(text, marked.mark.kind) if isinstance(text, str) else None
            found = library.get(marked.mark.kind, reference.slug, reference.version) if reference else None
            if found is not None:
                yield found.document


def _has_timeout(node: NodeView, view: WorkflowView, library: Library | None) -> bool:
    if "timeout_s" in node.raw or view.has_node_timeout:
        return True
    if library is None or node.config is None:
        return False
    return any(_is_bounded(document) for document in _referred(node.config, library))


def _is_bounded(document: Document) -> bool:
    if isinstance(document, ToolSpec):
        # An http tool has a timeout of its own, given or by default.
        return document.timeout_s is not None or document.type in ("http", "builtin")
    return isinstance(document, AgentSpec) and "timeout_s" in document.model_settings


def _ungated_tool(node: NodeView, library: Library) -> str | None:
    """A tool with side effects that a node calls, itself or through its agent and that agent's agents."""
    if node.config is None:
        return None
    open_documents = list(_referred(node.config, library))
    seen: set[tuple[str, str]] = set()
    while open_documents:
        document = open_documents.pop()
        if (document.kind, document.slug) in seen:
            continue
        seen.add((document.kind, document.slug))
        if isinstance(document, ToolSpec) and document.side_effects and document.requires_approval is False:
            return document.slug
        if isinstance(document, AgentSpec):
            open_documents += _referred(document, library)
    return None
