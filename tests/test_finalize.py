"""`on_failure` and `finally`: run once for each end of a run, whatever it ended as, by the job `agentmesh_finalize`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from cli_project import call, run
from gate_project import GateProject, gate_project
from store_samples import end_leases
from workflow_functions import notes

from agentmesh_dagster.orchestration.cancellation import cancel_run
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.orchestration.reconcile import reconcile
from agentmesh_dagster.records import Run, RunStatus, Step, StepStatus
from agentmesh_dagster.runtime.loop import cancel_running
from agentmesh_dagster.testing import publish_documents

NOTE = "workflow_functions:note"

CAREFUL = """\
kind: workflow
slug: careful
input_schema: {type: object, properties: {who: {type: string, default: Ada}, divisor: {type: integer, default: 1}}}
state_schema: {type: object, properties: {found: {type: array, reducer: append}}}
nodes:
  - {id: start, type: start}
  - {id: first, type: transform, config: {output: 7}, set: {found: "{{ steps.first.output }}"}}
  - {id: divide, type: transform, config: {output: "{{ 1 / input.divisor }}"}, set: {found: 8}}
  - {id: end, type: end, config: {output: done}}
edges:
  - {source: start, target: first}
  - {source: first, target: divide}
  - {source: divide, target: end}
on_failure:
  nodes:
    - id: tell
      type: code
      config: {function: "workflow_functions:note", input: {name: on_failure, value: "{{ run.error.code }}"}}
finally:
  nodes:
    - id: clean
      type: code
      config:
        function: workflow_functions:note
        input:
          name: finally
          value:
            who: "{{ input.who }}"
            status: "{{ run.status }}"
            first: "{{ steps.first.output }}"
            divide: "{{ steps.divide.status }}"
            end: "{{ steps.end.status }}"
            found: "{{ context.found }}"
            before: "{{ context.last_output }}"
    - {id: after, type: transform, config: {output: "{{ steps.clean.output.status }}!"}}
  edges:
    - {source: clean, target: after}
"""

GATED = """\
kind: workflow
slug: careful
nodes:
  - {id: start, type: start}
  - {id: review, type: human, config: {title: "Go on?"}}
  - {id: break, type: transform, config: {output: "{{ 1 / steps.review.output.data.by }}"}}
  - {id: end, type: end}
edges:
  - {source: start, target: review}
  - {source: review, target: break, source_handle: approved}
  - {source: break, target: end}
finally:
  nodes:
    - id: clean
      type: code
      config: {function: "workflow_functions:note", input: {name: finally, value: "{{ run.status }}"}}
"""


CODE = """\
import os


def note(name, value=None):
    with open(os.environ["WORKFLOW_NOTES"], "a") as notes:
        notes.write(name + "\\n")
    return value
