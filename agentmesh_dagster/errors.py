"""Every error that AgentMesh raises on purpose.

One base class with a stable `code`, a `domain`, a `category`, a message that says what to do, and context. The
message never contains a secret: whoever puts foreign text into an error redacts it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AgentMeshError",
    "ApprovalError",
    "DefinitionError",
    "DocumentInvalid",
    "ExpressionError",
    "ModelError",
    "NodeError",
    "NodeTimeout",
    "NotFound",
    "ReplayError",
    "RunRefused",
    "StoreError",
    "TimeOver",
    "ToolError",
    "WorkflowFailed",
]


class AgentMeshError(Exception):
    """AgentMesh could not do what was asked.

    Args:
        message: What was wrong, where, and what to do; one or two lines.
        code: Stable word for programs, such as `"slug-taken"`; the class's own code where none is given.
        path: Place in a document, such as `"nodes[3].config.prompt"`, or a step key.
        context: Further JSON-able facts.
    """

    domain: ClassVar[str] = "agentmesh"
    category: ClassVar[str] = "user"
    default_code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        path: str | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.path = path
        self.context: dict[str, Any] = dict(context or {})

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return False

    @property
    def answer_lost(self) -> bool:
        """Whether a call went out and no answer came that can be used: it may have taken effect."""
        return False

    def to_json(self) -> dict[str, Any]:
        """The error as a JSON object: code, domain, category, message; path, status and context where given.

        `status` is the HTTP status of a tool's or a model's server that answered with one.
        """
        data: dict[str, Any] = {
            "code": self.code,
            "domain": self.domain,
            "category": self.category,
            "message": self.message,
        }
        if self.path is not None:
            data["path"] = self.path
        if "status" in self.context:
            data["status"] = self.context["status"]
        if self.context:
            data["context"] = self.context
        return data


class DefinitionError(AgentMeshError):
    """A document, or what it refers to, is wrong."""

    domain = "definition"
    default_code = "definition"


class DocumentInvalid(DefinitionError):
    """A document has problems; all of them are in `problems` (JSON objects, see `validation.Problem`)."""

    default_code = "document-invalid"

    def __init__(self, message: str, problems: list[dict[str, Any]]) -> None:
        super().__init__(message, context={"problems": problems})
        self.problems = problems


class NotFound(DefinitionError):
    """Nothing is stored under that name."""

    default_code = "not-found"


class ExpressionError(AgentMeshError):
    """An expression could not be parsed, was refused, or failed."""

    domain = "expression"
    default_code = "expression"


class ModelError(AgentMeshError):
    """A model call failed.

    Args:
        provider: LiteLLM's name of the provider, such as `"openai"`.
        model: The model as the agent names it.
        retryable: Whether the same call may succeed later (429, 5xx, time-outs, connection errors).
    """

    domain = "model"
    category = "third_party"
    default_code = "model"

    def __init__(
        self,
        message: str,
        *,
        provider: str = "",
        model: str = "",
        retryable: bool = False,
        code: str | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            message,
            code=code,
            context={"provider": provider, "model": model, "retryable": retryable, **(context or {})},
        )
        self.provider = provider
        self.model = model
        self._retryable = retryable

    @property
    def retryable(self) -> bool:
        return self._retryable


class ToolError(AgentMeshError):
    """A tool could not be called, or failed; the message is fit to show a model."""

    domain = "tool"
    category = "third_party"
    default_code = "tool"


class ApprovalError(AgentMeshError):
    """A decision was refused.

    Codes: `already-decided`, `gate-closed`, `not-assignee`, `not-your-turn`, `separation`, `already-voted`,
    `bad-decision`, `delegated`, `bad-delegate`, `form` and `data-conflict` (with `context.issues`), `stale`,
    `no-approval`, `ambiguous-approval`.
    """

    domain = "approval"
    default_code = "approval"


class NodeError(AgentMeshError):
    """A node failed for a reason of its own."""

    domain = "node"
    default_code = "node"


class WorkflowFailed(NodeError):
    """A `fail` node was reached; code and message are the workflow's own."""

    domain = "workflow"
    default_code = "failed"


class TimeOver(NodeError):
    """Something did not happen in time: a run, a gate, an event; a fault of nobody's input."""

    category = "system"


class NodeTimeout(TimeOver):
    """A node took longer than its `timeout_s`."""

    default_code = "timeout"

    @property
    def retryable(self) -> bool:
        return True


class RunRefused(AgentMeshError):
    """A Dagster run may not work on this AgentMesh run."""

    domain = "replay"
    default_code = "run-refused"


class StoreError(AgentMeshError):
    """The database could not do what was asked."""

    domain = "store"
    category = "system"
    default_code = "store"


class ReplayError(AgentMeshError):
    """A step was asked something else than the finished row under its key answers."""

    domain = "replay"
    category = "system"
    default_code = "replay"
