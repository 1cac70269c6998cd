"""Killed at any fault point, a run comes to the same end, and no finished call is made again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest
from kill_databases import Databases, PostgresDatabases, SqliteDatabases
from kill_matrix import Matrix
from kill_plans import VARIANTS, Kill, Outcome, Plan, in_words, second_kills, single_kills, spread

BACKENDS = ("sqlite", "postgresql")
LANES = 2
SAMPLE_S = 100.0
"""In which the plans of a sample are begun, for each database."""
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BLOCK = re.compile(r"(<!-- kill-matrix: begin -->\n).*?(<!-- kill-matrix: end -->)", re.DOTALL)
# Here the recovery has most to do: a person is asked, and the run goes on by another claim.
CUT_OFF_TOOL = Plan("asks", (Kill(3, "resume", "tool.call.during#1"),))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="worker processes are forked")


@pytest.fixture
def postgres_databases(postgres_server: Callable[[str], str]) -> Iterator[PostgresDatabases]:
    databases = PostgresDatabases(postgres_server)
    yield databases
    databases.close()


@pytest.fixture(params=BACKENDS)
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Databases:
    if request.param == "sqlite":
        return SqliteDatabases(tmp_path)
    return request.getfixturevalue("postgres_databases")


def assert_all_right(outcomes: Sequence[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if outcome.problems]
    shown = "\n".join(map(str, wrong[:5]))
    assert not wrong, f"{len(wrong)} of {len(outcomes)} plans went wrong, among them:\n{shown}"


def undisturbed(matrix: Matrix) -> list[Outcome]:
    outcomes = matrix.carry_out([Plan(variant) for variant in VARIANTS])
    assert_all_right(outcomes)
    assert {tuple(outcome.phases) for outcome in outcomes} == {("start", "decide", "resume")}
    return outcomes


@pytest.mark.timeout(400)
def test_a_kill_at_a_sample_of_points(
    databases: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    until = time.monotonic() + SAMPLE_S
    with Matrix(databases, tmp_path / "lanes", LANES) as matrix:
        found = single_kills(undisturbed(matrix))
        recovered = matrix.carry_out([CUT_OFF_TOOL])
        assert_all_right(recovered)
        assert recovered[0].phases == ["start", "decide", "resume (killed)", "retry", "decide", "resume"]
        # Each name of a point on one of the two databases, and a few recoveries that are killed themselves.
        names = len({plan.kills[-1].name for plan in found})
        sample = [*spread(found, names), *spread(second_kills(recovered), 8)]
        turn = BACKENDS.index("sqlite" if isinstance(databases, SqliteDatabases) else "postgresql")
        outcomes = matrix.carry_out(sample[turn::2], until)
    with capsys.disabled():
        print(f"\n{in_words(databases.name, outcomes)}, of {len(found)} single kills")
    assert outcomes
    assert_all_right(outcomes)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_kill_at_every_point(
    tmp_path: Path, postgres_databases: PostgresDatabases, capsys: pytest.CaptureFixture[str]
):
    lines: list[str] = []
    everything: list[Outcome] = []
    for databases in (SqliteDatabases(tmp_path), postgres_databases):
        folder = tmp_path / databases.name
        with Matrix(databases, folder, max(LANES, os.cpu_count() or 1)) as matrix:
            found = single_kills(undisturbed(matrix))
            recovered = matrix.carry_out([CUT_OFF_TOOL])
            assert_all_right(recovered)
            again = second_kills(recovered)
            outcomes = matrix.carry_out([*found, *again])
        assert len(outcomes) == len(found) + len(again)
        everything += outcomes
        lines.append(in_words(databases.name, outcomes))
        with capsys.disabled():
            print(f"\n{lines[-1]}")
    today = datetime.now(timezone.utc).date().isoformat()
    result = "\n".join([f"`make soak`, {today}:", "", *(f"- {line}." for line in lines), ""])
    text = PAGE.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{PAGE} has lost the markers of the matrix"
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + result + found[2], text), encoding="utf-8")
    assert_all_right(everything)
