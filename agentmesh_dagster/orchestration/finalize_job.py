"""The job `agentmesh_finalize`: runs `on_failure` and `finally` of a run that has ended."""

# No `from __future__ import annotations` here: Dagster looks at the annotation of `context` itself, and refuses a text.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import dagster as dg

from agentmesh_dagster.compiler.job import console_config
from agentmesh_dagster.compiler.snapshot import construct_pinned
from agentmesh_dagster.constants import FINALIZE_JOB, TAG_CLAIM
from agentmesh_dagster.errors import RunRefused
from agentmesh_dagster.orchestration.agentmesh import AgentMesh, agentmesh_of_folder
from agentmesh_dagster.orchestration.host import Host
from agentmesh_dagster.orchestration.run_holder import HoldingExecutor
from agentmesh_dagster.records import Run
from agentmesh_dagster.runtime.finalize import finalize_run, note_finalized, open_finalizing
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.runtime.nodes.base import Say
from agentmesh_dagster.runtime.session import Pinned, RunSession

_OP: Final = "finalize"


def build_finalize_job(agentmesh: AgentMesh) -> dg.JobDefinition:
    """The job `agentmesh_finalize`: one op, which walks the bodies of the run that its claim names.

    It takes no input. The gate sensor launches it for each end of a run that asks for it, with what the run was started
    with; a Dagster run without a claim of its own is refused.

    Args:
        agentmesh: Database and project.
    """

    def compute(context: dg.OpExecutionContext, _inputs: Any) -> Iterator[dg.Output[None]]:
        run = _finalize(agentmesh.host(), context)
        yield dg.Output(None, "done", metadata={"run": run.id, "status": run.status.value})

    op = dg.OpDefinition(
        compute_fn=compute,
        name=f"{FINALIZE_JOB}__{_OP}",
        outs={"done": dg.Out(dg.Nothing)},
        description="Runs on_failure, where the run has failed, and then finally.",
    )
    return dg.JobDefinition(
        name=FINALIZE_JOB,
        graph_def=dg.GraphDefinition(
            name=FINALIZE_JOB, node_defs=[op], dependencies={dg.NodeInvocation(op.name, alias=_OP): {}}
        ),
        config=dg.ConfigMapping(console_config, config_schema={}),
        description="Runs what workflows ask for at the end of their runs: on_failure and finally.",
        # One op, which a termination request interrupts while it waits for the loop.
        executor_def=HoldingExecutor(dg.in_process_executor, _OneFinalizer(agentmesh)),
    )


@dataclass(frozen=True)
class _OneFinalizer:
    """Sees that no other process executes the Dagster run; its one op takes and gives back the lease."""

    agentmesh: AgentMesh

    @property
    def lease_s(self) -> float:
        return self.agentmesh.lease_s

    def hold(self, dagster_run: dg.DagsterRun, instance: dg.DagsterInstance) -> None:
        run = run_on_loop(self.agentmesh.store().journal.run_of(dagster_run.run_id))
        lease = None if run is None else self.agentmesh.store().runs.lease(run.id)
        if lease is not None and lease.is_live and lease.dagster_run_id == dagster_run.run_id:
            raise RunRefused(
                f"another process is executing the Dagster run {dagster_run.run_id!r} already; this one ends here",
                code="second-process",
            )

    def let_go(self, dagster_run_id: str, instance: dg.DagsterInstance) -> None:
        """Nothing is held."""


def job_of_project(root: str) -> dg.JobDefinition:
    """The job, in a folder without a code location."""
    return build_finalize_job(agentmesh_of_folder(Path(root)))


def _finalize(host: Host, context: dg.OpExecutionContext) -> Run:
    """Finalizes the run of the Dagster run's claim, and gives it as it stood.

    Raises:
        dagster.Failure: `on_failure` or `finally` failed, or the claim is not this Dagster run's.
    """
    sessions: list[RunSession] = []

    async def work(say: Say) -> Run:
        pinned, claim_id = await _claimed(host, context)
        session = await open_finalizing(host.environment, pinned, context.run_id, claim_id)
        sessions.append(session)
        with session.at_work():
            await finalize_run(session, say)
        return session.run

    try:
        return host.perform(context, work)
    except Exception:
        raise
    except BaseException:
        for session in sessions:
            _note_stop(session, context)
        raise
    finally:
        for session in sessions:
            run_on_loop(session.close())


async def _claimed(host: Host, context: dg.OpExecutionContext) -> tuple[Pinned, str]:
    """What the run of the Dagster run's claim was started with, and the claim.

    Raises:
        RunRefused: The Dagster run has no claim (code `claim-lost`).
    """
    claim_id = context.run.tags.get(TAG_CLAIM)
    claim = await host.environment.journal.claim(claim_id) if claim_id is not None else None
    if claim is None:
        raise RunRefused(
            f"the job {FINALIZE_JOB} is not launched by hand: the gate sensor and `agentmesh runs resume RUN` do so "
            "for a run that has ended",
            code="claim-lost",
        )
    store = host.agentmesh.store()
    run = store.runs.get(claim.run_id)
    return construct_pinned(store.publications.get(run.publication)), claim.id


def _note_stop(session: RunSession, context: dg.OpExecutionContext) -> None:
    """Says that nothing more is to be done for the end of a run, where a person terminated its finalizing.

    A worker that is stopped for another reason is followed by another one.
    """
    stopped = context.instance.get_run_by_id(context.run_id)
    if stopped is not None and stopped.status is dg.DagsterRunStatus.CANCELING and not session.is_lease_lost:
        run_on_loop(note_finalized(session))
