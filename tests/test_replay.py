"""Continuing a run: a second Dagster run repeats no finished call, and refuses what it must not do."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import ClassVar

import dagster as dg
import forked
import pytest
import workflow_functions
from fake_http import FakeHttp
from fake_provider import FakeProvider
from store_samples import end_leases, take_lease
from workflow_project import open_project

from agentmesh_dagster.orchestration.reconcile import reconcile
from agentmesh_dagster.records import RunStatus, StepStatus, Vote, WaitKind, WaitStatus

RISK = {"type": "object", "required": ["risk"], "properties": {"risk": {"enum": ["low", "high"]}}}


def chain(*nodes, **more):
    nodes = [{"id": "start", "type": "start"}, *nodes, {"id": "end", "type": "end"}]
    edges = [{"source": a["id"], "target": b["id"]} for a, b in itertools.pairwise(nodes)]
    return {"kind": "workflow", "slug": "sample", "nodes": nodes, "edges": edges, **more}


def ask(id="ask", **more):
    config = {"agent": "triage", "prompt": "Hello from {{ run.id }}", **more.pop("config", {})}
    return {"id": id, "type": "agent", "config": config, **more}


def code(id, function, **input):
    return {
        "id": id,
        "type": "code",
        "config": {"function": f"workflow_functions:{function}", "input": input},
    }


def agent():
    return {"kind": "agent", "slug": "triage", "model": "openai/fake"}


@pytest.fixture
def fake():
    with FakeProvider() as server:
        yield server


@pytest.fixture
def project(tmp_path, sqlite_url, monkeypatch, fake):
    with open_project(tmp_path, sqlite_url, monkeypatch, api_base=fake.base_url) as opened:
        yield opened


def flaky_workflow(project, fake):
    project.publish(agent(), chain(ask(), code("flaky", "fail_first", name="flaky")))


class TestFromFailure:
    def test_goes_on_where_it_stopped_and_repeats_no_call(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample", {"x": 1})
        assert not first.success
        failed = project.run_row(first.run_id)
        assert failed.status is RunStatus.FAILED
        assert fake.count == 1
        before = project.steps(first.run_id)

        second = project.retry("sample", first.run_id)
        assert second.success
        assert fake.count == 1
        run = project.run_row(second.run_id)
        assert run.id == first.run_id
        assert run.dagster_run_ids == (first.run_id, second.run_id)
        assert (run.status, run.output, run.error) == (RunStatus.SUCCEEDED, 2, None)
        assert run.finished_at > failed.finished_at
        assert run.input == {"x": 1}
        assert (run.input_tokens, run.output_tokens) == (11, 7)
        assert run.steps_executed == 4
        after = project.steps(first.run_id)
        assert after["ask"] == before["ask"]
        assert after["ask/llm/1"] == before["ask/llm/1"]
        assert (after["flaky"].attempt, after["flaky"].status) == (2, StepStatus.SUCCEEDED)
        assert after["flaky"].dagster_run_id == second.run_id
        types = [kind for kind, _ in project.events(first.run_id)]
        assert types.count("run.started") == 1
        assert types.count("agent.request") == 1
        assert types[-1] == "run.completed"
        tags = project.instance.get_run_by_id(second.run_id).tags
        assert tags["agentmesh/run_id"] == first.run_id
        assert tags["agentmesh/status"] == "succeeded"

    def test_a_retry_of_a_retry_continues_the_same_run(self, project, fake):
        project.publish(agent(), chain(ask(), code("flaky", "fail_first", name="flaky", failures=2)))
        first = project.execute("sample")
        second = project.retry("sample", first.run_id)
        third = project.retry("sample", second.run_id)
        assert (second.success, third.success) == (False, True)
        assert project.run_row(third.run_id).id == first.run_id
        assert fake.count == 1

    def test_all_steps_as_an_automatic_retry_replays_every_finished_node(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample")
        second = project.execute(
            "sample",
            reexecution_options=dg.ReexecutionOptions(parent_run_id=first.run_id),
            tags={"dagster/retry_number": "1"},
        )
        assert second.success
        assert fake.count == 1
        assert project.run_row(second.run_id).id == first.run_id
        (output,) = [e for e in second.events_for_node("ask") if e.is_successful_output]
        assert output.step_output_data.metadata["replayed"].value is True

    def test_a_call_that_failed_is_made_again(self, project, fake):
        fake.push({"status": 500}, {"text": "now"})
        project.publish(agent(), chain(ask()))
        first = project.execute("sample")
        second = project.retry("sample", first.run_id)
        assert second.success
        assert fake.count == 2
        assert project.steps(first.run_id)["ask/llm/1"].attempt == 2

    def test_an_agent_that_gave_bad_objects_is_asked_anew(self, project, fake):
        fake.push(*[{"object": {"risk": "medium"}}] * 2)
        project.publish(agent(), chain(ask(config={"output_schema": RISK})))
        first = project.execute("sample")
        assert not first.success
        fake.push({"object": {"risk": "high"}})
        second = project.retry("sample", first.run_id)
        assert fake.count == 3
        assert second.success
        assert project.run_row(first.run_id).output["risk"] == "high"

    def test_a_repair_that_failed_is_continued_over_attempts_and_runs(self, project, fake):
        bad, down = {"object": {"risk": "medium"}}, {"status": 500}
        fake.push(bad, down, bad, down)
        retry = {"max_attempts": 2, "delay_s": 0}
        project.publish(agent(), chain(ask(config={"output_schema": RISK}, retry=retry)))
        first = project.execute("sample")
        assert not first.success
        fake.push({"object": {"risk": "high"}}, {"object": {"risk": "high"}})
        second = project.retry("sample", first.run_id)
        assert second.success, project.run_row(first.run_id).error


class TestRefusals:
    def test_another_answer_under_the_key_is_an_error_that_names_the_step(self, project, fake, tmp_path):
        fake.push(*[{"object": {"risk": "medium"}}] * 2)
        project.publish(agent(), chain(ask(config={"output_schema": RISK})))
        first = project.execute("sample")
        with sqlite3.connect(tmp_path / "store" / "agentmesh.db") as connection:
            connection.execute("UPDATE steps SET fingerprint = 'other' WHERE key = 'ask/llm/1'")
        connection.close()
        second = project.retry("sample", first.run_id)
        assert not second.success
        error = project.run_row(first.run_id).error
        assert error["code"] == "fingerprint"
        assert "'ask/llm/1'" in error["message"]
        assert fake.count == 2

    def test_re_execute_all_is_a_new_run(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample")
        copied = dict(project.instance.get_run_by_id(first.run_id).tags)
        second = project.execute(
            "sample", reexecution_options=dg.ReexecutionOptions(parent_run_id=first.run_id), tags=copied
        )
        assert second.success
        assert project.run_row(second.run_id).id == second.run_id
        assert project.run_row(first.run_id).status is RunStatus.FAILED
        assert fake.count == 2
        assert project.instance.get_run_by_id(second.run_id).tags["agentmesh/run_id"] == second.run_id

    def test_a_selection_of_steps_is_refused_with_a_sentence(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample")
        options = dg.ReexecutionOptions(parent_run_id=first.run_id, step_selection=["flaky"])
        second = project.execute("sample", reexecution_options=options)
        assert not second.success
        failure = project.step_error(second.run_id, "flaky")
        assert failure.metadata["code"].value == "step-selection"
        assert "Re-execute from failure" in failure.description
        run = project.run_row(first.run_id)
        assert run.dagster_run_ids == (first.run_id,)
        assert run.status is RunStatus.FAILED
        assert workflow_functions.notes() == ["flaky"]

    def test_a_selection_of_ops_is_refused_too(self, project, fake):
        flaky_workflow(project, fake)
        result = project.execute("sample", op_selection=["start", "ask"])
        assert not result.success
        assert project.step_error(result.run_id).metadata["code"].value == "step-selection"
        assert fake.count == 0

    def test_a_run_of_another_definition_is_refused_and_stays_as_it_is(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample")
        before = project.run_row(first.run_id)
        project.publish(agent(), chain(ask(), code("flaky", "fail_first", name="flaky", failures=5)))
        second = project.retry("sample", first.run_id)
        assert not second.success
        failure = project.step_error(second.run_id, "flaky")
        assert failure.metadata["code"].value == "other-definition"
        assert "publication" in failure.description
        after = project.run_row(first.run_id)
        assert (after.status, after.error) == (before.status, before.error)

    def test_while_another_dagster_run_holds_the_lease_it_is_refused(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample")
        assert take_lease(project.store, "another", first.run_id)
        second = project.retry("sample", first.run_id)
        assert not second.success
        failure = project.step_error(second.run_id, "flaky")
        assert failure.metadata["code"].value == "lease-held"
        assert "nothing was done twice" in failure.description
        assert workflow_functions.notes() == ["flaky"]
        assert project.run_row(first.run_id).status is not RunStatus.SUCCEEDED
        asyncio.run(project.store.journal.release_lease(first.run_id, "another"))
        # What was refused has no journal of its own: its retry goes on with the same run.
        assert project.retry("sample", second.run_id).success
        assert [run.id for run in project.store.runs.list("default")] == [first.run_id]
        assert project.run_row(first.run_id).status is RunStatus.SUCCEEDED

    def test_the_lease_is_given_back_at_the_end(self, project, fake):
        flaky_workflow(project, fake)
        first = project.execute("sample")
        assert take_lease(project.store, "next", first.run_id)


class TestGateThatTimedOut:
    def test_its_retry_asks_anew(self, project):
        gate = {"id": "review", "type": "human", "config": {"title": "Go on?", "timeout": "1h"}}
        project.publish(chain(gate))
        run_id = project.execute("sample").run_id
        waits = project.store.waits
        later = datetime.now(timezone.utc) + timedelta(hours=2)
        assert [wait.status for wait in waits.settle_due("default", later)] == [WaitStatus.EXPIRED]
        claim = project.store.claims.claim(run_id, reason="resume")
        failed = project.execute("sample", tags={"agentmesh/claim": claim.id})
        assert project.run_row(run_id).error["code"] == "gate-timeout"
        assert project.retry("sample", failed.run_id).success
        assert project.run_row(run_id).status is RunStatus.WAITING
        first, second = waits.list("default", run_id=run_id)
        assert (first.status, second.status) == (WaitStatus.EXPIRED, WaitStatus.OPEN)
        vote = Vote(by="anna", decision="approved", at=datetime.now(timezone.utc))
        waits.decide("default", second.id, vote)
        claim = project.store.claims.claim(run_id, reason="resume")
        project.execute("sample", tags={"agentmesh/claim": claim.id})
        assert project.run_row(run_id).status is RunStatus.SUCCEEDED


class TestKilled:
    """The process is killed while a call is on its way."""

    @pytest.fixture
    def project(self, tmp_path, sqlite_url, monkeypatch):
        monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
        with open_project(tmp_path, sqlite_url, monkeypatch, lease_s=2.0) as opened:
            yield opened

    @pytest.fixture
    def shop(self):
        with FakeHttp() as server:
            yield server

    def tool(self, shop, path="/slow/60", **more):
        config = {"method": "POST", "url": shop.url + path, "json": {"order": "{{ input.order }}"}}
        return {"kind": "tool", "slug": "pay", "type": "http", "config": config, **more}

    def kill_during(self, project, ready, input=None):
        """Executes in another process, kills it when `ready`, and lets the reconciler find out."""
        with forked.start(["-c", project.script("sample", input)]) as process:
            deadline = time.monotonic() + 60
            while not ready():
                assert process.poll() is None, process.err[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.02)
        (run,) = project.instance.get_runs()
        corrected = []
        deadline = time.monotonic() + 20
        while not corrected:
            assert time.monotonic() < deadline, "the reconciler did not find the killed run"
            corrected = reconcile(project.store, project.instance, "default")
            time.sleep(0.05)
        assert project.run_row(run.run_id).status is RunStatus.FAILED
        assert project.instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
        return run.run_id

    CALL: ClassVar = {
        "id": "call",
        "type": "tool",
        "config": {"tool": "pay", "input": {"order": "{{ input.order }}"}},
    }

    def cut_off(self, project, shop, on_unknown):
        """A run whose tool with side effects was cut off in the middle of its call."""
        project.publish(
            self.tool(shop, side_effects=True, path="/slow/3"), chain({**self.CALL, "on_unknown": on_unknown})
        )
        run_id = self.kill_during(project, lambda: shop.calls, {"order": "A1"})
        assert project.steps(run_id)["call/tool/1"].status is StepStatus.RUNNING
        return run_id

    def test_a_tool_with_side_effects_is_unknown_and_not_repeated(self, project, shop):
        run_id = self.cut_off(project, shop, "fail")
        for _ in range(2):
            result = project.retry("sample", project.run_row(run_id).dagster_run_ids[-1])
            assert not result.success
            step = project.steps(run_id)["call/tool/1"]
            assert step.status is StepStatus.UNKNOWN
            assert project.run_row(run_id).error["code"] == "step-unknown"
            assert len(shop.calls) == 1

    @pytest.mark.parametrize("decision", ["happened", "repeat", "fail"])
    def test_a_person_says_whether_an_unknown_call_took_effect(self, project, shop, decision):
        run_id = self.cut_off(project, shop, "human")
        assert project.retry("sample", run_id).success
        assert project.run_row(run_id).status is RunStatus.WAITING
        assert project.steps(run_id)["call/tool/1"].status is StepStatus.UNKNOWN
        [wait] = project.store.waits.list("default", run_id=run_id)
        assert wait.kind is WaitKind.UNKNOWN
        assert wait.data["input"] == {"tool": "pay", "input": {"order": "A1"}}
        data = {"receipt": "seen"} if decision == "happened" else None
        vote = Vote(by="anna", decision=decision, data=data, at=datetime.now(timezone.utc))
        project.store.waits.decide("default", wait.id, vote)
        claim = project.store.claims.claim(run_id, reason="resume")
        assert claim is not None
        project.execute("sample", {"order": "A1"}, tags={"agentmesh/claim": claim.id})
        run = project.run_row(run_id)
        if decision == "fail":
            assert run.error["code"] == "step-unknown"
            # Whoever retries it is asked again.
            assert project.retry("sample", run.dagster_run_ids[-1]).success
            labels = [wait.label for wait in project.store.waits.list("default", run_id=run_id)]
            assert labels == ["unknown-1", "unknown-1#2"]
        else:
            assert run.status is RunStatus.SUCCEEDED
        if decision == "happened":
            assert run.output == {"receipt": "seen"}
        assert len(shop.calls) == (2 if decision == "repeat" else 1)

    def test_an_unknown_call_is_repeated_where_the_node_says_so(self, project, shop):
        run_id = self.cut_off(project, shop, "retry")
        assert project.retry("sample", run_id).success
        assert project.run_row(run_id).status is RunStatus.SUCCEEDED
        assert len(shop.calls) == 2

    def test_an_idempotent_tool_is_repeated_with_the_same_key(self, project, shop):
        tool = self.tool(shop, side_effects=True, idempotent=True, path="/slow/3")
        project.publish(tool, chain(self.CALL))
        run_id = self.kill_during(project, lambda: shop.calls, {"order": "A1"})
        assert project.retry("sample", run_id).success
        ((key, times),) = shop.idempotency_keys.items()
        assert key
        assert times == 2
        step = project.steps(run_id)["call/tool/1"]
        assert (step.status, step.attempt) == (StepStatus.SUCCEEDED, 2)

    def test_a_model_call_is_made_again_and_finished_ones_are_not(self, project):
        with FakeProvider([{"text": "first"}, {"hang": True}, {"text": "second"}]) as fake:
            project.api_base = fake.base_url
            project.publish(agent(), chain(ask("one"), ask("two")))
            run_id = self.kill_during(project, lambda: fake.count == 2)
            result = project.retry("sample", run_id)
            assert result.success
            assert fake.count == 3
            steps = project.steps(run_id)
            assert project.run_row(run_id).output["text"] == "second"
            assert (steps["two/llm/1"].attempt, steps["one/llm/1"].attempt) == (2, 1)
            assert json.dumps(steps["one"].output["text"]) == '"first"'


class TestTwoAtOnce:
    """Only one Dagster run works on a run."""

    @contextmanager
    def in_background(self, call):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(call)
            try:
                yield future
            finally:
                workflow_functions.note("go")

    def test_the_one_that_is_refused_does_not_disturb_the_other(self, project):
        hold = code("hold", "wait_for_note", name="go", then="held")
        project.publish(chain(code("flaky", "fail_first", name="flaky"), hold))
        first = project.execute("sample")
        with self.in_background(lambda: project.retry("sample", first.run_id)) as working:
            _poll(lambda: "held begins" in workflow_functions.notes())
            refused = project.retry("sample", first.run_id)
            assert not refused.success
            assert project.step_error(refused.run_id, "flaky").metadata["code"].value == "lease-held"
            # The reconciler and the sensors look in now: the run goes on, whatever became of the last Dagster run.
            assert reconcile(project.store, project.instance, "default") == []
            assert project.run_row(first.run_id).status is RunStatus.RUNNING
            workflow_functions.note("go")
            assert working.result(timeout=30).success
        run = project.run_row(first.run_id)
        assert (run.status, run.output) == (RunStatus.SUCCEEDED, "held")
        assert workflow_functions.notes().count("held") == 1

    def test_one_that_was_taken_over_notices_and_ends(self, tmp_path, sqlite_url, monkeypatch):
        with open_project(tmp_path, sqlite_url, monkeypatch, lease_s=0.6) as project:
            pause = {"id": "pause", "type": "delay", "config": {"seconds": 1.5}}
            project.publish(chain(pause, code("after", "note", name="after")))
            with self.in_background(lambda: project.execute("sample")) as working:
                _poll(
                    lambda: (
                        (runs := project.store.runs.list("default")) and "pause" in project.steps(runs[0].id)
                    )
                )
                (run,) = project.store.runs.list("default")
                # As after a worker was suspended for longer than its lease.
                end_leases(project.store)
                assert take_lease(project.store, "another", run.id)
                result = working.result(timeout=30)
            assert not result.success
            assert project.step_error(run.id, "pause").metadata["code"].value == "lease-lost"
            assert "after" not in workflow_functions.notes()
            assert project.run_row(run.id).status is RunStatus.RUNNING
            assert project.steps(run.id)["pause"].status is StepStatus.RUNNING


def _poll(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)
