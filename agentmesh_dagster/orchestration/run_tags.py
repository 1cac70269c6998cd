"""The tags of a run's further Dagster runs, whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dagster as dg

from agentmesh_dagster.constants import TAG_CLAIM, TAG_RUN_ID, TAG_STATUS
from agentmesh_dagster.records import Claim

RESUME_RETRY_TAG: Final = "dagster/is_resume_retry"
_PARENT_TAG: Final = "dagster/parent_run_id"
_ROOT_TAG: Final = "dagster/root_run_id"
_MAX_RETRIES_TAG: Final = "dagster/max_retries"
_OWN_MAX_RETRIES_TAG: Final = "agentmesh/max_retries"
"""What the first Dagster run of a run has as `dagster/max_retries`, on those that Dagster itself must not retry; empty
where it has no such tag. A re-execution copies both."""
# What belongs to one Dagster run alone, and is not handed on to the next of the same run.
_OWN_TAGS: Final = frozenset(
    {
        "dagster/auto_retry_run_id",
        "dagster/failure_reason",
        "dagster/retry_number",
        "dagster/run_key",
        "dagster/sensor_name",
        "dagster/tick",
        "dagster/will_retry",
        _PARENT_TAG,
        _ROOT_TAG,
        RESUME_RETRY_TAG,
        TAG_CLAIM,
        TAG_STATUS,
    }
)
_HIDDEN: Final = ".dagster/"
"""What Dagster notes of one Dagster run: its worker, its code server, its repository."""


def continuation_tags(
    first: dg.DagsterRun, last: dg.DagsterRun, *, claim: Claim | None = None
) -> dict[str, str]:
    """The tags of one more Dagster run of a run.

    Args:
        first: The run's first Dagster run, by which Dagster shows them all as one group.
        last: Its last one so far, whose tags are handed on: partition, backfill and a person's own.
        claim: The claim by which the new one continues the run. Dagster retries none such: AgentMesh counts the
            retries of a run.
    """
    tags: Mapping[str, str] = last.tags
    own = {_PARENT_TAG: last.run_id, _ROOT_TAG: first.root_run_id or first.run_id}
    if claim is not None:
        own |= {
            TAG_CLAIM: claim.id,
            TAG_RUN_ID: claim.run_id,
            _MAX_RETRIES_TAG: "0",
            _OWN_MAX_RETRIES_TAG: stated_max_retries(first.tags) or "",
        }
    kept = {tag: value for tag, value in tags.items() if tag not in _OWN_TAGS and not tag.startswith(_HIDDEN)}
    return {**kept, **own}


def stated_max_retries(tags: Mapping[str, str]) -> str | None:
    """How often a run may be retried by itself, as a Dagster run's tags say it; None: as the instance has it.

    Args:
        tags: Of a Dagster run, or copied from another one's: the 0 of a continuation is not its run's.
    """
    stated = tags.get(_MAX_RETRIES_TAG)
    if stated == "0" and _OWN_MAX_RETRIES_TAG in tags:
        return tags[_OWN_MAX_RETRIES_TAG] or None
    return stated
