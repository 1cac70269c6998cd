"""Brings foreign shapes of a graph into nodes and edges."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

from pydantic import BaseModel

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.documents import BodySpec, EdgeSpec, NodeSpec, WorkflowSpec
from agentmesh_dagster.specs.fields import (
    JsonObject,
    accepted_keys,
    as_list,
    as_object,
    model_of,
    written_keys,
)
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, NodeConfig
from agentmesh_dagster.specs.normalize.bodies import BODY_KEY, map_bodies
from agentmesh_dagster.specs.normalize.editors import edited_edge, edited_node
from agentmesh_dagster.specs.normalize.keys import NODE_TYPES, known_key, synonyms_of
from agentmesh_dagster.specs.normalize.origins import Moves
from agentmesh_dagster.specs.problems import child_path

DEFINITION_KEYS: Final = ("definitionJson", "definition_json", "graph")
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
    """Nodes as a list, whatever they came as: a map, or `steps`; in bodies of any depth too.

    Returns:
        The document, and whether an end node is to be added where there is none.
    """
    entry_key = next((k for k in ENTRY_KEYS if isinstance(raw.get(k), str)), None)
    done, were_steps = _listed(raw, "", moves, node_configs)
    done = _with_listed_bodies(WorkflowSpec, done, "", moves, node_configs)
    if were_steps:
        return _with_first_step(done, entry_key, moves), True
    if entry_key is None or as_list(done.get("nodes")) is None:
        return done, False
    return _with_entry(done, entry_key, moves)


def _listed(
    raw: JsonObject, path: str, moves: dict[str, str], node_configs: Mapping[str, type[NodeConfig]]
) -> tuple[JsonObject, bool]:
    """A workflow or body with its nodes as a list, and whether they were steps, which lack their edges."""
    done = dict(raw)
    steps = as_list(done.get("steps")) if "nodes" not in done else None
    named = as_object(done.get("nodes"))
    place = child_path(path, "nodes")
    nodes: list[Any] | None
    if steps is not None:
        nodes = steps
        del done["steps"]
        before = Moves(moves).before(child_path(path, "steps"))
        moves.update({child_path(place, i): child_path(before, i) for i in range(len(steps))})
    elif named is not None:
        before = Moves(moves).before(place)
        moves.update({child_path(place, i): child_path(before, name) for i, name in enumerate(named)})
        nodes = [
            value if (node := as_object(value)) is None else {"id": name, **node}
            for name, value in named.items()
        ]
    else:
        nodes = as_list(done.get("nodes"))
    edges = as_list(done.get("edges"))
    if edges is not None:
        at = child_path(path, "edges")
        done["edges"] = [edited_edge(edge, child_path(at, i), moves) for i, edge in enumerate(edges)]
    if nodes is None:
        return done, False
    done["nodes"] = [
        _listed_node(node, child_path(place, i), steps is not None, moves, node_configs)
        for i, node in enumerate(nodes)
    ]
    return done, steps is not None


def _listed_node(
    value: Json,
    path: str,
    all_keys: bool,
    moves: dict[str, str],
    node_configs: Mapping[str, type[NodeConfig]],
) -> Json:
    """A node with its config lifted, and its bodies' nodes listed."""
    value = edited_node(value, path, moves, node_configs, is_step=all_keys)
    value = _config_lifted(value, path, all_keys, moves, node_configs)
    node = as_object(value) or {}
    config, model = as_object(node.get("config")), _model_of(node.get("type"), node_configs)
    if config is None or model is None:
        return value
    place = f"{path}.config"
    config = _with_body(model, config, place, moves)
    return {**node, "config": _with_listed_bodies(model, config, place, moves, node_configs)}


