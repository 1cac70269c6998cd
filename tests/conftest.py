"""What holds for all tests: no settings or keys from outside, and no connection to another machine."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOREIGN = re.compile(
    r"AGENTMESH_.*|DAGSTER_.*|LITELLM_.*|AWS_.*|AZURE_.*|GOOGLE_.*|VERTEX.*|OPENAI_.*|ANTHROPIC_.*"
    r"|.*_API_KEY|.*_API_TOKEN|.*_API_BASE|HF_TOKEN|(HTTPS?|ALL|NO)_PROXY|PG[A-Z]+",
    re.IGNORECASE,
)
_GUARD = str(Path(__file__).parent / "network_guard")

# At import and not in a fixture: what a test module imports must not see them either.
for _name in [name for name in os.environ if _FOREIGN.fullmatch(name)]:
    del os.environ[_name]
os.environ["DAGSTER_DISABLE_TELEMETRY"] = "yes"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_GUARD, os.environ.get("PYTHONPATH")]))
sys.path.insert(0, _GUARD)

# Where memory is a folder, tests and what they start keep their files there: Dagster opens and flushes a SQLite file
# for each event.
_memory = Path("/dev/shm")
_folder: str | None = None
if "TMPDIR" not in os.environ and os.access(_memory, os.W_OK) and shutil.disk_usage(_memory).free > 4 * 2**30:
    _folder = tempfile.mkdtemp(prefix="agentmesh-tests-", dir=_memory)
    os.environ["TMPDIR"] = tempfile.tempdir = _folder

import network_guard  # noqa: E402 - its folder is on the path from here on

network_guard.install()

# The databases that the tests of the store run on, as fixtures for all tests.
pytest_plugins = ["store_fixtures"]


def pytest_sessionfinish(exitstatus: int) -> None:
    # What failed tests have left is there to look at.
    if _folder is not None and exitstatus == 0:
        if util := sys.modules.get("multiprocessing.util"):
            # Otherwise it would miss its own folder in this one when Python ends.
            util._run_finalizers()
        shutil.rmtree(_folder, ignore_errors=True)


# A worker that begins one of these last works on while the other has nothing left to do.
_LONG = (
    "test_bench.py",
    "test_walker_property.py",
    "test_launcher.py",
    "test_kill_matrix.py",
    "test_pinned_jobs.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONG)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Commands that a test calls in this process set variables, `DAGSTER_HOME` for one, that are its own."""
    before = dict(os.environ)
    yield
    before["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    # The process that a test has forked its steps from has that test's environment. Python has no public way to end
    # it; it ends when all that it has forked have.
    forkserver = sys.modules.get("multiprocessing.forkserver")
    if forkserver is not None:
        for process in multiprocessing.active_children():
            process.kill()
        server = forkserver._forkserver
        if server._forkserver_pid is not None:
            # At its own end it would wait for that of this process, whose folder it removes.
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


@pytest.fixture(autouse=True)
def no_load_context() -> Iterator[None]:
    """Dagster keeps how a process loaded its first code location, and tests load many."""
    yield
    module = sys.modules.get("dagster._core.definitions.definitions_load_context")
    if module is not None:
        module.DefinitionsLoadContext._instance = None
