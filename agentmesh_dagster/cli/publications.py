"""`agentmesh publish | unpublish`: which version is live."""

from __future__ import annotations

import click

from agentmesh_dagster.cli.context import (
    KIND,
    CliContext,
    example,
    json_option,
    pass_cli,
    print_json,
    print_warnings,
)
from agentmesh_dagster.cli.reload import reload_jobs
from agentmesh_dagster.records import Json, Publication

_NOTES = {
    **dict.fromkeys(
        ("agent", "tool"),
        "published workflows keep the version that they have; publish them again to take this one",
    ),
    "network": "this release stores networks and does not run them: no Dagster job was made",
}
"""What publishing a kind does not do."""


@click.command(
    epilog=example('agentmesh publish workflow refund-review --version 2 -m "smaller refunds need no gate"')
)
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Default: the newest.")
@click.option("--message", "-m", default="", help="Why, for the log.")
@json_option
@pass_cli
def publish(cli: CliContext, kind: str, slug: str, version: int | None, message: str, as_json: bool) -> None:
    """Make a version live.

    With all that it refers to. A published workflow is a Dagster job. Runs that have started keep the version
    that they started with. With AGENTMESH_DAGSTER_URL set, the webserver there is told to reload.
    """
    published = cli.authoring(resources=cli.resources()).publish(kind, slug, version=version, message=message)
    if not as_json:
        print_warnings((f"{kind} {slug}", problem) for problem in published.warnings)
        number = published.publication.version
        if published.is_new:
            click.echo(f"published {kind} {slug} version {number}")
        else:
            click.echo(f"{kind} {slug} version {number} is live already; nothing was changed")
        if note := _NOTES.get(kind):
            click.echo(note)
    reloaded = reload_jobs(cli.root, [kind], quiet=as_json, is_changed=published.is_new)
    if as_json:
        warnings = [problem.to_json() for problem in published.warnings]
        facts = {**publication_json(published.publication), "is_new": published.is_new}
        print_json({**facts, "warnings": warnings, "reloaded": reloaded})


@click.command(epilog=example("agentmesh unpublish workflow refund-review"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.option("--message", "-m", default="", help="Why, for the log.")
@json_option
@pass_cli
def unpublish(cli: CliContext, kind: str, slug: str, message: str, as_json: bool) -> None:
    """End what is live under SLUG. Its versions stay, and runs that have started go on."""
    publication = cli.authoring().unpublish(kind, slug, message=message)
    if not as_json:
        click.echo(f"unpublished {kind} {slug} (it was version {publication.version})")
    reloaded = reload_jobs(cli.root, [kind], quiet=as_json)
    if as_json:
        print_json({**publication_json(publication), "reloaded": reloaded})


def publication_json(publication: Publication) -> dict[str, Json]:
    """A publication as `--json` prints it, without its closure."""
    return {
        "publication": publication.id,
        "project": publication.project,
        "kind": publication.kind,
        "slug": publication.slug,
        "version": publication.version,
        "action": publication.action,
        "by": publication.by,
        "at": publication.at,
        "message": publication.message,
    }
