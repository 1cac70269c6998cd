"""`agentmesh runs`: what ran, what it did, and how it goes on."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone

import click

from agentmesh_dagster.cli.context import (
    KIND,
    CliContext,
    actor,
    cell,
    example,
    json_option,
    pass_cli,
    print_facts,
    print_json,
    print_table,
    read_json_option,
)
from agentmesh_dagster.cli.run import history_note, open_dagster, report_result, retry_here
from agentmesh_dagster.cli.run_view import (
    Details,
    in_order,
    load_shown,
    print_run,
    print_trace,
    run_facts,
    run_json,
    shown_json,
    step_tree,
    trace_json,
)
from agentmesh_dagster.constants import ENV_DAGSTER_URL
from agentmesh_dagster.errors import DefinitionError, NotFound, RunRefused
from agentmesh_dagster.records import Event, Json, Run, RunSource, RunStatus

_SHORTEST_PREFIX = 6
_SHOWN_RUNS = 5
_LAUNCHED_RUNS = 500
_FOLLOW_POLL_S = 0.25

_run_argument = click.argument("run_id", metavar="RUN")


def _moment(_context: click.Context, _option: click.Parameter, value: str | None) -> datetime | None:
    """A moment in UTC; without an offset it is local time."""
    if value is None:
        return None
    try:
        return datetime.fromisoformat(value.replace("Z", "+00:00")).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no ISO 8601 time, such as '2026-01-31' or '2026-01-31T09:00+01:00'"
        ) from None


@click.group()
def runs() -> None:
    """List and inspect runs; cancel, retry and resume them.

    RUN is a run's id, the id of any of its Dagster runs, or the first 6 or more characters of a run's id.
    """


@runs.command("list", epilog=example("agentmesh runs list --slug refund-review --status failed"))
@click.option("--kind", type=KIND, help="Runs of this kind.")
@click.option("--slug", help="Runs of this definition.")
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice([status.value for status in RunStatus]),
    help="In this status; may be repeated.",
)
@click.option("--source", type=click.Choice([source.value for source in RunSource]), help="Started so.")
@click.option("--triggered-by", metavar="WHO", help="Started by this person, schedule or sensor.")
@click.option("--since", callback=_moment, metavar="TIME", help="Created at this time or later; ISO 8601.")
@click.option("--until", callback=_moment, metavar="TIME", help="Created before this time.")
@click.option("--cursor", metavar="RUN", help="Only runs that come after this one in the list.")
@click.option(
    "--limit", default=50, show_default=True, type=click.IntRange(min=1), help="Maximum number of runs."
)
@json_option
@pass_cli
def list_runs(
    cli: CliContext,
    kind: str | None,
    slug: str | None,
    statuses: tuple[str, ...],
    source: str | None,
    triggered_by: str | None,
    since: datetime | None,
    until: datetime | None,
    cursor: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List runs, the newest first.

    To list further ones, give the id of the last run as --cursor; with --json each run has it as `cursor`.
    """
    wanted = [RunStatus(status) for status in statuses] or None
    launched = _launched(cli)
    on_their_way = [
        run
        for run in launched
        if (wanted is None or run.status in wanted)
        and kind in (None, run.kind)
        and slug in (None, run.slug)
        and source in (None, run.source.value)
        and triggered_by in (None, run.triggered_by)
        and (since is None or run.queued_at is None or run.queued_at >= since)
        and (until is None or run.queued_at is None or run.queued_at < until)
    ]
    if cursor is not None:
        # They stand before all others.
        places = [run.id for run in on_their_way]
        is_among = cursor in places
        on_their_way = on_their_way[places.index(cursor) + 1 :] if is_among else []
        cursor = None if is_among else cursor
    found = cli.store().runs.list(
        cli.project,
        kind=kind,
        slug=slug,
        status=wanted,
        source=None if source is None else RunSource(source),
        triggered_by=triggered_by,
        since=since,
        until=until,
        after=None if cursor is None else find_run(cli, cursor).id,
        limit=limit,
    )
    found = [*on_their_way, *found][:limit]
    if not found:
        cli.check_project()
    if as_json:
        print_json([{**run_facts(run), "cursor": run.id} for run in found])
        return
    # Only where it was asked for: the other columns keep their places for scripts.
    shows_since = RunStatus.WAITING.value in statuses
    print_table(
        ("run", "kind", "slug", "version", "status", "source", "started", "duration", "tokens", "cost")
        + (("waiting since",) if shows_since else ()),
        [
            (
                run.id,
                run.kind,
                run.slug,
                run.version,
                run.status.value,
                run.source.value,
                run.started_at,
                _seconds(run.duration_ms),
                run.input_tokens + run.output_tokens,
                f"{run.cost_usd:.6f}",
                *((_waiting_since(run),) if shows_since else ()),
            )
            for run in found
        ],
        empty=f"no run in project {cli.project!r} fits",
    )


