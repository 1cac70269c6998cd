"""`agentmesh run`: a published workflow, through Dagster, in this process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from agentmesh_dagster.cli.context import (
    KIND,
    CliContext,
    actor,
    example,
    json_option,
    pass_cli,
    print_json,
    read_json_option,
)
from agentmesh_dagster.cli.run_view import (
    Shown,
    load_shown,
    print_continued,
    print_run,
    run_json,
    steps_table,
)
from agentmesh_dagster.errors import AgentMeshError, StoreError
from agentmesh_dagster.records import Json, RunSource, RunStatus

if TYPE_CHECKING:
    import dagster as dg

    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.orchestration.local_run import LocalRun
    from agentmesh_dagster.records import Publication, Run
    from agentmesh_dagster.store import Store


@click.command(
    epilog=example('agentmesh run workflow refund-review --input \'{"order_id": "A-1001", "amount": 20}\'')
)
@click.argument("kind", type=KIND, metavar="KIND")
@click.argument("slug")
@click.option(
    "--input", "input_text", metavar="JSON|@FILE", help="The run's input; `-` reads standard input."
)
@click.option(
    "--tag", "tags", multiple=True, metavar="KEY=VALUE", help="A tag of the Dagster run; may be repeated."
)
@json_option
@pass_cli
def run(
    cli: CliContext, kind: str, slug: str, input_text: str | None, tags: tuple[str, ...], as_json: bool
) -> None:
    """Run a published workflow on this machine.

    Through Dagster: stays until it has ended or waits, and shows the steps. Its `on_failure` and `finally` are run
    here too. Exits with 0 when the run succeeded or waits for somebody or something, 1 when it failed or was
    canceled, or what runs at its end failed.
    """
    value = read_json_option(input_text, "--input")
    from agentmesh_dagster.orchestration.launch import admitted

    publication, value = admitted(cli.store(), cli.project, kind, slug, value, by=actor())
    report_result(
        cli, _run_here(cli, publication, value, _tags(tags), show=_shows_progress(as_json)), as_json=as_json
    )


def report_continued(cli: CliContext, result: LocalRun, *, as_json: bool) -> None:
    """As `report_result`, of a run that has gone on: for people, the steps that are new."""
    report_run(cli, result.started_run, as_json=as_json, show=print_continued)


def report_result(cli: CliContext, result: LocalRun, *, as_json: bool) -> None:
    """Prints a run with its steps and what it waits for; exits with 1 when it failed or was canceled."""
    report_run(cli, result.started_run, as_json=as_json)


def report_run(
    cli: CliContext, run: Run, *, as_json: bool, show: Callable[[Shown], None] = print_run
) -> None:
    """Prints a run; exits with 1 when it failed or was canceled, or its `on_failure` or `finally` failed."""
    shown = load_shown(cli.store(), run)
    if as_json:
        print_json(run_json(shown))
    else:
        show(shown)
    is_fine = run.status in (RunStatus.SUCCEEDED, RunStatus.WAITING) and shown.finalize_error is None
    if not is_fine:
        raise click.exceptions.Exit(1)


@contextmanager
def _stdout_for_results() -> Generator[None]:
    """What nodes print goes to stderr: stdout is for the run's result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _tags(pairs: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is no KEY=VALUE", param_hint="--tag")
        found[key] = value
    return found


def _run_here(
    cli: CliContext, publication: Publication, value: Json, tags: dict[str, str], *, show: bool
) -> LocalRun:
    os.environ.setdefault("AGENTMESH_CONSOLE_LOG_LEVEL", "CRITICAL")
    from agentmesh_dagster.constants import TAG_SOURCE
    from agentmesh_dagster.orchestration.continuation import pinned_job
    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.orchestration.local_run import run_here
    from agentmesh_dagster.orchestration.worker_identity import WorkerIdentity

    job = pinned_job(cli.root, publication)
    # The process, so that `agentmesh runs cancel` in another shell can interrupt it.
    all_tags = {TAG_SOURCE: RunSource.CLI.value, "user": actor(), **tags, **WorkerIdentity.of_command()}
    progress = _Progress(cli.store(), publication, enabled=show)
    agentmesh = AgentMesh.of_project(cli.root)
    with open_dagster(cli) as instance, progress, _stdout_for_results():
        result = run_here(agentmesh, job, value, instance=instance, tags=all_tags)
        return _ended(agentmesh, cli, result, instance)


def retry_here(cli: CliContext, run: Run, *, as_json: bool) -> LocalRun:
    """Goes on with a failed or canceled run in this process, by the publication that it started with."""
    os.environ.setdefault("AGENTMESH_CONSOLE_LOG_LEVEL", "CRITICAL")
    from agentmesh_dagster.orchestration.continuation import check_retryable, continue_here, pinned_job
    from agentmesh_dagster.orchestration.host import AgentMesh

    store = cli.store()
    publication = store.publications.get(run.publication)
    with open_dagster(cli) as instance:
        run = check_retryable(store, instance, run)
        job = pinned_job(cli.root, publication)
        progress = _Progress(store, publication, run_id=run.id, enabled=_shows_progress(as_json))
        agentmesh = AgentMesh.of_project(cli.root)
        with progress, _stdout_for_results():
            result = continue_here(agentmesh, job, run, instance=instance, by=actor())
            return _ended(agentmesh, cli, result, instance)


