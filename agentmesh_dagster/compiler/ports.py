"""The outputs of an op: one for each way out of a node that Dagster must tell apart."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.specs.graph import Graph
from agentmesh_dagster.specs.names import RESERVED_IN_DAGSTER

WAITING = "waiting"
"""The output of a node that waits: nothing hangs on it, it shows what the node waits for."""
DONE = "done"
"""The output that says no more than that the node is decided."""
NEXT = "next"
"""The output of the edges without a handle."""

MAX_NAME_CHARS: Final = 60
"""Dagster's graph and log lines cut longer names off."""

_TAKEN: Final = frozenset({WAITING, DONE}) | RESERVED_IN_DAGSTER
_PLAIN: Final = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


@dataclass(frozen=True)
class Port:
    """One op output, named after its handle: the edges of a node with one handle and condition are live together."""

    name: str
    handle: str | None
    condition: str | None
    edges: tuple[int, ...]

    @property
    def description(self) -> str:
        """The handle and the condition, for people."""
        words = self.handle or (NEXT if self.edges else DONE)
        return f"{words}, when {self.condition}" if self.condition else words

    def is_live(self, live: frozenset[int]) -> bool:
        """Whether the output is yielded; a sink's port always is."""
        return not self.edges or not live.isdisjoint(self.edges)


def construct_ports(graph: Graph, node_id: str, *, is_top: bool = True) -> tuple[Port, ...]:
    """The ports of a node.

    A sink, and a root at the top, have a port without edges, `done`, for what ends their level: it is yielded whatever
    was chosen.

    Args:
        graph: The node's level.
        node_id: The node.
        is_top: Whether the level is the workflow's own. What ends another level hangs on `agentmesh_begin`.
    """
    groups: dict[tuple[str | None, str | None], list[int]] = {}
    for edge in graph.outgoing[node_id]:
        groups.setdefault((edge.handle, edge.condition), []).append(edge.number)
    ports = [
        Port(name, handle, condition, tuple(edges))
        for name, ((handle, condition), edges) in zip(output_names(list(groups)), groups.items(), strict=True)
    ]
    if not groups or (is_top and not graph.incoming[node_id]):
        ports.append(Port(DONE, None, None, ()))
    return tuple(ports)


def output_names(ways: Sequence[tuple[str | None, str | None]]) -> list[str]:
    """The names of a node's outputs in Dagster, which takes letters, digits and `_` and reserves some words.

    A handle that Dagster takes keeps its name: `approved`. Of others, signs become `_`, accents go, other characters
    become `u<code point in hex>`; a reserved word ends in `_`, a way out with a condition in `_when`. Where two come to
    the same, the later one gets a number. The same ways give the same names in every process.

    Args:
        ways: Handle and condition of each way out, all different.
    """
    names: dict[tuple[str | None, str | None], str] = {
        (handle, None): handle
        for handle, condition in ways
        if handle is not None
        and condition is None
        and len(handle) <= MAX_NAME_CHARS
        and handle not in _TAKEN
        and _PLAIN.fullmatch(handle)
    }
    taken = {*_TAKEN, *names.values()}
    for way in ways:
        if way not in names:
            names[way] = _free_name(_readable(*way), taken)
            taken.add(names[way])
    return [names[way] for way in ways]


def _readable(handle: str | None, condition: str | None) -> str:
    words = unicodedata.normalize("NFKD", handle if handle is not None else NEXT)
    letters = (
        c if _PLAIN.fullmatch(c) else "_" if c.isascii() else f"_u{ord(c):x}_"
        for c in words
        if not unicodedata.combining(c)
    )
    name = re.sub("__+", "_", "".join(letters)).strip("_") or "handle"
    name = name[:MAX_NAME_CHARS]
    return f"{name}_when" if condition else f"{name}_" if name in _TAKEN else name


def _free_name(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found
