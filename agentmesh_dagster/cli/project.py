"""`agentmesh project | audit`: namespaces, and who did what."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from agentmesh_dagster.cli.context import CliContext, example, json_option, pass_cli, print_json, print_table


@click.group()
def project() -> None:
    """Make projects, and list them.

    A project is a namespace for definitions and runs. `agentmesh --project NAME ...`, or AGENTMESH_PROJECT,
    works on one.
    """


@project.command(epilog=example('agentmesh project create billing --name "Billing team"'))
@click.argument("slug")
@click.option("--name", default="", help="For people; default: the slug.")
@json_option
@pass_cli
def create(cli: CliContext, slug: str, name: str, as_json: bool) -> None:
    """Make a project."""
    made = cli.store().catalog.create_project(slug, name)
    if as_json:
        print_json(asdict(made))
    else:
        click.echo(f"made project {made.slug}")


@project.command("list", epilog=example("agentmesh project list"))
@json_option
@pass_cli
def list_projects(cli: CliContext, as_json: bool) -> None:
    """List the projects of the database."""
    found = cli.store().catalog.list_projects()
    if as_json:
        print_json([asdict(each) for each in found])
        return
    print_table(
        ("slug", "name", "created"), [(p.slug, p.name, p.created_at) for p in found], empty="no projects"
    )


@click.command(epilog=example("agentmesh audit --entity workflow/refund-review --action publish"))
@click.option("--entity", metavar="KIND/SLUG|run/ID", help="What was changed.")
@click.option("--actor", help="Who did it.")
@click.option("--action", help="What was done, such as publish.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(min=1), help="At most so many.")
@json_option
@pass_cli
def audit(
    cli: CliContext, entity: str | None, actor: str | None, action: str | None, limit: int, as_json: bool
) -> None:
    """Show who did what, the newest first."""
    found = cli.store().audit.list(cli.project, entity=entity, actor=actor, action=action, limit=limit)
    if not found:
        cli.check_project()
    if as_json:
        print_json([asdict(row) for row in found])
        return
    print_table(
        ("at", "actor", "action", "entity", "version", "detail"),
        [
            (
                row.at,
                row.actor,
                row.action,
                row.entity,
                row.version,
                "" if row.detail is None else json.dumps(row.detail, ensure_ascii=False),
            )
            for row in found
        ],
        empty="nothing was done yet that fits",
    )