@runs.command(epilog=example("agentmesh runs show 3f2a9c51"))
@_run_argument
@json_option
@pass_cli
def show(cli: CliContext, run_id: str, as_json: bool) -> None:
    """Show a run and its steps.

    With the run that started it, those that it has started, and whether its `on_failure` and `finally` have been run.
    """
    try:
        run = find_run(cli, run_id)
    except NotFound:
        launched = [each for each in _launched(cli) if each.id.startswith(run_id)]
        if len(launched) != 1 or len(run_id) < _SHORTEST_PREFIX:
            raise
        run = launched[0]
    shown = load_shown(cli.store(), run)
    if as_json:
        children = [
            {
                "run_id": child.id,
                "slug": child.slug,
                "status": child.status.value,
                "parent_step_key": child.parent_step_key,
            }
            for child in shown.children
        ]
        print_json({**run_facts(run), "input": run.input, "children": children, **run_json(shown)})
        return
    parent = f"{run.parent_run_id} (step {run.parent_step_key})" if run.parent_run_id is not None else None
    print_facts(
        {
            "run": run.id,
            "workflow": f"{run.slug} version {run.version} (publication {run.publication})",
            "source": f"{run.source.value}{f', by {run.triggered_by}' if run.triggered_by else ''}",
            "started by run": parent,
            "Dagster runs": run.dagster_run_ids,
            "started": run.started_at,
            "waiting since": _waiting_since(run),
            "resumed": run.resumed_at,
            "finished": run.finished_at,
            "input": json.dumps(run.input, ensure_ascii=False),
        }
    )
    click.echo()
    print_run(shown, history_note(cli, run) if _needs_history(run) else "")


def _needs_history(run: Run) -> bool:
    """Whether a command could go on with a run, which takes the Dagster runs that worked on it."""
    is_unfinished = run.status in (RunStatus.WAITING, RunStatus.FAILED, RunStatus.CANCELED)
    return is_unfinished and bool(run.dagster_run_ids)


@runs.command(epilog=example("agentmesh runs trace 3f2a9c51"))
@_run_argument
@json_option
@pass_cli
def trace(cli: CliContext, run_id: str, as_json: bool) -> None:
    """Show the steps of a run as a tree.

    Nodes, with the model and tool calls inside them.
    """
    run = find_run(cli, run_id)
    shown = load_shown(cli.store(), run)
    if as_json:
        branches = step_tree(shown.steps)
        print_json(
            {
                "run_id": run.id,
                "status": run.status.value,
                "steps": [trace_json(branch, shown) for branch in branches],
            }
        )
        return
    click.echo(f"run {run.id} ({run.slug} version {run.version}) {run.status.value}")
    print_trace(shown.steps)


@runs.command(epilog=example("agentmesh runs steps 3f2a9c51 --step classify --input --output"))
@_run_argument
@click.option("--step", metavar="KEY", help="This step and those inside it.")
@click.option("--input", "with_input", is_flag=True, help="With what each step was asked.")
@click.option("--output", "with_output", is_flag=True, help="With what each step came to.")
@json_option
@pass_cli
def steps(
    cli: CliContext, run_id: str, step: str | None, with_input: bool, with_output: bool, as_json: bool
) -> None:
    """Show the steps of a run with all that is known of them.

    Their names, the agent or tool that each one used, the handles that it chose, and who decided what. With --json
    always with input and output.
    """
    run = find_run(cli, run_id)
    shown = load_shown(cli.store(), run)
    wanted = [each for each in in_order(shown.steps) if step is None or _is_under(each.key, step)]
    if step is not None and not wanted:
        raise NotFound(f"run {run.id!r} has no step {step!r}", code="no-step")
    if as_json:
        print_json([shown_json(each, shown) for each in wanted])
        return
    print_trace(wanted, Details(shown=shown, with_input=with_input, with_output=with_output))


