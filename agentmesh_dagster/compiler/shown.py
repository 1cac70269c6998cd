"""What people see of ops in Dagster: metadata on the run page, tags and pools, what a node waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from agentmesh_dagster.constants import TAG_MODEL
from agentmesh_dagster.records import Json, Step, Wait
from agentmesh_dagster.runtime.how_to_decide import how_to_decide
from agentmesh_dagster.runtime.nodes.base import AnyNodeType
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.run_node import NodeOutcome
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.fields import as_list, as_object
from agentmesh_dagster.specs.levels import called_workflow
from agentmesh_dagster.specs.nodes import AgentConfig, NodeConfig, ToolConfig, WorkflowConfig

SHORT_CHARS = 200
"""Up to this length JSON is shown as text; beyond, behind a button."""
PREVIEW_CHARS = 2_000
"""How much of an output stands in Dagster's metadata; all of it is in the journal."""
SHOWN_WAITS = 20
"""Of how many waits a node shows all; a container may wait for thousands of people."""


def waiting_metadata(waits: Sequence[Wait], shows_content: bool) -> dict[str, Any]:
    """What a person sees of a node that waits: the question, how to decide, and until when.

    Without content, people see the question where they decide.
    """
    metadata: dict[str, Any] = {}
    if len(waits) > SHOWN_WAITS:
        metadata["waits"] = f"{len(waits)}, of which the first {SHOWN_WAITS} are shown"
    for number, wait in enumerate(waits[:SHOWN_WAITS], 1):
        before = f"{number}. " if len(waits) > 1 else ""
        facts: dict[str, Any] = {
            "waits for": ((wait.title if shows_content else "") or wait.kind.value)[:SHORT_CHARS],
            "question": dg.MetadataValue.md(wait.body[:PREVIEW_CHARS])
            if shows_content and wait.body
            else None,
            "data": preview(wait.data) if shows_content and wait.data is not None else None,
            "who may decide": ", ".join(wait.assignees) if wait.kind.is_approval and wait.assignees else None,
            "how to decide": dg.MetadataValue.md("\n".join(f"- {line}" for line in how_to_decide(wait))),
            "deadline": None if wait.deadline_at is None else wait.deadline_at.isoformat(timespec="seconds"),
        }
        metadata.update({before + name: value for name, value in facts.items() if value is not None})
    return metadata


def may_wait(closure: Closure, node: NodeSpec, node_types: Mapping[str, AnyNodeType]) -> bool:
    """Whether a node, or one that it runs in itself, may wait for people, events or a time."""
    return _may_wait(closure, node, node_types, set())


def _may_wait(
    closure: Closure, node: NodeSpec, node_types: Mapping[str, AnyNodeType], called: set[str]
) -> bool:
    node_type = node_type_of(node, node_types)
    config: NodeConfig = node_type.parse(node)
    if node_type.shows_waiting or _asks_approval(closure, config):
        return True
    return any(
        _may_wait(closure, inner, node_types, called) for inner in _inner_nodes(closure, config, called)
    )


def _inner_nodes(closure: Closure, config: NodeConfig, called: set[str]) -> Iterator[NodeSpec]:
    """The nodes of a container's bodies; of a workflow that was seen before, none.

    Args:
        closure: What its workflows are from.
        config: The container's, or any other.
        called: The workflows that were seen; those found are added.
    """
    references = [config.workflow] if isinstance(config, WorkflowConfig) and not config.async_ else []
    for body in config.bodies().values():
        yield from body.nodes or []
        references += [body.workflow] if body.workflow is not None else []
    for reference in references:
        if reference not in called:
            called.add(reference)
            yield from called_workflow(reference, closure).nodes


def _asks_approval(closure: Closure, config: object) -> bool:
    if not isinstance(config, ToolConfig):
        return False
    return closure.tools[config.tool.split("@")[0]].document.requires_approval is not False


def construct_op_tags(closure: Closure, node_type: AnyNodeType, config: object) -> dict[str, str]:
    """Kinds, and the model."""
    kinds = list(node_type.kinds)
    tags: dict[str, str] = {}
    if isinstance(config, AgentConfig):
        tags[TAG_MODEL] = _models(closure, config)[0]
    if isinstance(config, ToolConfig):
        kinds.append(closure.tools[config.tool.split("@")[0]].document.type)
    if kinds:
        # What the picture of a job shows; the kinds are what the catalog shows.
        tags["dagster/compute_kind"] = kinds[0]
    return {**tags, **{f"dagster/kind/{kind}": "" for kind in kinds}}


def construct_pool(closure: Closure, config: object) -> str | None:
    """Agents share a pool per model provider (`llm_openai`); it bounds nothing until somebody gives it slots."""
    if not isinstance(config, AgentConfig):
        return None
    provider = (
        _models(closure, config)[0].partition("/")[0] if "/" in _models(closure, config)[0] else "openai"
    )
    return "llm_" + "".join(c if c.isalnum() else "_" for c in provider)


def _models(closure: Closure, config: AgentConfig) -> tuple[str, ...]:
    if config.model is not None:
        return (config.model,) if isinstance(config.model, str) else tuple(config.model)
    return closure.agents[config.agent.split("@")[0]].document.models


def output_metadata(outcome: NodeOutcome, shows_content: bool) -> Mapping[str, Any]:
    """What a person sees of a node's input and output on the run page."""
    row = outcome.row
    if row is None:
        return {}
    metadata: dict[str, Any] = {"status": row.status.value}
    if shows_content:
        if row.input is not None:
            metadata["input"] = preview(row.input)
        metadata["output"] = preview(shown_output(row))
    if row.error is not None:
        metadata["error"] = row.error["message"][:PREVIEW_CHARS]
    if row.routing_decision and row.routing_decision["handles"]:
        metadata["handles"] = ", ".join(row.routing_decision["handles"])
    # How many items, branches or iterations, and how many of them failed.
    decision: Mapping[str, Json] = row.routing_decision or {}
    counts: Mapping[str, int] = decision.get("counts", {})
    metadata.update({name: count for name, count in counts.items() if name != "failed" or count})
    if outcome.replayed:
        metadata["replayed"] = True
    return metadata | usage_metadata(row)


def shown_output(row: Step) -> Json:
    """The output without what stands in metadata of its own: of an agent, its object or its text."""
    output = as_object(row.output)
    if row.node_type != "agent" or output is None:
        return row.output
    return output.get("object", output.get("text"))


def usage_metadata(row: Step) -> dict[str, Any]:
    """Tokens and cost of an agent's output."""
    usage = (as_object(row.output) or {}).get("usage") if row.node_type == "agent" else None
    if usage is None:
        return {}
    return {
        "input_tokens": usage["input_tokens"],
        "output_tokens": usage["output_tokens"],
        "cost_usd": float(usage["cost_usd"]),
        "model": str(usage["model"]),
    }


def listed(keys: Sequence[str]) -> str:
    """Step keys for people, as many as can be read."""
    left = len(keys) - SHOWN_WAITS
    return ", ".join(keys[:SHOWN_WAITS]) + (f" and {left} more" if left > 0 else "")


def preview(value: Json) -> dg.MetadataValue[Any]:
    """An output for people, bounded."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > PREVIEW_CHARS:
        return dg.MetadataValue.text(
            f"{text[:PREVIEW_CHARS]}... ({len(text)} characters; all of it is in the journal)"
        )
    if len(text) > SHORT_CHARS and (as_object(value) is not None or as_list(value) is not None):
        return dg.MetadataValue.json(value)
    return dg.MetadataValue.text(value if isinstance(value, str) else text)
