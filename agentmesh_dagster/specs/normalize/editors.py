"""Forms in which visual editors, and the documents that other products come with, write workflows.

What React Flow adds for the eye is left out, and `data` of its nodes is taken apart; an `llm` or `http` node becomes
an agent or a tool written inline in a node. Nothing is checked here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object, written_keys
from agentmesh_dagster.specs.nodes import NodeConfig
from agentmesh_dagster.specs.normalize.expressions import canonical_condition, canonical_templates
from agentmesh_dagster.specs.normalize.origins import Moves
from agentmesh_dagster.specs.problems import child_path

SCHEMA_KEYS: Final = {
    "inputSchemaJson": "input_schema",
    "input_schema_json": "input_schema",
    "outputSchemaJson": "output_schema",
    "output_schema_json": "output_schema",
    "stateSchemaJson": "state_schema",
    "state_schema_json": "state_schema",
}
"""JSON Schemas as text."""

_NODE_KEYS: Final = frozenset((*written_keys(NodeSpec), "label", "timeoutS", "onError"))
_TYPE_KEYS: Final = ("type", "nodeType", "node_type")
_RETRY_KEYS: Final = ("retryConfig", "retry_config", "retryPolicy", "retry_policy")
_SHOWN_NODE: Final = frozenset(
    (
        *("width", "height", "measured", "selected", "selectable", "dragging", "draggable", "deletable"),
        *("positionAbsolute", "sourcePosition", "targetPosition", "style", "className", "zIndex", "hidden"),
        *("parentNode", "parentId", "extent", "expandParent", "connectable", "resizing"),
    )
)
_SHOWN_EDGE: Final = frozenset(
    (
        *(
            "type",
            "animated",
            "style",
            "markerEnd",
            "markerStart",
            "selected",
            "className",
            "zIndex",
            "hidden",
        ),
        *("labelStyle", "labelBgStyle", "labelShowBg", "pathOptions", "interactionWidth", "deletable"),
    )
)
_MODEL_KEYS: Final = ("model", "provider", "modelProvider", "model_provider", "modelName", "model_name")
_REQUEST_KEYS: Final = {
    "method": "method",
    "url": "url",
    "headers": "headers",
    "query": "query",
    "queryParams": "query",
    "params": "query",
    "body": "json",
    "json": "json",
    "form": "form",
    "timeout_s": "timeout_s",
}
_HARMLESS: Final = ("GET", "HEAD", "OPTIONS")
_PLACEHOLDER: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


def with_parsed_schemas(raw: JsonObject, moves: dict[str, str]) -> JsonObject:
    """A document with the schemas that are texts under `inputSchemaJson` and its like."""
    done: JsonObject = {}
    for key, value in raw.items():
        name = SCHEMA_KEYS.get(key)
        if name is None or name in raw:
            done[key] = value
            continue
        done[name] = _parsed(value)
        moves[name] = Moves(moves).before(key)
    return done


def with_max_steps(raw: JsonObject, moves: dict[str, str]) -> JsonObject:
    """A workflow with its `maxSteps` among the settings."""
    key = next((k for k in ("maxSteps", "max_steps") if k in raw), None)
    settings = as_object(raw.get("settings", {}))
    if key is None or settings is None or "max_steps" in settings or "maxSteps" in settings:
        return raw
    moves["settings.max_steps"] = key
    return {**{k: v for k, v in raw.items() if k != key}, "settings": {**settings, "max_steps": raw[key]}}


def edited_edge(value: Json, path: str, moves: dict[str, str]) -> Json:
    """An edge without what an editor draws it with; the condition in its `data` is its own."""
    raw = as_object(value)
    if raw is None:
        return value
    done = {key: item for key, item in raw.items() if key not in _SHOWN_EDGE}
    data = as_object(done.get("data"))
    if data is not None:
        del done["data"]
        condition = data.get("condition")
        if condition is not None and "condition" not in done:
            done["condition"] = condition
            moves[f"{path}.condition"] = child_path(Moves(moves).before(path), "data.condition")
        data = {key: item for key, item in data.items() if key != "condition"}
    label = done.pop("label", None)
    kept = {**(data or {}), **({} if label is None else {"label": label})}
    metadata = as_object(done.get("metadata", {}))
    if kept and metadata is not None:
        done["metadata"] = {**kept, **metadata}
    return done


def edited_node(
    value: Json,
    path: str,
    moves: dict[str, str],
    node_configs: Mapping[str, type[NodeConfig]],
    *,
    is_step: bool,
) -> Json:
    """A node in this form: its `data` taken apart, `llm` and `http` as an agent and a tool, its retries by their names.

    Args:
        value: The node.
        path: Its place.
        moves: Gets where values came from.
        node_configs: Config models of the node types; a type of that name is left alone.
        is_step: Whether it stands in a list of `steps`, where all keys are the config's.
    """
    raw = as_object(value)
    if raw is None:
        return value
    before = Moves(moves).before(path)
    if not is_step:
        raw = {key: item for key, item in raw.items() if key not in _SHOWN_NODE}
        if (data := as_object(raw.get("data"))) is not None:
            raw = _with_data(raw, data, path, before, moves, node_configs)
    raw = _with_retry(raw, path, before, moves)
    kind = raw.get("type")
    if kind == "llm" and kind not in node_configs:
        return _asking(raw, is_step=is_step)
    if kind == "http" and kind not in node_configs:
        return _requesting(raw, is_step=is_step)
    return raw


def _with_data(
    raw: JsonObject,
    data: JsonObject,
    path: str,
    before: str,
    moves: dict[str, str],
    node_configs: Mapping[str, type[NodeConfig]],
) -> JsonObject:
    """A node with what React Flow keeps in `data`: keys of a node are its own, all others its config's."""
    done = {key: item for key, item in raw.items() if key != "data"}
    config = dict(as_object(done.get("config")) or {})
    for key, item in data.items():
        inner = as_object(item) if key == "config" else None
        if inner is not None:
            for name, part in inner.items():
                config.setdefault(name, part)
                moves[child_path(f"{path}.config", name)] = child_path(f"{before}.data.config", name)
        elif key in _TYPE_KEYS:
            # React Flow's own `type` names what draws the node.
            if key != "type" or done.get("type") not in node_configs:
                done["type"] = item
                moves[f"{path}.type"] = child_path(f"{before}.data", key)
        elif key in _NODE_KEYS:
            done.setdefault(key, item)
            moves[child_path(path, key)] = child_path(f"{before}.data", key)
        else:
            config.setdefault(key, item)
            moves[child_path(f"{path}.config", key)] = child_path(f"{before}.data", key)
    if config:
        done["config"] = config
    return done


