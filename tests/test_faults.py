"""Fault points: inert until armed, counted, and deadly as `kill -9` where they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentmesh_dagster import faults
from agentmesh_dagster.constants import ENV_FAULT, ENV_FAULT_LOG

PROGRAM = """
from agentmesh_dagster.faults import fault_point

try:
    for name in ("a", "b", "a", "a.more", "a"):
        fault_point(name)
        print(name, flush=True)
finally:
    print("finally", flush=True)
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_nothing_happens_where_none_is_armed():
    done = run()
    assert (done.returncode, done.stdout.split()) == (0, ["a", "b", "a", "a.more", "a", "finally"])


@pytest.mark.parametrize(
    ("fault", "reached"),
    [("a#1", []), ("b#1", ["a"]), ("a#2", ["a", "b"]), ("a#3", ["a", "b", "a", "a.more"])],
)
def test_the_process_is_killed_at_the_named_passage_and_cleans_nothing_up(fault: str, reached: list[str]):
    done = run(**{ENV_FAULT: fault})
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, reached)


@pytest.mark.parametrize("fault", ["a#4", "a", "c#1", "a#0"])
def test_a_passage_that_never_comes_kills_nothing(fault: str):
    assert run(**{ENV_FAULT: fault}).returncode == 0


def test_the_log_names_each_passage_up_to_the_deadly_one(tmp_path: Path):
    log = tmp_path / "passed"
    run(**{ENV_FAULT_LOG: str(log)})
    assert log.read_text().split() == ["a#1", "b#1", "a#2", "a.more#1", "a#3"]
    log.unlink()
    assert run(**{ENV_FAULT_LOG: str(log), ENV_FAULT: "a#2"}).returncode == -signal.SIGKILL
    assert log.read_text().split() == ["a#1", "b#1", "a#2"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_armed_by_itself_and_counts_from_one(tmp_path: Path):
    log = tmp_path / "passed"
    child = os.fork()
    if child == 0:
        os.environ[ENV_FAULT] = "a#2"
        os.environ[ENV_FAULT_LOG] = str(log)
        faults.arm_from_environment()
        faults.fault_point("a")
        faults.fault_point("a")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert log.read_text().split() == ["a#1", "a#2"]
    faults.fault_point("a")
    faults.fault_point("a")
