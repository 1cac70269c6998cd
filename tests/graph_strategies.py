"""Random workflows: what the graph walker and Dagster must make the same journal of.

A case is up to 12 nodes of a workflow's own level, with small bodies and called workflows under some of them. Nothing
in it depends on time: which nodes run, what they give and where they lead follows from the documents and the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

SLUG = "sample"
MAX_NODES = 12
MAX_DEPTH = 2
STATE = {
    "type": "object",
    "properties": {
        "total": {"type": "number", "default": 0, "reducer": "sum"},
        "log": {"type": "array", "default": [], "reducer": "append"},
        "facts": {"type": "object", "default": {}, "reducer": "merge"},
        "last": {"type": "number", "default": 1, "reducer": "replace"},
        # No reducer: two writers side by side are a conflict, where both run.
        "single": {"type": "number", "default": 5},
    },
}
VALUES = (
    1,
    "{{ input.n }}",
    "{{ input.n + 1 }}",
    "{{ context.total }}",
    "{{ context.last + 1 }}",
    "{{ context.single }}",
    "{{ context.log | length }}",
    "{{ 6 / input.n }}",
    "{{ context.last_output }}",
)
CONDITIONS = (
    "input.n > 1",
    "input.n == 0",
    "context.total >= 2",
    "context.log | length < 2",
    "context.single > 4",
    "6 / input.n > 2",
    "context.last_output == none",
)
WRITES = {
    "total": ("{{ input.n }}", 2),
    "log": ("{{ input.n }}", "x"),
    "facts": ({"a": 1}, {"b": "{{ context.total }}"}),
    "last": ("{{ input.n * 10 }}", 3, "{{ 'two' if input.n == 2 else 4 }}"),
    "single": (7, "{{ input.n }}"),
}
LEAVES = ("transform", "transform", "transform", "branch", "code", "code", "human")
CONTAINERS = ("parallel", "parallel", "workflow", "foreach", "loop")


@dataclass(frozen=True)
class Case:
    """Documents, of which `SLUG` is run, and the run's input."""

    documents: list[dict[str, Any]]
    input: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A workflow, the workflows that it calls, and its input."""
    called: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 2))):
        slugs = [document["slug"] for document in called]
        called.append(_workflow(draw, f"called{number}", slugs, most=3))
    slugs = [document["slug"] for document in called]
    return Case([*called, _workflow(draw, SLUG, slugs, most=MAX_NODES - 2)], {"n": draw(st.integers(0, 3))})


def _workflow(draw: st.DrawFn, slug: str, called: list[str], most: int) -> dict[str, Any]:
    level = _Level(draw, called, iter(range(1, 1000)))
    level.nodes.append({"id": "start", "type": "start"})
    for _ in range(draw(st.integers(1, most))):
        level.add(level.any_node(), root=False)
    sinks = [node["id"] for node in level.nodes if not any(e["source"] == node["id"] for e in level.edges)]
    # Not every way leads to an end: a run may come to none, and fails then.
    ends = draw(st.lists(st.sampled_from(sinks), unique=True, min_size=1)) if sinks != ["start"] else sinks
    shared = draw(st.booleans())
    for number, sink in enumerate(ends):
        name = "end" if shared else f"end{number}"
        if all(node["id"] != name for node in level.nodes):
            config = draw(st.sampled_from([{}, {"output": "{{ context.log }}"}]))
            level.nodes.append({"id": name, "type": "end", "config": config})
        level.connect(sink, name, may_be_dead=not draw(st.integers(0, 3)))
    if draw(st.integers(0, 3)):
        level.edges.append({"source": "start", "target": level.nodes[-1]["id"]})
    if draw(st.integers(0, 3)):
        level.edges.append({"source": "start", "target": level.nodes[-1]["id"]})
    document: dict[str, Any] = {
        "kind": "workflow",
        "slug": slug,
        "state_schema": STATE,
        "nodes": level.nodes,
        "edges": level.edges,
    }
    if draw(st.integers(0, 7)) == 7:
        document["output_schema"] = {"type": ["number", "null", "array"]}
    return document


class _Level:
    """The nodes of one level, while they are drawn: edges lead from earlier nodes to later ones."""

    def __init__(self, draw: st.DrawFn, called: list[str], numbers: Any, depth: int = 0) -> None:
        self.draw = draw
        self.called = called
        self.numbers = numbers
        self.depth = depth
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []

    def add(self, node: dict[str, Any], *, root: bool) -> None:
        before = [other["id"] for other in self.nodes]
        sources: list[str] = []
        if before:
            few = st.lists(st.sampled_from(before), unique=True, min_size=0 if root else 1, max_size=3)
            sources = self.draw(few)
        if len(sources) > 1:
            node["join"] = self.draw(st.sampled_from(["any", "any", "all", 1, 2, 3]))
        self.nodes.append(node)
        for source in sources:
            self.connect(source, node["id"])

    def connect(self, source: str, target: str, *, may_be_dead: bool = True) -> None:
        """An edge; or more, from several ways out of the source."""
        node = next(node for node in self.nodes if node["id"] == source)
        handles = _handles(node)
        chosen = handles
        if may_be_dead:
            chosen = self.draw(st.lists(st.sampled_from(handles), unique=True, min_size=1, max_size=2))
        for handle in chosen:
            edge = {"source": source, "target": target}
            if handle is not None:
                edge["source_handle"] = handle
            if may_be_dead and not self.draw(st.integers(0, 3)):
                edge["condition"] = self.draw(st.sampled_from(CONDITIONS))
            self.edges.append(edge)

    def any_node(self) -> dict[str, Any]:
        draw = self.draw
        kinds = LEAVES if self.depth == MAX_DEPTH else LEAVES + CONTAINERS
        kind = draw(st.sampled_from(kinds))
        if kind == "workflow" and not self.called:
            kind = "transform"
        node: dict[str, Any] = {"id": f"n{next(self.numbers)}", "type": kind}
        node["config"] = getattr(self, f"_{kind}")()
        if draw(st.integers(0, 2)) == 2:
            node["set"] = self._writes()
        if kind != "branch":
            node["on_error"] = draw(st.sampled_from(["fail", "fail", "fail", "continue", "route"]))
        if kind != "transform" and draw(st.integers(0, 4)) == 4:
            node["retry"] = {"max_attempts": draw(st.integers(1, 2)), "delay_s": 0}
        return node

    def _writes(self) -> dict[str, Any]:
        keys = self.draw(st.lists(st.sampled_from(sorted(WRITES)), unique=True, min_size=1, max_size=2))
        return {key: self.draw(st.sampled_from(WRITES[key])) for key in keys}

    def _transform(self) -> dict[str, Any]:
        return {"output": self.draw(st.sampled_from(VALUES))}

    def _branch(self) -> dict[str, Any]:
        draw = self.draw
        conditions = [
            {"when": draw(st.sampled_from(CONDITIONS)), "handle": handle}
            for handle in ("a", "b")[: draw(st.integers(1, 2))]
        ]
        config: dict[str, Any] = {"conditions": conditions, "mode": draw(st.sampled_from(["first", "all"]))}
        if draw(st.booleans()):
            config["default"] = "c"
        return config

    def _code(self) -> dict[str, Any]:
        failures = self.draw(st.sampled_from([0, 0, 0, 0, 1, 9]))
        value = self.draw(st.sampled_from(VALUES))
        return {
            "function": "graph_functions:fails_first",
            "input": {"failures": failures, "value": value},
        }

    def _human(self) -> dict[str, Any]:
        return {"title": "Go on?"}

    def _parallel(self) -> dict[str, Any]:
        draw = self.draw
        names = ("left", "mid-dle", "right")[: draw(st.integers(1, 3 - self.depth))]
        wait = draw(st.sampled_from(["all", "all", "all", "any"]))
        return {"branches": {name: self._body() for name in names}, "wait": wait}

    def _workflow(self) -> dict[str, Any]:
        return {"workflow": self.draw(st.sampled_from(self.called)), **self._input()}

    def _foreach(self) -> dict[str, Any]:
        draw = self.draw
        on_item_error = draw(st.sampled_from(["fail", "collect", "skip"]))
        config: dict[str, Any] = {
            "items": draw(st.sampled_from([[0, 1, 2], [3], [], "{{ range(input.n) | list }}"])),
            "body": self._body(),
            "on_item_error": on_item_error,
            "fanout": draw(st.booleans()),
        }
        return config

    def _loop(self) -> dict[str, Any]:
        draw = self.draw
        return {
            draw(st.sampled_from(["while", "until"])): draw(
                st.sampled_from(["iteration < 2", "iteration >= 2", "context.total > 3", "iteration > 9"])
            ),
            "max_iterations": draw(st.integers(1, 3)),
            "on_limit": draw(st.sampled_from(["fail", "continue"])),
            "body": self._body(),
        }

    def _input(self) -> dict[str, Any]:
        return self.draw(st.sampled_from([{"input": {"n": "{{ input.n }}"}}, {"input": {"n": 0}}, {}]))

    def _body(self) -> dict[str, Any]:
        if self.called and not self.draw(st.integers(0, 4)):
            return self._workflow()
        level = _Level(self.draw, self.called, self.numbers, self.depth + 1)
        for _ in range(self.draw(st.integers(1, 3 - self.depth))):
            level.add(level.any_node(), root=True)
        return {"nodes": level.nodes, "edges": level.edges}


def _handles(node: dict[str, Any]) -> list[str | None]:
    if node["type"] == "branch":
        config = node["config"]
        names = [condition["handle"] for condition in config["conditions"]]
        return [*names, *([config["default"]] if "default" in config else [])]
    named = ["approved", "rejected"] if node["type"] == "human" else []
    return [None, *named, *(["error"] if node.get("on_error") == "route" else [])]
