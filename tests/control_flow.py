"""Documents with containers, in few words, and runs of them in which each node is an op, or all are walked in one."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg

from agentmesh_dagster.constants import TAG_CLAIM
from agentmesh_dagster.orchestration.code_location import build_published_job, named_executors
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.records import Json, Run, Step, Wait
from agentmesh_dagster.runtime.loop import cancel_running
from agentmesh_dagster.store import Store
from agentmesh_dagster.testing import (
    Answer,
    WorkflowResult,
    _opened,
    publish_documents,
    run_workflow,
)

EXECUTIONS = ("dagster", "inline")
FUNCTIONS = ("workflow_functions", "flow_functions")
SLUG = "sample"

Document = dict[str, Any]
Node = dict[str, Any]


def edge(source: str, target: str, handle: str | None = None, condition: str | None = None) -> Document:
    found = {"source": source, "target": target, "source_handle": handle, "condition": condition}
    return {name: value for name, value in found.items() if value is not None}


def node(id: str, type: str, config: Document, **more: Any) -> Node:
    return {"id": id, "type": type, "config": config, **more}


def transform(id: str, output: Json = None, **more: Any) -> Node:
    return node(id, "transform", {"output": id if output is None else output}, **more)


def code(
    id: str, function: str, *, module: str = "workflow_functions", more: Document | None = None, **input: Json
) -> Node:
    return node(id, "code", {"function": f"{module}:{function}", "input": input}, **(more or {}))


def note(id: str, name: str | None = None, value: Json = None, **more: Any) -> Node:
    """A node that leaves a line each time it runs, and gives a value."""
    return code(id, "note", name=name or id, value=id if value is None else value, more=more)


def fail(id: str = "bad", message: str = "no luck", **more: Any) -> Node:
    return code(id, "fail", message=message, more=more)


def gate(id: str = "ask", title: str = "Go on?", **more: Any) -> Node:
    return node(id, "human", {"title": title}, **more)


def body(*nodes: Node, edges: Sequence[Document] | None = None) -> Document:
    """Nodes one after the other, unless edges are given."""
    chained = [edge(a["id"], b["id"]) for a, b in itertools.pairwise(nodes)]
    return {"nodes": list(nodes), "edges": chained if edges is None else list(edges)}


def parallel(
    id: str = "both", wait: Json = "all", more: Document | None = None, **branches: Document
) -> Node:
    return node(id, "parallel", {"branches": branches, "wait": wait}, **(more or {}))


def foreach(id: str, items: Json, body: Document, more: Document | None = None, **config: Json) -> Node:
    return node(id, "foreach", {"items": items, "body": body, **config}, **(more or {}))


def loop(
    id: str, body: Document, more: Document | None = None, max_iterations: int = 10, **config: Json
) -> Node:
    return node(id, "loop", {"body": body, "max_iterations": max_iterations, **config}, **(more or {}))


def call(id: str, workflow: str, more: Document | None = None, **config: Json) -> Node:
    return node(id, "workflow", {"workflow": workflow, **config}, **(more or {}))


def workflow(
    nodes: Sequence[Node], edges: Sequence[Document], *, slug: str = SLUG, output: Json = None, **more: Any
) -> Document:
    """A workflow with `start`, and with the one end `done`."""
    end = node("done", "end", {} if output is None else {"output": output})
    return {
        "kind": "workflow",
        "slug": slug,
        "nodes": [{"id": "start", "type": "start"}, *nodes, end],
        "edges": list(edges),
        **more,
    }


def chain(*nodes: Node, **more: Any) -> Document:
    """A workflow of nodes one after the other."""
    names = ["start", *(node["id"] for node in nodes), "done"]
    return workflow(nodes, [edge(a, b) for a, b in itertools.pairwise(names)], **more)


def run(
    document: Document,
    input: Json = None,
    *others: Document,
    execution: str = "dagster",
    answers: Callable[[Wait], Answer | None] | None = None,
    **options: Any,
) -> WorkflowResult:
    """Runs the document, which may call the others."""
    settings = {**document.get("settings", {}), "execution": execution}
    return run_workflow(
        [*others, {**document, "settings": settings}],
        input,
        slug=document["slug"],
        function_modules=FUNCTIONS,
        answers=answers,
        **options,
    )


def statuses(result: WorkflowResult) -> dict[str, str]:
    return {key: step.status.value for key, step in result.steps.items()}


def approve(_wait: Wait) -> Answer:
    return Answer(decision="approved", by="ann", data={})


class Job:
    """A published workflow whose runs are continued as the gate sensor would, or canceled in the middle."""

    def __init__(self, agentmesh: AgentMesh, definition: dg.JobDefinition) -> None:
        self._agentmesh = agentmesh
        self._definition = definition
        self._instance = dg.DagsterInstance.ephemeral()

    @property
    def store(self) -> Store:
        return self._agentmesh.store()

    def execute(self, input: Json = None, tags: dict[str, str] | None = None) -> Run:
        result = self._definition.execute_in_process(
            run_config=dict(input or {}), raise_on_error=False, tags=tags, instance=self._instance
        )
        return self.store.runs.get(result.run_id)

    def resume(self, run: Run) -> Run:
        """Goes on with a run that failed, was canceled, or waits for what has come."""
        claim = self.store.claims.claim(run.id, reason="resume")
        assert claim is not None
        self.execute(run.input, {TAG_CLAIM: claim.id})
        return self.store.runs.get(run.id)

    def canceled(self, input: Json, when: Callable[[], bool]) -> Run:
        """A run whose process is asked to stop, as an executor is, once `when` holds."""
        seen: list[bool] = []

        def cancel() -> None:
            deadline = time.monotonic() + 30
            while not when() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(when())
            [at_work] = self._instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
            self._instance.report_run_canceling(at_work)
            cancel_running(0)

        thread = threading.Thread(target=cancel)
        thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            self.execute(input)
        thread.join(30)
        assert seen == [True]
        [stopped] = self._instance.get_runs()
        return self.store.runs.get(stopped.run_id)

    def steps(self, run: Run) -> dict[str, Step]:
        return {step.key: step for step in self.store.runs.steps(run.id)}

    def statuses(self, run: Run) -> dict[str, str]:
        return {key: step.status.value for key, step in self.steps(run).items()}


@contextmanager
def opened_job(
    document: Document, *others: Document, execution: str = "dagster", url: str | None = None
) -> Generator[Job]:
    """Publishes a workflow in a database of its own, or in that of the URL."""
    settings = {**document.get("settings", {}), "execution": execution}
    with _opened(url, FUNCTIONS) as agentmesh:
        published = publish_documents(agentmesh.store(), [*others, {**document, "settings": settings}])
        publication = next(p for p in published if p.slug == document["slug"])
        job = build_published_job(publication, resource=agentmesh.resource(), executors=named_executors())
        opened = Job(agentmesh, job)
        with opened._instance:
            yield opened
