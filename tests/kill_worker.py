"""Worker processes of the kill matrix, forked from this one, which has imported what they need.

    python tests/kill_worker.py

It reads jobs as lines of JSON, `{"phase", "arguments", "environment", "folder", "log", "event_group_s"}`, and answers
each with two lines: the process's id, and how it ended, as `subprocess` would say it (-9: killed). A worker is a
process as `agentmesh run` would be one: nothing is handed over but the environment and the files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import dagster as dg
from kill_cases import ORDER

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.constants import TAG_SOURCE
from agentmesh_dagster.faults import arm_from_environment
from agentmesh_dagster.llm.litellm_client import preload
from agentmesh_dagster.orchestration import event_groups
from agentmesh_dagster.orchestration.continuation import (
    check_retryable,
    continue_here,
    pinned_job,
    resume_here,
)
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.local_run import run_here
from agentmesh_dagster.orchestration.run_tags import RESUME_RETRY_TAG
from agentmesh_dagster.records import RunSource, Vote

BY = "matrix"


class LaterClock(SystemClock):
    """The machine's clock, so many seconds ahead: leases and claims of killed processes have run out."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead = timedelta(seconds=ahead_s)

    def now(self) -> datetime:
        return super().now() + self._ahead


def start(publication_id: int) -> None:
    """Launches the workflow."""
    agentmesh = AgentMesh.of_project()
    job = pinned_job(Path.cwd(), agentmesh.store().publications.get(publication_id))
    with dg.DagsterInstance.get() as instance:
        run_here(
            agentmesh,
            job,
            {"order": ORDER},
            instance=instance,
            tags={TAG_SOURCE: RunSource.CLI.value, "user": BY},
        )


def retry(run_id: str) -> None:
    """Goes on with a failed run."""
    agentmesh = AgentMesh.of_project()
    store = agentmesh.store()
    with dg.DagsterInstance.get() as instance:
        run = check_retryable(store, instance, store.runs.get(run_id))
        job = pinned_job(Path.cwd(), store.publications.get(run.publication))
        continue_here(agentmesh, job, run, instance=instance, by=BY)


def rerun(run_id: str) -> None:
    """Goes on with a failed run as Dagster's own retry does: with the steps that Dagster chooses."""
    agentmesh = AgentMesh.of_project()
    store = agentmesh.store()
    with dg.DagsterInstance.get() as instance:
        run = check_retryable(store, instance, store.runs.get(run_id))
        last = run.dagster_run_ids[-1]
        parent = instance.get_run_by_id(last)
        assert parent is not None
        dg.execute_job(
            pinned_job(Path.cwd(), store.publications.get(run.publication)),
            instance=instance,
            run_config=dict(parent.run_config),
            tags={**parent.tags, RESUME_RETRY_TAG: "true"},
            raise_on_error=False,
            reexecution_options=dg.ReexecutionOptions.from_failure(last, instance),
        )


def decide(wait_id: str, decision: str, data: Any) -> None:
    """Decides an approval."""
    agentmesh = AgentMesh.of_project()
    vote = Vote(by="grace", decision=decision, data=data, at=SystemClock().now())
    agentmesh.store().waits.decide(agentmesh.project, wait_id, vote)


def resume(run_id: str, ahead_s: float) -> None:
    """Claims a run whose gate is decided, and goes on with it."""
    agentmesh = AgentMesh.of_project()
    store = agentmesh.store()
    run = store.runs.get(run_id)
    job = pinned_job(Path.cwd(), store.publications.get(run.publication))
    with dg.DagsterInstance.get() as instance:
        claim = store.claims.claim(run_id, reason="gate", now=LaterClock(ahead_s).now())
        assert claim is not None, f"run {run_id} cannot be claimed: {store.runs.get(run_id)}"
        resume_here(agentmesh, job, run, instance=instance, claim=claim, by=BY)


PHASES: dict[str, Callable[..., None]] = {
    "start": start,
    "retry": retry,
    "rerun": rerun,
    "decide": decide,
    "resume": resume,
}


def _work(job: dict[str, Any], imported: int) -> NoReturn:
    code = 1
    known = set(sys.modules)
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        arm_from_environment()
        event_groups.EVENT_GROUP_S = job["event_group_s"]
        PHASES[job["phase"]](**job["arguments"])
        os.write(imported, "\n".join(sys.modules.keys() - known).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must not go on into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import(names: list[str]) -> None:
    """What a worker had to import is there for those that come after it."""
    for name in sorted(names):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def main() -> None:
    preload()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _work(job, writer)
        os.close(writer)
        print(child, flush=True)
        with os.fdopen(reader) as imported:
            names = imported.read().split()
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _import(names)
        print(ended, flush=True)


if __name__ == "__main__":
    main()
