"""`agentmesh groups`: who belongs to the groups that approvals name."""

from __future__ import annotations

import click

from agentmesh_dagster.cli.context import (
    CliContext,
    actor,
    example,
    json_option,
    pass_cli,
    print_json,
    print_table,
)
from agentmesh_dagster.constants import GROUP_PREFIX


@click.group()
def groups() -> None:
    """Say who belongs to which group.

    Approvals name groups among their `assignees` as `group:NAME`. A change holds for open approvals too.
    """


@groups.command("set", epilog=example("agentmesh groups set finance jane john"))
@click.argument("name")
@click.argument("members", metavar="MEMBER...", nargs=-1, required=True)
@json_option
@pass_cli
def set_(cli: CliContext, name: str, members: tuple[str, ...], as_json: bool) -> None:
    """Make a group, or replace its members."""
    name = name.removeprefix(GROUP_PREFIX)
    cli.store().groups.set(cli.project, name, members, by=actor())
    if as_json:
        print_json({"group": name, "members": list(cli.store().groups.all(cli.project)[name])})
    else:
        click.echo(f"group {name}: {', '.join(dict.fromkeys(members))}")


@groups.command("list", epilog=example("agentmesh groups list"))
@json_option
@pass_cli
def list_(cli: CliContext, as_json: bool) -> None:
    """List the groups of the project."""
    found = cli.store().groups.all(cli.project)
    if not found:
        cli.check_project()
    if as_json:
        print_json([{"group": name, "members": list(members)} for name, members in found.items()])
        return
    print_table(("group", "members"), list(found.items()), empty=f"project {cli.project!r} has no groups")


@groups.command(epilog=example("agentmesh groups remove finance"))
@click.argument("name")
@json_option
@pass_cli
def remove(cli: CliContext, name: str, as_json: bool) -> None:
    """Remove a group.

    Approvals that name it lose those who may decide only because of it.
    """
    name = name.removeprefix(GROUP_PREFIX)
    cli.store().groups.remove(cli.project, name, by=actor())
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed group {name}")
