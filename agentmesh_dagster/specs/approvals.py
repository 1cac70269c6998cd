"""Who may decide at a gate, until when, and what happens then: what `human` nodes and tools' approvals share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agentmesh_dagster.specs.base import Duration, SpecModel


class ApprovalPolicy(SpecModel):
    """The rules of a gate."""

    assignees: list[str] = Field(default_factory=list)
    """Names, and groups as `group:<name>`; empty: anybody."""
    required: int = Field(default=1, ge=1, le=100)
    """How many of them must agree."""
    ordered: bool = False
    """Whether they vote in the order in which they are listed."""
    separation: bool = False
    """Whether the run's launcher may not decide."""
    timeout: Duration | None = Field(default=None, gt=0)
    on_timeout: Literal["approve", "reject", "fail", "route"] = "fail"
    timeout_data: Any = None
    """The data of a decision that the timeout makes."""
    remind_after: Duration | None = Field(default=None, gt=0)
    escalate_after: Duration | None = Field(default=None, gt=0)
    escalate_to: list[str] = Field(default_factory=list)
    """Who may decide too, once `escalate_after` has passed."""


class ToolApproval(ApprovalPolicy):
    """The rules of a tool's approval; there is no handle to route to."""

    on_timeout: Literal["approve", "reject", "fail"] = "fail"  # pyright: ignore[reportIncompatibleVariableOverride] - models are frozen
