"""AgentMesh from Python: author, publish, launch, read runs, decide. What the commands do, as functions.

Each takes the project first, an `AgentMesh`:

    from agentmesh_dagster import AgentMesh, import_documents, list_runs

    agentmesh = AgentMesh.of_project()
    import_documents(agentmesh, Path("refund.yaml"), by="anna", publish=True)

They raise `AgentMeshError`s, whose `code`, `message` and `context` are those that the commands print. They are ordinary
blocking functions. Those that run or cancel something set `DAGSTER_HOME`, where it is not set, to the project's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from agentmesh_dagster.authoring import Authoring, Imported, Published, Report
from agentmesh_dagster.constants import ENV_DAGSTER_URL, TAG_SOURCE
from agentmesh_dagster.errors import DefinitionError, NotFound
from agentmesh_dagster.orchestration.decisions import (
    decide_approval,
    delegate_approval,
    list_approvals,
    resume_suspended,
    send_event,
)
from agentmesh_dagster.orchestration.local_run import code_location_file, open_instance
from agentmesh_dagster.records import Event, Json, Publication, Run, RunSource, RunStatus, Step
from agentmesh_dagster.settings import dagster_home, database_url, project_root
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.specs.names import job_name

if TYPE_CHECKING:
    import dagster as dg

    from agentmesh_dagster.orchestration.cancellation import Cancellation
    from agentmesh_dagster.orchestration.host import AgentMesh

__all__ = [
    "Documents",
    "cancel_run",
    "check_documents",
    "decide_approval",
    "delegate_approval",
    "execute_workflow",
    "export_document",
    "get_run",
    "import_documents",
    "launch_workflow",
    "list_approvals",
    "list_events",
    "list_runs",
    "list_steps",
    "publish_document",
    "resume_run",
    "resume_suspended",
    "retry_run",
    "send_event",
    "unpublish_document",
]

Documents = str | Path | Sequence[Path] | Sequence[Mapping[str, Json]]
"""YAML text, a file or folder, several of them, or documents as objects."""


def check_documents(agentmesh: AgentMesh, documents: Documents) -> Report:
    """All problems of documents, at once; nothing is written.

    Raises:
        DefinitionError: A file cannot be read, the text is not YAML, or a document is not an object.
    """
    authoring = _authoring(agentmesh, by="")
    paths = _paths(documents)
    return authoring.check(paths) if paths else authoring.check_documents(_objects(documents))


def import_documents(
    agentmesh: AgentMesh, documents: Documents, *, by: str, publish: bool = False, message: str = ""
) -> tuple[Imported, ...]:
    """Stores documents as new versions: all of them, or none. An unchanged document keeps its version.

    Args:
        agentmesh: Database and project.
        documents: The documents; they may refer to each other in any order.
        by: Who does it, for the audit.
        publish: Whether their newest versions become live too.
        message: For the versions and the publications.

    Raises:
        DefinitionError: A file cannot be read, the text is not YAML, or a document is not an object.
        DocumentInvalid: Some document has errors; all errors of all documents are in it.
        StoreError: The store refused; nothing was stored.
    """
    authoring = _authoring(agentmesh, by)
    paths = _paths(documents)
    if paths:
        return authoring.import_paths(paths, publish=publish, message=message)
    return authoring.import_documents(_objects(documents), publish=publish, message=message)


def publish_document(
    agentmesh: AgentMesh, kind: str, slug: str, *, by: str, version: int | None = None, message: str = ""
) -> Published:
    """Makes a stored version live, with the versions of all that it reaches.

    A running code location offers the new job once it is loaded anew; `agentmesh publish` has it do so.

    Args:
        agentmesh: Database and project.
        kind: `workflow`, `agent`, `tool` or `network`.
        slug: Of the definition.
        by: Who does it, for the audit.
        version: Default: the newest.
        message: For the log of publications.

    Raises:
        NotFound: There is no such definition or version.
        DocumentInvalid: What it refers to is missing, inactive, or contains it.
    """
    return _authoring(agentmesh, by).publish(kind, slug, version=version, message=message)


def unpublish_document(
    agentmesh: AgentMesh, kind: str, slug: str, *, by: str, message: str = ""
) -> Publication:
    """Ends what is live under a slug; runs that have started go on.

    Raises:
        NotFound: There is no such definition.
        StoreError: It is not published (code `not-published`).
    """
    return _authoring(agentmesh, by).unpublish(kind, slug, message=message)


def export_document(
    agentmesh: AgentMesh,
    kind: str,
    slug: str,
    *,
    version: int | None = None,
    format: Literal["yaml", "json"] = "yaml",
) -> str:
    """A stored version in its canonical form; default the newest.

    Raises:
        NotFound: There is no such definition or version.
    """
    return _authoring(agentmesh, by="").export(kind, slug, version=version, format=format)


def execute_workflow(
    agentmesh: AgentMesh,
    slug: str,
    input: Json = None,
    *,
    by: str,
    tags: Mapping[str, str] | None = None,
    instance: dg.DagsterInstance | None = None,
) -> Run:
    """Runs a published workflow through Dagster in this process, until it has ended or waits.

    Its `on_failure` and `finally` run here too. Call it from the main thread: Dagster's signal handling needs it.

    Args:
        agentmesh: Database and project.
        slug: The workflow's.
        input: The run's input; default `{}`.
        by: Who runs it: the run's `triggered_by`.
        tags: Of the Dagster run.
        instance: Dagster's; default: the project's own, which `DAGSTER_HOME` names.

    Returns:
        The run as it stands; look at its `status`, `output` and `error`.

    Raises:
        DefinitionError: It is not published, or the input does not fit (code `run-input`).
        NotFound: There is no such workflow.
        NeverStarted: The Dagster run ended before its first step.
    """
    from agentmesh_dagster.orchestration.continuation import pinned_job
    from agentmesh_dagster.orchestration.launch import admitted, with_end
    from agentmesh_dagster.orchestration.local_run import run_here

    root = _root(agentmesh)
    publication, fitted = admitted(
        agentmesh.store(), agentmesh.project, "workflow", slug, input or {}, by=by, name="the input"
    )
    value = cast("dict[str, Json]", fitted)
    job = pinned_job(root, publication)
    every = {**(tags or {}), TAG_SOURCE: RunSource.API.value, "user": by}
    with open_instance(dagster_home(root)) if instance is None else nullcontext(instance) as opened:
        result = run_here(agentmesh, job, value, instance=opened, tags=every)
        return with_end(agentmesh, root, result, instance=opened, by=by).started_run


def launch_workflow(
    agentmesh: AgentMesh,
    slug: str,
    input: Json = None,
    *,
    by: str,
    tags: Mapping[str, str] | None = None,
    webserver: str | None = None,
) -> str:
    """Launches a published workflow through a running Dagster webserver, as a person does in its UI.

    Args:
        agentmesh: Database and project.
        slug: The workflow's.
        input: The run's input; default `{}`.
        by: Who launches it: the run's `triggered_by`.
        tags: Of the Dagster run.
        webserver: Its address, such as `http://127.0.0.1:3000`; default: `AGENTMESH_DAGSTER_URL`.

    Returns:
        The id of the run. `get_run` knows it once a worker has taken it up.

    Raises:
        DefinitionError: It is not published, or the input does not fit (code `run-input`).
        NotFound: There is no such workflow, or no webserver is named (code `no-webserver`).
        WebserverError: The webserver does not answer, does not offer the job yet, or refused.
    """
    from agentmesh_dagster.orchestration.launch import admitted, launch_by_webserver

    url = webserver or os.environ.get(ENV_DAGSTER_URL)
    if not url:
        raise NotFound(
            f"no webserver is named: pass `webserver=` or set {ENV_DAGSTER_URL}, such as http://127.0.0.1:3000",
            code="no-webserver",
        )
    _, fitted = admitted(
        agentmesh.store(), agentmesh.project, "workflow", slug, input or {}, by=by, name="the input"
    )
    value = cast("dict[str, Json]", fitted)
    every = {**(tags or {}), TAG_SOURCE: RunSource.API.value, "user": by}
    return launch_by_webserver(url, job_name("workflow", slug), value, every)


def resume_run(
    agentmesh: AgentMesh, run_id: str, *, by: str, instance: dg.DagsterInstance | None = None
) -> Run:
    """Continues a waiting run in this process, by the publication that it started with.

    Where a daemon runs the gate sensors, they do so by themselves.

    Args:
        agentmesh: Database and project.
        run_id: The run.
        by: Who continues it.
        instance: Dagster's; default: the project's own.

    Returns:
        The run as it stands afterwards.

    Raises:
        NotFound: The project has no such run (code `no-run`).
        RunRefused: It does not wait, nothing that it waits for is answered, or somebody else continues it already
            (code `run-claimed`).
    """
    from agentmesh_dagster.orchestration import continuation
    from agentmesh_dagster.orchestration.launch import claimed, with_end

    root, store, run = _root(agentmesh), agentmesh.store(), get_run(agentmesh, run_id)
    with open_instance(dagster_home(root)) if instance is None else nullcontext(instance) as opened:
        run = continuation.check_resumable(store, opened, run)
        job = continuation.pinned_job(root, store.publications.get(run.publication))
        claim = claimed(store, run, "resume")
        result = continuation.resume_here(agentmesh, job, run, instance=opened, claim=claim, by=by)
        return with_end(agentmesh, root, result, instance=opened, by=by).started_run


def retry_run(
    agentmesh: AgentMesh, run_id: str, *, by: str, instance: dg.DagsterInstance | None = None
) -> Run:
    """Goes on with a failed or canceled run in this process. What had finished is not done again.

    Args:
        agentmesh: Database and project.
        run_id: The run.
        by: Who retries it.
        instance: Dagster's; default: the project's own.

    Returns:
        The run as it stands afterwards.

    Raises:
        NotFound: The project has no such run (code `no-run`).
        RunRefused: It did not fail, or is at work.
    """
    from agentmesh_dagster.orchestration import continuation
    from agentmesh_dagster.orchestration.launch import with_end

    root, store, run = _root(agentmesh), agentmesh.store(), get_run(agentmesh, run_id)
    with open_instance(dagster_home(root)) if instance is None else nullcontext(instance) as opened:
        run = continuation.check_retryable(store, opened, run)
        job = continuation.pinned_job(root, store.publications.get(run.publication))
        result = continuation.continue_here(agentmesh, job, run, instance=opened, by=by)
        return with_end(agentmesh, root, result, instance=opened, by=by).started_run


def get_run(agentmesh: AgentMesh, run_id: str) -> Run:
    """A run by its id, or by the id of any of its Dagster runs.

    Raises:
        NotFound: The project has none (code `no-run`).
    """
    run = agentmesh.store().runs.get(run_id)
    if run.project != agentmesh.project:
        raise NotFound(f"there is no run {run_id!r} in the project {agentmesh.project!r}", code="no-run")
    return run


def list_runs(
    agentmesh: AgentMesh,
    *,
    slug: str | None = None,
    status: RunStatus | Sequence[RunStatus] | None = None,
    since: datetime | None = None,
    limit: int | None = 50,
) -> list[Run]:
    """The runs of a project, the newest first.

    Args:
        agentmesh: Database and project.
        slug: Of the workflow.
        status: One status, or several.
        since: Stored at this moment or later; with a time zone.
        limit: Maximum number of runs; None for all.
    """
    return agentmesh.store().runs.list(agentmesh.project, slug=slug, status=status, since=since, limit=limit)


def list_steps(agentmesh: AgentMesh, run_id: str) -> list[Step]:
    """The steps of a run, in the order in which they started.

    Raises:
        NotFound: The project has no such run (code `no-run`).
    """
    return agentmesh.store().runs.steps(get_run(agentmesh, run_id).id)


def list_events(
    agentmesh: AgentMesh,
    run_id: str,
    *,
    type: str | None = None,
    step_key: str | None = None,
    after: str | None = None,
    limit: int | None = None,
) -> list[Event]:
    """The events of a run, in the order in which they were committed.

    Args:
        agentmesh: Database and project.
        run_id: The run.
        type: Such as `step.completed`; `step.*` for all that begin so.
        step_key: Those of one step.
        after: Only those after the event of this id; asking so again and again misses none.
        limit: Maximum number of events.

    Raises:
        NotFound: The project has no such run (code `no-run`).
    """
    run = get_run(agentmesh, run_id)
    return agentmesh.store().runs.events(run.id, type=type, step_key=step_key, after=after, limit=limit)


def cancel_run(
    agentmesh: AgentMesh, run_id: str, *, by: str, instance: dg.DagsterInstance | None = None
) -> Cancellation:
    """Cancels a run that has not ended, and the unfinished runs that it started.

    Args:
        agentmesh: Database and project.
        run_id: The run.
        by: Who cancels it, for the audit.
        instance: Dagster's; default: the project's own. A webserver that `AGENTMESH_DAGSTER_URL` names goes first.

    Returns:
        The run as it stands; it may take some seconds more to end.

    Raises:
        NotFound: The project has no such run (code `no-run`).
        RunRefused: It has ended (code `run-final`), or its process cannot be reached (`cannot-terminate`).
    """
    from agentmesh_dagster.orchestration import cancellation

    run = get_run(agentmesh, run_id)
    home = dagster_home(_root(agentmesh))
    with open_instance(home) if instance is None else nullcontext(instance) as opened:
        url = os.environ.get(ENV_DAGSTER_URL) or None
        return cancellation.cancel_run(agentmesh.store(), opened, run, by=by, webserver=url)


def _authoring(agentmesh: AgentMesh, by: str) -> Authoring:
    return Authoring(
        agentmesh.store(),
        agentmesh.project,
        actor=by,
        deployment=agentmesh.deployment,
        function_modules=agentmesh.function_modules,
    )


def _root(agentmesh: AgentMesh) -> Path:
    """The project's folder.

    Raises:
        DefinitionError: It has no code location, and a database of its own: its jobs would be built from that one.
    """
    root = agentmesh.root or project_root()
    if code_location_file(root) is None and database_url(root) != agentmesh.database_url:
        raise DefinitionError(
            f"{str(root)!r} has no code location for this database: run `agentmesh init` there, or take "
            "`AgentMesh.of_project(folder)` with the folder whose database it is",
            code="no-code-location",
        )
    return root


def _paths(documents: Documents) -> list[Path]:
    """The files and folders; empty where the documents are given themselves."""
    if isinstance(documents, str):
        return []
    if isinstance(documents, Path):
        return [documents]
    return [each for each in documents if isinstance(each, Path)]


def _objects(documents: Documents) -> list[Json]:
    if isinstance(documents, str):
        return list(load_documents(documents, source="documents"))
    return list(cast("Sequence[Json]", documents))
