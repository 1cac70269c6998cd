"""What other users of a machine, other names of one person, and error messages could give away."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from store_samples import a_vote, a_wait

from agentmesh_dagster.errors import ApprovalError, DefinitionError, StoreError
from agentmesh_dagster.orchestration.code_location import build_code_location
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.launch import admitted
from agentmesh_dagster.scaffold import scaffold
from agentmesh_dagster.specs.decisions import weigh
from agentmesh_dagster.store import Store, open_store


@pytest.fixture
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("_open_umask")
def test_files_of_a_project_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "project"
    scaffold(folder)
    database = folder / ".agentmesh" / "agentmesh.db"
    with open_store(f"sqlite:///{database}", upgrade=True) as store:
        store.catalog.list("default")
        found = [folder.parent, folder, *folder.rglob("*")]
        assert {path.name for path in found} >= {"agentmesh.db", "agentmesh.db-wal", "agentmesh.db-shm"}
        assert {path: oct(mode(path)) for path in found if mode(path) & 0o077} == {}


@pytest.mark.usefixtures("_open_umask")
def test_a_database_in_a_new_folder_is_too(tmp_path: Path) -> None:
    database = tmp_path / "new" / "deeper" / "a.db"
    open_store(f"sqlite:///{database}", upgrade=True).close()
    assert [mode(path) for path in (database.parent.parent, database.parent, database)] == [
        0o700,
        0o700,
        0o600,
    ]


SAME = ["Ada", "ADA", "\uff41\uff44\uff41", "a\u0064a", "ada"]


@pytest.mark.parametrize("name", SAME)
def test_the_launcher_may_not_decide_under_another_spelling(name: str) -> None:
    gate = a_wait(separation=True, launcher="ada")
    with pytest.raises(ApprovalError) as caught:
        weigh(gate, [], a_vote(name), {})
    assert caught.value.code == "separation"


@pytest.mark.parametrize(
    ("launcher", "name"),
    [("Ada Lovelace", "ada  lovelace"), ("straße", "STRASSE"), ("ﬁona", "Fiona"), ("  ada ", "ada")],
)
def test_white_space_and_compatible_characters_do_not_tell_people_apart(launcher: str, name: str) -> None:
    with pytest.raises(ApprovalError) as caught:
        weigh(a_wait(separation=True, launcher=launcher), [], a_vote(name), {})
    assert caught.value.code == "separation"


def test_one_person_votes_once_under_all_spellings() -> None:
    gate = a_wait(assignees=("ada", "ADA", "bob"), required=2)
    with pytest.raises(ApprovalError) as caught:
        weigh(gate, [a_vote("ada")], a_vote("ADA"), {})
    assert caught.value.code == "already-voted"


@pytest.mark.parametrize("name", [" ada", "ada ", "\u00a0ada", "ada\u3000"])
def test_a_name_with_outer_space_is_refused(name: str) -> None:
    with pytest.raises(ApprovalError) as caught:
        weigh(a_wait(), [], a_vote(name), {})
    assert caught.value.code == "not-assignee"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:se@cret@localhost/db",
        "postgresql://user:se/cret@localhost/db",
        "postgresql://user:12/cret@localhost/db",
        "postgresql://user:12?cret@localhost/db",
        "postgresql://us@er:cret@localhost:1/db",
    ],
)
def test_a_password_that_is_not_encoded_is_in_no_message(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert caught.value.code == ("bad-url" if "se@" in url else "unreachable")
    assert "cret" not in str(caught.value)


def test_refused_launches_are_in_the_audit(store: Store) -> None:
    with pytest.raises(DefinitionError):
        admitted(store, "default", "agent", "some", {"secret": "x"}, by="mallory")
    (row,) = store.audit.list("default", action="launch-refused")
    assert (row.actor, row.entity, row.detail) == ("mallory", "agent/some", {"code": "not-runnable"})


def test_a_code_location_without_the_job_that_decides(sqlite_url: str) -> None:
    location = build_code_location(AgentMesh(database_url=sqlite_url), decide_job=False)
    assert location.job_names == ["agentmesh_finalize"]
    assert "agentmesh_decide" in build_code_location(AgentMesh(database_url=sqlite_url)).job_names
