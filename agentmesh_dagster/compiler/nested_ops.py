"""The ops of a nested graph that are no nodes: the first and the last of a container, and those of its items."""

# No `from __future__ import annotations` here: Dagster looks at the annotation of `context` itself, and refuses a text.

from collections.abc import Iterator
from typing import Any, Final

import dagster as dg

from agentmesh_dagster.compiler.item_keys import NO_ITEM, item_key, mapping_key
from agentmesh_dagster.compiler.ops import RESOURCE_KEY, UPSTREAM, Host, Place, construct_outs, live_outputs
from agentmesh_dagster.compiler.ports import DONE, Port
from agentmesh_dagster.compiler.shown import construct_op_tags, output_metadata, waiting_metadata
from agentmesh_dagster.constants import BEGIN_OP, END_OP, ITEM_OP
from agentmesh_dagster.runtime.nested import fanned_items, run_fanned_item
from agentmesh_dagster.runtime.nodes.base import Say
from agentmesh_dagster.runtime.registry import node_type_of
from agentmesh_dagster.runtime.routing import NodeState
from agentmesh_dagster.runtime.run_node import NodeOutcome, begin_node, run_node
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.specs.documents import NodeSpec

GO: Final = "go"
"""The output of the first op when what is in the container may begin."""
ITEMS: Final = "items"
"""The dynamic output of a fan-out, and the input that collects its items."""


def build_begin_op(place: Place, node: NodeSpec, *, has_upstream: bool) -> dg.OpDefinition:
    """The first op of a container. The last one hangs on its `done`, the levels on its `go`."""

    async def body(session: RunSession, say: Say) -> NodeOutcome:
        return await begin_node(session, await place.scope(session), node.id, say)

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh
        outcome = host.work(context, place.pinned, body)
        if outcome.state is NodeState.READY:
            yield dg.Output(None, GO)
        if outcome.state is not NodeState.UNDECIDED:
            yield dg.Output(None, DONE)

    return dg.OpDefinition(
        compute_fn=compute,
        name=place.definition_name(node.id, BEGIN_OP),
        description=f"Decides whether {node.id!r} runs, and begins it.",
        ins=_upstream(has_upstream),
        outs={
            GO: dg.Out(dg.Nothing, is_required=False, description="What is in it may begin."),
            DONE: dg.Out(dg.Nothing, is_required=False, description="It is decided whether it runs."),
        },
        tags=_tags(place, node),
        required_resource_keys={RESOURCE_KEY},
    )


def build_fan_op(place: Place, node: NodeSpec, *, has_upstream: bool) -> dg.OpDefinition:
    """The first op of a fanned-out `foreach`: a dynamic output for each item."""

    async def body(session: RunSession, say: Say) -> tuple[NodeState, tuple[str, ...]]:
        scope = await place.scope(session)
        outcome = await begin_node(session, scope, node.id, say)
        if outcome.state is not NodeState.READY:
            return outcome.state, ()
        return outcome.state, await fanned_items(session, scope, node.id)

    def compute(
        context: dg.OpExecutionContext, _inputs: Any
    ) -> Iterator[dg.Output[None] | dg.DynamicOutput[None]]:
        host: Host = context.resources.agentmesh
        state, items = host.work(context, place.pinned, body)
        if state is NodeState.UNDECIDED:
            return
        yield dg.Output(None, DONE, metadata={"items": len(items)})
        for key in [mapping_key(item) for item in items] or [NO_ITEM]:
            yield dg.DynamicOutput(None, mapping_key=key, output_name=ITEMS)

    return dg.OpDefinition(
        compute_fn=compute,
        name=place.definition_name(node.id, BEGIN_OP),
        description=f"Decides whether {node.id!r} runs, and gives a step to each item.",
        ins=_upstream(has_upstream),
        outs={
            DONE: dg.Out(dg.Nothing, is_required=False, description="It is decided whether it runs."),
            ITEMS: dg.DynamicOut(dg.Nothing, is_required=False, description="The items."),
        },
        tags=_tags(place, node),
        required_resource_keys={RESOURCE_KEY},
    )


def build_item_op(place: Place, node: NodeSpec) -> dg.OpDefinition:
    """The op of one item of a fanned-out `foreach`, which walks the body."""

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh
        key = context.get_mapping_key()
        if key is None:
            raise dg.DagsterInvariantViolationError(f"{context.op_handle} hangs on no dynamic output")
        if key == NO_ITEM:
            yield dg.Output(None, DONE)
            return
        item = item_key(key)

        async def body(session: RunSession, say: Say) -> NodeOutcome:
            return await run_fanned_item(session, await place.scope(session), node.id, item, say)

        outcome = host.work(context, place.pinned, body)
        is_waiting = outcome.state is NodeState.UNDECIDED
        shows = host.captures_content
        shown = waiting_metadata(outcome.waits, shows) if is_waiting else output_metadata(outcome, shows)
        # An item that waits yields it too: what collects the items reads the journal.
        yield dg.Output(None, DONE, metadata={"item": item, **shown})

    return dg.OpDefinition(
        compute_fn=compute,
        name=place.definition_name(node.id, ITEM_OP),
        description=f"Runs the body of {node.id!r} for one item.",
        ins={UPSTREAM: dg.In(dg.Nothing)},
        outs={DONE: dg.Out(dg.Nothing, description="The item is at its end, or waits.")},
        tags=_tags(place, node),
        required_resource_keys={RESOURCE_KEY},
    )


def build_end_op(place: Place, node: NodeSpec, ports: tuple[Port, ...], *, collects: bool) -> dg.OpDefinition:
    """The last op of a container: puts together what its levels came to, and says where the run goes on.

    Args:
        place: The level that the container stands on.
        node: The container.
        ports: Its ways out.
        collects: Whether it collects the items of a fan-out.
    """

    async def body(session: RunSession, say: Say) -> NodeOutcome:
        return await run_node(session, await place.scope(session), node.id, say, collect=True)

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh
        outcome = host.work(context, place.pinned, body)
        if outcome.state is not NodeState.UNDECIDED:
            yield from live_outputs(outcome, ports, host.captures_content)

    return dg.OpDefinition(
        compute_fn=compute,
        name=place.definition_name(node.id, END_OP),
        description=f"Puts together what {node.id!r} came to.",
        ins={name: dg.In(dg.Nothing) for name in ([UPSTREAM, ITEMS] if collects else [UPSTREAM])},
        outs=construct_outs(ports),
        tags=_tags(place, node),
        required_resource_keys={RESOURCE_KEY},
    )


def _upstream(has_upstream: bool) -> dict[str, dg.In]:
    return {UPSTREAM: dg.In(dg.Nothing)} if has_upstream else {}


def _tags(place: Place, node: NodeSpec) -> dict[str, str]:
    node_type = node_type_of(node, place.node_types)
    return construct_op_tags(place.pinned.closure, node_type, node_type.parse(node))
