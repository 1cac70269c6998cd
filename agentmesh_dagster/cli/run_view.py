"""How runs and steps are shown: JSON for machines, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

import click

from agentmesh_dagster.cli.context import cell, print_table
from agentmesh_dagster.cli.step_view import Decided, entities, print_details, step_json, with_gated_calls
from agentmesh_dagster.cli.wait_view import open_wait_json, print_open_waits, suspended_json
from agentmesh_dagster.records import Json, Run, RunStatus, Step, StepStatus, Wait, WaitStatus

if TYPE_CHECKING:
    from rich.table import Table

    from agentmesh_dagster.store import Store

_COLORS = {
    "succeeded": "green",
    "failed": "red",
    "canceled": "yellow",
    "unknown": "red",
    "waiting": "yellow",
    "running": "cyan",
}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A run with what is shown beside it."""

    run: Run
    steps: tuple[Step, ...]
    waits: tuple[Wait, ...] = ()
    """The open ones, the oldest first."""
    approvals: Mapping[str, Sequence[Decided]] = field(default_factory=dict[str, Sequence[Decided]])
    """By step key: what people were or are asked, with their votes."""
    children: tuple[Run, ...] = ()
    """The runs that it has started."""
    finalizing: tuple[str, ...] = ()
    """Those of its Dagster runs that finalized it."""
    finalize_error: Json = None
    """Why `on_failure` or `finally` failed after its last end."""

    @cached_property
    def entities(self) -> dict[str, tuple[str, str]]:
        """See `step_view.entities`."""
        return entities(self.steps)

    @property
    def finalized(self) -> bool | None:
        """Whether what its end asks for has been done; None where it asks for nothing, or the run goes on."""
        run = self.run
        asks = run.finalizers == "always" or (run.finalizers == "failure" and run.status is RunStatus.FAILED)
        return run.finalized >= run.endings if asks and run.status.is_final else None

    def is_replayed(self, step: Step) -> bool:
        """Whether an earlier Dagster run of this run wrote it, and the newest has taken it over."""
        working = [each for each in self.run.dagster_run_ids if each not in self.finalizing]
        newest = {*working[-1:], *self.finalizing}
        return bool(self.run.dagster_run_ids) and step.dagster_run_id not in newest


def load_shown(store: Store, run: Run) -> Shown:
    """A run with its steps, its open waits, its children, and what became of its `on_failure` and `finally`."""
    events = store.runs.events(run.id, type="run.*") if run.finalizers else []
    failed = [
        event.payload
        for event in events
        if event.type == "run.finalize_failed" and event.payload["ending"] == run.endings
    ]
    waits = store.waits.list(run.project, run_id=run.id, limit=None)
    votes = store.waits.votes_of_run(run.id) if waits else {}
    approvals: dict[str, list[Decided]] = {}
    for wait in waits:
        if wait.kind.is_approval:
            approvals.setdefault(wait.step_key, []).append((wait, tuple(votes.get(wait.id, ()))))
    return Shown(
        run=run,
        steps=with_gated_calls(store.runs.steps(run.id), waits),
        waits=tuple(wait for wait in waits if wait.status is WaitStatus.OPEN),
        approvals=approvals,
        children=tuple(store.runs.children(run.id)),
        finalizing=tuple(
            event.payload["dagster_run_id"] for event in events if event.type == "run.finalizing"
        ),
        finalize_error=_finalize_error(failed[0]) if failed else None,
    )


def _finalize_error(payload: Json) -> Json:
    given_up = {
        "code": "finalize-given-up",
        "message": f"the workers of {payload.get('attempts')} Dagster runs that were to finalize it were lost",
    }
    return payload.get("error") or given_up


def shown_json(step: Step, shown: Shown) -> dict[str, Json]:
    """A step of a run as `agentmesh run --json` prints it."""
    return step_json(
        step,
        replayed=shown.is_replayed(step),
        entity=shown.entities.get(step.key),
        approvals=shown.approvals.get(step.key, ()),
    )


