"""A body for each item of a list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final
from urllib.parse import quote

from agentmesh_dagster.deadline import cut_off
from agentmesh_dagster.errors import AgentMeshError, ExpressionError, NodeError, ReplayError, RunRefused
from agentmesh_dagster.records import Json, Step, StepStatus, WaitStatus
from agentmesh_dagster.runtime.journalled import StepAnswer
from agentmesh_dagster.runtime.level_end import StepFailed
from agentmesh_dagster.runtime.nodes.base import (
    NodeCall,
    NodeResult,
    NodeType,
    Preparation,
    part_answer,
    state_of,
)
from agentmesh_dagster.runtime.nodes.passes import Standing, body_scope, joined_writes
from agentmesh_dagster.runtime.waiting import Suspended
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.expressions import evaluate
from agentmesh_dagster.specs.fields import as_list
from agentmesh_dagster.specs.nodes import ForeachConfig
from agentmesh_dagster.specs.schema_parts import show

MAX_KEY_CHARS: Final = 100
_PLAIN: Final = "-_.:@ +="
"""What stands in an item's step key as it is, besides letters and digits."""
FOLLOWED_ITEMS: Final = 20
"""Up to so many items, the log follows the nodes in them; a line is a database write of Dagster's."""
PROGRESS_S: Final = 2.0
"""How often the log says how far the items are."""


@dataclass(frozen=True)
class Item:
    """One item with its place."""

    index: int
    name: str
    """What stands in the step key, between the brackets."""
    value: Json


@dataclass
class Tally:
    """What the items of a node share while they are at work."""

    accepted: int = 0
    """Failures that the node has put up with."""
    is_quiet: bool = False
    """Whether there are too many items for the log to follow each."""


@dataclass
class _Progress:
    """How far the items are."""

    outputs: dict[int, Json] = field(default_factory=dict[int, Any])
    writes: dict[int, tuple[str, Mapping[str, Json]]] = field(
        default_factory=dict[int, tuple[str, Mapping[str, Json]]]
    )
    told_at: float = 0.0


class TooManyFailures(NodeError):
    """More items failed than a node puts up with; worth another attempt where the last failure was."""

    default_code = "too-many-failures"

    def __init__(self, message: str, *, path: str, error: Json, retryable: bool) -> None:
        super().__init__(message, path=path, context={"error": error})
        self._retryable = retryable

    @property
    def retryable(self) -> bool:
        return self._retryable


class ForeachNode(NodeType[ForeachConfig]):
    """Runs a body for each item, `concurrency` at a time; what is finished is kept, whatever becomes of the others."""

    name: ClassVar[str] = "foreach"
    config_model = ForeachConfig
    kinds: ClassVar[tuple[str, ...]] = ("foreach",)

    def describe(self, config: ForeachConfig) -> str:
        how = "each a step of its own" if config.fanout else f"{config.concurrency} at a time"
        return (
            f"for each of {config.items}, {how}" if isinstance(config.items, str) else f"for each item, {how}"
        )

    def request(self, config: ForeachConfig, preparation: Preparation) -> Json:
        found = items(config, preparation)
        # The items' own rows have their values.
        return {"items": len(found), "hash": content_hash([[item.name, item.value] for item in found])}

    async def run(self, config: ForeachConfig, call: NodeCall) -> NodeResult:
        found = items(config, call.preparation)
        progress, standing = _Progress(), Standing()
        progress.told_at = call.environment.clock.monotonic_s()
        if call.buffer is None:
            # Items that were steps of their own, maybe of other processes.
            await call.session.rows([item_key(call.key, item.name) for item in found])
        known = (call.session.known_row(item_key(call.key, item.name)) for item in found)
        accepted = count_accepted(row for row in known if row is not None)
        tally = Tally(accepted, is_quiet=len(found) > FOLLOWED_ITEMS)
        pending = iter(found)

        async def work_through() -> None:
            for item in pending:
                row = await standing.attempt(lambda item=item: run_item(config, call, item, tally))
                if row is not None:
                    _take(progress, item, row)
                    self._tell(call, progress, tally, len(found))
                if standing.failure is not None:
                    # What is at work goes on to its end; no further item begins.
                    return

        if config.concurrency == 1 or len(found) == 1:
            await work_through()
        else:
            tasks = {
                asyncio.ensure_future(work_through()) for _ in range(min(config.concurrency, len(found)))
            }
            try:
                await asyncio.gather(*tasks)
            finally:
                await cut_off(tasks)
        standing.settle()
        return _result(config, call, found, progress)

    def _tell(self, call: NodeCall, progress: _Progress, tally: Tally, total: int) -> None:
        now = call.environment.clock.monotonic_s()
        done = len(progress.outputs)
        if now - progress.told_at >= PROGRESS_S or (done == total and total > 1):
            progress.told_at = now
            failed = f", {tally.accepted:,} of them failed" if tally.accepted else ""
            call.preparation.say(f"{call.key}: {done:,} of {total:,} items done{failed}")


