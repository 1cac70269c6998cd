"""Helpers for tests of your own workflows: a whole run in one call, in this process, without a server.

    from agentmesh_dagster.testing import run_workflow

    result = run_workflow(documents, {"name": "Ada"})
    assert result.run.output == {"greeting": "Hello Ada"}

The database is a temporary SQLite file, Dagster's instance is ephemeral, and the models are whatever the agents name:
`offline/echo` and `offline/script` need neither network nor keys. Where a workflow waits for people or events,
`answers` gives what they say:

    result = run_workflow(documents, {"amount": 900}, answers=lambda wait: Answer(decision="approved", by="anna"))
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import dagster as dg

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.constants import DEFAULT_PROJECT, TAG_CLAIM, TAG_SOURCE
from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.orchestration.code_location import build_published_job, named_executors
from agentmesh_dagster.orchestration.finalize_job import build_finalize_job
from agentmesh_dagster.orchestration.host import AgentMesh, Host
from agentmesh_dagster.records import (
    Event,
    Json,
    Publication,
    Run,
    RunSource,
    RunStatus,
    Step,
    Vote,
    Wait,
    WaitKind,
    WaitStatus,
)
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.store import Store, open_store

__all__ = ["Answer", "WorkflowResult", "publish_documents", "run_workflow"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What somebody says to a wait.

    To a gate: a decision, with data and a comment; `timeout` lets its time run out. To a suspension or an event: data.
    A timer's time comes, whatever is said.
    """

    decision: Json = "approved"
    data: Json = None
    comment: str = ""
    by: str = "tester"


@dataclass(frozen=True, kw_only=True)
class WorkflowResult:
    """What a run came to."""

    run: Run
    steps: Mapping[str, Step]
    """By step key (`classify`, `classify/llm/1`)."""
    events: Sequence[Event]
    """In the order in which they were written."""
    waits: Sequence[Wait]
    """What it waited or waits for, the oldest first."""
    dagster_result: dg.ExecuteInProcessResult
    """Of the last Dagster run."""

    @property
    def succeeded(self) -> bool:
        """Whether the run reached an end and nothing failed unhandled."""
        return self.dagster_result.success


def publish_documents(
    store: Store,
    documents: str | Sequence[Json],
    project: str = DEFAULT_PROJECT,
    *,
    deployment: Deployment | None = None,
) -> list[Publication]:
    """Stores and publishes documents.

    Args:
        store: Where to.
        documents: YAML text of one or more documents, or the documents as objects.
        project: The project's slug.
        deployment: What they may use where they run; default: that is not checked before they run.

    Raises:
        DefinitionError: The text is no YAML.
        DocumentInvalid: Some document has errors.
    """
    raws = load_documents(documents, source="documents") if isinstance(documents, str) else list(documents)
    imported = Authoring(store, project, actor="test", deployment=deployment).import_documents(
        raws, publish=True
    )
    return [document.publication for document in imported if document.publication is not None]


def run_workflow(
    documents: str | Sequence[Json],
    input: Json = None,
    *,
    slug: str | None = None,
    database_url: str | None = None,
    function_modules: Sequence[str] = (),
    instance: dg.DagsterInstance | None = None,
    tags: Mapping[str, str] | None = None,
    answers: Callable[[Wait], Answer | None] | None = None,
    deployment: Deployment = Deployment(),  # noqa: B008 - a frozen record
    checks: bool = True,
) -> WorkflowResult:
    """Runs a workflow in this process, one node after the other, from documents to result.

    Args:
        documents: YAML text of one or more documents, or the documents as objects.
        input: The run's input; default `{}`.
        slug: Which workflow, where there are several.
        database_url: A database of your own, with its schema up to date; default: a temporary SQLite file.
        function_modules: Modules whose functions may be called.
        instance: A Dagster instance; default: an ephemeral one, which the runs of the main thread share.
        tags: Tags of the Dagster run.
        answers: Called for each open wait when the run waits; None leaves it open. The run goes on until it ends, or
            nothing that it waits for is answered. Default: nobody answers, and the run is left waiting.
        deployment: What the documents may use, as `Deployment.of(secrets=["DESK_TOKEN"])`. Default: nothing.
        checks: Whether that is checked before the documents run too, as publishing does.

    Returns:
        The result, also of a run that failed or waits; after its `on_failure` and `finally`, where it has ended.

    Raises:
        DocumentInvalid: Some document has errors.
        ValueError: There is no workflow, or there are several and `slug` names none.
        dagster.DagsterInvalidConfigError: The input does not fit the launch config.
        NotFound: The run ended before its first step, and left no row (code `no-run`).
        ApprovalError: An answer was refused.
    """
    with (
        _opened(database_url, tuple(function_modules), deployment) as agentmesh,
        _ephemeral_instance() if instance is None else nullcontext(instance) as instance,
    ):
        store = agentmesh.store()
        published = publish_documents(store, documents, deployment=deployment if checks else None)
        workflows = [p for p in published if p.kind == "workflow" and slug in (None, p.slug)]
        if len(workflows) != 1:
            raise ValueError(
                f"{len(workflows)} workflows fit: name one of {[p.slug for p in workflows]} as `slug`"
            )
        job = build_published_job(workflows[0], resource=agentmesh.resource(), executors=named_executors())
        result = job.execute_in_process(
            run_config=dict(input or {}),
            instance=instance,
            raise_on_error=False,
            tags={TAG_SOURCE: RunSource.TEST.value, **(tags or {})},
        )
        run = store.runs.get(result.run_id)
        while answers is not None and run.status is RunStatus.WAITING and _answered(store, run, answers):
            claim = store.claims.claim(run.id, reason="resume")
            if claim is None:
                break
            result = job.execute_in_process(
                run_config=dict(input or {}),
                instance=instance,
                raise_on_error=False,
                tags={TAG_CLAIM: claim.id},
            )
            run = store.runs.get(run.id)
        if run.status.is_final and run.endings > run.finalized:
            _finalize(agentmesh, run, instance)
            run = store.runs.get(run.id)
        return WorkflowResult(
            run=run,
            steps={step.key: step for step in store.runs.steps(run.id)},
            events=store.runs.events(run.id),
            waits=store.waits.list(run.project, run_id=run.id, limit=1000),
            dagster_result=result,
        )


