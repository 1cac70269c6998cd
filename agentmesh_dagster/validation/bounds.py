"""The static worst case of a workflow: how many steps and model calls one run may come to.

A bound that is never too low, for a run that is not continued after it failed or its worker died: what had not finished
then gets its attempts anew. So does what had failed in a container when something else in it waits, where the container
has `retry` of its own or needs not every branch; of an agent that waits for its tools that is counted. `max_steps` is
taken at its word, which step processes of their own (`executor: multiprocess`) may overstep. How tight the bound is,
`counts.worst_pass` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.documents import AgentSpec, BodySpec, NodeSpec, ToolSpec, WorkflowSpec
from agentmesh_dagster.specs.graph import Edge, Graph
from agentmesh_dagster.specs.levels import all_nodes, bodies_in
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.nodes import (
    BUILTIN_NODE_CONFIGS,
    AgentConfig,
    ForeachConfig,
    LoopConfig,
    NodeConfig,
    ParallelConfig,
    ToolConfig,
    TransformConfig,
    WebhookConfig,
    WorkflowConfig,
)
from agentmesh_dagster.specs.problems import child_path
from agentmesh_dagster.specs.resolve import Library, PinnedDocument
from agentmesh_dagster.specs.slugs import parse_reference
from agentmesh_dagster.validation.counts import (
    ONE_STEP,
    Bound,
    Count,
    Unbounded,
    bounded_by,
    choice_text,
    total,
    ways_out,
    worst_pass,
)
from agentmesh_dagster.validation.list_sizes import (
    UNKNOWN,
    Known,
    ListShape,
    ObjectShape,
    SchemaShape,
    Shape,
    agent_shape,
    named_in,
)

__all__ = ["Explanation", "NodeBound", "explain"]


@dataclass(frozen=True, kw_only=True)
class NodeBound:
    """What one node costs at most in one pass of its level, with all that runs in it."""

    key: str
    """Its step key, with `*` for every item or iteration: `each[*]/ask`, `both/left/draft`, `@finally/tell`."""
    path: str
    """Place in the document."""
    type: str
    """Its node type; or `branch` of a `parallel`, `on_failure`, `finally`."""
    count: Count
    why: str = ""
    nodes: tuple[NodeBound, ...] = ()
    """Those of its bodies; a called workflow's are not among them."""

    def to_json(self) -> dict[str, Json]:
        """The node as a JSON object; a number without bound is null."""
        return {
            "key": self.key,
            "path": self.path,
            "type": self.type,
            **{name: bound.number for name, bound in self.count.named()},
            "why": self.why,
            "nodes": [node.to_json() for node in self.nodes],
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a run of a workflow costs at most, `on_failure` and `finally` included."""

    count: Count
    nodes: tuple[NodeBound, ...]
    """In document order, then `@on_failure` and `@finally`."""
    why: str = ""

    @property
    def unbounded(self) -> list[tuple[str, Unbounded]]:
        """What leaves which number (`steps`, `model_calls`, `starts`) without bound."""
        return [(name, place) for name, bound in self.count.named() for place in bound.open_at]

    def to_json(self) -> dict[str, Json]:
        """The explanation as a JSON object; a number without bound is null."""
        return {
            **{name: bound.number for name, bound in self.count.named()},
            "why": self.why,
            "unbounded": [{"what": name, **place.to_json()} for name, place in self.unbounded],
            "nodes": [node.to_json() for node in self.nodes],
        }


def explain(
    workflow: WorkflowSpec,
    library: Library,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
) -> Explanation:
    """The worst case of a workflow.

    Args:
        workflow: A valid workflow.
        library: Where the agents, tools and workflows that it names are found; what is not there has no bound.
        node_configs: Config models of the node types. A node of a type that is not built in is one step, and what it
            asks of models is not counted; a container of such a type has no bound.
    """
    return _Explainer(library, node_configs).run(workflow)


class _Explainer:
    """All workflows that one workflow reaches, each explained once."""

    def __init__(self, library: Library, node_configs: Mapping[str, type[NodeConfig]]) -> None:
        self.library = library
        self.node_configs = node_configs
        self._done: dict[str, Explanation] = {}
        self._open: set[str] = set()

    def run(self, workflow: WorkflowSpec) -> Explanation:
        configs = {placed.path: placed.config for placed in all_nodes(workflow, self.node_configs)}
        return _DocumentWalk(self, configs).run(workflow)

    def find(self, kind: str, reference: str) -> PinnedDocument | None:
        found = parse_reference(reference, kind)
        return None if found is None else self.library.get(kind, found.slug, found.version)

    def call(self, reference: str, path: str, node: str) -> tuple[Count, Shape]:
        """What a called workflow costs, its `start` and `end` included, and what is known of its output."""
        found = self.find("workflow", reference)
        called = found.document if found is not None else None
        if not isinstance(called, WorkflowSpec):
            return _uncounted(path, node, f"there is no workflow {reference!r}"), UNKNOWN
        if reference in self._open:
            return _uncounted(path, node, f"the workflow {reference!r} contains itself"), UNKNOWN
        if reference not in self._done:
            self._open.add(reference)
            self._done[reference] = self.run(called)
            self._open.discard(reference)

        def seen(bound: Bound) -> Bound:
            places = (place.seen_from(path, node, called.slug) for place in bound.open_at)
            return Bound(bound.finite, tuple(dict.fromkeys(places)))

        # Its `on_failure` and `finally` have a row of their own each, as branches have.
        count = Count.joined(total, [self._done[reference].count, *(ONE_STEP for _ in bodies_in(called))])
        return count.map(seen), SchemaShape.of(called.output_schema)


def _uncounted(path: str, node: str, why: str) -> Count:
    bound = Bound(0, (Unbounded(path, node, why),))
    return Count(steps=bound, model_calls=bound, starts=bound)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One pass through a level."""

    count: Count
    nodes: tuple[NodeBound, ...] = ()
    output: Shape = UNKNOWN
    steps: Mapping[str, Shape] = field(default_factory=dict[str, Shape])
    """What is known of its nodes' outputs."""
    note: str = ""


class _DocumentWalk:
    """One workflow's document.

    Args:
        explainer: For what it calls.
        configs: Its nodes' configs, by their places.
    """

    def __init__(self, explainer: _Explainer, configs: Mapping[str, NodeConfig | None]) -> None:
        self._explainer = explainer
        self._configs = configs

    def run(self, workflow: WorkflowSpec) -> Explanation:
        known = Known(input=SchemaShape.of(workflow.input_schema))
        own = self._level(Graph.of(workflow.nodes, workflow.edges), known, "nodes", "")
        most = workflow.settings.max_steps
        count = bounded_by(own.count, [node.count for node in own.nodes], most)
        why = f"settings.max_steps lets {most} of its nodes run" if count != own.count else ""
        known = replace(known, steps=own.steps)
        ends: list[NodeBound] = []
        for placed in bodies_in(workflow):
            end = NodeBound(key=f"@{placed.path}", path=placed.path, type=placed.path, count=Count())
            found = self._body(placed.body, known, placed.path, end.key, "")
            ends.append(replace(end, count=found.count, why=found.note, nodes=found.nodes))
        return Explanation(
            count=Count.joined(total, [count, *(end.count for end in ends)]),
            nodes=(*own.nodes, *ends),
            why=why,
        )

    def _body(self, body: BodySpec, known: Known, path: str, key: str, node: str) -> _Pass:
        if body.workflow is not None:
            count, output = self._explainer.call(body.workflow, path, node)
            return _Pass(count=count, output=output, note=f"calls workflow {body.workflow!r}")
        graph = Graph.of(body.nodes or (), body.edges)
        return self._level(graph, known, child_path(path, "nodes"), f"{key}/")

    def _level(self, graph: Graph, known: Known, path: str, prefix: str) -> _Pass:
        """A level.

        Args:
            graph: Its nodes and edges.
            known: What is known of what it sees.
            path: Place of its list of nodes.
            prefix: Of its step keys.
        """
        places = {name: child_path(path, index) for index, name in enumerate(graph.nodes)}
        # Grows with the nodes: each sees those before it.
        steps = dict(known.steps)
        known = replace(known, steps=steps)
        found: dict[str, NodeBound] = {}
        ways: dict[str, list[list[Edge]]] = {}
        for name in graph.order:
            node, config = graph.nodes[name], self._configs[places[name]]
            ways[name] = ways_out(node, config, graph.outgoing[name])
            bound, output = self._node(node, config, known, places[name], f"{prefix}{name}")
            if len(ways[name]) > 1:
                bound = replace(bound, why=_sentence((bound.why, choice_text(ways[name]))))
            found[name] = bound
            steps[identifier(name)] = output
        count = worst_pass(graph, {name: bound.count for name, bound in found.items()}, ways)
        sinks = graph.sinks
        return _Pass(
            count=count,
            nodes=tuple(found[name] for name in graph.nodes),
            output=steps[identifier(sinks[0])] if len(sinks) == 1 else UNKNOWN,
            steps=steps,
        )

    def _node(
        self, node: NodeSpec, config: NodeConfig | None, known: Known, path: str, key: str
    ) -> tuple[NodeBound, Shape]:
        """A node, and what is known of its output."""
        bound = NodeBound(key=key, path=path, type=node.type, count=ONE_STEP)
        match config:
            case AgentConfig():
                calls, why = self._agent(node, config, path)
                count = replace(ONE_STEP, model_calls=calls)
                return replace(bound, count=count, why=why), agent_shape(config.output_schema)
            case ToolConfig():
                tool = self._explainer.find("tool", config.tool)
                schema = tool.document.output_schema if tool and isinstance(tool.document, ToolSpec) else None
                return bound, SchemaShape.of(schema)
            case TransformConfig():
                return bound, known.of(config.output)
            case WebhookConfig() if config.on_timeout == "fail":
                return bound, SchemaShape.of(config.payload_schema)
            case ParallelConfig():
                bound, output = self._parallel(node, config, known, bound)
            case ForeachConfig():
                bound, output = self._foreach(node, config, known, bound)
            case LoopConfig():
                most = config.max_iterations
                inner = self._body(config.body, known, f"{path}.config.body", f"{key}#*", node.id)
                bound, output = _repeated(bound, inner, Bound(most), "iteration"), UNKNOWN
            case WorkflowConfig():
                bound, output = self._workflow(node, config, bound)
            case NodeConfig(is_container=True):
                bound, output = self._foreign(node, config, known, bound), UNKNOWN
            case NodeConfig(is_start=True):
                return bound, known.input
            case _ if node.type not in BUILTIN_NODE_CONFIGS:
                return replace(bound, why="not built in: its model calls are not counted"), UNKNOWN
            case _:
                return bound, UNKNOWN
        return _tried_again(bound, node), output

    def _agent(self, node: NodeSpec, config: AgentConfig, path: str) -> tuple[Bound, str]:
        """The model calls of an agent's node.

        An attempt asks until no tool is called, at most `max_steps` times; for an object it asks once more where there
        are tools, and once for a repair. A further attempt replays the answers that led to tools' calls, and asks anew
        what came after them. When it waited for a tool its attempts are counted anew.
        """
        found = self._explainer.find("agent", config.agent)
        agent = found.document if found is not None else None
        if not isinstance(agent, AgentSpec):
            return Bound(0, (Unbounded(path, node.id, f"there is no agent {config.agent!r}"),)), ""
        override = config.model
        models = len(agent.models) if override is None else 1 if isinstance(override, str) else len(override)
        attempts = node.retry.max_attempts if node.retry else 1
        rounds = agent.max_steps - 1 if agent.tools else 0
        last = ["answer"]
        if config.output_schema is not None:
            last += ["object", "repair"] if agent.tools else ["repair"]
        waits = rounds if attempts > 1 and any(map(self._may_wait, agent.tools)) else 0
        tries = attempts + waits * (attempts - 1)
        words = [
            f"{rounds} with tools + " if rounds else "",
            f"{tries} attempts x " if tries > 1 else "",
            " and ".join(last),
            f" ({attempts} attempts, and anew after each wait for a tool)" if waits else "",
            f", up to {models} models each" if models > 1 else "",
        ]
        return Bound((rounds + tries * len(last)) * models), "".join(words)

    def _may_wait(self, reference: str) -> bool:
        """Whether an agent's node may wait for the call of a tool: for people, or as its function wants."""
        found = self._explainer.find("tool", reference)
        if found is None or not isinstance(found.document, ToolSpec):
            return True
        return found.document.requires_approval is not False or found.document.type not in ("http", "builtin")

    def _parallel(
        self, node: NodeSpec, config: ParallelConfig, known: Known, bound: NodeBound
    ) -> tuple[NodeBound, Shape]:
        branches: list[NodeBound] = []
        outputs: dict[str, Shape] = {}
        for name, body in config.branches.items():
            path, key = child_path(f"{bound.path}.config.branches", name), f"{bound.key}/{name}"
            inner = self._body(body, known, path, key, node.id)
            outputs[name] = inner.output
            count = Count.joined(total, [ONE_STEP, inner.count])
            branches.append(
                NodeBound(key=key, path=path, type="branch", count=count, why=inner.note, nodes=inner.nodes)
            )
        count = Count.joined(total, [ONE_STEP, *(branch.count for branch in branches)])
        why = f"{len(branches)} branches" if len(branches) > 1 else "1 branch"
        return replace(bound, count=count, nodes=tuple(branches), why=why), ObjectShape(outputs)

    def _foreach(
        self, node: NodeSpec, config: ForeachConfig, known: Known, bound: NodeBound
    ) -> tuple[NodeBound, Shape]:
        items = known.of(config.items)
        inner_known = replace(known, item=items.item)
        inner = self._body(config.body, inner_known, f"{bound.path}.config.body", f"{bound.key}[*]", node.id)
        length = items.max_length
        if length is not None:
            return _repeated(bound, inner, Bound(length), "item"), ListShape(length, inner.output)
        name = ".".join(named_in(config.items))
        why = f"no maxItems at {name}" if name else "the length of its 'items' is known only when it runs"
        size = Bound(0, (Unbounded(bound.path, node.id, why),))
        return _repeated(bound, inner, size, "item"), ListShape(None, inner.output)

    def _workflow(self, node: NodeSpec, config: WorkflowConfig, bound: NodeBound) -> tuple[NodeBound, Shape]:
        count, output = self._explainer.call(config.workflow, bound.path, node.id)
        if config.async_:
            why = f"starts workflow {config.workflow!r} as a run of its own: {count}"
            return replace(bound, count=replace(ONE_STEP, starts=Bound(1)), why=why), UNKNOWN
        why = f"calls workflow {config.workflow!r}"
        return replace(bound, count=Count.joined(total, [ONE_STEP, count]), why=why), output

    def _foreign(self, node: NodeSpec, config: NodeConfig, known: Known, bound: NodeBound) -> NodeBound:
        """A container of a type that is not built in."""
        inner = [
            self._body(placed.body, known, placed.path, bound.key, node.id)
            for placed in bodies_in(config, f"{bound.path}.config")
        ]
        why = f"how often a node of type {node.type!r} runs its bodies is not known"
        often = Bound(0, (Unbounded(bound.path, node.id, why),))
        count = Count.joined(total, [ONE_STEP, *(body.count.map(often.times) for body in inner)])
        nodes = tuple(below for body in inner for below in body.nodes)
        return replace(bound, count=count, why=why, nodes=nodes)


def _repeated(bound: NodeBound, inner: _Pass, times: Bound, noun: str) -> NodeBound:
    """A container that runs a body again and again, under a row for each pass."""
    one = Count.joined(total, [ONE_STEP, inner.count])
    count = Count.joined(total, [ONE_STEP, one.map(lambda number: number.times(times))])
    number = "any number of" if times.number is None else times.number
    passes = f"{number} {noun}" if number == 1 else f"{number} {noun}s"
    why = _sentence((f"{passes}, each {one}", inner.note))
    return replace(bound, count=count, nodes=inner.nodes, why=why)


def _tried_again(bound: NodeBound, node: NodeSpec) -> NodeBound:
    """A container with its own `retry`: its rows are the same, and what failed in it may ask its models again."""
    attempts = node.retry.max_attempts if node.retry else 1
    if attempts == 1:
        return bound
    calls = bound.count.model_calls.times(Bound(attempts))
    why = _sentence((bound.why, f"{attempts} attempts"))
    return replace(bound, count=replace(bound.count, model_calls=calls), why=why)


def _sentence(parts: Iterable[str]) -> str:
    return "; ".join(filter(None, parts))
