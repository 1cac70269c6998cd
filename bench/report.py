"""What a benchmark found, as a table for people and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.measure import Spread, Times


@dataclass(frozen=True, kw_only=True)
class Line:
    """One thing measured, with its baseline and its target where there are any."""

    benchmark: str
    what: str
    unit: str
    ours: Spread
    ours_cpu: Spread | None = None
    baseline: Spread | None = None
    baseline_cpu: Spread | None = None
    rounds: Spread | None = None
    """Ours to the baseline by the clock, round by round, where both were measured in turns."""
    target: float | None = None
    """The most that the ratio to the baseline may be; without a baseline, the most that the median may be."""
    at_least: bool = False
    """Whether the target is the least that it may be, as of a throughput."""

    @property
    def ratio(self) -> float | None:
        """Ours to the baseline, by the clock: the median of the rounds, in which both meet the same load."""
        if self.rounds is not None:
            return self.rounds.median
        return self.ours.median / self.baseline.median if self.baseline else None

    @property
    def cpu_ratio(self) -> float | None:
        """Ours to the baseline, by processor time."""
        if self.ours_cpu is None or self.baseline_cpu is None:
            return None
        return self.ours_cpu.median / self.baseline_cpu.median

    @property
    def verdict(self) -> Literal["ok", "MISSED", ""]:
        """Whether the target is met; empty where there is none. By the clock: that is what a person waits for."""
        if self.target is None:
            return ""
        judged = self.ours.median if self.ratio is None else self.ratio
        is_met = judged >= self.target if self.at_least else judged <= self.target
        return "ok" if is_met else "MISSED"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a benchmark came to."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    """Lines for people: profiles, and what a number is made of."""


def progress(what: str) -> None:
    """Tells a person who waits what is being done."""
    print(f" {what} ...", file=sys.stderr, end="", flush=True)


def compared(
    benchmark: str,
    what: str,
    unit: str,
    times: tuple[Sequence[Times], Sequence[Times]],
    *,
    factor: float,
    target: float,
) -> Line:
    """A line of measurements in turns.

    Args:
        benchmark: Its name.
        what: Was measured.
        unit: Of the numbers shown.
        times: Ours, and the baseline's.
        factor: What seconds are multiplied with to give `unit`.
        target: The most that the ratio may be.
    """
    ours, baseline = times
    return Line(
        benchmark=benchmark,
        what=what,
        unit=unit,
        ours=Spread.of([t.wall_s * factor for t in ours]),
        ours_cpu=Spread.of([t.cpu_s * factor for t in ours]),
        baseline=Spread.of([t.wall_s * factor for t in baseline]),
        baseline_cpu=Spread.of([t.cpu_s * factor for t in baseline]),
        rounds=Spread.of([a.wall_s / b.wall_s for a, b in zip(ours, baseline, strict=True)]),
        target=target,
    )


def as_json(findings: Sequence[Findings]) -> dict[str, Any]:
    """All findings, with ratios and verdicts."""
    return {
        "lines": [
            {**asdict(line), "ratio": line.ratio, "cpu_ratio": line.cpu_ratio, "verdict": line.verdict}
            for found in findings
            for line in found.lines
        ],
        "notes": [note for found in findings for note in found.notes],
    }


_HEADS = (
    "",
    "measured",
    "median",
    "low-high",
    "baseline",
    "low-high",
    "ratio",
    "low-high",
    "CPU ratio",
    "target",
    "",
)


def as_table(findings: Sequence[Findings]) -> str:
    """The lines in columns, then the notes."""
    table = in_columns([_HEADS, *(_cells(line) for found in findings for line in found.lines)])
    notes = "\n".join(note for found in findings for note in found.notes)
    return f"{table}\n\n{notes}" if notes else table


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of as many cells each; the first two columns stand to the left, as words do."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if n < 2 else cell.rjust(w)
            for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _cells(line: Line) -> tuple[str, ...]:
    baseline = line.baseline
    return (
        line.benchmark,
        line.what,
        f"{number_text(line.ours.median)} {line.unit}",
        spread_text(line.ours),
        f"{number_text(baseline.median)} {line.unit}" if baseline else "",
        spread_text(baseline) if baseline else "",
        f"{line.ratio:.2f}" if line.ratio is not None else "",
        f"{line.rounds.low:.2f}-{line.rounds.high:.2f}" if line.rounds else "",
        f"{line.cpu_ratio:.2f}" if line.cpu_ratio is not None else "",
        _target(line),
        line.verdict,
    )


def _target(line: Line) -> str:
    if line.target is None:
        return ""
    sign = ">=" if line.at_least else "<="
    return f"{sign} {line.target:g}{'' if line.baseline else ' ' + line.unit}"


def spread_text(spread: Spread) -> str:
    """Its ends, and its p95 where it was asked for."""
    tail = f", p95 {number_text(spread.p95)}" if spread.p95 is not None else ""
    return f"{number_text(spread.low)}-{number_text(spread.high)}{tail}"


def number_text(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
