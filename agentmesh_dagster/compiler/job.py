"""A pinned workflow as a Dagster job. Pure: the same record gives the same job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dagster as dg

from agentmesh_dagster.compiler.config_types import construct_config_schema
from agentmesh_dagster.compiler.graphs import construct_graph
from agentmesh_dagster.constants import ENV_CONSOLE_LEVEL, TAG_CATEGORY, TAG_PROJECT, TAG_PUBLICATION
from agentmesh_dagster.errors import AgentMeshError
from agentmesh_dagster.runtime.nodes.base import AnyNodeType
from agentmesh_dagster.runtime.session import Pinned
from agentmesh_dagster.specs.documents import WorkflowSettings
from agentmesh_dagster.specs.names import job_name

_PRIORITY_TAG = "dagster/priority"
SHOWN_HASH_CHARS = 12


def build_job(
    pinned: Pinned,
    *,
    node_types: Mapping[str, AnyNodeType],
    resource: dg.ResourceDefinition,
    executors: Mapping[str, dg.ExecutorDefinition],
    name: str | None = None,
    link: str | None = None,
    held: Callable[[dg.ExecutorDefinition], dg.ExecutorDefinition] | None = None,
) -> dg.JobDefinition:
    """The job of a published workflow.

    Args:
        pinned: The publication, frozen.
        node_types: Node types by name.
        resource: The resource `agentmesh` that its ops work with.
        executors: Executors by the names of `settings.executor`; `default` is the code location's.
        name: The job's name; default that of the slug.
        link: A URL of the definition's source, shown on the job.
        held: Makes an executor whose process holds the run while it executes the steps; default: the first step of a
            process opens the run.
    """
    executor = _executor(pinned.workflow.settings, executors)
    workflow = pinned.workflow
    job = name or job_name(pinned.kind, pinned.slug)
    return dg.JobDefinition(
        name=job,
        graph_def=construct_graph(pinned, job, node_types),
        description=workflow.description or workflow.name or None,
        config=dg.ConfigMapping(
            config_schema=construct_config_schema(job, workflow.input_schema),
            config_fn=console_config,
        ),
        resource_defs={"agentmesh": resource},
        logger_defs={"console": dg.colored_console_logger},
        executor_def=executor if held is None else held(executor),
        # Not `run_tags`: a launch through the API leaves those out.
        tags=construct_tags(pinned),
        metadata=_metadata(pinned, link),
    )


def build_broken_job(name: str, error: Exception) -> dg.JobDefinition:
    """A job that says why a publication cannot be built, so that one does not take a whole code location down."""
    code = error.code if isinstance(error, AgentMeshError) else "unexpected"
    reason = error.message if isinstance(error, AgentMeshError) else f"{type(error).__name__}: {error}"

    def compute(_op_context: Any, _inputs: Any) -> Iterator[dg.Output[None]]:
        raise dg.Failure(description=reason, metadata={"code": code}, allow_retries=False)
        yield

    op = dg.OpDefinition(compute_fn=compute, name=f"{name}__broken", outs={"done": dg.Out(dg.Nothing)})
    return dg.JobDefinition(
        name=name,
        graph_def=dg.GraphDefinition(name=name, node_defs=[op]),
        description=f"Cannot be built: {reason}",
        executor_def=dg.in_process_executor,
    )


def console_config(_config: Any) -> dict[str, Any]:
    """Dagster's own run config: the ops read the launch config from the run, so that only the console's level is left.

    Everything is in the event log anyway, and printing a line for each event costs time.
    """
    level = os.environ.get(ENV_CONSOLE_LEVEL) or "INFO"
    return {"loggers": {"console": {"config": {"log_level": level}}}}


def _executor(
    settings: WorkflowSettings, executors: Mapping[str, dg.ExecutorDefinition]
) -> dg.ExecutorDefinition:
    executor = executors[settings.executor]
    if settings.max_concurrent is None or not _takes_max_concurrent(executor):
        # An executor that runs one step at a time keeps any bound.
        return executor
    return executor.configured({"max_concurrent": settings.max_concurrent}, name=executor.name)


def _takes_max_concurrent(executor: dg.ExecutorDefinition) -> bool:
    field = executor.config_schema.as_field()
    return "max_concurrent" in (getattr(field.config_type, "fields", None) or {})


def construct_tags(pinned: Pinned) -> dict[str, str]:
    """The tags of the job, which its runs carry."""
    settings = pinned.workflow.settings
    tags = {**settings.tags, TAG_PROJECT: pinned.project, TAG_PUBLICATION: str(pinned.publication)}
    if pinned.workflow.category:
        tags[TAG_CATEGORY] = pinned.workflow.category
    if settings.priority is not None:
        tags[_PRIORITY_TAG] = str(settings.priority)
    return tags


def _metadata(pinned: Pinned, link: str | None) -> dict[str, Any]:
    document = pinned.workflow.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    metadata: dict[str, Any] = {
        "agentmesh/version": pinned.version,
        "agentmesh/definition": dg.MetadataValue.json(json.loads(json.dumps(document))),
        "agentmesh/publication": pinned.publication,
        "agentmesh/definition_hash": pinned.definition_hash[:SHOWN_HASH_CHARS],
        "agentmesh/input_schema": dg.MetadataValue.json(pinned.workflow.input_schema),
        "agentmesh/export": f"agentmesh export workflow {pinned.slug} --version {pinned.version}",
    }
    if link is not None:
        metadata["agentmesh/source"] = dg.MetadataValue.url(link)
    return metadata
