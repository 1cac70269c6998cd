"""Killed at any fault point, a run comes to the same end, and no finished call is made again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from kill_cases import CASES, CHAINS
from kill_databases import Databases, PostgresDatabases, SqliteDatabases
from kill_matrix import Matrix
from kill_plans import Kill, Outcome, Plan, in_words, second_kills, share, single_kills, spread

BACKENDS = ("sqlite", "postgresql")
LANES = 1
SAMPLE_S = 20.0
"""In which the plans of a sample are begun, for each database; of a loaded machine at least one for each lane."""
ITEMS_SAMPLE_S = 12.0
CONTAINERS_SAMPLE_S = 12.0
ITEMS_SOAK_S = 600.0
CONTAINERS_SOAK_S = 600.0
"""The items pass a thousand points: those between the first, the middle and the last of a name as far as time goes."""
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BLOCK = re.compile(r"(<!-- kill-matrix: begin -->\n).*?(<!-- kill-matrix: end -->)", re.DOTALL)
# Here the recovery has most to do: a person is asked, and the run goes on by another claim.
CUT_OFF_TOOL = Plan("asks", (Kill(3, "resume", "tool.call.during#1"),))
# Several items are under way, others are done, and a gate waits already.
CUT_OFF_ITEM = Plan("items", (Kill(1, "start", "tool.call.during#19"),))
# All that are under way have come to the tool.
FIRST_ITEMS = Plan("items", (Kill(1, "start", "tool.call.during#3"),))

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="worker processes are forked")


@pytest.fixture(scope="module")
def postgres_databases(postgres_server: Callable[[str], str]) -> Iterator[PostgresDatabases]:
    databases = PostgresDatabases(postgres_server)
    yield databases
    databases.close()


@pytest.fixture(scope="module", params=BACKENDS)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("kills")
    databases: Databases = SqliteDatabases(folder)
    if request.param == "postgresql":
        databases = request.getfixturevalue("postgres_databases")
    with Matrix(databases, folder / "lanes", LANES) as opened:
        yield opened


def assert_all_right(outcomes: Sequence[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if outcome.problems]
    shown = "\n".join(map(str, wrong[:5]))
    assert not wrong, f"{len(wrong)} of {len(outcomes)} plans went wrong, among them:\n{shown}"


def undisturbed(matrix: Matrix, *variants: str) -> list[Outcome]:
    outcomes = matrix.carry_out([Plan(variant) for variant in variants])
    assert_all_right(outcomes)
    for outcome in outcomes:
        assert tuple(outcome.phases) == CASES[outcome.plan.variant].phases
    return outcomes


def recovered(matrix: Matrix, plan: Plan) -> list[Outcome]:
    outcomes = matrix.carry_out([plan])
    assert_all_right(outcomes)
    return outcomes


def carry_out_sample(matrix: Matrix, plans: Sequence[Plan], until: float) -> list[Outcome]:
    """What is begun until then of this database's share; the other database has the other."""
    outcomes = matrix.carry_out(share(plans, matrix.databases.name != "SQLite"), until)
    assert outcomes
    assert_all_right(outcomes)
    return outcomes


def retried_by_both(plans: Sequence[Plan]) -> list[Plan]:
    """Each plan with Dagster's own retry, and then with AgentMesh's."""
    return [
        *(replace(plan, retry="rerun") for plan in plans),
        *(replace(plan, retry="retry") for plan in plans),
    ]


@pytest.mark.timeout(400)
def test_a_kill_at_a_sample_of_points(matrix: Matrix, capsys: pytest.CaptureFixture[str]):
    until = time.monotonic() + SAMPLE_S
    found = single_kills(undisturbed(matrix, *CHAINS))
    after_cut_off = recovered(matrix, CUT_OFF_TOOL)
    assert after_cut_off[0].phases == ["start", "decide", "resume (killed)", "retry", "decide", "resume"]
    # Each name of a point on one of the two databases, and a few recoveries that are killed themselves.
    names = len({plan.kills[-1].name for plan in found})
    sample = [*spread(found)[:names], *spread(second_kills(after_cut_off))[:8]]
    outcomes = carry_out_sample(matrix, sample, until)
    with capsys.disabled():
        print(f"\n{in_words(matrix.databases.name, outcomes)}, of {len(found)} single kills")


