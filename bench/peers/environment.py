"""The virtual environment of the peers, and a process in it that measures what it is asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.measure import Times

REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
_SIDE: Final = Path(__file__).with_name("langgraph_side.py")
_INSTALLED: Final = ".requirements.txt"
"""What was installed into the environment, so that it is done once."""


class PeersUnavailable(Exception):
    """The peers cannot be measured here."""


def make_environment(folder: Path) -> Path:
    """The Python of the peers' virtual environment, which is made where it is missing or differs.

    Raises:
        PeersUnavailable: The packages could not be installed.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted, installed = REQUIREMENTS.read_text(encoding="utf-8"), folder / _INSTALLED
    if python.exists() and installed.exists() and installed.read_text(encoding="utf-8") == wanted:
        return python
    print(f"Installing the peers into {folder}", file=sys.stderr, flush=True)
    _carried_out(
        [sys.executable, "-m", "venv", "--clear", str(folder)], "the virtual environment was not made"
    )
    _carried_out(
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(REQUIREMENTS)],
        f"the packages of {REQUIREMENTS.name} were not installed: this needs PyPI, or an index that pip is set up for",
    )
    installed.write_text(wanted, encoding="utf-8")
    return python


def _carried_out(command: list[str], problem: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        said = "\n".join(errors) or done.stderr.strip()[-2000:]
        raise PeersUnavailable(f"{problem}. `{' '.join(command[1:4])}` said:\n{said}")


class Peer:
    """A process of the peers' Python that runs what it is asked to, warm."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions: dict[str, str] = self._answer()

    def run(self, work: dict[str, Any]) -> Times:
        """Runs it once; `work` as `langgraph_side.Work`.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return Times(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended; what it said stands above")
        return json.loads(line)


@contextmanager
def started_peer(python: Path, folder: Path) -> Iterator[Peer]:
    """Starts the process, which keeps its files in a folder that exists, and ends it afterwards."""
    # -I: nothing of this project, of its environment variables or of the user's packages is seen over there.
    process = subprocess.Popen(
        [str(python), "-I", str(_SIDE), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LANGSMITH_TRACING": "false"},
    )
    try:
        yield Peer(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=60)
