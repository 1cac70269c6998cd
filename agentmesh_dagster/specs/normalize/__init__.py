"""From what people and other editors write to the one form that the models describe.

Pure spelling: nothing is checked here, and what is not understood is left where it stands, for the validation to name.
Free data (`metadata`, JSON Schemas, mapped inputs, outputs) is never respelled; expressions in it are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import Condition, SpecModel, Template
from agentmesh_dagster.specs.documents import ToolSpec, WorkflowSpec, document_model
from agentmesh_dagster.specs.fields import (
    JsonObject,
    accepted_keys,
    as_list,
    as_object,
    deeper_than,
    map_models,
)
from agentmesh_dagster.specs.loading import MAX_DEPTH
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, BranchConfig, NodeConfig
from agentmesh_dagster.specs.normalize.bodies import map_bodies
from agentmesh_dagster.specs.normalize.editors import (
    with_branch_conditions,
    with_max_steps,
    with_parsed_schemas,
)
from agentmesh_dagster.specs.normalize.expressions import canonical_condition, canonical_templates
from agentmesh_dagster.specs.normalize.graph import (
    DEFINITION_KEYS,
    ENTRY_KEYS,
    MAPPING_KEYS,
    lifted,
    with_branch_edges,
    with_end,
    with_listed_nodes,
)
from agentmesh_dagster.specs.normalize.keys import NODE_TYPES, output_format, respelled
from agentmesh_dagster.specs.normalize.origins import Moves, Origin, Renames
from agentmesh_dagster.specs.problems import child_path
from agentmesh_dagster.specs.slugs import GENERATED_KINDS, generated_slug
from agentmesh_dagster.specs.tools import BUILTIN_TOOL_CONFIGS

__all__ = ["Normalized", "Origin", "normalize"]

_TARGET_KEYS = ("targetNodeId", "target_node_id")
_DEFAULT_KEYS = ("defaultTarget", "default_target")
_DO_WHILE = "dowhile"


@dataclass(frozen=True)
class Normalized:
    """A document in the form of the models, and the documents that were written inside it."""

    documents: tuple[Json, ...]
    """The main document first; objects, unless the author wrote something else."""
    origins: tuple[Origin, ...]
    """For each document, where its values stand in the author's text."""


@dataclass(frozen=True)
class _Types:
    nodes: Mapping[str, type[NodeConfig]]
    tools: Mapping[str, type[SpecModel]]


def normalize(
    raw: Json,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
) -> Normalized:
    """Brings one raw document into the form of the models; never raises for what it finds.

    Args:
        raw: A document as read from YAML or JSON.
        node_configs: Config models of the node types, whose keys may be spelled in camelCase.
        tool_configs: The same of the tool types.
    """
    document = as_object(raw)
    # What is too deep is left as it is: the validation refuses it.
    if document is None or deeper_than(document, MAX_DEPTH):
        return Normalized((raw,), (Origin(),))
    types = _Types(node_configs, tool_configs)
    foreign = ("steps", *DEFINITION_KEYS, *ENTRY_KEYS)
    if "kind" not in document and any(key in document for key in foreign):
        document = {"kind": "workflow", **document}
    if document.get("kind") == "workflow":
        return _workflow(document, types)
    done, origin = _plain(document, types, "")
    return Normalized((done,), (origin,))


def _plain(raw: JsonObject, types: _Types, base: str) -> tuple[JsonObject, Origin]:
    """A document without a graph."""
    kind = raw.get("kind")
    if kind not in ("agent", "tool", "network"):
        return raw, Origin(base)
    renames: dict[str, str] = {}
    model = document_model(cast("str", kind))
    done = respelled(model, with_parsed_schemas(raw, renames), "", renames)
    config_model = types.tools.get(done.get("type", "")) if isinstance(done.get("type"), str) else None
    config = as_object(done.get("config"))
    if model is ToolSpec and config_model is not None and config is not None:
        done["config"] = _expressions(config_model, respelled(config_model, config, "config", renames))
    return _expressions(model, done), Origin(base, (Renames(renames),))


