"""One look at what can go on: settles what is due, claims the runs that are ready, and says what holds others back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.constants import FINALIZE_JOB, TAG_CLAIM
from agentmesh_dagster.orchestration.history import is_history_missing, missing_history
from agentmesh_dagster.orchestration.reconcile import is_dagster_run_over
from agentmesh_dagster.orchestration.retries import may_retry_by_itself
from agentmesh_dagster.orchestration.run_tags import (
    continuation_tags,
    first_tags,
    is_finalizing,
    last_working,
)
from agentmesh_dagster.orchestration.worker_identity import is_worker_dead
from agentmesh_dagster.records import Claim, Json, ReadyRun, Run
from agentmesh_dagster.specs.names import job_name, pinned_job_name

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

MOST_REQUESTS: Final = 50
"""How many runs one tick claims: the daemon submits them one after the other, and a claim waits 60 s for its run."""
_STARTING_S: Final = 600.0
"""How long a Dagster run may take from its launch to its start, before it is held for lost."""
_BINDING_S: Final = 60.0
"""How long a Dagster run may take from its start until it has bound its claim, before it is held for lost."""
_LOST: Final = "It did not begin in time; another Dagster run continues its run."
_ENDED: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
_QUEUED: Final = (dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.MANAGED)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Offered:
    """The jobs of a loaded code location that runs can be started, continued and finalized with."""

    live: Mapping[tuple[str, str], tuple[str, str]] = field(
        default_factory=dict[tuple[str, str], tuple[str, str]]
    )
    """Of each live definition, by kind and slug: its definition hash and its job."""
    pinned: Mapping[int, str] = field(default_factory=dict[int, str])
    """Jobs of older publications."""
    finalize: str | None = None
    """The job that runs `on_failure` and `finally` of all of them."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of all."""
        finalize = () if self.finalize is None else (self.finalize,)
        return (*(job for _, job in self.live.values()), *self.pinned.values(), *finalize)

    def job_of(self, run: ReadyRun) -> str | None:
        """The job that goes on with a run, built from the same definitions, or finalizes it; None: not offered."""
        if run.reason == "finalize":
            return self.finalize
        digest, job = self.live.get((run.kind, run.slug), ("", ""))
        return job if job and digest == run.definition_hash else self.pinned.get(run.publication)


@dataclass(kw_only=True)
class Look:
    """What one look came to; filled while it goes on, so that no claim is lost when something fails."""

    requests: list[dg.RunRequest] = field(default_factory=list[dg.RunRequest])
    held_back: dict[str, str] = field(default_factory=dict[str, str])
    """Runs that could go on and were not claimed: why not, and what to do."""
    missing: set[str] = field(default_factory=set[str])
    """Jobs that would continue some of them, and that the loaded code location does not offer."""
    has_notices: bool = False


