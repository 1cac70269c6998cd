"""The plans of the kill matrix (who is killed, and where), and what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Kill:
    """A process that is killed, and where."""

    process: int
    """The first process has the number 1."""
    phase: str
    """What it does: `start`, `decide`, `resume`, `retry` or `rerun`."""
    point: str
    """`<name>#<n>`: at the n-th passage of a fault point."""

    @property
    def name(self) -> str:
        return f"{self.phase} {self.point.partition('#')[0]}"

    def __str__(self) -> str:
        return f"{self.process}. {self.phase} at {self.point}"


@dataclass(frozen=True)
class Plan:
    """One run of the matrix."""

    variant: str
    """The name of its case."""
    kills: tuple[Kill, ...] = ()
    retry: Literal["retry", "rerun"] = "retry"
    """How a failed run goes on: by `agentmesh runs retry`, or by Dagster's own choice of steps."""

    def __str__(self) -> str:
        kills = " and ".join(map(str, self.kills)) or "undisturbed"
        return f"{self.variant}{', retried by Dagster' if self.retry == 'rerun' else ''}: {kills}"


@dataclass
class Outcome:
    """What became of a plan."""

    plan: Plan
    backend: str
    passed: list[Kill] = field(default_factory=list)
    """All points that its processes have passed, in order."""
    phases: list[str] = field(default_factory=list)
    """What its processes did."""
    problems: list[str] = field(default_factory=list)
    cut_off: int = 0
    """How many calls were under way when a process was killed."""
    made_again: int = 0
    """How many calls their servers have seen for a second time."""
    missed: bool = False
    """Whether the run went on after its first kill such that it never came to the second."""
    asked: int = 0
    """How often a person was asked whether a call took effect."""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = "".join(f"\n    {problem}" for problem in self.problems)
        return f"{self.backend}, {self.plan} ({', '.join(self.phases)}){lines}"


def single_kills(undisturbed: Sequence[Outcome]) -> list[Plan]:
    """One plan for each point that an undisturbed run passes."""
    return [replace(o.plan, kills=(kill,)) for o in undisturbed for kill in o.passed]


def second_kills(recovered: Sequence[Outcome]) -> list[Plan]:
    """After the kills of a plan, one more at each point that its recovery passes."""
    return [
        replace(o.plan, kills=(*o.plan.kills, kill))
        for o in recovered
        for kill in o.passed
        if kill.process > max(first.process for first in o.plan.kills)
    ]


def spread(plans: Sequence[Plan]) -> list[Plan]:
    """The plans in the order in which they find most: of each name of a last point one, then of each another.

    The names that are passed most come first. Of one name the middle passage, the first, the last, and then those
    between.
    """
    by_name: dict[str, list[Plan]] = {}
    for plan in plans:
        by_name.setdefault(plan.kills[-1].name, []).append(plan)
    names = sorted(by_name.values(), key=len, reverse=True)
    # Of the next two names the other way round: so both ends, and of two variants both, come early.
    orders = [_from_middle(same[:: -1 if number // 2 % 2 else 1]) for number, same in enumerate(names)]
    return [plan for turn in zip_longest(*orders) for plan in turn if plan is not None]


def share(plans: Sequence[Plan], of_second: bool) -> list[Plan]:
    """What one of two databases takes on; of the points before and after one act, each gets the one and the other."""
    return [plan for number, plan in enumerate(plans) if (number % 4 in (1, 2)) is of_second]


def _from_middle(several: Sequence[T]) -> Iterator[T]:
    """The middle, the ends, and then the middles of the halves, and so on."""
    last = len(several) - 1
    yielded = dict.fromkeys([last // 2, 0, last])
    gaps = deque([(0, last // 2), (last // 2, last)])
    while gaps:
        low, high = gaps.popleft()
        middle = (low + high) // 2
        if low < middle:
            yielded[middle] = None
            gaps += [(low, middle), (middle, high)]
    return (several[index] for index in yielded)


def in_words(database: str, outcomes: Sequence[Outcome]) -> str:
    """What plans came to, in a line."""
    points = {kill for outcome in outcomes for kill in outcome.plan.kills}
    wrong = [outcome for outcome in outcomes if outcome.problems]
    missed = sum(outcome.missed for outcome in outcomes)
    right = f"{len(outcomes) - len(wrong)} ended right"
    if missed:
        right += f" ({missed} of them without coming to a second kill)"
    return (
        f"{database}: {len(points)} fault points, {len(outcomes)} runs, {right}; "
        f"{sum(o.cut_off for o in outcomes)} calls were cut off, {sum(o.made_again for o in outcomes)} made again, "
        f"{sum(o.asked for o in outcomes)} times a person was asked; {sum(o.seconds for o in outcomes):.0f} s of work"
    )