def _workflow(raw: JsonObject, types: _Types) -> Normalized:
    first: dict[str, str] = {}
    second: dict[str, str] = {}
    renames: dict[str, str] = {}
    document = with_max_steps(with_parsed_schemas(lifted(raw, first), first), first)
    if document is not raw and deeper_than(document, MAX_DEPTH):
        # A text within the document may be deeper than the document itself.
        return Normalized((document,), (Origin("", (Moves(first),)),))
    document, needs_end = with_listed_nodes(document, second, types.nodes)
    document = respelled(WorkflowSpec, document, "", renames)
    document = _with_nodes(document, "", types, renames)
    document = _with_bodies(WorkflowSpec, document, "", types, renames)
    if needs_end:
        document = with_end(document)
    origin = Origin("", (Moves(first), Moves(second), Renames(renames)))
    document, inner = _extracted(document, types, origin)
    document = _expressions(WorkflowSpec, document)
    return Normalized((document, *(d for d, _ in inner)), (origin, *(o for _, o in inner)))


def _with_nodes(raw: JsonObject, path: str, types: _Types, renames: dict[str, str]) -> JsonObject:
    """A workflow or body, its own keys respelled, with the types and configs of its nodes respelled too."""
    nodes = as_list(raw.get("nodes"))
    if nodes is None:
        return raw
    targets: list[tuple[str, str, str]] = []
    place = child_path(path, "nodes")
    done = [_node(node, child_path(place, i), types, renames, targets) for i, node in enumerate(nodes)]
    return with_branch_conditions(with_branch_edges({**raw, "nodes": done}, targets))


def _with_bodies(
    model: type[BaseModel], raw: JsonObject, path: str, types: _Types, renames: dict[str, str]
) -> JsonObject:
    return map_bodies(model, raw, path, lambda body, place, _: _with_nodes(body, place, types, renames))


def _node(
    value: Json, path: str, types: _Types, renames: dict[str, str], targets: list[tuple[str, str, str]]
) -> Json:
    node = as_object(value)
    given = node.get("type") if node is not None else None
    if node is None or not isinstance(given, str):
        return value
    kind = given if given in types.nodes else NODE_TYPES.get(given, given)
    done = {**node, "type": kind}
    config, model = as_object(node.get("config")), types.nodes.get(kind)
    if config is None or model is None:
        return done
    place = f"{path}.config"
    if issubclass(model, BranchConfig):
        config = _without_targets(node.get("id"), config, targets)
    config = _with_mapping(kind, model, respelled(model, config, place, renames), place, renames)
    if renames.get(f"{place}.output_schema") in ("outputFormat", "output_format"):
        config["output_schema"] = output_format(config["output_schema"])
        if config["output_schema"] is None:
            del config["output_schema"]
    if given == _DO_WHILE and kind == "loop":
        config = _asked_after(config, place, renames)
    config = _with_bodies(model, config, place, types, renames)
    done["config"] = _expressions(model, config)
    return done


def _asked_after(config: JsonObject, path: str, renames: dict[str, str]) -> JsonObject:
    """A `dowhile`'s config: what it goes on for is asked after each pass, so it is what a loop does not stop for."""
    key = next((k for k in ("condition", "while") if k in config), None)
    if key is None or "until" in config:
        return config
    asked = config[key]
    renames[child_path(path, "until")] = key
    rest = {k: v for k, v in config.items() if k != key}
    return {**rest, "until": f"not ({canonical_condition(asked)})" if isinstance(asked, str) else asked}


def _with_mapping(
    kind: str, model: type[BaseModel], config: JsonObject, path: str, renames: dict[str, str]
) -> JsonObject:
    """`inputMapping` where the type keeps what it is given: `input`, `output` of a transform, an agent's prompt."""
    key = next((k for k in MAPPING_KEYS if k in config), None)
    if key is None:
        return config
    field = (
        "input" if "input" in accepted_keys(model) else {"transform": "output", "agent": "prompt"}.get(kind)
    )
    if field is None or field in config:
        return config
    value = _as_prompt(config[key]) if field == "prompt" else config[key]
    renames[child_path(path, field)] = key
    return {**{k: v for k, v in config.items() if k != key}, field: value}


