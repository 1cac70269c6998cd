"""A project in a temporary folder with a Dagster instance, for runs through the real executors."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext
from workflow_functions import note  # noqa: F401 - the functions must be importable where a project is used

from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.local_run import reconstructable_job
from agentmesh_dagster.testing import publish_documents

TESTS = Path(__file__).parent
CODE_LOCATION = """\
from agentmesh_dagster import AgentMesh, Endpoint, build_code_location
from agentmesh_dagster.deployment import Deployment

location = build_code_location(
    AgentMesh(
        database_url={url!r},
        function_modules=("workflow_functions",),
        lease_s={lease_s!r},
        deployment=Deployment.of(endpoints={{"openai": Endpoint(api_base={api_base!r}, api_key={api_key!r})}}),
    )
)
"""
WORKSPACE = "load_from: [{{python_file: {{relative_path: definitions/code_location_{number}.py}}}}]\n"


class Project:
    """Publishes documents and runs them through Dagster on a persistent instance."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        instance: dg.DagsterInstance,
        lease_s: float = 60.0,
        api_base: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self.folder = folder
        self.instance = instance
        self.agentmesh = AgentMesh(
            database_url=database_url, function_modules=("workflow_functions",), lease_s=lease_s
        )
        self.api_base, self.api_key = api_base, api_key
        """Where the models of `openai/` are."""
        self._locations = 0

    @property
    def store(self):
        return self.agentmesh.store()

    def publish(self, *documents):
        """Publishes, and writes a fresh code location: Dagster keeps one that it has loaded.

        And what it handed over to a run stays in the process: cleared, as a new process would find it.
        """
        DefinitionsLoadContext._instance = None
        published = publish_documents(self.store, list(documents))
        self._locations += 1
        text = CODE_LOCATION.format(
            url=self.agentmesh.database_url,
            lease_s=self.agentmesh.lease_s,
            api_base=self.api_base,
            api_key=self.api_key,
        )
        (self.folder / "definitions").mkdir(exist_ok=True)
        (self.folder / "definitions" / f"code_location_{self._locations}.py").write_text(text)
        (self.folder / "workspace.yaml").write_text(WORKSPACE.format(number=self._locations))
        return published

    def job(self, slug):
        return reconstructable_job(self.folder, 0, slug)

    def execute(self, slug, input=None, **options):
        options.setdefault("raise_on_error", False)
        return dg.execute_job(self.job(slug), instance=self.instance, run_config=input or {}, **options)

    def retry(self, slug, parent, **options):
        """What 'Re-execute from failure' in Dagster's UI does: Dagster's choice of steps, and its tag."""
        tags = {"dagster/is_resume_retry": "true", "dagster/parent_run_id": parent, **options.pop("tags", {})}
        return self.execute(
            slug,
            self.instance.get_run_by_id(parent).run_config,
            reexecution_options=dg.ReexecutionOptions.from_failure(parent, self.instance),
            tags=tags,
            **options,
        )

    def run_row(self, run_id):
        return self.store.runs.get(run_id)

    def steps(self, run_id):
        return {step.key: step for step in self.store.runs.steps(run_id)}

    def events(self, run_id):
        return [(event.type, event.step_key) for event in self.store.runs.events(run_id)]

    def step_error(self, run_id, step_key="start"):
        """What Dagster's run page says of a failed step."""
        for entry in self.instance.all_logs(run_id):
            event = entry.dagster_event
            if event and event.event_type_value == "STEP_FAILURE" and event.step_key == step_key:
                return event.step_failure_data.user_failure_data
        return None

    def script(self, slug, input=None):
        """The text of a program that executes the workflow in a process of its own."""
        return textwrap.dedent(
            f"""
            import sys
            sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
            from pathlib import Path
            import dagster as dg
            from agentmesh_dagster.orchestration.local_run import reconstructable_job

            job = reconstructable_job(Path({str(self.folder)!r}), 0, {slug!r})
            with dg.DagsterInstance.get() as instance:
                dg.execute_job(job, instance=instance, run_config={input or {}!r}, raise_on_error=False)
            """
        )


@contextmanager
def open_project(
    folder: Path,
    database_url: str,
    monkeypatch,
    lease_s: float = 60.0,
    api_base: str | None = None,
    api_key: str | None = None,
) -> Iterator[Project]:
    home = folder / "dagster-home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("WORKFLOW_NOTES", str(folder / "notes"))
    # The processes of runs import the functions and the package from here.
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with dg.DagsterInstance.get() as instance:
        yield Project(folder, database_url, instance, lease_s, api_base, api_key)
