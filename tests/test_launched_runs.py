"""Lists of runs by source, person, time and place; and runs that were launched and that no worker has bound."""

from __future__ import annotations

import dagster as dg
import pytest
from cli_project import call
from dagster._core.storage.dagster_run import DagsterRun

from agentmesh_dagster.scaffold import write_dagster_yaml
from agentmesh_dagster.store import open_store
from agentmesh_dagster.testing import publish_documents, run_workflow

DOCUMENT = {
    "kind": "workflow",
    "slug": "short",
    "nodes": [{"id": "start", "type": "start"}, {"id": "end", "type": "end"}],
    "edges": [{"source": "start", "target": "end"}],
}


@pytest.fixture
def home(tmp_path, sqlite_url, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_pages_and_filters(home, sqlite_url, capsys):
    ids = [
        run_workflow([DOCUMENT], {}, database_url=sqlite_url, tags={"user": user}).run.id
        for user in ("ada", "bob", "ada")
    ]

    def listed(*options):
        return [run["run_id"] for run in call(capsys, "runs", "list", "--json", *options).json]

    assert listed() == ids[::-1]
    first = call(capsys, "runs", "list", "--json", "--limit", "2").json
    assert listed("--limit", "2", "--cursor", first[-1]["cursor"]) == [ids[0]]
    assert listed("--triggered-by", "ada") == [ids[2], ids[0]]
    assert listed("--source", "test") == ids[::-1]
    assert listed("--source", "schedule") == []
    assert listed("--since", "2020-01-01", "--until", "2020-02-01T00:00:00Z") == []
    assert listed("--since", "2020-01-01") == ids[::-1]
    assert call(capsys, "runs", "list", "--since", "soon").code == 2
    assert call(capsys, "runs", "list", "--cursor", "no-such-run").code == 2


def test_what_no_worker_has_bound_is_pending(home, sqlite_url, capsys):
    with open_store(sqlite_url) as store:
        [publication] = publish_documents(store, [DOCUMENT])
    bound = run_workflow([DOCUMENT], {}, database_url=sqlite_url).run.id
    write_dagster_yaml(home)
    tags = {
        "agentmesh/project": "default",
        "agentmesh/publication": str(publication.id),
        "user": "ada",
        "dagster/from_ui": "true",
    }
    with dg.DagsterInstance.get() as instance:
        queued, retry = (
            instance.add_run(
                DagsterRun(
                    job_name="short", status=dg.DagsterRunStatus.NOT_STARTED, run_config={"x": 1}, tags=more
                )
            ).run_id
            for more in (tags, {**tags, "dagster/is_resume_retry": "true"})
        )
    found = call(capsys, "runs", "list", "--json").json
    assert [(run["run_id"], run["status"]) for run in found] == [(queued, "pending"), (bound, "succeeded")]
    assert (found[0]["slug"], found[0]["source"], found[0]["triggered_by"]) == ("short", "ui", "ada")
    assert retry not in str(found)
    pending = call(capsys, "runs", "list", "--status", "pending", "--json").json
    assert [run["run_id"] for run in pending] == [queued]
    assert call(capsys, "runs", "list", "--status", "failed", "--json").json == []
    page = call(capsys, "runs", "list", "--json", "--cursor", queued).json
    assert [run["run_id"] for run in page] == [bound]
    shown = call(capsys, "runs", "show", queued[:8], "--json").json
    assert (shown["run_id"], shown["status"], shown["input"], shown["steps"]) == (
        queued,
        "pending",
        {"x": 1},
        [],
    )
