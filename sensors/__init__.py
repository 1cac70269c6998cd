"""Which sensors this code location runs, and how often."""

from __future__ import annotations

from agentmesh_dagster import build_gate_sensors, build_reconciler_sensor, build_run_status_sensors
from resources import agentmesh

all_sensors = [
    *build_gate_sensors(agentmesh),
    *build_run_status_sensors(agentmesh, minimum_interval_s=15),
    build_reconciler_sensor(agentmesh, minimum_interval_s=15),
]