def _as_prompt(mapping: Json) -> Json:
    """An agent's mapped input as text: the value of `prompt` alone, else one line for each key."""
    found = as_object(mapping)
    if found is None:
        return mapping
    if list(found) == ["prompt"]:
        return found["prompt"]
    lines = (
        f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in found.items()
    )
    return "\n".join(lines)


def _without_targets(node_id: Json, config: JsonObject, targets: list[tuple[str, str, str]]) -> JsonObject:
    """A branch's config whose targets became edges; a handle that is named beside a target stays its name."""
    done = dict(config)
    conditions = as_list(config.get("conditions"))
    if conditions is not None:
        done["conditions"] = [
            _without_target(node_id, c, "handle", _TARGET_KEYS, targets) for c in conditions
        ]
    return as_object(_without_target(node_id, done, "default", _DEFAULT_KEYS, targets)) or done


def _without_target(
    node_id: Json,
    value: Json,
    handle_key: str,
    target_keys: tuple[str, ...],
    targets: list[tuple[str, str, str]],
) -> Json:
    found = as_object(value)
    key = next((k for k in target_keys if k in found), None) if found is not None else None
    if found is None or key is None:
        return value
    target = found[key]
    handle = found.get(handle_key, target)
    if not (isinstance(node_id, str) and isinstance(handle, str) and isinstance(target, str)):
        return value
    targets.append((node_id, handle, target))
    return {k: v for k, v in found.items() if k != key} if handle_key in found else found


def _extracted(
    raw: JsonObject, types: _Types, origin: Origin
) -> tuple[JsonObject, list[tuple[JsonObject, Origin]]]:
    """The workflow with the agents and tools that were written inside it as documents of their own."""
    workflow = raw.get("slug")
    found: list[tuple[JsonObject, Origin]] = []
    if not isinstance(workflow, str):
        return raw, found

    def level(owner: JsonObject, path: str, names: tuple[str, ...]) -> JsonObject:
        nodes = as_list(owner.get("nodes"))
        if nodes is None:
            return owner
        place = child_path(path, "nodes")
        return {**owner, "nodes": [node(n, child_path(place, i), names) for i, n in enumerate(nodes)]}

    def node(value: Json, path: str, names: tuple[str, ...]) -> Json:
        given = as_object(value) or {}
        config, node_id, kind = as_object(given.get("config")), given.get("id"), given.get("type")
        if config is None or not isinstance(kind, str) or not isinstance(node_id, str):
            return value
        names = (*names, node_id)
        place = f"{path}.config"
        model = types.nodes.get(kind, NodeConfig)
        done = map_bodies(model, config, place, lambda body, at, name: level(body, at, (*names, *name)))
        inline = as_object(config.get(kind)) if kind in GENERATED_KINDS else None
        if inline is not None:
            slug = inline.get("slug", generated_slug(workflow, *names))
            at = origin.author_path(child_path(place, kind))
            found.append(_plain({**inline, "kind": kind, "slug": slug}, types, at))
            done[kind] = slug
        return {**given, "config": done}

    done = level(raw, "", ())
    done = map_bodies(WorkflowSpec, done, "", level)
    return done, found


def _expressions(model: type[BaseModel], raw: JsonObject) -> JsonObject:
    """The object with all its templates and conditions respelled, and those of the models in it."""
    keys = accepted_keys(model)
    done = dict(raw)
    for key, value in raw.items():
        info = keys.get(key)
        if info is None:
            continue
        if any(isinstance(mark, Template) for mark in info.metadata):
            done[key] = canonical_templates(value)
        elif any(isinstance(mark, Condition) for mark in info.metadata):
            done[key] = canonical_condition(value) if isinstance(value, str) else value
        else:
            done[key] = map_models(
                info.annotation, value, "", lambda inner, item, _: _expressions(inner, item)
            )
    return done
