"""Another workflow, run as a part of this one, or started as a run of its own."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import ClassVar

from agentmesh_dagster.errors import NotFound
from agentmesh_dagster.records import Json, Run, RunSource, RunStatus
from agentmesh_dagster.runtime.nodes.base import NodeCall, NodeResult, NodeType, Preparation
from agentmesh_dagster.runtime.scope import Level, Scope, called_scope, request_context, workflow_input
from agentmesh_dagster.specs.closure import Closure, content_hash
from agentmesh_dagster.specs.nodes import WorkflowConfig


class WorkflowNode(NodeType[WorkflowConfig]):
    """Runs a workflow's published version under its own step key, or starts it and goes on."""

    name: ClassVar[str] = "workflow"
    config_model = WorkflowConfig
    kinds: ClassVar[tuple[str, ...]] = ("workflow",)

    def describe(self, config: WorkflowConfig) -> str:
        return f"starts {config.workflow}, and goes on" if config.async_ else f"runs {config.workflow}"

    def request(self, config: WorkflowConfig, preparation: Preparation) -> Json:
        given = preparation.upstream
        if "input" in config.model_fields_set:
            given = preparation.render(config.input, "input")
        if not config.async_:
            given = workflow_input(_level(config, preparation).workflow, given)
        return {"workflow": config.workflow, "input": given}

    def levels(self, config: WorkflowConfig, preparation: Preparation) -> Mapping[str, Scope]:
        if config.async_:
            return {}
        key = preparation.scope.key(preparation.node.id)
        given = self.request(config, preparation)["input"]
        level, run = _level(config, preparation), preparation.names["run"]
        return {key: called_scope(preparation.scope, level, key, given, run)}

    async def run(self, config: WorkflowConfig, call: NodeCall) -> NodeResult:
        if config.async_:
            return await self._start(config, call)
        scope = call.levels(self, config)[call.key]
        end = await call.run_pass(scope)
        return NodeResult(output=end.output)

    async def _start(self, config: WorkflowConfig, call: NodeCall) -> NodeResult:
        """Stores a run that a gate sensor has Dagster begin; its id is the same in every attempt."""
        parent, journal = call.session.run, call.environment.journal
        slug = _level(config, call.preparation).workflow.slug
        child_id = str(uuid.UUID(content_hash([parent.id, call.key])[:32]))
        known = await journal.run(child_id)
        if known is not None:
            # An attempt before this one was cut off after it had stored it.
            return NodeResult(output={"run_id": known.id}, child_run_id=known.id)
        live = await journal.published(parent.project, "workflow", slug)
        if live is None:
            raise NotFound(
                f"the workflow {slug!r} is not published any more, or inactive, so that no run of it can be started: "
                f"agentmesh publish workflow {slug}",
                code="not-published",
            )
        # The run is one of what is published now, which need not be what the caller was published with.
        closure = Closure.model_validate(live.closure)
        workflow = closure.workflow
        now = call.environment.clock.now()
        settings = workflow.settings
        limit_s = settings.timeout_s if settings.timeout_includes_waiting else None
        run = Run(
            id=child_id,
            project=parent.project,
            kind="workflow",
            slug=slug,
            version=live.version,
            publication=live.id,
            definition_hash=live.closure_hash,
            source=RunSource.WORKFLOW,
            triggered_by=parent.triggered_by,
            parent_run_id=parent.id,
            parent_step_key=call.key,
            input=workflow_input(workflow, call.request["input"]),
            request_context=request_context(closure, call.environment.deployment),
            status=RunStatus.PENDING,
            queued_at=now,
            finalizers=workflow.finalizers,
            deadline_at=now + timedelta(seconds=limit_s) if limit_s is not None else None,
        )
        stored = await journal.start_child(run, holder=call.session.lease.holder)
        call.preparation.say(f"{call.key} started run {stored.id} of {slug}")
        return NodeResult(output={"run_id": stored.id}, child_run_id=stored.id)


def _level(config: WorkflowConfig, preparation: Preparation) -> Level:
    return preparation.scope.level.called(config.workflow)