def _is_under(key: str, wanted: str) -> bool:
    return key == wanted or (key.startswith(wanted) and key[len(wanted)] in "/[#")


@runs.command(epilog=example("agentmesh runs events 3f2a9c51 --follow --type 'step.*'"))
@_run_argument
@click.option("--type", "type_", metavar="T", help="Such as step.completed; `step.*` for all that begin so.")
@click.option("--step", metavar="KEY", help="Those of one step.")
@click.option("--follow", is_flag=True, help="Print what comes, until the run has ended.")
@json_option
@pass_cli
def events(
    cli: CliContext, run_id: str, type_: str | None, step: str | None, follow: bool, as_json: bool
) -> None:
    """Print the events of a run.

    In their order; with --json one JSON object per line.
    """
    run = find_run(cli, run_id)
    reader = cli.store().runs
    after: str | None = None
    while True:
        # Asked before the events are read: what a run writes at its end is then among them.
        is_over = not follow or reader.get(run.id).status.is_final
        for event in reader.events(run.id, type=type_, step_key=step, after=after):
            _print_event(event, as_json=as_json)
            after = event.id
        if is_over:
            return
        time.sleep(_FOLLOW_POLL_S)


def _print_event(event: Event, *, as_json: bool) -> None:
    if as_json:
        fields: dict[str, Json] = {
            "id": event.id,
            "at": event.at.isoformat(),
            "run_id": event.run_id,
            "type": event.type,
            "step_key": event.step_key,
            "payload": event.payload,
        }
        click.echo(json.dumps(fields, ensure_ascii=False))
        return
    payload = json.dumps(event.payload, ensure_ascii=False) if event.payload else ""
    click.echo("\t".join((cell(event.at), event.type, cell(event.step_key), payload)).rstrip())


@runs.command(epilog=example("agentmesh runs cancel 3f2a9c51"))
@_run_argument
@json_option
@pass_cli
def cancel(cli: CliContext, run_id: str, as_json: bool) -> None:
    """Cancel a run.

    Dagster is asked to terminate it, through AGENTMESH_DAGSTER_URL where that is set. A run that no worker is
    left for is set to canceled at once. One that `agentmesh run` executes in another shell of this machine is
    interrupted as Ctrl-C does. The unfinished runs that it has started are canceled with it. A daemon, or
    `agentmesh runs resume`, runs its `finally`.
    """
    run = find_run(cli, run_id)
    if run.status.is_final:
        raise RunRefused(f"run {run.id!r} is {run.status.value} already", code="run-final")
    from agentmesh_dagster.orchestration.cancellation import cancel_run

    with open_dagster(cli) as instance:
        done = cancel_run(
            cli.store(), instance, run, by=actor(), webserver=os.environ.get(ENV_DAGSTER_URL) or None
        )
    if as_json:
        children = [{"run_id": child.id, "status": child.status.value} for child in done.children.runs]
        facts = {**run_facts(done.run), "asked": done.is_asked, "children": children}
        print_json({**facts, "unreached": dict(done.children.unreached)})
        return
    for canceled in (done.run, *done.children.runs):
        if canceled.status.is_final:
            click.echo(f"run {canceled.id} is {canceled.status.value}")
        else:
            click.echo(
                f"Dagster is ending run {canceled.id}; `agentmesh runs events {canceled.id[:8]} --follow` shows when "
                "it has"
            )
    for reason in done.children.unreached.values():
        click.echo(f"note: {reason}", err=True)


