"""What a deployment lets the documents of its projects use: secrets, endpoints of models, mail, values, hosts.

Documents come from many authors, and from models; who deploys decides what they may reach. Nothing is allowed unless
it stands here. A project's deployment is written in its `resources/__init__.py`, as keyword arguments of
`AgentMesh.of_project`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json

__all__ = ["WHERE", "AllowedSecret", "Deployment", "Endpoint", "HostRule", "MailServer", "SecretHosts"]

WHERE: Final = "AgentMesh.of_project(...) in resources/__init__.py"
"""Where people write a deployment, for messages."""
_NEVER: Final = ("AGENTMESH_", "DAGSTER_")
_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9_.*/-]{1,200}\Z")
_ENDPOINT_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\Z")
_VALUE_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}\Z")
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?\Z")
_OFFLINE: Final = "offline"


@dataclass(frozen=True)
class HostRule:
    """A host, a host and port, or all names below a domain."""

    host: str
    """A name or an address in lower case; `*.example.com` are the names below `example.com`."""
    port: int | None = None
    """None: any."""

    @staticmethod
    def parse(text: str) -> HostRule | None:
        """The rule that a text such as `desk.example.com`, `localhost:8080`, `*.example.com` or `[::1]:80` says."""
        host, colon, port_text = text.strip().lower().rpartition(":")
        port: int | None = None
        if not colon or text.strip().endswith("]"):
            host = text.strip().lower()
        elif port_text.isascii() and port_text.isdigit() and int(port_text) < 65536:
            port = int(port_text)
        else:
            return None
        host = host.removeprefix("[").removesuffix("]").rstrip(".")
        if not _HOST.match(host):
            try:
                host = str(ip_address(host))
            except ValueError:
                return None
        return HostRule(host, port)

    def matches(self, host: str, port: int) -> bool:
        """Whether the rule means a host and port."""
        host = host.lower().rstrip(".")
        if self.port not in (None, port):
            return False
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


@dataclass(frozen=True)
class AllowedSecret:
    """A secret that documents may name."""

    name: str
    """A name, or a pattern in which `*` stands for any characters: `CRM_*`."""
    hosts: tuple[str, ...] = ()
    """The hosts that may get it: `desk.example.com`, `localhost:8080`, `*.example.com`. Empty: every host."""
    projects: tuple[str, ...] = ()
    """The projects whose documents may name it. Empty: every project."""

    def __post_init__(self) -> None:
        if not _SECRET_NAME.match(self.name):
            raise _wrong(f"the secret {self.name!r} has no name such as 'DESK_TOKEN' or 'CRM_*'")
        _check_hosts(self.hosts, f"the secret {self.name!r}")
        _check_tuple(self.projects, f"the projects of the secret {self.name!r}")

    def means(self, name: str, project: str) -> bool:
        """Whether it allows a name in a project."""
        if self.projects and project not in self.projects:
            return False
        return re.fullmatch(re.escape(self.name).replace(r"\*", ".*"), name) is not None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server of models, or an account at a provider; an agent names it before the `/` in its `model`.

    `model: local/llama3` calls the model `llama3` at the endpoint `local`. In `api_key`, `headers` and `settings`,
    `{{ secret('NAME') }}` takes a secret; that one need not be allowed to documents.
    """

    provider: str = "openai"
    """The protocol, by LiteLLM's name of the provider; `openai` is every OpenAI-compatible server."""
    api_base: str | None = None
    """Default: the provider's own."""
    api_key: str | None = field(default=None, repr=False)
    """Default: none where `api_base` is given, else the provider's own environment variable."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    settings: Mapping[str, Json] = field(default_factory=dict[str, Any], repr=False)
    """Further arguments for LiteLLM, such as `api_version` or `aws_region_name`."""
    hosts: tuple[str, ...] = ()
    """The hosts that calls may go to. Default: that of `api_base`, else those of the provider."""
    projects: tuple[str, ...] = ()
    """The projects whose agents may name it. Empty: every project."""

    def __post_init__(self) -> None:
        _check_hosts(self.hosts, "the endpoint")
        _check_tuple(self.projects, "the projects of an endpoint")


@dataclass(frozen=True, kw_only=True)
class MailServer:
    """The SMTP server that notifiers of the type `email` send through."""

    host: str
    port: int = 587
    sender: str | None = None
    """The address that messages come from, where a notifier names none."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    """`{{ secret('NAME') }}` takes a secret; that one need not be allowed to documents."""
    starttls: bool = True
    """Whether the connection is turned to TLS before anything else is said."""
    tls: bool = False
    """Whether it is TLS from the first byte (port 465); then `starttls` means nothing."""

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise _wrong("a mail server takes 'user' and 'password', or neither")


@dataclass(frozen=True)
class SecretHosts:
    """The hosts that may get a secret."""

    rules: tuple[HostRule, ...] | None
    """None: every host."""

    def allows(self, host: str, port: int) -> bool:
        """Whether a host and port may get it."""
        return self.rules is None or any(rule.matches(host, port) for rule in self.rules)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """See the module; by default nothing is allowed.

    Raises:
        DefinitionError: A part of it is not well-formed (code `deployment`).
    """

    secrets: tuple[AllowedSecret, ...] = ()
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict[str, Endpoint])
    """By the name that agents write before the `/`; one with the name of a provider takes its place."""
    mail: MailServer | None = None
    config: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Values that expressions read as `config.NAME`. They are stored with runs and shown: no secrets."""
    private_hosts: tuple[str, ...] = ()
    """What tools and webhooks may reach besides the public internet, together with `AGENTMESH_HTTP_ALLOW`: hosts
    (`localhost:8080`, `*.internal.example`), addresses and CIDRs (`10.20.0.0/16`)."""

    def __post_init__(self) -> None:
        for name in self.endpoints:
            if not _ENDPOINT_NAME.match(name) or name == _OFFLINE:
                raise _wrong(f"the endpoint {name!r} needs a name of letters, digits, '_' and '-'")
        for name, value in self.config.items():
            if not _VALUE_NAME.match(name):
                raise _wrong(f"the config value {name!r} needs a name of letters, digits and '_'")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise _wrong(f"the config value {name!r} is not JSON: {error}") from None
        _check_tuple(self.private_hosts, "private_hosts")

    @staticmethod
    def of(
        *,
        secrets: Iterable[str | AllowedSecret] = (),
        endpoints: Mapping[str, Endpoint] | None = None,
        mail: MailServer | None = None,
        config: Mapping[str, Json] | None = None,
        private_hosts: Iterable[str] = (),
    ) -> Deployment:
        """A deployment as people write it: a secret that every host may get is its name alone."""
        if isinstance(secrets, str) or isinstance(private_hosts, str):
            raise _wrong("secrets and private_hosts are lists of texts, not one text")
        return Deployment(
            secrets=tuple(AllowedSecret(each) if isinstance(each, str) else each for each in secrets),
            endpoints=dict(endpoints or {}),
            mail=mail,
            config=dict(config or {}),
            private_hosts=tuple(private_hosts),
        )

    def secret_hosts(self, name: str, project: str) -> SecretHosts | None:
        """The hosts that may get a secret from the documents of a project; None where they may not name it."""
        if name.upper().startswith(_NEVER):
            return None
        allowed = [secret for secret in self.secrets if secret.means(name, project)]
        if not allowed:
            return None
        if any(not secret.hosts for secret in allowed):
            return SecretHosts(None)
        return SecretHosts(tuple(rule for s in allowed for h in s.hosts if (rule := HostRule.parse(h))))

    def how_to_allow_secret(self, name: str, project: str) -> str:
        """What to do about a secret that documents may not name; a sentence without its end."""
        if name.upper().startswith(_NEVER):
            return "names that begin with AGENTMESH_ or DAGSTER_ are never given to documents"
        elsewhere = any(secret.means(name, each) for secret in self.secrets for each in secret.projects)
        if elsewhere:
            return f"it is allowed to other projects than {project!r}; extend its 'projects' in {WHERE}"
        return f"allow it by secrets=[{name!r}] of {WHERE}"


def _check_hosts(hosts: tuple[str, ...], whose: str) -> None:
    _check_tuple(hosts, f"the hosts of {whose}")
    for host in hosts:
        if HostRule.parse(host) is None:
            raise _wrong(
                f"{whose} has the host {host!r}: write 'desk.example.com', 'localhost:8080' or '*.example.com'"
            )


def _check_tuple(value: object, what: str) -> None:
    if isinstance(value, str):
        raise _wrong(f"{what} are a tuple of texts, not one text")


def _wrong(problem: str) -> DefinitionError:
    return DefinitionError(f"{WHERE}: {problem}", code="deployment")
