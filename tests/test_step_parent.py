"""The process that step processes are forked from."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

OWNER = """\
import multiprocessing, time

def nothing():
    pass

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agentmesh_dagster.orchestration.step_parent"])
    process = context.Process(target=nothing)
    process.start()
    process.join()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="cannot fork")
def test_a_killed_process_leaves_no_socket_folder(tmp_path: Path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    # Of its own, and short: the path of a socket is bounded.
    folder = Path(f"{os.environ.get('TMPDIR', '/tmp')}/s{os.getpid()}")
    folder.mkdir()
    try:
        environment = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            assert list(folder.glob("pymp-*/listener-*"))
            owner.kill()
            deadline = time.monotonic() + 30
            while list(folder.iterdir()):
                assert time.monotonic() < deadline, f"left behind: {list(folder.rglob('*'))}"
                time.sleep(0.01)
    finally:
        for left in folder.glob("pymp-*/*"):
            left.unlink()
        for left in folder.iterdir():
            left.rmdir()
        folder.rmdir()
