"""A node as a Dagster op: asks the runtime, and tells Dagster which ways out are live.

Data goes through the journal and not through Dagster: ins and outs are of type `Nothing`.
"""

# No `from __future__ import annotations` here: Dagster looks at the annotation of `context` itself, and refuses a text.

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import dagster as dg

from agentmesh_dagster.compiler.ports import WAITING, Port
from agentmesh_dagster.constants import FINISH_OP, TAG_MODEL
from agentmesh_dagster.records import Json, RunStatus, Step, Wait
from agentmesh_dagster.runtime.finish import RunEnd, finish_run
from agentmesh_dagster.runtime.how_to_decide import how_to_decide
from agentmesh_dagster.runtime.nodes.base import AnyNodeType, Say
from agentmesh_dagster.runtime.routing import NodeState
from agentmesh_dagster.runtime.run_node import NodeOutcome, run_node
from agentmesh_dagster.runtime.session import Pinned, RunSession
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.fields import as_list, as_object
from agentmesh_dagster.specs.nodes import AgentConfig, ToolConfig

RESOURCE_KEY = "agentmesh"
SHORT_CHARS = 200
"""Up to this length JSON is shown as text; beyond, behind a button."""
PREVIEW_CHARS = 2_000
"""How much of an output stands in Dagster's metadata; all of it is in the journal."""

T = TypeVar("T")


class Host(Protocol):
    """What an op needs of its process; the resource `agentmesh` is one."""

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


def build_node_op(
    pinned: Pinned,
    job: str,
    node: NodeSpec,
    node_type: AnyNodeType,
    ports: tuple[Port, ...],
    has_upstream: bool,
) -> dg.OpDefinition:
    """The op of a node, defined as `<job>__<node>` and invoked under the node's own name."""

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh

        def body(session: RunSession, say: Say) -> Coroutine[Any, Any, NodeOutcome]:
            return run_node(session, session.scope, node.id, say)

        outcome = host.work(context, pinned, body)
        if outcome.state is NodeState.UNDECIDED:
            if outcome.waits and shows_waiting:
                yield dg.Output(None, WAITING, metadata=waiting_metadata(outcome.waits))
            return
        metadata = output_metadata(outcome)
        for port in ports:
            if outcome.row is not None and port.is_live(outcome.live_edges):
                yield dg.Output(None, port.name, metadata=metadata)

    config = node_type.parse(node)
    shows_waiting = node_type.shows_waiting or _asks_approval(pinned.closure, config)
    outs = {p.name: dg.Out(dg.Nothing, is_required=False, description=p.description) for p in ports}
    if shows_waiting:
        outs[WAITING] = dg.Out(dg.Nothing, is_required=False, description="What it waits for.")
    return dg.OpDefinition(
        compute_fn=compute,
        name=f"{job}__{op_alias(node.id)}",
        description=node.description or node_type.describe(config) or None,
        ins={"upstream": dg.In(dg.Nothing)} if has_upstream else {},
        outs=outs,
        tags=construct_op_tags(pinned.closure, node_type, config),
        pool=construct_pool(pinned.closure, config),
        required_resource_keys={RESOURCE_KEY},
    )


def build_finish_op(pinned: Pinned, job: str) -> dg.OpDefinition:
    """The hidden op behind `start` and all sinks, which decides how the run ended."""

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        host: Host = context.resources.agentmesh

        def body(session: RunSession, _say: Say) -> Coroutine[Any, Any, RunEnd]:
            return finish_run(session)

        end = host.work(context, pinned, body)
        if end.status is RunStatus.FAILED:
            raise dg.Failure(
                description=end.error["message"], metadata={"code": end.error["code"]}, allow_retries=False
            )
        shown = {"waits at": ", ".join(end.waits_at)} if end.waits_at else {"output": preview(end.output)}
        yield dg.Output(None, "done", metadata={"status": end.status.value, **shown})

    return dg.OpDefinition(
        compute_fn=compute,
        name=f"{job}__{FINISH_OP}",
        description="Decides how the run ended, from the journal.",
        ins={"upstream": dg.In(dg.Nothing)},
        outs={"done": dg.Out(dg.Nothing)},
        required_resource_keys={RESOURCE_KEY},
    )


