"""What people are told about an approval: one record, from which each notifier makes its own message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.records import Json, Notice, Wait
from agentmesh_dagster.runtime.how_to_decide import how_to_decide, moment

__all__ = ["NoticeMessage", "approval_view", "one_line"]

_MAX_SUBJECT: Final = 200
_MAX_BODY: Final = 20_000
_MAX_DATA: Final = 20_000
_BEGINNINGS: Final = {
    "opened": "Decision wanted",
    "reminder": "Reminder",
    "escalated": "Escalated to you",
    "conflict": "Votes with different data",
    "delegated": "Vote delegated",
}


@dataclass(frozen=True, kw_only=True)
class NoticeMessage:
    """A notice with what it speaks of."""

    id: str
    """The notice's id: the same in every attempt to deliver it."""
    reason: str
    """`opened`, `reminder`, `escalated`, `conflict` (somebody's vote was refused because its data differs), or
    `delegated` (somebody delegated a vote, or took it back)."""
    approval: Mapping[str, Json]
    """See `approval_view`."""
    how_to_decide: tuple[str, ...]
    wait: Wait

    @staticmethod
    def of(notice: Notice, wait: Wait) -> NoticeMessage:
        """The message of a notice about this wait."""
        return NoticeMessage(
            id=notice.id,
            reason=notice.reason,
            approval=approval_view(wait, notice.reason),
            how_to_decide=how_to_decide(wait),
            wait=wait,
        )

    @property
    def subject(self) -> str:
        """One line, at most 200 characters."""
        beginning = _BEGINNINGS.get(self.reason, self.reason)
        return shortened(f"{beginning}: {one_line(self.wait.title) or self.wait.step_key}", _MAX_SUBJECT)

    @property
    def text(self) -> str:
        """All of it, for people, as plain text; a long body and long data are cut, and it says so."""
        wait = self.wait
        blocks = [wait.title.strip() or wait.step_key]
        if wait.body.strip():
            blocks.append(_cut(wait.body.strip(), _MAX_BODY))
        if wait.data is not None:
            blocks.append("Data:\n" + _cut(_pretty(wait.data), _MAX_DATA))
        if wait.prefill is not None:
            blocks.append("The form begins as:\n" + _cut(_pretty(wait.prefill), _MAX_DATA))
        facts = [_who(wait)]
        if wait.delegations:
            facts.append("Delegated: " + ", ".join(f"by {each.by} to {each.to}" for each in wait.delegations))
        if wait.deadline_at is not None:
            facts.append(f"Until: {moment(wait.deadline_at)}")
        blocks.append("\n".join(facts))
        blocks.append("How to decide:\n" + "\n".join(f"    {line}" for line in self.how_to_decide))
        blocks.append(f"Run {wait.run_id}, step {wait.step_key}, project {wait.project}, approval {wait.id}")
        return "\n\n".join(blocks) + "\n"


def approval_view(wait: Wait, reason: str) -> dict[str, Json]:
    """An approval as JSON: the name `approval` of templates, and the member `approval` of a webhook's body.

    Args:
        wait: The approval.
        reason: Why people are told.

    Returns:
        An object; times are ISO 8601 with a zone, or null.
    """
    return {
        "id": wait.id,
        "project": wait.project,
        "run_id": wait.run_id,
        "step_key": wait.step_key,
        "node_id": wait.node_id,
        "kind": wait.kind.value,
        "title": wait.title,
        "body": wait.body,
        "data": wait.data,
        "options": list(wait.options),
        "multiple": wait.multiple,
        "form_schema": wait.form_schema,
        "prefill": wait.prefill,
        "assignees": list(wait.assignees),
        "escalate_to": list(wait.escalate_to),
        "delegations": [
            {"by": each.by, "to": each.to, "comment": each.comment, "at": each.at.isoformat()}
            for each in wait.delegations
        ],
        "required": wait.required,
        "created_at": wait.created_at.isoformat(),
        "deadline_at": wait.deadline_at.isoformat() if wait.deadline_at is not None else None,
        "reason": reason,
    }


def one_line(text: str) -> str:
    """The text without line breaks and control characters, for a header or a log."""
    return " ".join("".join(" " if not c.isprintable() else c for c in text).split())


def shortened(text: str, limit: int) -> str:
    """The text, cut with an ellipsis where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _who(wait: Wait) -> str:
    escalated = wait.escalate_to if wait.escalate_at is None else ()
    names = ", ".join(dict.fromkeys((*wait.assignees, *escalated))) or "anybody"
    rules = [f"{wait.required} of them"] if wait.required > 1 else []
    rules += ["in this order"] if wait.ordered else []
    rules += [f"not {wait.launcher}, who launched the run"] if wait.separation and wait.launcher else []
    return f"Who may decide: {names}" + (f" ({'; '.join(rules)})" if rules else "")


def _pretty(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text) - limit} characters more; the command `approvals show` has all]"
