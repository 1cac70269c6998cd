"""Importing, listing, publishing and the rest of what the command line does with documents."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cli_project import AGENT, WORKFLOW, Outcome, call, write_documents

Cli = Callable[..., Outcome]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "docs")
    # Put back after the test, whatever `--project` sets.
    monkeypatch.setenv("AGENTMESH_PROJECT", "default")
    return lambda *args: call(capsys, *args)


def test_import_stores_all_documents_in_any_order(cli: Cli):
    done = cli("import", "docs/greet.yaml", "docs/helper.yaml", "--json")
    assert done.code == 0, done.err
    assert [(item["kind"], item["slug"], item["version"]) for item in done.json] == [
        ("workflow", "greet", 1),
        ("agent", "helper", 1),
    ]
    assert all(item["is_new"] and item["publication"] is None for item in done.json)


def test_an_unchanged_document_makes_no_new_version(cli: Cli):
    cli("import", "docs")
    again = cli("import", "docs", "--json")
    assert {item["version"] for item in again.json} == {1}
    assert not any(item["is_new"] for item in again.json)


def test_import_and_publish(cli: Cli):
    done = cli("import", "docs", "--publish", "--json")
    assert all(isinstance(item["publication"], int) for item in done.json)
    assert {item["slug"] for item in cli("list", "--published", "--json").json} == {"greet", "helper"}


def test_publish_without_a_webserver_says_how_to_reload(cli: Cli):
    cli("import", "docs")
    done = cli("publish", "workflow", "greet")
    assert done.code == 0
    assert "AGENTMESH_DAGSTER_URL" in done.out
    assert cli("publish", "workflow", "greet", "--json").json["reloaded"] is None


def test_publish_stands_when_the_webserver_does_not_answer(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENTMESH_DAGSTER_URL", "http://127.0.0.1:9")
    cli("import", "docs")
    done = cli("publish", "workflow", "greet", "--json")
    assert (done.code, done.json["reloaded"], done.json["version"]) == (0, False, 1)
    assert "http://127.0.0.1:9" in done.err
    assert cli("show", "workflow", "greet", "--json").json["published_version"] == 1


def test_a_webserver_is_told_once_per_command(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    class Webserver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))["variables"]["name"]
            )
            entry = {
                "__typename": "WorkspaceLocationEntry",
                "locationOrLoadError": {"__typename": "Location"},
            }
            body = json.dumps({"data": {"reloadRepositoryLocation": entry}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    Path("workspace.yaml").write_text(
        "load_from: [{python_file: {relative_path: d.py, location_name: mine}}]"
    )
    with HTTPServer(("127.0.0.1", 0), Webserver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AGENTMESH_DAGSTER_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            done = cli("import", "docs", "--publish", "--json")
            assert {item["reloaded"] for item in done.json} == {True}
            assert asked == ["mine"]
            assert cli("publish", "agent", "helper", "--json").json["reloaded"] is None
            assert cli("deactivate", "workflow", "greet", "--json").json["reloaded"] is True
            assert cli("unpublish", "workflow", "greet", "--json").json["reloaded"] is True
            assert cli("delete", "workflow", "greet", "--json").json["reloaded"] is None
            assert len(asked) == 3
        finally:
            server.shutdown()
            thread.join()


def test_list_filters_and_its_two_forms(cli: Cli):
    cli("import", "docs", "--publish")
    cli("copy", "workflow", "greet", "greet-eu")
    assert [row["slug"] for row in cli("list", "workflow", "--json").json] == ["greet", "greet-eu"]
    assert [row["slug"] for row in cli("list", "--unpublished", "--json").json] == ["greet-eu"]
    assert [row["slug"] for row in cli("list", "--tag", "second", "--published", "--json").json] == ["greet"]
    assert cli("list", "--category", "other", "--json").json == []
    assert [row["slug"] for row in cli("list", "--text", "HELP", "--json").json] == ["helper"]
    assert cli("list", "--template", "--json").json == []
    cli("deactivate", "workflow", "greet")
    assert [row["slug"] for row in cli("list", "--inactive", "--json").json] == ["greet"]
    cli("delete", "workflow", "greet-eu")
    assert len(cli("list", "--json").json) == 2
    assert len(cli("list", "--archived", "--json").json) == 3
    lines = [line.split("\t") for line in cli("list", "workflow").out.splitlines()]
    assert lines[0] == ["slug", "name", "version", "published", "active", "tags", "updated"]
    assert lines[1][:6] == ["greet", "Greet", "1", "1", "no", "first, second"]


def test_show_versions_and_diff(cli: Cli):
    cli("import", "docs")
    Path("docs/greet.yaml").write_text(WORKFLOW.replace("name: Greet", "name: Welcome"))
    cli("import", "docs", "-m", "a better name")
    shown = cli("show", "workflow", "greet", "--json").json
    assert (shown["latest_version"], shown["version"]["number"], shown["document"]["name"]) == (
        2,
        2,
        "Welcome",
    )
    first = cli("show", "workflow", "greet", "--version", "1")
    assert "name: Greet" in first.out
    assert [(v["number"], v["message"]) for v in cli("versions", "workflow", "greet", "--json").json] == [
        (2, "a better name"),
        (1, ""),
    ]
    text = cli("diff", "workflow", "greet", "1", "2").out
    assert "-name: Greet" in text
    assert "+name: Welcome" in text
    assert cli("diff", "workflow", "greet", "2", "2", "--json").json["equal"] is True


def test_export_gives_the_same_bytes_after_an_import(cli: Cli):
    cli("import", "docs")
    first = cli("export", "workflow", "greet")
    cli("export", "workflow", "greet", "-o", "out.json")
    assert json.loads(Path("out.json").read_text())["slug"] == "greet"
    assert cli("import", "out.json", "--json").json[0]["is_new"] is False
    assert cli("export", "workflow", "greet").out == first.out


def test_delete_is_refused_while_something_published_refers_to_it(cli: Cli):
    cli("import", "docs", "--publish")
    refused = cli("delete", "agent", "helper", "--json")
    assert refused.code != 0
    assert refused.error["code"] == "still-referenced"
    assert cli("delete", "workflow", "greet").code == 0
    assert cli("delete", "agent", "helper").code == 0
    assert cli("import", "docs", "--json").code == 0


def test_stats_of_a_definition_without_runs(cli: Cli):
    cli("import", "docs")
    assert cli("stats", "workflow", "greet", "--json").json["runs"] == 0
    assert cli("stats", "workflow", "great").code == 2


def test_projects_are_apart_and_the_audit_names_who_did_what(cli: Cli):
    cli("import", "docs", "--publish")
    assert cli("project", "create", "billing", "--name", "Billing", "--json").json["slug"] == "billing"
    assert [p["slug"] for p in cli("project", "list", "--json").json] == ["billing", "default"]
    assert cli("--project", "billing", "list", "--json").json == []
    cli("--project", "billing", "import", "docs/helper.yaml")
    assert [row["entity"] for row in cli("--project", "billing", "audit", "--json").json] == ["agent/helper"]
    rows = cli("--project", "default", "audit", "--entity", "workflow/greet", "--json").json
    assert [row["action"] for row in rows] == ["publish", "import"]
    assert all(row["actor"] for row in rows)


def test_validate_reports_every_problem_with_its_place(cli: Cli):
    Path("bad.yaml").write_text(
        WORKFLOW.replace("agent: helper", "agentt: helper").replace("target: end}", "target: nowhere}")
    )
    done = cli("validate", "bad.yaml", "docs/helper.yaml")
    assert done.code == 1
    assert "bad.yaml" in done.out
    assert "nodes[1].config.agentt" in done.out
    assert "edges[1]" in done.out
    assert done.out.splitlines()[-1].startswith("2 documents, ")
    report = cli("validate", "bad.yaml", "--json")
    assert report.code == 1
    assert report.json["errors"] >= 2
    [document] = report.json["documents"]
    assert {"code", "path", "message", "mend", "severity"} <= set(document["problems"][0])


def test_validate_checks_what_is_stored(cli: Cli):
    cli("import", "docs", "--publish")
    assert cli("validate", "workflow", "greet", "--explain").code == 0
    done = cli("validate", "agent", "helper", "--version", "1", "--json").json
    assert [document["source"] for document in done["documents"]] == ["agent helper, version 1"]
    absent = cli("validate", "workflow", "gret")
    assert absent.code == 2
    assert cli("validate", "absent.yaml").code == 2


def test_validate_stores_nothing_and_warnings_do_not_fail(cli: Cli):
    Path("warned.yaml").write_text(WORKFLOW.replace("    timeout_s: 30\n", ""))
    done = cli("validate", "warned.yaml", "--json")
    assert (done.code, done.json["errors"]) == (0, 0)
    assert done.json["warnings"] > 0
    assert cli("list", "--json").json == []


def test_nothing_is_stored_when_one_document_is_wrong(cli: Cli):
    Path("docs/bad.yaml").write_text("kind: agent\nslug: worse\nmodle: offline/echo\n")
    done = cli("import", "docs")
    assert done.code == 2
    assert "docs/bad.yaml" in done.err
    assert "modle" in done.err
    assert cli("list", "--json").json == []
    assert cli("import", "docs", "--json").error["context"]["problems"]


BAD_INPUT = {
    "unknown kind": (["list", "bogus"], "bogus"),
    "unknown command": (["bogus"], "bogus"),
    "unknown option": (["list", "--bogus"], "bogus"),
    "missing argument": (["show", "workflow"], "SLUG"),
    "missing file": (["import", "nowhere.yaml"], "nowhere.yaml"),
    "folder without documents": (["import", "empty"], "empty"),
    "file that is no document": (["import", "binary.yaml"], "binary.yaml"),
    "publish of nothing": (["publish", "workflow", "nothing"], "nothing"),
    "publish of a version that is not there": (["publish", "workflow", "greet", "--version", "7"], "7"),
    "version zero": (["publish", "workflow", "greet", "--version", "0"], "0"),
    "unpublish of what is not live": (["unpublish", "workflow", "greet"], "not published"),
    "copy to a slug that is taken": (["copy", "workflow", "greet", "greet"], "greet"),
    "copy to no slug": (["copy", "workflow", "greet", "../x"], "../x"),
    "export of nothing": (["export", "workflow", "nothing"], "nothing"),
    "export into a folder that is not there": (
        ["export", "workflow", "greet", "-o", "no/x.yaml"],
        "no/x.yaml",
    ),
    "project that is not there": (["--project", "nope", "list"], "nope"),
    "import into a project that is not there": (["--project", "nope", "import", "docs"], "nope"),
    "project that is no slug": (["project", "create", "../x"], "../x"),
    "project that is there": (["project", "create", "default"], "default"),
    "run that is not there": (["runs", "show", "0123456789"], "0123456789"),
    "run of an agent": (["run", "agent", "helper"], "workflow"),
    "run of what is not published": (["run", "workflow", "greet"], "publish"),
    "run without its input": (["run", "workflow", "live"], "name"),
    "input that is no JSON": (["run", "workflow", "live", "--input", "{name"], "--input"),
    "input file that is not there": (["run", "workflow", "live", "--input", "@no.json"], "no.json"),
    "NaN as input": (["run", "workflow", "live", "--input", '{"name": NaN}'], "NaN"),
    "tag without a value": (["run", "workflow", "live", "--input", '{"name": "A"}', "--tag", "x"], "x"),
}


@pytest.fixture
def filled(cli: Cli) -> Cli:
    Path("empty").mkdir()
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("live.yaml").write_text(WORKFLOW.replace("slug: greet", "slug: live"))
    assert cli("import", "docs").code == 0
    assert cli("import", "docs", "live.yaml").code == 0
    assert cli("publish", "workflow", "live").code == 0
    return cli


@pytest.mark.parametrize(("args", "named"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_said_in_a_line_or_two(filled: Cli, args: list[str], named: str):
    done = filled(*args)
    assert done.code == 2
    assert named in done.err
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) <= 3
    assert done.out == ""
    as_json = filled(*args, "--json")
    assert as_json.code == 2
    assert named in as_json.error["message"]
    assert as_json.out == ""


def newer_database(url: Path) -> None:
    call_database = sqlite3.connect(url)
    call_database.execute("UPDATE alembic_version SET version_num = '9999'")
    call_database.commit()
    call_database.close()


@pytest.mark.parametrize(
    "command", [["list"], ["import", "docs"], ["publish", "workflow", "greet"], ["runs", "list"]]
)
def test_a_database_that_cannot_be_used(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str]):
    assert cli("import", "docs").code == 0
    for url, word in (
        ("postgresql://nobody:secret@127.0.0.1:9/none", "127.0.0.1"),
        ("sqlite:////proc/none/x.db", "/proc/none"),
        (f"sqlite:///{Path.cwd()}", "sqlite:///"),
        ("mysql://x/y", "mysql"),
        ("nonsense", "URL"),
    ):
        monkeypatch.setenv("AGENTMESH_DATABASE_URL", url)
        done = cli(*command)
        assert done.code == 1, url
        assert word in done.err
        assert "secret" not in done.err
        assert "Traceback" not in done.err
        assert cli(*command, "--json").error["domain"] == "store"


def test_a_database_newer_than_the_code_is_refused_by_name(cli: Cli):
    cli("import", "docs")
    newer_database(Path(".agentmesh/agentmesh.db"))
    done = cli("list", "--json")
    assert done.code == 1
    assert done.error["code"] == "database-newer"
    assert "9999" in done.error["message"]


def test_an_agent_alone_changes_no_job(cli: Cli):
    Path("docs/helper.yaml").write_text(AGENT)
    cli("import", "docs", "--publish")
    done = cli("publish", "agent", "helper")
    assert "publish them again" in done.out
    assert "reload" not in done.out


def test_what_is_stored_and_not_published_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("both.yaml").write_text(CALLING)
    assert call(capsys, "import", "both.yaml").code == 0
    refused = call(capsys, "publish", "workflow", "caller")
    assert "'called' is stored, and no version of it is published" in refused.err
    assert "agentmesh publish workflow called" in refused.err
    assert call(capsys, "publish", "workflow", "called").code == 0
    assert call(capsys, "publish", "workflow", "caller").code == 0


CALLING = """\
kind: workflow
slug: called
nodes: [{id: start, type: start}, {id: end, type: end}]
edges: [{source: start, target: end}]
---
kind: workflow
slug: caller
nodes: [{id: start, type: start}, {id: call, type: workflow, config: {workflow: called}}, {id: end, type: end}]
edges: [{source: start, target: call}, {source: call, target: end}]
"""


def test_functions_are_looked_up_in_the_modules_that_resources_allow(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert cli("init", "project").code == 0
    monkeypatch.chdir(tmp_path / "project")
    resources = tmp_path / "project" / "resources" / "__init__.py"
    resources.write_text(
        resources.read_text().replace("function_modules=()", 'function_modules=("allowed_here",)')
    )
    (tmp_path / "project" / "allowed_here.py").write_text("def there(x: int) -> int:\n    return x\n")
    call = "{id: call, type: code, config: {function: 'allowed_here:%s', input: {x: 1}}, timeout_s: 5}"
    for name in ("there", "gone"):
        text = f"kind: workflow\nslug: {name}\n"
        text += f"nodes: [{{id: start, type: start}}, {call % name}, {{id: end, type: end}}]\n"
        edges = "edges: [{source: start, target: call}, {source: call, target: end}]\n"
        Path(f"{name}.yaml").write_text(text + edges)

    assert cli("validate", "there.yaml").code == 0
    refused = cli("validate", "gone.yaml")
    assert refused.code == 1
    assert "function-unknown" in refused.out
