"""What the long-living processes of `agentmesh dev` hold does not grow with the runs that they have carried out."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from dagster_server import DevServer, Project, parent_of, wait_until
from fake_http import FakeHttp
from fake_provider import FakeProvider

from agentmesh_dagster.records import RunStatus, WaitStatus
from agentmesh_dagster.store import Store

RUNS = int(os.environ.get("SOAK_RUNS", "300"))
AT_ONCE = 6
SAMPLED_EVERY = 20
WARM_UP = 0.4
"""The share of the runs that fill caches, pools of threads and of connections, and the allocator's arenas."""

# What a run may leave behind, as the slope of a line through the samples after the warm-up.
#
# Memory: what one run writes is some 100 KB (its rows, its Dagster events, its execution plan), so that a process that
# keeps the runs that it has seen grows by more than that. Allocators and SQLite's page caches wander by a few hundred
# KB between samples, which over 180 runs makes a slope of a few KB.
# The others are counted: one leaked with each 20th run is a slope of 0.05. A sample may have one or two more or less
# (a connection of a pool, a sensor's tick under way), which over 180 runs makes a slope of 0.02.
TOLERANCE: Mapping[str, float] = {
    "rss_kb": 20.0,
    "descriptors": 0.03,
    "sockets": 0.03,
    "threads": 0.03,
    "children": 0.03,
    "files": 0.03,
}

DOCUMENTS = """\
kind: agent
slug: writer
model: openai/writer
---
kind: tool
slug: look
type: http
side_effects: false
config: {method: POST, url: "<tools>/json", query: {value: '"seen"'}, json: {of: "{{ input.of }}"}}
---
kind: workflow
slug: short
input_schema: {type: object, required: [of], properties: {of: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: look, type: tool, config: {tool: look, input: {of: "{{ input.of }}"}}}
  - {id: draft, type: agent, config: {agent: writer, prompt: "{{ input.of }}"}}
  - {id: end, type: end, config: {output: "{{ steps.draft.output.text }}"}}
edges:
  - {source: start, target: look}
  - {source: look, target: draft}
  - {source: draft, target: end}
---
kind: workflow
slug: gated
input_schema: {type: object, required: [of], properties: {of: {type: string}}}
nodes:
  - {id: start, type: start}
  - {id: gate, type: human, config: {title: "{{ input.of }}?"}}
  - {id: end, type: end, config: {output: "yes"}}
edges:
  - {source: start, target: gate}
  - {source: gate, source_handle: approved, target: end}
---
kind: workflow
slug: forked
input_schema: {type: object, required: [of], properties: {of: {type: string}}}
settings: {executor: multiprocess}
nodes:
  - {id: start, type: start}
  - {id: look, type: tool, config: {tool: look, input: {of: "{{ input.of }}"}}}
  - {id: end, type: end, config: {output: "{{ steps.look.output }}"}}
edges:
  - {source: start, target: look}
  - {source: look, target: end}
"""

# Each long-living process by what its command line contains.
PROCESSES = {
    "dev": "-m dagster dev",
    "code location": "dagster code-server",
    "code server": "dagster api grpc",
    "webserver": "dagster_webserver",
    "daemon": "dagster._daemon",
    "warm server": "agentmesh_dagster.orchestration.warm_server",
}


@dataclass(frozen=True)
class Sample:
    """What a process holds while no run is at work."""

    rss_kb: int
    descriptors: int
    sockets: int
    threads: int
    children: int
    """The processes that it has started and that live, zombies among them."""

    @staticmethod
    def of(pid: int) -> Sample:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        targets: list[str] = []
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                targets.append(str(descriptor.readlink()))
        return Sample(
            rss_kb=int(status["VmRSS"].split()[0]),
            descriptors=len(targets),
            sockets=sum(target.startswith("socket:") for target in targets),
            threads=int(status["Threads"]),
            children=_children(pid),
        )


def _children(pid: int) -> int:
    found = 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += parent_of(int(path.name)) == pid
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through points that has the least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


