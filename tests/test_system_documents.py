"""Documents that an installed package supplies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentmesh_dagster.authoring import Authoring
from agentmesh_dagster.errors import DefinitionError, StoreError
from agentmesh_dagster.store import Store

DOCUMENTS = """
kind: workflow
slug: supplied
nodes:
  - {id: start, type: start}
  - {id: end, type: end, config: {output: done}}
edges:
  - {source: start, target: end}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on the path whose entry point names a folder of documents."""
    site = tmp_path / "site"
    (site / "supplier-1.0.dist-info").mkdir(parents=True)
    (site / "supplier-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: supplier\nVersion: 1.0\n"
    )
    (site / "supplier-1.0.dist-info" / "entry_points.txt").write_text(
        "[agentmesh_dagster.definitions]\nsupplier = supplier_documents:FOLDER\n"
    )
    (site / "documents").mkdir()
    (site / "documents" / "supplied.yaml").write_text(DOCUMENTS)
    (site / "supplier_documents.py").write_text(
        "from pathlib import Path\nFOLDER = Path(__file__).parent / 'documents'\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "supplier_documents", raising=False)
    return site


@pytest.fixture
def authoring(store: Store) -> Authoring:
    return Authoring(store, "default", actor="ada")


def test_supplied_documents_are_stored_and_live_and_cannot_be_edited(package, store, authoring, tmp_path):
    (found,) = authoring.sync_system()
    assert (found.kind, found.slug, found.version, found.is_new) == ("workflow", "supplied", 1, True)
    assert store.catalog.get("default", "workflow", "supplied").type == "system"
    assert [job.slug for job in store.publications.live("default")] == ["supplied"]
    (again,) = authoring.sync_system()
    assert (again.version, again.is_new) == (1, False)

    mine = tmp_path / "mine.yaml"
    mine.write_text(DOCUMENTS.replace("done", "mine"))
    with pytest.raises(StoreError) as refused:
        authoring.import_paths([mine])
    assert refused.value.code == "system-document"
    assert store.catalog.copy("default", "workflow", "supplied", "my-copy", by="ada").slug == "my-copy"


def test_a_newer_package_makes_a_new_version(package, store, authoring):
    authoring.sync_system()
    (package / "documents" / "supplied.yaml").write_text(DOCUMENTS.replace("done", "better"))
    (found,) = authoring.sync_system()
    assert (found.version, found.is_new) == (2, True)
    (live,) = store.publications.live("default")
    assert live.version == 2


def test_a_package_that_does_not_load_is_named(package, authoring):
    (package / "supplier_documents.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(DefinitionError, match=r"'supplier'.*no licence") as refused:
        authoring.sync_system()
    assert refused.value.code == "bad-plugin"
