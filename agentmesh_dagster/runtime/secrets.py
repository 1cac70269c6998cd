"""Secrets: looked up by name for tool and model settings, and blotted out of everything that is written down.

`Secrets` remembers each value that it gave out. Whatever could carry one (errors, tool output, model text)
passes through `redact` before it reaches the journal, an event, a log or a person. Documents get the secrets that the
deployment allows, through a `SecretUse`, which also knows which hosts may get them.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import quote, quote_plus

from agentmesh_dagster.constants import DEFAULT_PROJECT, ENV_SECRETS_PROVIDER, GROUP_SECRETS
from agentmesh_dagster.deployment import WHERE, Deployment, SecretHosts
from agentmesh_dagster.errors import AgentMeshError, DefinitionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.ports import SecretProvider

__all__ = [
    "REDACTED",
    "EnvironmentSecrets",
    "Redactor",
    "SecretMissing",
    "SecretRefused",
    "SecretUse",
    "Secrets",
    "load_provider",
    "provider_keys",
]

REDACTED: Final = "***"
# Shorter values are not remembered: blotting out every "ab" would destroy more than it hides.
MIN_LENGTH: Final = 4
# From this length on a value is found inside other words too.
_MIN_FRAGMENT: Final = 8
# How much of a foreign error is kept.
_MAX_MESSAGE: Final = 2_000

_KEY_NAME: Final = re.compile(r"(?:API_?KEY|_KEY|TOKEN|SECRET|PASSWORD)\Z", re.IGNORECASE)

E = TypeVar("E", bound=AgentMeshError)


class SecretMissing(DefinitionError):
    """A document names a secret that the secrets provider does not have."""

    default_code = "secret-missing"


class SecretRefused(DefinitionError):
    """A document names a secret that the deployment does not allow there.

    Codes: `secret-refused`, `secret-host` (a host that may not get it).
    """

    default_code = "secret-refused"


class EnvironmentSecrets:
    """Secrets from environment variables of the same name."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment

    def get(self, name: str) -> str | None:
        return self._environment.get(name)