@pytest.mark.timeout(400)
def test_a_kill_among_20_items_at_a_sample_of_points(matrix: Matrix, capsys: pytest.CaptureFixture[str]):
    until = time.monotonic() + ITEMS_SAMPLE_S
    begun = matrix.carry_out([Plan("items"), CUT_OFF_ITEM, FIRST_ITEMS])
    assert_all_right(begun)
    by_plan = {outcome.plan: outcome for outcome in begun}
    whole, cut_off = by_plan[Plan("items")], by_plan[CUT_OFF_ITEM]
    assert tuple(whole.phases) == CASES["items"].phases
    assert cut_off.phases[:2] == ["start (killed)", "retry"]
    assert cut_off.asked + by_plan[FIRST_ITEMS].asked
    found = spread(single_kills([whole]))
    again = spread(second_kills([cut_off]))
    # After each six kills of a run a kill of a recovery.
    sample = [plan for n, second in enumerate(again) for plan in (*found[6 * n : 6 * n + 6], second)]
    outcomes = carry_out_sample(matrix, sample, until)
    with capsys.disabled():
        print(f"\n{in_words(matrix.databases.name, outcomes)}, of {len(found)} single kills")


@pytest.mark.timeout(400)
def test_a_kill_among_containers_at_a_sample_of_points(matrix: Matrix, capsys: pytest.CaptureFixture[str]):
    until = time.monotonic() + CONTAINERS_SAMPLE_S
    found = single_kills(undisturbed(matrix, "containers"))
    outcomes = carry_out_sample(matrix, retried_by_both(spread(found)), until)
    with capsys.disabled():
        print(f"\n{in_words(matrix.databases.name, outcomes)}, of {len(found)} single kills")


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_kill_at_every_point(
    tmp_path: Path, postgres_databases: PostgresDatabases, capsys: pytest.CaptureFixture[str]
):
    chains: list[str] = []
    items: list[str] = []
    containers: list[str] = []
    everything: list[Outcome] = []
    for databases in (SqliteDatabases(tmp_path), postgres_databases):
        folder = tmp_path / databases.name
        with Matrix(databases, folder, max(LANES, os.cpu_count() or 1)) as matrix:
            plans = single_kills(undisturbed(matrix, *CHAINS))
            plans += second_kills(recovered(matrix, CUT_OFF_TOOL))
            outcomes = matrix.carry_out(plans)
            assert len(outcomes) == len(plans)
            chains.append(in_words(databases.name, outcomes))

            until = time.monotonic() + ITEMS_SOAK_S
            plans = single_kills(undisturbed(matrix, "items"))
            plans += second_kills(recovered(matrix, CUT_OFF_ITEM))
            of_items = matrix.carry_out(spread(plans), until)
            items.append(f"{in_words(databases.name, of_items)} (of {len(plans)} possible kills)")

            until = time.monotonic() + CONTAINERS_SOAK_S
            plans = retried_by_both(spread(single_kills(undisturbed(matrix, "containers"))))
            of_containers = matrix.carry_out(plans, until)
            containers.append(f"{in_words(databases.name, of_containers)} (of {len(plans)} possible kills)")
        everything += [*outcomes, *of_items, *of_containers]
        with capsys.disabled():
            print(f"\n{chains[-1]}\n{items[-1]}\n{containers[-1]}")
    today = datetime.now(timezone.utc).date().isoformat()
    result = "\n".join(
        [
            f"`make soak`, {today}. Six nodes in a row, with a gate and a tool with side effects, at every point:",
            "",
            *(f"- {line}." for line in chains),
            "",
            "A foreach of 20 items, each with such a tool and a called workflow, two with a gate:",
            "",
            *(f"- {line}." for line in items),
            "",
            "Branches, a called workflow and a fan-out whose nodes are ops, retried by Dagster and by AgentMesh:",
            "",
            *(f"- {line}." for line in containers),
            "",
        ]
    )
    text = PAGE.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{PAGE} has lost the markers of the matrix"
    PAGE.write_text(BLOCK.sub(lambda found: found[1] + result + found[2], text), encoding="utf-8")
    assert_all_right(everything)
