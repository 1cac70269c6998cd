"""The kill matrix's workflow, its plans (who is killed where), and what came of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_http import FakeHttp
from fake_provider import FakeProvider

RECEIPT = {"receipt": "R-1"}
OUTPUT = {"draft": "hello", "receipt": "R-1", "report": "hello"}

VARIANTS: dict[str, dict[str, Any]] = {
    "asks": {"side_effects": True},
    "repeats": {"side_effects": True, "idempotent": True},
}
"""The tool must not be called twice without a person saying so; or it may be, with the same idempotency key."""


def documents(variant: str, provider: FakeProvider, tools: FakeHttp) -> list[dict[str, Any]]:
    settings = {"api_base": provider.base_url, "api_key": "none"}
    nodes = [
        {"id": "start", "type": "start"},
        {
            "id": "draft",
            "type": "agent",
            "config": {"agent": "drafter", "prompt": "Draft {{ input.order }}"},
        },
        {"id": "gate", "type": "human", "config": {"title": "Charge {{ input.order }}?"}},
        {
            "id": "charge",
            "type": "tool",
            "config": {"tool": "charge", "input": {"order": "{{ input.order }}"}},
        },
        {
            "id": "report",
            "type": "agent",
            "config": {"agent": "reporter", "prompt": "{{ steps.charge.output.receipt }}"},
        },
        {
            "id": "end",
            "type": "end",
            "config": {
                "output": {
                    "draft": "{{ steps.draft.output.text }}",
                    "receipt": "{{ steps.charge.output.receipt }}",
                    "report": "{{ steps.report.output.text }}",
                }
            },
        },
    ]
    return [
        {"kind": "agent", "slug": "drafter", "model": "openai/draft", "model_settings": settings},
        {"kind": "agent", "slug": "reporter", "model": "openai/report", "model_settings": settings},
        {
            "kind": "tool",
            "slug": "charge",
            "type": "http",
            "config": {
                "method": "POST",
                "url": f"{tools.url}/json",
                "query": {"value": json.dumps(RECEIPT)},
                "json": {"order": "{{ input.order }}"},
            },
            **VARIANTS[variant],
        },
        {
            "kind": "workflow",
            "slug": "charging",
            "input_schema": {
                "type": "object",
                "required": ["order"],
                "properties": {"order": {"type": "string"}},
            },
            "nodes": nodes,
            "edges": [
                {"source": "start", "target": "draft"},
                {"source": "draft", "target": "gate"},
                {"source": "gate", "source_handle": "approved", "target": "charge"},
                {"source": "charge", "target": "report"},
                {"source": "report", "target": "end"},
            ],
        },
    ]


@dataclass(frozen=True, order=True)
class Kill:
    """A process that is killed, and where."""

    process: int
    """The first process has the number 1."""
    phase: str
    """What it does: `start`, `decide`, `resume` or `retry`."""
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
    kills: tuple[Kill, ...] = ()

    def __str__(self) -> str:
        return f"{self.variant}: {' and '.join(map(str, self.kills)) or 'undisturbed'}"


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
    asked: int = 0
    """How often a person was asked whether a call took effect."""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = "".join(f"\n    {problem}" for problem in self.problems)
        return f"{self.backend}, {self.plan} ({', '.join(self.phases)}){lines}"


def single_kills(undisturbed: Sequence[Outcome]) -> list[Plan]:
    """One plan for each point that an undisturbed run passes."""
    return [Plan(o.plan.variant, (kill,)) for o in undisturbed for kill in o.passed]


def second_kills(recovered: Sequence[Outcome]) -> list[Plan]:
    """After the kills of a plan, one more at each point that its recovery passes."""
    return [
        Plan(o.plan.variant, (*o.plan.kills, kill))
        for o in recovered
        for kill in o.passed
        if kill.process > max(first.process for first in o.plan.kills)
    ]


def spread(plans: Sequence[Plan], count: int) -> list[Plan]:
    """So many of the plans, evenly over the names of their last points."""
    by_name: dict[str, list[Plan]] = {}
    for plan in plans:
        by_name.setdefault(plan.kills[-1].name, []).append(plan)
    chosen: list[Plan] = []
    while len(chosen) < min(count, len(plans)):
        for same in by_name.values():
            if same and len(chosen) < count:
                # The two variants of a point in turn.
                chosen.append(same.pop(-1 if len(chosen) % 2 else 0))
    return chosen


def in_words(database: str, outcomes: Sequence[Outcome]) -> str:
    """What plans came to, in a line."""
    points = {kill for outcome in outcomes for kill in outcome.plan.kills}
    wrong = [outcome for outcome in outcomes if outcome.problems]
    return (
        f"{database}: {len(points)} fault points, {len(outcomes)} runs, {len(outcomes) - len(wrong)} ended right; "
        f"{sum(o.cut_off for o in outcomes)} calls were cut off, {sum(o.made_again for o in outcomes)} made again, "
        f"{sum(o.asked for o in outcomes)} times a person was asked; {sum(o.seconds for o in outcomes):.0f} s of work"
    )
