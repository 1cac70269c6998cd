"""How waits are shown: JSON for machines, lines for people."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import click

from agentmesh_dagster.cli.context import cell, print_facts
from agentmesh_dagster.records import Json, Vote, Wait, WaitKind, WaitStatus

_WORDS = {
    WaitKind.HUMAN: "people",
    WaitKind.TOOL: "people, who approve a call",
    WaitKind.UNKNOWN: "people, who know whether a call took effect",
    WaitKind.SUSPEND: "data",
    WaitKind.TIMER: "a moment",
    WaitKind.EVENT: "an event",
}


def open_wait_json(wait: Wait) -> dict[str, Json]:
    """A wait as it stands in a run's `approvals`."""
    return {
        "id": wait.id,
        "kind": wait.kind.value,
        "step_key": wait.step_key,
        "label": wait.label,
        "title": wait.title,
        "data": wait.data,
        "options": _options(wait),
        "form_schema": wait.form_schema,
        "prefill": wait.prefill,
        "assignees": list(wait.assignees),
        "delegations": [asdict(delegation) for delegation in wait.delegations],
        "deadline_at": wait.deadline_at,
        "how_to_decide": ways_to_decide(wait),
    }


def wait_json(wait: Wait, votes: Sequence[Vote] | None = None) -> dict[str, Json]:
    """All of a wait, as `agentmesh approvals --json` prints it; with its votes where they are given."""
    fields = asdict(wait)
    # As written, it may name where secrets stand.
    del fields["notify"]
    fields |= {"kind": wait.kind.value, "status": wait.status.value, "options": _options(wait)}
    fields["how_to_decide"] = ways_to_decide(wait)
    if votes is not None:
        fields["votes"] = [vote_json(vote) for vote in votes]
    return fields


def vote_json(vote: Vote) -> dict[str, Json]:
    """A vote as commands print it; `for` is whose it is, where a delegate gave it."""
    fields = asdict(vote)
    delegator = fields.pop("delegator")
    return {**fields, "for": delegator} if delegator else fields


def ways_to_decide(wait: Wait) -> list[str]:
    """What may be done about a wait, one line each; nothing where it is closed."""
    from agentmesh_dagster.runtime.how_to_decide import how_to_decide

    return list(how_to_decide(wait))


def short_id(wait: Wait) -> str:
    """The first characters of its id, which commands take for it."""
    from agentmesh_dagster.runtime import how_to_decide

    return how_to_decide.short_id(wait)


def _options(wait: Wait) -> list[str]:
    from agentmesh_dagster.specs.decisions import options_of

    return list(options_of(wait)) if wait.kind.is_approval else []


def suspended_json(waits: Iterable[Wait]) -> list[dict[str, Json]]:
    """The steps among open waits that `runs resume --label` answers."""
    return [{"step": wait.step_key, "label": wait.label} for wait in waits if wait.kind is WaitKind.SUSPEND]


def wait_lines(wait: Wait) -> list[str]:
    """What an open wait is, and below it how it is brought to its end."""
    title = f": {wait.title}" if wait.title else ""
    until = (
        f" (until {cell(wait.deadline_at)})" if wait.deadline_at and wait.kind is not WaitKind.TIMER else ""
    )
    head = f"{wait.step_key} waits for {_WORDS[wait.kind]}{title}{until}"
    return [" ".join(head.split()), *(f"  {line}" for line in ways_to_decide(wait))]


def print_open_waits(waits: Sequence[Wait]) -> None:
    """What a run waits for, and the commands that let it go on."""
    for wait in waits:
        head, *ways = wait_lines(wait)
        click.secho(head, fg="yellow")
        for line in ways:
            click.echo(line)


def print_wait(wait: Wait, votes: Sequence[Vote]) -> None:
    """A wait with all that helps to decide it, for people."""
    print_facts(
        {
            "approval": wait.id,
            "title": wait.title,
            "status": _standing(wait),
            "run": wait.run_id,
            "step": wait.step_key,
            "label": wait.label,
            "waits for": _WORDS[wait.kind],
            "options": ", ".join(_options(wait)) + (" (several may be chosen)" if wait.multiple else ""),
            "may decide": _who(wait) if wait.kind.is_approval else "",
            "delegated": "; ".join(_delegated(wait)),
            "launched by": wait.launcher,
            "opened": wait.created_at,
            "deadline": _deadline(wait),
            "escalates": _escalation(wait),
            "binding": wait.binding,
        }
    )
    if wait.body:
        click.echo(f"\n{wait.body.rstrip()}")
    for name, value in (("data", wait.data), ("form", wait.form_schema), ("prefill", wait.prefill)):
        if value is not None:
            _print_value(name, value)
    for vote in votes:
        comment = f": {vote.comment}" if vote.comment else ""
        click.echo(f"\n{voter(vote)} at {cell(vote.at)}, {decision_text(vote.decision)}{comment}")
        if vote.data is not None:
            _print_value("data", vote.data)
    ways = ways_to_decide(wait)
    if ways:
        click.echo("\nto decide:")
        for line in ways:
            click.echo(f"  {line}")


def voter(vote: Vote) -> str:
    """Who voted, and for whom where it was a delegate."""
    return f"{vote.by} for {vote.delegator}" if vote.delegator else vote.by


def decision_text(decision: Json) -> str:
    """A decision in one line."""
    from agentmesh_dagster.specs.fields import as_list

    if isinstance(decision, str):
        return decision
    chosen = as_list(decision)
    return "answered" if chosen is None else cell(chosen)


def _print_value(name: str, value: Json) -> None:
    click.echo(f"\n{name}:")
    click.echo(textwrap.indent(json.dumps(value, ensure_ascii=False, indent=2), "  "))


def _standing(wait: Wait) -> str:
    if wait.status is WaitStatus.OPEN:
        return "open"
    from agentmesh_dagster.specs.voters import decided_by

    answer: dict[str, Json] = wait.answer or {}
    words = decision_text(answer.get("decision")) if answer else wait.closed_by
    return f"{wait.status.value}: {words}{decided_by(answer)}, {cell(wait.decided_at)}"


def _who(wait: Wait) -> str:
    if not wait.assignees:
        return "anybody" + (" but the launcher" if wait.separation else "")
    rules = [f"{wait.required} must agree"] if wait.required > 1 else []
    rules += ["in this order"] if wait.ordered else []
    rules += ["not the launcher"] if wait.separation else []
    return ", ".join(wait.assignees) + (f" ({', '.join(rules)})" if rules else "")


def _delegated(wait: Wait) -> Iterator[str]:
    for delegation in wait.delegations:
        comment = f" ({delegation.comment})" if delegation.comment else ""
        yield f"by {delegation.by} to {delegation.to}{comment}"


def _deadline(wait: Wait) -> str | None:
    if wait.deadline_at is None or wait.kind is WaitKind.TIMER:
        return cell(wait.deadline_at) if wait.deadline_at else None
    return f"{cell(wait.deadline_at)}, then {wait.on_timeout}"


def _escalation(wait: Wait) -> str | None:
    if not wait.escalate_to or wait.status is not WaitStatus.OPEN:
        return None
    when = f" at {cell(wait.escalate_at)}" if wait.escalate_at else ""
    return f"to {', '.join(wait.escalate_to)}{when}"
