"""Where gates wait to be decided: under `agentmesh dev`, and under `dagster dev` with a gate from stock parts."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

import dagster as dg
import yaml

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.records import RunStatus, Vote, WaitStatus
from agentmesh_dagster.store import Store, open_store
from bench import stock_gate
from bench.dev import DevServer, free_port, wait_until
from bench.projects import Project, make_project
from bench.samples import PROJECT

WAITING_S: Final = 900.0
"""How long it may take until all gates wait, on a busy machine."""

Moments = Sequence[tuple[str, float]]
"""What happened between a decision and the next step, and when, in order."""

WORKFLOW: Final[dict[str, Any]] = {
    "kind": "workflow",
    "slug": "bench-gate",
    "nodes": [
        {"id": "start", "type": "start"},
        {"id": "review", "type": "human", "config": {"title": "Go on?"}},
        {"id": "act", "type": "transform", "config": {"output": {"by": "{{ steps.review.output.by }}"}}},
        {"id": "end", "type": "end", "config": {"output": {"done": True}}},
    ],
    "edges": [
        {"source": "start", "target": "review"},
        {"source": "review", "target": "act", "source_handle": "approved"},
        {"source": "act", "target": "end"},
    ],
}
_NEXT_STEP: Final = "act"
_EVENTS: Final = (
    dg.DagsterEventType.RUN_ENQUEUED,
    dg.DagsterEventType.RUN_STARTING,
    dg.DagsterEventType.RUN_START,
)


class Desk(Protocol):
    """Gates that wait, by name, under a server that runs."""

    @property
    def gates(self) -> Sequence[str]:
        """All of them, undecided."""
        ...

    def decide(self, gate: str) -> float:
        """Decides, and gives the moment at which that was committed, in seconds of the epoch."""
        ...

    def began_at(self, gate: str) -> float | None:
        """When the first step after the gate began, in seconds of the epoch; None before."""
        ...

    def is_quiet(self) -> bool:
        """Whether no run is queued or at work."""
        ...

    def moments(self, gate: str) -> Moments:
        """What happened between the decision and the step, in seconds of the epoch; once its run is over."""
        ...


@dataclass(frozen=True)
class AgentMeshDesk:
    """Runs of a workflow that wait at its `human` node."""

    project: Project
    server: DevServer
    store: Store
    waits: Mapping[str, str]
    """The waits by their runs, which name the gates."""

    @property
    def gates(self) -> Sequence[str]:
        return list(self.waits)

    def decide(self, gate: str) -> float:
        vote = Vote(by="bench", decision="approved", at=SystemClock().now())
        self.store.waits.decide(PROJECT, self.waits[gate], vote)
        return time.time()

    def began_at(self, gate: str) -> float | None:
        steps = {step.key: step for step in self.store.runs.steps(gate)}
        step = steps.get(_NEXT_STEP)
        return step.started_at.timestamp() if step and step.started_at else None

    def is_quiet(self) -> bool:
        return self.server.is_quiet()

    def moments(self, gate: str) -> Moments:
        database = self.project.home / "agentmesh.db"
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            claimed, dagster_run_id, bound = connection.execute(
                "SELECT made_at, dagster_run_id, bound_at FROM claims JOIN dagster_runs USING (dagster_run_id) "
                "WHERE claims.run_id = ?",
                (gate,),
            ).fetchone()
        return [
            ("the sensor claims", datetime.fromisoformat(claimed).timestamp()),
            *_dagster_moments(self.project.home, dagster_run_id),
            ("the run is bound", datetime.fromisoformat(bound).timestamp()),
        ]


@dataclass(frozen=True)
class StockDesk:
    """Rows of a table, for which a sensor requests runs of a second job."""

    home: Path
    server: DevServer
    table: sqlite3.Connection
    gates: Sequence[str]

    def decide(self, gate: str) -> float:
        with self.table:
            self.table.execute(
                "UPDATE approvals SET decision = 'approved', decided_at = ? WHERE id = ?", (time.time(), gate)
            )
        return time.time()

    def began_at(self, gate: str) -> float | None:
        return self.table.execute("SELECT began_at FROM approvals WHERE id = ?", (gate,)).fetchone()[0]

    def is_quiet(self) -> bool:
        return self.server.is_quiet()

    def moments(self, gate: str) -> Moments:
        found = self.table.execute("SELECT dagster_run_id FROM approvals WHERE id = ?", (gate,)).fetchone()
        return _dagster_moments(self.home, found[0])


@contextmanager
def agentmesh_desk(folder: Path, gates: int) -> Iterator[AgentMeshDesk]:
    """A new project under `agentmesh dev`, with what `agentmesh init` writes, in which so many runs wait."""
    project = make_project(folder, [WORKFLOW])
    port = free_port()
    with (
        DevServer(
            ["-m", "agentmesh_dagster", "dev", "--port", str(port)],
            port=port,
            cwd=project.root,
            env=project.env,
            log=folder / "dev.log",
        ) as server,
        open_store(f"sqlite:///{project.home / 'agentmesh.db'}") as store,
    ):
        runs = [server.launch("bench_gate", {}) for _ in range(gates)]

        def all_wait() -> bool:
            return server.is_quiet() and all(store.runs.get(run).status is RunStatus.WAITING for run in runs)

        wait_until(f"{gates} runs wait", all_wait, WAITING_S, 0.5)
        waits = store.waits.list(PROJECT, statuses=(WaitStatus.OPEN,), limit=None)
        yield AgentMeshDesk(project, server, store, {wait.run_id: wait.id for wait in waits})


@contextmanager
def stock_desk(folder: Path, gates: int) -> Iterator[StockDesk]:
    """The same with `dagster dev` as it comes. One run asks all questions: that is not what is measured."""
    folder.mkdir()
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n", encoding="utf-8")
    file = folder / "approvals.db"
    port = free_port()
    with (
        DevServer(
            ["-m", "dagster", "dev", "-f", stock_gate.__file__, "-h", "127.0.0.1", "-p", str(port)],
            port=port,
            cwd=folder,
            env={"DAGSTER_HOME": str(folder), "BENCH_APPROVALS": str(file)},
            log=folder / "dev.log",
        ) as server,
        closing(sqlite3.connect(file, timeout=10)) as table,
    ):
        server.launch("before_the_gate", {"ops": {"ask": {"config": {"gates": gates}}}})
        wait_until("the questions are asked", server.is_quiet, WAITING_S, 0.5)
        found = table.execute("SELECT id FROM approvals").fetchall()
        assert len(found) == gates
        yield StockDesk(folder, server, table, [str(row[0]) for row in found])


def launcher_of(project: Project) -> str:
    """The class of the run launcher that the project's `dagster.yaml` names."""
    settings = yaml.safe_load((project.home / "dagster.yaml").read_text(encoding="utf-8"))
    return settings.get("run_launcher", {}).get("class", "Dagster's default launcher")


def _dagster_moments(home: Path, dagster_run_id: str) -> Moments:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        found = {
            entry.dagster_event_type: entry.timestamp
            for entry in instance.all_logs(dagster_run_id, of_type=set(_EVENTS))
        }
    enqueued, starting, began = (found[kind] for kind in _EVENTS)
    return [
        ("Dagster has the run", enqueued),
        ("it leaves the queue", starting),
        ("its process begins", began),
    ]
