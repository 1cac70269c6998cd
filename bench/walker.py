"""The graph walker: what a node, an item and concurrency cost where Dagster is not asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import baseline
from bench.inline import Walked, Walks, prepared_walks
from bench.measure import Spread
from bench.profiles import profile_of
from bench.projects import (
    chain_workflow,
    code_chain_workflow,
    code_fan_workflow,
    code_node,
    fan_workflow,
    foreach_workflow,
)
from bench.report import Findings, Line
from bench.sizes import sized
from bench.threads import cpu_by_part

NAME: Final = "walker"
REPETITIONS: Final = sized(15, 1)
NODES: Final = baseline.CHAIN_LENGTH
ITEMS: Final = sized(1_000, 20)
CONCURRENCY: Final = 16
TARGET_NODE_MS: Final = 0.6
TARGET_ITEMS_PER_S: Final = 3_000
TARGET_FAN_S: Final = 0.12

_SAME: Final = {"id": "same", "type": "transform", "config": {"output": {"value": "{{ item }}"}}}

CHAINS: Final = {
    "chain-transform": "`transform` nodes",
    "chain-code": "`code` nodes, a coroutine",
    "chain-code-thread": "`code` nodes, a function in a thread",
}
FOREACHES: Final = {
    "foreach-transform": "`transform`",
    "foreach-code": "`code`, a coroutine",
    "foreach-code-thread": "`code`, a function in a thread",
}
FANS: Final = {"fan-delay": "`delay` nodes", "fan-code": "`code` nodes that sleep"}

WORKFLOWS: Final = (
    chain_workflow("chain-transform", NODES),
    code_chain_workflow("chain-code", NODES, "hand_on_async"),
    code_chain_workflow("chain-code-thread", NODES, "hand_on"),
    foreach_workflow("foreach-transform", _SAME, CONCURRENCY),
    foreach_workflow(
        "foreach-code", code_node("same", "hand_on_async", {"value": "{{ item }}"}), CONCURRENCY
    ),
    foreach_workflow(
        "foreach-code-thread", code_node("same", "hand_on", {"value": "{{ item }}"}), CONCURRENCY
    ),
    fan_workflow("fan-delay", baseline.FAN_WIDTH, baseline.PAUSE_S),
    code_fan_workflow("fan-code", baseline.FAN_WIDTH, baseline.PAUSE_S),
)
INPUT: Final = {"items": list(range(ITEMS))}

_PROFILED: Final = (
    ("chain-transform", NODES, "node", 50),
    ("chain-code", NODES, "node", 50),
    ("foreach-transform", ITEMS, "item", 3),
    ("foreach-code", ITEMS, "item", 3),
)
"""Slugs, how much of what a run is of, and how many runs a profile takes."""


def run() -> Findings:
    """Measures."""
    with prepared_walks(WORKFLOWS) as walks:
        _check_rows(walks)
        found = _in_rounds(walks)
        lines = [
            *(_chain_line(slug, what, found[slug]) for slug, what in CHAINS.items()),
            *(_foreach_line(slug, what, found[slug]) for slug, what in FOREACHES.items()),
            *(_fan_line(slug, what, found[slug]) for slug, what in FANS.items()),
        ]
        notes = [_whole_note(found), *_profile(walks)]
    return Findings(lines=tuple(lines), notes=tuple(notes))


def profile() -> Findings:
    """Where the time goes, function by function."""
    documents = {workflow["slug"]: workflow for workflow in WORKFLOWS}
    notes = [
        line for slug, _, _, runs in _PROFILED for line in profile_of(documents[slug], input_of(slug), runs)
    ]
    return Findings(lines=(), notes=tuple(notes))


def input_of(slug: str) -> dict[str, list[int]]:
    """What a run of one of the workflows is given."""
    return INPUT if slug in FOREACHES else {}


def _check_rows(walks: Walks) -> None:
    """Sees that the journal has what the numbers are said to be of; the runs warm the process up, too."""
    for slug in CHAINS:
        assert walks.rows(walks.run(slug).run_id) == NODES, slug
    for slug in FANS:
        assert walks.rows(walks.run(slug).run_id) == baseline.FAN_WIDTH + 2, slug
    for slug in FOREACHES:
        # `start`, `each` and `end`, and for each item its own row and its node's.
        assert walks.rows(walks.run(slug, INPUT).run_id) == 3 + 2 * ITEMS, slug


def _in_rounds(walks: Walks) -> dict[str, list[Walked]]:
    """All of them in turns, so that a busy machine disturbs each alike."""
    slugs = (*CHAINS, *FOREACHES, *FANS)
    found: dict[str, list[Walked]] = {slug: [] for slug in slugs}
    for _ in range(REPETITIONS):
        for slug in slugs:
            found[slug].append(walks.run(slug, input_of(slug)))
    return found


def _chain_line(slug: str, what: str, found: Sequence[Walked]) -> Line:
    each = 1000 / NODES
    return Line(
        benchmark=NAME,
        what=f"chain of {NODES}, {what}, per node",
        unit="ms",
        ours=Spread.of([walked.walk.wall_s * each for walked in found]),
        ours_cpu=Spread.of([walked.walk.cpu_s * each for walked in found]),
        target=TARGET_NODE_MS,
    )


def _foreach_line(slug: str, what: str, found: Sequence[Walked]) -> Line:
    return Line(
        benchmark=NAME,
        what=f"foreach of {ITEMS:,}, concurrency {CONCURRENCY}, {what}",
        unit="items/s",
        ours=Spread.of([ITEMS / walked.walk.wall_s for walked in found]),
        target=TARGET_ITEMS_PER_S,
        at_least=True,
    )


def _fan_line(slug: str, what: str, found: Sequence[Walked]) -> Line:
    return Line(
        benchmark=NAME,
        what=f"{baseline.FAN_WIDTH} parallel {what} of {baseline.PAUSE_S * 1000:.0f} ms",
        unit="s",
        ours=Spread.of([walked.walk.wall_s for walked in found]),
        target=TARGET_FAN_S,
    )


def _whole_note(found: dict[str, list[Walked]]) -> str:
    around_ms = [
        1000 * (walked.whole.wall_s - walked.walk.wall_s) for slug in CHAINS for walked in found[slug]
    ]
    return (
        f"Not in the walker's times: making the run's row and lease, and giving the lease back, "
        f"{Spread.of(around_ms).median:.1f} ms a run (median)"
    )


def _profile(walks: Walks) -> list[str]:
    lines: list[str] = []
    for slug, count, unit, runs in _PROFILED:
        spent = cpu_by_part(
            lambda slug=slug, runs=runs: [walks.run(slug, input_of(slug)) for _ in range(runs)]
        )
        if spent is None:
            return ["No profile: this system has no clocks of threads"]
        total = sum(spent.values())
        lines.append(f"Processor time of {slug}, {total / runs / count * 1000:.2f} ms per {unit}")
        lines += [
            f"  {seconds / runs / count * 1000:6.3f} ms {seconds / total:4.0%}  {part}"
            for part, seconds in sorted(spent.items(), key=lambda item: -item[1])
            if seconds / total >= 0.005
        ]
    return lines