@dataclass(frozen=True, kw_only=True)
class Gatekeeper:
    """Looks for runs of a project that can go on."""

    store: Store
    instance: dg.DagsterInstance
    project: str
    offered: Offered
    clock: Clock
    foreign: set[str] = field(default_factory=set[str])
    """Runs that were found to be of another Dagster instance."""

    def look(self, look: Look) -> None:
        """Looks once.

        One statement where there is nothing to do, however much waits.

        Args:
            look: Its requests grow, up to `MOST_REQUESTS`; the rest is as it stands now.

        Raises:
            StoreError: The database could not be asked; `look` has what was claimed before.
        """
        now = self.clock.now()
        found = self.store.claims.poll(self.project, now)
        if found.has_due:
            self.store.waits.settle_due(self.project, now)
            found = self.store.claims.poll(self.project, now)
        look.has_notices = found.has_notices
        look.held_back.clear()
        look.missing.clear()
        for run in found.ready:
            if len(look.requests) >= MOST_REQUESTS:
                return
            self._take(run, look, now)

    def _take(self, ready: ReadyRun, look: Look, now: datetime) -> None:
        """Claims a run, or says what holds it back."""
        job = self.offered.job_of(ready)
        if job is None:
            pinned = pinned_job_name(job_name(ready.kind, ready.slug), ready.publication)
            name = FINALIZE_JOB if ready.reason == "finalize" else pinned
            look.missing.add(name)
            look.held_back[ready.run_id] = f"the job {name} is not loaded yet: reload the code location"
            return
        first = None if ready.run_id in self.foreign else self._dagster_run(ready, 0)
        reason = self._foreign(ready) if first is None else None
        if reason is not None:
            self.foreign.add(ready.run_id)
            look.held_back[ready.run_id] = reason
            return
        last = first if len(ready.dagster_run_ids) < 2 else self._dagster_run(ready, -1)
        if last is not None and not last.is_finished:
            run = self.store.runs.get(ready.run_id)
            if not is_dagster_run_over(self.store, self.instance, run, self.clock):
                look.held_back[ready.run_id] = f"its Dagster run {last.run_id} has not ended yet"
                return
            last = self.instance.get_run_by_id(last.run_id) or last
        if last is None or is_finalizing(last):
            last = last_working(self.instance, ready.dagster_run_ids)
        if (
            ready.reason == "retry"
            and last is not None
            and not may_retry_by_itself(self.store.runs.get(ready.run_id), last, self.instance)
        ):
            self.store.runs.give_up_retries(ready.run_id)
            return
        # Whatever can fail is read before the claim is made.
        first = first or last
        if first is None or last is None:
            launch = partial(_first_request, self.store.runs.get(ready.run_id))
        else:
            launch = partial(_next_request, first, last)
        lost: Sequence[dg.DagsterRun] = ()
        if ready.expired_claim is not None:
            launched = self._launched_by(ready.expired_claim)
            if any(self._is_on_its_way(record, now) for record in launched):
                self.store.claims.renew(ready.expired_claim, now)
                return
            lost = [record.dagster_run for record in launched]
        claim = self.store.claims.claim(ready.run_id, reason=ready.reason, now=now)
        if claim is None:
            return
        look.requests.append(launch(job, claim))
        for dagster_run in lost:
            self._end(dagster_run)

    def _foreign(self, ready: ReadyRun) -> str | None:
        """What is said of a run that is not of this Dagster instance, or whose Dagster runs were deleted; None: it is.

        Each advice is a command that does it.
        """
        if not ready.dagster_run_ids:
            if self._is_started_here(ready):
                return None
            return (
                "the run that started it is not in this Dagster instance (DAGSTER_HOME), or was deleted: "
                f"`agentmesh runs resume {ready.run_id[:8]}` begins it"
            )
        if ready.run_id not in self.foreign and not is_history_missing(self.instance, ready.dagster_run_ids):
            return None
        if ready.reason == "finalize":
            return (
                "its Dagster runs are not in this Dagster instance (DAGSTER_HOME), or were deleted: "
                f"`agentmesh runs resume {ready.run_id[:8]}` finalizes it"
            )
        return missing_history(ready.run_id, slug=ready.slug, is_final=ready.reason == "retry")

    def _dagster_run(self, ready: ReadyRun, number: int) -> dg.DagsterRun | None:
        ids = ready.dagster_run_ids
        return self.instance.get_run_by_id(ids[number]) if ids else None

    def _is_started_here(self, ready: ReadyRun) -> bool:
        """Whether a run that has not begun was started by a run of this Dagster instance."""
        parent = self.store.runs.get(ready.run_id).parent_run_id
        ids = () if parent is None else self.store.runs.get(parent).dagster_run_ids
        return not ids or self.instance.get_run_by_id(ids[0]) is not None

    def _launched_by(self, claim_id: str) -> Sequence[dg.RunRecord]:
        """The Dagster runs with a claim that have not ended."""
        records = self.instance.get_run_records(dg.RunsFilter(tags={TAG_CLAIM: claim_id}))
        return [record for record in records if record.dagster_run.status not in _ENDED]

    def _is_on_its_way(self, record: dg.RunRecord, now: datetime) -> bool:
        status = record.dagster_run.status
        if status in _QUEUED:
            return True
        if is_worker_dead(record.dagster_run):
            return False
        if status is dg.DagsterRunStatus.STARTED:
            return record.start_time is None or record.start_time + _BINDING_S > now.timestamp()
        if status is dg.DagsterRunStatus.CANCELING:
            return False
        return record.update_timestamp + timedelta(seconds=_STARTING_S) > now

    def _end(self, dagster_run: dg.DagsterRun) -> None:
        """Ends a Dagster run that came to nothing; should it begin after all, its claim is refused."""
        try:
            if dagster_run.status is dg.DagsterRunStatus.CANCELING:
                self.instance.report_run_canceled(dagster_run, _LOST)
            else:
                self.instance.report_run_failed(dagster_run, _LOST)
        except Exception:  # noqa: BLE001 - the claim is made: its request must reach the daemon, whatever this comes to
            _log.exception("Dagster run %s could not be reported as lost", dagster_run.run_id)


def _first_request(run: Run, job: str, claim: Claim) -> dg.RunRequest:
    """Of a run on which no Dagster run has worked: what it is launched with stands in its row."""
    config: dict[str, Json] = run.input or {}
    return _request(job, claim, config, first_tags(run, claim))


def _next_request(first: dg.DagsterRun, last: dg.DagsterRun, job: str, claim: Claim) -> dg.RunRequest:
    return _request(job, claim, first.run_config, continuation_tags(first, last, claim=claim))


def _request(job: str, claim: Claim, config: Mapping[str, Json], tags: Mapping[str, str]) -> dg.RunRequest:
    # Finalizing takes no input: it reads the run.
    run_config = dict[str, Json]() if claim.reason == "finalize" else config
    return dg.RunRequest(run_key=claim.id, job_name=job, run_config=run_config, tags=tags)
