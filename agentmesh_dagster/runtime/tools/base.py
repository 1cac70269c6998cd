"""What every tool type gets and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.functions import FunctionRegistry
from agentmesh_dagster.runtime.secrets import Secrets
from agentmesh_dagster.runtime.step_context import StepContext
from agentmesh_dagster.runtime.tools.http_client import HttpClient
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import ToolSpec

__all__ = ["Outgoing", "ToolContext", "ToolType"]


@dataclass
class Outgoing:
    """What has gone out for one call."""

    is_unanswered: bool = False
    """Whether something that may take effect has begun, and its answer has not come."""


@dataclass(frozen=True, kw_only=True)
class ToolContext:
    """What a tool may use, and facts about this call."""

    secrets: Secrets
    http: HttpClient
    functions: FunctionRegistry
    clock: Clock
    idempotency_key: str
    """The same for every attempt of one call."""
    timeout_s: float | None = None
    """A further bound on the call, besides the tool's own."""
    outgoing: Outgoing = field(default_factory=Outgoing)
    """Where the tool's type says how far the call is: a time-out finds it there."""
    config: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """`config` in templates."""
    step: StepContext | None = None
    """What a function may know of the step in which it is called; None outside of runs."""


class ToolType(Protocol):
    """One type of tools; a class without state."""

    config_model: type[SpecModel]
    """The model of a tool's `config`."""

    async def schemas(
        self, config: Any, context: ToolContext
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The input and output schema of a tool that gives none; None: no schema of its own.

        Args:
            config: The tool's config, parsed by `config_model`.
            context: The call's context.
        """
        ...

    async def call(self, tool: ToolSpec, config: Any, value: Json, context: ToolContext) -> Json:
        """Calls the tool with checked input.

        Raises:
            ToolError: It failed; the message is fit to show a model. Secrets in it are redacted by the
                caller.
        """
        ...
