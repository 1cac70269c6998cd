"""This project's Dagster code location: every published workflow as a job, and the sensors that keep runs true."""

from __future__ import annotations

import sys
from pathlib import Path

# Dagster loads this file by path, from any working directory; the folders beside `definitions/` must be found.
PROJECT = Path(__file__).resolve().parent.parent
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from agentmesh_dagster import build_code_location  # noqa: E402 - after the path is set
from resources import agentmesh  # noqa: E402 - after the path is set
from sensors import all_sensors  # noqa: E402 - after the path is set

location = build_code_location(agentmesh, sensors=all_sensors)
