"""The workflows of the kill matrix, and what a right end of each is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fake_http import FakeHttp

ITEMS = 20
GATED = (5, 14)
"""The items that a person is asked about."""
ORDER = "A-1"
"""The input of every run."""


@dataclass(frozen=True)
class Call:
    """One call of a model or a tool that a run makes."""

    step: str
    """The step key of its node."""
    kind: Literal["llm", "tool"]
    mark: str
    """What stands in its request, and in that of no other call of the run."""
    asks: bool = False
    """Whether it must not be made twice without a person saying so."""
    answer: Any = None
    """What its server answers; people give it where they say that the call happened."""


@dataclass(frozen=True)
class Case:
    """A workflow, and what its runs come to."""

    documents: Callable[[FakeHttp], list[dict[str, Any]]]
    calls: tuple[Call, ...]
    output: Any
    steps: int
    """How many nodes are executed."""
    tokens: tuple[int, int]
    """In and out."""
    phases: tuple[str, ...]
    """What the processes of an undisturbed run do."""
    skipped: frozenset[str] = field(default_factory=frozenset[str])
    """The keys of the nodes that do not run."""
    is_concurrent: bool = False
    """Whether calls are under way side by side: how many a kill cuts off, and what follows it, differs then."""

    @property
    def gates(self) -> int:
        """How many people are asked in an undisturbed run."""
        return self.phases.count("decide")


def _agent(slug: str) -> dict[str, Any]:
    return {"kind": "agent", "slug": slug, "model": f"openai/{slug}"}


def _tool(slug: str, of: str, tools: FakeHttp, answer: Any, **more: Any) -> dict[str, Any]:
    config = {
        "method": "POST",
        "url": f"{tools.url}/json",
        "query": {"value": json.dumps(answer)},
        "json": {"what": f"{slug} {of}"},
    }
    return {"kind": "tool", "slug": slug, "type": "http", "config": config, **more}


def _ask(node: str, agent: str, prompt: str) -> dict[str, Any]:
    return {"id": node, "type": "agent", "config": {"agent": agent, "prompt": prompt}}


def _use(node: str, sent: dict[str, str]) -> dict[str, Any]:
    return {"id": node, "type": "tool", "config": {"tool": node, "input": sent}}


def _chain(*nodes: str) -> list[dict[str, str]]:
    return [{"source": a, "target": b} for a, b in itertools.pairwise(nodes)]


_INPUT = {"type": "object", "required": ["order"], "properties": {"order": {"type": "string"}}}
_START = {"id": "start", "type": "start"}


def _charging(*, idempotent: bool) -> Case:
    """Six nodes in a row: start, a model call, a gate, a tool with side effects, a model call, end."""
    receipt = {"receipt": "R-1"}

    def documents(tools: FakeHttp) -> list[dict[str, Any]]:
        output = {
            "draft": "{{ steps.draft.output.text }}",
            "receipt": "{{ steps.charge.output.receipt }}",
            "report": "{{ steps.report.output.text }}",
        }
        workflow = {
            "kind": "workflow",
            "slug": "charging",
            "input_schema": _INPUT,
            "nodes": [
                _START,
                _ask("draft", "drafter", "Draft {{ input.order }}"),
                {"id": "gate", "type": "human", "config": {"title": "Charge {{ input.order }}?"}},
                _use("charge", {"order": "{{ input.order }}"}),
                _ask("report", "reporter", "{{ steps.charge.output.receipt }}"),
                {"id": "end", "type": "end", "config": {"output": output}},
            ],
            "edges": [
                *_chain("start", "draft", "gate"),
                {"source": "gate", "source_handle": "approved", "target": "charge"},
                *_chain("charge", "report", "end"),
            ],
        }
        effects = {"side_effects": True, "idempotent": idempotent}
        return [
            _agent("drafter"),
            _agent("reporter"),
            _tool("charge", "{{ input.order }}", tools, receipt, **effects),
            workflow,
        ]

    return Case(
        documents=documents,
        calls=(
            Call("draft", "llm", '"drafter"'),
            Call("charge", "tool", f"charge {ORDER}", asks=not idempotent, answer=receipt),
            Call("report", "llm", '"reporter"'),
        ),
        output={"draft": "hello", "receipt": "R-1", "report": "hello"},
        steps=6,
        tokens=(22, 14),
        phases=("start", "decide", "resume"),
    )


def _items() -> Case:
    """For each of 20 items a model call, a tool with side effects, a gate for two of them, and a called workflow."""

    def name(number: int) -> str:
        # Of one length, so that no mark is a part of another.
        return f"i{number:02d}"

    def receipt(item: str) -> dict[str, str]:
        return {"receipt": f"R-{item}"}

    def documents(tools: FakeHttp) -> list[dict[str, Any]]:
        gated = " or ".join(f"item == {name(number)!r}" for number in GATED)
        body = {
            "nodes": [
                _ask("draft", "drafter", "Draft {{ item }}"),
                _use("charge", {"item": "{{ item }}"}),
                {
                    "id": "sort",
                    "type": "branch",
                    "config": {"conditions": [{"when": gated, "handle": "doubtful"}], "default": "clear"},
                },
                {"id": "gate", "type": "human", "config": {"title": "Ship {{ item }}?"}},
                {
                    "id": "ship",
                    "type": "workflow",
                    "config": {"workflow": "shipping", "input": {"item": "{{ item }}"}},
                },
                {
                    "id": "done",
                    "type": "transform",
                    "config": {
                        "output": {
                            "receipt": "{{ steps.charge.output.receipt }}",
                            "parcel": "{{ steps.ship.output }}",
                        }
                    },
                },
            ],
            "edges": [
                *_chain("draft", "charge", "sort"),
                {"source": "sort", "source_handle": "doubtful", "target": "gate"},
                {"source": "sort", "source_handle": "clear", "target": "ship"},
                {"source": "gate", "source_handle": "approved", "target": "ship"},
                *_chain("ship", "done"),
            ],
        }
        shipping = {
            "kind": "workflow",
            "slug": "shipping",
            "input_schema": {
                "type": "object",
                "required": ["item"],
                "properties": {"item": {"type": "string"}},
            },
            "nodes": [
                _START,
                _use("parcel", {"item": "{{ input.item }}"}),
                {"id": "end", "type": "end", "config": {"output": "{{ steps.parcel.output }}"}},
            ],
            "edges": _chain("start", "parcel", "end"),
        }
        each = {"items": [name(number) for number in range(ITEMS)], "concurrency": 4, "body": body}
        output = {"items": "{{ steps.each.output }}", "all": "{{ steps.call.output }}"}
        filling = {
            "kind": "workflow",
            "slug": "filling",
            "input_schema": _INPUT,
            "nodes": [
                _START,
                {"id": "each", "type": "foreach", "config": each},
                # Of the top level: its nodes are ops.
                {
                    "id": "call",
                    "type": "workflow",
                    "config": {"workflow": "shipping", "input": {"item": "all"}},
                },
                {"id": "end", "type": "end", "config": {"output": output}},
            ],
            "edges": _chain("start", "each", "call", "end"),
        }
        item = "{{ input.item }}"
        return [
            _agent("drafter"),
            _tool("charge", item, tools, receipt(item), side_effects=True),
            _tool("parcel", item, tools, f"P-{item}", side_effects=False),
            shipping,
            filling,
        ]

    def calls(number: int) -> tuple[Call, ...]:
        item, key = name(number), f"each[{number}]"
        return (
            Call(f"{key}/draft", "llm", f"Draft {item}"),
            Call(f"{key}/charge", "tool", f"charge {item}", asks=True, answer=receipt(item)),
            Call(f"{key}/ship/parcel", "tool", f"parcel {item}"),
        )

    # Of an item: draft, charge, sort, ship with start, parcel and end, done.
    nodes = ITEMS * 8 + len(GATED)
    return Case(
        documents=documents,
        calls=(
            *(call for number in range(ITEMS) for call in calls(number)),
            Call("call/parcel", "tool", "parcel all"),
        ),
        output={
            "items": [{**receipt(name(n)), "parcel": f"P-{name(n)}"} for n in range(ITEMS)],
            "all": "P-all",
        },
        steps=nodes + 7,
        tokens=(ITEMS * 11, ITEMS * 7),
        phases=("start", "decide", "resume", "decide", "resume"),
        skipped=frozenset(f"each[{n}]/gate" for n in range(ITEMS) if n not in GATED),
        is_concurrent=True,
    )


def _containers() -> Case:
    """Containers at the top, whose nodes are ops: branches with containers in them, a called workflow, a fan-out.

    One branch waits for a person when the other is done.
    """
    items = ("p", "q")

    def documents(tools: FakeHttp) -> list[dict[str, Any]]:
        of = "{{ input.of }}"
        packing = {
            "kind": "workflow",
            "slug": "packing",
            "input_schema": {
                "type": "object",
                "required": ["of"],
                "properties": {"of": {"type": "string"}},
            },
            "nodes": [
                _START,
                _use("pack", {"of": of}),
                {"id": "end", "type": "end", "config": {"output": "{{ steps.pack.output }}"}},
            ],
            "edges": _chain("start", "pack", "end"),
        }
        inner = {
            "id": "inner",
            "type": "parallel",
            "config": {"branches": {"only": {"nodes": [_use("pack", {"of": "inner"})]}}},
        }
        left = {
            "nodes": [
                _ask("draft", "drafter", "Draft {{ input.order }}"),
                {"id": "gate", "type": "human", "config": {"title": "Charge {{ input.order }}?"}},
                _use("charge", {"order": "{{ input.order }}"}),
                inner,
            ],
            "edges": [
                *_chain("draft", "gate"),
                {"source": "gate", "source_handle": "approved", "target": "charge"},
                *_chain("charge", "inner"),
            ],
        }
        branches = {"left": left, "right": {"workflow": "packing", "input": {"of": "right"}}}
        each = {"items": list(items), "fanout": True, "body": {"nodes": [_use("pack", {"of": "{{ item }}"})]}}
        shown = {name: f"{{{{ steps.{name}.output }}}}" for name in ("both", "call", "each")}
        building = {
            "kind": "workflow",
            "slug": "building",
            "input_schema": _INPUT,
            "nodes": [
                _START,
                {"id": "both", "type": "parallel", "config": {"branches": branches}},
                {
                    "id": "call",
                    "type": "workflow",
                    "config": {"workflow": "packing", "input": {"of": "call"}},
                },
                {"id": "each", "type": "foreach", "config": each},
                {"id": "end", "type": "end", "config": {"output": shown}},
            ],
            "edges": _chain("start", "both", "call", "each", "end"),
        }
        return [
            _agent("drafter"),
            _tool("charge", "{{ input.order }}", tools, "R-1", side_effects=True),
            _tool("pack", of, tools, f"P-{of}", side_effects=False),
            packing,
            building,
        ]

    places = {"both/left/inner/only": "inner", "both/right": "right", "call": "call"}
    places |= {f"each[{number}]": item for number, item in enumerate(items)}
    return Case(
        documents=documents,
        calls=(
            Call("both/left/draft", "llm", '"drafter"'),
            Call("both/left/charge", "tool", f"charge {ORDER}", asks=True, answer="R-1"),
            *(Call(f"{place}/pack", "tool", f'pack {of}"') for place, of in places.items()),
        ),
        output={
            "both": {"left": {"only": "P-inner"}, "right": "P-right"},
            "call": "P-call",
            "each": [f"P-{item}" for item in items],
        },
        # The nodes at the top, those of the branches, of the called workflow twice, and the items'.
        steps=5 + 5 + 2 * 3 + len(items),
        tokens=(11, 7),
        phases=("start", "decide", "resume"),
        is_concurrent=True,
    )


CASES: dict[str, Case] = {
    "asks": _charging(idempotent=False),
    "repeats": _charging(idempotent=True),
    "items": _items(),
    "containers": _containers(),
}
"""The tool must not be called twice without a person saying so; or it may be, with the same idempotency key; or it is
called for each of 20 items; or it stands in containers whose nodes are ops."""
CHAINS = ("asks", "repeats")
