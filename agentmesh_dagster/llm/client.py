"""The model client: tries an agent's models in turn, and bounds how many calls run at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from agentmesh_dagster.constants import DEFAULT_PROJECT
from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.errors import DefinitionError, ModelError
from agentmesh_dagster.llm.destinations import find_destination
from agentmesh_dagster.llm.litellm_client import LiteLLMClient
from agentmesh_dagster.llm.offline import OFFLINE_PREFIX, complete_offline
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest
from agentmesh_dagster.runtime.secrets import EnvironmentSecrets, Secrets, provider_keys
from agentmesh_dagster.specs.models import setting_problems

__all__ = ["ENV_MODEL_MAX_CONCURRENT", "ModelRouter", "parse_limits", "provider_of"]

ENV_MODEL_MAX_CONCURRENT: Final = "AGENTMESH_MODEL_MAX_CONCURRENT"
_EACH: Final = "*"


class ModelRouter:
    """The model client (`runtime.ports.ModelClient`) of a process.

    A model is tried after another one only where that one failed in a way that may pass (`retryable`): a
    wrong key or a refused request would fail for the same reason, and is to be seen. Waiting before another
    try of the same model is the caller's business.

    Args:
        limits: Calls that may run at once, by model (`openai/gpt-5-mini`), by provider (`openai`, for all its
            models together), or `*` for each model that is not named. Default:
            `AGENTMESH_MODEL_MAX_CONCURRENT`, else no bound. The wait for a place is not part of `timeout_s`.
        deployment: Where its endpoints are.
        project: Whose documents ask.
        secrets: What endpoints name, and what is taken out of errors. Default: environment variables.
    """

    def __init__(
        self,
        limits: Mapping[str, int] | None = None,
        *,
        deployment: Deployment = Deployment(),  # noqa: B008 - a frozen record
        project: str = DEFAULT_PROJECT,
        secrets: Secrets | None = None,
    ) -> None:
        if limits is None:
            limits = parse_limits(os.environ.get(ENV_MODEL_MAX_CONCURRENT, ""))
        self._limits = dict(limits)
        self._deployment = deployment
        self._project = project
        self._secrets = secrets or Secrets(EnvironmentSecrets(), known=provider_keys())
        self._live = LiteLLMClient(self._secrets)
        # A semaphore belongs to the event loop that it was first waited on.
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = (
            WeakKeyDictionary()
        )

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Calls the first model that answers.

        Returns:
            The reply; `failures` holds the errors of the models tried before.

        Raises:
            ModelError: No model answered: the last error, with the errors before it as `failures` in its
                context. Or a setting is not one that documents may make (code `model-setting`), or a model one that
                they may not call (`model-refused`).
        """
        for wrong in setting_problems(request.settings, with_templates=False):
            raise ModelError(
                f"model_settings: {wrong.message}: {wrong.mend}", code="model-setting", retryable=False
            )
        failures: list[dict[str, Any]] = []
        for left, model in zip(range(len(request.models), 0, -1), request.models, strict=True):
            try:
                async with self._place(model):
                    reply = await self._complete(model, request)
                return replace(reply, failures=tuple(failures))
            except ModelError as error:
                if not error.retryable or left == 1:
                    if failures:
                        error.context["failures"] = failures
                    raise
                failures.append(error.to_json())
        raise ModelError("no model is named", code="model-bad-request")

    async def _complete(self, model: str, request: ModelRequest) -> ModelReply:
        if model.startswith(OFFLINE_PREFIX):
            return await complete_offline(model, request)
        destination = find_destination(model, self._deployment, self._project, self._secrets)
        return await self._live.complete(destination, request)

    @asynccontextmanager
    async def _place(self, model: str) -> AsyncGenerator[None, None]:
        """Holds a place for a call of the model, and for one of its provider."""
        async with AsyncExitStack() as places:
            for name, limit in self._bounds(model):
                held = self._places.setdefault(asyncio.get_running_loop(), {})
                if name not in held:
                    held[name] = asyncio.Semaphore(limit)
                await places.enter_async_context(held[name])
            yield

    def _bounds(self, model: str) -> list[tuple[str, int]]:
        bounds: list[tuple[str, int]] = []
        provider = provider_of(model)
        for_model = self._limits.get(model, self._limits.get(_EACH))
        if for_model is not None:
            bounds.append((model, for_model))
        if provider and provider != model and provider in self._limits:
            bounds.append((provider, self._limits[provider]))
        return bounds

    async def aclose(self) -> None:
        """Closes the connections that calls on the running event loop have opened."""
        await self._live.aclose()


def provider_of(model: str) -> str:
    """The part before the first `/` of a model's name; empty where there is none."""
    provider, slash, _ = model.partition("/")
    return provider if slash else ""


def parse_limits(text: str) -> dict[str, int]:
    """Limits such as `20` (each model) or `openai=20, openai/gpt-5-mini=5, *=10`.

    Raises:
        DefinitionError: The text is something else (code `model-limits`).
    """
    limits: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, count = entry.rpartition("=")
        name, count = (name.strip(), count.strip()) if equals else (_EACH, entry)
        if not name or not count.isascii() or not count.isdigit() or int(count) < 1:
            raise DefinitionError(
                f"{ENV_MODEL_MAX_CONCURRENT} has the entry {entry!r}: write such as '20' for each model, or"
                " 'openai=20, openai/gpt-5-mini=5'",
                code="model-limits",
            )
        limits[name] = int(count)
    return limits
