"""What a notifier is, and what it gets to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.deployment import MailServer
from agentmesh_dagster.errors import AgentMeshError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.notify.message import NoticeMessage
from agentmesh_dagster.runtime.secrets import Secrets
from agentmesh_dagster.runtime.tools.http_client import HttpClient
from agentmesh_dagster.specs.base import Template
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.notify import NotifyConfig

__all__ = ["AnyNotifier", "Notifier", "NotifyContext", "NotifyError", "Say"]

ConfigT = TypeVar("ConfigT", bound=NotifyConfig)

Say = Callable[[str, str], None]
"""Takes a level (`debug`, `info`, `warning`) and a line."""


class NotifyError(AgentMeshError):
    """A message to people was not delivered.

    Codes: `notify-refused` (the receiver did not take it), `notify-config`, `notifier-missing`, `mail-unconfigured`.
    """

    domain = "notify"
    category = "third_party"
    default_code = "notify-refused"


@dataclass(frozen=True, kw_only=True)
class NotifyContext:
    """What a notifier gets besides its config and the message."""

    secrets: Secrets
    """For `redact`: what a receiver answers may quote what it was sent."""
    http: HttpClient
    """Behind the guard of addresses."""
    clock: Clock
    mail: MailServer | None
    """The SMTP server of the deployment."""
    say: Say
    """For the log that those look at who run the sensor; secrets that templates looked up are taken out."""


class Notifier(ABC, Generic[ConfigT]):
    """One way to reach people. Stateless; one object per process."""

    name: ClassVar[str]
    """The `type` in a config."""
    config_model: type[ConfigT]
    """Its fields that are marked with `specs.base.Template` are rendered at each attempt."""

    def render(self, config: Mapping[str, Json], names: Mapping[str, object]) -> dict[str, Json]:
        """The config with the fields that are marked as templates rendered.

        Args:
            config: As written, with the members of `config_model`.
            names: What the templates see: `approval` (see `message.approval_view`), `config`, and the function `secret`
                where the type takes secrets.

        Raises:
            ExpressionError: A template fails.
            SecretMissing: It names a secret that is not there.
            SecretRefused: It names a secret that the deployment does not allow.
        """
        marked = template_fields(self.config_model)
        return {
            field: render(value, names, where=self._where(field)) if field in marked else value
            for field, value in config.items()
        }

    def _where(self, field: str) -> str:
        return f"notify {self.name!r}, field {field}"

    def destination(self, config: ConfigT) -> tuple[str, int] | None:
        """The host and port that a message goes to; None where they are not known.

        Secrets that the deployment allows to certain hosts are given to those alone, and to none that is not known.
        """
        return None

    @abstractmethod
    async def send(self, config: ConfigT, message: NoticeMessage, context: NotifyContext) -> None:
        """Delivers the message, or raises; called again for the same `message.id` until it returns.

        It is canceled after `deliver.SEND_LIMIT_S` seconds.

        Args:
            config: Rendered: secrets are in clear here, and go into no error and no log.
            message: What to say.
            context: What to say it with.

        Raises:
            Exception: It was not delivered. The text is kept, without the secrets that templates looked up.
        """


AnyNotifier = Notifier[Any]


def template_fields(model: type[NotifyConfig]) -> frozenset[str]:
    """The fields of a config, as they are written, that are marked as templates."""
    return frozenset(
        info.alias or name
        for name, info in model.model_fields.items()
        if any(isinstance(mark, Template) for mark in info.metadata)
    )
