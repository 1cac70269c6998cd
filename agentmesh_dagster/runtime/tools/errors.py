"""Errors of tools; every message is fit to show a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentmesh_dagster.errors import ToolError

__all__ = ["FunctionFailed", "ToolFailure", "ToolRefused"]


class ToolFailure(ToolError):
    """A tool was called and failed.

    Args:
        message: What went wrong.
        code: `tool-timeout`, `tool-connect`, `tool-read`, `tool-status`, `tool-response`, `tool-output`,
            `function-failed`, ...
        retryable: Whether the same call may succeed later and may be made again.
        answer_lost: Whether the call went out and no answer came that can be used: it may have taken effect.
        context: Further JSON-able facts, such as `status`.
    """

    default_code = "tool-failed"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        answer_lost: bool = False,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code=code, context={"retryable": retryable, **(context or {})})
        self._retryable = retryable
        self._answer_lost = answer_lost

    @property
    def retryable(self) -> bool:
        return self._retryable

    @property
    def answer_lost(self) -> bool:
        return self._answer_lost


class FunctionFailed(ToolFailure):
    """A function of the user's own raised, or returned what JSON cannot hold."""

    category = "user"
    default_code = "function-failed"


class ToolRefused(ToolError):
    """A tool was not called: its input, its definition or the deployment's rules forbid it."""

    category = "user"
    default_code = "tool-refused"
