"""Runs of inline workflows through the runtime's own pieces, without Dagster's start-up around them.

What happens here is what the op of an inline workflow does in a run worker: the process's environment with the real
journal, a session of the run with its lease, the walk, the end of the run.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentmesh_dagster.compiler.snapshot import construct_pinned
from agentmesh_dagster.orchestration.host import AgentMesh, build_environment
from agentmesh_dagster.records import RunStatus, StepStatus
from agentmesh_dagster.runtime.loop import run_on_loop
from agentmesh_dagster.runtime.nested import run_inline
from agentmesh_dagster.runtime.opening import Launch, open_session
from bench import functions
from bench.measure import Times
from bench.projects import STATE_DATABASE, make_project, temporary_folder

Document = dict[str, Any]


@dataclass(frozen=True)
class Walked:
    """The times of one run."""

    run_id: str
    whole: Times
    """From the opening of its session to its close, as the thread of the op waits for it."""
    walk: Times
    """The walk with the end of the run, and nothing else."""


class Walks:
    """Runs the workflows of a project, which are of one process and one database."""

    def __init__(self, root: Path, publications: dict[str, int]) -> None:
        self._agentmesh = AgentMesh(
            database_url=f"sqlite:///{root / STATE_DATABASE}",
            root=root,
            function_modules=(functions.__name__,),
        )
        self._environment = build_environment(self._agentmesh)
        self._pinned = {
            slug: construct_pinned(self._agentmesh.store().publications.get(number))
            for slug, number in publications.items()
        }

    def run(
        self, slug: str, input: Document | None = None, *, profile: cProfile.Profile | None = None
    ) -> Walked:
        """One new run, on the process's loop.

        Args:
            slug: The workflow.
            input: Of the run.
            profile: Is on while the loop's thread walks.

        Raises:
            RuntimeError: The run did not succeed.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        run_id, walk = run_on_loop(self._walk(slug, input or {}, profile))
        return Walked(run_id, Times(time.perf_counter() - wall, time.process_time() - cpu), walk)

    async def _walk(self, slug: str, input: Document, profile: cProfile.Profile | None) -> tuple[str, Times]:
        run_id = str(uuid4())
        session = await open_session(
            self._environment, self._pinned[slug], Launch(dagster_run_id=run_id), input
        )
        try:
            with session.at_work():
                wall, cpu = time.perf_counter(), time.process_time()
                if profile is not None:
                    profile.enable()
                try:
                    end = await run_inline(session, _unheard)
                finally:
                    if profile is not None:
                        profile.disable()
                walk = Times(time.perf_counter() - wall, time.process_time() - cpu)
        finally:
            await session.close()
        if end.status is not RunStatus.SUCCEEDED:
            raise RuntimeError(f"the run of {slug!r} is {end.status.value}: {end.error}")
        return run_id, walk

    def rows(self, run_id: str) -> int:
        """How many finished rows the journal has of a run."""
        steps = self._agentmesh.store().runs.steps(run_id)
        return sum(step.status is StepStatus.SUCCEEDED for step in steps)

    def close(self) -> None:
        """Closes the database."""
        self._agentmesh.store().close()


@contextmanager
def prepared_walks(workflows: Sequence[Document]) -> Iterator[Walks]:
    """A temporary project in which these workflows are published, to be walked in this process."""
    with temporary_folder() as folder:
        project = make_project(folder / "project", [inline(workflow) for workflow in workflows])
        walks = Walks(project.root, project.publications)
        try:
            yield walks
        finally:
            walks.close()


def inline(workflow: Document) -> Document:
    """The same workflow, as one op."""
    return {**workflow, "settings": {**workflow.get("settings", {}), "execution": "inline"}}


def _unheard(line: str) -> None:
    """Takes the lines of the step log: writing them is Dagster's work."""
