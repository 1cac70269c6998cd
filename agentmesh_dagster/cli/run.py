"""`agentmesh run`: a published workflow, through Dagster, in this process."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import click

from agentmesh_dagster.cli.context import KIND, CliContext, actor, json_option, pass_cli, print_json, read_json_option
from agentmesh_dagster.cli.run_view import print_run, run_json, steps_table
from agentmesh_dagster.errors import AgentMeshError, DefinitionError, NotFound
from agentmesh_dagster.records import Json, RunStatus

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.local_run import LocalRun
    from agentmesh_dagster.records import Publication
    from agentmesh_dagster.store import Store


@click.command()
@click.argument("kind", type=KIND)
@click.argument("slug")
@click.option("--input", "input_text", metavar="JSON|@FILE", help="The run's input; `-` reads standard input.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="A tag of the Dagster run; may be repeated.")
@json_option
@pass_cli
def run(cli: CliContext, kind: str, slug: str, input_text: str | None, tags: tuple[str, ...], as_json: bool) -> None:
    """Run what is published under SLUG through Dagster on this machine, wait, and show the steps.

    Exits with 0 when the run succeeded, 1 when it failed or was canceled.
    """
    value = read_json_option(input_text, "--input")
    publication = _published(cli, kind, slug)
    _check_input(publication, value)
    result = _execute(cli, publication, value, _tags(tags), show_progress=not as_json and sys.stderr.isatty())
    if result.run is None:
        raise _NeverStarted(
            f"the Dagster run {result.dagster_run_id} ended as {result.dagster_status} before its first step; "
            "see its log in the Dagster UI (agentmesh dev)"
        )
    steps = cli.store().runs.steps(result.run.id)
    if as_json:
        print_json(run_json(result.run, steps))
    else:
        print_run(result.run, steps)
    if result.run.status not in (RunStatus.SUCCEEDED, RunStatus.WAITING):
        raise click.exceptions.Exit(1)


class _NeverStarted(AgentMeshError):
    category = "system"
    default_code = "never-started"


def _published(cli: CliContext, kind: str, slug: str) -> Publication:
    publication = cli.store().publications.live_one(cli.project, kind, slug)
    if publication is None:
        raise NotFound(
            f"no {kind} {slug!r} is published in project {cli.project!r}: "
            f"`agentmesh list {kind}` shows what is stored, `agentmesh publish {kind} {slug}` publishes it",
            code="not-published",
        )
    if kind != "workflow":
        raise DefinitionError(f"a {kind} is not run by itself: put it into a workflow, and run that", code="not-runnable")
    return publication


def _check_input(publication: Publication, value: Json) -> None:
    from agentmesh_dagster.compiler.snapshot import construct_pinned
    from agentmesh_dagster.specs.schema import fill_and_coerce, validate_value

    schema = construct_pinned(publication).workflow.input_schema
    issues = validate_value(schema, fill_and_coerce(schema, value))
    if issues:
        lines = "\n".join(f"  {issue.path}: {issue.message}" for issue in issues)
        raise DefinitionError(f"--input does not fit the input_schema of {publication.slug!r}:\n{lines}", code="run-input")


def _tags(pairs: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is no KEY=VALUE", param_hint="--tag")
        found[key] = value
    return found


def _execute(
    cli: CliContext, publication: Publication, value: Json, tags: dict[str, str], *, show_progress: bool
) -> LocalRun:
    # Dagster's own log goes to the event log; the terminal shows the steps.
    os.environ.setdefault("AGENTMESH_CONSOLE_LOG_LEVEL", "CRITICAL")
    from agentmesh_dagster.constants import TAG_SOURCE
    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.orchestration.local_run import open_instance, reconstructable_job, run_here
    from agentmesh_dagster.records import RunSource
    from agentmesh_dagster.settings import dagster_home

    agentmesh = AgentMesh.of_project(cli.root)
    with open_instance(dagster_home(cli.root)) as instance:
        job = reconstructable_job(cli.root, publication.id, publication.slug)
        all_tags = {TAG_SOURCE: RunSource.CLI.value, "user": actor(), **tags}
        with _Progress(cli.store(), publication, enabled=show_progress):
            return run_here(agentmesh, job, value, instance=instance, tags=all_tags)


class _Progress:
    """Shows the steps of the newest run while it works."""

    def __init__(self, store: Store, publication: Publication, *, enabled: bool) -> None:
        self._store = store
        self._publication = publication
        self._enabled = enabled
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="agentmesh-progress", daemon=True)

    def __enter__(self) -> None:
        if self._enabled:
            self._before = {run.id for run in self._runs()}
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._done.set()
            self._thread.join()

    def _runs(self) -> list[object]:
        publication = self._publication
        return list(self._store.runs.list(publication.project, kind=publication.kind, slug=publication.slug, limit=20))

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:
            while not self._done.wait(0.15):
                fresh = [run for run in self._runs() if run.id not in self._before]
                if fresh:
                    live.update(steps_table(self._store.runs.steps(fresh[0].id)))
