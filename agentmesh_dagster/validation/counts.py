"""Arithmetic of worst cases: numbers that may be without bound, and the worst pass through a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentmesh_dagster.constants import HANDLE_ERROR
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.graph import Edge, Graph
from agentmesh_dagster.specs.nodes import NodeConfig
from agentmesh_dagster.validation.choices import choices


@dataclass(frozen=True)
class Unbounded:
    """A place that leaves a number without bound."""

    path: str
    """Place in the document that is explained, such as `nodes[3]`."""
    node: str
    """The id of the node there; empty where no node is meant."""
    why: str
    inside: str = ""
    """Where it stands in another document, if the place only leads to it."""

    def seen_from(self, path: str, node: str, slug: str) -> Unbounded:
        """The same, told at the place that calls the workflow in which it stands."""
        inside = self.inside or f" (in workflow {slug!r}, {self._place})"
        return replace(self, path=path, node=node, inside=inside)

    @property
    def _place(self) -> str:
        return f"{self.path} {self.node!r}" if self.node else self.path

    def __str__(self) -> str:
        return f"{self._place}: {self.why}{self.inside}"

    def to_json(self) -> dict[str, Json]:
        """The place as a JSON object."""
        return {"path": self.path, "node": self.node, "why": f"{self.why}{self.inside}"}


@dataclass(frozen=True)
class Bound:
    """A number that is never too low."""

    finite: int = 0
    """What is counted besides what has no bound."""
    open_at: tuple[Unbounded, ...] = ()
    """What leaves it without bound."""

    @property
    def number(self) -> int | None:
        """The number; None where it has no bound."""
        return None if self.open_at else self.finite

    def times(self, factor: Bound) -> Bound:
        """The product; nothing, however often, is nothing."""
        if not self.open_at and not factor.open_at:
            return Bound(self.finite * factor.finite)
        if 0 in (self.number, factor.number):
            return Bound()
        return Bound(0, _places((factor, self)))

    def __str__(self) -> str:
        return "unbounded" if self.open_at else str(self.finite)


def total(bounds: Iterable[Bound]) -> Bound:
    """The sum."""
    found = list(bounds)
    return Bound(sum(bound.finite for bound in found), _places(found))


def largest(bounds: Iterable[Bound]) -> Bound:
    """The largest of some numbers; without bound where one of them is."""
    found = list(bounds)
    return Bound(max((bound.finite for bound in found), default=0), _places(found))


def _places(bounds: Iterable[Bound]) -> tuple[Unbounded, ...]:
    return tuple(dict.fromkeys(place for bound in bounds for place in bound.open_at))


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a part of a run costs at most."""

    steps: Bound = Bound()
    """Rows of the kinds node, item, iteration and branch."""
    model_calls: Bound = Bound()
    """Calls of models, each model of a list that is tried in turn by itself."""
    starts: Bound = Bound()
    """Runs that are started and not waited for; what happens in them is not counted."""

    @staticmethod
    def joined(join: Callable[[list[Bound]], Bound], counts: Iterable[Count]) -> Count:
        """Some counts made one, each number by itself."""
        found = list(counts)
        return Count(
            steps=join([count.steps for count in found]),
            model_calls=join([count.model_calls for count in found]),
            starts=join([count.starts for count in found]),
        )

    def map(self, change: Callable[[Bound], Bound]) -> Count:
        """The count with each number changed."""
        return Count(
            steps=change(self.steps), model_calls=change(self.model_calls), starts=change(self.starts)
        )

    def named(self) -> tuple[tuple[str, Bound], ...]:
        """The numbers with their names in JSON."""
        return (("steps", self.steps), ("model_calls", self.model_calls), ("starts", self.starts))

    def __str__(self) -> str:
        calls = _counted(self.model_calls, "model call")
        starts = f", and starts {_counted(self.starts, 'run')}" if self.starts != Bound() else ""
        return f"{_counted(self.steps, 'step')}, {calls}{starts}"


ONE_STEP = Count(steps=Bound(1))


def _counted(bound: Bound, noun: str) -> str:
    return f"{bound} {noun}" if bound.number == 1 else f"{bound} {noun}s"