class Load:
    """Runs under way on a server, and what its processes hold meanwhile."""

    def __init__(self, server: DevServer, store: Store, folder: Path) -> None:
        self._server, self._store, self._folder = server, store, folder
        self._run_ids: list[str] = []
        self.samples: dict[str, list[tuple[int, float]]] = {}
        """Of each process and what it holds: after how many runs, how much."""
        self.pids: dict[str, set[int]] = {}

    def carry_out(self, until: int) -> None:
        """Brings the number of runs that have ended to `until`."""
        under_way = set(self._run_ids) - self._ended()
        while len(self._run_ids) < until or under_way:
            while len(self._run_ids) < until and len(under_way) < AT_ONCE:
                under_way.add(self._launch(len(self._run_ids)))
            for wait in self._store.waits.list("default", statuses=(WaitStatus.OPEN,)):
                self._server.project.agentmesh("approvals", "approve", wait.id, "--as", "anna")
            under_way -= self._ended()
            time.sleep(0.1)

    def _launch(self, number: int) -> str:
        workflow = "gated" if number % 10 == 4 else "forked" if number % 30 == 7 else "short"
        run_id = self._server.launch(workflow, {"of": f"run {number}"})
        self._run_ids.append(run_id)
        return run_id

    def _ended(self) -> set[str]:
        runs = self._store.runs.list("default", status=[s for s in RunStatus if s.is_final], limit=None)
        return {run.id for run in runs}

    def statuses(self) -> set[RunStatus]:
        return {run.status for run in self._store.runs.list("default", limit=None)}

    def take(self) -> None:
        """Samples all processes, once nothing is at work."""
        wait_until("the workers have ended", self._is_quiet, 60)
        number = len(self._run_ids)
        for name, words in PROCESSES.items():
            (pid,) = self._server.processes(words)
            self.pids.setdefault(name, set()).add(pid)
            sample = Sample.of(pid)
            for field in fields(sample):
                point = (number, float(getattr(sample, field.name)))
                self.samples.setdefault(f"{name}: {field.name}", []).append(point)
        files = sum(1 for _ in self._folder.rglob("*"))
        self.samples.setdefault("temporary: files", []).append((number, float(files)))

    def _is_quiet(self) -> bool:
        return len(self._server.processes(PROCESSES["warm server"])) == 1


def table(samples: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[str, list[str]]:
    """What was sampled as text, and what has grown."""
    lines = [f"{'process':32} {'first':>9} {'warm':>9} {'last':>9} {'a run':>9} {'allowed':>9}"]
    grown: list[str] = []
    for name, points in samples.items():
        warm = [point for point in points if point[0] >= WARM_UP * points[-1][0]]
        growth, allowed = slope(warm), TOLERANCE[name.rpartition(" ")[2]]
        lines.append(
            f"{name:32} {points[0][1]:9.0f} {warm[0][1]:9.0f} {warm[-1][1]:9.0f} {growth:9.3f} {allowed:9.2f}"
        )
        if growth > allowed:
            grown.append(f"{name} grows by {growth:.3f} with each run; {allowed} are allowed")
    return "\n".join(lines), grown


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_long_living_processes_are_flat_over_short_runs(capsys: pytest.CaptureFixture[str]):
    # A short path, for those of sockets are bounded.
    with (
        tempfile.TemporaryDirectory(prefix="f") as root,
        FakeProvider(default={"text": "hello"}) as provider,
        FakeHttp() as tools,
    ):
        folder = Path(root) / "tmp"
        folder.mkdir()
        project = Project.scaffolded(
            Path(root) / "project", AGENTMESH_HTTP_ALLOW="127.0.0.1", TMPDIR=str(folder)
        )
        project.configure(api_base=provider.base_url)
        text = DOCUMENTS.replace("<tools>", tools.url)
        project.publish("short", text)
        with DevServer(project) as server, project.open_store() as store:
            load = Load(server, store, folder)
            # The warm server's successor has loaded LiteLLM.
            load.carry_out(2)
            for until in range(SAMPLED_EVERY, RUNS + 1, SAMPLED_EVERY):
                load.carry_out(until)
                load.take()
                with capsys.disabled():
                    print(f"\n{until} of {RUNS} runs", end="", flush=True)
            assert load.statuses() == {RunStatus.SUCCEEDED}
    shown, grown = table(load.samples)
    with capsys.disabled():
        print(f"\n{shown}\n")
    assert not grown, "\n".join([*grown, shown])
    changed = {name: pids for name, pids in load.pids.items() if len(pids) > 1}
    assert not changed, f"these are not the processes that they were: {changed}"