"""


@pytest.fixture(autouse=True)
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


def published(project: GateProject, text: str) -> dg.RepositoryDefinition:
    publish_documents(project.store, text)
    return project.load()


def steps(project: GateProject, run: Run) -> dict[str, Step]:
    return {step.key: step for step in project.store.runs.steps(run.id)}


def events(project: GateProject, run: Run) -> list[str]:
    return [event.type for event in project.store.runs.events(run.id, type="run.*")]


def finalized(project: GateProject, location: dg.RepositoryDefinition, run: Run) -> dg.ExecuteInProcessResult:
    """Does what the next tick asks for, which is to finalize the run and nothing else."""
    (request,) = project.tick(location).requests
    assert request.job_name == "agentmesh_finalize"
    assert request.tags["agentmesh/run_id"] == run.id
    return launched(project, location, request.tags)


def launched(project: GateProject, location: dg.RepositoryDefinition, tags: Any) -> dg.ExecuteInProcessResult:
    return location.get_job("agentmesh_finalize").execute_in_process(
        instance=project.instance, tags=dict(tags), raise_on_error=False
    )


def failure_of(result: dg.ExecuteInProcessResult) -> Any:
    assert not result.success
    return result.failure_data_for_node("finalize").user_failure_data


class TestEnds:
    def test_after_a_success_finally_runs_once_and_sees_the_run(self, database_url: str, tmp_path: Path):
        with gate_project(database_url, tmp_path / "home") as project:
            location = published(project, CAREFUL)
            tags = {"team": "a", "dagster/partition": "2026-01-01", "dagster/backfill": "b"}
            run = project.run(location, "careful", tags, {"who": "Ada", "divisor": 1})
            assert (run.status, run.endings, run.finalized) == (RunStatus.SUCCEEDED, 1, 0)
            assert notes() == []

            (request,) = project.tick(location).requests

            assert request.run_config == {}
            assert request.run_key == request.tags["agentmesh/claim"]
            assert request.tags["dagster/parent_run_id"] == request.tags["dagster/root_run_id"] == run.id
            assert request.tags["team"] == "a"
            # Dagster counts it as no work on the partition.
            assert not {"dagster/partition", "dagster/backfill", "agentmesh/status"} & set(request.tags)
            assert launched(project, location, request.tags).success
            stands = project.store.runs.get(run.id)
            assert (stands.status, stands.output, stands.finished_at) == (run.status, "done", run.finished_at)
            assert (stands.endings, stands.finalized) == (1, 1)
            assert notes() == ["finally"]
            found = steps(project, run)
            assert found["@finally/clean"].output == {
                "who": "Ada",
                "status": "succeeded",
                "first": 7,
                "divide": "succeeded",
                "end": "succeeded",
                "found": [7, 8],
                "before": "done",
            }
            assert found["@finally/after"].output == "succeeded!"
            assert events(project, run)[-2:] == ["run.finalizing", "run.finalized"]
            assert project.tick(location).requests == []

    def test_after_a_failure_on_failure_runs_first_and_both_see_what_failed(self, project: GateProject):
        location = published(project, CAREFUL)
        run = project.run(location, "careful", config={"who": "Ada", "divisor": 0})
        assert run.status is RunStatus.FAILED

        assert finalized(project, location, run).success

        assert notes() == ["on_failure", "finally"]
        found = steps(project, run)
        assert found["@on_failure/tell"].output == run.error["code"]
        seen = found["@finally/clean"].output
        assert (seen["status"], seen["first"], seen["divide"]) == ("failed", 7, "failed")
        # Neither ran nor was skipped.
        assert (seen["end"], seen["found"], seen["before"]) == ("pending", [7], None)
        stands = project.store.runs.get(run.id)
        assert (stands.status, stands.error, stands.finalized) == (RunStatus.FAILED, run.error, 1)

    def test_on_failure_alone_is_not_asked_for_by_a_success(self, project: GateProject):
        location = published(project, CAREFUL[: CAREFUL.index("finally:")])
        fine = project.run(location, "careful", config={"divisor": 1})
        assert project.tick(location).requests == []
        assert fine.finalized == fine.endings == 1

        broken = project.run(location, "careful", config={"divisor": 0})
        assert finalized(project, location, broken).success
        assert notes() == ["on_failure"]

    def test_after_a_cancellation(self, project: GateProject):
        location = published(project, GATED)
        run = project.waiting(location, job="careful")
        assert project.tick(location).requests == []
        cancel_run(project.store, project.instance, run, by="bob")

        assert finalized(project, location, run).success

        assert steps(project, run)["@finally/clean"].output == "canceled"
        assert project.store.runs.get(run.id).status is RunStatus.CANCELED
        assert project.tick(location).requests == []

    def test_a_workflow_as_body_gets_its_input_and_has_its_own_steps(self, project: GateProject):
        text = f"""\
kind: workflow
slug: ops
input_schema: {{type: object, required: [what], properties: {{what: {{type: string}}}}}}
nodes:
  - {{id: start, type: start}}
  - {{id: say, type: code, config: {{function: "{NOTE}", input: {{name: "{{{{ input.what }}}}"}}}}}}
  - {{id: end, type: end}}
edges:
  - {{source: start, target: say}}
  - {{source: say, target: end}}
---
kind: workflow
slug: careful
nodes:
  - {{id: start, type: start}}
  - {{id: end, type: end, config: {{output: 5}}}}
edges:
  - {{source: start, target: end}}
finally:
  workflow: ops
  input: {{what: "{{{{ run.status }}}} {{{{ steps.end.output }}}}"}}
