"""The deployment that documents are checked for: what it allows to them, and which secrets are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from agentmesh_dagster.constants import DEFAULT_PROJECT
from agentmesh_dagster.deployment import WHERE, Deployment
from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import expressions
from agentmesh_dagster.specs.fields import as_list, as_object
from agentmesh_dagster.specs.models import model_problem, setting_problems
from agentmesh_dagster.specs.problems import Problem, child_path

TARGET_CODES: Final = frozenset(
    ("secret-refused", "secret-host", "model-refused", "mail-unconfigured", "config-missing")
)
"""The problems that the deployment's record mends, and not the document."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """See the module."""

    deployment: Deployment | None = None
    """None: what it allows is not looked at."""
    project: str = DEFAULT_PROJECT
    has_secret: Callable[[str], bool] | None = None
    """Whether a secret is configured on this machine; None: that is not looked at."""
    is_publishing: bool = False
    """Whether what the deployment does not allow is an error: what is stored only may be for another one."""

    def secret_problems(self, name: str, path: str) -> Iterator[Problem]:
        """What is wrong with a secret that a document names where it may name one."""
        deployment = self.deployment
        if deployment is not None and deployment.secret_hosts(name, self.project) is None:
            mend = deployment.how_to_allow_secret(name, self.project)
            yield self._problem(
                "secret-refused",
                path,
                f"The secret {name!r} is not allowed to documents",
                mend[:1].upper() + mend[1:],
            )
        elif self.has_secret is not None and not self.has_secret(name):
            yield Problem.of(
                "secret-unconfigured",
                path,
                f"The secret {name!r} is not configured here",
                f"Set {name} in the environment, or in the secrets provider, of the machine that runs it",
            )

    def destination_problems(self, url: Json, sent: Iterable[tuple[str, str]]) -> Iterator[Problem]:
        """Secrets that may not go to the host of a URL, where the URL says which host that is.

        Args:
            url: As written.
            sent: The texts that are sent there with their paths, the URL too.
        """
        host, port = _host_of(url)
        if not host or self.deployment is None:
            return
        for path, text in sent:
            try:
                names = expressions.secrets_used(text)
            except ExpressionError:
                continue  # told where the expressions are checked
            for name in sorted(names):
                hosts = self.deployment.secret_hosts(name, self.project)
                if hosts is not None and not hosts.allows(host, port):
                    yield self._problem(
                        "secret-host",
                        path,
                        f"The secret {name!r} may not go to the host {host!r}",
                        f"Extend the 'hosts' of its AllowedSecret in {WHERE}",
                    )

    def model_problems(self, models: Json, path: str) -> Iterator[Problem]:
        """Models that documents may not call.

        Args:
            models: A name, or a list of them.
            path: Of the field that says so.
        """
        items = as_list(models)
        places = (
            [(path, models)] if items is None else [(child_path(path, n), m) for n, m in enumerate(items)]
        )
        for place, model in places:
            if self.deployment is None or not isinstance(model, str):
                continue  # of another type: told where the shape is checked
            wrong = model_problem(model, self.deployment, self.project)
            if wrong is not None:
                yield self._problem("model-refused", place, wrong.message, wrong.mend)

    def mail_problems(self, path: str) -> Iterator[Problem]:
        """That a notifier sends mail, and the deployment has no server for it."""
        if self.deployment is not None and self.deployment.mail is None:
            yield self._problem(
                "mail-unconfigured",
                path,
                "The deployment has no mail server",
                f"Say which by mail=MailServer(host=...) of {WHERE}",
            )

    def config_problems(self, name: str, path: str) -> Iterator[Problem]:
        """That an expression reads `config.NAME`, and the deployment has no such value."""
        if self.deployment is not None and name not in self.deployment.config:
            there = ", ".join(self.deployment.config) or "none"
            yield self._problem(
                "config-missing",
                path,
                f"The deployment has no value config.{name[:80]}; there are: {there}",
                f"Give it by config={{{name[:80]!r}: ...}} of {WHERE}",
            )

    def _problem(self, code: str, path: str, message: str, mend: str) -> Problem:
        problem = Problem.of(code, path, message, mend)
        return problem if self.is_publishing else replace(problem, severity="warning")


def model_setting_problems(settings: Json) -> Iterator[Problem]:
    """What an agent's `model_settings` may not say."""
    given = as_object(settings)
    for wrong in setting_problems(given, with_templates=True) if given is not None else ():
        yield Problem.of("model-setting", f"model_settings.{wrong.field}", wrong.message, wrong.mend)


def _host_of(url: Json) -> tuple[str, int]:
    """Host and port of a URL whose beginning holds no template; an empty host otherwise."""
    if not isinstance(url, str):
        return "", 0
    beginning = url.strip().partition("{{")[0]
    if "{{" in url and beginning.count("/") < 3:
        return "", 0
    try:
        parts = urlsplit(beginning)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0
