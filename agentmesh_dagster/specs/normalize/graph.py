"""Brings foreign shapes of a graph into nodes and edges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object, written_keys
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, NodeConfig
from agentmesh_dagster.specs.normalize.keys import NODE_TYPES, synonyms_of
from agentmesh_dagster.specs.problems import child_path

DEFINITION_KEYS: Final = ("definitionJson", "definition_json")
ENTRY_KEYS: Final = ("entryPoint", "entry_point", "entry_step", "entryStep")
MAPPING_KEYS: Final = ("inputMapping", "input_mapping")
MODEL_KEYS: Final = ("modelProvider", "model_provider", "modelName", "model_name")

_NODE_KEYS: Final = frozenset((*written_keys(NodeSpec), "label", "timeoutS", "onError"))
_TYPE_BY_KEY: Final = {
    "agent": "agent",
    "agentId": "agent",
    "agentSlug": "agent",
    "tool": "tool",
    "toolId": "tool",
    "toolKey": "tool",
    "functionName": "code",
    "function": "code",
    "conditions": "branch",
}


def lifted(raw: JsonObject, moves: dict[str, str]) -> JsonObject:
    """The graph under `definitionJson` (an object, or JSON text) on the document's own level."""
    key = next((k for k in DEFINITION_KEYS if k in raw), None)
    if key is None:
        return raw
    inner = as_object(_parsed(raw[key]))
    if inner is None:
        return raw
    done = {k: v for k, v in raw.items() if k != key}
    left: JsonObject = {}
    for name, value in inner.items():
        if name in done and done[name] != value:
            left[name] = value
        elif name not in done:
            done[name] = value
            moves[child_path("", name)] = child_path(key, name)
    return {**done, key: left} if left else done


def _parsed(value: Json) -> Json:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        # Left as text: the validation names the field.
        return value


def with_listed_nodes(
    raw: JsonObject, moves: dict[str, str], node_configs: Mapping[str, type[NodeConfig]]
) -> tuple[JsonObject, bool]:
    """Nodes as a list, whatever they came as: a map, or `steps`.

    Returns:
        The document, and whether an end node is to be added where there is none.
    """
    done = dict(raw)
    steps = as_list(done.get("steps")) if "nodes" not in done else None
    entry_key = next((k for k in ENTRY_KEYS if isinstance(done.get(k), str)), None)
    if steps is not None:
        del done["steps"]
        return _from_steps(done, steps, entry_key, moves, node_configs), True
    named = as_object(done.get("nodes"))
    if named is not None:
        listed: list[Any] = []
        for index, (name, value) in enumerate(named.items()):
            node = as_object(value)
            listed.append(value if node is None else {"id": name, **node})
            moves[f"nodes[{index}]"] = child_path("nodes", name)
        done["nodes"] = listed
    nodes = as_list(done.get("nodes"))
    if nodes is None:
        return done, False
    lifted_nodes = [_config_lifted(n, f"nodes[{i}]", False, moves, node_configs) for i, n in enumerate(nodes)]
    done["nodes"] = lifted_nodes
    return _with_entry(done, entry_key, moves) if entry_key else (done, False)


def _from_steps(
    done: JsonObject,
    steps: list[Any],
    entry_key: str | None,
    moves: dict[str, str],
    node_configs: Mapping[str, type[NodeConfig]],
) -> JsonObject:
    moves.update({f"nodes[{i}]": f"steps[{i}]" for i in range(len(steps))})
    nodes = [_config_lifted(step, f"nodes[{i}]", True, moves, node_configs) for i, step in enumerate(steps)]
    ids = _ids(nodes)
    edges = [{"source": a, "target": b} for a, b in pairwise(ids)]
    start_id = _node_of_type(nodes, "start")
    entry = ids[0] if ids else None
    if entry_key and start_id in (None, done[entry_key]):
        entry = done.pop(entry_key)
    if start_id is None:
        start = _free_id("start", ids)
        nodes.append({"id": start, "type": "start"})
        if entry is not None:
            edges.insert(0, {"source": start, "target": entry})
    return {**done, "nodes": nodes, "edges": [*edges, *(as_list(done.get("edges")) or [])]}


