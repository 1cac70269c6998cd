"""What importing costs: neither the package nor a code location loads LiteLLM, and the package alone no Dagster."""

from __future__ import annotations

import subprocess
import sys

import pytest
from workflow_project import open_project


def loaded_after(program, tmp_path):
    """The names of the modules that a fresh process has loaded after a program."""
    shown = subprocess.run(
        [sys.executable, "-c", program + "\nimport sys\nprint('loaded:', *sorted(sys.modules))"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert shown.returncode == 0, shown.stderr
    return set(shown.stdout.splitlines()[-1].removeprefix("loaded:").split())


def test_the_package_alone_loads_nothing_heavy(tmp_path):
    loaded = loaded_after("import agentmesh_dagster", tmp_path)
    assert "agentmesh_dagster" in loaded
    assert loaded.isdisjoint({"dagster", "litellm", "sqlalchemy", "pydantic", "httpx", "jinja2"})


def test_the_public_names_resolve(tmp_path):
    program = "import agentmesh_dagster as a\nfor name in a.__all__: getattr(a, name)"
    assert "litellm" not in loaded_after(program, tmp_path)


def test_runtime_and_specs_load_neither_dagster_nor_the_database(tmp_path):
    modules = (
        "agentmesh_dagster.runtime.run_node",
        "agentmesh_dagster.runtime.finish",
        "agentmesh_dagster.validation",
    )
    program = f"import {', '.join(modules)}"
    loaded = loaded_after(program, tmp_path)
    assert loaded.isdisjoint({"dagster", "litellm", "sqlalchemy"})


@pytest.fixture
def project(tmp_path, sqlite_url, monkeypatch):
    with open_project(tmp_path, sqlite_url, monkeypatch) as opened:
        yield opened


WORKFLOW = {
    "kind": "workflow",
    "slug": "sample",
    "nodes": [
        {"id": "start", "type": "start"},
        {"id": "ask", "type": "agent", "config": {"agent": "echo", "prompt": "hi"}},
        {"id": "end", "type": "end"},
    ],
    "edges": [{"source": "start", "target": "ask"}, {"source": "ask", "target": "end"}],
}
ECHO = {"kind": "agent", "slug": "echo", "model": "offline/echo"}


def test_a_code_location_and_a_run_without_real_models_load_no_litellm(project, tmp_path):
    project.publish(ECHO, WORKFLOW)
    program = project.script("sample")
    loaded = loaded_after(program, tmp_path)
    assert "dagster" in loaded
    assert "litellm" not in loaded
    (run,) = project.store.runs.list("default")
    assert run.output["text"] == "hi"


def test_loading_a_code_location_builds_no_job(project, tmp_path):
    project.publish(ECHO, WORKFLOW)
    program = (
        "import runpy\n"
        f"location = runpy.run_path({str(project.folder / 'definitions' / 'code_location_1.py')!r})['location']\n"
        "assert location.job_names == ['sample', 'agentmesh_decide', 'agentmesh_finalize'], location.job_names"
    )
    loaded = loaded_after(program, tmp_path)
    assert "litellm" not in loaded
