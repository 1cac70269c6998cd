"""Respells keys: camelCase names and synonyms become the names of the models, in the places that models know."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Final

from pydantic import BaseModel

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.documents import (
    AgentSpec,
    BodySpec,
    DocumentModel,
    EdgeSpec,
    NetworkSpec,
    NodeSpec,
)
from agentmesh_dagster.specs.fields import JsonObject, accepted_keys, as_object, map_models
from agentmesh_dagster.specs.nodes import (
    AgentConfig,
    BranchCondition,
    BranchConfig,
    CodeConfig,
    ToolConfig,
    WorkflowConfig,
)
from agentmesh_dagster.specs.problems import child_path
from agentmesh_dagster.specs.tools import FunctionToolConfig

NODE_TYPES: Final = {
    "human_approval": "human",
    "humanApproval": "human",
    "conditional": "branch",
    "dowhile": "loop",
}
"""Other words for node types."""

_WORKFLOW_WORDS: Final = {
    "workflowId": "workflow",
    "workflow_id": "workflow",
    "workflowSlug": "workflow",
    "workflow_slug": "workflow",
}

SYNONYMS: Final[dict[type[BaseModel], dict[str, str]]] = {
    DocumentModel: {"label": "name"},
    AgentSpec: {"systemPrompt": "instructions", "system_prompt": "instructions"},
    NetworkSpec: {"systemPrompt": "instructions", "system_prompt": "instructions"},
    NodeSpec: {"label": "name"},
    EdgeSpec: {
        "fromNodeId": "source",
        "from_node_id": "source",
        "toNodeId": "target",
        "to_node_id": "target",
    },
    AgentConfig: {
        "agentId": "agent",
        "agent_id": "agent",
        "agentSlug": "agent",
        "agent_slug": "agent",
        "promptTemplate": "prompt",
        "prompt_template": "prompt",
        "outputFormat": "output_schema",
        "output_format": "output_schema",
        "systemPrompt": "instructions",
        "system_prompt": "instructions",
    },
    ToolConfig: {
        "toolId": "tool",
        "tool_id": "tool",
        "toolKey": "tool",
        "tool_key": "tool",
        "parameterMappings": "input",
        "parameter_mappings": "input",
    },
    CodeConfig: {
        "functionName": "function",
        "function_name": "function",
        "parameterMappings": "input",
        "parameter_mappings": "input",
    },
    FunctionToolConfig: {"functionName": "function", "function_name": "function"},
    BranchConfig: {"defaultTarget": "default", "default_target": "default"},
    BranchCondition: {
        "expression": "when",
        "targetNodeId": "handle",
        "target_node_id": "handle",
    },
    WorkflowConfig: _WORKFLOW_WORDS,
    BodySpec: {**_WORKFLOW_WORDS, "inputMapping": "input", "input_mapping": "input"},
}
"""Other words for keys, by the model that they stand in; subclasses take their base's too."""

_CAMEL: Final = re.compile(r"(?<=[a-z0-9])([A-Z])")


def synonyms_of(model: type[BaseModel]) -> dict[str, str]:
    """The other words that a model's keys have."""
    found: dict[str, str] = {}
    for base, words in SYNONYMS.items():
        if issubclass(model, base):
            found |= words
    return found


def known_key(model: type[BaseModel], key: str) -> str | None:
    """The model's own spelling of a key, or None where the model has no such field."""
    return _known(key, accepted_keys(model), synonyms_of(model))


def _known(key: str, keys: Container[str], words: Mapping[str, str]) -> str | None:
    if key in keys:
        return key
    wanted = words.get(key) or _CAMEL.sub(r"_\1", key).lower()
    return wanted if wanted in keys else None


def respelled(
    model: type[BaseModel], raw: Mapping[str, Json], path: str, renames: dict[str, str]
) -> JsonObject:
    """A raw object with the model's own spelling, and so all models in it; free data stays as it is.

    A key whose canonical name is there too keeps its spelling, and is found to be unknown later.

    Args:
        model: What the object wants to be.
        raw: The object.
        path: Its path.
        renames: Gets the new path and the old key of all that is renamed.
    """
    keys = accepted_keys(model)
    words = synonyms_of(model)
    done: JsonObject = {}
    for key, value in raw.items():
        name = _known(key, keys, words) or key
        if name != key:
            if name in raw or name in done:
                name = key
            else:
                renames[child_path(path, name)] = key
        done[name] = value
    if "model" in keys:
        done = _with_joined_model(done, path, renames)
    return {
        key: _inner(keys[key].annotation, value, child_path(path, key), renames) if key in keys else value
        for key, value in done.items()
    }


def _inner(annotation: object, value: Json, path: str, renames: dict[str, str]) -> Json:
    return map_models(
        annotation, value, path, lambda model, raw, place: respelled(model, raw, place, renames)
    )


def _with_joined_model(raw: JsonObject, path: str, renames: dict[str, str]) -> JsonObject:
    """`modelProvider` and `modelName` as one `model`, `provider/name`."""
    name_key = next((k for k in ("modelName", "model_name") if isinstance(raw.get(k), str)), None)
    if name_key is None or "model" in raw:
        return raw
    provider_key = next((k for k in ("modelProvider", "model_provider") if isinstance(raw.get(k), str)), None)
    model: str = raw[name_key]
    if provider_key is not None and raw[provider_key] and not model.startswith(f"{raw[provider_key]}/"):
        model = f"{raw[provider_key]}/{model}"
    renames[child_path(path, "model")] = name_key
    rest: dict[str, Any] = {key: value for key, value in raw.items() if key not in (name_key, provider_key)}
    return {**rest, "model": model}


def output_format(value: Json) -> Json:
    """What `outputFormat` says as a schema: a schema is one already, `json` is any object, `text` is none."""
    if as_object(value) is not None or not isinstance(value, str):
        return value
    return {"json": {"type": "object"}, "object": {"type": "object"}, "text": None, "": None}.get(
        value.lower(), value
    )
