"""A level of nodes as a run meets it, and what the expressions of its nodes see.

A level is what a document says: a workflow's own nodes, or a body's. A scope is one pass through it: the third item of
a `foreach`, say, with its place in the step keys and the names that it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.errors import NodeError
from agentmesh_dagster.records import Json, Run, Step, StepStatus
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.routing import is_live
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import BodySpec, NodeSpec, WorkflowSpec
from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.levels import called_workflow
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.nodes import NodeConfig
from agentmesh_dagster.specs.resolve import node_entity, node_hash
from agentmesh_dagster.specs.sandbox import SkippedStep
from agentmesh_dagster.specs.schema import fill_and_coerce
from agentmesh_dagster.specs.state import StateRules

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.nodes.base import AnyNodeType
    from agentmesh_dagster.runtime.row_buffer import RowBuffer


@dataclass(frozen=True)
class ParsedNode:
    """A node with its type and its config, read once for all passes."""

    spec: NodeSpec
    type: AnyNodeType
    config: NodeConfig


@dataclass(frozen=True)
class NodeIdentity:
    """What tells a node from what an edit makes of it, and what it is about."""

    hash: str
    """Of the node with all that it refers to (`specs.resolve.node_hash`)."""
    entity: tuple[str, str] | None
    """Kind and slug of its agent, tool or workflow."""


class Level:
    """A workflow's own nodes, or those of a body in it. One object for all passes in a process."""

    def __init__(self, graph: Graph, workflow: WorkflowSpec, closure: Closure, *, is_workflow: bool) -> None:
        self.graph = graph
        self.workflow = workflow
        """Whose level it is: its settings and its state hold."""
        self.closure = closure
        self.is_workflow = is_workflow
        """Whether it is a workflow's own level, with `start` and `end`, and not a body's."""
        self.state = StateRules.of(workflow.state_schema)
        self._nodes: dict[str, ParsedNode] = {}
        self._identities: dict[str, NodeIdentity] = {}
        self._bodies: dict[int, Level] = {}
        self._called: dict[str, Level] = {}
        self._is_light: bool | None = None

    @staticmethod
    def of_workflow(closure: Closure, slug: str) -> Level:
        """The own level of a workflow of a closure; the slug may carry `@version`."""
        workflow = called_workflow(slug, closure)
        return Level(Graph.of(workflow.nodes, workflow.edges), workflow, closure, is_workflow=True)

    def node(self, node_id: str, types: Mapping[str, AnyNodeType]) -> ParsedNode:
        """A node, parsed.

        Raises:
            DefinitionError: Its type is not installed (code `node-type-missing`).
        """
        found = self._nodes.get(node_id)
        if found is None:
            spec = self.graph.nodes[node_id]
            node_type = node_type_of(spec, types)
            found = self._nodes[node_id] = ParsedNode(spec, node_type, node_type.parse(spec))
        return found

    def identity(self, node_id: str, types: Mapping[str, AnyNodeType]) -> NodeIdentity:
        """What a node is, for its steps.

        Raises:
            DefinitionError: Its type is not installed (code `node-type-missing`).
        """
        found = self._identities.get(node_id)
        if found is None:
            node = self.node(node_id, types)
            checked = {"start": self.workflow.input_schema, "end": self.workflow.output_schema}
            digest = node_hash(
                node.spec,
                self.graph.outgoing[node_id],
                self.closure,
                schema=checked.get(node.spec.type) if self.is_workflow else None,
                node_configs={name: each.config_model for name, each in types.items()},
            )
            found = self._identities[node_id] = NodeIdentity(digest, node_entity(node.config))
        return found

    def body(self, body: BodySpec) -> Level:
        """The level of a body of one of its nodes: its own nodes, or the workflow that it names."""
        found = self._bodies.get(id(body))
        if found is None:
            if body.workflow is not None:
                found = self.called(body.workflow)
            else:
                graph = Graph.of(body.nodes or (), body.edges)
                found = Level(graph, self.workflow, self.closure, is_workflow=False)
            self._bodies[id(body)] = found
        return found

    def called(self, slug: str) -> Level:
        """The own level of a workflow that one of its nodes calls."""
        found = self._called.get(slug)
        if found is None:
            found = self._called[slug] = Level.of_workflow(self.closure, slug)
        return found

    def is_light(self, types: Mapping[str, AnyNodeType]) -> bool:
        """Whether all its nodes only compute: to run them again costs and changes nothing."""
        if self._is_light is None:
            self._is_light = all(self.node(name, types).type.is_pure for name in self.graph.nodes)
        return self._is_light


