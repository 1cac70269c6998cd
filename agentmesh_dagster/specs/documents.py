"""The documents that people write: workflow, agent, tool, network.

These models hold the shape only. Rules that need the whole graph or other documents stand in
`agentmesh_dagster.validation`; a node's `config` is checked against the model of its type (`specs.nodes`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from agentmesh_dagster.specs.approvals import ToolApproval
from agentmesh_dagster.specs.base import (
    NODE_ID_PATTERN,
    SLUG_PATTERN,
    Body,
    Condition,
    Duration,
    JsonSchema,
    OptionalJsonSchema,
    Reference,
    SpecModel,
    Template,
)

Slug = Annotated[str, StringConstraints(max_length=100)]
"""Checked against `SLUG_PATTERN` by the validation, which says what is wrong with it."""

TagKey = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}$")]

Name = Annotated[str, StringConstraints(max_length=200)]

__all__ = [
    "NODE_ID_PATTERN",
    "SLUG_PATTERN",
    "AgentSpec",
    "BodySpec",
    "Document",
    "EdgeSpec",
    "NetworkSpec",
    "NodeSpec",
    "Position",
    "RetrySpec",
    "ToolSpec",
    "WorkflowSettings",
    "WorkflowSpec",
    "document_model",
]


class Position(SpecModel):
    """Where a visual editor draws a node."""

    x: float
    y: float


class RetrySpec(SpecModel):
    """How often and how patiently a failing node is tried again."""

    max_attempts: int = Field(default=3, ge=1, le=20)
    delay_s: Duration = Field(default=1.0, ge=0, le=3600)
    backoff: Literal["constant", "linear", "exponential"] = "constant"
    max_delay_s: Duration = Field(default=300.0, ge=0, le=86400)

    def delay_before_s(self, attempt: int) -> float:
        """Seconds to wait before an attempt; `attempt` counts from 2."""
        factor = {"constant": 1, "linear": attempt - 1, "exponential": 2 ** (attempt - 2)}[self.backoff]
        return min(self.delay_s * factor, self.max_delay_s)


class NodeSpec(SpecModel):
    """One node of a workflow."""

    id: str
    type: str
    name: Name = ""
    description: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    join: Literal["any", "all"] | Annotated[int, Field(ge=1)] = "any"
    """How many of the incoming edges must be live, once all are decided: at least one, all, or at least so many."""
    retry: RetrySpec | None = None
    timeout_s: Duration | None = Field(default=None, gt=0)
    on_error: Literal["fail", "continue", "route"] = "fail"
    set: Annotated[dict[str, Any], Template()] = Field(default_factory=dict)
    """State writes: key to a template (`"{{ steps.a.output }}"`) or a literal."""
    position: Position | None = None
    on_unknown: Literal["human", "retry", "fail"] = "human"
    """What follows when a call that must not be repeated was cut off: people say whether it took effect, it is made
    again, or the node fails."""
    notify: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Who is told when the node waits for people: `{type: log | webhook | email | ..., ...}` (`specs.notify`)."""
    metadata: dict[str, Any] = Field(default_factory=dict)


class EdgeSpec(SpecModel):
    """One edge of a workflow."""

    id: str | None = None
    source: str
    target: str
    source_handle: str | None = None
    target_handle: str | None = None
    """Kept for visual editors; it has no meaning for a run."""
    condition: Annotated[str | None, Condition()] = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class BodySpec(SpecModel):
    """What a container runs: nodes and edges without `start` and `end`, or a workflow's published version."""

    nodes: list[NodeSpec] | None = Field(default=None, min_length=1)
    edges: list[EdgeSpec] = Field(default_factory=list[EdgeSpec])
    workflow: Annotated[str | None, Reference("workflow")] = None
    input: Annotated[Any, Template()] = None
    """The workflow's input, seen from inside the body. Default: a `foreach`'s item, a `loop`'s output of the iteration
    before, a `parallel`'s upstream output."""

    @model_validator(mode="after")
    def _one_of(self) -> BodySpec:
        if (self.nodes is None) == (self.workflow is None):
            raise ValueError("give either 'nodes' (with 'edges') or 'workflow'")
        if self.workflow is not None and self.edges:
            raise ValueError("'edges' belong to 'nodes', not to 'workflow'")
        if self.workflow is None and "input" in self.model_fields_set:
            raise ValueError("'input' belongs to 'workflow': nodes see what their container sees")
        return self


class WorkflowSettings(SpecModel):
    """How a workflow runs in Dagster."""

    execution: Literal["dagster", "inline"] = "dagster"
    """`dagster`: one op for each node. `inline`: one op that walks the whole graph, for batch work."""

    executor: Literal["default", "threads", "in_process", "multiprocess"] = "default"
    """`default` is the code location's; `threads` is AgentMesh's own."""
    max_concurrent: int | None = Field(default=None, ge=1, le=1000)
    max_steps: int = Field(default=50, ge=1, le=10_000)
    """Bound on the workflow's own nodes that run."""
    node_timeout_s: Duration | None = Field(default=None, gt=0)
    """The `timeout_s` of nodes that have none; containers are not meant."""
    timeout_s: Duration | None = Field(default=None, gt=0)
    """How long a run may take; the time for which it waits without a worker does not count."""
    timeout_includes_waiting: bool = False
    """Whether that time counts too."""
    max_iterations: int = Field(default=1000, ge=1, le=1_000_000)
    """Bound on the `max_iterations` of loops."""
    inline_s: Duration = Field(default=60.0, ge=0, le=3600)
    """The longest delay that a worker sits out."""
    tags: dict[TagKey, str] = Field(default_factory=dict)
    """Tags of the job's runs; Dagster takes letters, digits, `_`, `-`, `.` and one `/` as a key."""
    priority: int | None = None