def run_json(shown: Shown) -> dict[str, Json]:
    """A run with its steps and its open waits, as `agentmesh run --json` prints it."""
    run = shown.run
    return {
        "run_id": run.id,
        "dagster_run_ids": list(run.dagster_run_ids),
        "status": run.status.value,
        "output": run.output,
        "error": run.error,
        "finalized": shown.finalized,
        "finalize_error": shown.finalize_error,
        "approvals": [open_wait_json(wait) for wait in shown.waits],
        "suspended": suspended_json(shown.waits),
        "steps": [shown_json(step, shown) for step in in_order(shown.steps)],
    }


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A step with what happened inside it."""

    step: Step
    depth: int
    below: tuple[Branch, ...]


def step_tree(steps: Iterable[Step]) -> tuple[Branch, ...]:
    """The steps as they happened, each below its parent.

    A skipped step follows the last of the steps that did not lead to it; those of an end come last among siblings.
    """
    every = {step.key: step for step in steps}
    below: dict[str | None, list[Step]] = {}
    for step in every.values():
        below.setdefault(step.parent_key if step.parent_key in every else None, []).append(step)

    def branches(parent: str | None, depth: int) -> tuple[Branch, ...]:
        return tuple(
            Branch(step=step, depth=depth, below=branches(step.key, depth + 1))
            for step in _siblings(below.get(parent, ()))
        )

    return branches(None, 0)


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Steps as they happened, each after its parent."""
    return [branch.step for branch in flat(step_tree(steps))]


def flat(branches: Iterable[Branch]) -> Iterator[Branch]:
    """All branches, each before what is below it."""
    for branch in branches:
        yield branch
        yield from flat(branch.below)


def _siblings(steps: Sequence[Step]) -> list[Step]:
    """Steps of one level in their order."""
    skipped = [step for step in steps if step.status is StepStatus.SKIPPED and step.iteration_index is None]
    aside = {step.key for step in skipped if step.predecessor_keys}
    placed = sorted((step for step in steps if step.key not in aside), key=_place)
    waiting = sorted((step for step in skipped if step.key in aside), key=_place)
    while waiting:
        keys = {step.key for step in waiting}
        # Behind other skipped ones where they hang on these; a loop of edges cannot be.
        ready = [step for step in waiting if keys.isdisjoint(step.predecessor_keys)] or waiting
        for step in ready:
            before = [index for index, each in enumerate(placed) if each.key in step.predecessor_keys]
            at = max(before, default=len(placed) - 1) + 1
            # Those that hang on the same step keep their order.
            while at < len(placed) and placed[at].key in aside and before:
                at += 1
            placed.insert(at, step)
        waiting = [step for step in waiting if step not in ready]
    return placed


def _place(step: Step) -> tuple[object, ...]:
    moment = step.started_at or step.queued_at or step.finished_at
    shown = "" if moment is None else moment.isoformat(timespec="microseconds")
    # Items and iterations stand in their own order, whenever they were tried again; what follows an end comes last.
    index = -1 if step.iteration_index is None else step.iteration_index
    is_skipped = step.status is StepStatus.SKIPPED and step.iteration_index is None
    is_closing = _key_below(step.key, step.parent_key).startswith("@")
    return (is_closing, is_skipped, index, moment is None, shown, step.key)


