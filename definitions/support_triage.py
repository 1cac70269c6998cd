"""When a ticket must be answered: the `code` node of the workflow `support-triage`."""

from __future__ import annotations

from typing import Any, Final

HOURS: Final = {"low": 72, "normal": 24, "high": 4}
"""Hours until the first answer, by urgency."""
PREMIUM_FACTOR: Final = 0.5


def first_answer_due(urgency: str, tier: str) -> dict[str, Any]:
    """The hours that support has for its first answer.

    Args:
        urgency: `low`, `normal` or `high`.
        tier: The customer's contract, `standard` or `premium`; premium customers wait half as long.

    Returns:
        `{"hours": number}`.

    Raises:
        ValueError: The urgency is none of the known ones.
    """
    if urgency not in HOURS:
        raise ValueError(f"unknown urgency {urgency!r}: one of {', '.join(HOURS)}")
    return {"hours": HOURS[urgency] * (PREMIUM_FACTOR if tier == "premium" else 1)}
