"""What a document may say of a model: its name, and settings that change how it answers and nothing else.

Where a call goes, and with which key, is the deployment's to say. A name is `provider/model` for a provider in
`PROVIDER_HOSTS`, whose key LiteLLM reads from its own environment variable; or `endpoint/model` for an endpoint of the
deployment; or a stand-in, `offline/echo` or `offline/script`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, StringConstraints, ValidationError

from agentmesh_dagster.deployment import WHERE, Deployment
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import Duration, SpecModel
from agentmesh_dagster.specs.expressions import is_template, strings_of

__all__ = ["PROVIDER_HOSTS", "ModelSettings", "Wrong", "endpoint_word", "model_problem", "setting_problems"]

PROVIDER_HOSTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ai21_chat": ("api.ai21.com",),
        "anthropic": ("api.anthropic.com",),
        "cerebras": ("api.cerebras.ai",),
        "codestral": ("codestral.mistral.ai",),
        "cohere": ("api.cohere.com", "api.cohere.ai"),
        "cohere_chat": ("api.cohere.com", "api.cohere.ai"),
        "dashscope": ("dashscope.aliyuncs.com", "dashscope-intl.aliyuncs.com"),
        "deepinfra": ("api.deepinfra.com",),
        "deepseek": ("api.deepseek.com",),
        "fireworks_ai": ("api.fireworks.ai",),
        "gemini": ("generativelanguage.googleapis.com",),
        "groq": ("api.groq.com",),
        "mistral": ("api.mistral.ai",),
        "moonshot": ("api.moonshot.ai", "api.moonshot.cn"),
        "nvidia_nim": ("integrate.api.nvidia.com",),
        "openai": ("api.openai.com",),
        "openrouter": ("openrouter.ai",),
        "perplexity": ("api.perplexity.ai",),
        "sambanova": ("api.sambanova.ai",),
        "together_ai": ("api.together.ai", "api.together.xyz"),
        "xai": ("api.x.ai",),
    }
)
"""Providers that documents may name without an endpoint, and the hosts of their own that calls may go to."""
_OFFLINE: Final = ("offline/echo", "offline/script")
# Each part begins with a letter or digit: no `..`, no URL, no query, nothing that needs encoding in a path.
_MODEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*(?:/[A-Za-z0-9][A-Za-z0-9._:@+-]*)+\Z")
_MAX_MODEL: Final = 300
# Settings that say where a call goes or who makes it, whatever the provider calls them.
_OF_ENDPOINTS: Final = re.compile(
    r"api_|base|url|key|token|secret|password|header|host|region|project|location|credential|auth|aws|vertex|azure|"
    r"organization|proxy|client|provider|deployment|ssl|session",
    re.IGNORECASE,
)


class Thinking(SpecModel):
    """Whether and how long a model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=1_000_000)


class ModelSettings(SpecModel):
    """The `model_settings` of an agent."""

    timeout_s: Duration | None = Field(default=None, gt=0)
    """Bounds one call."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0, le=10)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}$")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    thinking: Thinking | None = None
    parallel_tool_calls: bool | None = None
    replies: list[Any] | None = None
    """What the stand-in `offline/script` answers; no other model is sent them."""


class Wrong(NamedTuple):
    """What is wrong with one setting, or with a model's name."""

    field: str
    message: str
    mend: str


def model_problem(model: str, deployment: Deployment, project: str) -> Wrong | None:
    """What is wrong with a model's name in a document of a project; None where it may be called."""
    word, slash, rest = model.partition("/")
    shown = model[:120]
    if model in _OFFLINE:
        return None
    if not slash or len(model) > _MAX_MODEL or not _MODEL.match(model):
        return Wrong(
            "model",
            f"{shown!r} is not a model's name",
            "Write 'provider/model', such as openai/gpt-5-mini, or 'endpoint/model'",
        )
    if word == "offline":
        return Wrong("model", f"There is no stand-in {shown!r}", "Write offline/echo or offline/script")
    endpoint = deployment.endpoints.get(word)
    if endpoint is not None and endpoint.projects and project not in endpoint.projects:
        return Wrong(
            "model",
            f"The endpoint {word!r} is not allowed to the project {project!r}",
            f"Extend its 'projects' in {WHERE}",
        )
    if endpoint is not None or word in PROVIDER_HOSTS:
        return None
    return Wrong(
        "model",
        f"{word!r} in the model {shown!r} is no endpoint of the deployment, and no provider that is called without one",
        f"Say where {rest!r} is by endpoints={{{word!r}: Endpoint(...)}} of {WHERE}",
    )


def setting_problems(settings: Mapping[str, Json], *, with_templates: bool) -> Iterator[Wrong]:
    """What is wrong with `model_settings`.

    Args:
        settings: As written, or rendered.
        with_templates: Whether values may be templates, which are looked at when they are rendered.
    """
    known = ModelSettings.model_fields
    for name in settings:
        if name not in known:
            yield _unknown(name)
    given = {name: value for name, value in settings.items() if name in known}
    if with_templates:
        given = {n: v for n, v in given.items() if not any(is_template(text) for text in strings_of(v))}
    try:
        ModelSettings.model_validate(given)
    except ValidationError as error:
        # Of a value that fits none of several types, the first of these is told.
        first = {
            str(detail["loc"][0]) if detail["loc"] else "model_settings": detail
            for detail in reversed(error.errors(include_input=False, include_url=False))
        }
        for name, detail in first.items():
            yield Wrong(name, f"The setting {name!r}: {detail['msg']}", "Correct the value")


def _unknown(name: str) -> Wrong:
    if _OF_ENDPOINTS.search(name):
        return Wrong(name, f"The setting {name[:80]!r} is not a document's to make", endpoint_word())
    return Wrong(
        name,
        f"There is no setting {name[:80]!r}",
        f"There are {', '.join(_shown(ModelSettings.model_fields))}",
    )


def endpoint_word() -> str:
    """What to do where a document says where a model is; a sentence without its end."""
    return (
        "Where a model is, and its key, stand in an endpoint of the deployment: write model: local/llama3, and "
        f"endpoints={{'local': Endpoint(api_base=..., api_key=...)}} of {WHERE}"
    )


def _shown(names: Mapping[str, object]) -> Sequence[str]:
    return [name for name in names if name != "replies"]
