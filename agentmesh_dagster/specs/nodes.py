"""The configs of the built-in node types: what a node of a type may say, and which handles it offers.

The class that runs a type stands in `runtime.nodes`; a plugin brings both.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from agentmesh_dagster.constants import HANDLE_APPROVED, HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.specs.approvals import ApprovalPolicy
from agentmesh_dagster.specs.base import (
    Condition,
    Duration,
    OptionalJsonSchema,
    Reference,
    SpecModel,
    Template,
)


class NodeConfig(SpecModel):
    """Base of all node configs."""

    has_default_handle: ClassVar[bool] = True
    """Whether an edge without `source_handle` may leave the node."""
    is_start: ClassVar[bool] = False
    is_end: ClassVar[bool] = False
    must_cover_handles: ClassVar[bool] = False
    """Whether every handle needs an edge."""

    def handles(self) -> tuple[str, ...]:
        """Named handles, besides the default one and `error`."""
        return ()

    def needed_handles(self, *, has_default_edge: bool) -> tuple[str, ...]:
        """Named handles that need an edge.

        Args:
            has_default_edge: Whether an edge without `source_handle` leaves the node.
        """
        return self.handles() if self.must_cover_handles else ()


def _has_expression(value: str) -> str:
    if "{{" not in value:
        raise ValueError(
            "a duration is a number of seconds or such as '30s', '5m', '2h', '3d', or an expression"
        )
    return value


ExpressionText = Annotated[str, AfterValidator(_has_expression)]


class StartConfig(NodeConfig):
    is_start: ClassVar[bool] = True


class EndConfig(NodeConfig):
    is_end: ClassVar[bool] = True
    output: Annotated[Any, Template()] = None
    """Default: the upstream output."""


class AgentConfig(NodeConfig):
    agent: Annotated[str, Reference("agent")]
    prompt: Annotated[str | None, Template()] = None
    """Default: the upstream output, as text."""
    output_schema: OptionalJsonSchema = None
    model: str | Annotated[list[str], Field(min_length=1)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    instructions: Annotated[str | None, Template()] = None


class ToolConfig(NodeConfig):
    tool: Annotated[str, Reference("tool")]
    input: Annotated[Any, Template()] = None
    """Default: the upstream output."""


class TransformConfig(NodeConfig):
    output: Annotated[Any, Template()]


class CodeConfig(NodeConfig):
    function: str
    """`module:callable`, from the allow-list of modules."""
    input: Annotated[Any, Template()] = None
    """Keyword arguments; default: the upstream output."""


class BranchCondition(SpecModel):
    when: Annotated[str, Condition()]
    handle: str


class BranchConfig(NodeConfig):
    has_default_handle: ClassVar[bool] = False
    must_cover_handles: ClassVar[bool] = True
    conditions: list[BranchCondition] = Field(min_length=1)
    default: str | None = None
    mode: Literal["first", "all"] = "first"

    def handles(self) -> tuple[str, ...]:
        names = [c.handle for c in self.conditions] + ([self.default] if self.default is not None else [])
        return tuple(dict.fromkeys(names))


class DelayConfig(NodeConfig):
    seconds: Annotated[Duration | ExpressionText | None, Template()] = None
    """A duration, or an expression that gives one."""
    until: Annotated[str | None, Template()] = None
    """An ISO 8601 time with a zone, or an expression that gives one."""

    @model_validator(mode="after")
    def _one_of(self) -> DelayConfig:
        if (self.seconds is None) == (self.until is None):
            raise ValueError("give either 'seconds' or 'until'")
        return self


class HumanQuestion(NodeConfig):
    """What people are asked at a `human` node."""

    title: Annotated[str, Template()]
    body: Annotated[str, Template()] = ""
    """Markdown."""
    data: Annotated[Any, Template()] = None
    """Shown beside the question."""
    form_schema: OptionalJsonSchema = None
    """What a decision's data must fit; without it any object is accepted."""
    prefill: Annotated[Any, Template()] = None
    """The form's first values: people edit an upstream output."""
    options: Annotated[list[str], Field(min_length=1)] | None = None
    """What may be decided, one handle each; default `approved` and `rejected`."""
    multiple: bool = False
    """Whether several options may be chosen."""
    cancel_siblings: bool = False
    """Whether its decision closes the run's other open gates."""


class HumanConfig(ApprovalPolicy, HumanQuestion):
    """A question to people; see `specs.approvals` for who may decide, and until when."""

    def handles(self) -> tuple[str, ...]:
        names = tuple(self.options or (HANDLE_APPROVED, HANDLE_REJECTED))
        if self.may_reject and HANDLE_REJECTED not in names:
            names = (*names, HANDLE_REJECTED)
        return (*names, HANDLE_TIMEOUT) if self.on_timeout == "route" else names

    @property
    def may_reject(self) -> bool:
        """Whether it can end as rejected: with options, where its timeout says so, or no option gets its quorum."""
        return self.options is None or self.on_timeout == "reject" or self.required > 1

    def needed_handles(self, *, has_default_edge: bool) -> tuple[str, ...]:
        # A rejection that nothing is attached to fails the run, as it is meant to.
        decided = tuple(h for h in self.options or (HANDLE_APPROVED,) if h != HANDLE_REJECTED)
        needed = () if has_default_edge else decided
        return (*needed, HANDLE_TIMEOUT) if self.on_timeout == "route" else needed


class WebhookConfig(NodeConfig):
    """Waits for a named event from outside."""

    event: str = Field(min_length=1, max_length=200)
    key: Annotated[str | None, Template()] = None
    """The correlation key; the event must carry the same. Default: the empty one."""
    payload_schema: OptionalJsonSchema = None
    timeout: Duration | None = Field(default=None, gt=0)
    on_timeout: Literal["fail", "route"] = "fail"
    timeout_data: Any = None

    def handles(self) -> tuple[str, ...]:
        return (HANDLE_TIMEOUT,) if self.on_timeout == "route" else ()

    def needed_handles(self, *, has_default_edge: bool) -> tuple[str, ...]:
        return self.handles()


BUILTIN_NODE_CONFIGS: dict[str, type[NodeConfig]] = {
    "start": StartConfig,
    "end": EndConfig,
    "agent": AgentConfig,
    "tool": ToolConfig,
    "transform": TransformConfig,
    "code": CodeConfig,
    "branch": BranchConfig,
    "delay": DelayConfig,
    "human": HumanConfig,
    "webhook": WebhookConfig,
}
