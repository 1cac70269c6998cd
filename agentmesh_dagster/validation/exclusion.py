"""Which nodes of a level can run in one run, as far as a document alone tells.

A node that goes on by one of several handles makes those that come after it by different handles exclusive. For each
node this computes under which choices it surely runs: one bit for each handle of each choosing node, all set where the
choice does not matter to it. Two nodes are exclusive where no choice of some choosing node suits both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from agentmesh_dagster.constants import HANDLE_ERROR
from agentmesh_dagster.validation.choices import choices
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.reach import Reach
from agentmesh_dagster.validation.view import EdgeView, NodeView

_OTHER: Final = ""
"""All ways on from a node but those that have a bit of their own."""


@dataclass(frozen=True)
class _Choice:
    """The handles of which a node takes one, each with its bit."""

    bits: Mapping[str, int]
    by_default: frozenset[str]
    """Those with which an edge without a handle is live."""
    takes_one: bool
    """Whether `bits` has the named handles; else they are all `_OTHER`."""

    @cached_property
    def all(self) -> int:
        return sum(self.bits.values())

    def by(self, handle: str | None) -> int:
        """The choices with which an edge is live."""
        if handle is None:
            return sum(self.bits[name] for name in self.by_default)
        return self.bits.get(handle, 0) if self.takes_one or handle in self.bits else self.bits[_OTHER]


@dataclass(frozen=True)
class Exclusion:
    """The choices under which the nodes of a level run."""

    choices: Mapping[str, int]
    """For each node that surely runs under some choices, these; others depend on the conditions of edges."""
    _all: int
    """All bits of all choosing nodes."""
    _whole: Mapping[int, int]
    """For each bit those of its choosing node."""

    @staticmethod
    def of(level: Level) -> Exclusion:
        """The choices of a level whose graph is sound and has no cycle."""
        deciding: dict[str, _Choice] = {}
        whole: dict[int, int] = {}
        for node in level.view.nodes.values():
            choice = _choice_of(node, len(whole))
            if choice is not None:
                deciding[node.id] = choice
                whole |= dict.fromkeys(choice.bits.values(), choice.all)
        everything = (1 << len(whole)) - 1
        incoming: dict[str, list[EdgeView]] = defaultdict(list)
        for edge in level.view.edges:
            incoming[str(edge.target)].append(edge)
        found: dict[str, int] = {}
        for name in level.facts.reach.order:
            runs = _runs_under(level.view.nodes[name], incoming[name], found, deciding, everything)
            if runs is not None:
                found[name] = runs
        return Exclusion(found, everything, whole)

    def rivals(self, names: Iterable[str], reach: Reach) -> Iterator[tuple[str, int]]:
        """For each of some nodes those before it, as a set of `Reach`, that run under a choice under which it does.

        The work is that of the choices that bind the nodes, and not of all pairs.
        """
        before = 0
        bound: dict[int, int] = defaultdict(int)
        """By the bits of a choosing node: those before that do not run under all its choices."""
        under: dict[int, int] = defaultdict(int)
        """By one bit: those of them that run under it."""
        for name in names:
            mine = self.choices.get(name)
            binding = list(self._binding(mine)) if mine is not None else []
            if mine is None or not all(taken for _, taken in binding):
                continue  # it does not surely run, or under no choice at all
            own, beside = reach.mask([name]), before
            for whole, taken in binding:
                suitable = before & ~bound[whole]
                bound[whole] |= own
                for bit in _each(taken):
                    suitable |= under[bit]
                    under[bit] |= own
                beside &= suitable
            yield name, beside
            before |= own

    def _binding(self, choices: int) -> Iterator[tuple[int, int]]:
        """The bits of each choosing node not all of whose choices are there, and those that are."""
        missing = self._all & ~choices
        while missing:
            whole = self._whole[missing & -missing]
            missing &= ~whole
            yield whole, choices & whole


def _each(mask: int) -> Iterator[int]:
    """The bits of a set, one by one."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit


def _runs_under(
    node: NodeView,
    incoming: list[EdgeView],
    found: Mapping[str, int],
    deciding: Mapping[str, _Choice],
    everything: int,
) -> int | None:
    """The choices under which a node runs; None where that depends on the conditions of edges, or is not known."""
    if not incoming:
        return everything
    sure: list[int] = []
    for edge in incoming:
        before = found.get(str(edge.source))
        if before is not None and edge.raw.get("condition") is None:
            choice = deciding.get(str(edge.source))
            sure.append(before if choice is None else before & ~choice.all | before & choice.by(edge.handle))
    join = node.spec.join if node.spec is not None else "any"
    needed = {"any": 1, "all": len(incoming)}[join] if isinstance(join, str) else join
    if len(sure) < needed:
        return None
    if needed == 1 or all(runs == sure[0] for runs in sure):
        runs = 0
        for one in sure:
            runs |= one
        return runs
    if needed < len(sure):
        return None  # which of them there are in one run is not followed
    runs = everything
    for one in sure:
        runs &= one
    return runs


def _choice_of(node: NodeView, first_bit: int) -> _Choice | None:
    ends = list(choices(node.config))
    if any(len(end - {None}) > 1 for end in ends):
        # Who takes several handles at once makes none of them exclusive.
        ends = []
    names = [next((handle for handle in end if handle is not None), _OTHER) for end in ends]
    by_default = frozenset(name for name, end in zip(names, ends, strict=True) if None in end)
    fails_aside = node.spec is not None and node.spec.on_error == "route"
    if fails_aside and not names:
        names, by_default = [_OTHER], frozenset((_OTHER,))
    if not names:
        return None
    takes_one = bool(set(names) - {_OTHER})
    if fails_aside:
        names.append(HANDLE_ERROR)
    bits = {name: 1 << (first_bit + n) for n, name in enumerate(dict.fromkeys(names))}
    return _Choice(bits, by_default, takes_one)
