"""What the tests of the command line share: the command itself, in this process or another, and small documents."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked

from agentmesh_dagster.cli.main import main

AGENT = """\
kind: agent
slug: helper
model: offline/echo
instructions: You are brief.
"""

WORKFLOW = """\
kind: workflow
slug: greet
name: Greet
category: demo
tags: [first, second]
input_schema:
  type: object
  required: [name]
  properties:
    name: {type: string}
nodes:
  - {id: start, type: start}
  - id: ask
    type: agent
    config: {agent: helper, prompt: "Greet {{ input.name }}"}
    timeout_s: 30
  - id: end
    type: end
    config: {output: {text: "{{ steps.ask.output.text }}"}}
edges:
  - {source: start, target: ask}
  - {source: ask, target: end}
"""

# `first` counts its calls in a file; `second` fails until the file `mended` is there, or waits while `hold` is.
FLAKY = """\
kind: workflow
slug: flaky
input_schema: {type: object}
nodes:
  - {id: start, type: start}
  - {id: first, type: code, config: {function: "flaky_code:first", input: {}}, timeout_s: 60}
  - {id: second, type: code, config: {function: "flaky_code:second", input: {}}, timeout_s: 60}
  - {id: end, type: end, config: {output: {version: 1, got: "{{ steps.second.output }}"}}}
edges:
  - {source: start, target: first}
  - {source: first, target: second}
  - {source: second, target: end}
"""

FLAKY_CODE = """\
import asyncio
from pathlib import Path


def first():
    with open("calls", "a") as file:
        file.write("x")
    return 1


async def second():
    while Path("hold").exists():
        Path("held").touch()
        await asyncio.sleep(0.05)
    if not Path("mended").exists():
        raise ValueError("not mended yet")
    return "fine"
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error that `--json` puts on stderr."""
        return json.loads(self.err)["error"]


def call(capsys: Any, *args: str) -> Outcome:
    """The command in this process."""
    capsys.readouterr()
    code = 0
    try:
        main(list(args))
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 0
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "agentmesh_dagster", *args]


def run(*args: str, **options: Any) -> Outcome:
    """The command in a process of its own, which is forked."""
    done = start(*args, **options)
    return Outcome(done.wait(), done.out, done.err)


def start(*args: str, **options: Any) -> forked.Forked:
    """Such a command at work."""
    return forked.start(["-m", "agentmesh_dagster", *args], environ=environment(), **options)


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([str(Path.cwd()), root, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "AGENTMESH_FUNCTION_MODULES": "flaky_code,typed_code"}


def write_documents(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "helper.yaml").write_text(AGENT)
    (folder / "greet.yaml").write_text(WORKFLOW)
