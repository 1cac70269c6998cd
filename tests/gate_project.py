"""A project in one process: workflows that wait, a code location, a Dagster instance, and ticks of the gate sensor."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.orchestration.code_location import build_code_location
from agentmesh_dagster.orchestration.gate_sensor import GateSensor
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.records import Run, RunStatus, Vote, Wait, WaitStatus
from agentmesh_dagster.store import Store
from agentmesh_dagster.testing import _opened, publish_documents

GATED = """\
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: review, type: human, config: {{title: "Go on?", {more}}}}}
  - {{id: end, type: end, config: {{output: {{version: {version}}}}}}}
edges:
  - {{source: start, target: review}}
  - {{source: review, target: end, source_handle: approved}}
"""

UNGATED = """\
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: end, type: end, config: {{output: {{version: {version}}}}}}}
edges:
  - {{source: start, target: end}}
"""


class LaterClock(SystemClock):
    """The machine's clock, put forward by the test."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + self.ahead

    def advance(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)


@dataclass
class GateProject:
    """See the module."""

    agentmesh: AgentMesh
    instance: dg.DagsterInstance
    clock: LaterClock = field(default_factory=LaterClock)

    @property
    def store(self) -> Store:
        return self.agentmesh.store()

    def publish(self, *, version: int = 1, more: str = "", text: str = GATED) -> int:
        (publication,) = publish_documents(self.store, text.format(version=version, more=more))
        return publication.id

    def load(self, **options: Any) -> dg.RepositoryDefinition:
        """The code location, as a code server loads it now."""
        sensor = GateSensor(self.agentmesh, clock=self.clock, **options)
        return build_code_location(self.agentmesh, sensors=[sensor], default_executor=dg.in_process_executor)

    def run(
        self,
        location: dg.RepositoryDefinition,
        job: str = "gated",
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Run:
        """Executes a job of the location, and gives the run that it worked on."""
        result = location.get_job(job).execute_in_process(
            instance=self.instance, tags=dict(tags or {}), run_config=dict(config or {}), raise_on_error=False
        )
        return self.store.runs.get(result.run_id)

    def run_request(self, location: dg.RepositoryDefinition, request: dg.RunRequest) -> Run:
        """Executes what a tick requested."""
        assert request.job_name is not None
        return self.run(location, request.job_name, request.tags, request.run_config)

    def waiting(self, location: dg.RepositoryDefinition, **options: Any) -> Run:
        """A run that waits at its gate."""
        run = self.run(location, **options)
        assert run.status is RunStatus.WAITING
        return run

    def gate(self, run: Run) -> Wait:
        (wait,) = self.store.waits.list(run.project, run_id=run.id, statuses=(WaitStatus.OPEN,))
        return wait

    def decide(self, run: Run, decision: str = "approved") -> None:
        vote = Vote(by="ann", decision=decision, at=self.clock.now())
        self.store.waits.decide(run.project, self.gate(run).id, vote)

    def tick(self, location: dg.RepositoryDefinition) -> Tick:
        """One tick of the location's gate sensor, as the code server evaluates it for the daemon."""
        context = dg.build_sensor_context(instance=self.instance, repository_def=location)
        data = location.get_sensor_def("agentmesh_gates").evaluate_tick(context)
        return Tick(requests=list(data.run_requests or ()), skipped=data.skip_message or "")

    def settled(self, location: dg.RepositoryDefinition) -> list[str]:
        """Runs what the gate sensor asks for until it asks for nothing more; the jobs in their order."""
        jobs: list[str] = []
        while requests := self.tick(location).requests:
            for request in requests:
                assert request.job_name is not None
                jobs.append(request.job_name)
                location.get_job(request.job_name).execute_in_process(
                    instance=self.instance,
                    tags=dict(request.tags),
                    run_config=dict(request.run_config or {}),
                    raise_on_error=False,
                )
        return jobs


@dataclass
class Tick:
    """What a tick came to."""

    requests: Sequence[dg.RunRequest]
    skipped: str


def launched(project: GateProject, request: dg.RunRequest, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    """What the daemon makes of a request, without executing it."""
    assert request.job_name is not None
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("agentmesh"), "__repository__")
    return project.instance.create_run_for_job(
        project.load().get_job(request.job_name),
        run_config=dict(request.run_config),
        tags=dict(request.tags),
        status=status,
        remote_job_origin=RemoteJobOrigin(repository, request.job_name),
    )


@contextmanager
def gate_project(database_url: str, folder: Path, settings: str = "") -> Generator[GateProject]:
    """A project.

    Args:
        database_url: Its database.
        folder: For the Dagster instance.
        settings: More of the `dagster.yaml`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{settings}")
    with (
        _opened(database_url, ("workflow_functions",)) as agentmesh,
        dg.DagsterInstance.from_config(str(folder)) as instance,
    ):
        yield GateProject(agentmesh=agentmesh, instance=instance)
