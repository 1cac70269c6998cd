"""What containers share: several passes side by side, and what they came to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentmesh_dagster.records import Json, Step, Wait
from agentmesh_dagster.runtime.nodes.base import NodeCall, Preparation
from agentmesh_dagster.runtime.row_buffer import RowBuffer
from agentmesh_dagster.runtime.scope import Scope, called_scope, shown_moment, state_conflict, workflow_input
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.documents import BodySpec
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.state import StateRules


@dataclass
class Standing:
    """What the passes of a container have come to so far."""

    failure: Exception | None = None
    """The first that was not handled."""
    failures: int = 0
    failed: set[str] = field(default_factory=set[str])
    """The keys of those that failed, where they were given."""
    is_waiting: bool = False
    waits: list[Wait] = field(default_factory=list[Wait])

    async def attempt(self, run: Callable[[], Awaitable[Step]], key: str = "") -> Step | None:
        """Runs one pass; None where it failed or waits, which is noted."""
        try:
            return await run()
        except Suspended as suspended:
            self.is_waiting = True
            self.waits += suspended.waits
        except Exception as error:  # noqa: BLE001 - raised when the other passes have ended
            self.failure = self.failure or error
            self.failures += 1
            self.failed.add(key)
        return None

    def settle(self) -> None:
        """Raises what keeps the container from its end: the first failure, or else what waits."""
        if self.failure is not None:
            raise self.failure
        if self.is_waiting:
            raise Suspended(self.waits)


def body_scope(
    preparation: Preparation,
    body: BodySpec,
    owner_key: str,
    *,
    upstream: Json,
    place: str,
    names: Mapping[str, Json] | None = None,
    context: Mapping[str, Json] | None = None,
    now: datetime | None = None,
    buffer: RowBuffer | None = None,
    is_quiet: bool = False,
) -> Scope:
    """One pass through a body of a container.

    Args:
        preparation: The container's.
        body: The body.
        owner_key: The key of the pass's own row.
        upstream: What its roots see as the output before them, and a workflow gets as its input by default.
        place: Where the body stands in the config, for errors.
        names: `item`, `index`, `iteration`.
        context: The state; default: as the container sees it.
        now: When the pass before it finished; default: `run.now` is as the container sees it.
        buffer: Where its rows wait, if it is walked.
        is_quiet: Whether its nodes keep out of the readable log.
    """
    outer = preparation.scope
    seen = preparation.names
    state = seen["context"] if context is None else context
    level = outer.level.body(body)
    run: Mapping[str, Json] = seen["run"]
    if now is not None:
        run = {**run, "now": shown_moment(now)}
    scope = Scope(
        level,
        input=seen["input"],
        run=run,
        config=outer.config,
        prefix=f"{owner_key}/",
        owner_key=owner_key,
        steps=seen["steps"],
        context=state,
        upstream=upstream,
        locals={**outer.locals, **(names or {})},
        buffer=buffer or outer.buffer,
        is_quiet=is_quiet,
        is_closing=outer.is_closing,
    )
    if body.workflow is None:
        return scope
    given: Json = upstream
    if "input" in body.model_fields_set:
        inside = {**seen, **scope.locals, "context": {**state, "last_output": upstream}}
        given = render(body.input, inside, where=f"node {preparation.node.id!r}, config.{place}.input")
    return called_scope(scope, level, owner_key, workflow_input(level.workflow, given))


def joined_writes(
    call: NodeCall, parts: Sequence[tuple[str, Mapping[str, Json]]], *, in_turn: bool = False
) -> dict[str, Json]:
    """What the passes of a container have written to the state, joined in their order.

    Args:
        call: The container's.
        parts: Step key and writes of each pass.
        in_turn: Whether each pass saw the writes of those before it.

    Raises:
        NodeError: Two passes side by side have written one key that no reducer joins (code `state-conflict`).
    """
    rules: StateRules = call.scope.level.state
    writers: dict[str, str] = {}
    appended: dict[str, list[Any]] = {}
    merged: dict[str, dict[str, Any]] = {}
    joined: dict[str, Json] = {}
    for key, written in parts:
        if not written:
            continue
        for name, value in written.items():
            reducer = rules.reducers.get(name)
            first = writers.setdefault(name, key)
            if first != key and reducer is None and not in_turn:
                raise state_conflict(name, (first, key), f"what comes after {call.key!r}")
            # Not anew for each pass: there may be thousands.
            if reducer == "append":
                appended.setdefault(name, []).extend(value)
            elif reducer == "merge":
                merged.setdefault(name, {}).update(value)
            else:
                joined = rules.joined(joined, {name: value})
    return {**joined, **appended, **merged}