@dataclass(frozen=True, eq=False)
class Scope:
    """One pass through a level."""

    level: Level
    input: Json = None
    run: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """`run` in expressions; its `now` is that of the roots. Of the other nodes `now` is the moment at which the node
    above finished, as its row says: the same in every replay."""
    config: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """`config` in expressions: the deployment's values, as they were when the run began."""
    prefix: str = ""
    """What stands before a node id in the step keys of this level: `both/left/`, `each[3]/`."""
    owner_key: str | None = None
    """The key of the row under which the level's rows stand."""
    steps: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """The steps of enclosing levels that its nodes see."""
    context: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """The state at its begin."""
    upstream: Json = None
    """`context.last_output` of its roots."""
    locals: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Further names: `item`, `index`, `iteration`."""
    buffer: RowBuffer | None = None
    """Where its rows wait for the next commit; None where each node is an op, whose rows other processes read."""
    is_quiet: bool = False
    """Whether its nodes keep out of the readable log: it is one of many passes."""
    is_closing: bool = False
    """Whether it follows the end of a workflow, where nothing waits."""
    views: dict[str, Json] = field(default_factory=dict[str, Any])
    """What expressions see of its finished steps, by node id; filled as they are asked for."""

    @property
    def graph(self) -> Graph:
        """The level's graph."""
        return self.level.graph

    @property
    def is_shared(self) -> bool:
        """Whether ops of several processes may write its rows."""
        return self.buffer is None

    def key(self, node_id: str) -> str:
        """The step key of a node."""
        return f"{self.prefix}{node_id}"

    def walked(self, buffer: RowBuffer) -> Scope:
        """The same pass, run by the walker."""
        return self if self.buffer is buffer else replace(self, buffer=buffer)


def top_scope(level: Level, run: Run) -> Scope:
    """The pass of a run through its workflow's own level."""
    began = run.started_at or run.queued_at
    shown = None if began is None else shown_moment(began)
    seen: dict[str, Json] = {"id": run.id, "started_at": shown, "now": shown}
    return Scope(level, input=run.input, run=seen, config=run_config(run), context=level.state.defaults)


def request_context(closure: Closure, deployment: Deployment) -> Json:
    """What a run keeps of the deployment that begins it: the values that its documents name.

    A continuation, days later, reads these, and not what the deployment says by then: what was rendered with them is
    in the journal.
    """
    config = closure.config_used(deployment.config)
    return {"config": config} if config else None


def run_config(run: Run) -> Mapping[str, Json]:
    """The deployment's values that a run was begun with; see `request_context`."""
    kept: Mapping[str, Json] = run.request_context or {}
    return kept.get("config", {})


def called_scope(
    outer: Scope, level: Level, owner_key: str, input: Json, run: Mapping[str, Json] | None = None
) -> Scope:
    """The pass through a called workflow's own level: it sees its own input and state, and nothing of its caller's.

    Args:
        outer: The pass in which it is called.
        level: The workflow's own level.
        owner_key: The key of the row of the call.
        input: Its input.
        run: `run` in its expressions; default: as at the beginning of `outer`.
    """
    return Scope(
        level,
        input=input,
        run=outer.run if run is None else run,
        config=outer.config,
        prefix=f"{owner_key}/",
        owner_key=owner_key,
        context=level.state.defaults,
        buffer=outer.buffer,
        is_quiet=outer.is_quiet,
        is_closing=outer.is_closing,
    )


def workflow_input(workflow: WorkflowSpec, given: Json) -> Json:
    """What a called workflow gets: with the defaults of its schema; what does not fit, its `start` refuses."""
    return fill_and_coerce(workflow.input_schema, {} if given is None else given)


