"""The command `agentmesh`: finds the command family, and turns errors into one or two lines and an exit code.

Exit codes: 0 ok, 1 the run or check failed, 2 wrong usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from agentmesh_dagster import __version__
from agentmesh_dagster.cli.context import CliContext
from agentmesh_dagster.errors import AgentMeshError, ApprovalError, DocumentInvalid
from agentmesh_dagster.settings import project_root, project_slug

# Where each command stands; the modules import heavy libraries inside their functions.
COMMANDS = {
    "init": "init:init",
    "db": "db:db",
    "import": "documents:import_",
    "export": "documents:export",
    "validate": "documents:validate",
    "list": "catalog:list_",
    "show": "catalog:show",
    "versions": "catalog:versions",
    "diff": "catalog:diff",
    "stats": "catalog:stats",
    "publish": "publications:publish",
    "unpublish": "publications:unpublish",
    "copy": "definitions:copy",
    "delete": "definitions:delete",
    "activate": "definitions:activate",
    "deactivate": "definitions:deactivate",
    "project": "project:project",
    "audit": "project:audit",
    "run": "run:run",
    "runs": "runs:runs",
    "approvals": "approvals:approvals",
    "events": "events:events",
    "groups": "groups:groups",
    "dev": "dev:dev",
}

# What the store refuses because of what was asked, and not because of the database.
_REFUSALS = frozenset(
    {
        "bad-event",
        "bad-group",
        "edit-conflict",
        "events-full",
        "name-collision",
        "not-json",
        "not-published",
        "nul-character",
        "reference-deleted",
        "slug-taken",
        "still-referenced",
        "system-document",
    }
)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = COMMANDS.get(cmd_name)
        if home is None:
            from agentmesh_dagster.specs.problems import nearest

            near = nearest(cmd_name[:120], COMMANDS)
            if near is not None:
                ctx.fail(f"No such command {cmd_name!r}; did you mean {near!r}?")
            return None
        module, _, attribute = home.partition(":")
        return getattr(import_module(f"agentmesh_dagster.cli.{module}"), attribute)


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="agentmesh")
@click.option(
    "--project", metavar="NAME", help="The project to work on.  [env: AGENTMESH_PROJECT; default: default]"
)
@click.pass_context
def agentmesh(ctx: click.Context, project: str | None) -> None:
    """Agent workflows as Dagster jobs: store, publish, run.

    KIND is one of agent, tool, workflow, network; SLUG is a document's slug.

    Environment: AGENTMESH_DATABASE_URL names the database (default: SQLite in $DAGSTER_HOME, or in
    .agentmesh/ of the project); AGENTMESH_DAGSTER_URL a running webserver that `publish` tells to reload.
    """
    if project:
        # Child processes and the code location read it too.
        os.environ["AGENTMESH_PROJECT"] = project
    ctx.obj = CliContext(root=project_root(), project=project_slug())


def main(args: Sequence[str] | None = None) -> None:
    """The entry point: runs the command and exits."""
    arguments = list(sys.argv[1:] if args is None else args)
    # What a command and the processes that it starts write is its user's alone.
    os.umask(0o077)
    try:
        code = agentmesh.main(args=arguments, prog_name="agentmesh", standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.ClickException as error:
        code = _report_usage(error, as_json="--json" in arguments)
    except AgentMeshError as error:
        code = _report(error, as_json="--json" in arguments)
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to tell it, and nothing may be flushed to it at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        code = _report(_FileTrouble(f"{where}{error.strerror or error}"), as_json="--json" in arguments)
    sys.exit(code if isinstance(code, int) else 0)


class _FileTrouble(AgentMeshError):
    category = "system"
    domain = "cli"
    default_code = "file"


def _report(error: AgentMeshError, *, as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps({"error": error.to_json()}, ensure_ascii=False), err=True)
    elif isinstance(error, DocumentInvalid):
        click.echo(f"error: {error.message}", err=True)
        for problem in error.problems:
            click.echo(f"  {_problem_line(problem)}", err=True)
    elif isinstance(error, ApprovalError):
        from agentmesh_dagster.orchestration.decisions import issue_lines

        click.echo(f"error: {error.message}", err=True)
        # The first stands in the message.
        for line in issue_lines(error)[1:]:
            click.echo(f"  {line}", err=True)
    else:
        click.echo(f"error: {error.message}", err=True)
    return 2 if error.category == "user" or error.code in _REFUSALS else 1


def _problem_line(problem: dict[str, object]) -> str:
    source = f"{problem['source']}: " if problem.get("source") else ""
    path = f"{problem['path']}: " if problem.get("path") else ""
    return f"{source}{path}{problem['message']} ({problem['code']}). {problem['mend']}."


def _report_usage(error: click.ClickException, *, as_json: bool) -> int:
    if as_json:
        problem = {"code": "usage", "domain": "cli", "category": "user", "message": error.format_message()}
        click.echo(json.dumps({"error": problem}, ensure_ascii=False), err=True)
        return 2
    click.echo(f"error: {error.format_message()}", err=True)
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        click.echo(f"`{context.command_path} --help` says how it is used", err=True)
    return 2
