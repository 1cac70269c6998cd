"""The command as a process: what it imports, pipes, help."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli_project import command, environment, run, write_documents

from agentmesh_dagster.cli.main import agentmesh

LIGHT = [
    ["--help"],
    ["list", "--json"],
    ["import", "docs", "--json"],
    ["validate", "docs"],
    ["publish", "workflow", "greet"],
    ["show", "workflow", "greet"],
    ["runs", "list"],
    ["stats", "workflow", "greet"],
    ["audit"],
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "docs")
    assert run("import", "docs").code == 0
    return tmp_path


@pytest.mark.parametrize("args", LIGHT, ids=" ".join)
def test_commands_that_run_nothing_import_neither_dagster_nor_litellm(folder: Path, args: list[str]):
    code = (
        "import sys\nfrom agentmesh_dagster.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'dagster', 'litellm', 'alembic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_run_by_processes_that_import_for_themselves(folder: Path):
    def started(*args: str) -> str:
        done = subprocess.run(
            command(*args), capture_output=True, text=True, env=environment(), timeout=60, check=True
        )
        return done.stdout

    started("publish", "workflow", "greet")
    ran = json.loads(started("run", "workflow", "greet", "--input", '{"name": "Ada"}', "--json"))
    assert ran["output"] == {"text": "Greet Ada"}
    assert "succeeded" in started("runs", "trace", ran["run_id"])


def test_a_reader_that_goes_away_is_no_traceback(folder: Path):
    for number in range(40):
        Path(f"docs/w{number}.yaml").write_text(
            f"kind: agent\nslug: a{number}\nmodel: offline/echo\n" + "# x\n"
        )
    assert run("import", "docs").code == 0
    script = 'set -o pipefail; "$@" | head -n 1; exit ${PIPESTATUS[0]}'
    done = subprocess.run(
        ["bash", "-c", script, "-", *command("list")], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.startswith("kind\tslug")
    assert done.stderr == ""


def test_a_pipe_that_is_closed_before_the_first_line(folder: Path):
    writer = subprocess.Popen(
        command("list"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(60) == 1


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        path = f"{context.command_path} {name}"
        if isinstance(found, click.Group):
            yield from commands(found, click.Context(found, info_name=name, parent=context))
        else:
            yield path, found


EVERY = dict(commands(agentmesh, click.Context(agentmesh, info_name="agentmesh")))


@pytest.mark.parametrize("path", EVERY)
def test_every_command_says_what_it_does(path: str):
    found = EVERY[path]
    assert found.get_short_help_str(limit=60).rstrip(".").strip()
    takes_json = any("--json" in option.opts for option in found.params)
    assert takes_json or path == "agentmesh dev"


@pytest.mark.parametrize("path", [path for path in EVERY if EVERY[path].epilog])
def test_examples_are_of_their_command_and_fit_its_options(path: str):
    line = (EVERY[path].epilog or "").split("Example:")[1].strip()
    assert line.startswith(path)
    words = shlex.split(line)[len(path.split()) :]
    # A file that an example names need not be there.
    with contextlib.suppress(_NoSuchFile):
        _parse(EVERY[path], path, words)


class _NoSuchFile(Exception):
    pass


def _parse(found: click.Command, path: str, words: list[str]) -> None:
    try:
        found.make_context(path, words)
    except click.BadParameter as error:
        if "does not exist" in error.message:
            raise _NoSuchFile from None
        raise


def test_most_commands_have_an_example():
    missing = {path for path, found in EVERY.items() if "Example:" not in (found.epilog or "")}
    assert missing <= {"agentmesh init", "agentmesh dev", "agentmesh db upgrade", "agentmesh db status"}
