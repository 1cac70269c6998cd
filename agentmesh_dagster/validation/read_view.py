"""Reads a raw workflow into its view: each node and edge of each level by itself, with the problems of its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import MarkedField
from agentmesh_dagster.specs.documents import BodySpec, EdgeSpec, NodeSpec, WorkflowSettings, WorkflowSpec
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object, raw_marks
from agentmesh_dagster.specs.nodes import NodeConfig
from agentmesh_dagster.specs.problems import Problem, child_path
from agentmesh_dagster.validation.document_rules import known_type
from agentmesh_dagster.validation.raw_bodies import RawBody, hollow, raw_bodies
from agentmesh_dagster.validation.shape import checked
from agentmesh_dagster.validation.view import BodyView, EdgeView, LevelView, NodeView, WorkflowView

_LEVEL_KEYS = ("nodes", "edges")


@dataclass
class Reading:
    """One reading of a document: what is found on the way."""

    node_configs: Mapping[str, type[NodeConfig]]
    problems: list[Problem] = field(default_factory=list[Problem])
    marks: dict[str, MarkedField] = field(default_factory=dict[str, MarkedField])
    """The marked fields of all its parts, by path."""

    def collect(self, model: type[BaseModel], raw: Mapping[str, Json], path: str) -> None:
        """Keeps the marked fields of one raw object."""
        for marked in raw_marks(model, raw, path):
            self.marks[marked.path] = marked

    def workflow(self, raw: JsonObject) -> WorkflowView:
        """The view of a workflow, whose own fields besides nodes and edges are checked already."""
        settings, _ = checked(WorkflowSettings, as_object(raw.get("settings")) or {}, "settings", [])
        return WorkflowView(
            raw=raw,
            top=self._level(raw, ""),
            endings=tuple(self._body(body) for body in raw_bodies(WorkflowSpec, raw, "")),
            input_schema=as_object(raw.get("input_schema", {"type": "object"})),
            state_schema=as_object(raw.get("state_schema")),
            settings=settings or WorkflowSettings(),
        )

    def _body(self, body: RawBody) -> BodyView:
        self.collect(BodySpec, {k: v for k, v in body.raw.items() if k not in _LEVEL_KEYS}, body.path)
        is_call = body.raw.get("nodes") is None
        return BodyView(
            field=body.field,
            branch=body.branch,
            names=body.names,
            raw=body.raw,
            level=LevelView(path=body.path) if is_call else self._level(body.raw, body.path),
        )

    def _level(self, raw: JsonObject, path: str) -> LevelView:
        nodes: list[NodeView] = []
        is_complete = isinstance(raw.get("nodes"), list)
        for index, value in enumerate(as_list(raw.get("nodes")) or []):
            node = self._node(value, child_path(child_path(path, "nodes"), index))
            if node is not None:
                nodes.append(node)
            is_complete = is_complete and node is not None and node.config_type is not None
        # A body's edges may be left out, a workflow's not.
        given = as_list(raw.get("edges", [] if path else None))
        edges = [
            self._edge(value, child_path(child_path(path, "edges"), n)) for n, value in enumerate(given or [])
        ]
        found = tuple(edge for edge in edges if edge is not None)
        return LevelView(
            path=path,
            all_nodes=tuple(nodes),
            edges=found,
            is_complete=is_complete,
            has_edges=given is not None and len(found) == len(given),
        )

    def _node(self, value: Json, path: str) -> NodeView | None:
        raw = as_object(value)
        if raw is None:
            self.problems.append(
                Problem.of("field-invalid", path, "A node must be an object", "Write {id: ..., type: ...}")
            )
            return None
        spec, _ = checked(NodeSpec, raw, path, self.problems)
        self.collect(NodeSpec, raw, path)
        kind = raw["type"] if isinstance(raw.get("type"), str) else None
        config_type = self.node_configs.get(kind) if kind is not None else None
        if kind is not None:
            self.problems += known_type("node-type-unknown", f"{path}.type", "node", kind, self.node_configs)
        config: NodeConfig | None = None
        bodies: tuple[BodyView, ...] = ()
        given = as_object(raw.get("config", {}))
        if config_type is not None and given is not None:
            place = f"{path}.config"
            found, wrong = checked(config_type, hollow(config_type, given), place, self.problems)
            # Of a config with a wrong field the handles are not known.
            config = None if wrong & _handle_fields(config_type) else found
            self.collect(config_type, given, place)
            bodies = tuple(self._body(body) for body in raw_bodies(config_type, given, place))
        if not isinstance(raw.get("id"), str):
            return None
        return NodeView(
            path=path,
            id=raw["id"],
            type=kind,
            raw=raw,
            spec=spec,
            config_type=config_type,
            config=config,
            bodies=bodies,
        )

    def _edge(self, value: Json, path: str) -> EdgeView | None:
        raw = as_object(value)
        if raw is None:
            self.problems.append(
                Problem.of(
                    "field-invalid", path, "An edge must be an object", "Write {source: ..., target: ...}"
                )
            )
            return None
        checked(EdgeSpec, raw, path, self.problems)
        source, target, handle = (raw.get(k) for k in ("source", "target", "source_handle"))
        return EdgeView(
            path=path,
            source=source if isinstance(source, str) else None,
            target=target if isinstance(target, str) else None,
            handle=handle if isinstance(handle, str) else None,
            raw=raw,
        )


def _handle_fields(config_type: type[NodeConfig]) -> frozenset[str]:
    """Fields on which handles may depend: those of types that have named handles."""
    if config_type.handles is NodeConfig.handles:
        return frozenset()
    return frozenset(config_type.model_fields)