def items(config: ForeachConfig, preparation: Preparation) -> list[Item]:
    """The items with their names.

    Raises:
        ExpressionError: `items` gives no list, or `key` no text or whole number.
        NodeError: Two items have one key (code `item-key`).
    """
    where = f"node {preparation.node.id!r}, config"
    rendered = preparation.render(config.items, "items")
    values = as_list(rendered)
    if values is None:
        raise ExpressionError(f"{where}.items: gives {show(rendered)}, which is no list")
    if config.key is None:
        return [Item(index, str(index), value) for index, value in enumerate(values)]
    found: list[Item] = []
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        names = {**preparation.names, "item": value, "index": index}
        given = evaluate(config.key, names, where=f"{where}.key")
        if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
            raise ExpressionError(
                f"{where}.key: gives {given!r:.80} for item {index}; it must be a text or a whole number"
            )
        name = quote(str(given), safe=_PLAIN)
        if len(name) > MAX_KEY_CHARS:
            raise ExpressionError(
                f"{where}.key: gives more than {MAX_KEY_CHARS} characters for item {index}: choose a shorter key"
            )
        first = seen.setdefault(name, index)
        if first != index:
            raise NodeError(
                f"{where}.key: gives {given!r:.80} for the items {first} and {index}; no two items may have one key",
                code="item-key",
            )
        found.append(Item(index, name, value))
    return found


def item_key(node_key: str, name: str) -> str:
    """The step key of an item."""
    return f"{node_key}[{name}]"


def count_accepted(rows: Iterable[Step]) -> int:
    """How many items have failed such that the node put up with it."""
    return sum(row.is_finished and row.status is StepStatus.FAILED for row in rows)


async def run_item(config: ForeachConfig, call: NodeCall, item: Item, tally: Tally) -> Step:
    """Runs one item, or replays it.

    Returns:
        Its finished row; of a failure that the node puts up with, a failed one.
    """
    key = item_key(call.key, item.name)
    if call.buffer is None:
        return _ended_item(call, key)
    scope = body_scope(
        call.preparation,
        config.body,
        key,
        upstream=item.value,
        place="body",
        names={"item": item.value, "index": item.index},
        buffer=call.buffer,
        is_quiet=tally.is_quiet,
    )

    async def work() -> StepAnswer:
        try:
            return part_answer(await call.run_pass(scope))
        except (ReplayError, RunRefused):
            raise
        except Exception as error:
            if config.on_item_error == "fail":
                raise
            if config.max_failures is not None and tally.accepted >= config.max_failures:
                problem = call.session.error_json(error)
                raise TooManyFailures(
                    f"{call.key}: more than max_failures = {config.max_failures} items failed; the last one, {key!r}: "
                    f"{problem['message']}",
                    path=key,
                    error=problem,
                    retryable=not isinstance(error, AgentMeshError) or error.retryable,
                ) from error
            tally.accepted += 1
            problem = call.session.error_json(error)
            call.preparation.say(f"{key}: failed, {config.on_item_error}: {problem['message']}")
            # With a decision it is an answer, and stays one however often the node is run again.
            return StepAnswer(
                status=StepStatus.FAILED, error=problem, routing_decision={"handles": [], "edges": []}
            )

    return await call.part("item", key, {"item": item.value}, scope, work, index=item.index)


def _ended_item(call: NodeCall, key: str) -> Step:
    """The row of an item that was a step of its own, as that step left it: to collect it is no further attempt."""
    row = call.session.known_row(key)
    if row is not None and row.is_finished:
        return row
    if row is not None and row.status is StepStatus.WAITING:
        waits = call.session.waits_under(key)
        raise Suspended([wait for wait in waits if wait.status is WaitStatus.OPEN])
    if row is None or row.status is not StepStatus.FAILED or row.error is None:
        raise NodeError(f"step {key!r} did not come to its end", code="unfinished", path=key)
    raise StepFailed(row.error)


def _take(progress: _Progress, item: Item, row: Step) -> None:
    progress.outputs[item.index] = row.output if row.status is not StepStatus.FAILED else _Failed(row.error)
    written = state_of(row)
    if written:
        progress.writes[item.index] = (row.key, written)


@dataclass(frozen=True)
class _Failed:
    error: Json


def _outputs(config: ForeachConfig, progress: _Progress) -> Iterator[Json]:
    for index in sorted(progress.outputs):
        output = progress.outputs[index]
        if not isinstance(output, _Failed):
            yield output
        elif config.on_item_error == "collect":
            yield {"error": output.error}


def _result(config: ForeachConfig, call: NodeCall, found: list[Item], progress: _Progress) -> NodeResult:
    failed = sum(isinstance(output, _Failed) for output in progress.outputs.values())
    return NodeResult(
        output=list(_outputs(config, progress)),
        state=joined_writes(call, [progress.writes[index] for index in sorted(progress.writes)]),
        counts={"items": len(found), "succeeded": len(found) - failed, "failed": failed},
    )
