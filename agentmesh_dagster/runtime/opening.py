"""Which run a Dagster run works on: a new one, one that it continues, or one that waits to be begun."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from agentmesh_dagster.errors import NodeError, RunRefused
from agentmesh_dagster.records import Claim, Json, Run, RunSource, RunStatus
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.scope import request_context
from agentmesh_dagster.runtime.session import Pinned, RunSession
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.names import job_name, pinned_job_name
from agentmesh_dagster.specs.schema import fill_and_coerce


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a Dagster run says of itself."""

    dagster_run_id: str
    continues: tuple[str, ...] = ()
    """The Dagster runs whose run it goes on with, the nearest first: its parent, where Dagster made it as a retry or a
    re-execution from failure; that one's parent too, where it was one itself; and so on."""
    is_selection: bool = False
    """Somebody chose some of its steps by hand."""
    source: RunSource = RunSource.UI
    triggered_by: str = ""
    claim: str | None = None
    """The claim that it carries, its own or one that a re-execution copied."""
    max_retries: int = 0
    """How often the run may be retried by itself."""
    works_under: str | None = None
    """In a step process: the holder of the lease of the process that executes the Dagster run (`Lease.holder`)."""

    @property
    def run_id(self) -> str:
        """The id of the run that it begins, where it continues none: that of the first launch."""
        return self.continues[-1] if self.continues else self.dagster_run_id

    @property
    def retries_left(self) -> int:
        """How often the run may still be retried by itself, where it begins by this launch."""
        return max(0, self.max_retries - len(self.continues))


async def open_session(environment: Environment, pinned: Pinned, launch: Launch, input: Json) -> RunSession:
    """Finds or makes the run that a Dagster run works on.

    Args:
        environment: The process's.
        pinned: What the Dagster run's job was built from.
        launch: What the Dagster run says of itself.
        input: The run's input, as launched; a run that is continued keeps its own.

    Raises:
        RunRefused: The Dagster run may not work on it: a hand-made selection of steps (`step-selection`), a run of
            another definition (`other-definition`), another Dagster run at work (`lease-held`), another process that
            executes this Dagster run (`second-process`), or a claim that was given back (`claim-lost`).
    """
    journal = environment.journal
    run = await journal.run_of(launch.dagster_run_id)
    is_bound = run is not None
    claim = None if is_bound else await _own_claim(environment, launch)
    if claim is not None:
        run = await journal.run(claim.run_id)
    for earlier in launch.continues:
        # Of these, a refused one is bound to nothing.
        run = run or await journal.run_of(earlier)
    if run is None:
        return await _start(environment, pinned, launch, input)
    if run.definition_hash != pinned.definition_hash:
        own_job = pinned_job_name(job_name(run.kind, run.slug), run.publication)
        raise RunRefused(
            f"run {run.id!r} was started with publication {run.publication}, and this job is built from publication "
            f"{pinned.publication}, whose definitions differ: the job {own_job!r} and `agentmesh runs retry` continue "
            "it as it was published",
            code="other-definition",
        )
    session = RunSession(
        environment, run, pinned, launch.dagster_run_id, works_under=launch.works_under if is_bound else None
    )
    if is_bound:
        await (session.take_lease() if launch.works_under is None else session.join_lease())
    else:
        payload = {"dagster_run_id": launch.dagster_run_id, "reason": claim.reason if claim else "retry"}
        session.run = await journal.bind_run(
            replace(run, retries_left=launch.retries_left) if run.status is RunStatus.PENDING else run,
            launch.dagster_run_id,
            [session.event("run.resumed", None, payload)],
            claim=claim.id if claim else None,
            lease=session.lease,
        )
        session.keep_lease()
    try:
        await session.load()
    except BaseException:
        await session.close()
        raise
    session.keep_time()
    return session


async def _own_claim(environment: Environment, launch: Launch) -> Claim | None:
    """The claim that the Dagster run was launched with; None where it has none, or a copy of another's.

    Raises:
        RunRefused: It came too late with it (code `claim-lost`).
    """
    claim = await environment.journal.claim(launch.claim) if launch.claim is not None else None
    if claim is None or claim.dagster_run_id not in (None, launch.dagster_run_id):
        return None
    if not claim.is_current:
        await environment.journal.spend_claim(claim.id, launch.dagster_run_id)
        raise RunRefused(
            f"this Dagster run came too late to continue run {claim.run_id!r}: its claim was given back, and another "
            "Dagster run continues it",
            code="claim-lost",
        )
    return claim


async def _start(environment: Environment, pinned: Pinned, launch: Launch, input: Json) -> RunSession:
    """Makes a new run."""
    if launch.is_selection:
        raise RunRefused(
            "AgentMesh runs whole workflows: a hand-made selection of steps has no journal to read its inputs from. "
            "Choose 'Re-execute all' (a new run) or 'Re-execute from failure' (continues this one)",
            code="step-selection",
        )
    fitted = fill_and_coerce(pinned.workflow.input_schema, input)
    try:
        content_hash(fitted)
    except ValueError as error:
        raise NodeError(
            f"the run's input holds what JSON cannot ({error}): numbers are finite, and text is Unicode",
            code="run-input",
        ) from None
    now = environment.clock.now()
    settings = pinned.workflow.settings
    run = Run(
        # Where those before it never came to bind it, the run has the id that its first launch was given.
        id=launch.run_id,
        project=pinned.project,
        kind=pinned.kind,
        slug=pinned.slug,
        version=pinned.version,
        publication=pinned.publication,
        definition_hash=pinned.definition_hash,
        source=launch.source,
        triggered_by=launch.triggered_by,
        input=fitted,
        request_context=request_context(pinned.closure, environment.deployment),
        status=RunStatus.RUNNING,
        queued_at=now,
        started_at=now,
        dagster_run_ids=(launch.dagster_run_id,),
        retries_left=launch.retries_left,
        finalizers=pinned.workflow.finalizers,
        deadline_at=now + timedelta(seconds=settings.timeout_s)
        if settings.timeout_s is not None and settings.timeout_includes_waiting
        else None,
    )
    session = RunSession(environment, run, pinned, launch.dagster_run_id)
    payload = {"slug": run.slug, "version": run.version, "publication": run.publication}
    started = session.event("run.started", None, payload)
    session.run = await environment.journal.bind_run(
        run, launch.dagster_run_id, [started], lease=session.lease
    )
    session.keep_lease()
    session.keep_time()
    return session
