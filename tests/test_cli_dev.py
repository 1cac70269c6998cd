"""What the command line asks of a running Dagster: canceling what it launched, and loading what was published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_project import FLAKY, FLAKY_CODE
from dagster_server import DevServer, Project, wait_until

ROOT = Path(__file__).resolve().parent.parent


def command(project: Project, *args: str, **environment: str) -> tuple[int, Any]:
    """A command with `--json`: its exit code, and what it printed."""
    in_it = Project(project.folder, {**project.environment, **environment})
    done = in_it.command("agentmesh_dagster", *args, "--json")
    return done.returncode, json.loads(done.stdout or done.stderr)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    project = Project.scaffolded(folder, PYTHONPATH=path, AGENTMESH_FUNCTION_MODULES="flaky_code")
    (folder / "flaky_code.py").write_text(FLAKY_CODE)
    project.publish("flaky", FLAKY)
    return project


def test_runs_that_dagster_launched_are_canceled_and_go_on_with_a_retry(project: Project):
    held = project.folder / "held"
    (project.folder / "hold").touch()
    with DevServer(project) as server:
        canceled: list[str] = []
        for environment in ({}, {"AGENTMESH_DAGSTER_URL": server.url}):
            run_id = server.launch("flaky", {})
            wait_until("the run is at its second node", held.exists)
            code, ended = command(project, "runs", "cancel", run_id, **environment)
            assert (code, ended.get("status"), ended.get("asked")) == (0, "canceled", True)
            assert server.wait_for_end(run_id) == "CANCELED"
            canceled.append(run_id)
            held.unlink()

        local = subprocess.Popen(
            [sys.executable, "-m", "agentmesh_dagster", "run", "workflow", "flaky"],
            cwd=project.folder,
            env=project.environ,
            stdout=subprocess.DEVNULL,
        )
        wait_until("the local run is at its second node", held.exists)
        [at_work] = command(project, "runs", "list", "--status", "running")[1]
        code, ended = command(project, "runs", "cancel", at_work["run_id"], AGENTMESH_DAGSTER_URL=server.url)
        assert (code, ended["status"], ended["asked"]) == (0, "canceled", True)
        assert local.wait(60) == 1

        (project.folder / "mended").touch()
        (project.folder / "hold").unlink()
        code, published = command(project, "publish", "workflow", "flaky", AGENTMESH_DAGSTER_URL=server.url)
        assert (code, published["reloaded"]) == (0, True)

        code, ran = command(project, "runs", "retry", canceled[0])
        assert (code, ran["run_id"], ran["status"]) == (0, canceled[0], "succeeded")
        assert {step["key"]: step["replayed"] for step in ran["steps"]}["first"] is True
    # Three runs called it once each; the retry replayed it.
    assert (project.folder / "calls").read_text() == "xxx"
