"""AgentMesh for Dagster: agent workflows, stored and versioned, compiled into Dagster jobs.

The names here are what a code location needs, and what the commands do as functions (`docs/python.md`). They are loaded
at first use, so that importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentmesh_dagster.api import (
        cancel_run,
        check_documents,
        decide_approval,
        delegate_approval,
        execute_workflow,
        export_document,
        get_run,
        import_documents,
        launch_workflow,
        list_approvals,
        list_events,
        list_runs,
        list_steps,
        publish_document,
        resume_run,
        resume_suspended,
        retry_run,
        send_event,
        unpublish_document,
    )
    from agentmesh_dagster.deployment import AllowedSecret, Endpoint, MailServer
    from agentmesh_dagster.errors import AgentMeshError
    from agentmesh_dagster.orchestration.agentmesh import AgentMesh
    from agentmesh_dagster.orchestration.code_location import build_code_location
    from agentmesh_dagster.orchestration.executor import agentmesh_executor
    from agentmesh_dagster.orchestration.gate_sensor import build_gate_sensor, build_gate_sensors
    from agentmesh_dagster.orchestration.sensors import build_reconciler_sensor, build_run_status_sensors
    from agentmesh_dagster.runtime.step_context import StepContext

__version__ = "0.1.0"

__all__ = [
    "AgentMesh",
    "AgentMeshError",
    "AllowedSecret",
    "Endpoint",
    "MailServer",
    "StepContext",
    "__version__",
    "agentmesh_executor",
    "build_code_location",
    "build_gate_sensor",
    "build_gate_sensors",
    "build_reconciler_sensor",
    "build_run_status_sensors",
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

_HOMES = {
    "AgentMesh": "agentmesh_dagster.orchestration.agentmesh",
    "AgentMeshError": "agentmesh_dagster.errors",
    "AllowedSecret": "agentmesh_dagster.deployment",
    "Endpoint": "agentmesh_dagster.deployment",
    "MailServer": "agentmesh_dagster.deployment",
    "StepContext": "agentmesh_dagster.runtime.step_context",
    "agentmesh_executor": "agentmesh_dagster.orchestration.executor",
    "build_code_location": "agentmesh_dagster.orchestration.code_location",
    "build_gate_sensor": "agentmesh_dagster.orchestration.gate_sensor",
    "build_gate_sensors": "agentmesh_dagster.orchestration.gate_sensor",
    "build_reconciler_sensor": "agentmesh_dagster.orchestration.sensors",
    "build_run_status_sensors": "agentmesh_dagster.orchestration.sensors",
    **dict.fromkeys(
        (
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
        ),
        "agentmesh_dagster.api",
    ),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