class Redactor:
    """Replaces known values, in the forms in which they commonly surface, by `***`.

    The forms: as it is, without surrounding white space, percent-encoded, JSON-escaped, as Python shows it,
    hexadecimal, and base64 (also as a part of a longer encoded text, such as `Basic` credentials); of a value of
    several lines, each long line.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: frozenset[str] = frozenset()
        self._known: _Known | None = None
        self.add(*values)

    def add(self, *values: str) -> None:
        """Remembers further values; those shorter than 4 characters are left out."""
        added = {value for value in values if len(value.strip()) >= MIN_LENGTH}
        if added <= self._values:
            return
        # One assignment each, so that a reader on another thread sees the old or the new one.
        self._values = self._values | added
        patterns = {pattern for value in self._values for pattern in _patterns(value)}
        longest_first = sorted(patterns, key=lambda pattern: len(pattern.form), reverse=True)
        forms = {pattern.form for pattern in longest_first}
        self._known = _Known(
            # What holds another form need not be looked for: that one is found first.
            forms=tuple(f for f in forms if not any(other != f and other in f for other in forms)),
            shortest=min(len(form) for form in forms),
            pattern=re.compile("|".join(pattern.expression for pattern in longest_first)),
        )

    def redact(self, value: Json) -> Json:
        """The same JSON value without the known values, in keys too; itself where nothing is known."""
        known = self._known
        return value if known is None else _redact(known, value)

    def redact_text(self, text: str) -> str:
        """The same text without the known values."""
        known = self._known
        return text if known is None else known.redact(text)


class _Known(NamedTuple):
    """The forms of the values that are known."""

    forms: tuple[str, ...]
    shortest: int
    pattern: re.Pattern[str]

    def redact(self, text: str) -> str:
        # Nearly every text holds none of them, and to see that is a hundred times as fast as the pattern.
        if len(text) < self.shortest or not any(form in text for form in self.forms):
            return text
        return self.pattern.sub(REDACTED, text)


def _redact(known: _Known, value: Json) -> Json:
    if isinstance(value, str):
        return known.redact(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Json]", value).items()
        return {known.redact(key): _redact(known, item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_redact(known, item) for item in cast("list[Json]", value)]
    return value


class _Pattern(NamedTuple):
    form: str
    expression: str


def _patterns(value: str) -> set[_Pattern]:
    texts = _texts(value)
    found = {_Pattern(form, _as_expression(form)) for text in texts for form in _forms(text)}
    # The characters at both ends of base64 hold bits of the neighbours too; they go with the rest, and the padding.
    return found | {
        _Pattern(form, rf"[A-Za-z0-9+/_-]?{re.escape(form)}[A-Za-z0-9+/_-]?=*")
        for text in texts
        for form in _base64_forms(text.encode("utf-8", "surrogatepass"))
    }


def _as_expression(form: str) -> str:
    """A short value is looked for as a whole word: `test` is no part of `contest`."""
    escaped = re.escape(form)
    return escaped if len(form) >= _MIN_FRAGMENT else rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"


def _texts(value: str) -> set[str]:
    """The value, without white space around it, and of several lines each long one."""
    lines = value.splitlines()
    long = (
        {line.strip() for line in lines if len(line.strip()) >= _MIN_FRAGMENT}
        if len(lines) > 1
        else set[str]()
    )
    return {value, value.strip(), *long}


def _forms(text: str) -> set[str]:
    hexadecimal = text.encode("utf-8", "surrogatepass").hex()
    forms = {text, hexadecimal, hexadecimal.upper(), quote(text), quote(text, safe=""), quote_plus(text)}
    forms |= {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]}
    return {form for form in forms if len(form) >= MIN_LENGTH}


def _base64_forms(raw: bytes) -> set[str]:
    """What is the same in every base64 text that holds these bytes, for each of the three alignments."""
    forms: set[str] = set()
    for offset in range(3):
        first, last = -(-offset * 8 // 6), (offset + len(raw)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            form = encode(b"\0" * offset + raw).decode("ascii")[first:last]
            if len(form) >= _MIN_FRAGMENT:
                forms.add(form)
    return forms


class Secrets:
    """Gives secrets to templates, and remembers them in order to redact them.

    Args:
        provider: Where secrets come from; see `load_provider`.
        deployment: Which of them documents may name.
        project: Whose documents they are.
        known: Further values that are redacted from the start.
    """

    def __init__(
        self,
        provider: SecretProvider,
        deployment: Deployment = Deployment(),  # noqa: B008 - a frozen record
        project: str = DEFAULT_PROJECT,
        known: Iterable[str] = (),
    ) -> None:
        self._provider = provider
        self._deployment = deployment
        self._project = project
        self._redactor = Redactor(known)

    def use(self) -> SecretUse:
        """The secrets that one request of a document takes."""
        return SecretUse(self)

    def hosts_of(self, name: str) -> SecretHosts:
        """The hosts that may get a secret that a document names.

        Raises:
            SecretRefused: The deployment does not allow the name to documents of the project.
        """
        hosts = self._deployment.secret_hosts(name, self._project)
        if hosts is None:
            mend = self._deployment.how_to_allow_secret(name, self._project)
            raise SecretRefused(
                f"the secret {name!r} is not allowed to documents: {mend}", context={"secret": name}
            )
        return hosts

    def of_deployment(self, name: str) -> str:
        """A secret that the deployment itself names, as an endpoint's key: it needs no permission.

        Raises:
            SecretMissing: The provider has none of that name, or an empty one.
        """
        value = self._provider.get(name)
        if not value:
            if isinstance(self._provider, EnvironmentSecrets):
                mend = f"set the environment variable {name!r} where runs execute"
            else:
                mend = f"add it to the secrets provider in use ({type(self._provider).__name__})"
            state = "is empty" if value == "" else "is not configured"
            raise SecretMissing(f"the secret {name!r} {state}: {mend}", context={"secret": name})
        self._redactor.add(value)
        return value

    def remember(self, *values: str) -> None:
        """Has further values redacted from now on."""
        self._redactor.add(*values)

    def redact(self, value: Json) -> Json:
        """The same JSON value or text, with every secret given out so far as `***`."""
        return self._redactor.redact(value)

    def redact_error(self, error: BaseException) -> dict[str, Any]:
        """An error as a JSON object without secrets; foreign errors get the code `unexpected`."""
        if isinstance(error, AgentMeshError):
            return self.redact(error.to_json())
        message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE] if str(error) else type(error).__name__
        return self.redact({"code": "unexpected", "domain": "node", "category": "system", "message": message})

    def scrub(self, error: E) -> E:
        """The same error object without secrets, and without chained errors, which may quote them.

        Raise it outside the `except` block that caught it: inside, Python would chain the caught error again.
        """
        error.message = self.redact(error.message)
        error.args = tuple(self.redact(argument) for argument in error.args)
        error.context = self.redact(error.context)
        error.__cause__ = None
        error.__context__ = None
        return error


class SecretUse:
    """The secrets that one request of a document takes: the function `secret` of its templates, and where they go."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._taken: dict[str, SecretHosts] = {}

    def lookup(self, name: str) -> str:
        """The secret of that name, if documents may name it.

        Raises:
            SecretRefused: They may not.
            SecretMissing: The provider has none of that name, or an empty one.
        """
        self._taken[name] = self._secrets.hosts_of(name)
        return self._secrets.of_deployment(name)

    def check_destination(self, host: str | None, port: int = 0) -> None:
        """Checks that a host may get all secrets that were taken; before anything is sent.

        Args:
            host: None, where it is not known: then only secrets that every host may get pass.
            port: Its port.

        Raises:
            SecretRefused: It may not get one of them (code `secret-host`).
        """
        for name, hosts in self._taken.items():
            if hosts.rules is None or (host is not None and hosts.allows(host, port)):
                continue
            if host is None:
                problem = "goes to certain hosts only, and this is not a place where the host is known"
            else:
                problem = f"may not go to the host {host!r}: the 'hosts' of its AllowedSecret in {WHERE} name others"
            raise SecretRefused(
                f"the secret {name!r} {problem}", code="secret-host", context={"secret": name}
            )


