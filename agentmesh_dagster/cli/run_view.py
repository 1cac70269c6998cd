"""How runs and steps are shown: JSON for machines, tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from agentmesh_dagster.cli.context import cell, print_table
from agentmesh_dagster.records import Json, Run, RunStatus, Step, StepStatus

if TYPE_CHECKING:
    from rich.table import Table

_COLORS = {
    "succeeded": "green",
    "failed": "red",
    "canceled": "yellow",
    "unknown": "red",
    "waiting": "yellow",
    "running": "cyan",
}


def step_json(step: Step, run: Run) -> dict[str, Json]:
    """A step as `agentmesh run --json` prints it."""
    return {
        "key": step.key,
        "node_type": step.node_type,
        "kind": step.kind,
        "status": step.status.value,
        "input": step.input,
        "output": step.output,
        "error": step.error,
        "attempt": step.attempt,
        # Written by an earlier Dagster run of this run, and taken over by the newest.
        "replayed": bool(run.dagster_run_ids) and step.dagster_run_id != run.dagster_run_ids[-1],
        "started_at": _time(step.started_at),
        "finished_at": _time(step.finished_at),
        "duration_ms": step.duration_ms,
        "tokens": {"input": step.input_tokens, "output": step.output_tokens},
        "cost_usd": step.cost_usd,
    }


def run_json(run: Run, steps: Iterable[Step]) -> dict[str, Json]:
    """A run with its steps, as `agentmesh run --json` prints it."""
    return {
        "run_id": run.id,
        "dagster_run_ids": list(run.dagster_run_ids),
        "status": run.status.value,
        "output": run.output,
        "error": run.error,
        "approvals": [],
        "steps": [step_json(step, run) for step in in_order(steps)],
    }


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Steps as they happened, each below its parent."""
    every = list(steps)
    started = {step.key: (step.started_at or step.queued_at or step.finished_at) for step in every}
    earliest = min((moment for moment in started.values() if moment is not None), default=None)

    def place(step: Step) -> tuple[object, ...]:
        top = step.key.split("/")[0]
        moment = started.get(top) or started[step.key] or earliest
        own = started[step.key] or moment
        return (step.status is StepStatus.SKIPPED, moment, top, own, step.key)

    return sorted(every, key=place)


def steps_table(steps: Iterable[Step]) -> Table:
    """The steps as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("step", "left"), ("type", "left"), ("status", "left"), ("time", "right"), ("tokens", "right")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType] - the words are rich's
    for step in in_order(steps):
        key, kind, status, time, tokens = _cells(step)
        table.add_row(Text(key), Text(kind), Text(status, style=_COLORS.get(status, "dim")), Text(time), Text(tokens))
    return table


def print_run(run: Run, steps: Sequence[Step]) -> None:
    """A run with its steps, for people."""
    if click.get_text_stream("stdout").isatty():
        from rich.console import Console

        Console().print(steps_table(steps))
    else:
        print_table(
            ("step", "type", "status", "time", "tokens"), [_cells(step) for step in in_order(steps)], empty="no steps"
        )
    duration = f" in {run.duration_ms / 1000:.2f} s" if run.duration_ms is not None else ""
    tokens = f"{run.input_tokens} tokens in, {run.output_tokens} out"
    click.echo()
    click.secho(
        f"run {run.id} {run.status.value}{duration}; {tokens}, {run.cost_usd:.6f} USD", fg=_COLORS.get(run.status.value)
    )
    if run.status is RunStatus.SUCCEEDED:
        click.echo(json.dumps(run.output, ensure_ascii=False, indent=2))
    elif run.error is not None:
        click.echo(f"{run.error['code']}: {run.error['message']}")


def _cells(step: Step) -> tuple[str, str, str, str, str]:
    depth = step.key.count("/") - (step.kind in ("llm", "tool"))
    shown = "  " * max(depth, 0) + ("/".join(step.key.split("/")[-2:]) if depth > 0 else step.key)
    time = "-" if step.duration_ms is None else f"{step.duration_ms / 1000:.2f} s"
    tokens = f"{step.input_tokens}+{step.output_tokens}" if step.input_tokens or step.output_tokens else "-"
    kind = step.model_used or (step.node_type if step.kind == "node" else step.kind)
    return shown, cell(kind), step.status.value, time, tokens


def _time(moment: object) -> str | None:
    from datetime import datetime

    return moment.isoformat() if isinstance(moment, datetime) else None
