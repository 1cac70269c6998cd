"""How people bring a wait to its end: the lines that notices, the op's metadata and the command line show."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Final, cast

from agentmesh_dagster.constants import DECIDE_JOB, DEFAULT_PROJECT
from agentmesh_dagster.records import Json, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.unknown import HAPPENED

__all__ = ["form_line", "how_to_decide", "moment", "short_id"]

_SHORT: Final = 8
_MAX_FIELDS: Final = 20
_MAX_VALUE: Final = 200


def how_to_decide(wait: Wait) -> tuple[str, ...]:
    """What may be done about a wait, one line each: commands to copy first, then Dagster, then the data it takes.

    Commands are quoted for a POSIX shell. What stands in capitals is to be filled in: `JSON`, `TEXT`, `OPTION`.

    Returns:
        Nothing for a wait that is not open.
    """
    if wait.status is not WaitStatus.OPEN:
        return ()
    command = _command(wait.project)
    if wait.kind is WaitKind.TIMER:
        return (f"goes on by itself at {moment(wait.deadline_at)}",) if wait.deadline_at else ()
    if wait.kind is WaitKind.EVENT:
        key = f" --key {shlex.quote(wait.event_key)}" if wait.event_key else ""
        return (
            f"{command} events send {shlex.quote(wait.event_name)}{key} --data JSON",
            *form_line(wait),
        )
    if wait.kind is WaitKind.SUSPEND:
        label = f" --label {shlex.quote(wait.label)}" if wait.label else ""
        return (
            f"{command} runs resume {wait.run_id}{label} --data JSON",
            f"{_job(wait)} and data",
            *form_line(wait),
        )
    return (*_approval_lines(wait, f"{command} approvals"), *form_line(wait))


def short_id(wait: Wait) -> str:
    """The first characters of a wait's id, which commands take for it."""
    return wait.id[:_SHORT]


def moment(at: datetime) -> str:
    """A time as people read it: `2026-07-01 12:00:00 UTC`."""
    return at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def form_line(wait: Wait) -> tuple[str, ...]:
    """One line that names the members of the data that a wait takes; nothing where it has no form."""
    form: object = wait.form_schema
    if not isinstance(form, Mapping):
        return ()
    schema = cast("Mapping[str, Any]", form)
    if not schema:
        return ()
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if not properties:
        return ("the data must fit " + _brief(schema),)
    required: list[str] = schema.get("required") or []
    shown = [_field(name, properties[name], name in required) for name in list(properties)[:_MAX_FIELDS]]
    more = len(properties) - len(shown)
    return ("the data has " + ", ".join(shown) + (f" and {more} more" if more else ""),)


def _command(project: str) -> str:
    return "agentmesh" if project == DEFAULT_PROJECT else f"agentmesh --project {shlex.quote(project)}"


def _approval_lines(wait: Wait, command: str) -> tuple[str, ...]:
    # At a tool's approval the form is that of the arguments, which need no change.
    is_form = wait.form_schema is not None and wait.kind is not WaitKind.TOOL
    data = " --data JSON" if is_form else ""
    job = f"{_job(wait)} and decision "
    if wait.options:
        words = [shlex.quote(option) for option in wait.options]
        # One command to copy for each, as long as that is readable.
        if len(words) <= 5 and not wait.multiple:
            lines = [
                f"{command} decide {short_id(wait)} {word}{data if _takes_data(wait, word) else ''}"
                for word in words
            ]
        else:
            repeated = " [OPTION ...]" if wait.multiple else ""
            chosen = f"{command} decide {short_id(wait)} OPTION{repeated}{data}"
            lines = [chosen, f"the options are {', '.join(words)}"]
        return (*lines, f"{job}{_one_of(wait.options)}")
    with_changes = f"{command} approve {short_id(wait)} --data JSON  # with other arguments"
    edited = (with_changes,) if wait.kind is WaitKind.TOOL else ()
    return (
        f"{command} approve {short_id(wait)}{data}",
        *edited,
        f"{command} reject {short_id(wait)} --comment TEXT",
        f"{job}{_one_of(('approved', 'rejected'))}",
    )


def _job(wait: Wait) -> str:
    return f"in Dagster: launch the job {DECIDE_JOB} with your name as `by`, approval {short_id(wait)!r}"


def _takes_data(wait: Wait, option: str) -> bool:
    """Of a call that was cut off, only the one that took effect has an output to tell."""
    return wait.kind is not WaitKind.UNKNOWN or option == HAPPENED


def _one_of(words: tuple[str, ...]) -> str:
    shown = [repr(word) for word in words]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _field(name: str, schema: Json, is_required: bool) -> str:
    facts: list[str] = []
    if isinstance(schema, Mapping):
        members = cast("Mapping[str, Any]", schema)
        kind = members.get("type")
        if isinstance(members.get("enum"), list):
            facts.append("one of " + _brief(members["enum"]))
        elif isinstance(kind, str):
            facts.append(kind)
        elif isinstance(kind, list):
            facts.append(" or ".join(str(word) for word in cast("list[Any]", kind)))
        if "default" in members:
            facts.append("default " + _brief(members["default"]))
    if is_required:
        facts.append("required")
    return f"{name} ({', '.join(facts)})" if facts else name


def _brief(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."
