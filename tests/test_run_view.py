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
