"""The files of a new project: what `agentmesh init` writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.settings import STATE_FOLDER, dagster_home, make_private

DAGSTER_YAML = """\
telemetry:
  enabled: false

# No welcome dialog over the UI.
nux:
  enabled: false

# A launched run starts within a second; Dagster's own default is five.
run_queue:
  dequeue_interval_seconds: 1

# Runs start warm: each is forked from a process that has the libraries loaded, LiteLLM among them.
run_launcher:
  module: agentmesh_dagster.orchestration.launcher
  class: WarmRunLauncher

# Sensors side by side: the gate sensors hold their ticks open, and must not keep the others waiting.
sensors:
  use_threads: true
  num_workers: 8

retention:
  sensor:
    purge_after_days:
      skipped: 1
"""

POSTGRES_STORAGE = """
# Dagster's own storage (runs, events, schedules); AgentMesh's database is AGENTMESH_DATABASE_URL.
# The URL names the driver, postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE: SQLAlchemy 2.1 takes another one
# otherwise, which dagster-postgres does not work with.
storage:
  postgres:
    postgres_url:
      env: DAGSTER_POSTGRES_URL
"""

WORKSPACE_YAML = """\
load_from:
  - python_file:
      relative_path: definitions/code_location.py
      location_name: agentmesh
"""

CODE_LOCATION = '''\
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
'''

RESOURCES = '''\
"""Which database and project this code location works on, and what its documents may use: nothing but what is here."""

from __future__ import annotations

from pathlib import Path

from agentmesh_dagster import AgentMesh

agentmesh = AgentMesh.of_project(
    Path(__file__).parent,
    # Modules whose functions `code` nodes and `function` tools may call, such as "my_functions" for my_functions.py in
    # the project's folder.
    function_modules=(),
    # Secrets that documents may name, such as "DESK_TOKEN", or AllowedSecret("CRM_*", hosts=("crm.example.com",)).
    secrets=(),
    # Servers of models, such as {"local": Endpoint(api_base="http://127.0.0.1:11434/v1")} for model: local/llama3.
    endpoints={},
    # Values that expressions read as config.NAME.
    config={},
)
'''

SENSORS = '''\
"""Which sensors this code location runs, and how often."""

from __future__ import annotations

from agentmesh_dagster import build_gate_sensors, build_reconciler_sensor, build_run_status_sensors
from resources import agentmesh

all_sensors = [
    *build_gate_sensors(agentmesh),
    *build_run_status_sensors(agentmesh, minimum_interval_s=15),
    build_reconciler_sensor(agentmesh, minimum_interval_s=15),
]
'''

HELLO = """\
# A first workflow. `offline/echo` is a stand-in that repeats the prompt and needs no network;
# put a real model (such as openai/gpt-5-mini, with OPENAI_API_KEY set) in its place.
kind: agent
slug: greeter
model: offline/echo
instructions: You greet people in one friendly sentence.
---
kind: workflow
slug: hello
name: Hello
description: Greets somebody.
input_schema:
  type: object
  required: [name]
  properties:
    name: {type: string, description: Whom to greet.}
nodes:
  - {id: start, type: start}
  - id: greet
    type: agent
    config: {agent: greeter, prompt: "Say hello to {{ input.name }}."}
    timeout_s: 60
  - {id: end, type: end, config: {output: {greeting: "{{ steps.greet.output.text }}"}}}
edges:
  - {source: start, target: greet}
  - {source: greet, target: end}
"""

GITIGNORE = f"""\
__pycache__/
{STATE_FOLDER}/*
!{STATE_FOLDER}/dagster.yaml
"""


def scaffold(folder: Path, *, postgres: bool = False, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Writes a new project.

    Args:
        folder: Made if need be.
        postgres: Whether Dagster's storage is PostgreSQL.
        environ: Where `DAGSTER_HOME` is set, Dagster reads the settings there: the project gets none of its own.

    Returns:
        The files written.

    Raises:
        DefinitionError: One of them exists already (code `file-exists`); nothing is written then.
    """
    files = {
        "workspace.yaml": WORKSPACE_YAML,
        "definitions/__init__.py": "",
        "definitions/code_location.py": CODE_LOCATION,
        "resources/__init__.py": RESOURCES,
        "sensors/__init__.py": SENSORS,
        "workflows/hello.yaml": HELLO,
        ".gitignore": GITIGNORE,
    }
    paths = {folder / name: text for name, text in files.items()}
    settings = dagster_home(folder, environ) / "dagster.yaml"
    if not environ.get("DAGSTER_HOME") or not settings.exists():
        paths[settings] = DAGSTER_YAML + (POSTGRES_STORAGE if postgres else "")
    taken = [str(path) for path in paths if path.exists()]
    if taken:
        raise DefinitionError(
            f"{', '.join(taken)}: exists already; nothing was written. Choose another folder",
            code="file-exists",
        )
    for path, text in paths.items():
        make_private(path.parent)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
    return list(paths)


def write_dagster_yaml(home: Path) -> bool:
    """Writes the default `dagster.yaml` into a Dagster home that has none; tells whether it did."""
    path = home / "dagster.yaml"
    if path.exists():
        return False
    path.write_text(DAGSTER_YAML, encoding="utf-8")
    return True
