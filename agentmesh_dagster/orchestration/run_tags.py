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
        own |= {TAG_CLAIM: claim.id, TAG_RUN_ID: claim.run_id, _MAX_RETRIES_TAG: "0"}
    kept = {tag: value for tag, value in tags.items() if tag not in _OWN_TAGS and not tag.startswith(_HIDDEN)}
    return {**kept, **own}
