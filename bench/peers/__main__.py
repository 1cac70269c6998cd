"""`python -m bench.peers`: measures AgentMesh's walker beside LangGraph, in turns, and prints who is ahead.

The exit code is 0 also where we are behind: the machine may be busy, and a person reads the lines. It is 1 where the
peers cannot be installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.measure import Spread, Times
from bench.peers.environment import Peer, PeersUnavailable, make_environment, started_peer
from bench.report import in_columns, number_text, spread_text

Side = Callable[[], Times]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One thing that both do."""

    what: str
    size: int
    """Nodes or items of a run."""
    unit: str
    ours: tuple[str, ...]
    """Slugs of `bench.walker`."""
    theirs: dict[str, dict[str, Any]]
    """Work for the peer's process, by what it is called in the table; its default settings first."""
    repetitions: int

    def value(self, times: Times) -> float:
        """A run's time in the shape's unit."""
        if self.is_throughput:
            return self.size / times.wall_s
        return times.wall_s if self.unit == "s" else times.wall_s * 1000 / self.size

    def cpu_text(self, times: Sequence[Times]) -> str:
        """The processor time of a node or item, or of a run where that is what is measured."""
        of = 1 if self.unit == "s" else self.size
        return f"{number_text(median([each.cpu_s for each in times]) / of * 1000)} ms"

    @property
    def is_throughput(self) -> bool:
        """Whether more is better."""
        return self.unit == "items/s"

    def standing(self, ours: float, theirs: float) -> str:
        """Who is ahead, and how far."""
        factor = ours / theirs if self.is_throughput else theirs / ours
        return f"{factor:.2f} x ahead" if factor >= 1 else f"{1 / factor:.2f} x BEHIND"


_FULL: Final = {"synchronous": None}
_NORMAL: Final = {"synchronous": "NORMAL"}
_LIKE: Final = "SQLite as ours"
_CHAIN: Final = {"shape": "chain", "size": 20, "is_async": False}
_FOREACH: Final = {"shape": "foreach", "size": 1_000, "durability": None}
_FAN: Final = {"shape": "fan", "size": 50, "is_async": True, "durability": None}

SHAPES: Final = (
    Shape(
        what="chain of 20 no-op nodes, per node",
        size=20,
        unit="ms",
        ours=("chain-transform", "chain-code", "chain-code-thread"),
        theirs={
            "SqliteSaver": {**_CHAIN, "durability": None, **_FULL},
            'SqliteSaver, durability="sync"': {**_CHAIN, "durability": "sync", **_FULL},
            f"SqliteSaver, {_LIKE}": {**_CHAIN, "durability": None, **_NORMAL},
            f'SqliteSaver, durability="sync", {_LIKE}': {**_CHAIN, "durability": "sync", **_NORMAL},
        },
        repetitions=9,
    ),
    Shape(
        what="1,000 no-op items, 16 at once",
        size=1_000,
        unit="items/s",
        ours=("foreach-transform", "foreach-code", "foreach-code-thread"),
        theirs={
            "Send, SqliteSaver": {**_FOREACH, "is_async": False, **_FULL},
            "Send, AsyncSqliteSaver": {**_FOREACH, "is_async": True, **_FULL},
            f"Send, SqliteSaver, {_LIKE}": {**_FOREACH, "is_async": False, **_NORMAL},
            f"Send, AsyncSqliteSaver, {_LIKE}": {**_FOREACH, "is_async": True, **_NORMAL},
        },
        repetitions=5,
    ),
    Shape(
        what="50 parallel nodes of 100 ms",
        size=50,
        unit="s",
        ours=("fan-delay", "fan-code"),
        theirs={
            "AsyncSqliteSaver": {**_FAN, **_FULL},
            f"AsyncSqliteSaver, {_LIKE}": {**_FAN, **_NORMAL},
        },
        repetitions=9,
    ),
)


def main() -> None:
    """Reads the arguments, measures, prints."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Measures AgentMesh beside LangGraph."
    )
    parser.add_argument(
        "--venv", type=Path, default=Path(".venv-peers"), help="where LangGraph is installed (%(default)s)"
    )
    parser.add_argument("--peers-only", action="store_true", help="measure LangGraph alone")
    options = parser.parse_args()
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "yes"
    try:
        python = make_environment(options.venv)
    except PeersUnavailable as error:
        sys.exit(f"bench-peers: {error}")
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        peer = stack.enter_context(started_peer(python, Path(stack.enter_context(TemporaryDirectory()))))
        ours = {} if options.peers_only else _our_sides(stack)
        rows: list[tuple[str, ...]] = [_HEADS]
        for shape in SHAPES:
            print(f"{shape.what} ...", file=sys.stderr, flush=True)
            rows += _rows(shape, ours, peer)
    versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
    print(f"{in_columns(rows)}\n\n{_NOTES}\n\n{versions}")
    print(
        f"Machine: {os.cpu_count()} cores, load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}"
    )


_HEADS: Final = ("", "", "median", "low-high", "CPU", "to LangGraph's default", "to its best")
_NOTES: Final = f"""\
A run each time, from its beginning to its end; rounds in turns, after one of each that does not count. CPU is the
processor time of a node, an item, or a run of the parallel nodes: on a busy machine believe it more than the clock.
Both write to SQLite files in WAL mode. LangGraph leaves SQLite's `synchronous` at FULL, which has the disk synced at
each commit; AgentMesh sets NORMAL, which outlives a killed process and may lose the last commits in a power
failure. "{_LIKE}" is LangGraph with NORMAL."""


def _our_sides(stack: ExitStack) -> dict[str, Side]:
    from bench.inline import prepared_walks
    from bench.walker import WORKFLOWS, input_of

    walks = stack.enter_context(prepared_walks(WORKFLOWS))

    def side(slug: str) -> Side:
        return lambda: walks.run(slug, input_of(slug)).whole

    return {workflow["slug"]: side(workflow["slug"]) for workflow in WORKFLOWS}


def _rows(shape: Shape, ours: dict[str, Side], peer: Peer) -> list[tuple[str, ...]]:
    """Measures a shape, and gives its lines of the table."""
    own = {f"AgentMesh, {slug}": ours[slug] for slug in shape.ours if slug in ours}
    theirs = {f"LangGraph, {name}": _peer_side(peer, work) for name, work in shape.theirs.items()}
    times = _rounds({**own, **theirs}, shape.repetitions)
    found = {name: Spread.of([shape.value(each) for each in all_]) for name, all_ in times.items()}
    peers = [found[name].median for name in theirs]
    best = max(peers) if shape.is_throughput else min(peers)
    rows: list[tuple[str, ...]] = []
    for name, spread in found.items():
        against = (peers[0], best) if name in own else ()
        standings = [shape.standing(spread.median, other) for other in against] or ["", ""]
        number = f"{number_text(spread.median)} {shape.unit}"
        rows.append((shape.what, name, number, spread_text(spread), shape.cpu_text(times[name]), *standings))
    return rows


def _peer_side(peer: Peer, work: dict[str, Any]) -> Side:
    return lambda: peer.run(work)


def _rounds(sides: dict[str, Side], repetitions: int) -> dict[str, list[Times]]:
    """All sides in turns; the first round does not count."""
    found: dict[str, list[Times]] = {name: [] for name in sides}
    for number in range(repetitions + 1):
        for name, side in sides.items():
            times = side()
            if number:
                found[name].append(times)
    return found


if __name__ == "__main__":
    main()
