"""Temporary projects with workflows to measure, and Dagster homes for the baseline."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.scaffold import scaffold, write_dagster_yaml
from agentmesh_dagster.settings import STATE_FOLDER
from agentmesh_dagster.store import open_store

STATE_DATABASE = f"{STATE_FOLDER}/agentmesh.db"
"""Where a project's database is, in its folder."""

_FOREIGN = ("AGENTMESH_DATABASE_URL", "AGENTMESH_PROJECT", "AGENTMESH_CONSOLE_LOG_LEVEL", "DAGSTER_HOME")


@dataclass(frozen=True)
class Project:
    """A scaffolded project with published workflows, on SQLite."""

    root: Path
    publications: dict[str, int]
    """Publication numbers by the slug of the workflow."""
    import_s: float
    """How long it took to import and publish them."""

    @property
    def home(self) -> Path:
        """Its `DAGSTER_HOME`."""
        return self.root / STATE_FOLDER

    @property
    def env(self) -> dict[str, str]:
        """What a process of the project has in its environment."""
        return {"DAGSTER_HOME": str(self.home), "DAGSTER_DISABLE_TELEMETRY": "yes"}


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with TemporaryDirectory(prefix="agentmesh-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def make_project(root: Path, workflows: list[dict[str, Any]]) -> Project:
    """A project in which these workflows are published, one file for each."""
    for name in _FOREIGN:
        os.environ.pop(name, None)
    scaffold(root)
    files = root / "workflows"
    (files / "hello.yaml").unlink()
    for document in workflows:
        text = yaml.safe_dump(document, sort_keys=False)
        (files / f"{document['slug']}.yaml").write_text(text, encoding="utf-8")
    store = open_store(f"sqlite:///{root / STATE_DATABASE}", upgrade=True)
    began = time.perf_counter()
    imported = Authoring(store, "default", actor="bench").import_paths([files], publish=True)
    took_s = time.perf_counter() - began
    store.close()
    publications = {document.slug: document.publication.id for document in imported if document.publication}
    return Project(root, publications, took_s)


def make_baseline_home(folder: Path) -> Path:
    """A `DAGSTER_HOME` with the same settings as a project's."""
    folder.mkdir(parents=True)
    write_dagster_yaml(folder)
    return folder


def chain_workflow(slug: str, nodes: int) -> dict[str, Any]:
    """`start`, transforms that hand a value on, `end`: so many nodes in all, at least 3."""
    names = ["start", *(f"t{number}" for number in range(1, nodes - 1)), "end"]
    transforms = [
        {
            "id": name,
            "type": "transform",
            "config": {"output": {"value": f"{{{{ steps.t{n}.output.value }}}}" if n else 1}},
        }
        for n, name in enumerate(names[1:-1])
    ]
    return {
        "kind": "workflow",
        "slug": slug,
        "nodes": [{"id": "start", "type": "start"}, *transforms, {"id": "end", "type": "end"}],
        "edges": [{"source": above, "target": below} for above, below in pairwise(names)],
    }


def fan_workflow(slug: str, width: int, seconds: float) -> dict[str, Any]:
    """`start`, delays side by side, `end` when all are over."""
    names = [f"d{number}" for number in range(width)]
    return {
        "kind": "workflow",
        "slug": slug,
        "settings": {"max_steps": width + 2},
        "nodes": [
            {"id": "start", "type": "start"},
            *({"id": name, "type": "delay", "config": {"seconds": seconds}} for name in names),
            {"id": "end", "type": "end", "config": {"output": {"done": True}}},
        ],
        "edges": [
            *({"source": "start", "target": name} for name in names),
            *({"source": name, "target": "end"} for name in names),
        ],
    }


def code_node(name: str, function: str, input: dict[str, Any]) -> dict[str, Any]:
    """A node that calls a function of `bench.functions`."""
    return {"id": name, "type": "code", "config": {"function": f"bench.functions:{function}", "input": input}}


def code_chain_workflow(slug: str, nodes: int, function: str) -> dict[str, Any]:
    """As `chain_workflow`, with nodes that call a function."""
    workflow = chain_workflow(slug, nodes)
    for node in workflow["nodes"]:
        if node["type"] == "transform":
            node.update(code_node(node["id"], function, node["config"]["output"]))
    return workflow


def code_fan_workflow(slug: str, width: int, seconds: float) -> dict[str, Any]:
    """As `fan_workflow`, with nodes that call a coroutine which sleeps."""
    workflow = fan_workflow(slug, width, seconds)
    for node in workflow["nodes"]:
        if node["type"] == "delay":
            node.update(code_node(node["id"], "pause", {"seconds": seconds}))
    return workflow


def foreach_workflow(slug: str, node: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """One node for each of `input.items`, whose outputs the `foreach` gathers."""
    config = {"items": "{{ input.items }}", "concurrency": concurrency, "body": {"nodes": [node]}}
    return {
        "kind": "workflow",
        "slug": slug,
        "input_schema": {
            "type": "object",
            "properties": {"items": {"type": "array", "items": {"type": "integer"}}},
            "required": ["items"],
        },
        "settings": {"max_steps": 10_000},
        "nodes": [
            {"id": "start", "type": "start"},
            {"id": "each", "type": "foreach", "config": config},
            {"id": "end", "type": "end", "config": {"output": {"done": True}}},
        ],
        "edges": [{"source": "start", "target": "each"}, {"source": "each", "target": "end"}],
    }