def _with_entry(done: JsonObject, entry_key: str, moves: dict[str, str]) -> tuple[JsonObject, bool]:
    entry: str = done[entry_key]
    start = _node_of_type(done["nodes"], "start")
    if start is not None and start != entry:
        return done, False
    del done[entry_key]
    done.setdefault("edges", [])
    if start is None:
        ids = _ids(as_list(done["nodes"]) or [])
        start = _free_id("start", ids)
        done["nodes"] = [*done["nodes"], {"id": start, "type": "start"}]
        edges = as_list(done["edges"])
        if edges is not None:
            done["edges"] = [*edges, {"source": start, "target": entry}]
            moves[f"edges[{len(edges)}]"] = entry_key
    return done, True


def with_end(raw: JsonObject) -> JsonObject:
    """The graph with an end node after all nodes that no edge leaves, where it has none."""
    nodes, edges = as_list(raw.get("nodes")), as_list(raw.get("edges"))
    if nodes is None or edges is None or _node_of_type(nodes, "end") is not None:
        return raw
    ids = _ids(nodes)
    sources = {str((as_object(edge) or {}).get("source")) for edge in edges}
    end = _free_id("end", ids)
    added = [{"source": name, "target": end} for name in ids if name not in sources]
    return {**raw, "nodes": [*nodes, {"id": end, "type": "end"}], "edges": [*edges, *added]}


def _ids(nodes: list[Any]) -> list[str]:
    found = ((as_object(node) or {}).get("id") for node in nodes)
    return [name for name in found if isinstance(name, str)]


def _node_of_type(nodes: list[Any], wanted: str) -> Json:
    for node in nodes:
        found = as_object(node)
        if found is not None and found.get("type") == wanted:
            return found.get("id")
    return None


def _free_id(base: str, taken: list[Any]) -> str:
    if base not in taken:
        return base
    return next(name for n in range(2, len(taken) + 3) if (name := f"{base}_{n}") not in taken)


def _config_lifted(
    value: Json,
    path: str,
    all_keys: bool,
    moves: dict[str, str],
    node_configs: Mapping[str, type[NodeConfig]],
) -> Json:
    """A node with its type's foreign keys in `config`; of a step, all keys that no node has."""
    raw = as_object(value)
    if raw is None:
        return value
    given = raw.get("config", {})
    config = as_object(given)
    if config is None:
        return value
    kind = raw.get("type")
    if kind is None and all_keys:
        kind = next((t for k, t in _TYPE_BY_KEY.items() if k in raw or k in config), None)
    kind = NODE_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    model = node_configs.get(kind, BUILTIN_NODE_CONFIGS.get(kind)) if isinstance(kind, str) else None
    foreign = {*MAPPING_KEYS, *MODEL_KEYS, *(synonyms_of(model) if model else ())}
    node: JsonObject = {} if kind is None else {"type": kind}
    inner = dict(config)
    for key, item in raw.items():
        if key in ("config", "type"):
            continue
        if (key in foreign or (all_keys and key not in _NODE_KEYS)) and key not in inner:
            inner[key] = item
            moves[child_path(f"{path}.config", key)] = child_path(moves.get(path, path), key)
        else:
            node[key] = item
    if inner or "config" in raw:
        node["config"] = inner
    return node


def with_branch_edges(raw: JsonObject, targets: list[tuple[str, str, str]]) -> JsonObject:
    """Adds the edges that a branch's targets stand for, or puts their handles on the edges that are there.

    Args:
        raw: The document, with nodes and edges spelled canonically.
        targets: Branch id, handle and target id.
    """
    edges = as_list(raw.get("edges", []))
    if not targets or edges is None:
        return raw
    done: list[Any] = list(edges)
    for source, handle, target in targets:
        ends = [i for i, e in enumerate(done) if _is_edge(e, source, target)]
        if any(done[i].get("source_handle") == handle for i in ends):
            continue
        bare = next((i for i in ends if done[i].get("source_handle") is None), None)
        if bare is None:
            done.append({"source": source, "target": target, "source_handle": handle})
        else:
            done[bare] = {**done[bare], "source_handle": handle}
    return {**raw, "edges": done}


def _is_edge(value: Json, source: str, target: str) -> bool:
    edge = as_object(value)
    return edge is not None and edge.get("source") == source and edge.get("target") == target
