"""A tool's approval: people see the exact arguments before the call, and may change them.

An approval is given for one hash of tool, arguments and definition: a call that has changed asks again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from agentmesh_dagster.constants import HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.records import Json, WaitKind, WaitStatus
from agentmesh_dagster.runtime.nodes.base import NodeCall
from agentmesh_dagster.runtime.waiting import timed_out, with_policy
from agentmesh_dagster.specs.approvals import ToolApproval
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.documents import ToolSpec
from agentmesh_dagster.specs.expressions import evaluate

BINDING_SHOWN = 12


@dataclass(frozen=True)
class Refused:
    """People refused the call."""

    by: str
    reason: str

    @property
    def sentence(self) -> str:
        """For a person, or the model that asked for the call."""
        return f"refused by {self.by}" + (f": {self.reason}" if self.reason else "")


def needs_approval(tool: ToolSpec, arguments: Json, config: Mapping[str, Json]) -> bool:
    """Whether people must approve this call; an expression in `requires_approval` sees `input` and `config`."""
    if isinstance(tool.requires_approval, bool):
        return tool.requires_approval
    where = f"tool {tool.slug!r}, requires_approval"
    return bool(evaluate(tool.requires_approval, {"input": arguments, "config": config}, where=where))


async def approved_arguments(
    call: NodeCall,
    tool: ToolSpec,
    step_key: str,
    arguments: Json,
    *,
    schema: Json,
    prepare: Callable[[Json], Awaitable[Json]],
) -> Json | Refused:
    """The arguments with which a call may be made.

    Args:
        call: The node in which it stands.
        tool: The tool.
        step_key: The key of the call's step.
        arguments: As they were asked for, prepared.
        schema: The tool's input schema: what edited arguments must fit.
        prepare: Prepares edited arguments, and raises where they do not fit.

    Returns:
        The arguments, edited or not; or that the call was refused.

    Raises:
        Suspended: People have not decided yet.
        NodeError: They did not in time, and `on_timeout` is `fail` (code `gate-timeout`).
    """
    if not needs_approval(tool, arguments, call.scope.config):
        return arguments
    shown = call.session.redact(arguments)
    binding = content_hash([tool.slug, shown, tool.model_dump(mode="json", by_alias=True)])
    wait = replace(
        with_policy(
            call.new_wait(WaitKind.TOOL, step_key, f"approval-{binding[:BINDING_SHOWN]}"),
            tool.approval or ToolApproval(),
            call.notify,
        ),
        title=f"Call tool {tool.slug}?",
        body=tool.description,
        data={"tool": tool.slug, "arguments": shown},
        form_schema=schema,
        prefill=shown,
        binding=binding,
    )
    earlier = [
        other.id
        for other in call.session.waits_of(call.key)
        if other.step_key == step_key
        and other.kind is WaitKind.TOOL
        and other.label != wait.label
        and other.status is WaitStatus.OPEN
    ]
    closed = call.answer(wait, superseded=earlier)
    answer: Json = closed.answer
    if answer["decision"] == HANDLE_TIMEOUT:
        raise timed_out(closed)
    if answer["decision"] == HANDLE_REJECTED:
        return Refused(by=answer["by"], reason=answer.get("comment") or "")
    given = answer.get("data")
    return arguments if given is None or given == shown else await prepare(given)
