"""Writes docs/cli.md from the help texts of the commands; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from agentmesh_dagster.cli.main import agentmesh

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEADER = """\
# Command line

Written by `scripts/cli_reference.py` from the commands' own help.
"""
WIDTH = 100


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Path and help text of a command and of all below it, in the order of their help."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                child = click.Context(below, info_name=name, parent=context, terminal_width=WIDTH)
                yield from commands(below, child)


def page() -> str:
    """The page as it should be."""
    root = click.Context(agentmesh, info_name="agentmesh", terminal_width=WIDTH)
    sections = [f"## {path}\n\n```text\n{text}\n```\n" for path, text in commands(agentmesh, root)]
    return "\n".join([HEADER, *sections])


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"docs/{PAGE.name} is out of date: run python scripts/cli_reference.py")
