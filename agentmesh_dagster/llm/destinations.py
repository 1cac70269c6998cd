"""Where a call of a model goes: by the deployment's endpoint of that name, or to the provider's own hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

from agentmesh_dagster.deployment import Deployment, Endpoint, HostRule
from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.secrets import Secrets
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.models import PROVIDER_HOSTS, model_problem

__all__ = ["Destination", "find_destination"]

# Sent where a server needs no key: without one LiteLLM would send that of the provider whose protocol it speaks.
_NO_KEY: Final = "none"
_SECRET_NAME: Final = re.compile(r"key|token|secret|password|credential|auth", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where one call goes, and with what."""

    name: str
    """The model as the agent names it."""
    provider: str
    model: str
    """LiteLLM's name."""
    hosts: tuple[HostRule, ...]
    """The hosts to which requests may go; empty: every host, as an endpoint of the deployment without hosts says."""
    arguments: Mapping[str, Json] = field(default_factory=dict[str, Any], repr=False)
    """What LiteLLM is told of it: `api_base`, `api_key`, `extra_headers` and the endpoint's settings."""

    @property
    def has_own_server(self) -> bool:
        """Whether it is a server of the deployment, and not the provider's own."""
        return "api_base" in self.arguments


def find_destination(model: str, deployment: Deployment, project: str, secrets: Secrets) -> Destination:
    """Where the calls of a model go.

    Raises:
        ModelError: Documents of the project may not call it (code `model-refused`).
        SecretMissing: A secret that its endpoint names is not configured.
    """
    wrong = model_problem(model, deployment, project)
    word, _, rest = model.partition("/")
    if wrong is not None:
        raise ModelError(
            f"{wrong.message}: {wrong.mend}",
            provider=word,
            model=model,
            retryable=False,
            code="model-refused",
        )
    endpoint = deployment.endpoints.get(word)
    if endpoint is None:
        hosts = tuple(HostRule(host) for host in PROVIDER_HOSTS[word])
        return Destination(name=model, provider=word, model=model, hosts=hosts)
    return Destination(
        name=model,
        provider=endpoint.provider,
        model=f"{endpoint.provider}/{rest}",
        hosts=_hosts_of(endpoint),
        arguments=_arguments_of(word, endpoint, secrets),
    )


def _hosts_of(endpoint: Endpoint) -> tuple[HostRule, ...]:
    texts = endpoint.hosts
    if not texts and endpoint.api_base is not None:
        parts = urlsplit(endpoint.api_base)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return (HostRule((parts.hostname or "").lower(), port),)
    if not texts:
        texts = PROVIDER_HOSTS.get(endpoint.provider, ())
    return tuple(rule for text in texts if (rule := HostRule.parse(text)) is not None)


def _arguments_of(name: str, endpoint: Endpoint, secrets: Secrets) -> dict[str, Json]:
    written: dict[str, Json] = dict(endpoint.settings)
    if endpoint.headers:
        written["extra_headers"] = dict(endpoint.headers)
    if endpoint.api_base is not None:
        written["api_base"] = endpoint.api_base
        written["api_key"] = _NO_KEY if endpoint.api_key is None else endpoint.api_key
    elif endpoint.api_key is not None:
        written["api_key"] = endpoint.api_key
    names = {"secret": secrets.of_deployment}
    arguments = cast("dict[str, Json]", render(written, names, where=f"endpoint {name!r} of the deployment"))
    secrets.remember(*(value for value in _secret_values(arguments, False) if value != _NO_KEY))
    return arguments


def _secret_values(value: Json, is_secret: bool) -> Iterator[str]:
    """Texts under names such as `api_key` or `Authorization`, at any depth; of `Bearer x`, `x` too."""
    if isinstance(value, str):
        if is_secret:
            yield value
            yield value.rpartition(" ")[2]
    elif isinstance(value, Mapping):
        for name, item in cast("Mapping[str, Json]", value).items():
            yield from _secret_values(item, is_secret or _SECRET_NAME.search(name) is not None)
    elif isinstance(value, list):
        for item in cast("list[Json]", value):
            yield from _secret_values(item, is_secret)
