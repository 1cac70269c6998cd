"""What the expressions of a node see: input, the steps before it, the state, and the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentmesh_dagster.records import Json, Run, Step
from agentmesh_dagster.runtime.routing import EdgeState, NodeState, edge_state, settle
from agentmesh_dagster.specs.documents import WorkflowSpec
from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.names import identifier


@dataclass(frozen=True)
class Scope:
    """One level of nodes: a workflow's own, or later a body's."""

    graph: Graph
    prefix: str = ""
    """What stands before a node id in the step keys of this level."""
    state_defaults: Mapping[str, Json] = field(default_factory=dict[str, Any])
    locals: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Further names: `item`, `index`, `iteration`."""

    @staticmethod
    def of(workflow: WorkflowSpec) -> Scope:
        """The top level of a workflow."""
        properties: dict[str, Any] = (workflow.state_schema or {}).get("properties", {})
        schemas = {key: as_object(schema) or {} for key, schema in properties.items()}
        defaults = {key: schema["default"] for key, schema in schemas.items() if "default" in schema}
        return Scope(Graph.of(workflow.nodes, workflow.edges), state_defaults=defaults)

    def key(self, node_id: str) -> str:
        """The step key of a node."""
        return f"{self.prefix}{node_id}"


def names_before(scope: Scope, run: Run, node_id: str, rows: Mapping[str, Step]) -> dict[str, Json]:
    """The names that a node sees before it runs.

    Args:
        scope: The node's level.
        run: Its run.
        node_id: The node.
        rows: Finished rows by node id; ancestors without one were skipped.
    """
    graph = scope.graph
    above = graph.ancestors[node_id]
    context: dict[str, Json] = dict(scope.state_defaults)
    steps: dict[str, Json] = {}
    for name in above:
        row = rows.get(name)
        steps[identifier(name)] = _step_view(row)
        if row is not None and row.routing_decision:
            context.update(row.routing_decision.get("set", {}))
    context["last_output"] = _last_output(graph, node_id, rows)
    return {"input": run.input, "steps": steps, "context": context, "run": {"id": run.id}, **scope.locals}


def names_after(names: Mapping[str, Json], node_id: str, row: Step) -> dict[str, Json]:
    """The names that a finished node's `set` and its edges' conditions see: those before, and itself."""
    decision: dict[str, Json] = row.routing_decision or {}
    written: dict[str, Json] = decision.get("set", {})
    return {
        **names,
        "steps": {**names["steps"], identifier(node_id): _step_view(row)},
        "context": {**names["context"], **written, "last_output": row.output},
    }


def _step_view(row: Step | None) -> Json:
    if row is None:
        return {"output": None, "error": None, "status": "skipped"}
    return {"output": row.output, "error": row.error, "status": row.status.value}


def _last_output(graph: Graph, node_id: str, rows: Mapping[str, Step]) -> Json:
    """The output of the live upstream node; of several, of the last in topological order."""
    above = graph.ancestors[node_id]
    states: Mapping[str, NodeState] = settle(graph, rows, above)
    live = {e.source for e in graph.incoming[node_id] if edge_state(e, rows, states) is EdgeState.LIVE}
    for name in reversed(above):
        if name in live:
            return rows[name].output
    return None