def _with_body(model: type[NodeConfig], config: JsonObject, path: str, moves: dict[str, str]) -> JsonObject:
    """A config whose only body was written into it directly (`nodes` and `edges`, or `workflow`) with it apart."""
    info = accepted_keys(model).get(BODY_KEY)
    if info is None or BODY_KEY in config or model_of(info.annotation, {}) is not BodySpec:
        return config
    apart = {key for key in config if _is_of_body(key) and known_key(model, key) is None}
    if not any(key == "steps" or known_key(BodySpec, key) in ("nodes", "workflow") for key in apart):
        return config
    place = child_path(path, BODY_KEY)
    known = Moves(moves)
    found = {child_path(place, key): known.before(child_path(path, key)) for key in apart}
    found[place] = known.before(path)
    moves.update(found)
    rest = {key: value for key, value in config.items() if key not in apart}
    return {**rest, BODY_KEY: {key: value for key, value in config.items() if key in apart}}


def _is_of_body(key: str) -> bool:
    return key == "steps" or key in ENTRY_KEYS or known_key(BodySpec, key) is not None


def _with_listed_bodies(
    model: type[BaseModel],
    raw: JsonObject,
    path: str,
    moves: dict[str, str],
    node_configs: Mapping[str, type[NodeConfig]],
) -> JsonObject:
    def listed(body: JsonObject, place: str, _: tuple[str, ...]) -> JsonObject:
        done, were_steps = _listed(body, place, moves, node_configs)
        if were_steps:
            done = _chained(done, place, (), moves)
        return _without_entry(done)

    return map_bodies(model, raw, path, listed)


def _chained(raw: JsonObject, path: str, first: Iterable[JsonObject], moves: dict[str, str]) -> JsonObject:
    """Steps with an edge from each to the next, after the `first` edges and before those that were written."""
    written = as_list(raw.get("edges")) or []
    pairs = [{"source": a, "target": b} for a, b in pairwise(_ids(as_list(raw.get("nodes")) or []))]
    edges = [*first, *pairs]
    place = child_path(path, "edges")
    before = Moves(moves).before(place)
    moves.update({child_path(place, len(edges) + i): child_path(before, i) for i in range(len(written))})
    return {**raw, "edges": [*edges, *written]}


def _without_entry(body: JsonObject) -> JsonObject:
    """A body without the name of its first node, where that is a node that no edge enters: it begins there anyway."""
    key = next((k for k in ENTRY_KEYS if k in body), None)
    ids = _ids(as_list(body.get("nodes")) or [])
    if key is None or body[key] not in ids:
        return body
    edges = [as_object(edge) or {} for edge in as_list(body.get("edges")) or []]
    targets = [edge.get(k) for edge in edges for k in edge if known_key(EdgeSpec, k) == "target"]
    return body if body[key] in targets else {k: v for k, v in body.items() if k != key}


def _with_first_step(done: JsonObject, entry_key: str | None, moves: dict[str, str]) -> JsonObject:
    """Steps with their edges, and a start node where they have none."""
    nodes = as_list(done["nodes"]) or []
    ids = _ids(nodes)
    start_id = _node_of_type(nodes, "start")
    entry = ids[0] if ids else None
    if entry_key and start_id in (None, done[entry_key]):
        entry = done.pop(entry_key)
    if start_id is not None:
        return _chained(done, "", (), moves)
    start = _free_id("start", ids)
    first = [{"source": start, "target": entry}] if entry is not None else []
    done = _chained(done, "", first, moves)
    return {**done, "nodes": [*nodes, {"id": start, "type": "start"}]}


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


def _model_of(kind: Json, node_configs: Mapping[str, type[NodeConfig]]) -> type[NodeConfig] | None:
    if not isinstance(kind, str):
        return None
    kind = kind if kind in node_configs else NODE_TYPES.get(kind, kind)
    return node_configs.get(kind, BUILTIN_NODE_CONFIGS.get(kind))


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
    model = _model_of(kind, node_configs)
    foreign = {*MAPPING_KEYS, *MODEL_KEYS, *(synonyms_of(model) if model else ())}
    node: JsonObject = {} if kind is None else {"type": kind}
    inner = dict(config)
    for key, item in raw.items():
        if key in ("config", "type"):
            continue
        if (key in foreign or (all_keys and key not in _NODE_KEYS)) and key not in inner:
            inner[key] = item
            moves[child_path(f"{path}.config", key)] = child_path(Moves(moves).before(path), key)
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
