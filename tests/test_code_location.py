"""The repository's own code location, loaded as Dagster's command line and run workers load it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from dagster_server import Project

from agentmesh_dagster.records import RunSource, RunStatus

ROOT = Path(__file__).resolve().parent.parent

TICKET = """\
subject: Charged twice
body: My card was charged twice for one order.
customer:
  name: Ada
  tier: premium
"""

# As a run worker does it: the repository by its file, then its own job.
LOAD = """\
import json, sys
from agentmesh_dagster.orchestration import code_location
from dagster._core.definitions.reconstruct import ReconstructableRepository

built = []
build = code_location.build_published_job

def counted(publication, **rest):
    built.append(publication.slug)
    return build(publication, **rest)

code_location.build_published_job = counted
repository = ReconstructableRepository.for_file(sys.argv[1], "location", sys.argv[2])
names = sorted(repository.get_definition().job_names)
after_listing = list(built)
job = repository.get_reconstructable_job("support_triage").get_definition()
print(json.dumps({
    "names": names,
    "after_listing": after_listing,
    "built": built,
    "job": job.name,
    "litellm": sorted(name for name in sys.modules if name.partition(".")[0] == "litellm"),
}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The repository as project, with its packs in a database of its own."""
    folder = tmp_path_factory.mktemp("home")
    project = Project(
        ROOT, {"DAGSTER_HOME": str(folder), "AGENTMESH_DATABASE_URL": f"sqlite:///{folder / 'packs.db'}"}
    )
    (folder / "ticket.yaml").write_text(TICKET)
    project.agentmesh("import", "packs/support_triage", "packs/data_quality", "--publish")
    return project


@pytest.mark.parametrize("absolute", [False, True])
def test_dagster_validates_the_workspace_from_anywhere(home: Project, absolute: bool):
    file, cwd = (str(ROOT / "workspace.yaml"), Path("/")) if absolute else ("workspace.yaml", ROOT)

    done = home.command("dagster", "definitions", "validate", "-w", file, cwd=cwd)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Validation successful" in done.stdout + done.stderr


@pytest.mark.parametrize("absolute", [False, True])
def test_dagster_executes_a_job_from_anywhere(home: Project, absolute: bool):
    file, cwd = (ROOT / "definitions", Path("/")) if absolute else (Path("definitions"), ROOT)
    ticket = str(Path(home.environment["DAGSTER_HOME"], "ticket.yaml"))
    with home.open_store() as store:
        before = {run.id for run in store.runs.list("default", limit=None)}

    done = home.command(
        "dagster",
        "job",
        "execute",
        "-f",
        str(file / "code_location.py"),
        "-j",
        "support_triage",
        "-c",
        ticket,
        cwd=cwd,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    with home.open_store() as store:
        (run,) = [run for run in store.runs.list("default", limit=None) if run.id not in before]
        live = store.publications.live_one("default", "workflow", "support-triage")
    assert live is not None
    assert run.status is RunStatus.SUCCEEDED
    assert run.source is RunSource.CLI
    assert (run.version, run.publication) == (live.version, live.id)
    assert run.input["customer"] == {"name": "Ada", "tier": "premium"}
    assert run.output["outcome"] == "answered"


def test_dagster_refuses_a_config_that_lacks_a_field_and_names_it(home: Project, tmp_path: Path):
    (tmp_path / "ticket.yaml").write_text("subject: Charged twice\n")
    options = ("-j", "support_triage", "-c", str(tmp_path / "ticket.yaml"))

    done = home.command("dagster", "job", "execute", "-f", "definitions/code_location.py", *options)

    assert done.returncode != 0
    assert 'Missing required config entry "body"' in done.stdout + done.stderr


def test_a_run_worker_builds_its_own_job_alone_and_imports_no_litellm(home: Project):
    file = str(ROOT / "definitions" / "code_location.py")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, file, str(ROOT)],
        cwd="/",
        env=home.environ,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["names"] == [
        "agentmesh_decide",
        "agentmesh_finalize",
        "data_quality_report",
        "support_triage",
    ]
    assert seen["after_listing"] == []
    assert seen["built"] == ["support-triage"]
    assert seen["job"] == "support_triage"
    assert seen["litellm"] == []


def test_a_new_project_loads_and_its_files_are_never_overwritten(tmp_path: Path):
    project = Project.scaffolded(tmp_path / "project")
    # Nothing is published yet, and there is no database.
    done = project.command(
        "dagster", "definitions", "validate", "-w", str(project.folder / "workspace.yaml"), cwd=Path("/")
    )
    assert done.returncode == 0, done.stdout + done.stderr

    settings = project.folder / ".agentmesh" / "dagster.yaml"
    assert dg.DagsterInstance.from_config(str(settings.parent)).get_settings("telemetry") == {
        "enabled": False
    }
    settings.write_text("# mine\n")
    again = project.command("agentmesh_dagster", "init", str(project.folder))
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert settings.read_text() == "# mine\n"


def test_a_database_that_cannot_be_reached_is_said_in_the_load_error(tmp_path: Path):
    url = "postgresql://nobody:secret-word@127.0.0.1:1/agentmesh"
    project = Project(ROOT, {"DAGSTER_HOME": str(tmp_path), "AGENTMESH_DATABASE_URL": url})

    done = project.command("dagster", "definitions", "validate", "-w", "workspace.yaml")

    shown = done.stdout + done.stderr
    assert done.returncode != 0
    assert "127.0.0.1" in shown
    assert "secret-word" not in shown