def _with_retry(raw: JsonObject, path: str, before: str, moves: dict[str, str]) -> JsonObject:
    """`retryConfig`, at the node or in its config, as `retry`."""
    config = as_object(raw.get("config"))
    for holder, place in ((raw, before), (config, f"{before}.config")):
        key = next((k for k in _RETRY_KEYS if holder is not None and k in holder), None)
        given = as_object(holder.get(key)) if holder is not None and key is not None else None
        if given is None or key is None or "retry" in raw:
            continue
        moves[f"{path}.retry"] = child_path(place, key)
        done = {k: v for k, v in raw.items() if k != key}
        if config is not None and holder is config:
            done["config"] = {k: v for k, v in config.items() if k != key}
        done["retry"] = _retry(given)
        return done
    return raw


def _retry(given: JsonObject) -> JsonObject:
    """A retry policy by the names of this product; what is not understood stays for the validation to name."""
    done: JsonObject = {}
    for key, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key in ("maxRetries", "max_retries") and is_number:
            done["max_attempts"] = value + 1
        elif key in ("delayMs", "delay_ms", "retryDelayMs", "initialDelayMs") and is_number:
            done["delay_s"] = value / 1000
        elif key in ("maxDelayMs", "max_delay_ms") and is_number:
            done["max_delay_s"] = value / 1000
        elif key in ("delay", "retryDelay", "delaySeconds", "initialDelay"):
            done["delay_s"] = value
        elif key in ("backoffMultiplier", "backoff_multiplier") and is_number:
            done["backoff"] = "constant" if value == 1 else "exponential"
        elif key in ("backoffType", "backoffStrategy", "backoff_strategy", "strategy"):
            done["backoff"] = "constant" if value == "fixed" else value
        elif key in ("exponentialBackoff", "exponential") and isinstance(value, bool):
            done["backoff"] = "exponential" if value else "constant"
        else:
            done[key] = value
    return done


def _own_keys(raw: JsonObject, *, is_step: bool) -> tuple[JsonObject, JsonObject]:
    """A node's own keys, and its config."""
    config = dict(as_object(raw.get("config")) or {})
    own: JsonObject = {}
    for key, item in raw.items():
        if key == "config":
            continue
        if is_step and key not in _NODE_KEYS:
            config.setdefault(key, item)
        else:
            own[key] = item
    return own, config


def _asking(raw: JsonObject, *, is_step: bool) -> JsonObject:
    """An `llm` node as an agent node with its agent inline."""
    own, config = _own_keys(raw, is_step=is_step)
    if "agent" not in config:
        given = {key: config.pop(key) for key in _MODEL_KEYS if key in config}
        model = given.get("model", given.get("modelName", given.get("model_name")))
        provider = next((given[k] for k in _MODEL_KEYS if "rovider" in k and given.get(k)), None)
        if isinstance(model, str) and isinstance(provider, str) and not model.startswith(f"{provider}/"):
            model = f"{provider}/{model}"
        config["agent"] = {} if model is None else {"model": model}
    for key in ("userPrompt", "user_prompt"):
        if key in config and "prompt" not in config:
            config["prompt"] = config.pop(key)
    return {**own, "type": "agent", "config": config}