def waiting_metadata(waits: Sequence[Wait]) -> dict[str, Any]:
    """What a person sees of a node that waits: the question, how to decide, and until when."""
    metadata: dict[str, Any] = {}
    for number, wait in enumerate(waits, 1):
        before = f"{number}. " if len(waits) > 1 else ""
        facts: dict[str, Any] = {
            "waits for": (wait.title or wait.kind.value)[:SHORT_CHARS],
            "question": dg.MetadataValue.md(wait.body[:PREVIEW_CHARS]) if wait.body else None,
            "data": None if wait.data is None else preview(wait.data),
            "who may decide": ", ".join(wait.assignees) if wait.kind.is_approval and wait.assignees else None,
            "how to decide": dg.MetadataValue.md("\n".join(f"- {line}" for line in how_to_decide(wait))),
            "deadline": None if wait.deadline_at is None else wait.deadline_at.isoformat(timespec="seconds"),
        }
        metadata.update({before + name: value for name, value in facts.items() if value is not None})
    return metadata


def _asks_approval(closure: Closure, config: object) -> bool:
    if not isinstance(config, ToolConfig):
        return False
    return closure.tools[config.tool.split("@")[0]].document.requires_approval is not False


def op_alias(node_id: str) -> str:
    """The op's name inside the job: Dagster takes no `-`."""
    return node_id.replace("-", "_")


def op_names(pinned: Pinned) -> frozenset[str]:
    """The step keys of the job of a workflow."""
    return frozenset([*(op_alias(node.id) for node in pinned.workflow.nodes), FINISH_OP])


def construct_op_tags(closure: Closure, node_type: AnyNodeType, config: object) -> dict[str, str]:
    """Kinds, and the model."""
    kinds = list(node_type.kinds)
    tags: dict[str, str] = {}
    if isinstance(config, AgentConfig):
        tags[TAG_MODEL] = _models(closure, config)[0]
    if isinstance(config, ToolConfig):
        kinds.append(closure.tools[config.tool.split("@")[0]].document.type)
    if kinds:
        # What the picture of a job shows; the kinds are what the catalog shows.
        tags["dagster/compute_kind"] = kinds[0]
    return {**tags, **{f"dagster/kind/{kind}": "" for kind in kinds}}


def construct_pool(closure: Closure, config: object) -> str | None:
    """Agents share a pool per model provider (`llm_openai`); it bounds nothing until somebody gives it slots."""
    if not isinstance(config, AgentConfig):
        return None
    provider = (
        _models(closure, config)[0].partition("/")[0] if "/" in _models(closure, config)[0] else "openai"
    )
    return "llm_" + "".join(c if c.isalnum() else "_" for c in provider)


def _models(closure: Closure, config: AgentConfig) -> tuple[str, ...]:
    if config.model is not None:
        return (config.model,) if isinstance(config.model, str) else tuple(config.model)
    return closure.agents[config.agent.split("@")[0]].document.models


def output_metadata(outcome: NodeOutcome) -> Mapping[str, Any]:
    """What a person sees of a node's output on the run page."""
    row = outcome.row
    if row is None:
        return {}
    metadata: dict[str, Any] = {"status": row.status.value, "output": preview(shown_output(row))}
    if row.error is not None:
        metadata["error"] = row.error["message"][:PREVIEW_CHARS]
    if row.routing_decision and row.routing_decision["handles"]:
        metadata["handles"] = ", ".join(row.routing_decision["handles"])
    if outcome.replayed:
        metadata["replayed"] = True
    return metadata | usage_metadata(row)


def shown_output(row: Step) -> Json:
    """The output without what stands in metadata of its own: of an agent, its object or its text."""
    output = as_object(row.output)
    if row.node_type != "agent" or output is None:
        return row.output
    return output.get("object", output.get("text"))


def usage_metadata(row: Step) -> dict[str, Any]:
    """Tokens and cost of an agent's output."""
    usage = (as_object(row.output) or {}).get("usage") if row.node_type == "agent" else None
    if usage is None:
        return {}
    return {
        "input_tokens": usage["input_tokens"],
        "output_tokens": usage["output_tokens"],
        "cost_usd": float(usage["cost_usd"]),
        "model": str(usage["model"]),
    }


def preview(value: Json) -> dg.MetadataValue[Any]:
    """An output for people, bounded."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > PREVIEW_CHARS:
        return dg.MetadataValue.text(
            f"{text[:PREVIEW_CHARS]}... ({len(text)} characters; all of it is in the journal)"
        )
    if len(text) > SHORT_CHARS and (as_object(value) is not None or as_list(value) is not None):
        return dg.MetadataValue.json(value)
    return dg.MetadataValue.text(value if isinstance(value, str) else text)
