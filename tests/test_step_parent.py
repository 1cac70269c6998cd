"""The process that step processes are forked from."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

OWNER = """\
import multiprocessing, multiprocessing.forkserver, sys

def nothing():
    pass

def start(context):
    process = context.Process(target=nothing)
    process.start()
    process.join()

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agentmesh_dagster.orchestration.step_parent"])
    start(context)
    print("ready", flush=True)
    for line in sys.stdin:
        multiprocessing.forkserver._forkserver._stop()
        start(context)
"""

pytestmark = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="cannot fork"
)


@pytest.fixture
def folder():
    # Of its own, and short: the path of a socket is bounded.
    made = Path(f"{os.environ.get('TMPDIR', '/tmp')}/s{os.getpid()}")
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture
def owner(tmp_path: Path, folder: Path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert list(folder.glob("pymp-*/listener-*"))
        yield process
        process.kill()


def becomes_empty(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while list(folder.iterdir()):
        assert time.monotonic() < deadline, f"left behind: {list(folder.rglob('*'))}"
        time.sleep(0.01)


def test_a_killed_process_leaves_no_socket_folder(owner: subprocess.Popen[str], folder: Path):
    owner.kill()
    becomes_empty(folder)


@pytest.mark.parametrize("lines", ["", "begin another\n"])
def test_the_folder_stays_while_the_process_that_made_it_lives(
    owner: subprocess.Popen[str], folder: Path, lines: str
):
    _, errors = owner.communicate(lines, timeout=60)
    assert (owner.returncode, errors) == (0, "")
    becomes_empty(folder)
