"""The configs of the built-in notifiers: how people are told that an approval waits for them.

A config is written on a node or a project as `{type: webhook, url: ...}`. It is stored as written; its templates are
rendered when a message is delivered, and in them `approval` is the approval and `secret('NAME')` a secret. The code
that delivers stands in `runtime.notify`; a plugin brings both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import Field, ValidationError

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import Duration, SpecModel, Template
from agentmesh_dagster.specs.expressions import is_template

NOTIFY_NAMES: Final = frozenset(("approval", "config"))
"""What templates in a notifier's config may name, besides `secret('NAME')`."""


class NotifyConfig(SpecModel):
    """Base of all notifiers' configs."""

    secret_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that hold a secret: `{{ secret('NAME') }}`, and nothing in clear."""
    takes_secrets: ClassVar[bool] = True
    """Whether its templates may name secrets."""
    retired_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of earlier releases: refused in documents, and left out of what is stored."""

    type: str
    """The word by which the notifier is known: `log`, `webhook`, `email`, or a plugin's."""
    max_attempts: int = Field(default=8, ge=1, le=50)
    """How often one message is tried before it is given up; the approval stays open either way."""


class LogNotify(NotifyConfig):
    """A line in the log of the process that delivers, and an event of the run."""

    level: Literal["debug", "info", "warning"] = "info"


class WebhookNotify(NotifyConfig):
    """A POST of JSON, signed with HMAC-SHA256 where a `secret` is given."""

    secret_fields: ClassVar[tuple[str, ...]] = ("secret",)

    url: Annotated[str, Template()]
    secret: Annotated[str | None, Template()] = None
    """The key that messages are signed with."""
    headers: Annotated[dict[str, str], Template()] = Field(default_factory=dict)
    timeout_s: Duration = Field(default=10.0, gt=0, le=60)


class EmailNotify(NotifyConfig):
    """A message by SMTP, through the server of the deployment."""

    takes_secrets: ClassVar[bool] = False
    retired_fields: ClassVar[tuple[str, ...]] = ("host", "port", "user", "password", "starttls", "tls")

    to: Annotated[str | Annotated[list[str], Field(min_length=1, max_length=50)], Template()]
    """One address or several."""
    sender: Annotated[str | None, Template()] = None
    """Default: that of the deployment's mail server."""
    subject: Annotated[str | None, Template()] = None
    """Default: the approval's title, and why the message is sent."""
    timeout_s: Duration = Field(default=20.0, gt=0, le=120)


BUILTIN_NOTIFY_CONFIGS: dict[str, type[NotifyConfig]] = {
    "log": LogNotify,
    "webhook": WebhookNotify,
    "email": EmailNotify,
}
"""Config models by the type word of the notifier."""


def notify_config(
    raw: Json, known: Mapping[str, type[NotifyConfig]] = BUILTIN_NOTIFY_CONFIGS
) -> NotifyConfig:
    """A notifier's config as its model, templates unrendered.

    Raises:
        DefinitionError: It is none (code `notify-invalid`); the message shows no value, which may be a secret.
    """
    kind = cast("dict[str, Any]", raw).get("type") if isinstance(raw, dict) else None
    model = known.get(kind) if isinstance(kind, str) else None
    if model is None:
        names = ", ".join(repr(name) for name in sorted(known))
        raise DefinitionError(
            f"a notifier is {{type: ...}} with one of the types {names}", code="notify-invalid"
        )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the config"
        raise DefinitionError(
            f"the notifier of type {kind!r} cannot be used: {place}: {first['msg']}", code="notify-invalid"
        ) from None


def project_notifiers(
    raws: Sequence[Json], known: Mapping[str, type[NotifyConfig]] = BUILTIN_NOTIFY_CONFIGS
) -> tuple[Json, ...]:
    """A project's notifiers, checked: they are stored with every gate, so that no secret may stand in them.

    Raises:
        DefinitionError: One is no notifier (code `notify-invalid`), or has a secret in clear (`secret-literal`).
    """
    for raw in raws:
        model = notify_config(raw, known)
        for name in model.secret_fields:
            value = getattr(model, name, None)
            if isinstance(value, str) and value and not is_template(value):
                raise DefinitionError(
                    f"the notifier of type {model.type!r} has its {name!r} in clear: write "
                    "\"{{ secret('NAME') }}\", and configure NAME",
                    code="secret-literal",
                )
    return tuple(raws)