def provider_keys(environment: Mapping[str, str] | None = None) -> list[str]:
    """The values of environment variables whose names say that they are keys, such as `OPENAI_API_KEY`.

    LiteLLM reads the keys of providers there; a server may repeat one in what it answers.
    """
    found = os.environ if environment is None else environment
    return [value for name, value in found.items() if len(value) >= _MIN_FRAGMENT and _KEY_NAME.search(name)]


def load_provider(name: str | None = None) -> SecretProvider:
    """The secrets provider of a name: an entry point in the group `agentmesh_dagster.secrets`.

    Args:
        name: Default: `AGENTMESH_SECRETS_PROVIDER`; where that is unset too, or for `environment`,
            environment variables. The entry point names a class or function that is called without arguments.

    Raises:
        DefinitionError: No installed package offers that provider (code `secrets-provider`), or it fails to
            load.
    """
    wanted = name or os.environ.get(ENV_SECRETS_PROVIDER) or "environment"
    if wanted == "environment":
        return EnvironmentSecrets()
    found = {point.name: point for point in metadata.entry_points(group=GROUP_SECRETS)}
    if wanted not in found:
        known = ", ".join(repr(known) for known in sorted({*found, "environment"}))
        raise DefinitionError(
            f"there is no secrets provider {wanted!r} ({ENV_SECRETS_PROVIDER}); installed are {known}",
            code="secrets-provider",
        )
    try:
        return cast("SecretProvider", found[wanted].load()())
    except Exception as error:
        raise DefinitionError(
            f"the secrets provider {wanted!r} ({found[wanted].value}) cannot be loaded:"
            f" {type(error).__name__}: {error}",
            code="secrets-provider",
        ) from error
