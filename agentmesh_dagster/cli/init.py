"""`agentmesh init`: a new project."""

from __future__ import annotations

from pathlib import Path

import click

from agentmesh_dagster.cli.context import json_option, print_json


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.option(
    "--postgres", is_flag=True, help="Let Dagster keep its history in PostgreSQL (DAGSTER_POSTGRES_URL)."
)
@json_option
def init(folder: Path, postgres: bool, as_json: bool) -> None:
    """Write a new project into DIR: code location, sensors, resources, and a first workflow.

    Existing files are never overwritten.
    """
    from agentmesh_dagster.scaffold import scaffold
    from agentmesh_dagster.settings import dagster_home

    paths = scaffold(folder, postgres=postgres)
    if as_json:
        names = [str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in paths]
        print_json({"folder": str(folder), "files": names})
        return
    settings = dagster_home(folder) / "dagster.yaml"
    if settings not in paths:
        click.echo(
            f"note: Dagster's settings are those of {settings} (DAGSTER_HOME); docs/deployment.md has what AgentMesh "
            "wants there",
            err=True,
        )
    click.echo(f"wrote {len(paths)} files to {folder}. Next:")
    click.echo(f"  cd {folder}")
    if postgres:
        click.echo("  export DAGSTER_POSTGRES_URL=postgresql+psycopg2://USER:PASSWORD@HOST/dagster")
        click.echo("  export AGENTMESH_DATABASE_URL=postgresql://USER:PASSWORD@HOST/agentmesh")
        click.echo("  agentmesh db upgrade")
    click.echo("  agentmesh import workflows --publish")
    click.echo('  agentmesh run workflow hello --input \'{"name": "Ada"}\'')
    click.echo("  agentmesh dev")
