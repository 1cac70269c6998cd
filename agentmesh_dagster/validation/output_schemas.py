"""What the outputs of built-in node types look like, as far as a document alone tells."""

from __future__ import annotations

from agentmesh_dagster.constants import HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.specs.fields import JsonObject
from agentmesh_dagster.specs.nodes import (
    BranchConfig,
    DelayConfig,
    EmitConfig,
    ForeachConfig,
    HumanConfig,
    LoopConfig,
    ParallelConfig,
    WebhookConfig,
    WorkflowConfig,
)
from agentmesh_dagster.validation.view import LevelView, NodeView

_TEXT = {"type": "string"}


def output_schema_of(node: NodeView, level: LevelView, input_schema: JsonObject | None) -> JsonObject | None:
    """The JSON Schema of a node's output, or None where it depends on more than the document.

    Args:
        node: The node.
        level: Where it stands.
        input_schema: That of the workflow.
    """
    config = node.config
    if node.spec is None or node.spec.on_error != "fail":
        return None  # the output may be null
    if node.is_start:
        return input_schema
    if isinstance(config, HumanConfig):
        return _human(config, level.attached.get(node.id, set()))
    if isinstance(config, WebhookConfig):
        return config.payload_schema if config.on_timeout == "fail" else None
    if isinstance(config, DelayConfig):
        return _closed({"waited_s": {"type": "number"}})
    if isinstance(config, EmitConfig):
        return _closed({"event_id": _TEXT, "event": _TEXT, "key": _TEXT})
    if isinstance(config, BranchConfig):
        return _closed({"taken": {"type": "array", "items": _TEXT}})
    if isinstance(config, ForeachConfig):
        return {"type": "array"}
    if isinstance(config, LoopConfig):
        return {
            "type": "object",
            "properties": {"iterations": {"type": "integer"}},
            "required": ["iterations"],
        }
    if isinstance(config, ParallelConfig):
        return _closed({name: {} for name in config.branches})
    if isinstance(config, WorkflowConfig) and config.async_:
        return _closed({"run_id": _TEXT})
    return None


def _human(config: HumanConfig, attached: set[str | None]) -> JsonObject:
    words: JsonObject = {"type": "string", "enum": list(config.handles())}
    several = {"type": "array", "items": {"type": "string", "enum": list(config.options or ())}}
    # After a rejection or a timeout the data need not fit the form.
    fits = config.form_schema is not None and not attached & {HANDLE_REJECTED, HANDLE_TIMEOUT}
    return _closed(
        {
            # Several options are a list, and a rejection or a timeout is a word.
            "decision": {"anyOf": [several, words]} if config.multiple else words,
            "data": config.form_schema if fits else {},
            "by": _TEXT,
            "at": _TEXT,
            "comment": _TEXT,
            **({"votes": {"type": "array"}} if config.required > 1 else {}),
        }
    )


def _closed(properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
