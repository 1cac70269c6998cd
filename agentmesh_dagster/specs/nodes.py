"""The configs of the built-in node types: what a node of a type may say, and which handles it offers.

The class that runs a type stands in `runtime.nodes`; a plugin brings both.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

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


BUILTIN_NODE_CONFIGS: dict[str, type[NodeConfig]] = {
    "start": StartConfig,
    "end": EndConfig,
    "agent": AgentConfig,
    "tool": ToolConfig,
    "transform": TransformConfig,
    "code": CodeConfig,
    "branch": BranchConfig,
    "delay": DelayConfig,
}
