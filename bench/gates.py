"""From a decision to the next step, under `agentmesh dev`, beside a gate from Dagster's own parts."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from bench.desks import Desk, Moments, agentmesh_desk, launcher_of, stock_desk
from bench.dev import wait_until
from bench.measure import Spread
from bench.projects import temporary_folder
from bench.report import Findings, Line, progress
from bench.sizes import sized

NAME = "gates"
ISOLATED = sized(10, 1)
IN_A_ROW = sized(20, 1)
AT_ONCE = sized(10, 1)
DAEMON_ROUND_S: Final = 5.0
"""How often Dagster's daemon looks at sensors: isolated decisions are spread over this time."""
SETTLED_S: Final = 1.0
"""From the end of all runs to the next isolated decision, at least: processes end, tables are cleaned."""
STEP_S: Final = 300.0
"""How long a decision may take to come to a step, on a busy machine."""
_SEED: Final = 3


@dataclass(frozen=True)
class Measured:
    """What one side came to, in seconds from the decision to the step."""

    isolated: Sequence[float]
    in_a_row: Sequence[float]
    at_once: Sequence[float]
    profiles: Sequence[Moments]
    """Of the isolated ones, in seconds since the decision."""


def run() -> Findings:
    """Measures ours, then the stock parts."""
    gates = ISOLATED + IN_A_ROW + AT_ONCE
    with temporary_folder() as folder:
        progress(f"`agentmesh dev`: {gates} runs come to their gates")
        with agentmesh_desk(folder / "ours", gates) as desk:
            launcher = launcher_of(desk.project)
            ours = _measured(desk)
        progress("`dagster dev` with stock parts")
        with stock_desk(folder / "stock", gates) as desk:
            stock = _measured(desk)
    return Findings(
        lines=(
            _line(f"decision to next step, {ISOLATED} isolated", ours.isolated, stock.isolated),
            _line(f"decision to next step, {IN_A_ROW} back to back", ours.in_a_row, stock.in_a_row),
            _line(f"decision to next step, {AT_ONCE} at once", ours.at_once, stock.at_once),
        ),
        notes=(
            f"A decision until the next step, isolated, run launcher {launcher}: {_parts(ours.profiles)}",
            f"The same with stock parts: {_parts(stock.profiles)}",
        ),
    )


def _measured(desk: Desk) -> Measured:
    gates = list(desk.gates)
    offsets_s = random.Random(_SEED)
    decided: dict[str, float] = {}
    isolated: list[float] = []
    progress(f"{ISOLATED} isolated decisions")
    for gate in gates[:ISOLATED]:
        _settle(desk)
        time.sleep(offsets_s.uniform(0, sized(1, 0) * DAEMON_ROUND_S))
        decided[gate] = desk.decide(gate)
        isolated.append(_next_step(desk, gate) - decided[gate])
    _settle(desk)
    profiles = [_profile(desk, gate, at) for gate, at in decided.items()]
    progress(f"{IN_A_ROW} back to back")
    in_a_row: list[float] = []
    for gate in gates[ISOLATED : ISOLATED + IN_A_ROW]:
        decided_at = desk.decide(gate)
        in_a_row.append(_next_step(desk, gate) - decided_at)
    _settle(desk)
    progress(f"{AT_ONCE} at once")
    decided = {gate: desk.decide(gate) for gate in gates[-AT_ONCE:]}
    at_once = [_next_step(desk, gate) - at for gate, at in decided.items()]
    return Measured(isolated, in_a_row, at_once, profiles)


def _settle(desk: Desk) -> None:
    wait_until("all runs are over", desk.is_quiet, STEP_S, 0.25)
    time.sleep(SETTLED_S)


def _next_step(desk: Desk, gate: str) -> float:
    """When the first step after the gate began."""
    wait_until(f"the step after gate {gate} begins", lambda: desk.began_at(gate) is not None, STEP_S)
    began_at = desk.began_at(gate)
    assert began_at is not None
    return began_at


def _profile(desk: Desk, gate: str, decided_at: float) -> Moments:
    moments = [*desk.moments(gate), ("the step begins", _next_step(desk, gate))]
    return [(what, at - decided_at) for what, at in moments]


def _line(what: str, ours_s: Sequence[float], stock_s: Sequence[float]) -> Line:
    return Line(
        benchmark=NAME,
        what=what,
        unit="s",
        ours=Spread.of(ours_s, with_p95=len(ours_s) >= IN_A_ROW),
        baseline=Spread.of(stock_s, with_p95=len(stock_s) >= IN_A_ROW),
    )


def _parts(profiles: Sequence[Moments]) -> str:
    """The median time of each part."""
    spans: dict[str, list[float]] = {}
    for moments in profiles:
        for (_, before), (what, at) in pairwise([("", 0.0), *moments]):
            spans.setdefault(what, []).append(at - before)
    return ", ".join(f"{what} {median(values):+.2f} s" for what, values in spans.items())
