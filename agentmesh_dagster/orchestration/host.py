"""The process's side of AgentMesh: the environment and the sessions of its runs. The resource `agentmesh`."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import dagster as dg

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.compiler.levels import op_names
from agentmesh_dagster.constants import GATE_SENSOR, TAG_CLAIM, TAG_RUN_ID, TAG_SOURCE, TAG_STATUS
from agentmesh_dagster.errors import NodeError, RunRefused, StoreError
from agentmesh_dagster.orchestration.agentmesh import AgentMesh
from agentmesh_dagster.orchestration.run_tags import holder_tags, stated_holder, stated_max_retries
from agentmesh_dagster.records import Json, RunSource, RunStatus
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.runtime.nested import settle_failed
from agentmesh_dagster.runtime.nodes.base import Say
from agentmesh_dagster.runtime.opening import Launch, open_session
from agentmesh_dagster.runtime.session import Pinned, RunSession
from agentmesh_dagster.settings import captures_content

T = TypeVar("T")

_log = logging.getLogger(__name__)

_TAG_RESUME_RETRY = "dagster/is_resume_retry"
_TAG_RETRY_NUMBER = "dagster/retry_number"
_TAG_SENSOR = "dagster/sensor_name"
_SOURCES_BY_TAG = {
    "dagster/backfill": RunSource.BATCH,
    "dagster/schedule_name": RunSource.SCHEDULE,
    _TAG_SENSOR: RunSource.TRIGGER,
    "dagster/from_ui": RunSource.UI,
}


class AgentMeshResource(dg.ResourceDefinition):
    """The resource `agentmesh` of the compiled jobs, which knows what it was made from."""

    def __init__(self, agentmesh: AgentMesh) -> None:
        def make(context: dg.InitResourceContext) -> Iterator[Host]:
            host = agentmesh.host()
            try:
                yield host
            finally:
                if context.run is not None and context.instance is not None:
                    host.close(context.run.run_id, context.instance)

        super().__init__(resource_fn=make, description="The AgentMesh journal and model client.")
        self.agentmesh = agentmesh


@dataclass(frozen=True, kw_only=True)
class HostedRun:
    """Holds the runs of one job (`run_holder.RunHolder`): the sessions that its steps work with."""

    agentmesh: AgentMesh
    pinned: Pinned

    @property
    def lease_s(self) -> float:
        return self.agentmesh.lease_s

    def hold(self, dagster_run: dg.DagsterRun, instance: dg.DagsterInstance) -> None:
        self.agentmesh.host().hold(dagster_run, instance, self.pinned)

    def let_go(self, dagster_run_id: str, instance: dg.DagsterInstance) -> None:
        self.agentmesh.host().close(dagster_run_id, instance)


class Host:
    """Runs op bodies: opens one session per Dagster run, hands bodies to the loop, turns errors into failures."""

    def __init__(self, agentmesh: AgentMesh) -> None:
        self.agentmesh = agentmesh
        self.environment = build_environment(agentmesh)
        self.captures_content = self.environment.captures_content
        self._sessions: dict[str, asyncio.Task[RunSession]] = {}
        self._log_thread = ThreadPoolExecutor(1, thread_name_prefix="agentmesh-log")

    def work(
        self,
        context: dg.OpExecutionContext,
        pinned: Pinned,
        body: Callable[[RunSession, Say], Coroutine[Any, Any, T]],
    ) -> T:
        """See `compiler.ops.Host`."""
        return self.perform(context, lambda say: self._work(context, pinned, body, say))

    def perform(self, context: dg.OpExecutionContext, work: Callable[[Say], Coroutine[Any, Any, T]]) -> T:
        """Runs work on the process's loop, and returns what it returns; its lines go to the op's log.

        Raises:
            dagster.Failure: It failed; with its error, without secrets.
        """
        log = _StepLog(context.log, self._log_thread)
        try:
            return run_on_loop(work(log.say))
        except Exception as error:  # noqa: BLE001 - whatever a node raises becomes a failed op
            problem = self.environment.secrets.redact_error(error)
            metadata: dict[str, Any] = {"code": problem["code"], "error": dg.MetadataValue.json(problem)}
            # A user's function brings its own frames; of anything else unexpected, all are shown.
            context_of = problem.get("context", {})
            if "traceback" in context_of:
                metadata["traceback"] = dg.MetadataValue.text(context_of.pop("traceback"))
            if problem["code"] == "unexpected":
                shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                metadata["traceback"] = dg.MetadataValue.text(self.environment.secrets.redact(shown))
            # From None: the chained error could carry what was just taken out.
            raise dg.Failure(description=problem["message"], metadata=metadata, allow_retries=False) from None
        finally:
            log.flush()

    def hold(self, run: dg.DagsterRun, instance: dg.DagsterInstance, pinned: Pinned) -> None:
        """Opens the session of a Dagster run in the process that executes it; see `run_holder.RunHolder`."""
        run_on_loop(self._hold(run, instance, pinned))

    def close(self, dagster_run_id: str, instance: dg.DagsterInstance) -> None:
        """Ends the session of a Dagster run, if there is one: gives the lease back, and tags how the run ended."""
        ended = run_on_loop(self._close(dagster_run_id))
        if ended is not None:
            instance.add_run_tags(dagster_run_id, {TAG_STATUS: ended.value})

    async def _work(
        self,
        context: dg.OpExecutionContext,
        pinned: Pinned,
        body: Callable[[RunSession, Say], Coroutine[Any, Any, T]],
        say: Say,
    ) -> T:
        session = await self._session(context, pinned)
        try:
            with session.at_work():
                return await body(session, say)
        except RunRefused:
            raise
        except Exception as error:
            try:
                await session.fail(session.error_json(error))
            except StoreError as also:
                # The node's own error is the one to see; the reconciler will write the row.
                _log.warning("run %s failed, and its row could not say so: %s", session.run.id, also)
            raise

    async def _hold(self, run: dg.DagsterRun, instance: dg.DagsterInstance, pinned: Pinned) -> None:
        if run.run_id in self._sessions:
            return
        opening = asyncio.get_running_loop().create_task(
            self._open(run, instance, pinned, is_step_process=False)
        )
        self._sessions[run.run_id] = opening
        await asyncio.wait([opening])
        # Whatever else it failed of, the first step says.
        error = opening.exception()
        if isinstance(error, RunRefused) and error.code == "second-process":
            del self._sessions[run.run_id]
            raise error

    async def _session(self, context: dg.OpExecutionContext, pinned: Pinned) -> RunSession:
        run_id = context.run_id
        opening = self._sessions.get(run_id)
        if opening is None:
            # One task, so that ops which start together share it, and one that is canceled does not end it.
            opening = asyncio.get_running_loop().create_task(
                self._open(context.run, context.instance, pinned, is_step_process=True)
            )
            self._sessions[run_id] = opening
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._sessions.get(run_id) is opening:
                del self._sessions[run_id]
            raise

    async def _open(
        self, run: dg.DagsterRun, instance: dg.DagsterInstance, pinned: Pinned, *, is_step_process: bool
    ) -> RunSession:
        """Opens a session: of the process that executes the run, or of a step process, which works under its lease."""
        steps = op_names(pinned, self.environment.node_types)
        tags = run.tags
        if is_step_process:
            # What it was handed may be older than the tags.
            stored = await asyncio.to_thread(instance.get_run_by_id, run.run_id)
            tags = tags if stored is None else stored.tags
        launch = await asyncio.to_thread(construct_launch, run, steps, instance)
        if is_step_process:
            launch = replace(launch, works_under=stated_holder(run.run_id, tags))
        try:
            session = await open_session(self.environment, pinned, launch, dict(run.run_config))
        except (RunRefused, NodeError) as refusal:
            await asyncio.to_thread(
                self.agentmesh.store().audit.add,
                self.agentmesh.project,
                "launch-refused",
                actor=launch.triggered_by or "dagster",
                entity=f"workflow/{pinned.workflow.slug}",
                detail={"code": refusal.code, "dagster_run_id": run.run_id},
            )
            raise
        # Copied from a parent, or missing: each Dagster run says for itself whose work it does.
        own = {TAG_RUN_ID: session.run.id, TAG_STATUS: RunStatus.RUNNING.value}
        if launch.works_under is None:
            own |= holder_tags(run.run_id, session.lease.holder)
        try:
            if any(tags.get(tag) != value for tag, value in own.items()):
                await asyncio.to_thread(instance.add_run_tags, run.run_id, own)
        except BaseException:
            await session.close()
            raise
        return session

    async def _close(self, dagster_run_id: str) -> RunStatus | None:
        opening = self._sessions.pop(dagster_run_id, None)
        if opening is None:
            return None
        if not opening.done():
            opening.cancel()
        outcome = (await asyncio.gather(opening, return_exceptions=True))[0]
        if not isinstance(outcome, RunSession):
            return None
        if outcome.is_interrupted and outcome.ended is None:
            await outcome.end(RunStatus.CANCELED)
        if outcome.has_worked:
            await self._settle(outcome)
        await outcome.close()
        return outcome.ended

    async def _settle(self, session: RunSession) -> None:
        """Writes what is still to be said of the nodes of a run that failed; its own error is not the one to see."""
        try:
            if await self._has_failed(session):
                await settle_failed(session)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run has failed, and says why
            _log.warning(
                "the rows of run %s could not say where its other nodes stand: %s",
                session.run.id,
                session.error_json(error)["message"],
            )

    async def _has_failed(self, session: RunSession) -> bool:
        if session.ended is not None or session.is_lease_lost or session.is_interrupted:
            return session.ended is RunStatus.FAILED
        # A step process: another one may have ended the run while this one was at work.
        run = await self.environment.journal.run(session.run.id)
        return run is not None and run.status is RunStatus.FAILED


def build_environment(agentmesh: AgentMesh) -> Environment:
    """The environment of a process, with the real journal, model client and tools.

    The project's folder is put on `sys.path`: what a code location does to the path while it is loaded, Dagster undoes.
    """
    from agentmesh_dagster.llm.client import ModelRouter
    from agentmesh_dagster.runtime.functions import FunctionRegistry
    from agentmesh_dagster.runtime.notify.registry import notifier_configs
    from agentmesh_dagster.runtime.patient import BOUND_S, PatientJournal
    from agentmesh_dagster.runtime.secrets import Secrets, load_provider, provider_keys
    from agentmesh_dagster.runtime.tools.http_client import HttpClient
    from agentmesh_dagster.specs.notify import project_notifiers

    if agentmesh.root is not None and str(agentmesh.root) not in sys.path:
        sys.path.append(str(agentmesh.root))
    secrets = Secrets(load_provider(), agentmesh.deployment, agentmesh.project, provider_keys())
    return Environment(
        # Half a lease at most: it must outlast the wait for a database that is away.
        journal=PatientJournal(
            agentmesh.store().journal, clock=SystemClock(), bound_s=min(BOUND_S, agentmesh.lease_s / 2)
        ),
        models=ModelRouter(deployment=agentmesh.deployment, project=agentmesh.project, secrets=secrets),
        secrets=secrets,
        functions=FunctionRegistry.from_environment(agentmesh.function_modules),
        http=HttpClient(deployment=agentmesh.deployment),
        clock=SystemClock(),
        deployment=agentmesh.deployment,
        notify=project_notifiers(agentmesh.notify, notifier_configs()),
        lease_s=agentmesh.lease_s,
        captures_content=agentmesh.capture_content and captures_content(),
    )


def construct_launch(run: dg.DagsterRun, steps: frozenset[str], instance: dg.DagsterInstance) -> Launch:
    """What a Dagster run says of itself, in the runtime's words.

    Args:
        run: The Dagster run.
        steps: All step keys of its job; a run that names fewer is a selection.
        instance: Knows its parents.
    """
    tags: Mapping[str, str] = run.tags
    if tags.get(_TAG_SENSOR, "").startswith(GATE_SENSOR):
        # Copied from a continuation: the gate sensor begins no run.
        tags = {tag: value for tag, value in tags.items() if tag != _TAG_SENSOR}
    source = run_source(run, tags)
    return Launch(
        dagster_run_id=run.run_id,
        continues=tuple(continued_runs(run, instance)),
        is_selection=_is_selection(run, steps),
        source=source,
        triggered_by=run_trigger(tags),
        claim=tags.get(TAG_CLAIM),
        max_retries=_max_retries(tags, instance),
    )


def run_source(run: dg.DagsterRun, tags: Mapping[str, str]) -> RunSource:
    """Who or what started a Dagster run, by its tags."""
    source = next((source for tag, source in _SOURCES_BY_TAG.items() if tag in tags), None)
    if source is not None:
        return source
    # What nobody launched through a webserver or daemon, a command executes: `dagster job execute`.
    other = RunSource.API if run.remote_job_origin is not None else RunSource.CLI
    stated = tags.get(TAG_SOURCE, "")
    return RunSource(stated) if stated in RunSource._value2member_map_ else other


def run_trigger(tags: Mapping[str, str]) -> str:
    """The schedule, the sensor or the person that started a Dagster run, by its tags."""
    return tags.get("dagster/schedule_name") or tags.get(_TAG_SENSOR) or tags.get("user", "")


def _max_retries(tags: Mapping[str, str], instance: dg.DagsterInstance) -> int:
    """How often the run may be retried by itself, by its tag or by the instance's setting."""
    stated = stated_max_retries(tags)
    if stated is None:
        return instance.run_retries_max_retries if instance.run_retries_enabled else 0
    # Dagster warns of a value that is no number, and does not retry.
    return int(stated) if stated.isdecimal() else 0


def continued_runs(run: dg.DagsterRun, instance: dg.DagsterInstance) -> Iterator[str]:
    """The Dagster runs whose run a retry goes on with; a re-execution of all steps goes on with none."""
    at: dg.DagsterRun | None = run
    while at is not None and at.parent_run_id is not None and _is_retry(at):
        yield at.parent_run_id
        at = instance.get_run_by_id(at.parent_run_id)


def _is_retry(run: dg.DagsterRun) -> bool:
    return run.tags.get(_TAG_RESUME_RETRY) == "true" or _TAG_RETRY_NUMBER in run.tags


def _is_selection(run: dg.DagsterRun, steps: frozenset[str]) -> bool:
    chosen = run.step_keys_to_execute
    return bool(run.resolved_op_selection) or (chosen is not None and not steps.issubset(chosen))


class _StepLog:
    """Writes lines to Dagster's log from a thread of its own: a line is a database write, and the loop never waits."""

    def __init__(self, log: Any, thread: ThreadPoolExecutor) -> None:
        self._log = log
        self._thread = thread
        self._pending: list[Future[Json]] = []

    def say(self, line: str) -> None:
        self._pending.append(self._thread.submit(self._log.info, line))

    def flush(self) -> None:
        wait(self._pending)