def steps_table(steps: Iterable[Step]) -> Table:
    """The steps as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("step", "left"),
        ("type", "left"),
        ("status", "left"),
        ("time", "right"),
        ("tokens", "right"),
    ):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType] - the words are rich's
    for branch in flat(step_tree(steps)):
        key, kind, status, time, tokens = _cells(branch)
        table.add_row(
            Text(key), Text(kind), Text(status, style=_COLORS.get(status, "dim")), Text(time), Text(tokens)
        )
    return table


def print_continued(shown: Shown) -> None:
    """A run that has gone on, with the steps that are new."""
    kept = [step for step in shown.steps if not shown.is_replayed(step)]
    needed = {key for step in kept for key in _above(step, shown)} | {step.key for step in kept}
    steps = [step for step in shown.steps if step.key in needed]
    before = len(shown.steps) - len(steps)
    _print_steps(steps)
    if before:
        click.echo(
            f"{before} {'step' if before == 1 else 'steps'} had finished before: `agentmesh runs show` has all"
        )
    _print_outcome(shown)


def _above(step: Step, shown: Shown) -> Iterator[str]:
    by_key = {each.key: each for each in shown.steps}
    parent = step.parent_key
    while parent is not None and parent in by_key:
        yield parent
        parent = by_key[parent].parent_key


def print_run(shown: Shown, note: str = "") -> None:
    """A run with its steps and what it waits for, for people."""
    _print_steps(shown.steps)
    _print_outcome(shown, note)


def _print_steps(steps: Sequence[Step]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(steps_table(steps))
    else:
        print_table(
            ("step", "type", "status", "time", "tokens"),
            [_cells(branch) for branch in flat(step_tree(steps))],
            empty="no steps",
        )


def _print_outcome(shown: Shown, note: str = "") -> None:
    run, waits = shown.run, shown.waits
    duration = f" in {run.duration_ms / 1000:.2f} s" if run.duration_ms is not None else ""
    tokens = f"{run.input_tokens} tokens in, {run.output_tokens} out"
    click.echo()
    click.secho(
        f"run {run.id} {run.status.value}{duration}; {tokens}, {run.cost_usd:.6f} USD",
        fg=_COLORS.get(run.status.value),
    )
    if run.status is RunStatus.SUCCEEDED:
        click.echo(json.dumps(run.output, ensure_ascii=False, indent=2))
    elif run.error is not None:
        click.echo(f"{_failed_at(shown)}{run.error['code']}: {run.error['message']}")
    _print_finalizing(shown)
    if run.error is not None and run.error["code"] == "rejected":
        click.echo(
            "the decision stands: start a new run, or give the node an edge from its handle 'rejected'"
        )
    elif run.status in (RunStatus.FAILED, RunStatus.CANCELED) and not note:
        click.echo(
            f"`agentmesh runs retry {run.id[:8]}` goes on where it stopped, without repeating what finished"
        )
    print_open_waits(waits)
    for child in shown.children:
        click.echo(f"started run {child.id} ({child.slug}), which is {child.status.value}")
    if note:
        click.echo(f"note: {note}")
    elif run.status is RunStatus.WAITING and not waits:
        click.echo(f"what it waited for has come: `agentmesh runs resume {run.id[:8]}`, or a daemon, goes on")


def _failed_at(shown: Shown) -> str:
    """Where the run's error comes from: the innermost step that has it."""
    error = shown.run.error
    having = [step.key for step in shown.steps if step.error and _said(step.error) == _said(error)]
    return f"{max(having, key=len)}: " if having else ""


def _said(error: Json) -> tuple[Json, Json]:
    return error.get("code"), error.get("message")


def _print_finalizing(shown: Shown) -> None:
    run, error = shown.run, shown.finalize_error
    which = "on_failure" if run.finalizers == "failure" else "finally"
    if error is not None:
        click.secho(f"{which} failed: {error['code']}: {error['message']}", fg="red")
    elif shown.finalized:
        click.echo(f"{which} has been run")
    elif shown.finalized is False and run.status is RunStatus.FAILED and run.retries_left:
        click.echo(f"{which} is run when the run is retried no more")
    elif shown.finalized is False:
        click.echo(f"{which} is due: `agentmesh runs resume {run.id[:8]}`, or a daemon, runs it")


@dataclass(frozen=True, kw_only=True)
class Details:
    """What stands below the line of a step."""

    shown: Shown | None = None
    """The run, for what people decided; None leaves that out."""
    with_input: bool = False
    with_output: bool = False


def print_trace(steps: Iterable[Step], details: Details | None = None) -> None:
    """The steps as a tree, with what each took and what went wrong."""
    branches = step_tree(steps)
    if not branches:
        click.echo("no steps yet", err=True)
    for index, branch in enumerate(branches):
        _print_branch(branch, "", details or Details(), is_last=index == len(branches) - 1)


