"""The tags of a run's further Dagster runs, whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import dagster as dg

from agentmesh_dagster.constants import FINALIZE_JOB, TAG_CLAIM, TAG_PARENT_RUN_ID, TAG_RUN_ID, TAG_STATUS
from agentmesh_dagster.records import Claim, Run

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
_HOLDER_TAG: Final = f"{_HIDDEN}agentmesh_holder"
"""What Dagster notes of one Dagster run: its worker, its code server, its repository."""
_OF_WORK: Final = ("dagster/backfill", "dagster/partition")
"""How the tags begin by which Dagster counts a Dagster run as the work on a partition, which finalizing is none."""


def continuation_tags(
    first: dg.DagsterRun, last: dg.DagsterRun, *, claim: Claim | None = None
) -> dict[str, str]:
    """The tags of one more Dagster run of a run.

    Args:
        first: The run's first Dagster run, by which Dagster shows them all as one group.
        last: Its last one so far that worked on the run (`last_working`), whose tags are handed on: partition,
            backfill and a person's own.
        claim: The claim by which the new one continues or finalizes the run. Dagster retries none such: AgentMesh
            counts the retries of a run.
    """
    tags: Mapping[str, str] = last.tags
    own = {_PARENT_TAG: last.run_id, _ROOT_TAG: first.root_run_id or first.run_id}
    if claim is not None:
        own |= _claim_tags(claim, stated_max_retries(first.tags))
    dropped = (_HIDDEN, *_OF_WORK) if claim is not None and claim.reason == "finalize" else (_HIDDEN,)
    kept = {tag: value for tag, value in tags.items() if tag not in _OWN_TAGS and not tag.startswith(dropped)}
    return {**kept, **own}


def first_tags(run: Run, claim: Claim) -> dict[str, str]:
    """The tags of the first Dagster run of a run that another run started, or that never began.

    Args:
        run: The run.
        claim: The claim by which the Dagster run begins it.
    """
    parent = {} if run.parent_run_id is None else {TAG_PARENT_RUN_ID: run.parent_run_id}
    return {**parent, **_claim_tags(claim, None)}


def _claim_tags(claim: Claim, max_retries: str | None) -> dict[str, str]:
    return {
        TAG_CLAIM: claim.id,
        TAG_RUN_ID: claim.run_id,
        _MAX_RETRIES_TAG: "0",
        _OWN_MAX_RETRIES_TAG: max_retries or "",
    }


def holder_tags(dagster_run_id: str, holder: str) -> dict[str, str]:
    """By which the step processes of a Dagster run find the lease under which they work (`Lease.holder`)."""
    return {_HOLDER_TAG: f"{dagster_run_id}/{holder}"}


def stated_holder(dagster_run_id: str, tags: Mapping[str, str]) -> str | None:
    """The holder that a Dagster run's tags name; None where they name none, or a re-execution copied another's."""
    whose, _, holder = tags.get(_HOLDER_TAG, "").partition("/")
    return holder if holder and whose == dagster_run_id else None


def is_finalizing(dagster_run: dg.DagsterRun) -> bool:
    """Whether a Dagster run is one of `agentmesh_finalize`, which changes nothing in how its run stands."""
    return dagster_run.job_name == FINALIZE_JOB


def last_working(instance: dg.DagsterInstance, dagster_run_ids: Sequence[str]) -> dg.DagsterRun | None:
    """The last Dagster run that worked on a run, and did not finalize it; None where this instance has none.

    Args:
        instance: Where they are looked for.
        dagster_run_ids: The Dagster runs of the run, in their order.
    """
    for dagster_run_id in reversed(dagster_run_ids):
        dagster_run = instance.get_run_by_id(dagster_run_id)
        if dagster_run is not None and not is_finalizing(dagster_run):
            return dagster_run
    return None


def stated_max_retries(tags: Mapping[str, str]) -> str | None:
    """How often a run may be retried by itself, as a Dagster run's tags say it; None: as the instance has it.

    Args:
        tags: Of a Dagster run, or copied from another one's: the 0 of a continuation is not its run's.
    """
    stated = tags.get(_MAX_RETRIES_TAG)
    if stated == "0" and _OWN_MAX_RETRIES_TAG in tags:
        return tags[_OWN_MAX_RETRIES_TAG] or None
    return stated