"""
        location = published(project, text)
        run = project.run(location, "careful")
        assert finalized(project, location, run).success
        assert notes() == ["succeeded 5"]
        assert {"@finally/start", "@finally/say", "@finally/end"} <= set(steps(project, run))

    def test_each_end_is_finalized_under_keys_of_its_own(
        self, project: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        text = CAREFUL.replace(
            'type: transform, config: {output: "{{ 1 / input.divisor }}"}',
            'type: code, config: {function: "workflow_functions:fail_first", input: {name: work}}',
        )
        location = published(project, text)
        run = project.run(location, "careful")
        assert finalized(project, location, run).success
        claim = project.store.claims.claim(run.id, reason="resume")
        assert claim is not None

        again = project.run(location, "careful", {"agentmesh/claim": claim.id})

        assert (again.id, again.status, again.endings, again.finalized) == (
            run.id,
            RunStatus.SUCCEEDED,
            2,
            1,
        )
        assert finalized(project, location, again).success
        assert notes() == ["work", "on_failure", "finally", "work", "finally"]
        found = steps(project, run)
        assert found["@finally/clean"].output["status"] == "failed"
        assert found["@finally#2/clean"].output["status"] == "succeeded"
        assert project.store.runs.get(run.id).finalized == 2


class TestFailures:
    def test_finally_runs_though_on_failure_fails_and_the_run_keeps_its_own_error(self, project: GateProject):
        text = CAREFUL.replace(
            'config: {function: "workflow_functions:note", input: {name: on_failure, value: "{{ run.error.code }}"}}',
            'config: {function: "workflow_functions:fail", input: {message: "nobody to tell"}}',
        )
        location = published(project, text)
        run = project.run(location, "careful", config={"divisor": 0})

        result = finalized(project, location, run)

        assert "nobody to tell" in failure_of(result).description
        assert notes() == ["finally"]
        stands = project.store.runs.get(run.id)
        assert (stands.status, stands.error, stands.finalized) == (RunStatus.FAILED, run.error, 1)
        (told,) = project.store.runs.events(run.id, type="run.finalize_failed")
        assert (told.payload["body"], told.payload["ending"]) == ("on_failure", 1)
        assert "nobody to tell" in told.payload["error"]["message"]
        # They run once; a node's own retry is all there is.
        assert project.tick(location).requests == []

    def test_nothing_waits_in_it(self, project: GateProject):
        text = CAREFUL.replace(
            "function: workflow_functions:note", "function: workflow_functions:ask_once"
        ).replace("        input:\n          name: finally\n          value:\n", "        input: {}\n")
        text = text[: text.index('            who: "')] + text[text.index("    - {id: after") :]
        location = published(project, text)
        run = project.run(location, "careful", config={"divisor": 1})

        result = finalized(project, location, run)

        assert failure_of(result).metadata["code"].value == "finalizer-waits"
        row = steps(project, run)["@finally/clean"]
        assert (row.status, row.error["code"]) == (StepStatus.FAILED, "finalizer-waits")
        assert project.store.waits.list("default", run_id=run.id) == []
        assert project.store.runs.get(run.id).finalized == 1

    def test_a_copy_and_a_launch_by_hand_are_refused(self, project: GateProject):
        location = published(project, CAREFUL)
        run = project.run(location, "careful", config={"divisor": 1})
        (request,) = project.tick(location).requests
        assert launched(project, location, request.tags).success

        copied = failure_of(launched(project, location, request.tags))
        assert copied.metadata["code"].value == "claim-lost"
        assert "copy" in copied.description
        by_hand = failure_of(launched(project, location, {}))
        assert "agentmesh runs resume" in by_hand.description
        assert notes() == ["finally"]
        assert len(project.store.runs.get(run.id).dagster_run_ids) == 2
        assert len(project.store.runs.list("default")) == 1

    def test_one_that_a_person_terminates_is_over(self, project: GateProject):
        text = CAREFUL.replace("function: workflow_functions:note", "function: workflow_functions:hang")
        text = text[: text.index("          value:\n")] + text[text.index("    - {id: after") :]
        location = published(project, text.replace("steps.clean.output.status", "steps.clean.output"))
        run = project.run(location, "careful", config={"divisor": 1})

        def terminate() -> None:
            pause = threading.Event()
            while "finally" not in notes():
                pause.wait(0.02)
            (at_work,) = project.instance.get_runs(dg.RunsFilter(job_name="agentmesh_finalize"))
            project.instance.report_run_canceling(at_work)
            # What an executor does that was asked to stop.
            cancel_running(0)

        thread = threading.Thread(target=terminate)
        thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            finalized(project, location, run)
        thread.join(30)

        assert notes() == ["finally", "finally cleaned up"]
        stands = project.store.runs.get(run.id)
        assert (stands.status, stands.finalized) == (RunStatus.SUCCEEDED, 1)
        assert project.store.runs.lease(run.id) is None
        assert project.tick(location).requests == []


class TestRetries:
    def test_it_is_not_due_before_the_last_retry(self, project: GateProject):
        location = published(project, GATED)
        run = project.waiting(location, job="careful", tags={"dagster/max_retries": "1"})
        project.decide(run)
        for _ in range(2):
            (request,) = project.tick(location).requests
            assert request.job_name == "careful"
            assert project.run_request(location, request).status is RunStatus.FAILED
            assert notes() == []

        assert finalized(project, location, run).success
        assert notes() == ["finally"]

    def test_it_is_due_when_nobody_is_there_to_retry(self, sqlite_url: str, tmp_path: Path):
        with gate_project(sqlite_url, tmp_path / "home", "run_retries: {enabled: true}\n") as project:
            location = published(project, CAREFUL)
            tags = {"dagster/max_retries": "2"}
            run = project.run(location, "careful", tags, config={"divisor": 0})
            assert run.retries_left == 2
            assert project.tick(location).requests == []

            # Dagster's daemon cannot launch anew what a process executed by itself.
            reconcile(project.store, project.instance, "default")

            assert finalized(project, location, run).success
            assert notes() == ["on_failure", "finally"]


class TestCommands:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        Path("docs").mkdir()
        Path("docs/careful.yaml").write_text(CAREFUL.replace("workflow_functions:", "flaky_code:"))
        Path("flaky_code.py").write_text(CODE)
        done = run("import", "docs", "--publish")
        assert done.code == 0, done.err
        return tmp_path

    def test_a_run_here_is_finalized_here(self, folder: Path, capsys: Any):
        done = run("run", "workflow", "careful", "--input", '{"who": "Ada", "divisor": 0}', "--json")

        assert (done.code, done.json["status"]) == (1, "failed")
        assert (done.json["finalized"], done.json["finalize_error"]) == (True, None)
        keys = [step["key"] for step in done.json["steps"]]
        assert keys[-3:] == ["@on_failure/tell", "@finally/clean", "@finally/after"]
        assert not any(step["replayed"] for step in done.json["steps"])
        assert notes() == ["on_failure", "finally"]
        run_id = done.json["run_id"]
        assert "finally has been run" in call(capsys, "runs", "show", run_id).out
        assert call(capsys, "runs", "show", run_id, "--json").json["finalized"] is True
        # Its lines are those of the run's own job, which are not all that Dagster could say.
        assert "DEBUG" not in done.err
        refused = call(capsys, "runs", "resume", run_id, "--json")
        assert refused.error["code"] == "nothing-to-resume"

    def test_a_killed_worker_and_a_killed_finalizer(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        """The run's worker is killed before its end is written; then the one that finalizes it, when all is done."""
        monkeypatch.setenv("AGENTMESH_FAULT", "journal.finish_run.before#1")
        killed = run("run", "workflow", "careful", "--input", '{"who": "Ada", "divisor": 1}')
        assert killed.code == -9
        monkeypatch.delenv("AGENTMESH_FAULT")
        agentmesh = AgentMesh(
            database_url=f"sqlite:///{folder / '.agentmesh' / 'agentmesh.db'}",
            function_modules=("flaky_code",),
            root=folder,
        )
        with dg.DagsterInstance.from_config(str(folder / ".agentmesh")) as instance:
            project = GateProject(agentmesh=agentmesh, instance=instance)
            project.clock.advance(120)
            end_leases(project.store)
            (correction,) = reconcile(project.store, instance, "default", project.clock)
            assert correction.status is RunStatus.FAILED
            project.clock.advance(-120)
            location = project.load(hold_s=0)
            (record,) = project.store.runs.list("default")

            monkeypatch.setenv("AGENTMESH_FAULT", "journal.finalized.before#1")
            assert run("runs", "resume", record.id).code == -9
            monkeypatch.delenv("AGENTMESH_FAULT")

            assert notes() == ["on_failure", "finally"]
            stands = project.store.runs.get(record.id)
            assert (stands.status, stands.finalized, len(stands.dagster_run_ids)) == (RunStatus.FAILED, 0, 2)
            assert project.tick(location).requests == []
            project.clock.advance(120)
            end_leases(project.store)
            (correction,) = reconcile(project.store, instance, "default", project.clock)
            assert correction.run_id == record.id
            lost = instance.get_run_by_id(stands.dagster_run_ids[1])
            assert lost is not None
            assert lost.status is dg.DagsterRunStatus.FAILURE
            stands = project.store.runs.get(record.id)
            assert (stands.status, stands.error["code"]) == (RunStatus.FAILED, "worker-lost")

            assert finalized(project, location, stands).success

            assert notes() == ["on_failure", "finally"]
            stands = project.store.runs.get(record.id)
            assert (stands.finalized, len(stands.dagster_run_ids)) == (1, 3)
            assert project.tick(location).requests == []
