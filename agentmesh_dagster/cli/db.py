"""`agentmesh db`: the database's schema."""

from __future__ import annotations

import click

from agentmesh_dagster.cli.context import CliContext, actor, json_option, pass_cli, print_json
from agentmesh_dagster.settings import database_url


@click.group()
def db() -> None:
    """Migrate the database, or say where it stands."""


@db.command()
@json_option
@pass_cli
def upgrade(cli: CliContext, as_json: bool) -> None:
    """Bring the database's schema up to date, and store what installed packages supply."""
    from agentmesh_dagster.authoring import Authoring
    from agentmesh_dagster.store import open_store

    with open_store(database_url(cli.root), upgrade=True) as store:
        status = store.status()
        Authoring(store, cli.project, actor=actor()).sync_system()
    if as_json:
        print_json({"revision": status.current, "head": status.head, "up_to_date": True})
    else:
        click.echo(f"the database is at revision {status.current}")


@db.command()
@json_option
@pass_cli
def status(cli: CliContext, as_json: bool) -> None:
    """Say which revision the schema has and which this version needs. Exits with 1 when they differ."""
    from agentmesh_dagster.store import schema_status

    found = schema_status(database_url(cli.root))
    if as_json:
        print_json({"revision": found.current, "head": found.head, "up_to_date": found.is_up_to_date})
    else:
        words = "up to date" if found.is_up_to_date else "not up to date: run `agentmesh db upgrade`"
        click.echo(f"revision {found.current or 'none'}, this version needs {found.head}: {words}")
    if not found.is_up_to_date:
        raise click.exceptions.Exit(1)
