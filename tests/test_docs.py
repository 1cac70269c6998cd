"""The examples in the pages and the packs are what they say: documents that pass validation, code that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentmesh_dagster.specs.documents import WorkflowSpec
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.specs.schema import validate_value
from agentmesh_dagster.validation import validate_document

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "packs").rglob("*.md")])
PACKS = sorted(path.parent for path in (ROOT / "packs").glob("*/README.md"))
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[object]:
    """The fenced blocks of all pages in a language, named by page and line."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in _FENCE.finditer(text):
            if block.group(1) == language:
                line = text.count("\n", 0, block.start()) + 1
                yield pytest.param(block.group(2), id=f"{page.relative_to(ROOT)}:{line}")


def errors_of(document: object) -> list[str]:
    return [str(problem) for problem in validate_document(document) if problem.severity == "error"]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_valid_documents(text: str):
    for document in load_documents(text, source="example.yaml"):
        assert errors_of(document) == []


@pytest.mark.parametrize("text", blocks("python"))
def test_python_blocks_run(text: str):
    exec(compile(text, "example.py", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("path", sorted((ROOT / "packs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_pack_documents_are_valid(path: Path):
    [document] = load_documents(path.read_bytes(), source=str(path))
    assert document["slug"] == path.stem
    assert errors_of(document) == []


@pytest.mark.parametrize("pack", PACKS, ids=lambda p: p.name)
def test_pack_inputs_fit_the_workflow(pack: Path):
    documents = [load_documents(path.read_bytes(), source=str(path))[0] for path in pack.glob("*.yaml")]
    [workflow] = [WorkflowSpec.model_validate(d) for d in documents if d["kind"] == "workflow"]
    inputs = sorted(pack.glob("input*.json"))
    assert inputs
    for path in inputs:
        assert validate_value(workflow.input_schema, json.loads(path.read_text())) == []


@pytest.mark.parametrize("pack", PACKS, ids=lambda p: p.name)
def test_packs_are_complete(pack: Path):
    """Every agent and tool that a pack's workflow names is in the pack."""
    documents = [load_documents(path.read_bytes(), source=str(path))[0] for path in pack.glob("*.yaml")]
    there = {(document["kind"], document["slug"]) for document in documents}
    nodes = [node for document in documents for node in document.get("nodes", [])]
    named = {(k, n["config"][k]) for n in nodes for k in ("agent", "tool") if k in n.get("config", {})}
    assert named
    assert named <= there


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [
        p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md" and f"({p.name})" not in index
    ]
    assert missing == []
