"""How single steps are shown: what each was asked, answered, and decided by whom."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import click

from agentmesh_dagster.cli.context import cell
from agentmesh_dagster.cli.wait_view import decision_text, vote_json, voter
from agentmesh_dagster.records import Json, Step, StepStatus, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.voters import decided_by

Decided = tuple[Wait, tuple[Vote, ...]]
"""An approval with its votes."""

_REFERENCES: Final = {"agent": "agent", "tool": "tool", "workflow": "workflow"}
"""By node type: the field of the rendered input that names what the node runs."""


def entities(steps: Iterable[Step]) -> dict[str, tuple[str, str]]:
    """Kind and slug of the agent, tool or workflow that a step runs, by step key; other steps are left out.

    A model call runs the agent of its node. Rows of earlier releases do not name them; what they ran stands in their
    input.
    """
    found: dict[str, tuple[str, str]] = {}
    every = {step.key: step for step in steps}
    for step in every.values():
        if step.entity_kind is not None and step.entity_slug is not None:
            found[step.key] = (step.entity_kind, step.entity_slug)
            continue
        owner = every.get(step.parent_key or "", step) if step.kind == "llm" else step
        kind = "tool" if step.kind == "tool" else owner.node_type if owner.kind == "node" else ""
        slug = (as_object(owner.input) or {}).get(_REFERENCES.get(kind, ""))
        if isinstance(slug, str):
            found[step.key] = (kind, slug.partition("@")[0])
    return found


def with_gated_calls(steps: Sequence[Step], waits: Iterable[Wait]) -> tuple[Step, ...]:
    """The steps, and those of tool calls that nobody has approved yet: the journal has a row once a call is made."""
    every = {step.key: step for step in steps}
    gated = [
        Step(
            run_id=wait.run_id,
            key=wait.step_key,
            node_id=node.node_id,
            node_type=node.node_type,
            node_name=node.node_name,
            kind="tool",
            parent_key=node.key,
            status=StepStatus.WAITING,
            input={"tool": wait.data["tool"], "input": wait.data["arguments"]},
            entity_kind="tool",
            entity_slug=wait.data["tool"],
            queued_at=wait.created_at,
            dagster_run_id=node.dagster_run_id,
        )
        for wait in waits
        if wait.kind is WaitKind.TOOL and wait.status is WaitStatus.OPEN and wait.step_key not in every
        if (node := every.get(wait.step_key.rpartition("/tool/")[0])) is not None
    ]
    return (*steps, *gated)


def step_json(
    step: Step,
    *,
    replayed: bool,
    entity: tuple[str, str] | None,
    approvals: Sequence[Decided],
) -> dict[str, Json]:
    """A step as `agentmesh runs steps --json` prints it.

    Args:
        step: The step.
        replayed: Whether an earlier Dagster run of its run wrote it.
        entity: See `entities`.
        approvals: What people were asked in it, with their votes.
    """
    return {
        "id": f"{step.run_id}/{step.key}",
        "key": step.key,
        "node_id": step.node_id,
        "node_name": step.node_name,
        "node_type": step.node_type,
        "kind": step.kind,
        "entity_kind": entity[0] if entity else None,
        "entity_slug": entity[1] if entity else None,
        "parent_key": step.parent_key,
        "predecessor_keys": list(step.predecessor_keys),
        "iteration_index": step.iteration_index,
        "status": step.status.value,
        "input": step.input,
        "output": step.output,
        "error": step.error,
        "attempt": step.attempt,
        "replayed": replayed,
        "routing_decision": step.routing_decision,
        "model_used": step.model_used,
        "child_run_id": step.child_run_id,
        "dagster_run_id": step.dagster_run_id,
        "approvals": [_approval_json(wait, votes) for wait, votes in approvals],
        "queued_at": _time(step.queued_at),
        "started_at": _time(step.started_at),
        "finished_at": _time(step.finished_at),
        "duration_ms": step.duration_ms,
        "tokens": {"input": step.input_tokens, "output": step.output_tokens},
        "cost_usd": step.cost_usd,
    }


def _approval_json(wait: Wait, votes: Sequence[Vote]) -> dict[str, Json]:
    return {
        "id": wait.id,
        "kind": wait.kind.value,
        "label": wait.label,
        "title": wait.title,
        "status": wait.status.value,
        "closed_by": wait.closed_by,
        "answer": wait.answer,
        "decided_at": _time(wait.decided_at),
        "votes": [{**vote_json(vote), "at": _time(vote.at)} for vote in votes],
    }


def print_details(
    step: Step, before: str, *, approvals: Sequence[Decided], with_input: bool, with_output: bool
) -> None:
    """What was decided in a step, and on request its input and output, below its line."""
    for wait, votes in approvals:
        click.echo(f"{before}{_standing(wait)}")
        for vote in votes:
            comment = f": {vote.comment}" if vote.comment else ""
            click.echo(f"{before}  {voter(vote)} at {cell(vote.at)}, {decision_text(vote.decision)}{comment}")
    shown: Mapping[str, tuple[bool, Json]] = {
        "input": (with_input, step.input),
        "output": (with_output, step.output),
    }
    for name, (is_wanted, value) in shown.items():
        if is_wanted and value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)
            click.echo(f"{before}{name}:")
            click.echo(textwrap.indent(text, f"{before}  ", lambda _line: True))


def _standing(wait: Wait) -> str:
    if wait.status is WaitStatus.OPEN:
        return f"approval {wait.id[:8]} is open"
    answer = as_object(wait.answer) or {}
    said = decision_text(answer["decision"]) if "decision" in answer else wait.closed_by
    return f"approval {wait.id[:8]}: {said}{decided_by(answer)}"


def _time(moment: object) -> str | None:
    from datetime import datetime

    return moment.isoformat() if isinstance(moment, datetime) else None
