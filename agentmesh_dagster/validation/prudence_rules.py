"""Warnings: what may well be meant, and had better be looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agentmesh_dagster.specs.documents import AgentSpec, Document, ToolSpec, WorkflowSettings
from agentmesh_dagster.specs.fields import JsonObject, as_object
from agentmesh_dagster.specs.problems import Problem
from agentmesh_dagster.specs.resolve import Library
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.list_sizes import AGENT_OUTPUTS
from agentmesh_dagster.validation.referred import referred, tools_called
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


def prudence_problems(
    view: WorkflowView, levels: Sequence[Level], library: Library | None
) -> Iterator[Problem]:
    """Missing timeouts, and side effects without a gate (as far as the tools are known)."""
    settings = as_object(view.raw.get("settings")) or {}
    bounded: set[str] = set()
    for level in levels:
        if _is_bounded_level(level, settings, bounded):
            bounded.add(level.view.path)
            continue
        for node in level.view.nodes.values():
            if node.type in WAITING_TYPES and node.config is not None and not _has_timeout(node, library):
                yield Problem.of(
                    "timeout-missing",
                    node.path,
                    f"{node.id!r} may wait for ever: it has no timeout",
                    "Give it timeout_s, or the workflow settings.node_timeout_s",
                )
    for node in view.every_node():
        yield from _shadowed(node)
    bound, nodes = settings.get("max_steps", WorkflowSettings().max_steps), view.top.nodes
    if isinstance(bound, int) and len(nodes) > bound:
        yield Problem.of(
            "too-many-for-max-steps",
            "settings.max_steps",
            f"There are {len(nodes)} nodes, and a run ends as failed after {bound} of them",
            "Raise settings.max_steps, unless branches keep every run below it",
        )
    if library is not None:
        yield from _ungated(levels, library)


def _is_bounded_level(level: Level, settings: JsonObject, bounded: set[str]) -> bool:
    """Whether a timeout of what runs a level holds for all its nodes."""
    if settings.get("node_timeout_s") is not None:
        return True
    if level.parent is None:
        return settings.get("timeout_s") is not None
    if level.owner is None:
        return False  # a run's timeout ends the run, and not what follows on it
    return "timeout_s" in level.owner.raw or level.parent.view.path in bounded


def _ungated(levels: Sequence[Level], library: Library) -> Iterator[Problem]:
    open_nodes: dict[str, set[str]] = {}
    """For each level by its path, the nodes that some way reaches without passing a gate."""
    for level in levels:
        if level.is_ending:
            continue  # nobody can be asked there
        open_nodes[level.view.path] = found = _without_gate(level, open_nodes)
        for node in level.view.nodes.values():
            if node.id not in found or node.config is None:
                continue
            tools = tools_called(node.config, library)
            tool = next((t.slug for t in tools if t.side_effects and t.requires_approval is False), None)
            if tool is not None:
                yield Problem.of(
                    "side-effect-ungated",
                    node.path,
                    f"{node.id!r} may call the tool {tool!r}, which has side effects, and nobody is asked before",
                    "Put a human node before it on every way, or give the tool requires_approval",
                )


def _without_gate(level: Level, open_nodes: Mapping[str, set[str]]) -> set[str]:
    reach, nodes = level.facts.reach, level.view.nodes
    if level.parent is None or level.owner is None:
        roots = [node.id for node in nodes.values() if node.is_start]
    elif level.owner.id in open_nodes[level.parent.view.path]:
        roots = [name for name in nodes if not reach.predecessors[name]]
    else:
        return set()
    return reach.reached_from(roots, through=[n.id for n in nodes.values() if n.type not in GATE_TYPES])


def _shadowed(node: NodeView) -> Iterator[Problem]:
    """Fields of an agent's object that its other outputs hide, as `steps.x.output.text` is the whole answer."""
    schema = getattr(node.config, "output_schema", None)
    if node.type != "agent" or schema is None:
        return
    for name in as_object((as_object(schema) or {}).get("properties")) or {}:
        if name in AGENT_OUTPUTS:
            yield Problem.of(
                "output-schema-shadowed",
                f"{node.path}.config.output_schema.properties.{name}",
                f"'output.{name}' of an agent is something else than the field {name!r} of its object",
                f"Read it as 'output.object.{name}', or give the field another name",
            )


def _has_timeout(node: NodeView, library: Library | None) -> bool:
    if "timeout_s" in node.raw:
        return True
    if library is None or node.config is None:
        return False
    return any(_is_bounded(document) for document in referred(node.config, library))


def _is_bounded(document: Document) -> bool:
    if isinstance(document, ToolSpec):
        # An http tool has a timeout of its own, given or by default.
        return document.timeout_s is not None or document.type in ("http", "builtin")
    return isinstance(document, AgentSpec) and "timeout_s" in document.model_settings