# Alembic, which makes tables for Dagster and for AgentMesh, works for one thread of a process at a time.
_migrating: Final = threading.Lock()


def _made_instance() -> dg.DagsterInstance:
    with _migrating:
        return dg.DagsterInstance.ephemeral()  # pyright: ignore[reportUnknownMemberType]


_main_instance = cache(_made_instance)


@contextmanager
def _ephemeral_instance() -> Generator[dg.DagsterInstance]:
    """One that is kept, since to make it takes as long as a small run: Dagster loads its migrations for it.

    It is in memory, and one thread alone may use it: other threads than the main one have theirs for each call.
    """
    if threading.current_thread() is threading.main_thread():
        yield _main_instance()
        return
    with _made_instance() as instance:
        yield instance


def _finalize(agentmesh: AgentMesh, run: Run, instance: dg.DagsterInstance) -> None:
    """Runs `on_failure` and `finally` of a run that has ended, where they are due."""
    claim = agentmesh.store().claims.claim(run.id, reason="finalize")
    if claim is not None:
        build_finalize_job(agentmesh).execute_in_process(
            instance=instance, raise_on_error=False, tags={TAG_CLAIM: claim.id}
        )


def _answered(store: Store, run: Run, answers: Callable[[Wait], Answer | None]) -> bool:
    """Hands the answers to the open waits of a run; tells whether there were any."""
    given = False
    for wait in store.waits.list(run.project, run_id=run.id, statuses=(WaitStatus.OPEN,), limit=1000):
        answer = answers(wait)
        if answer is None:
            continue
        given = True
        if wait.kind is WaitKind.TIMER or answer.decision == "timeout":
            store.waits.settle_due(run.project, wait.deadline_at or wait.created_at)
        elif wait.kind is WaitKind.EVENT:
            store.waits.send_event(run.project, wait.event_name, wait.event_key, answer.data, by=answer.by)
        elif store.waits.get(run.project, wait.id).status is WaitStatus.OPEN:
            vote = Vote(
                by=answer.by,
                # To a suspension nothing is decided.
                decision=None if wait.kind is WaitKind.SUSPEND else answer.decision,
                data=answer.data,
                comment=answer.comment,
                at=SystemClock().now(),
            )
            store.waits.decide(run.project, wait.id, vote)
    return given


@dataclass(frozen=True, kw_only=True, eq=False)
class _OwnAgentMesh(AgentMesh):
    """One that shares nothing with the process, so that everything it opened can be closed."""

    opened: Store
    hosts: list[Host] = field(default_factory=list[Host])

    def store(self) -> Store:
        return self.opened

    def host(self) -> Host:
        if not self.hosts:
            self.hosts.append(Host(self))
        return self.hosts[0]


@cache
def _empty_database() -> bytes:
    """A SQLite file with the schema and nothing in it: to make one takes longer than a small run."""
    with _migrating, tempfile.TemporaryDirectory(prefix="agentmesh-") as folder:
        file = Path(folder) / "agentmesh.db"
        open_store(f"sqlite:///{file}").close()
        return file.read_bytes()


@contextmanager
def _opened(
    database_url: str | None,
    function_modules: tuple[str, ...],
    deployment: Deployment = Deployment(),  # noqa: B008 - a frozen record
) -> Generator[AgentMesh]:
    with tempfile.TemporaryDirectory(prefix="agentmesh-") as folder:
        url = database_url
        if url is None:
            file = Path(folder) / "agentmesh.db"
            file.write_bytes(_empty_database())
            url = f"sqlite:///{file}"
        with open_store(url) as store:
            agentmesh = _OwnAgentMesh(
                database_url=url, function_modules=function_modules, deployment=deployment, opened=store
            )
            try:
                yield agentmesh
            finally:
                for host in agentmesh.hosts:
                    run_on_loop(host.environment.http.aclose())