def bounded_by(count: Count, each: Sequence[Count], most: int) -> Count:
    """The count of a level of whose nodes only so many run.

    Args:
        count: What the level costs without that.
        each: What each of its nodes costs.
        most: How many nodes run.
    """

    def costliest(bounds: list[Bound]) -> Bound:
        ranked = sorted(bounds, key=lambda bound: (bool(bound.open_at), bound.finite), reverse=True)
        return total(ranked[:most])

    def smaller(bounds: list[Bound]) -> Bound:
        first, second = bounds
        return second if second.number is not None and second.finite < first.finite else first

    return Count.joined(smaller, [count, Count.joined(costliest, each)])


def ways_out(node: NodeSpec, config: NodeConfig | None, outgoing: Sequence[Edge]) -> list[list[Edge]]:
    """The edges that may be live together, for each way in which a node may end and that leads anywhere.

    Args:
        node: The node.
        config: Its config; None where its type is unknown.
        outgoing: The edges that leave it.
    """
    own = config.handles() if config is not None else ()
    ends: list[Collection[str | None]] = [*choices(config)]
    routes = node.on_error == "route"
    if not ends:
        hidden = HANDLE_ERROR if routes and HANDLE_ERROR not in own else ""
        ends = [{edge.handle for edge in outgoing if edge.handle != hidden}]
    if routes:
        ends.append({HANDLE_ERROR})
    ways = [[edge for edge in outgoing if edge.handle in chosen] for chosen in ends]
    return [way for way in ways if way]


def choice_text(ways: Sequence[Sequence[Edge]]) -> str:
    """What a node chooses between."""
    words = [" + ".join(dict.fromkeys(edge.handle or "no handle" for edge in way)) for way in ways]
    return f"goes on by one of: {', '.join(words)}"


def worst_pass(
    graph: Graph, counts: Mapping[str, Count], ways: Mapping[str, Sequence[Sequence[Edge]]]
) -> Count:
    """What one pass through a graph costs at most, each number by itself.

    A node runs at most once, and only if live edges lead to it from a root. So of what can be reached through one node
    alone (what the node dominates), only that runs to which the way out leads by which the node ended: the costliest
    one counts. All else is summed. That is never too low. It is too high where nodes exclude each other by what is not
    looked at here: by conditions of edges, by `join`, by two nodes that ask the same question, or where a node behind
    one way out is reached from there by none of the choices that are made later.

    Dominators are found as by Cooper, Harvey and Kennedy (A Simple, Fast Dominance Algorithm, 2001), which takes one
    round where there is no cycle.

    Args:
        graph: The graph.
        counts: What each node costs, with all that runs in it.
        ways: Of each node, its `ways_out`.
    """
    bits = {name: 1 << number for number, name in enumerate(graph.order)}
    led_to: dict[str, int] = {}
    for name in reversed(graph.order):
        led_to[name] = bits[name]
        for edge in graph.outgoing[name]:
            led_to[name] |= led_to[edge.target]
    dominated = _dominated(graph)
    costs: dict[str, Count] = {}
    for name in reversed(graph.order):
        choices: list[Count] = []
        for way in ways[name]:
            reached = 0
            for edge in way:
                reached |= led_to[edge.target]
            behind = [costs[inner] for inner in dominated[name] if reached & bits[inner]]
            choices.append(Count.joined(total, behind))
        costs[name] = Count.joined(total, [counts[name], Count.joined(largest, choices)])
    return Count.joined(total, [costs[name] for name in dominated[None]])


def _dominated(graph: Graph) -> dict[str | None, list[str]]:
    """The nodes that each node dominates and none below it does; under None those that no node dominates."""
    above: dict[str | None, str | None] = {}
    depth: dict[str | None, int] = {None: 0}
    found: dict[str | None, list[str]] = {None: []}
    for name in graph.order:
        sources: list[str | None] = [edge.source for edge in graph.incoming[name]]
        nearest = sources[0] if sources else None
        for source in sources[1:]:
            other = source
            while nearest != other:
                if depth[nearest] >= depth[other]:
                    nearest = above[nearest]
                else:
                    other = above[other]
        above[name] = nearest
        depth[name] = depth[nearest] + 1
        found[nearest].append(name)
        found[name] = []
    return found
