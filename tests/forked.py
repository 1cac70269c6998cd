"""Commands in processes of their own, forked from one that has imported what they need: a start costs no imports.

    done = forked.run(["-m", "agentmesh_dagster", "list"])
    process = forked.start(["-c", "print(1)"])

A command gets arguments, environment, folder and files for its output, as a started Python gets them; what Python
itself reads at its start (PYTHONHASHSEED, PYTHONWARNINGS) is that of all tests. At its end threads are waited for and
exit functions called; Python itself is not taken down, which would take longer than most commands. What a command
imports by itself is tested where one is really started (`test_cli_process`, `test_imports`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any, NoReturn

from agentmesh_dagster.faults import arm_from_environment

# Of no test: what Python reads at its start is the same for all commands.
_ENVIRON = dict(os.environ)


@dataclass
class Forked:
    """A command at work, or ended. A context manager that kills it."""

    server: _Server
    pid: int
    folder: tempfile.TemporaryDirectory[str]
    returncode: int | None = None
    _written: tuple[str, str] | None = None

    def poll(self) -> int | None:
        """How it ended (-9: killed), or None while it is at work."""
        return self._ended(0)

    def wait(self, timeout_s: float = 120.0) -> int:
        """How it ended, once it has."""
        code = self._ended(timeout_s)
        if code is None:
            self.kill()
            raise TimeoutError(f"not ended within {timeout_s:g} s: {self.out}{self.err}")
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal, where it is at work."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it by force, where it is at work."""
        self.send_signal(signal.SIGKILL)
        self._ended(10)

    @property
    def out(self) -> str:
        """What it has written to its standard output so far."""
        return self._written[0] if self._written else self._text("out")

    @property
    def err(self) -> str:
        return self._written[1] if self._written else self._text("err")

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _text(self, name: str) -> str:
        return Path(self.folder.name, name).read_text()

    def _ended(self, timeout_s: float) -> int | None:
        if self.returncode is None and (line := self.server.line(timeout_s)):
            self.returncode = int(line)
            self._written = (self._text("out"), self._text("err"))
            self.folder.cleanup()
            _idle.append(self.server)
        return self.returncode


def start(
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str = "",
) -> Forked:
    """Begins what `python ARGUMENTS` is: `-m MODULE ...`, `-c TEXT ...` or `FILE ...`."""
    server = _idle.pop() if _idle else _Server()
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    for name, text in (("in", input), ("out", ""), ("err", "")):
        Path(folder.name, name).write_text(text)
    job = {
        "arguments": list(arguments),
        "environ": dict(os.environ if environ is None else environ),
        "cwd": str(cwd or Path.cwd()),
        "folder": folder.name,
    }
    return Forked(server, server.fork(job), folder)


def run(arguments: Sequence[str], timeout_s: float = 120.0, **options: Any) -> Forked:
    """A command, once it has ended."""
    with start(arguments, **options) as process:
        process.wait(timeout_s)
        return process


def context() -> ForkServerContext:
    """For `multiprocessing`: processes that have imported the store."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["agentmesh_dagster.store"])
    return made


@dataclass
class _Server:
    """The process that forks commands, one at a time."""

    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_ENVIRON,
            cwd=Path(__file__).parent.parent,
        )
        atexit.register(self.close)

    def fork(self, job: Mapping[str, Any]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        return int(self.line(60))

    def line(self, timeout_s: float) -> str:
        """The next line that it says, or nothing."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout_s)[0]:
            return ""
        line = stdout.readline()
        assert line, "the process that forks the commands has ended"
        return line.decode().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # a command that a failed test has left
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()


_idle: list[_Server] = []


# In the process that forks


def _import_all() -> None:
    import agentmesh_dagster
    from agentmesh_dagster.orchestration.worker_internals import LIBRARIES

    for module in walk_packages(agentmesh_dagster.__path__, "agentmesh_dagster."):
        if ".migrations." not in module.name and not module.name.endswith((".__main__", ".step_parent")):
            import_module(module.name)
    for name in LIBRARIES:
        import_module(name)


def _command(job: Mapping[str, Any]) -> None:
    """Is the command, to its end."""
    folder, arguments = Path(job["folder"]), job["arguments"]
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_APPEND), number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environ"])
    time.tzset()
    arm_from_environment()
    paths = [path for path in job["environ"].get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(Path(__file__).parent)
    sys.path[:] = [*paths, *(path for path in sys.path if path != own)]
    if arguments[0] == "-m":
        sys.path.insert(0, job["cwd"])
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _become(job: Mapping[str, Any]) -> NoReturn:
    code, is_interrupted = 1, False
    try:
        _command(job)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if code and not isinstance(exit_.code, int):
            print(exit_.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        is_interrupted = True
    except BaseException:  # noqa: BLE001 - as Python itself does
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        if is_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code)


def _serve() -> None:
    _import_all()
    gc.freeze()
    requests = os.fdopen(os.dup(0))
    while line := requests.readline():
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
