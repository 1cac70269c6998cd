"""What a person reads of a run's steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import a_step, at

from agentmesh_dagster.cli.run_view import load_shown, print_trace, run_json
from agentmesh_dagster.records import StepStatus
from agentmesh_dagster.store import open_store
from agentmesh_dagster.testing import run_workflow

GATED = """
kind: workflow
slug: gated
nodes:
  - {id: start, type: start}
  - {id: pay, type: tool, config: {tool: sum, input: {expression: "1+2"}}}
  - {id: end, type: end}
edges: [{source: start, target: pay}, {source: pay, target: end}]
---
kind: tool
slug: sum
type: builtin
config: {name: calculator}
requires_approval: true
"""

# Each with its parent, in the order of their beginnings.
KEYS = (
    ("both", None),
    ("both/right", "both"),
    ("both/right/each", "both/right"),
    ("both/right/each[pen]", "both/right/each"),
    ("both/right/each[pen]/drafts", "both/right/each[pen]"),
    ("both/right/each[pen]/drafts#1", "both/right/each[pen]/drafts"),
    ("both/right/each[pen]/drafts#1/judge", "both/right/each[pen]/drafts#1"),
)


def test_a_step_below_another_shows_what_tells_it_from_that(capsys: pytest.CaptureFixture[str]):
    print_trace(
        a_step(key, parent_key=parent, started_at=at(number)) for number, (key, parent) in enumerate(KEYS)
    )
    shown = [line.partition("─ ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["both", "right", "each", "each[pen]", "drafts", "drafts#1", "judge"]


def test_items_stand_in_their_order_and_what_follows_an_end_comes_last(capsys: pytest.CaptureFixture[str]):
    again, item = at(60), {"parent_key": "each", "kind": "item"}
    print_trace(
        [
            a_step("@on_failure/tell", started_at=at(50)),
            a_step("each", started_at=again),
            a_step("each[a]", started_at=again, iteration_index=0, **item),
            a_step("each[b]", started_at=at(2), iteration_index=1, **item),
            a_step("each[c]", started_at=at(1), iteration_index=2, **item),
        ]
    )
    shown = [line.partition("─ ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["each", "each[a]", "each[b]", "each[c]", "@on_failure/tell"]


def test_a_skipped_step_follows_the_steps_that_did_not_lead_to_it(capsys: pytest.CaptureFixture[str]):
    skipped = {"status": StepStatus.SKIPPED, "started_at": None, "queued_at": at(90)}
    print_trace(
        [
            a_step("start", started_at=at(1)),
            a_step("size", started_at=at(2), predecessor_keys=("start",)),
            a_step("pay", started_at=at(3), predecessor_keys=("size",)),
            a_step("paid", started_at=at(4), predecessor_keys=("pay",)),
            a_step("declined", predecessor_keys=("review",), **skipped),
            a_step("review", predecessor_keys=("size",), **skipped),
        ]
    )
    shown = [line.partition("─ ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["start", "size", "review", "declined", "pay", "paid"]


def test_item_keys_are_shown_as_they_were_written(capsys: pytest.CaptureFixture[str]):
    print_trace(
        [
            a_step("g", started_at=at(1)),
            a_step("g[%E6%BC%A2]", started_at=at(2), parent_key="g", kind="item", iteration_index=0),
            a_step("g[a%0Ab]", started_at=at(2), parent_key="g", kind="item", iteration_index=1),
        ]
    )
    shown = [line.partition("─ ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["g", "g[漢]", "g[a%0Ab]"]


def test_a_tool_call_that_waits_for_approval_is_among_the_steps(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    open_store(url).close()
    done = run_workflow(GATED, database_url=url)
    with open_store(url) as store:
        shown = run_json(load_shown(store, done.run))

    found = {step["key"]: step for step in shown["steps"]}
    assert [step["key"] for step in shown["steps"]] == ["start", "pay", "pay/tool/1"]
    call = found["pay/tool/1"]
    assert (call["status"], call["kind"], call["parent_key"]) == ("waiting", "tool", "pay")
    assert call["input"] == {"tool": "sum", "input": {"expression": "1+2"}}
    assert (call["entity_kind"], call["entity_slug"]) == ("tool", "sum")