@runs.command(epilog=example("agentmesh runs retry 3f2a9c51"))
@_run_argument
@json_option
@pass_cli
def retry(cli: CliContext, run_id: str, as_json: bool) -> None:
    """Go on with a failed or canceled run.

    On this machine, with the version that it started with. Finished steps are not done again: their outputs
    come from the journal. Exits with 0 when the run succeeded, 1 when it failed again.
    """
    run = find_run(cli, run_id)
    if run.status in (RunStatus.SUCCEEDED, RunStatus.WAITING):
        raise RunRefused(
            f"run {run.id!r} is {run.status.value}: only failed and canceled runs are retried"
            + (f"; `agentmesh runs resume {run.id[:8]}` goes on" if run.status is RunStatus.WAITING else ""),
            code="run-not-failed",
        )
    definition = cli.store().catalog.get(cli.project, run.kind, run.slug)
    if definition.archived_at is not None or not definition.is_active:
        raise DefinitionError(
            f"the {run.kind} {run.slug!r} was deleted: import it again to retry its runs"
            if definition.archived_at is not None
            else f"the {run.kind} {run.slug!r} is inactive: `agentmesh activate {run.kind} {run.slug}` first",
            code="inactive",
        )
    report_result(cli, retry_here(cli, run, as_json=as_json), as_json=as_json)


@runs.command(epilog=example("""agentmesh runs resume 3f2a9c51 --label receipt --data '{"seen": true}'"""))
@_run_argument
@click.option("--label", metavar="L", help="Answer the suspension of this label first.  [default: no label]")
@click.option(
    "--data",
    "data_text",
    metavar="JSON|@FILE",
    help="What the suspended step waits for; `-` reads standard input.",
)
@click.option("--step", metavar="KEY", help="The suspended step, where several have the label.")
@click.option("--no-run", is_flag=True, help="Answer the suspension, and leave the rest to a daemon.")
@json_option
@pass_cli
def resume(
    cli: CliContext,
    run_id: str,
    label: str | None,
    data_text: str | None,
    step: str | None,
    no_run: bool,
    as_json: bool,
) -> None:
    """Go on with a waiting run.

    On this machine, with the version that it started with, once what it waits for has come: a decision, an event, a
    moment, or the data that is given here. Finished steps are not done again. A run that another run started, and that
    has not begun, is begun; of one that has ended, `on_failure` and `finally` are run, where they are due. No daemon is
    needed; where one runs, only one of both goes on. Exits with 0 when the run succeeded or waits again, 1 when it
    failed.
    """
    run = find_run(cli, run_id)
    from agentmesh_dagster.cli.resume import Answer, answer_only, resume_run

    if label is None and data_text is None and step is None:
        if no_run:
            raise click.UsageError("--no-run needs --label or --data: there is nothing else to do")
        resume_run(cli, run, None, as_json=as_json)
        return
    data = None if data_text is None else read_json_option(data_text, "--data")
    answer = Answer(label=label or "", step_key=step, data=data)
    if no_run or run.status is not RunStatus.WAITING:
        answer_only(cli, run, answer, as_json=as_json)
    else:
        resume_run(cli, run, answer, as_json=as_json)


def _launched(cli: CliContext) -> list[Run]:
    """The runs that were launched and that no worker has bound yet; none where the project has no Dagster instance."""
    from agentmesh_dagster.settings import dagster_home

    if not (dagster_home(cli.root) / "dagster.yaml").is_file():
        return []
    from agentmesh_dagster.orchestration.launched import launched_runs

    with open_dagster(cli) as instance:
        return launched_runs(cli.store(), instance, cli.project, limit=_LAUNCHED_RUNS)


def find_run(cli: CliContext, wanted: str) -> Run:
    """The run of this project that is meant.

    Raises:
        NotFound: There is none.
        DefinitionError: Several runs begin so (code `ambiguous-run`).
    """
    reader = cli.store().runs
    try:
        found = reader.get(wanted)
    except NotFound:
        if len(wanted) < _SHORTEST_PREFIX:
            raise
        begin_so = reader.with_prefix(cli.project, wanted, limit=_SHOWN_RUNS)
        if not begin_so:
            raise
        if len(begin_so) > 1:
            ids = ", ".join(run.id for run in begin_so)
            raise DefinitionError(
                f"several runs begin with {wanted!r}: {ids}; write more of the id",
                code="ambiguous-run",
                context={"runs": [run.id for run in begin_so]},
            ) from None
        return begin_so[0]
    if found.project != cli.project:
        raise NotFound(
            f"run {found.id!r} is of project {found.project!r}: say `agentmesh --project {found.project} runs ...`",
            code="no-run",
        )
    return found


def _waiting_since(run: Run) -> datetime | None:
    return run.suspended_at if run.status is RunStatus.WAITING else None


def _seconds(duration_ms: int | None) -> str | None:
    return None if duration_ms is None else f"{duration_ms / 1000:.2f} s"
