"""What a graph's edges say about order: cycles, ancestors, and what can be reached. Linear in nodes and edges.

Works on any graph, with cycles too. Strongly connected components are found with Tarjan's algorithm (SIAM J. Comput.
1972), without recursion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Reach:
    """The order of a graph's nodes."""

    successors: Mapping[str, Sequence[str]]
    predecessors: Mapping[str, Sequence[str]]
    cycles: tuple[tuple[str, ...], ...]
    """For each component with a cycle, the nodes of one cycle in it, in its order."""
    in_cycles: frozenset[str]
    """All nodes of those components."""
    _bits: Mapping[str, int]
    _above: Mapping[str, int]

    @staticmethod
    def of(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> Reach:
        """The order of nodes under edges (source, target), all of which are among the nodes."""
        order = list(names)
        after: dict[str, list[str]] = {name: [] for name in order}
        before: dict[str, list[str]] = {name: [] for name in order}
        for source, target in dict.fromkeys(edges):
            after[source].append(target)
            before[target].append(source)
        bits = {name: 1 << number for number, name in enumerate(order)}
        above: dict[str, int] = {}
        cycles: list[tuple[str, ...]] = []
        looped: set[str] = set()
        # Components come out with all that they lead to before them: reversed, ancestors come first.
        for component in reversed(_components(order, after)):
            inside = sum(bits[name] for name in component)
            is_cycle = len(component) > 1 or component[0] in after[component[0]]
            mask = inside if is_cycle else 0
            for name in component:
                for source in before[name]:
                    mask |= bits[source] | above.get(source, 0)
            for name in component:
                above[name] = mask
            if is_cycle:
                looped.update(component)
                cycles.append(_one_cycle(component, after, bits))
        return Reach(after, before, tuple(cycles), frozenset(looped), bits, above)

    def is_above(self, upper: str, lower: str) -> bool:
        """Whether some way leads from one node to the other."""
        return bool(self._above[lower] & self._bits[upper])

    def mask(self, names: Iterable[str]) -> int:
        """A set of nodes: one bit each, in the order in which they were given."""
        found = 0
        for name in names:
            found |= self._bits[name]
        return found

    def above(self, name: str) -> int:
        """The set of the nodes that lead to a node."""
        return self._above[name]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The nodes so that each comes after those that lead to it; of a graph without cycles."""
        components = _components(list(self._bits), self.successors)
        return tuple(name for component in reversed(components) for name in component)

    @cached_property
    def below(self) -> Mapping[str, int]:
        """The sets of the nodes that each node leads to; of a graph without cycles."""
        found: dict[str, int] = {}
        for name in reversed(self.order):
            mask = 0
            for target in self.successors[name]:
                mask |= self._bits[target] | found[target]
            found[name] = mask
        return found

    def reached_from(self, roots: Iterable[str], *, through: Iterable[str] | None = None) -> set[str]:
        """All nodes that ways from the roots lead to, the roots too; ways go on only from nodes in `through`."""
        open_nodes = None if through is None else set(through)
        found = set(roots)
        stack = list(found)
        while stack:
            name = stack.pop()
            if open_nodes is None or name in open_nodes:
                fresh = [n for n in self.successors[name] if n not in found]
                found.update(fresh)
                stack += fresh
        return found


def _components(order: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[list[str]]:
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    found: list[list[str]] = []
    for root in order:
        if root in number:
            continue
        work = [(root, 0)]
        while work:
            name, at = work.pop()
            if at == 0:
                number[name] = low[name] = len(number)
                path.append(name)
                on_path.add(name)
            targets = after[name]
            if at < len(targets):
                work.append((name, at + 1))
                target = targets[at]
                if target not in number:
                    work.append((target, 0))
                elif target in on_path:
                    low[name] = min(low[name], number[target])
                continue
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[name])
            if low[name] == number[name]:
                start = path.index(name) if len(path) < 8 else len(path) - 1 - path[::-1].index(name)
                component = path[start:]
                del path[start:]
                on_path.difference_update(component)
                found.append(component)
    return found


def _one_cycle(
    component: Sequence[str], after: Mapping[str, Sequence[str]], bits: Mapping[str, int]
) -> tuple[str, ...]:
    """The shortest cycle through the component's first node."""
    first = min(component, key=bits.__getitem__)
    inside = set(component)
    came_from: dict[str, str] = {}
    level = [first]
    while level:
        following: list[str] = []
        for name in level:
            for target in after[name]:
                if target == first:
                    way = [name]
                    while way[-1] != first:
                        way.append(came_from[way[-1]])
                    return tuple(reversed(way))
                if target in inside and target not in came_from:
                    came_from[target] = name
                    following.append(target)
        level = following
    return tuple(component)
