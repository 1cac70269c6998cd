"""The pass through `on_failure` or `finally`: of a run that has ended, or of a workflow that was called."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from agentmesh_dagster.records import Json, RunStatus
from agentmesh_dagster.runtime.scope import Scope, called_scope, shown_moment, step_view, workflow_input
from agentmesh_dagster.specs.documents import BodySpec
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.names import identifier

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.session import RunSession

_NEVER_RUN: Final[dict[str, Any]] = {"output": None, "error": None, "status": "pending"}


def closing_key(outer: Scope, name: str, number: int) -> str:
    """Where the steps of `on_failure` or `finally` stand: `@finally`, and after a second end `@finally#2`."""
    owner = "" if outer.owner_key is None else f"{outer.owner_key}/"
    return f"{owner}@{name}" if number <= 1 else f"{owner}@{name}#{number}"


def closing_scope(
    session: RunSession,
    outer: Scope,
    body: BodySpec,
    *,
    name: str,
    key: str,
    status: RunStatus,
    output: Json = None,
    error: Json = None,
    at: datetime | None = None,
) -> Scope:
    """The pass through a body that follows a workflow's end. It sees the workflow's input, steps and state.

    Args:
        session: Knows the rows of the workflow's nodes.
        outer: The pass through the workflow's own level, which has ended.
        body: The body.
        name: `on_failure` or `finally`, for errors.
        key: What its steps stand under, see `closing_key`.
        status: How the workflow ended: `run.status` in the body.
        output: What it came to: `context.last_output` of the body's roots.
        error: What it failed with: `run.error` in the body.
        at: When the run ended: `run.now` of the body's roots; default: when the workflow began.

    Raises:
        ExpressionError: The input of the workflow that the body calls cannot be rendered.
    """
    rules = outer.level.state
    context: dict[str, Json] = dict(outer.context)
    steps: dict[str, Json] = {}
    for node_id in outer.graph.order:
        row = session.known_row(outer.key(node_id))
        steps[identifier(node_id)] = step_view(row) if row is not None else _NEVER_RUN
        if row is not None and row.is_finished and row.routing_decision:
            # Two that wrote one key side by side are no error here: the last in document order counts.
            context = rules.joined(context, row.routing_decision.get("set", {}))
    level = outer.level.body(body)
    run = {**outer.run, "status": status.value, "error": error}
    if at is not None:
        run["now"] = shown_moment(at)
    scope = Scope(
        level,
        input=outer.input,
        run=run,
        config=outer.config,
        prefix=f"{key}/",
        owner_key=key,
        steps=steps,
        context=context,
        upstream=output,
        buffer=outer.buffer,
        is_quiet=outer.is_quiet,
        is_closing=True,
    )
    if body.workflow is None:
        return scope
    given = output
    if "input" in body.model_fields_set:
        seen = {**context, "last_output": output}
        names = {"input": outer.input, "steps": steps, "context": seen, "run": run, "config": outer.config}
        given = render(body.input, names, where=f"{name}.input")
    return called_scope(scope, level, key, workflow_input(level.workflow, given))
