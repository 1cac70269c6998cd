"""`agentmesh copy | delete | activate | deactivate`: what happens to a definition as a whole."""

from __future__ import annotations

import click

from agentmesh_dagster.cli.catalog import definition_json
from agentmesh_dagster.cli.context import KIND, CliContext, actor, example, json_option, pass_cli, print_json
from agentmesh_dagster.cli.reload import reload_jobs


@click.command(epilog=example("agentmesh copy workflow refund-review refund-review-eu"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.argument("new")
@json_option
@pass_cli
def copy(cli: CliContext, kind: str, slug: str, new: str, as_json: bool) -> None:
    """Copy a definition to another slug.

    Its newest version becomes version 1 of NEW.
    """
    version = cli.store().catalog.copy(cli.project, kind, slug, new, by=actor())
    if as_json:
        print_json({"kind": kind, "slug": new, "version": version.number, "source": slug})
    else:
        click.echo(f"copied {kind} {slug} to {new} (version {version.number}, not published)")


@click.command(epilog=example("agentmesh delete workflow refund-review"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@json_option
@pass_cli
def delete(cli: CliContext, kind: str, slug: str, as_json: bool) -> None:
    """Delete a definition; its runs stay.

    It is archived, with its versions. Refused while something published refers to it. Importing the document
    again brings it back.
    """
    catalog = cli.store().catalog
    was_live = catalog.get(cli.project, kind, slug).published_version is not None
    catalog.delete(cli.project, kind, slug, by=actor())
    if not as_json:
        click.echo(f"deleted {kind} {slug}; versions and runs stay")
    reloaded = reload_jobs(cli.root, [kind] if was_live else [], quiet=as_json)
    if as_json:
        print_json({"kind": kind, "slug": slug, "deleted": True, "reloaded": reloaded})


@click.command(epilog=example("agentmesh activate workflow refund-review"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@json_option
@pass_cli
def activate(cli: CliContext, kind: str, slug: str, as_json: bool) -> None:
    """Let a definition be launched again."""
    _set_active(cli, kind, slug, active=True, as_json=as_json)


@click.command(epilog=example("agentmesh deactivate workflow refund-review"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@json_option
@pass_cli
def deactivate(cli: CliContext, kind: str, slug: str, as_json: bool) -> None:
    """Keep a definition from being launched.

    What is published stays so, for when it is activated again.
    """
    _set_active(cli, kind, slug, active=False, as_json=as_json)


def _set_active(cli: CliContext, kind: str, slug: str, *, active: bool, as_json: bool) -> None:
    definition = cli.store().catalog.set_active(cli.project, kind, slug, active, by=actor())
    if not as_json:
        words = "is active" if active else "is inactive: it cannot be launched"
        click.echo(f"{kind} {slug} {words}")
    is_live = definition.published_version is not None
    reloaded = reload_jobs(cli.root, [kind] if is_live else [], quiet=as_json)
    if as_json:
        print_json({**definition_json(definition), "reloaded": reloaded})
