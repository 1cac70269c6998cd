"""What a workflow asks for at the end of its runs: `on_failure` and `finally`, walked once for each ending.

The run has ended, and stays as it ended: what happens here changes neither its status nor its output or error. The
steps stand under `@on_failure/` and `@finally/` in its journal; those of its second ending under `@finally#2/`, and so
on. Finished steps are replayed where a worker was killed in the middle.
"""

from __future__ import annotations

from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.records import Claim, RunStatus
from agentmesh_dagster.runtime.closing import closing_key, closing_scope
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.nodes.base import Say
from agentmesh_dagster.runtime.session import Pinned, RunSession
from agentmesh_dagster.runtime.walker import walk


async def open_finalizing(
    environment: Environment, pinned: Pinned, dagster_run_id: str, claim_id: str
) -> RunSession:
    """Binds a Dagster run to a run that has ended, to finalize it; the run stays as it ended.

    Args:
        environment: The process's.
        pinned: What the run was started with.
        dagster_run_id: The Dagster run.
        claim_id: The claim that it carries.

    Raises:
        RunRefused: The claim is another Dagster run's, or does not count any more (code `claim-lost`), or another
            process is at work on the run (`lease-held`, `second-process`).
    """
    journal = environment.journal
    claim = await _own_claim(environment, dagster_run_id, claim_id)
    run = await journal.run(claim.run_id)
    if run is None:
        raise RunRefused(f"run {claim.run_id!r} is not stored any more", code="claim-lost")
    session = RunSession(environment, run, pinned, dagster_run_id)
    if claim.dagster_run_id is None:
        payload = {"dagster_run_id": dagster_run_id, "ending": run.endings}
        begun = session.event("run.finalizing", None, payload)
        session.run = await journal.bind_run(
            run, dagster_run_id, [begun], claim=claim.id, lease=session.lease
        )
        session.keep_lease()
    else:
        await session.take_lease()
    try:
        await session.load()
    except BaseException:
        await session.close()
        raise
    return session


async def _own_claim(environment: Environment, dagster_run_id: str, claim_id: str) -> Claim:
    claim = await environment.journal.claim(claim_id)
    if claim is None or claim.reason != "finalize":
        raise RunRefused(
            f"the claim {claim_id!r} is none to finalize a run: the gate sensor and `agentmesh runs resume` launch "
            "this job",
            code="claim-lost",
        )
    if claim.dagster_run_id not in (None, dagster_run_id):
        raise RunRefused(
            f"the end of run {claim.run_id!r} was finalized by the Dagster run {claim.dagster_run_id!r}, of which this "
            "is a copy: on_failure and finally run once for each end",
            code="claim-lost",
        )
    if not claim.is_current:
        await environment.journal.spend_claim(claim.id, dagster_run_id)
        raise RunRefused(
            f"this Dagster run came too late to finalize run {claim.run_id!r}: its claim was given back",
            code="claim-lost",
        )
    return claim


async def finalize_run(session: RunSession, say: Say) -> None:
    """Runs `on_failure`, where the run has failed, and `finally`, and notes that it was done.

    `finally` runs though `on_failure` fails. A failure is written as the event `run.finalize_failed`; it is not tried
    again, but for what the nodes' own `retry` says.

    Args:
        session: See `open_finalizing`.
        say: Takes the lines of the readable step log; must not block.

    Raises:
        RunRefused: Another Dagster run has taken the run over.
        Exception: What the first body that failed raised.
    """
    workflow, run = session.pinned.workflow, session.run
    bodies = {
        "on_failure": workflow.on_failure if run.status is RunStatus.FAILED else None,
        "finally": workflow.finally_,
    }
    failure: Exception | None = None
    for name, body in bodies.items():
        if body is None:
            continue
        say(f"{name} of run {run.id}, which is {run.status.value}")
        try:
            scope = closing_scope(
                session,
                session.scope,
                body,
                name=name,
                key=closing_key(session.scope, name, run.endings),
                status=run.status,
                output=run.output,
                error=run.error,
                at=run.finished_at,
            )
            await walk(session, scope, say)
        except RunRefused:
            raise
        except Exception as error:  # noqa: BLE001 - raised when the other body has been run
            payload = {"ending": run.endings, "body": name, "error": session.error_json(error)}
            await session.record_event("run.finalize_failed", payload=payload)
            failure = failure or error
    if failure is None:
        await session.record_event("run.finalized", payload={"ending": run.endings})
    await note_finalized(session)
    if failure is not None:
        raise failure


async def note_finalized(session: RunSession) -> None:
    """Says that nothing more is to be done for the end of the session's run."""
    await session.environment.journal.finalized(
        session.run.id, session.run.endings, holder=session.lease.holder
    )
