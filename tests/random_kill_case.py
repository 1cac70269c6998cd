"""The workflows that the random kills hit, the calls that a run of each makes, and what it comes to.

Both have containers at the top, gates in a `foreach`, called workflows, models and tools over HTTP, and a `finally`:
`order` in one process (`parallel`, `foreach`, `loop`, called workflows), `fanned` with a process for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ITEMS = ("a", "b", "c")
GATED = "b"
"""The item that a person is asked about."""

_DOCUMENTS = """\
kind: agent
slug: writer
model: openai/writer
---
kind: tool
slug: charge
type: http
side_effects: true
config:
  method: POST
  url: "<tools>/json"
  timeout_s: 60
  query: {value: '{"receipt": "R-{{ input.of }}"}'}
  json: {call: "[charge {{ input.of }}]"}
---
kind: tool
slug: book
type: http
side_effects: true
idempotent: true
config:
  method: POST
  url: "<tools>/json"
  timeout_s: 60
  query: {value: '"B-{{ input.of }}"'}
  json: {call: "[book {{ input.of }}]"}
---
kind: tool
slug: look
type: http
side_effects: false
config:
  method: POST
  url: "<tools>/json"
  timeout_s: 60
  query: {value: '"L-{{ input.of }}"'}
  json: {call: "[look {{ input.of }}]"}