def resume_here(cli: CliContext, run: Run, answer: Callable[[], None] | None, *, as_json: bool) -> LocalRun:
    """Goes on with a waiting run in this process, by the publication that it started with.

    Args:
        cli: The project.
        run: The run.
        answer: Gives what the run waits for, where this command does.
        as_json: Whether no progress is shown.

    Raises:
        RunRefused: See `continuation.check_resumable`; or somebody else continues it already (code `run-claimed`).
    """
    os.environ.setdefault("AGENTMESH_CONSOLE_LOG_LEVEL", "CRITICAL")
    from agentmesh_dagster.orchestration import continuation
    from agentmesh_dagster.orchestration.history import refuse_missing
    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.orchestration.launch import claimed

    store = cli.store()
    publication = store.publications.get(run.publication)
    with open_dagster(cli) as instance:
        refuse_missing(instance, run)
        if answer is None:
            run = continuation.check_resumable(store, instance, run)
        job = continuation.pinned_job(cli.root, publication)
        agentmesh = AgentMesh.of_project(cli.root)
        if answer is not None:
            # When all else is ready: between the answer and the claim a daemon would take the run.
            answer()
            run = continuation.check_resumable(store, instance, run)
        claim = claimed(store, run, "resume")
        progress = _Progress(store, publication, run_id=run.id, enabled=_shows_progress(as_json))
        with progress, _stdout_for_results():
            result = continuation.resume_here(agentmesh, job, run, instance=instance, claim=claim, by=actor())
            return _ended(agentmesh, cli, result, instance)


def start_here(cli: CliContext, run: Run, *, as_json: bool) -> LocalRun:
    """Begins a run in this process that another run started and that nobody works on yet.

    Raises:
        RunRefused: Somebody else begins it already (code `run-claimed`).
    """
    os.environ.setdefault("AGENTMESH_CONSOLE_LOG_LEVEL", "CRITICAL")
    from agentmesh_dagster.orchestration import continuation
    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.orchestration.launch import claimed

    store = cli.store()
    publication = store.publications.get(run.publication)
    with open_dagster(cli) as instance:
        job = continuation.pinned_job(cli.root, publication)
        agentmesh = AgentMesh.of_project(cli.root)
        claim = claimed(store, run, "start")
        progress = _Progress(store, publication, run_id=run.id, enabled=_shows_progress(as_json))
        with progress, _stdout_for_results():
            result = continuation.start_here(agentmesh, job, run, instance=instance, claim=claim, by=actor())
            return _ended(agentmesh, cli, result, instance)


def finalize_here(cli: CliContext, run: Run) -> bool:
    """Runs `on_failure` and `finally` of a run that has ended in this process; False where they are not due."""
    os.environ.setdefault("AGENTMESH_CONSOLE_LOG_LEVEL", "CRITICAL")
    from agentmesh_dagster.orchestration import continuation
    from agentmesh_dagster.orchestration.host import AgentMesh

    agentmesh = AgentMesh.of_project(cli.root)
    with open_dagster(cli) as instance, _stdout_for_results():
        return continuation.finalize_here(agentmesh, cli.root, run, instance=instance, by=actor())


def _ended(agentmesh: AgentMesh, cli: CliContext, result: LocalRun, instance: dg.DagsterInstance) -> LocalRun:
    from agentmesh_dagster.orchestration.launch import with_end

    ended = with_end(agentmesh, cli.root, result, instance=instance, by=actor())
    if ended.note:
        click.echo(f"note: {ended.note}", err=True)
    return ended


def history_note(cli: CliContext, run: Run) -> str:
    """What is said of a run that could go on if its Dagster runs were in the project's Dagster instance; else empty."""
    from agentmesh_dagster.orchestration.history import is_history_missing, missing_history
    from agentmesh_dagster.settings import dagster_home

    if dagster_home(cli.root).is_dir():
        try:
            with open_dagster(cli) as instance:
                if not is_history_missing(instance, run.dagster_run_ids):
                    return ""
        except AgentMeshError as error:
            return error.message
    return missing_history(run.id, kind=run.kind, slug=run.slug, is_final=run.status.is_final)


def open_dagster(cli: CliContext) -> dg.DagsterInstance:
    """The project's Dagster instance.

    Raises:
        AgentMeshError: Its `dagster.yaml` is wrong, or its storage cannot be reached (code `dagster-instance`).
    """
    from agentmesh_dagster.orchestration.local_run import open_instance
    from agentmesh_dagster.settings import dagster_home

    home = dagster_home(cli.root)
    try:
        return open_instance(home)
    except OSError:
        raise
    except Exception as error:  # whatever Dagster's configured storage, launcher and loggers raise
        reason = " ".join(str(error).split())[:300]
        raise _DagsterUnusable(
            f"Dagster cannot work with {str(home / 'dagster.yaml')!r}: {type(error).__name__}: {reason}"
        ) from error


class _DagsterUnusable(AgentMeshError):
    category = "system"
    domain = "orchestration"
    default_code = "dagster-instance"


def _shows_progress(as_json: bool) -> bool:
    return not as_json and sys.stderr.isatty()


class _Progress:
    """Shows the steps of a run while it works: of `run_id`, or of the one that this person starts."""

    def __init__(
        self, store: Store, publication: Publication, *, run_id: str | None = None, enabled: bool
    ) -> None:
        self._store = store
        self._publication = publication
        self._run_id = run_id
        self._enabled = enabled
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="agentmesh-progress", daemon=True)

    def __enter__(self) -> None:
        if self._enabled:
            self._before = set(self._runs())
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._done.set()
            self._thread.join()

    def _runs(self) -> list[str]:
        of = self._publication
        found = self._store.runs.list(of.project, kind=of.kind, slug=of.slug, source=RunSource.CLI, limit=20)
        return [run.id for run in found if run.triggered_by == actor()]

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:
            while not self._done.wait(0.15):
                try:
                    if self._run_id is None:
                        self._run_id = next(iter(set(self._runs()) - self._before), None)
                    if self._run_id is not None:
                        live.update(steps_table(self._store.runs.steps(self._run_id)))
                except StoreError:
                    # The run itself meets the same database, and says what is wrong with it.
                    return
