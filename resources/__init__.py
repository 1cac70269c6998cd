"""Which database and project this code location works on, and what its documents may use."""

from __future__ import annotations

from pathlib import Path

from agentmesh_dagster import AgentMesh

agentmesh = AgentMesh.of_project(
    Path(__file__).parent, function_modules=("definitions.data_quality", "definitions.support_triage")
)
