"""Helpers for tests of your own workflows: a whole run in one call, in this process, without a server.

    from agentmesh_dagster.testing import run_workflow

    result = run_workflow(documents, {"name": "Ada"})
    assert result.run.output == {"greeting": "Hello Ada"}

The database is a temporary SQLite file, Dagster's instance is ephemeral, and the models are whatever the agents name:
`offline/echo` and `offline/script` need neither network nor keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import yaml

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.constants import DEFAULT_PROJECT, TAG_SOURCE
from agentmesh_dagster.orchestration.code_location import build_published_job, named_executors
from agentmesh_dagster.orchestration.host import AgentMesh, Host
from agentmesh_dagster.records import Event, Json, Publication, Run, RunSource, Step
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.store import Store, open_store

__all__ = ["WorkflowResult", "publish_documents", "run_workflow"]


@dataclass(frozen=True, kw_only=True)
class WorkflowResult:
    """What a run came to."""

    run: Run
    steps: Mapping[str, Step]
    """By step key (`classify`, `classify/llm/1`)."""
    events: Sequence[Event]
    """In the order in which they were written."""
    dagster_result: dg.ExecuteInProcessResult

    @property
    def succeeded(self) -> bool:
        """Whether the run reached an end and nothing failed unhandled."""
        return self.dagster_result.success


def publish_documents(
    store: Store, documents: str | Sequence[Json], project: str = DEFAULT_PROJECT
) -> list[Publication]:
    """Stores and publishes documents.

    Args:
        store: Where to.
        documents: YAML text of one or more documents, or the documents as objects.
        project: The project's slug.

    Raises:
        DefinitionError: The text is no YAML.
        DocumentInvalid: Some document has errors.
    """
    raws = load_documents(documents, source="documents") if isinstance(documents, str) else list(documents)
    with tempfile.TemporaryDirectory(prefix="agentmesh-") as folder:
        path = Path(folder, "documents.yaml")
        path.write_text(yaml.safe_dump_all(raws, sort_keys=False), encoding="utf-8")
        imported = Authoring(store, project, actor="test").import_paths([path], publish=True)
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
) -> WorkflowResult:
    """Runs a workflow in this process, one node after the other, from documents to result.

    Args:
        documents: YAML text of one or more documents, or the documents as objects.
        input: The run's input; default `{}`.
        slug: Which workflow, where there are several.
        database_url: A database of your own, with its schema up to date; default: a temporary SQLite file.
        function_modules: Modules whose functions may be called.
        instance: A Dagster instance; default: an ephemeral one.
        tags: Tags of the Dagster run.

    Returns:
        The result, also of a run that failed.

    Raises:
        DocumentInvalid: Some document has errors.
        ValueError: There is no workflow, or there are several and `slug` names none.
        dagster.DagsterInvalidConfigError: The input does not fit the launch config.
        NotFound: The run ended before its first step, and left no row (code `no-run`).
    """
    with _opened(database_url, tuple(function_modules)) as agentmesh:
        store = agentmesh.store()
        published = publish_documents(store, documents)
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
        return WorkflowResult(
            run=run,
            steps={step.key: step for step in store.runs.steps(run.id)},
            events=store.runs.events(run.id),
            dagster_result=result,
        )


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


@contextmanager
def _opened(database_url: str | None, function_modules: tuple[str, ...]) -> Generator[AgentMesh]:
    with tempfile.TemporaryDirectory(prefix="agentmesh-") as folder:
        url = database_url or f"sqlite:///{folder}/agentmesh.db"
        with open_store(url) as store:
            agentmesh = _OwnAgentMesh(database_url=url, function_modules=function_modules, opened=store)
            try:
                yield agentmesh
            finally:
                for host in agentmesh.hosts:
                    run_on_loop(host.environment.http.aclose())
