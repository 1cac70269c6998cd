"""A node as a Dagster op: asks the runtime, and tells Dagster which ways out are live.

Data goes through the journal and not through Dagster: ins and outs are of type `Nothing`.
"""

# No `from __future__ import annotations` here: Dagster looks at the annotation of `context` itself, and refuses a text.

from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import dagster as dg

from agentmesh_dagster.compiler.levels import definition_name
from agentmesh_dagster.compiler.ports import DONE, WAITING, Port
from agentmesh_dagster.compiler.shown import (
    construct_op_tags,
    construct_pool,
    listed,
    may_wait,
    output_metadata,
    preview,
    waiting_metadata,
)
from agentmesh_dagster.constants import FINISH_OP, INLINE_OP
from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.runtime.finish import RunEnd, finish_run
from agentmesh_dagster.runtime.nested import run_inline, scope_at
from agentmesh_dagster.runtime.nodes.base import AnyNodeType, Say
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.routing import NodeState
from agentmesh_dagster.runtime.run_node import NodeOutcome, run_node
from agentmesh_dagster.runtime.scope import Scope
from agentmesh_dagster.runtime.session import Pinned, RunSession
from agentmesh_dagster.specs.documents import NodeSpec

RESOURCE_KEY: Final = "agentmesh"
UPSTREAM: Final = "upstream"
"""The input by which an op or a graph hangs on others."""

T = TypeVar("T")


class Host(Protocol):
    """What an op needs of its process; the resource `agentmesh` is one."""

    @property
    def captures_content(self) -> bool:
        """Whether Dagster's metadata may show inputs, outputs and questions."""
        ...

    def work(
        self,
        context: dg.OpExecutionContext,
        pinned: Pinned,
        body: Callable[[RunSession, Say], Coroutine[Any, Any, T]],
    ) -> T:
        """Runs a body on the process's loop with the session of the op's Dagster run, and returns what it returns.

        Raises:
            dagster.Failure: The body failed. The run is `failed` then.
        """
        ...


@dataclass(frozen=True)
class Place:
    """Where ops stand: in the job of a workflow, on one of its levels."""

    pinned: Pinned
    job: str
    node_types: Mapping[str, AnyNodeType]
    path: tuple[str, ...] = ()
    """See `levels.Level.path`."""

    def definition_name(self, *names: str) -> str:
        """The name of a definition of this level; without names, that of the level's own graph."""
        return definition_name(self.job, *self.path, *names)

    async def scope(self, session: RunSession) -> Scope:
        """The run's pass through the level."""
        return await scope_at(session, self.path)


def build_node_op(
    place: Place, node: NodeSpec, ports: tuple[Port, ...], *, has_upstream: bool
) -> dg.OpDefinition:
    """The op of a node, defined as `<job>__<path>__<node>` and invoked under the node's own name."""

    async def body(session: RunSession, say: Say) -> NodeOutcome:
        return await run_node(session, await place.scope(session), node.id, say)

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh
        outcome = host.work(context, place.pinned, body)
        if outcome.state is NodeState.UNDECIDED:
            if outcome.waits and shows_waiting:
                yield dg.Output(
                    None, WAITING, metadata=waiting_metadata(outcome.waits, host.captures_content)
                )
            return
        yield from live_outputs(outcome, ports, host.captures_content)

    closure = place.pinned.closure
    node_type = node_type_of(node, place.node_types)
    config = node_type.parse(node)
    shows_waiting = may_wait(closure, node, place.node_types)
    outs = construct_outs(ports)
    if shows_waiting:
        outs[WAITING] = dg.Out(dg.Nothing, is_required=False, description="What it waits for.")
    return dg.OpDefinition(
        compute_fn=compute,
        name=place.definition_name(node.id),
        description=node.description or node_type.describe(config) or None,
        ins={UPSTREAM: dg.In(dg.Nothing)} if has_upstream else {},
        outs=outs,
        tags=construct_op_tags(closure, node_type, config),
        pool=construct_pool(closure, config),
        required_resource_keys={RESOURCE_KEY},
    )


def construct_outs(ports: tuple[Port, ...]) -> dict[str, dg.Out]:
    """The outputs of a node's op, or of the last op of its graph."""
    return {p.name: dg.Out(dg.Nothing, is_required=False, description=p.description) for p in ports}


def live_outputs(
    outcome: NodeOutcome, ports: tuple[Port, ...], shows_content: bool
) -> Iterator[dg.Output[None]]:
    """What the op of a decided node yields."""
    metadata = output_metadata(outcome, shows_content)
    for port in ports:
        if outcome.row is not None and port.is_live(outcome.live_edges):
            yield dg.Output(None, port.name, metadata=metadata)


def build_finish_op(pinned: Pinned, job: str) -> dg.OpDefinition:
    """The hidden op behind `start` and all sinks, which decides how the run ended."""

    async def body(session: RunSession, _say: Say) -> RunEnd:
        return await finish_run(session)

    return _ending_op(
        pinned,
        definition_name(job, FINISH_OP),
        body,
        description="Decides how the run ended, from the journal.",
        ins={UPSTREAM: dg.In(dg.Nothing)},
    )


def build_inline_op(pinned: Pinned, job: str) -> dg.OpDefinition:
    """The only op of a workflow with `settings.execution: inline`, which walks its whole graph."""
    return _ending_op(
        pinned,
        definition_name(job, INLINE_OP),
        run_inline,
        description="Runs all nodes of the workflow in this one step.",
        ins={},
    )


def _ending_op(
    pinned: Pinned,
    name: str,
    body: Callable[[RunSession, Say], Coroutine[Any, Any, RunEnd]],
    *,
    description: str,
    ins: Mapping[str, dg.In],
) -> dg.OpDefinition:
    """An op that ends the run, and shows what it came to."""

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh
        end = host.work(context, pinned, body)
        if end.status is RunStatus.FAILED:
            raise dg.Failure(
                description=end.error["message"], metadata={"code": end.error["code"]}, allow_retries=False
            )
        shown: dict[str, Any] = {"status": end.status.value}
        if end.waits_at:
            shown["waits at"] = listed(end.waits_at)
        elif host.captures_content:
            shown["output"] = preview(end.output)
        yield dg.Output(None, DONE, metadata=shown)

    return dg.OpDefinition(
        compute_fn=compute,
        name=name,
        description=description,
        ins=ins,
        outs={DONE: dg.Out(dg.Nothing)},
        required_resource_keys={RESOURCE_KEY},
    )
