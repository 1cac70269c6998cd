"""What a person reads of a run's steps."""

from __future__ import annotations

import pytest
from store_samples import a_step, at

from agentmesh_dagster.cli.run_view import print_trace

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
