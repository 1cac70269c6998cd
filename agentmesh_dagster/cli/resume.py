"""What `agentmesh runs resume` does: answers a suspension, and does in this process what a daemon would do."""

from __future__ import annotations

from dataclasses import dataclass

import click

from agentmesh_dagster.cli.approvals import what_follows
from agentmesh_dagster.cli.context import CliContext, actor, print_json
from agentmesh_dagster.cli.run import (
    finalize_here,
    open_dagster,
    report_continued,
    report_result,
    report_run,
    resume_here,
    start_here,
)
from agentmesh_dagster.cli.run_view import load_shown, print_run, run_json
from agentmesh_dagster.cli.wait_view import wait_json, wait_lines
from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.records import Json, Run, RunStatus, Wait

_BATCH = 500
# What `resume_here` refuses where a daemon was faster.
_ELSEWHERE = ("run-claimed", "run-not-waiting")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Data for a suspended step."""

    label: str
    step_key: str | None
    data: Json


def answer_only(cli: CliContext, run: Run, answer: Answer, *, as_json: bool) -> None:
    """Answers a suspension, and says how the run goes on."""
    wait = _give(cli, run, answer)
    follows = what_follows(cli, wait)
    if as_json:
        print_json({**wait_json(wait), "next": follows})
        return
    click.echo(f"{wait.step_key} has its data")
    click.echo(follows)


def resume_run(cli: CliContext, run: Run, answer: Answer | None, *, as_json: bool) -> None:
    """Answers a suspension, where one is given, and goes on with the run here, begins it, or runs its `finally`.

    Raises:
        RunRefused: Nothing that the run waits for has come, and nothing else of it is due (code `nothing-to-resume`),
            somebody else continues it already (`run-claimed`), or something of it is still at work.
        ApprovalError: The answer is refused; then the run stays as it is.
    """
    _settle_due(cli)
    run = cli.store().runs.get(run.id)
    if answer is None:
        _resume(cli, run, as_json=as_json)
        return
    is_given = False

    def give() -> None:
        nonlocal is_given
        _give(cli, run, answer)
        is_given = True

    try:
        result = resume_here(cli, run, give, as_json=as_json)
    except RunRefused as error:
        if not is_given:
            raise
        if error.code not in _ELSEWHERE:
            raise RunRefused(
                f"the data is stored; {error.message}", code=error.code, context=error.context
            ) from error
        _report_elsewhere(cli, run, as_json=as_json)
        return
    report_continued(cli, result, as_json=as_json)


def _resume(cli: CliContext, run: Run, *, as_json: bool) -> None:
    if run.status is RunStatus.PENDING and not run.dagster_run_ids:
        report_result(cli, start_here(cli, run, as_json=as_json), as_json=as_json)
        return
    if run.status.is_final and run.finalized < run.endings and finalize_here(cli, run):
        report_run(cli, cli.store().runs.get(run.id), as_json=as_json)
        return
    if run.status is not RunStatus.WAITING:
        raise RunRefused(f"run {run.id!r} is {run.status.value}: {_why_not(run)}", code="nothing-to-resume")
    try:
        result = resume_here(cli, run, None, as_json=as_json)
    except RunRefused as error:
        if error.code == "nothing-to-resume":
            raise _with_waits(cli, run) from error
        raise
    report_continued(cli, result, as_json=as_json)


def _why_not(run: Run) -> str:
    if run.status in (RunStatus.FAILED, RunStatus.CANCELED):
        return f"it goes on with `agentmesh runs retry {run.id}`"
    return "there is nothing left to do" if run.status is RunStatus.SUCCEEDED else "it does not wait"


def _with_waits(cli: CliContext, run: Run) -> RunRefused:
    waits = load_shown(cli.store(), run).waits
    lines = [line for wait in waits for line in wait_lines(wait)]
    return RunRefused(
        "\n  ".join([f"run {run.id!r} is waiting, and nothing that it waits for has come", *lines]),
        code="nothing-to-resume",
        context={
            "waits": [
                {"id": wait.id, "kind": wait.kind.value, "step_key": wait.step_key, "label": wait.label}
                for wait in waits
            ]
        },
    )


def _give(cli: CliContext, run: Run, answer: Answer) -> Wait:
    from agentmesh_dagster.orchestration.decisions import resume_suspended

    return resume_suspended(cli, run.id, answer.label, answer.data, by=actor(), step_key=answer.step_key)


def _settle_due(cli: CliContext) -> None:
    """What a daemon does at each poll: timers and deadlines whose moment has come, and runs whose time is over."""
    from agentmesh_dagster.orchestration.reconcile import fail_overdue

    store, clock = cli.store(), SystemClock()
    now = clock.now()
    while len(store.waits.settle_due(cli.project, now, limit=_BATCH)) >= _BATCH:
        pass
    if store.runs.overdue(cli.project, now):
        with open_dagster(cli) as instance:
            list(fail_overdue(store, instance, cli.project, clock))


def _report_elsewhere(cli: CliContext, run: Run, *, as_json: bool) -> None:
    """The data was given, and that was asked for: the run goes on, though not here."""
    click.echo("note: the data is stored, and somebody else goes on with the run", err=True)
    shown = load_shown(cli.store(), cli.store().runs.get(run.id))
    if as_json:
        print_json(run_json(shown))
    else:
        print_run(shown)