def names_before(
    scope: Scope, node_id: str, rows: Mapping[str, Step], *, with_state: bool = True
) -> dict[str, Json]:
    """The names that a node sees before it runs.

    Args:
        scope: The node's level.
        node_id: The node.
        rows: Finished rows of the level by node id; ancestors without one were skipped.
        with_state: Whether what they have written to the state counts.

    Raises:
        NodeError: Two nodes have written one key of the state, and nothing says which counts (code `state-conflict`).
    """
    graph = scope.graph
    above = graph.ancestors[node_id]
    steps = dict(scope.steps)
    for name in above:
        view = scope.views.get(name)
        if view is None:
            row = rows.get(name)
            view = step_view(row)
            if row is not None:
                scope.views[name] = view
        steps[identifier(name)] = view
    written = writes_of(scope, rows, above, f"{scope.key(node_id)!r}") if with_state else {}
    context = scope.level.state.joined(scope.context, written)
    upstream = upstream_node(scope, node_id, rows)
    run = scope.run
    if upstream is not None:
        row = rows[upstream]
        context["last_output"] = row.output
        if row.finished_at is not None:
            run = {**run, "now": shown_moment(row.finished_at)}
    else:
        context["last_output"] = None if graph.incoming[node_id] else scope.upstream
    return {
        "input": scope.input,
        "steps": steps,
        "context": context,
        "run": run,
        "config": scope.config,
        **scope.locals,
    }


def names_after(
    scope: Scope,
    names: Mapping[str, Json],
    node_id: str,
    row: Step,
    written: Mapping[str, Json] | None = None,
) -> dict[str, Json]:
    """The names that a finished node's `set` and its edges' conditions see: those before, and itself."""
    context = names["context"]
    if written:
        context = scope.level.state.joined(context, written)
    return {
        **names,
        "steps": {**names["steps"], identifier(node_id): step_view(row)},
        "context": {**context, "last_output": row.output},
    }


def writes_of(scope: Scope, rows: Mapping[str, Step], nodes: Iterable[str], reader: str) -> dict[str, Json]:
    """What nodes have written to the state, joined.

    Args:
        scope: Their level.
        rows: Finished rows by node id.
        nodes: The nodes, in topological order.
        reader: Who asks, for the error.

    Raises:
        NodeError: Two of them have written one key, neither after the other, and no reducer joins them (code
            `state-conflict`).
    """
    rules = scope.level.state
    joined: dict[str, Json] = {}
    last: dict[str, list[str]] = {}
    for name in nodes:
        row = rows.get(name)
        written: dict[str, Json] | None = (
            row.routing_decision.get("set") if row is not None and row.routing_decision else None
        )
        if not written:
            continue
        joined = rules.joined(joined, written)
        for key in written:
            if key not in rules.reducers:
                above = scope.graph.ancestors[name]
                last[key] = [*(other for other in last.get(key, ()) if other not in above), name]
    for key, names in last.items():
        if len(names) > 1:
            raise state_conflict(key, [scope.key(name) for name in names], reader)
    return joined


def state_conflict(key: str, writers: Iterable[str], reader: str) -> NodeError:
    """The error of a key that was written twice, neither write after the other."""
    return NodeError(
        f"context.{key} was written by {' and '.join(repr(w) for w in writers)}, neither of which comes after the "
        f"other, and {reader} sees both: give {key!r} a 'reducer' in the state_schema (append, merge, sum, or replace: "
        "the one further from the start counts, or the later in the document), or lead an edge from one to the other",
        code="state-conflict",
    )


def step_view(row: Step | None) -> dict[str, Json]:
    """A step as expressions see it; one without a row was skipped."""
    if row is None or row.status is StepStatus.SKIPPED:
        return SkippedStep(status="skipped")
    return {"output": row.output, "error": row.error, "status": row.status.value}


def upstream_node(scope: Scope, node_id: str, rows: Mapping[str, Step]) -> str | None:
    """The live node above a node; of several, the last in topological order. None for the roots of a body."""
    live = {edge.source for edge in scope.graph.incoming[node_id] if is_live(edge, rows)}
    if len(live) == 1:
        return next(iter(live))
    return next((name for name in reversed(scope.graph.ancestors[node_id]) if name in live), None)


def shown_moment(moment: datetime) -> str:
    """A moment as expressions see it: ISO 8601, in milliseconds."""
    return moment.isoformat(timespec="milliseconds")
