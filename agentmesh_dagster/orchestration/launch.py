"""From a published workflow and an input to a run: in this process, or through a Dagster webserver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from agentmesh_dagster.errors import AgentMeshError, DefinitionError, RunRefused
from agentmesh_dagster.orchestration.cancellation import cancel_children
from agentmesh_dagster.orchestration.continuation import finalize_here
from agentmesh_dagster.orchestration.local_run import LocalRun, NeverStarted
from agentmesh_dagster.orchestration.run_failure import first_failure
from agentmesh_dagster.orchestration.webserver import WebserverError, query
from agentmesh_dagster.records import Claim, Json, Publication, Run, RunStatus

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.host import AgentMesh
    from agentmesh_dagster.store import Store

_JOBS: Final = """{
  repositoriesOrError {
    __typename
    ... on RepositoryConnection { nodes { name location { name } jobs { name } } }
    ... on PythonError { message }
  }
}"""
_LAUNCH: Final = """mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on PipelineNotFoundError { message }
    ... on InvalidSubsetError { message }
    ... on ConflictingExecutionParamsError { message }
    ... on UnauthorizedError { message }
    ... on PythonError { message }
  }
}"""


def published_workflow(store: Store, project: str, kind: str, slug: str) -> Publication:
    """The publication of a workflow that is live.

    Raises:
        DefinitionError: Its kind is not run by itself (code `not-runnable`), or it was deleted (`deleted`), is
            inactive (`inactive`) or not published (`not-published`).
        NotFound: There is no such definition.
    """
    if kind != "workflow":
        raise DefinitionError(
            f"a {kind} is not run by itself: put it into a workflow, and run that", code="not-runnable"
        )
    publication = store.publications.live_one(project, kind, slug)
    if publication is not None:
        return publication
    definition = store.catalog.get(project, kind, slug)
    if definition.archived_at is not None:
        raise DefinitionError(f"the {kind} {slug!r} was deleted; import it again", code="deleted")
    if not definition.is_active:
        raise DefinitionError(
            f"the {kind} {slug!r} is inactive: `agentmesh activate {kind} {slug}` lets it be launched",
            code="inactive",
        )
    raise DefinitionError(
        f"the {kind} {slug!r} is not published: `agentmesh publish {kind} {slug}` makes its newest version live",
        code="not-published",
    )


def fitted_input(publication: Publication, value: Json, *, name: str = "--input") -> Json:
    """The input with the schema's defaults, losslessly coerced: Dagster's own check of it is stricter.

    Args:
        publication: Of the workflow.
        value: The input.
        name: What the error calls it.

    Raises:
        DefinitionError: It does not fit (code `run-input`); the message has a line for each place.
    """
    from agentmesh_dagster.compiler.snapshot import construct_pinned
    from agentmesh_dagster.specs.schema import fill_and_coerce, validate_value

    schema = construct_pinned(publication).workflow.input_schema
    fitted = fill_and_coerce(schema, value)
    issues = validate_value(schema, fitted)
    if issues:
        lines = "\n".join(f"  {issue.path}: {issue.message}" for issue in issues)
        raise DefinitionError(
            f"{name} does not fit the input_schema of {publication.slug!r}:\n{lines}", code="run-input"
        )
    return fitted


def admitted(
    store: Store, project: str, kind: str, slug: str, value: Json, *, by: str, name: str = "--input"
) -> tuple[Publication, Json]:
    """What a launch runs, and with which input; a launch that is refused is in the audit, without its input.

    Args:
        store: The project's.
        project: Its slug.
        kind: Of the definition.
        slug: Of the definition.
        value: The input.
        by: Who launches it.
        name: What errors call the input.

    Raises:
        DefinitionError: See `published_workflow` and `fitted_input`.
        NotFound: There is no such definition.
    """
    try:
        publication = published_workflow(store, project, kind, slug)
        return publication, fitted_input(publication, value, name=name)
    except AgentMeshError as refusal:
        store.audit.add(
            project, "launch-refused", actor=by, entity=f"{kind}/{slug[:200]}", detail={"code": refusal.code}
        )
        raise


def claimed(store: Store, run: Run, reason: str) -> Claim:
    """Claims a run, so that nobody else continues it.

    Raises:
        RunRefused: Somebody else does already (code `run-claimed`).
    """
    claim = store.claims.claim(run.id, reason=reason)
    if claim is None:
        raise RunRefused(
            f"somebody else continues run {run.id!r} already; `agentmesh runs show {run.id[:8]}` shows how it stands. "
            "A claim whose run never begins is given back after a minute",
            code="run-claimed",
        )
    return claim


def with_end(
    agentmesh: AgentMesh, root: Path, result: LocalRun, *, instance: dg.DagsterInstance, by: str
) -> LocalRun:
    """Does what the end of a run that was executed here asks for.

    Runs that it started are canceled with it; its `on_failure` and `finally` run.

    Args:
        agentmesh: Database and project.
        root: The project's folder.
        result: The run.
        instance: Dagster's, in which it ran.
        by: Who ran it.

    Returns:
        The result, with the run as it stands afterwards. `finally` that cannot run here is left to a daemon.

    Raises:
        NeverStarted: The Dagster run ended before its first step.
    """
    run = result.run
    if run is None:
        failure = first_failure(instance, result.dagster_run_id)
        reason = "see its log in the Dagster UI (agentmesh dev)" if failure is None else failure.text
        raise NeverStarted(
            f"the Dagster run {result.dagster_run_id} ended as {result.dagster_status} before its first step: {reason}",
            context={"dagster_run_id": result.dagster_run_id},
        )
    if not run.status.is_final:
        return result
    if run.status is RunStatus.CANCELED:
        cancel_children(agentmesh.store(), instance, run, by=by)
    note = ""
    try:
        finalize_here(agentmesh, root, run, instance=instance, by=by)
    except AgentMeshError as error:
        # The run has ended, and that is what was asked for; a daemon may have been faster, or comes later.
        note = error.message
    return replace(result, run=agentmesh.store().runs.get(run.id), note=note)


def launch_by_webserver(url: str, job: str, run_config: Mapping[str, Json], tags: Mapping[str, str]) -> str:
    """Launches a run of a job, as the button of the launchpad does.

    Args:
        url: The webserver's address, such as `http://127.0.0.1:3000`.
        job: The job's name; one code location has it.
        run_config: Of the run.
        tags: Of the run.

    Returns:
        The id of the Dagster run, which is the run's.

    Raises:
        DefinitionError: The run config does not fit (code `run-input`).
        WebserverError: The webserver does not answer, has no such job, or refused.
    """
    answer = query(url, _JOBS)["repositoriesOrError"]
    nodes: list[dict[str, Any]] = answer.get("nodes", [])
    found = [node for node in nodes if any(each["name"] == job for each in node["jobs"])]
    if len(found) != 1:
        what = "no code location that has" if not found else "several code locations that have"
        raise WebserverError(
            f"the webserver at {url} has {what} the job {job!r}"
            + ("; reload the code location after publishing" if not found else "")
        )
    selector = {
        "repositoryName": found[0]["name"],
        "repositoryLocationName": found[0]["location"]["name"],
        "jobName": job,
    }
    params = {
        "selector": selector,
        "runConfigData": dict(run_config),
        "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
    }
    done = query(url, _LAUNCH, {"params": params}, timeout_s=60)["launchRun"]
    if done["__typename"] == "LaunchRunSuccess":
        return done["run"]["runId"]
    if done["__typename"] == "RunConfigValidationInvalid":
        lines = "\n".join(f"  {error['message']}" for error in done["errors"])
        raise DefinitionError(f"the input does not fit the job {job!r}:\n{lines}", code="run-input")
    raise WebserverError(f"the webserver at {url} did not launch {job!r}: {done.get('message') or done}")
