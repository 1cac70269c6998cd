"""Processes killed at random under `agentmesh dev`: every run ends, no finished call is repeated, statuses agree.

A session that went wrong is tried again with its seed: `make soak ARGS="tests/test_random_kills.py -k sqlite"` with
SOAK_SEED=<seed>, and if wished SOAK_RUNS=<how many runs> and SOAK_TARGETS=<what is killed, separated by commas>.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dagster_server import Project
from fake_http import FakeHttp
from fake_provider import FakeProvider
from kill_databases import PostgresDatabases
from random_kill_case import documents
from random_kill_verdict import Verdict
from random_kills import ALL_TARGETS, CALL_S, Plan, RandomKills, failure_report

LEASE_S = 30.0
"""Longer than a loaded machine holds up a worker that lives."""
SEED, RUN_COUNT, CHOSEN_TARGETS = "SOAK_SEED", "SOAK_RUNS", "SOAK_TARGETS"
RUNS = 34
"""Of each session; there are three."""
SETUPS = ("sqlite", "postgresql", "postgresql for Dagster too")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def print_now(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)

    return print_now


@pytest.fixture
def postgres_databases(postgres_server: Callable[[str], str]) -> Iterator[PostgresDatabases]:
    databases = PostgresDatabases(postgres_server)
    yield databases
    databases.close()


@contextmanager
def project_of(setup: str, api_base: str, request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project with its own folder for temporary files, on the databases of a setup."""
    environment = {"AGENTMESH_HTTP_ALLOW": "127.0.0.1"}
    options: tuple[str, ...] = ()
    # Short, for the paths of sockets are bounded.
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        (Path(folder) / "tmp").mkdir()
        environment["TMPDIR"] = str(Path(folder) / "tmp")
        if setup != "sqlite":
            databases: PostgresDatabases = request.getfixturevalue("postgres_databases")
            environment["AGENTMESH_DATABASE_URL"] = databases.make("agentmesh")
        if setup == "postgresql for Dagster too":
            url = databases.make_empty("dagster").replace("postgresql://", "postgresql+psycopg2://")
            # The harness opens the same instance in this process.
            environment["DAGSTER_POSTGRES_URL"] = os.environ["DAGSTER_POSTGRES_URL"] = url
            options = ("--postgres",)
        project = Project.scaffolded(Path(folder) / "project", *options, **environment)
        project.configure(lease_s=LEASE_S, api_base=api_base)
        yield project


def carry_out(plan: Plan, setup: str, request: pytest.FixtureRequest, say: Callable[[str], None]) -> None:
    with (
        FakeProvider(default={"text": "hello", "delay_s": CALL_S}) as provider,
        FakeHttp() as tools,
        project_of(setup, provider.base_url, request) as project,
    ):
        if True:
            project.publish("kills", documents(tools.url))
            if plan.retried_by_dagster:
                yaml = project.folder / ".agentmesh" / "dagster.yaml"
                yaml.write_text(yaml.read_text() + "\nrun_retries: {enabled: true, max_retries: 3}\n")
            with RandomKills(project, provider, tools, plan, say) as kills:
                try:
                    kills.carry_out()
                finally:
                    say(f"{setup}: {kills.progress()}")
                made_again = 0
                for launched in kills.launched:
                    verdict = Verdict(kills, launched)
                    verdict.look()
                    made_again += verdict.made_again
                wrong = [launched for launched in kills.launched if launched.problems]
                say(f"{setup}: {len(kills.launched) - len(wrong)} ended right, {made_again} calls made again")
                if wrong:
                    reports = "\n\n".join(failure_report(kills, launched) for launched in wrong[:5])
                    log = "\n".join(kills.log)
                    pytest.fail(
                        f"{len(wrong)} of {len(kills.launched)} runs went wrong with {SEED}={plan.seed}:\n{reports}\n\n"
                        f"{log}"
                    )


def seed_of(setup: str) -> int:
    given = os.environ.get(SEED)
    return int(given) if given else random.SystemRandom().randrange(10**6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setup", SETUPS)
def test_random_kills(setup: str, request: pytest.FixtureRequest, say: Callable[[str], None]):
    chosen = os.environ.get(CHOSEN_TARGETS, ",".join(ALL_TARGETS)).split(",")
    plan = Plan(
        seed=seed_of(setup),
        runs=int(os.environ.get(RUN_COUNT, RUNS)),
        at_once=4,
        mean_calls=15,
        targets={target: ALL_TARGETS[target] for target in chosen},
        retried_by_dagster=setup == "postgresql",
    )
    carry_out(plan, setup, request, say)
