"""The notifiers of this process: the built-in ones, and those of plugins."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from agentmesh_dagster.constants import GROUP_NOTIFIERS
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.runtime.notify.base import AnyNotifier, Notifier, NotifyError
from agentmesh_dagster.specs.notify import NotifyConfig

__all__ = ["find_notifier", "notifier_configs"]


@cache
def find_notifier(name: str) -> AnyNotifier:
    """The notifier of that name.

    A plugin offers a `Notifier` subclass under the entry-point group `agentmesh_dagster.notifiers`; the entry point's
    name is the `type` in configs. Only the plugin that is asked for is loaded, so that a broken one stops no other.

    Raises:
        NotifyError: No installed package offers it (code `notifier-missing`).
        DefinitionError: The plugin cannot be loaded, is no notifier, or takes a name that is taken (code
            `bad-plugin`).
    """
    builtin = _builtin()
    points = [point for point in entry_points(group=GROUP_NOTIFIERS) if point.name == name]
    if points and (name in builtin or len(points) > 1):
        raise _bad_plugin(name, "takes a name that is taken")
    if name in builtin:
        return builtin[name]
    if not points:
        raise NotifyError(
            f"there is no notifier {name!r} (known: {', '.join(_names())}): install the package that brings it "
            f"under the entry-point group {GROUP_NOTIFIERS!r}",
            code="notifier-missing",
        )
    return _load(points[0])


def notifier_configs() -> dict[str, type[NotifyConfig]]:
    """Config models by type, for the validation.

    Raises:
        DefinitionError: A plugin is bad (code `bad-plugin`).
    """
    return {name: find_notifier(name).config_model for name in _names()}


def _builtin() -> dict[str, AnyNotifier]:
    from agentmesh_dagster.runtime.notify.log import LogNotifier
    from agentmesh_dagster.runtime.notify.mail import EmailNotifier
    from agentmesh_dagster.runtime.notify.webhook import WebhookNotifier

    return {cls.name: cls() for cls in (LogNotifier, WebhookNotifier, EmailNotifier)}


def _names() -> list[str]:
    return list(dict.fromkeys((*_builtin(), *sorted(p.name for p in entry_points(group=GROUP_NOTIFIERS)))))


def _load(point: EntryPoint) -> AnyNotifier:
    try:
        cls = point.load()
    except Exception as error:
        raise _bad_plugin(point.name, f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Notifier)):
        raise _bad_plugin(point.name, f"is {cls!r}, no subclass of Notifier")
    return cast("type[AnyNotifier]", cls)()


def _bad_plugin(name: str, what: str) -> DefinitionError:
    return DefinitionError(
        f"the notifier {name!r} of the entry-point group {GROUP_NOTIFIERS!r} {what}: mend or uninstall the plugin",
        code="bad-plugin",
    )
