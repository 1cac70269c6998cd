"""One workflow run twice: each node an op that Dagster runs, and all nodes walked in one op."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from zlib import crc32

import dagster as dg

from agentmesh_dagster.compiler.job import build_job
from agentmesh_dagster.constants import TAG_CLAIM
from agentmesh_dagster.orchestration.code_location import named_executors
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.records import Json, Run, RunStatus, Step, Vote, WaitStatus
from agentmesh_dagster.runtime.registry import node_types
from agentmesh_dagster.runtime.session import Pinned
from agentmesh_dagster.specs.documents import document_model
from agentmesh_dagster.specs.resolve import DocumentLibrary, resolve_closure
from agentmesh_dagster.testing import _opened

Document = dict[str, Any]

DECIDED_AT = datetime(2026, 1, 1, tzinfo=timezone.utc)
MAX_CONTINUATIONS = 100


@dataclass(frozen=True)
class Journal:
    """What a run left behind."""

    run: Run
    steps: dict[str, Step]
    continuations: int
    """How often it went on after all its open gates were decided."""
    is_ready: bool
    """Whether it asks for one more."""


class TwinRuns:
    """Runs documents as they are, without validation, on one store and one Dagster instance."""

    def __init__(self, agentmesh: AgentMesh, instance: dg.DagsterInstance) -> None:
        self._agentmesh = agentmesh
        self._instance = instance

    def run(self, documents: Sequence[Document], slug: str, input: Json) -> tuple[Journal, Journal]:
        """The journals of a run by Dagster and of one by the walker."""
        by_dagster, by_walker = (
            self.journal(documents, slug, input, execution) for execution in ("dagster", "inline")
        )
        return by_dagster, by_walker

    def journal(self, documents: Sequence[Document], slug: str, input: Json, execution: str) -> Journal:
        """The journal of a run."""
        job = build_job(
            pinned_of([_executed(d, execution) if d["slug"] == slug else d for d in documents], slug),
            node_types=node_types(),
            resource=self._agentmesh.resource(),
            executors=named_executors(),
        )
        result = job.execute_in_process(run_config=input, instance=self._instance, raise_on_error=False)
        store = self._agentmesh.store()
        run = store.runs.get(result.run_id)
        continuations = 0
        while run.status is RunStatus.WAITING and self._decided(run):
            claim = store.claims.claim(run.id, reason="resume")
            assert claim is not None
            tags = {TAG_CLAIM: claim.id}
            job.execute_in_process(run_config=input, instance=self._instance, raise_on_error=False, tags=tags)
            continuations += 1
            assert continuations <= MAX_CONTINUATIONS
            run = store.runs.get(run.id)
        steps = {step.key: step for step in store.runs.steps(run.id)}
        return Journal(run, steps, continuations, store.claims.is_ready(run.id))

    def _decided(self, run: Run) -> bool:
        """Decides all open gates of a run, each by its step key; tells whether there were any."""
        waits = self._agentmesh.store().waits
        open_waits = waits.list(run.project, run_id=run.id, statuses=(WaitStatus.OPEN,), limit=1000)
        for wait in open_waits:
            decision = "approved" if crc32(wait.step_key.encode()) % 3 else "rejected"
            waits.decide(run.project, wait.id, Vote(by="ann", decision=decision, at=DECIDED_AT))
        return bool(open_waits)


def _executed(document: Document, execution: str) -> Document:
    return {**document, "settings": {**document.get("settings", {}), "execution": execution}}


def pinned_of(documents: Sequence[Document], slug: str) -> Pinned:
    """What a run of the workflow would be pinned to, if the documents were published."""
    specs = [document_model(document["kind"]).model_validate(document) for document in documents]
    root = next(spec for spec in specs if spec.slug == slug)
    closure = resolve_closure(root, 1, DocumentLibrary(specs))
    return Pinned(
        project="default",
        kind="workflow",
        slug=slug,
        version=1,
        publication=1,
        definition_hash=closure.hash(),
        closure=closure,
    )


@contextmanager
def twin_runs(function_modules: tuple[str, ...]) -> Generator[TwinRuns]:
    """A store and an instance, for as many runs as it takes."""
    with _opened(None, function_modules) as agentmesh, dg.DagsterInstance.ephemeral() as instance:
        # Nobody reads Dagster's events here, and to keep them takes a third of the time.
        instance.event_log_storage.store_event = _forget
        yield TwinRuns(agentmesh, instance)


def _forget(_event: dg.EventLogEntry) -> None:
    return
