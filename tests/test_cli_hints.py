"""What the command line says where somebody mistypes, repeats or merely looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_project import Outcome, call, write_documents

Cli = Callable[..., Outcome]

UNTIMED = """\
kind: workflow
slug: untimed
nodes:
  - {id: start, type: start}
  - {id: a, type: agent, config: {agent: helper, prompt: "{{ input }}"}}
  - {id: b, type: agent, config: {agent: helper, prompt: "{{ input }}"}}
  - {id: c, type: agent, config: {agent: nobody, prompt: "{{ input }}"}, timeout_s: 5}
  - {id: end, type: end}
edges:
  - {source: start, target: a}
  - {source: a, target: b}
  - {source: b, target: c}
  - {source: c, target: end}
"""
NETWORK = """\
kind: network
slug: desk
model: offline/echo
instructions: Pick one.
primitives: {agents: [helper]}
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "docs")
    monkeypatch.setenv("AGENTMESH_PROJECT", "default")
    return lambda *args: call(capsys, *args)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["lst"], "did you mean 'list'?"),
        (["list", "workflows"], "'workflows' is not a kind; did you mean 'workflow'?"),
        (["run", "hello"], "a slug stands behind its kind: `agentmesh run workflow hello`?"),
        (["list", "xyz"], "known are agent, tool, workflow, network"),
        (
            ["run", "workflow", "gret"],
            "there is no workflow 'gret' in the project 'default'; did you mean 'greet'?",
        ),
        (["show", "agent", "xyz"], "`agentmesh list agent` shows what is"),
    ],
)
def test_what_was_meant_is_suggested(cli: Cli, arguments: list[str], hint: str):
    cli("import", "docs")
    refused = cli(*arguments)
    assert refused.code == 2
    assert hint in refused.err


@pytest.mark.parametrize("arguments", [["list"], ["validate", "docs"], ["list", "workflow", "--json"]])
def test_looking_makes_no_database(cli: Cli, tmp_path: Path, arguments: list[str]):
    looked = cli(*arguments)
    assert looked.code == 0
    assert "empty database" not in looked.err
    assert not (tmp_path / ".agentmesh").exists()


def test_publishing_what_is_live_says_so(cli: Cli):
    cli("import", "docs")
    first = cli("publish", "workflow", "greet")
    again = cli("publish", "workflow", "greet")

    assert "published workflow greet version 1" in first.out
    assert "reload the code location" in first.out
    assert again.out == "workflow greet version 1 is live already; nothing was changed\n"
    assert cli("publish", "workflow", "greet", "--json").json["is_new"] is False


def test_publishing_a_network_says_that_it_does_not_run_yet(cli: Cli, tmp_path: Path):
    (tmp_path / "desk.yaml").write_text(NETWORK)
    cli("import", "docs", "desk.yaml")
    published = cli("publish", "network", "desk")

    assert published.code == 0, published.err
    assert "does not run them" in published.out
    assert "reload" not in published.out


def test_missing_timeouts_do_not_bury_the_warning_that_matters(cli: Cli, tmp_path: Path):
    (tmp_path / "untimed.yaml").write_text(UNTIMED)
    said = cli("validate", "docs/helper.yaml", "untimed.yaml").out.splitlines()
    warnings = [line for line in said if "warning " in line]

    assert len(warnings) == 2
    assert "reference-missing" in warnings[0]
    assert "2 nodes may wait for ever (nodes[1], nodes[2])" in warnings[1]
    # Machines get every one.
    documents = cli("validate", "docs/helper.yaml", "untimed.yaml", "--json").json["documents"]
    codes = [problem["code"] for document in documents for problem in document["problems"]]
    assert codes.count("timeout-missing") == 2


def test_init_beside_a_dagster_home_writes_no_settings_that_nobody_reads(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))

    made = cli("init", "project")

    assert made.code == 0, made.err
    assert not (tmp_path / "project" / ".agentmesh").exists()
    assert (home / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"
    assert str(home / "dagster.yaml") in made.err


def test_init_writes_the_settings_of_an_empty_dagster_home(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    made = cli("init", "project", "--postgres", "--json")

    assert "DAGSTER_POSTGRES_URL" in (tmp_path / "home" / "dagster.yaml").read_text()
    assert str(tmp_path / "home" / "dagster.yaml") in made.json["files"]
