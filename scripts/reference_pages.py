"""Writes the pages of the guide that code knows best: docs/cli.md and docs/rules.md.

With `--check` it writes nothing, and fails where a page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from agentmesh_dagster.cli.main import agentmesh
from agentmesh_dagster.validation import rules_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
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


def cli_page() -> str:
    """Every command's help."""
    root = click.Context(agentmesh, info_name="agentmesh", terminal_width=WIDTH)
    sections = [f"## {path}\n\n```text\n{text}\n```\n" for path, text in commands(agentmesh, root)]
    return "\n".join(["# Command line\n\nWritten from the commands' own help.\n", *sections])


def rules_page() -> str:
    """Every rule of the validation."""
    intro = "What `agentmesh validate` checks, and `import` before it stores anything. Warnings never block."
    return f"# Rules for documents\n\n{intro}\n\n{rules_table()}\n"


PAGES = {"cli.md": cli_page, "rules.md": rules_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        if "--check" not in sys.argv[1:]:
            (DOCS / name).write_text(page(), encoding="utf-8")
        elif not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != page():
            sys.exit(f"docs/{name} is out of date: run python scripts/reference_pages.py")
