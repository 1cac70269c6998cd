"""Finds the bodies in raw objects: what a container runs, and what a workflow runs when it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import Body
from agentmesh_dagster.specs.documents import WorkflowSpec
from agentmesh_dagster.specs.fields import JsonObject, accepted_keys, as_list, as_object, model_of
from agentmesh_dagster.specs.nodes import NodeConfig
from agentmesh_dagster.specs.problems import child_path

_STAND_INS: Final[Mapping[str, Json]] = {
    "nodes": [{"id": "x", "type": "x"}],
    "edges": [{"source": "x", "target": "x"}],
}


@dataclass(frozen=True)
class RawBody:
    """One body that is an object."""

    field: str
    """The field that holds it, as documents spell it."""
    branch: str | None
    """Its name, where the field holds several."""
    names: frozenset[str]
    """What its expressions see besides what its owner sees."""
    raw: JsonObject
    path: str


def raw_bodies(model: type[BaseModel], raw: Mapping[str, Json], path: str) -> Iterator[RawBody]:
    """The bodies that a raw object holds itself, in its order; what stands in them is not looked into."""
    for key, mark, value, is_single in _body_fields(model, raw):
        place = child_path(path, key)
        names = frozenset(mark.names)
        if is_single:
            body = as_object(value)
            if body is not None:
                yield RawBody(key, None, names, body, place)
            continue
        for branch, item in (as_object(value) or {}).items():
            body = as_object(item)
            if body is not None:
                yield RawBody(key, branch, names, body, child_path(place, branch))


def hollow(model: type[BaseModel], raw: JsonObject) -> JsonObject:
    """A raw object whose bodies hold a stand-in for their nodes and edges, which are checked one by one."""
    done = dict(raw)
    for key, _, value, is_single in _body_fields(model, raw):
        if is_single:
            done[key] = _hollow_body(value)
        else:
            branches = as_object(value)
            if branches is not None:
                done[key] = {name: _hollow_body(item) for name, item in branches.items()}
    return done


def _hollow_body(value: Json) -> Json:
    body = as_object(value)
    if body is None:
        return value
    # An empty list stays: that there is nothing in it is a problem of the body.
    return body | {key: stand_in for key, stand_in in _STAND_INS.items() if as_list(body.get(key))}


def _body_fields(model: type[BaseModel], raw: Mapping[str, Json]) -> Iterator[tuple[str, Body, Json, bool]]:
    """Key, mark and value of the fields that hold bodies, and whether it is one body and not several by name."""
    keys = accepted_keys(model)
    for key, value in raw.items():
        info = keys.get(key)
        mark = next((m for m in info.metadata if isinstance(m, Body)), None) if info is not None else None
        if info is not None and mark is not None and value is not None:
            yield key, mark, value, model_of(info.annotation, value) is not None


def level_counts(raw: JsonObject, node_configs: Mapping[str, type[NodeConfig]]) -> dict[str, int]:
    """How many `nodes` and `edges` a raw workflow has on all its levels."""
    found = {"nodes": 0, "edges": 0}
    waiting = [raw, *(body.raw for body in raw_bodies(WorkflowSpec, raw, ""))]
    while waiting:
        level = waiting.pop()
        found["edges"] += len(as_list(level.get("edges")) or ())
        for item in as_list(level.get("nodes")) or ():
            found["nodes"] += 1
            node = as_object(item) or {}
            kind, config = node.get("type"), as_object(node.get("config"))
            config_type = node_configs.get(kind) if isinstance(kind, str) else None
            if config_type is not None and config is not None:
                waiting += [body.raw for body in raw_bodies(config_type, config, "")]
    return found
