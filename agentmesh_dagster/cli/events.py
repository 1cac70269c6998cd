"""`agentmesh events`: named events from outside, for the runs that wait for them."""

from __future__ import annotations

from dataclasses import asdict

import click

from agentmesh_dagster.cli.context import (
    CliContext,
    actor,
    example,
    json_option,
    pass_cli,
    print_json,
    read_json_option,
)


@click.group()
def events() -> None:
    """Send events to the runs that wait for them.

    What runs did is shown by `agentmesh runs events`.
    """


@events.command(epilog=example("""agentmesh events send paid --key A-1001 --data '{"amount": 20}'"""))
@click.argument("name")
@click.option("--key", default="", help="The correlation key: those that wait with the same are answered.")
@click.option(
    "--data",
    "data_text",
    metavar="JSON|@FILE",
    help="The payload; `-` reads standard input.  [default: null]",
)
@click.option("--id", "event_id", metavar="ID", help="The sender's own id: sent twice, it is delivered once.")
@click.option(
    "--keep",
    default="7d",
    show_default=True,
    metavar="TIME",
    help="How long it is kept where nothing waits for it yet: seconds, or such as 30m, 2h, 7d; 0: not at all.",
)
@json_option
@pass_cli
def send(
    cli: CliContext,
    name: str,
    key: str,
    data_text: str | None,
    event_id: str | None,
    keep: str,
    as_json: bool,
) -> None:
    """Send an event NAME to all nodes that wait for it.

    Where none does, it is kept for the first one that will.
    """
    from agentmesh_dagster.orchestration.decisions import send_event

    data = None if data_text is None else read_json_option(data_text, "--data")
    done = send_event(cli, name, key, data, by=actor(), event_id=event_id, keep_s=_seconds(keep))
    if as_json:
        print_json(asdict(done))
    elif done.is_duplicate:
        click.echo(f"event {done.event_id} was delivered before; nothing was done")
    elif done.completed:
        click.echo(f"event {done.event_id} answered {len(done.completed)}: {', '.join(done.completed)}")
    else:
        kept = f"is kept for {keep}" if done.is_kept else "is not kept"
        click.echo(
            f"event {done.event_id} {kept}: nothing waits for {name!r} with key {key!r} that takes its data"
        )


def _seconds(text: str) -> float:
    from agentmesh_dagster.specs.base import parse_duration

    try:
        seconds = parse_duration(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--keep") from None
    if not isinstance(seconds, float):  # the text of a number, or a duration
        raise click.BadParameter(f"{text!r} is no time", param_hint="--keep")
    return seconds