def _requesting(raw: JsonObject, *, is_step: bool) -> JsonObject:
    """An `http` node as a tool node with its tool inline.

    In a tool's config `input` is the tool's: each expression of the node becomes a field of what the node hands over,
    so that values are escaped where they stand.
    """
    own, config = _own_keys(raw, is_step=is_step)
    if "tool" in config:
        return {**own, "type": "tool", "config": config}
    request: JsonObject = {}
    rest: JsonObject = {}
    for key, item in config.items():
        name = _REQUEST_KEYS.get(key)
        if name is None or name in request:
            rest[key] = item
        else:
            request[name] = _parsed(item) if name == "json" else item
    handed: dict[str, Json] = {}
    request = {key: _handing(canonical_templates(item), handed) for key, item in request.items()}
    method = request.get("method", "GET")
    tool: JsonObject = {"type": "http", "config": request}
    if isinstance(method, str) and method.upper() not in _HARMLESS:
        tool["side_effects"] = True
    return {**own, "type": "tool", "config": {**rest, "tool": tool, "input": handed}}


def _handing(value: Json, handed: dict[str, Json]) -> Any:
    """A value whose expressions read the tool's input; what they were is handed over under names of its own."""
    if isinstance(value, str):

        def named(found: re.Match[str]) -> str:
            expression = found.group(0)
            if "secret(" in expression:
                return expression
            name = next(
                (key for key, known in handed.items() if known == expression), f"value_{len(handed) + 1}"
            )
            handed[name] = expression
            return f"{{{{ input.{name} }}}}"

        return _PLACEHOLDER.sub(named, value)
    items, members = as_list(value), as_object(value)
    if items is not None:
        return [_handing(item, handed) for item in items]
    if members is not None:
        return {key: _handing(item, handed) for key, item in members.items()}
    return value


def with_branch_conditions(raw: JsonObject) -> JsonObject:
    """A level whose branches have a `condition`, or none and edges with conditions, with `conditions` and handles.

    Args:
        raw: The level, its nodes and edges spelled canonically.
    """
    nodes, edges = as_list(raw.get("nodes")), as_list(raw.get("edges"))
    if nodes is None or edges is None:
        return raw
    new_nodes, new_edges = list(nodes), list(edges)
    for number, value in enumerate(nodes):
        node = as_object(value)
        if node is None or node.get("type") != "branch":
            continue
        config = as_object(node.get("config", {}))
        if config is None or "conditions" in config:
            continue
        leaving = [i for i, e in enumerate(new_edges) if (as_object(e) or {}).get("source") == node.get("id")]
        condition = config.get("condition")
        if isinstance(condition, str):
            rest = {key: item for key, item in config.items() if key != "condition"}
            config = {
                "conditions": [{"when": _bare(condition), "handle": "true"}],
                "default": "false",
                **rest,
            }
            for i in leaving:
                new_edges[i] = _truth_edge(new_edges[i])
        elif condition is None and any((as_object(new_edges[i]) or {}).get("condition") for i in leaving):
            config = _from_edges(config, new_edges, leaving)
        else:
            continue
        new_nodes[number] = {**node, "config": config}
    return {**raw, "nodes": new_nodes, "edges": new_edges}


def _truth_edge(value: Json) -> Json:
    """An edge out of a branch with one condition, by the handle `true` or `false`: as its handle or condition says."""
    edge = as_object(value) or {}
    said = edge.get("source_handle", edge.get("condition"))
    word = {True: "true", False: "false"}.get(said) if isinstance(said, bool) else said
    if not isinstance(word, str) or word.strip().lower() not in ("true", "false", "yes", "no"):
        return value
    handle = "true" if word.strip().lower() in ("true", "yes") else "false"
    kept = {
        k: v
        for k, v in edge.items()
        if k != "source_handle" and (k != "condition" or "source_handle" in edge)
    }
    return {**kept, "source_handle": handle}


def _from_edges(config: JsonObject, edges: list[Any], leaving: list[int]) -> JsonObject:
    """A branch's config from the conditions of its edges: each is a handle named as the node it leads to."""
    conditions: list[Json] = []
    default: Json = None
    for i in leaving:
        edge = as_object(edges[i]) or {}
        handle, condition = edge.get("source_handle", edge.get("target")), edge.get("condition")
        if condition is None or (
            isinstance(condition, str) and condition.strip().lower() in ("else", "default")
        ):
            default = handle
        else:
            conditions.append({"when": _bare(condition), "handle": handle})
        edges[i] = {**{k: v for k, v in edge.items() if k != "condition"}, "source_handle": handle}
    return {"conditions": conditions, **({} if default is None else {"default": default}), **config}


def _bare(condition: Json) -> Json:
    """A condition without the braces of a template around it."""
    if not isinstance(condition, str):
        return condition
    text = condition.strip()
    inner = text[2:-2]
    is_whole = text.startswith("{{") and text.endswith("}}") and "{{" not in inner
    return canonical_condition(inner.strip() if is_whole else condition)


def _parsed(value: Json) -> Json:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        # Left as text: the validation names the field, or it is text that is meant.
        return value