---
kind: workflow
slug: shipping
input_schema: {type: object, required: [of], properties: {of: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: parcel, type: tool, config: {tool: look, input: {of: "{{ input.of }}.parcel"}}}
  - {id: label, type: agent, config: {agent: writer, prompt: "[label {{ input.of }}]"}}
  - {id: end, type: end, config: {output: "{{ steps.parcel.output }}"}}
edges:
  - {source: start, target: parcel}
  - {source: parcel, target: label}
  - {source: label, target: end}
---
kind: workflow
slug: order
input_schema: {type: object, required: [order], properties: {order: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: draft, type: agent, config: {agent: writer, prompt: "[draft {{ input.order }}]"}}
  - id: both
    type: parallel
    config:
      branches:
        paid:
          nodes:
            - {id: charge, type: tool, config: {tool: charge, input: {of: "{{ input.order }}.all"}}}
            - {id: receipt, type: transform, config: {output: "{{ steps.charge.output.receipt }}"}}
          edges: [{source: charge, target: receipt}]
        booked:
          nodes:
            - {id: check, type: agent, config: {agent: writer, prompt: "[check {{ input.order }}]"}}
            - {id: book, type: tool, config: {tool: book, input: {of: "{{ input.order }}"}}}
          edges: [{source: check, target: book}]
  - id: each
    type: foreach
    config:
      items: [a, b, c]
      concurrency: 2
      body:
        nodes:
          - {id: ask, type: agent, config: {agent: writer, prompt: "[ask {{ input.order }}.{{ item }}]"}}
          - {id: charge, type: tool, config: {tool: charge, input: {of: "{{ input.order }}.{{ item }}"}}}
          - id: sort
            type: branch
            config: {conditions: [{when: "item == 'b'", handle: doubtful}], default: clear}
          - {id: gate, type: human, config: {title: "Ship {{ item }} of {{ input.order }}?"}}
          - {id: ship, type: workflow, config: {workflow: shipping, input: {of: "{{ input.order }}.{{ item }}"}}}
        edges:
          - {source: ask, target: charge}
          - {source: charge, target: sort}
          - {source: sort, source_handle: doubtful, target: gate}
          - {source: sort, source_handle: clear, target: ship}
          - {source: gate, source_handle: approved, target: ship}
  - {id: call, type: workflow, config: {workflow: shipping, input: {of: "{{ input.order }}.call"}}}
  - id: again
    type: loop
    config:
      while: "iteration < 2"
      max_iterations: 2
      body:
        nodes:
          - {id: poll, type: tool, config: {tool: look, input: {of: "{{ input.order }}.poll{{ iteration }}"}}}
  - id: end
    type: end
    config:
      output:
        paid: "{{ steps.both.output.paid }}"
        booked: "{{ steps.both.output.booked }}"
        shipped: "{{ steps.each.output }}"
        called: "{{ steps.call.output }}"
edges:
  - {source: start, target: draft}
  - {source: draft, target: both}
  - {source: both, target: each}
  - {source: each, target: call}
  - {source: call, target: again}
  - {source: again, target: end}
finally:
  nodes:
    - {id: close, type: tool, config: {tool: look, input: {of: "{{ input.order }}.close-{{ run.status }}"}}}
---
kind: workflow
slug: fanned
input_schema: {type: object, required: [order], properties: {order: {type: string}}}
settings: {executor: multiprocess, max_concurrent: 2}
nodes:
  - {id: start, type: start}
  - id: each
    type: foreach
    config:
      items: [a, b]
      key: item
      fanout: true
      body:
        nodes:
          - {id: charge, type: tool, config: {tool: charge, input: {of: "{{ input.order }}.{{ item }}"}}}
          - id: sort
            type: branch
            config: {conditions: [{when: "item == 'b'", handle: doubtful}], default: clear}
          - {id: gate, type: human, config: {title: "Label {{ item }} of {{ input.order }}?"}}
          - {id: label, type: agent, config: {agent: writer, prompt: "[label {{ input.order }}.{{ item }}]"}}
        edges:
          - {source: charge, target: sort}
          - {source: sort, source_handle: doubtful, target: gate}
          - {source: sort, source_handle: clear, target: label}
          - {source: gate, source_handle: approved, target: label}
  - {id: call, type: workflow, config: {workflow: shipping, input: {of: "{{ input.order }}.call"}}}
  - {id: end, type: end, config: {output: "{{ steps.call.output }}"}}
edges:
  - {source: start, target: each}
  - {source: each, target: call}
  - {source: call, target: end}
"""


@dataclass(frozen=True)
class Call:
    """One call of a model or a tool that a run makes."""

    step: str
    """The step key of its node."""
    kind: Literal["llm", "tool"]
    mark: str
    """What stands in its request, and in that of no other call of any run."""
    asks: bool = False
    """Whether it must not be made twice without a person saying so."""
    answer: Any = None
    """What its server answers; people give it where they say that the call happened."""


def documents(tools: str) -> str:
    """The documents as YAML.

    Args:
        tools: The URL of the tools' server.
    """
    return _DOCUMENTS.replace("<tools>", tools)


def calls(workflow: str, order: str) -> tuple[Call, ...]:
    """The calls of a run that succeeds; those of its `finally` not among them."""
    return _calls_of_fanned(order) if workflow == "fanned" else _calls_of_order(order)


def output(workflow: str, order: str) -> Any:
    """The output of a run."""
    if workflow == "fanned":
        return f"L-{order}.call.parcel"
    return {
        "paid": f"R-{order}.all",
        "booked": f"B-{order}",
        "shipped": [f"L-{order}.{item}.parcel" for item in ITEMS],
        "called": f"L-{order}.call.parcel",
    }


def gates(workflow: str) -> tuple[str, ...]:
    """The step keys of the gates of a run."""
    return ("each[b]/gate",) if workflow == "fanned" else (f"each[{ITEMS.index(GATED)}]/gate",)


def closing_mark(order: str) -> str:
    """What stands in the request of the `finally` of an `order` that has succeeded."""
    return f"[look {order}.close-succeeded]"


def _charge(step: str, of: str) -> Call:
    return Call(step, "tool", f"[charge {of}]", asks=True, answer={"receipt": f"R-{of}"})


def _shipping(step: str, of: str) -> tuple[Call, ...]:
    return (
        Call(f"{step}/parcel", "tool", f"[look {of}.parcel]"),
        Call(f"{step}/label", "llm", f"[label {of}]"),
    )


def _calls_of_order(order: str) -> tuple[Call, ...]:
    items: list[Call] = []
    for index, item in enumerate(ITEMS):
        key, of = f"each[{index}]", f"{order}.{item}"
        items += [Call(f"{key}/ask", "llm", f"[ask {of}]"), _charge(f"{key}/charge", of)]
        items += _shipping(f"{key}/ship", of)
    return (
        Call("draft", "llm", f"[draft {order}]"),
        _charge("both/paid/charge", f"{order}.all"),
        Call("both/booked/check", "llm", f"[check {order}]"),
        Call("both/booked/book", "tool", f"[book {order}]"),
        *items,
        *_shipping("call", f"{order}.call"),
        *(Call(f"again#{n}/poll", "tool", f"[look {order}.poll{n}]") for n in (1, 2)),
    )


def _calls_of_fanned(order: str) -> tuple[Call, ...]:
    items: list[Call] = []
    for item in ("a", "b"):
        key, of = f"each[{item}]", f"{order}.{item}"
        items += [_charge(f"{key}/charge", of), Call(f"{key}/label", "llm", f"[label {of}]")]
    return (*items, *_shipping("call", f"{order}.call"))