def _print_branch(branch: Branch, before: str, details: Details, *, is_last: bool) -> None:
    step = branch.step
    key, kind, status, time, tokens = _cells(branch)
    shown = details.shown
    entity = None if shown is None else shown.entities.get(step.key)
    facts = [
        step.node_name if shown is not None and step.kind == "node" else "",
        kind if entity is None else " ".join(dict.fromkeys((kind, entity[1]))),
        time,
        "" if tokens == "-" else f"{tokens} tokens",
    ]
    if step.cost_usd:
        facts.append(f"{step.cost_usd:.6f} USD")
    if step.attempt > 1:
        facts.append(f"attempt {step.attempt}")
    if shown is not None and step.child_run_id is not None:
        facts.append(f"run {step.child_run_id}")
    if shown is not None and step.routing_decision and step.routing_decision["handles"]:
        facts.append(f"to {', '.join(step.routing_decision['handles'])}")
    standing = click.style(status, fg=_COLORS.get(status))
    joint = "└─ " if is_last else "├─ "
    click.echo(
        f"{before}{joint}{key.strip()}  {standing}  {', '.join(fact for fact in facts if fact not in ('', '-'))}"
    )
    inner = before + ("   " if is_last else "│  ")
    below = f"{inner}{'│  ' if branch.below else '   '}"
    if step.error is not None:
        lines = f"{step.error.get('code', 'error')}: {step.error.get('message', '')}".splitlines()
        for line in lines:
            click.secho(f"{below}{line}", fg="red")
    print_details(
        step,
        below,
        approvals=() if shown is None else shown.approvals.get(step.key, ()),
        with_input=details.with_input,
        with_output=details.with_output,
    )
    for index, child in enumerate(branch.below):
        _print_branch(child, inner, details, is_last=index == len(branch.below) - 1)


def trace_json(branch: Branch, shown: Shown) -> dict[str, Json]:
    """A step with what is below it, as `agentmesh runs trace --json` prints it."""
    return {
        **shown_json(branch.step, shown),
        "children": [trace_json(child, shown) for child in branch.below],
    }


def run_facts(run: Run) -> dict[str, Json]:
    """A run without its steps, input and output, as `agentmesh runs list --json` prints it."""
    return {
        "run_id": run.id,
        "project": run.project,
        "kind": run.kind,
        "slug": run.slug,
        "version": run.version,
        "publication": run.publication,
        "status": run.status.value,
        "source": run.source.value,
        "triggered_by": run.triggered_by,
        "dagster_run_ids": list(run.dagster_run_ids),
        "parent_run_id": run.parent_run_id,
        "parent_step_key": run.parent_step_key,
        "error": run.error,
        "queued_at": run.queued_at,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
        "suspended_at": run.suspended_at,
        "suspended_steps": list(run.suspended_steps),
        "resumed_at": run.resumed_at,
        "duration_ms": run.duration_ms,
        "steps_executed": run.steps_executed,
        "tokens": {"input": run.input_tokens, "output": run.output_tokens},
        "cost_usd": run.cost_usd,
    }


def _cells(branch: Branch) -> tuple[str, str, str, str, str]:
    step = branch.step
    name = _key_below(step.key, step.parent_key) if branch.depth else step.key
    shown = "  " * branch.depth + _readable(name)
    time = "-" if step.duration_ms is None else f"{step.duration_ms / 1000:.2f} s"
    tokens = f"{step.input_tokens}+{step.output_tokens}" if step.input_tokens or step.output_tokens else "-"
    kind = step.model_used or (step.node_type if step.kind == "node" else step.kind)
    return shown, cell(kind), step.status.value, time, tokens


def _readable(key: str) -> str:
    """A step key with the keys of items as their author wrote them: `g[漢]`, and not `g[%E6%BC%A2]`."""
    text = unquote(key)
    return text if text.isprintable() else key


def _key_below(key: str, parent: str | None) -> str:
    """What tells a step from its parent: `gate` below `a/each[x]`, and `each[x]` below `a/each`."""
    if parent is None or not key.startswith(parent):
        return key
    is_inside = key[len(parent) :].startswith("/")
    return key[len(parent) + 1 :] if is_inside else key[parent.rfind("/") + 1 :]
