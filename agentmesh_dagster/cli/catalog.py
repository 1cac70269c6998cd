"""`agentmesh list | show | versions | diff | stats`: what is stored, and what its runs came to."""

from __future__ import annotations

from dataclasses import asdict

import click

from agentmesh_dagster.cli.context import (
    KIND,
    CliContext,
    cell,
    example,
    json_option,
    pass_cli,
    print_facts,
    print_json,
    print_table,
)
from agentmesh_dagster.records import Definition, Json, Version


@click.command("list", epilog=example("agentmesh list workflow --published --tag demo"))
@click.argument("kind", type=KIND, metavar="[KIND]", required=False)
@click.option("--category", help="Exactly this category.")
@click.option("--tag", help="With this tag.")
@click.option("--text", help="With this text in slug, name or description.")
@click.option("--active/--inactive", default=None, help="Those that may be launched, or those that may not.")
@click.option("--published/--unpublished", default=None, help="Those with a live version, or those without.")
@click.option("--template/--no-template", default=None, help="Templates alone, or none of them.")
@click.option("--archived", is_flag=True, help="Deleted ones too.")
@json_option
@pass_cli
def list_(
    cli: CliContext,
    kind: str | None,
    category: str | None,
    tag: str | None,
    text: str | None,
    active: bool | None,
    published: bool | None,
    template: bool | None,
    archived: bool,
    as_json: bool,
) -> None:
    """List the definitions of the project.

    Those of one KIND, or all. A table on a terminal, tab-separated lines into a pipe.
    """
    store = cli.store_to_read()
    found = store.catalog.list(
        cli.project,
        kind,
        category=category,
        tag=tag,
        text=text,
        active=active,
        published=published,
        template=template,
        include_archived=archived,
    )
    if not found:
        cli.check_project(store)
    if as_json:
        print_json([definition_json(definition) for definition in found])
        return
    columns = ["slug", "name", "version", "published", "active", "tags", "updated"]
    rows: list[list[object]] = [
        [d.slug, d.name, d.latest_version, d.published_version, d.is_active, d.tags, d.updated_at]
        for d in found
    ]
    if kind is None:
        columns = ["kind", *columns]
        rows = [[definition.kind, *row] for definition, row in zip(found, rows, strict=True)]
    if archived:
        columns = [*columns, "deleted"]
        rows = [[*row, definition.archived_at] for definition, row in zip(found, rows, strict=True)]
    print_table(columns, rows, empty=f"no {kind or 'definition'} in project {cli.project!r} fits")


@click.command(epilog=example("agentmesh show workflow refund-review --version 2"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Default: the newest.")
@json_option
@pass_cli
def show(cli: CliContext, kind: str, slug: str, version: int | None, as_json: bool) -> None:
    """Show a definition and its document."""
    store = cli.store_to_read()
    catalog = store.catalog
    definition = catalog.get(cli.project, kind, slug)
    stored = catalog.get_version(cli.project, kind, slug, version)
    if as_json:
        print_json(
            {
                **definition_json(definition),
                "version": version_json(stored, definition),
                "document": stored.document,
            }
        )
        return
    print_facts(
        {
            "kind": definition.kind,
            "slug": definition.slug,
            "name": definition.name,
            "description": definition.description,
            "type": definition.type,
            "category": definition.category,
            "tags": definition.tags,
            "active": definition.is_active,
            "template": definition.is_template,
            "owner": definition.owner,
            "created": f"{cell(definition.created_at)} by {definition.created_by}",
            "updated": f"{cell(definition.updated_at)} by {definition.updated_by}",
            "deleted": definition.archived_at,
            "newest version": definition.latest_version,
            "published version": definition.published_version,
        }
    )
    click.echo()
    click.secho(f"# version {stored.number}, {cell(stored.created_at)} by {stored.created_by}", dim=True)
    click.echo(cli.authoring(store).export(kind, slug, version=stored.number), nl=False)


@click.command(epilog=example("agentmesh versions workflow refund-review"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@json_option
@pass_cli
def versions(cli: CliContext, kind: str, slug: str, as_json: bool) -> None:
    """List a definition's versions."""
    catalog = cli.store_to_read().catalog
    definition = catalog.get(cli.project, kind, slug)
    found = catalog.versions(cli.project, kind, slug)
    if as_json:
        print_json([version_json(version, definition) for version in found])
        return
    print_table(
        ("version", "published", "created", "by", "hash", "message"),
        [
            (
                v.number,
                v.number == definition.published_version,
                v.created_at,
                v.created_by,
                v.hash[:12],
                v.message,
            )
            for v in found
        ],
        empty="no versions",
    )


@click.command(epilog=example("agentmesh diff workflow refund-review 1 2"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.argument("first", metavar="V1", type=click.IntRange(min=1))
@click.argument("second", metavar="V2", type=click.IntRange(min=1))
@json_option
@pass_cli
def diff(cli: CliContext, kind: str, slug: str, first: int, second: int, as_json: bool) -> None:
    """Show how two versions differ.

    A unified diff of their YAML: what changed from V1 to V2.
    """
    text = cli.authoring(cli.store_to_read()).diff(kind, slug, first, second)
    if as_json:
        print_json(
            {"kind": kind, "slug": slug, "first": first, "second": second, "equal": not text, "diff": text}
        )
        return
    if not text:
        click.echo(f"versions {first} and {second} are equal", err=True)
    for line in text.splitlines():
        click.secho(line, fg=_line_color(line))


def _line_color(line: str) -> str | None:
    if line.startswith(("+++", "---")):
        return None
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])


@click.command(epilog=example("agentmesh stats workflow refund-review"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@json_option
@pass_cli
def stats(cli: CliContext, kind: str, slug: str, as_json: bool) -> None:
    """Show what a definition's runs came to.

    Over all its versions.
    """
    store = cli.store_to_read()
    # A slug that was mistyped is an error, and not a definition without runs.
    store.catalog.get(cli.project, kind, slug)
    found = store.runs.stats(cli.project, kind, slug)
    if as_json:
        print_json({"kind": kind, "slug": slug, **asdict(found)})
        return
    print_facts(
        {
            "runs": found.runs,
            **{f"  {status}": count for status, count in sorted(found.by_status.items())},
            "success rate": None if found.success_rate is None else f"{found.success_rate:.1%}",
            "mean duration": _seconds(found.mean_duration_ms),
            "p95 duration": _seconds(found.p95_duration_ms),
            "tokens": f"{found.input_tokens} in, {found.output_tokens} out",
            "cost": f"{found.cost_usd:.6f} USD",
            "last run": found.last_run_id and f"{found.last_run_id}, {cell(found.last_run_at)}",
        }
    )


def _seconds(duration_ms: float | None) -> str | None:
    return None if duration_ms is None else f"{duration_ms / 1000:.2f} s"


def definition_json(definition: Definition) -> dict[str, Json]:
    """A definition as `--json` prints it."""
    return {**asdict(definition), "tags": list(definition.tags)}


def version_json(version: Version, definition: Definition) -> dict[str, Json]:
    """A version as `--json` prints it, without its document."""
    return {
        "number": version.number,
        "hash": version.hash,
        "message": version.message,
        "created_by": version.created_by,
        "created_at": version.created_at,
        "published": version.number == definition.published_version,
    }