class DocumentModel(SpecModel):
    """What every document carries."""

    slug: Slug
    name: Name = ""
    description: str = ""
    category: str = ""
    tags: list[str] = Field(default_factory=list)
    is_template: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)


class WorkflowSpec(DocumentModel):
    """A graph of nodes; `slug` becomes its Dagster job."""

    kind: Literal["workflow"] = "workflow"
    input_schema: JsonSchema = Field(default_factory=lambda: {"type": "object"})
    output_schema: OptionalJsonSchema = None
    state_schema: OptionalJsonSchema = None
    """The state's keys; a property may carry `reducer` (`specs.state`)."""
    settings: WorkflowSettings = WorkflowSettings()
    nodes: list[NodeSpec]
    edges: list[EdgeSpec]
    on_failure: Annotated[BodySpec | None, Body()] = None
    """Runs once when the run has failed, before `finally`; sees `run.error` and all steps."""
    finally_: Annotated[BodySpec | None, Body()] = Field(default=None, alias="finally")
    """Runs once when the run has ended, however it did; sees `run.status`, `run.error` and all steps."""
    viewport: dict[str, Any] | None = None

    @property
    def finalizers(self) -> str:
        """What its runs' ends ask for: empty, `failure` (`on_failure` alone) or `always` (`finally`)."""
        if self.finally_ is not None:
            return "always"
        return "failure" if self.on_failure is not None else ""


class AgentSpec(DocumentModel):
    """A model with instructions and settings."""

    kind: Literal["agent"] = "agent"
    model: str | Annotated[list[str], Field(min_length=1)]
    """A LiteLLM name (`openai/gpt-5-mini`), `offline/echo`, `offline/script`, or a list tried in turn."""
    instructions: Annotated[str, Template()] = ""
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    model_settings: Annotated[dict[str, Any], Template()] = Field(default_factory=dict)
    """Passed to LiteLLM: `api_base`, `api_key` (a secret), `top_p`, ...; `timeout_s` bounds one call."""
    tools: Annotated[list[str], Reference("tool")] = Field(default_factory=list)
    agents: Annotated[list[str], Reference("agent")] = Field(default_factory=list)
    max_steps: int = Field(default=10, ge=1, le=1000)
    memory: dict[str, Any] | None = None
    guardrails: list[dict[str, Any]] | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models, in the order in which they are tried."""
        return (self.model,) if isinstance(self.model, str) else tuple(self.model)


class ToolSpec(DocumentModel):
    """Something that can be called with JSON and answers with JSON."""

    kind: Literal["tool"] = "tool"
    type: str
    """`http`, `function` or `builtin`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Checked against the model of its type (`specs.tools`)."""
    input_schema: OptionalJsonSchema = None
    """Default: any object; a `function` tool's is derived from its signature."""
    output_schema: OptionalJsonSchema = None
    side_effects: bool = False
    idempotent: bool | None = None
    """Whether a call that was cut off may be repeated. Default: the opposite of `side_effects`."""
    requires_approval: Annotated[bool | str, Condition()] = False
    """Whether people must approve each call; an expression sees `input`, the call's arguments."""
    approval: ToolApproval | None = None
    """Who they are, and until when."""
    timeout_s: Duration | None = Field(default=None, gt=0)

    @property
    def may_repeat(self) -> bool:
        """Whether a call that was cut off may be made again without asking."""
        return (not self.side_effects) if self.idempotent is None else self.idempotent


class NetworkSpec(DocumentModel):
    """A routing agent and the primitives that it may call."""

    kind: Literal["network"] = "network"
    instructions: str = ""
    model: str | Annotated[list[str], Field(min_length=1)]
    primitives: dict[str, list[str]] = Field(default_factory=dict)
    memory: dict[str, Any] | None = None
    max_steps: int = Field(default=20, ge=1, le=1000)


Document = WorkflowSpec | AgentSpec | ToolSpec | NetworkSpec

_MODELS: dict[str, type[WorkflowSpec] | type[AgentSpec] | type[ToolSpec] | type[NetworkSpec]] = {
    "workflow": WorkflowSpec,
    "agent": AgentSpec,
    "tool": ToolSpec,
    "network": NetworkSpec,
}


def document_model(
    kind: str,
) -> type[WorkflowSpec] | type[AgentSpec] | type[ToolSpec] | type[NetworkSpec]:
    """The model of a kind.

    Raises:
        KeyError: `kind` is none of `constants.KINDS`.
    """
    return _MODELS[kind]
