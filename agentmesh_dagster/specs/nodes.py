"""The configs of the built-in node types: what a node of a type may say, and which handles it offers.

The class that runs a type stands in `runtime.nodes`; a plugin brings both.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from agentmesh_dagster.constants import HANDLE_APPROVED, HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.specs.approvals import ApprovalPolicy
from agentmesh_dagster.specs.base import (
    DURATION_FORMS,
    Body,
    Condition,
    Duration,
    OptionalJsonSchema,
    Reference,
    SpecModel,
    Template,
)
from agentmesh_dagster.specs.documents import BodySpec


class NodeConfig(SpecModel):
    """Base of all node configs."""

    has_default_handle: ClassVar[bool] = True
    """Whether an edge without `source_handle` may leave the node."""
    is_start: ClassVar[bool] = False
    is_end: ClassVar[bool] = False
    never_succeeds: ClassVar[bool] = False
    """Whether no edge leads on from the node but by its handle `error`."""
    must_cover_handles: ClassVar[bool] = False
    """Whether every handle needs an edge."""
    is_container: ClassVar[bool] = False
    """Whether it runs bodies, or another workflow."""

    def bodies(self) -> dict[str, BodySpec]:
        """Its bodies by their place in the config (`body`, `branches.left`)."""
        return {}

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
        raise ValueError(f"a duration is {DURATION_FORMS}, or an expression")
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


class FailConfig(NodeConfig):
    """Fails, as the workflow says."""

    has_default_handle: ClassVar[bool] = False
    never_succeeds: ClassVar[bool] = True
    code: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")] = "failed"
    """The error's code: a word for programs, such as `out-of-stock`."""
    message: Annotated[str, Template()] = Field(min_length=1)
    """The error's message."""


class EmitConfig(NodeConfig):
    """Sends a named event, once."""

    event: str = Field(min_length=1, max_length=200)
    key: Annotated[str | None, Template()] = None
    """The correlation key. Default: the empty one."""
    data: Annotated[Any, Template()] = None
    """The payload."""
    keep: Duration = Field(default=604_800.0, ge=0)
    """How long it is kept where nothing waits for it."""


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
    when: Annotated[str | None, Condition(names=("payload",))] = None
    """What must hold of an event's `payload` for the node to take it; other names have the values that they had when
    the wait began."""
    payload_schema: OptionalJsonSchema = None
    timeout: Duration | None = Field(default=None, gt=0)
    on_timeout: Literal["fail", "route"] = "fail"
    timeout_data: Any = None

    def handles(self) -> tuple[str, ...]:
        return (HANDLE_TIMEOUT,) if self.on_timeout == "route" else ()

    def needed_handles(self, *, has_default_edge: bool) -> tuple[str, ...]:
        return self.handles()


class ContainerConfig(NodeConfig):
    """Base of the configs of nodes that run other nodes."""

    is_container: ClassVar[bool] = True


class ParallelConfig(ContainerConfig):
    """Runs branches side by side."""

    branches: Annotated[dict[str, BodySpec], Body()] = Field(min_length=1)
    """By name, in the author's order; names are formed as node ids."""
    wait: Literal["all", "any", "first"] | Annotated[int, Field(ge=1)] = "all"
    """`all`: every branch must succeed. `any`: all run to their end, and one must succeed. `first`: the first that
    succeeds wins, and the others are canceled. A number: likewise, the first so many."""

    def bodies(self) -> dict[str, BodySpec]:
        return {f"branches.{name}": body for name, body in self.branches.items()}


class ForeachConfig(ContainerConfig):
    """Runs a body for each item of a list."""

    items: Annotated[Any, Template()]
    """A list, or an expression that gives one."""
    body: Annotated[BodySpec, Body(names=("item", "index"))]
    concurrency: int = Field(default=8, ge=1, le=1000)
    """How many items are at work at once."""
    key: Annotated[str | None, Condition(names=("item", "index"))] = None
    """Gives each item's name in the step keys, a text or whole number that no other item has; default: the index."""
    on_item_error: Literal["fail", "collect", "skip"] = "fail"
    """`fail`: no further item begins, and the node fails. `collect`: `{"error": {...}}` stands in the item's place.
    `skip`: the item is left out of the output."""
    max_failures: int | None = Field(default=None, ge=0)
    """With `collect` and `skip`: the node fails at the failure after so many."""
    fanout: bool = False
    """Whether items become Dagster steps of their own, which an executor may spread over workers."""

    @model_validator(mode="after")
    def _is_list(self) -> ForeachConfig:
        if not isinstance(self.items, list) and not (isinstance(self.items, str) and "{{" in self.items):
            raise ValueError("give a list as 'items', or an expression that gives one")
        return self

    def bodies(self) -> dict[str, BodySpec]:
        return {"body": self.body}


class LoopConfig(ContainerConfig):
    """Repeats a body."""

    while_: Annotated[str | None, Condition(names=("iteration",), body="body")] = Field(
        default=None, alias="while"
    )
    """Asked before each iteration; before the first, `iteration` is 0 and the body's steps are pending."""
    until: Annotated[str | None, Condition(names=("iteration",), body="body")] = None
    """Asked after each iteration."""
    max_iterations: int = Field(ge=1)
    body: Annotated[BodySpec, Body(names=("iteration",))]
    delay_s: Duration = Field(default=0.0, ge=0)
    """Between two iterations."""
    on_limit: Literal["fail", "continue"] = "fail"
    """What follows when `max_iterations` have run and the condition asks for more."""

    @model_validator(mode="after")
    def _one_of(self) -> LoopConfig:
        if (self.while_ is None) == (self.until is None):
            given = "neither is" if self.until is None else "both are"
            raise ValueError(f"give either 'while' or 'until': {given} given")
        return self

    def bodies(self) -> dict[str, BodySpec]:
        return {"body": self.body}


class WorkflowConfig(ContainerConfig):
    """Runs another workflow's published version."""

    workflow: Annotated[str, Reference("workflow")]
    input: Annotated[Any, Template()] = None
    """Default: the upstream output."""
    async_: bool = Field(default=False, alias="async")
    """Whether it becomes a run of its own, which nobody waits for; the output is `{"run_id": id}`."""


BUILTIN_NODE_CONFIGS: dict[str, type[NodeConfig]] = {
    "start": StartConfig,
    "end": EndConfig,
    "agent": AgentConfig,
    "tool": ToolConfig,
    "transform": TransformConfig,
    "fail": FailConfig,
    "emit": EmitConfig,
    "code": CodeConfig,
    "branch": BranchConfig,
    "delay": DelayConfig,
    "human": HumanConfig,
    "webhook": WebhookConfig,
    "parallel": ParallelConfig,
    "foreach": ForeachConfig,
    "loop": LoopConfig,
    "workflow": WorkflowConfig,
}
