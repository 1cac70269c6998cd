"""`agentmesh approvals`: what people are asked, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from agentmesh_dagster.cli.context import (
    CliContext,
    CommandT,
    actor,
    example,
    json_option,
    pass_cli,
    print_json,
    print_table,
    read_json_option,
)
from agentmesh_dagster.cli.runs import find_run
from agentmesh_dagster.cli.wait_view import decision_text, print_wait, short_id, wait_json
from agentmesh_dagster.constants import GATE_SENSOR
from agentmesh_dagster.records import RunStatus, Wait, WaitStatus

_id_argument = click.argument("approval_id", metavar="ID")
_ALL = "all"


@click.group()
def approvals() -> None:
    """List what people are asked to decide, and decide it.

    ID is an approval's id, or the first 6 or more characters of it.
    """


@approvals.command("list", epilog=example("agentmesh approvals list --assignee jane"))
@click.option("--run", "run_id", metavar="RUN", help="Of this run.")
@click.option(
    "--status",
    type=click.Choice([*(status.value for status in WaitStatus), _ALL]),
    default=WaitStatus.OPEN.value,
    show_default=True,
    help="In this status.",
)
@click.option("--assignee", metavar="NAME", help="Those that this person may decide.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), help="At most so many.")
@json_option
@pass_cli
def list_(
    cli: CliContext, run_id: str | None, status: str, assignee: str | None, limit: int, as_json: bool
) -> None:
    """List approvals, the oldest first."""
    from agentmesh_dagster.orchestration.decisions import list_approvals

    found = list_approvals(
        cli,
        run_id=None if run_id is None else find_run(cli, run_id).id,
        status=None if status == _ALL else WaitStatus(status),
        assignee=assignee,
        limit=limit,
    )
    if not found:
        cli.check_project()
    if as_json:
        print_json([wait_json(wait) for wait in found])
        return
    print_table(
        ("approval", "kind", "run", "step", "title", "status", "may decide", "opened", "deadline"),
        [
            (
                short_id(wait),
                wait.kind.value,
                wait.run_id,
                wait.step_key,
                wait.title,
                decision_text(wait.answer["decision"]) if wait.answer else wait.status.value,
                (*wait.assignees, *(f"{each.to} for {each.by}" for each in wait.delegations)) or "anybody",
                wait.created_at,
                wait.deadline_at,
            )
            for wait in found
        ],
        empty=f"no approval in project {cli.project!r} fits",
    )


@approvals.command(epilog=example("agentmesh approvals show 3f2a9c51"))
@_id_argument
@json_option
@pass_cli
def show(cli: CliContext, approval_id: str, as_json: bool) -> None:
    """Show what is asked, who may decide, and what was said."""
    waits = cli.store().waits
    wait = waits.get(cli.project, approval_id)
    votes = waits.votes(wait.id)
    if as_json:
        print_json(wait_json(wait, votes))
    else:
        print_wait(wait, votes)


def _decision_options(command: CommandT) -> CommandT:
    options: Sequence[Callable[[CommandT], CommandT]] = (
        click.option(
            "--data",
            "data_text",
            metavar="JSON|@FILE",
            help="What the form asks for, or a call's changed arguments; `-` reads standard input.",
        ),
        click.option("--comment", default="", metavar="TEXT", help="Why; kept with the decision."),
        click.option("--as", "name", metavar="NAME", help="Who decides; default: the user of this machine."),
        click.option(
            "--hash",
            "binding",
            metavar="H",
            help="The `binding` of the call that was looked at: refused where another call waits now.",
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@approvals.command(epilog=example("agentmesh approvals approve 3f2a9c51 --comment 'receipt seen'"))
@_id_argument
@_decision_options
@pass_cli
def approve(
    cli: CliContext,
    approval_id: str,
    data_text: str | None,
    comment: str,
    name: str | None,
    binding: str | None,
    as_json: bool,
) -> None:
    """Approve what is asked.

    An approved tool call runs with the arguments of --data, where they are given.
    """
    _decide(cli, approval_id, "approved", data_text, comment, name, binding, as_json=as_json)


@approvals.command(epilog=example("agentmesh approvals reject 3f2a9c51 --comment 'no receipt'"))
@_id_argument
@_decision_options
@pass_cli
def reject(
    cli: CliContext,
    approval_id: str,
    data_text: str | None,
    comment: str,
    name: str | None,
    binding: str | None,
    as_json: bool,
) -> None:
    """Reject what is asked.

    An agent is told of a rejected tool call, with the comment as the reason, and goes on.
    """
    _decide(cli, approval_id, "rejected", data_text, comment, name, binding, as_json=as_json)


@approvals.command(epilog=example("agentmesh approvals decide 3f2a9c51 express"))
@_id_argument
@click.argument("options", metavar="OPTION...", nargs=-1, required=True)
@_decision_options
@pass_cli
def decide(
    cli: CliContext,
    approval_id: str,
    options: tuple[str, ...],
    data_text: str | None,
    comment: str,
    name: str | None,
    binding: str | None,
    as_json: bool,
) -> None:
    """Choose among the options of an approval.

    `show` lists them. Several may be given where the approval allows it. Of a call that was cut off: `happened`
    (--data is its output), `repeat` or `fail`.
    """
    chosen = options[0] if len(options) == 1 else list(options)
    _decide(cli, approval_id, chosen, data_text, comment, name, binding, as_json=as_json)


@approvals.command("delegate", epilog=example("agentmesh approvals delegate 3f2a9c51 --to dora"))
@_id_argument
@click.option("--to", required=True, metavar="NAME", help="Who may decide instead.")
@click.option("--as", "name", metavar="NAME", help="Who delegates; default: the user of this machine.")
@click.option("--comment", default="", metavar="TEXT", help="Why; kept with the delegation.")
@json_option
@pass_cli
def delegate_(
    cli: CliContext, approval_id: str, to: str, name: str | None, comment: str, as_json: bool
) -> None:
    """Let somebody else vote in your place.

    You may not vote meanwhile. Until the other one has voted, you can delegate to somebody else, or take your vote
    back: delegate it to yourself.
    """
    from agentmesh_dagster.orchestration.decisions import delegate_approval
    from agentmesh_dagster.specs.voters import is_same_name

    by = actor() if name is None else name
    wait = delegate_approval(cli, approval_id, to, by=by, comment=comment)
    if as_json:
        print_json(wait_json(wait, cli.store().waits.votes(wait.id)))
    elif is_same_name(to, by):
        click.echo(f"{wait.step_key}: {by} has taken the vote back, and may decide")
    else:
        click.echo(f"{wait.step_key}: {to} may decide for {by}, and {by} no longer")


def _decide(
    cli: CliContext,
    approval_id: str,
    decision: str | list[str],
    data_text: str | None,
    comment: str,
    name: str | None,
    binding: str | None,
    *,
    as_json: bool,
) -> None:
    from agentmesh_dagster.orchestration.decisions import decide_approval
    from agentmesh_dagster.specs.voters import decided_by

    data = None if data_text is None else read_json_option(data_text, "--data")
    by = actor() if name is None else name
    wait = decide_approval(cli, approval_id, decision, by=by, data=data, comment=comment, binding=binding)
    votes = cli.store().waits.votes(wait.id)
    follows = what_follows(cli, wait)
    if as_json:
        print_json({**wait_json(wait, votes), "next": follows})
        return
    if wait.status is WaitStatus.OPEN:
        agreed = f"{len(votes)} {'vote' if len(votes) == 1 else 'votes'}, {wait.required} must agree"
        click.echo(f"{wait.step_key}: the vote of {by} counts ({agreed})")
    else:
        click.echo(f"{wait.step_key}: {decision_text(wait.answer['decision'])}{decided_by(wait.answer)}")
    click.echo(follows)


def what_follows(cli: CliContext, wait: Wait) -> str:
    """How the run of a wait goes on, in one line."""
    if wait.status is WaitStatus.OPEN:
        return f"it stays open; `agentmesh approvals show {short_id(wait)}` shows who may still decide"
    run = cli.store().runs.get(wait.run_id)
    here = f"`agentmesh runs resume {run.id[:8]}`"
    if run.status is RunStatus.WAITING:
        return f"run {run.id} goes on by the sensor {GATE_SENSOR} of a running daemon, or here with {here}"
    if run.status is RunStatus.FAILED:
        return f"run {run.id} has failed; `agentmesh runs retry {run.id[:8]}` goes on with this answer"
    return (
        f"run {run.id} is {run.status.value}; what waited goes on after its present part, or then with {here}"
    )
