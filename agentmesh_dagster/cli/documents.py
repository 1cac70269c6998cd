"""`agentmesh import | export | validate`: documents in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from agentmesh_dagster.cli.context import (
    KIND,
    CliContext,
    example,
    json_option,
    pass_cli,
    print_json,
    print_table,
    print_warnings,
    problem_lines,
)
from agentmesh_dagster.cli.reload import reload_jobs
from agentmesh_dagster.constants import KINDS
from agentmesh_dagster.errors import DefinitionError

if TYPE_CHECKING:
    from agentmesh_dagster.authoring import Report
    from agentmesh_dagster.specs.documents import Document
    from agentmesh_dagster.store import Store
    from agentmesh_dagster.validation.bounds import Explanation, NodeBound

_paths = click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path)
)


@click.command("import", epilog=example("agentmesh import packs/support_triage --publish"))
@_paths
@click.option("--publish", is_flag=True, help="Make what is imported live, too.")
@click.option("--message", "-m", default="", help="Why, for the versions and the log.")
@json_option
@pass_cli
def import_(cli: CliContext, paths: tuple[Path, ...], publish: bool, message: str, as_json: bool) -> None:
    """Store the documents of files and folders.

    Each becomes a new version; all are stored, or none. A document that equals its newest version makes no
    new one. Documents may refer to each other in any order. Folders are searched for .yaml, .yml and .json
    files.
    """
    authoring = cli.authoring(resources=cli.resources())
    # First, so that the documents may refer to what packages supply.
    authoring.sync_system()
    stored = authoring.import_paths(paths, publish=publish, message=message)
    if not as_json:
        print_warnings((f"{item.kind} {item.slug}", warning) for item in stored for warning in item.warnings)
        rows = [
            (
                item.kind,
                item.slug,
                item.version,
                "stored" if item.is_new else "unchanged",
                item.publication is not None,
            )
            for item in stored
        ]
        print_table(("kind", "slug", "version", "result", "published"), rows, empty="nothing was stored")
    live = [item.kind for item in stored if item.publication is not None]
    reloaded = reload_jobs(cli.root, live, quiet=as_json)
    if as_json:
        print_json(
            [
                {
                    "kind": item.kind,
                    "slug": item.slug,
                    "version": item.version,
                    "is_new": item.is_new,
                    "publication": None if item.publication is None else item.publication.id,
                    "warnings": [warning.to_json() for warning in item.warnings],
                    "reloaded": None if item.publication is None else reloaded,
                }
                for item in stored
            ]
        )


@click.command(epilog=example("agentmesh export workflow refund-review -o refund-review.yaml"))
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Default: the newest.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write to FILE, not to stdout."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(("yaml", "json")),
    help="Default: as the end of FILE says, otherwise yaml.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@pass_cli
def export(
    cli: CliContext,
    kind: str,
    slug: str,
    version: int | None,
    output: Path | None,
    form: Literal["yaml", "json"] | None,
    as_json: bool,
) -> None:
    """Write a document in its canonical form.

    The same bytes, wherever it is stored.
    """
    if as_json and form == "yaml":
        raise click.UsageError("--json and --format yaml exclude each other")
    is_json = as_json or form == "json" or (form is None and output is not None and output.suffix == ".json")
    text = cli.authoring().export(kind, slug, version=version, format="json" if is_json else "yaml")
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    try:
        output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise DefinitionError(
            f"cannot write {str(output)!r}: {error.strerror}; name another file with -o", code="unwritable"
        ) from None
    click.echo(f"wrote {output}", err=True)


@click.command(epilog=example("agentmesh validate workflows/ agents/triage.yaml"))
@click.argument("paths", nargs=-1, required=True, metavar="PATH... | KIND SLUG")
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Of KIND SLUG; default: the newest.")
@click.option(
    "--explain",
    "explains",
    is_flag=True,
    help="Show how many steps and model calls a run of each workflow may come to.",
)
@json_option
@pass_cli
def validate(
    cli: CliContext, paths: tuple[str, ...], version: int | None, explains: bool, as_json: bool
) -> None:
    """Check documents, and print every problem.

    Each problem with its place and what to do, as publish would tell it. Nothing is stored. Exits with 1 when
    there are errors; warnings never block. KIND SLUG checks a stored document, in its newest version.

    --explain adds the worst case of one run of each workflow without errors. Steps are the rows of nodes,
    items, iterations and branches. Model calls count each model of a list that is tried in turn, retries, and
    repairs of objects. A node's numbers are those of one pass of its level. Of ways that exclude each other
    the costliest counts. Loops count max_iterations, foreach nodes the length of their list or the maxItems
    of the schema it comes from; what has no bound is named. on_failure and finally are in the total, and runs
    started with async are not.
    """
    store = cli.store_to_read()
    if _is_stored(paths):
        kind, slug = paths
        report = cli.authoring(store, resources=cli.resources()).check_stored(kind, slug, version=version)
        documents = (
            [_stored_document(store, cli.project, kind, slug, version)]
            if explains and not report.errors
            else [None]
        )
    else:
        if version is not None:
            raise click.UsageError("--version goes with KIND SLUG")
        files = [Path(path) for path in paths]
        missing = next((path for path in files if not path.exists()), None)
        if missing is not None:
            raise click.BadParameter(f"Path {str(missing)!r} does not exist.", param_hint="PATH...")
        report = cli.authoring(store, resources=cli.resources()).check(files)
        documents = _documents(files, report) if explains else []
    explained = (
        list(_explained(store, cli.project, documents)) if explains else [None] * len(report.documents)
    )
    if as_json:
        print_json(
            {
                "documents": [
                    {
                        "source": document.source,
                        "kind": document.kind,
                        "slug": document.slug,
                        "problems": [problem.to_json() for problem in document.problems],
                        **({"explain": found.to_json() if found else None} if explains else {}),
                    }
                    for document, found in zip(report.documents, explained, strict=True)
                ],
                "errors": len(report.errors),
                "warnings": len(report.warnings),
            }
        )
    else:
        _print_report(report)
        for document, found in zip(report.documents, explained, strict=True):
            if found is not None:
                click.echo()
                _print_explanation(f"workflow {document.slug!r} ({document.source})", found)
    if report.errors:
        raise click.exceptions.Exit(1)


def _is_stored(words: Sequence[str]) -> bool:
    """Whether the words are a kind and a slug, and no files."""
    return len(words) == 2 and words[0] in KINDS and not Path(words[0]).exists()


def _stored_document(store: Store, project: str, kind: str, slug: str, version: int | None) -> Document:
    from agentmesh_dagster.authoring import parse_stored

    return parse_stored(store.catalog.get_version(project, kind, slug, version))


def _explained(
    store: Store, project: str, documents: Sequence[Document | None]
) -> Iterator[Explanation | None]:
    """The worst case of each document; None for what is no workflow, or has errors."""
    from agentmesh_dagster.authoring import StoreLibrary
    from agentmesh_dagster.runtime.registry import node_configs
    from agentmesh_dagster.specs.documents import WorkflowSpec
    from agentmesh_dagster.specs.resolve import DocumentLibrary
    from agentmesh_dagster.validation.bounds import explain

    beside = [document for document in documents if document is not None]
    library = DocumentLibrary(beside, StoreLibrary(store, project))
    for document in documents:
        is_workflow = isinstance(document, WorkflowSpec)
        yield explain(document, library, node_configs=node_configs()) if is_workflow else None


def _documents(paths: Sequence[Path], report: Report) -> list[Document | None]:
    """The documents of a report, which holds the files that cannot be read first; None where there are errors."""
    from agentmesh_dagster.runtime.notify.registry import notifier_configs
    from agentmesh_dagster.runtime.registry import node_configs
    from agentmesh_dagster.specs.loading import LoadedDocument, document_files, load_path
    from agentmesh_dagster.validation import validate_raw

    loaded: list[LoadedDocument] = []
    for file in [file for path in paths for file in document_files(path)]:
        try:
            loaded += load_path(file)
        except DefinitionError:
            # The report says so.
            continue
    found = validate_raw(
        [document.data for document in loaded],
        node_configs=node_configs(),
        notify_configs=notifier_configs(),
    )
    read = [source.checked.document for source in found]
    every = [*[None] * (len(report.documents) - len(read)), *read]
    return [
        None if any(problem.severity == "error" for problem in of_report.problems) else document
        for of_report, document in zip(report.documents, every, strict=True)
    ]


def _print_explanation(title: str, found: Explanation) -> None:
    click.secho(f"{title}, at worst: {found.count}", bold=True)
    if found.why:
        click.echo(f"  {found.why}")
    places: dict[str, list[str]] = {}
    for name, place in found.unbounded:
        places.setdefault(str(place), []).append(name.replace("_", " "))
    for place, names in places.items():
        click.secho(f"  {', '.join(names)} unbounded: {place}", fg="yellow")
    rows = [row for node in found.nodes for row in _rows(node, 0)]
    print_table(("node", "type", "steps", "model calls", "why"), rows, empty="no nodes")


def _rows(node: NodeBound, depth: int) -> Iterator[tuple[object, ...]]:
    yield f"{'  ' * depth}{node.key}", node.type, node.count.steps, node.count.model_calls, node.why
    for inner in node.nodes:
        yield from _rows(inner, depth + 1)


def _print_report(report: Report) -> None:
    for source, documents in groupby(report.documents, key=lambda document: document.source):
        problems = [problem for document in documents for problem in document.problems]
        if not problems:
            continue
        click.secho(source, bold=True)
        for severity, color in (("error", "red"), ("warning", "yellow")):
            for line in problem_lines(problem for problem in problems if problem.severity == severity):
                click.secho(f"  {line}", fg=color)
    counts = (
        f"{_count(len(report.documents), 'document')}, {_count(len(report.errors), 'error')}, "
        f"{_count(len(report.warnings), 'warning')}"
    )
    click.echo(counts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
