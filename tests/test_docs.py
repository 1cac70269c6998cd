"""The examples in the pages and the packs are what they say: documents that pass validation, code that runs."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agentmesh_dagster.specs.documents import WorkflowSpec
from agentmesh_dagster.specs.loading import load_documents
from agentmesh_dagster.specs.resolve import DocumentLibrary, references_of
from agentmesh_dagster.specs.schema import validate_value
from agentmesh_dagster.validation import validate_document, validate_raw

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "packs").rglob("*.md")])
PACKS = sorted(path.parent for path in (ROOT / "packs").glob("*/README.md"))
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    """The fenced blocks of all pages in a language, named by page and line."""
    found: list[Any] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in _FENCE.finditer(text):
            if block.group(1) == language:
                line = text.count("\n", 0, block.start()) + 1
                found.append(pytest.param(block.group(2), id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def python_blocks(page: Path) -> list[str]:
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [block.group(2) for block in found if block.group(1) == "python"]


def _is_python(text: str) -> bool:
    """Whether it reads as Python and does something: a lone word does too, and is more likely a command."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    doing = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Call)
    return any(isinstance(node, doing) for node in ast.walk(tree))


def documents_of(folder: Path) -> list[Any]:
    return [
        d
        for path in sorted(folder.rglob("*.yaml"))
        for d in load_documents(path.read_bytes(), source=str(path))
    ]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_valid_documents(text: str):
    for document in load_documents(text, source="example.yaml"):
        assert [str(problem) for problem in validate_document(document).errors] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One after the other, in an empty project of their own: later blocks of a page use what earlier ones made."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "example"}
    for text in python_blocks(page):
        exec(compile(text, f"{page.name}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_is_fenced(page: Path):
    """What is only indented is shell: Python blocks stand in fences, and so are run."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    indented = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", text, re.MULTILINE)
    assert [block for block in indented if _is_python(textwrap.dedent(block))] == []


@pytest.mark.parametrize("folder", [*PACKS, ROOT / "packs"], ids=lambda p: p.name)
def test_packs_are_valid_and_complete(folder: Path):
    """Not even a warning, and all that a pack refers to is in it; also all packs together."""
    checked = validate_raw(documents_of(folder), library=DocumentLibrary([]))
    assert checked
    assert [str(problem) for source in checked for problem in source.checked.problems] == []


@pytest.mark.parametrize("path", sorted((ROOT / "packs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_pack_files_are_named_by_their_slug(path: Path):
    [document] = load_documents(path.read_bytes(), source=str(path))
    assert document["slug"] == path.stem


@pytest.mark.parametrize("pack", PACKS, ids=lambda p: p.name)
def test_pack_inputs_fit_the_workflow(pack: Path):
    found = [WorkflowSpec.model_validate(d) for d in documents_of(pack) if d["kind"] == "workflow"]
    called = {of.slug for workflow in found for of in references_of(workflow) if of.kind == "workflow"}
    [workflow] = [workflow for workflow in found if workflow.slug not in called]
    inputs = sorted((pack / "inputs").glob("*.json"))
    assert inputs
    for path in inputs:
        assert validate_value(workflow.input_schema, json.loads(path.read_text())) == []


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    missing = [
        p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md" and f"({p.name})" not in index
    ]
    assert missing == []
