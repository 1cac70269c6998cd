"""The gate sensor, tick by tick: what it claims, what it asks Dagster for, and what it leaves alone."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from gate_project import GateProject, gate_project, launched
from store_samples import take_lease

from agentmesh_dagster import build_gate_sensors
from agentmesh_dagster.errors import RunRefused, StoreError
from agentmesh_dagster.orchestration import gate_sensor
from agentmesh_dagster.orchestration.cancellation import cancel_run
from agentmesh_dagster.orchestration.continuation import check_resumable, check_retryable, finalize_here
from agentmesh_dagster.orchestration.gate_poll import Gatekeeper
from agentmesh_dagster.orchestration.gate_sensor import GateSensor
from agentmesh_dagster.orchestration.host import construct_launch
from agentmesh_dagster.orchestration.notices import courier
from agentmesh_dagster.orchestration.reconcile import reconcile
from agentmesh_dagster.orchestration.reloading import reloader
from agentmesh_dagster.orchestration.sensors import build_run_status_sensors
from agentmesh_dagster.records import Run, RunSource, RunStatus, WaitStatus

THREADS = "sensors: {use_threads: true, num_workers: 4}\n"

PAUSED = """\
kind: workflow
slug: paused
nodes:
  - {id: start, type: start}
  - {id: pause, type: delay, config: {seconds: 2h}}
  - {id: end, type: end, config: {output: "{{ steps.pause.output.waited_s >= 0 }}"}}
edges:
  - {source: start, target: pause}
  - {source: pause, target: end}
"""


BROKEN = """\
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: review, type: human, config: {{title: One}}}}
  - {{id: break, type: transform, config: {{output: "{{{{ 1 / steps.review.output.data.by }}}}"}}}}
  - {{id: end, type: end}}
edges:
  - {{source: start, target: review}}
  - {{source: review, target: break, source_handle: approved}}
  - {{source: break, target: end}}
"""

TWO_GATES = """\
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: one, type: human, config: {{title: One}}}}
  - {{id: two, type: human, config: {{title: Two}}}}
  - {{id: three, type: human, config: {{title: Three}}}}
  - {{id: end, type: end}}
edges:
  - {{source: start, target: one}}
  - {{source: one, target: two, source_handle: approved}}
  - {{source: two, target: three, source_handle: approved}}
  - {{source: three, target: end, source_handle: approved}}
"""

FINALLY = """\
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: end, type: end}}
edges:
  - {{source: start, target: end}}
finally:
  nodes:
    - {{id: clean, type: transform, config: {{output: done}}}}
"""

BROKEN_AT_ONCE = """\
kind: workflow
slug: gated
nodes:
  - {{id: start, type: start}}
  - {{id: break, type: transform, config: {{output: "{{{{ 1 / 0 }}}}"}}}}
  - {{id: end, type: end}}
edges:
  - {{source: start, target: break}}
  - {{source: break, target: end}}
"""


@pytest.fixture
def project(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    with gate_project(sqlite_url, tmp_path / "home") as opened:
        yield opened


@pytest.fixture
def threaded(sqlite_url: str, tmp_path: Path) -> Iterator[GateProject]:
    """The daemon runs sensors in threads."""
    with gate_project(sqlite_url, tmp_path / "home", THREADS) as opened:
        yield opened


class TestContinuation:
    def test_a_decision_is_one_request_that_finishes_the_run(self, database_url: str, tmp_path: Path):
        with gate_project(database_url, tmp_path / "home") as project:
            project.publish()
            location = project.load()
            tags = {"team": "refunds", "dagster/partition": "2026-01-01", "dagster/max_retries": "2"}
            run = project.waiting(location, tags=tags)
            assert project.tick(location).requests == []
            project.decide(run)

            (request,) = project.tick(location).requests

            assert request.job_name == "gated"
            assert request.run_key == request.tags["agentmesh/claim"]
            assert request.tags["dagster/parent_run_id"] == run.id
            assert request.tags["dagster/root_run_id"] == run.id
            assert request.tags["agentmesh/run_id"] == run.id
            assert request.tags["team"] == "refunds"
            assert request.tags["dagster/partition"] == "2026-01-01"
            assert request.tags["dagster/max_retries"] == "0"
            assert "agentmesh/status" not in request.tags
            assert project.tick(location).requests == []
            ended = project.run_request(location, request)
            assert (ended.id, ended.status, ended.output) == (run.id, RunStatus.SUCCEEDED, {"version": 1})
            assert len(ended.dagster_run_ids) == 2
            assert project.tick(location).requests == []

    def test_it_has_the_run_config_of_the_first_dagster_run_and_a_chain_of_parents(
        self, project: GateProject
    ):
        text = """\
        kind: workflow
        slug: gated
        input_schema: {{type: object, properties: {{who: {{type: string}}}}}}
        nodes:
          - {{id: start, type: start}}
          - {{id: review, type: human, config: {{title: One}}}}
          - {{id: again, type: human, config: {{title: Two}}}}
          - {{id: end, type: end, config: {{output: "{{{{ input.who }}}}"}}}}
        edges:
          - {{source: start, target: review}}
          - {{source: review, target: again}}
          - {{source: again, target: end}}
        """
        project.publish(text=text)
        location = project.load()
        run = project.waiting(location, config={"who": "Ada"})
        project.decide(run)
        (first,) = project.tick(location).requests
        assert first.run_config == {"who": "Ada"}
        run = project.run_request(location, first)
        assert run.status is RunStatus.WAITING
        project.decide(run)

        (second,) = project.tick(location).requests

        assert second.run_config == {"who": "Ada"}
        assert second.tags["dagster/parent_run_id"] == run.dagster_run_ids[1]
        assert second.tags["dagster/root_run_id"] == run.id
        assert second.run_key != first.run_key
        assert project.run_request(location, second).output == "Ada"

    def test_ticks_at_the_same_time_continue_each_run_once(self, database_url: str, tmp_path: Path):
        with gate_project(database_url, tmp_path / "home") as project:
            project.publish()
            location = project.load()
            runs = [project.waiting(location) for _ in range(6)]
            for run in runs:
                project.decide(run)
            found: list[dg.RunRequest] = []

            def look() -> None:
                # Not through the sensor, whose ticks take turns in one process.
                keeper = Gatekeeper(
                    store=project.store,
                    instance=project.instance,
                    project="default",
                    offered=location.get_sensor_def("agentmesh_gates").offered,
                    clock=project.clock,
                )
                seen = gate_sensor.Look()
                keeper.look(seen)
                found.extend(seen.requests)

            threads = [threading.Thread(target=look) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)

            assert sorted(request.tags["agentmesh/run_id"] for request in found) == sorted(
                run.id for run in runs
            )

    def test_a_moment_that_has_come_and_a_deadline_that_has_passed_go_on(self, project: GateProject):
        project.publish(more="timeout: 1h, on_timeout: approve")
        project.publish(text=PAUSED.replace("{", "{{").replace("}", "}}"))
        location = project.load()
        gated, paused = project.waiting(location), project.waiting(location, job="paused")
        assert project.tick(location).requests == []

        project.clock.advance(3601)
        (request,) = project.tick(location).requests
        assert request.tags["agentmesh/run_id"] == gated.id
        project.clock.advance(3601)
        jobs = [request.job_name for request in project.tick(location).requests]

        # The first claim was never bound.
        assert sorted(jobs) == ["gated", "paused"]
        assert project.store.runs.get(paused.id).status is RunStatus.WAITING

    def test_a_copy_of_a_continuation_is_whose_who_asks_for_it_and_is_retried_as_its_run(
        self, sqlite_url: str, tmp_path: Path
    ):
        with gate_project(sqlite_url, tmp_path / "home", "run_retries: {enabled: true}\n") as project:
            project.publish(text=BROKEN)
            location = project.load()
            run = project.waiting(location, tags={"dagster/max_retries": "2", "user": "ann"})
            project.decide(run)
            (request,) = project.tick(location).requests
            project.run_request(location, request)
            # As the daemon tags it, and 'Re-execute all' copies it.
            copied = {**request.tags, "dagster/sensor_name": "agentmesh_gates_2"}
            project.publish(text=BROKEN_AT_ONCE)
            location = project.load()

            copy = project.run(location, tags=copied)

            assert copy.id != run.id
            assert (copy.status, copy.triggered_by, copy.retries_left) == (RunStatus.FAILED, "ann", 2)
            assert copy.source is RunSource.CLI
            # Dagster reads the 0 of the continuation, and leaves it.
            reconcile(project.store, project.instance, "default")
            [retry] = [
                request
                for request in project.tick(location).requests
                if request.tags["agentmesh/run_id"] == copy.id
            ]
            retried = project.run_request(location, retry)
            assert (retried.id, retried.retries_left) == (copy.id, 1)

    @pytest.mark.parametrize(
        ("tags", "triggered_by", "source", "max_retries"),
        [
            ({"dagster/sensor_name": "agentmesh_gates", "user": "ann"}, "ann", RunSource.CLI, 0),
            ({"dagster/sensor_name": "agentmesh_gates_3"}, "", RunSource.CLI, 0),
            ({"dagster/sensor_name": "mails", "user": "ann"}, "mails", RunSource.TRIGGER, 0),
            ({"dagster/max_retries": "0", "agentmesh/max_retries": "3"}, "", RunSource.CLI, 3),
            # The person who asks for the copy has said something else.
            ({"dagster/max_retries": "5", "agentmesh/max_retries": "3"}, "", RunSource.CLI, 5),
            ({"dagster/max_retries": "0"}, "", RunSource.CLI, 0),
        ],
    )
    def test_what_a_copy_of_a_continuation_says_of_itself(
        self,
        project: GateProject,
        tags: dict[str, str],
        triggered_by: str,
        source: RunSource,
        max_retries: int,
    ):
        project.publish()
        made = project.instance.create_run_for_job(project.load().get_job("gated"), tags=tags)
        launch = construct_launch(made, frozenset(), project.instance)
        assert (launch.triggered_by, launch.source, launch.max_retries) == (triggered_by, source, max_retries)

    def test_the_instances_retries_are_those_of_a_copy_too(self, sqlite_url: str, tmp_path: Path):
        settings = "run_retries: {enabled: true, max_retries: 4}\n"
        with gate_project(sqlite_url, tmp_path / "home", settings) as project:
            project.publish()
            location = project.load()
            run = project.waiting(location)
            project.decide(run)
            (request,) = project.tick(location).requests
            copy = project.instance.create_run_for_job(location.get_job("gated"), tags=dict(request.tags))
            assert run.retries_left == 4
            assert construct_launch(copy, frozenset(), project.instance).max_retries == 4

    def test_a_failed_continuation_is_retried_as_often_as_the_run_may_be(self, project: GateProject):
        text = """\
        kind: workflow
        slug: gated
        nodes:
          - {{id: start, type: start}}
          - {{id: review, type: human, config: {{title: One}}}}
          - {{id: break, type: transform, config: {{output: "{{{{ 1 / steps.review.output.data.by }}}}"}}}}
          - {{id: end, type: end}}
        edges:
          - {{source: start, target: review}}
          - {{source: review, target: break}}
          - {{source: break, target: end}}
        """
        project.publish(text=text)
        location = project.load()
        run = project.waiting(location, tags={"dagster/max_retries": "2"})
        project.decide(run)
        (request,) = project.tick(location).requests
        assert project.run_request(location, request).status is RunStatus.FAILED

        for left in (1, 0):
            (retry,) = project.tick(location).requests
            assert retry.tags["agentmesh/claim"] == retry.run_key != request.run_key
            assert retry.tags["dagster/max_retries"] == "0"
            run = project.run_request(location, retry)
            assert (run.status, run.retries_left) == (RunStatus.FAILED, left)
        assert project.tick(location).requests == []
        assert len(run.dagster_run_ids) == 4

    @pytest.mark.parametrize(
        ("decision", "tags", "is_retried"),
        [
            ("approved", {}, True),
            ("approved", {"dagster/retry_on_asset_or_op_failure": "false"}, False),
            # The answer is the same however often it is heard.
            ("rejected", {}, False),
        ],
    )
    def test_what_a_retry_cannot_mend_is_not_retried_and_leaves_the_poll(
        self, project: GateProject, decision: str, tags: dict[str, str], is_retried: bool
    ):
        project.publish(text=BROKEN)
        location = project.load()
        run = project.waiting(location, tags={"dagster/max_retries": "2", **tags})
        project.decide(run, decision)
        (request,) = project.tick(location).requests
        run = project.run_request(location, request)
        assert run.status is RunStatus.FAILED
        assert (run.error["code"] == "rejected") == (decision == "rejected")

        assert len(project.tick(location).requests) == is_retried

        assert project.store.runs.get(run.id).retries_left == (2 if is_retried else 0)
        assert project.store.claims.poll("default", project.clock.now()).ready == ()


class TestHeldBack:
    def test_a_run_whose_job_is_not_loaded_is_not_claimed_and_the_tick_says_so(self, project: GateProject):
        project.publish()
        before = project.load()
        publication = project.publish(version=2)
        run = project.waiting(project.load())
        project.decide(run)

        tick = project.tick(before)

        assert tick.requests == []
        assert f"run {run.id}" in tick.skipped
        assert f"the job gated__p{publication} is not loaded yet" in tick.skipped
        assert "AGENTMESH_DAGSTER_URL" in tick.skipped
        (request,) = project.tick(project.load()).requests
        assert request.job_name == "gated"

    def test_a_missing_job_is_asked_of_the_webserver_once_a_minute(
        self, project: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        project.publish()
        before = project.load()
        project.publish(version=2)
        run = project.waiting(project.load())
        project.decide(run)
        with webserver() as (url, asked):
            monkeypatch.setenv("AGENTMESH_DAGSTER_URL", url)
            for _ in range(3):
                tick = project.tick(before)
                reloader(project.agentmesh).wait(30)

        assert "AGENTMESH_DAGSTER_URL" not in tick.skipped
        assert asked == [{"name": "agentmesh"}]

    def test_a_run_of_another_dagster_instance_is_not_claimed(self, project: GateProject, tmp_path: Path):
        project.publish()
        location = project.load()
        run = project.waiting(location)
        project.decide(run)
        with dg.DagsterInstance.local_temp(str(tmp_path)) as other:
            tick = GateProject(project.agentmesh, other).tick(location)
        assert tick.requests == []
        assert "not in this Dagster instance" in tick.skipped
        assert len(project.tick(location).requests) == 1

    def test_a_run_whose_dagster_runs_were_deleted_is_said_to_need_a_new_one(self, project: GateProject):
        project.publish()
        location = project.load()
        run = project.waiting(location)
        project.decide(run)
        project.instance.delete_run(run.id)

        tick = project.tick(location)

        assert tick.requests == []
        assert "Set DAGSTER_HOME to the one that ran it" in tick.skipped
        assert f"`agentmesh runs cancel {run.id[:8]}` ends it" in tick.skipped
        assert "`agentmesh run workflow gated` starts a new one" in tick.skipped
        # They refuse it.
        assert "runs resume" not in tick.skipped
        with pytest.raises(RunRefused) as refused:
            check_resumable(project.store, project.instance, run, project.clock)
        assert refused.value.code == "dagster-run-missing"
        assert refused.value.message in tick.skipped
        # And that ends it.
        assert cancel_run(project.store, project.instance, run, by="ann").run.status is RunStatus.CANCELED
        assert project.tick(location).skipped == "nothing to continue"
        with pytest.raises(RunRefused) as refused:
            check_retryable(project.store, project.instance, project.store.runs.get(run.id), project.clock)
        assert refused.value.code == "dagster-run-missing"
        assert "runs cancel" not in refused.value.message

    def test_a_run_whose_dagster_runs_were_deleted_is_finalized_by_the_command_that_is_named(
        self, project: GateProject, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        project.publish(text=FINALLY)
        location = project.load()
        run = project.run(location)
        assert run.status is RunStatus.SUCCEEDED
        project.instance.delete_run(run.id)
        assert f"`agentmesh runs resume {run.id[:8]}` finalizes it" in project.tick(location).skipped
        monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)

        assert finalize_here(project.agentmesh, tmp_path, run, instance=project.instance, by="ann")

        assert project.store.runs.get(run.id).finalized == 1
        assert project.tick(location).skipped == "nothing to continue"

    def test_a_run_goes_on_from_those_of_its_dagster_runs_that_are_left(self, project: GateProject):
        project.publish(text=TWO_GATES)
        location = project.load()
        run = project.waiting(location)
        for deleted in (-1, 0, 0):
            project.decide(run)
            [request] = project.tick(location).requests
            run = project.run_request(location, request)
            if run.status is RunStatus.WAITING:
                project.instance.delete_run(run.dagster_run_ids[deleted])
        assert run.status is RunStatus.SUCCEEDED

    def test_a_run_goes_on_only_after_its_dagster_run_has_ended(self, project: GateProject):
        project.publish()
        location = project.load()
        run = project.waiting(location)
        project.decide(run)
        at_work(project, run)

        tick = project.tick(location)
        assert tick.requests == []
        assert "has not ended yet" in tick.skipped

        # Its worker was killed in the moment between its last row and Dagster's last event.
        project.clock.advance(120)
        assert len(project.tick(location).requests) == 1
        told = project.instance.get_run_by_id(run.id)
        assert told is not None
        assert told.status is dg.DagsterRunStatus.SUCCESS

    def test_what_is_claimed_is_requested_although_dagsters_storage_fails_in_the_middle(
        self, project: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        project.publish()
        location = project.load()
        first, second = project.waiting(location), project.waiting(location)
        project.decide(first)
        project.decide(second)
        get = project.instance.get_run_by_id

        def first_only(run_id: str) -> Any:
            if run_id == second.id:
                raise OSError("Dagster's database is gone")
            return get(run_id)

        monkeypatch.setattr(project.instance, "get_run_by_id", first_only)
        (request,) = project.tick(location).requests
        assert request.tags["agentmesh/run_id"] == first.id
        with pytest.raises(Exception, match="database is gone"):
            project.tick(location)

    def test_what_lasts_ends_one_tick_early_and_no_other(
        self, threaded: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(gate_sensor, "_UNTOLD_S", 0.0)
        threaded.publish()
        location = threaded.load(poll_s=0.01, hold_s=40.0)
        lost, other = threaded.waiting(location), threaded.waiting(location)
        threaded.decide(lost)
        threaded.instance.delete_run(lost.id)
        assert (
            f"run {lost.id}: the Dagster runs of run {lost.id!r} are not in"
            in threaded.tick(location).skipped
        )
        looked: list[int] = []
        look = Gatekeeper.look
        monkeypatch.setattr(Gatekeeper, "look", lambda *args: (looked.append(1), look(*args))[1])

        with background(lambda: threaded.tick(location)) as (_, answer):
            wait_for(lambda: len(looked) > 5)
            threaded.decide(other)

        (tick,) = answer
        assert [request.tags["agentmesh/run_id"] for request in tick.requests] == [other.id]

    def test_what_is_claimed_is_requested_although_the_next_look_fails(
        self, project: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        project.publish()
        location = project.load()
        project.decide(project.waiting(location))
        poll = project.store.claims.poll
        answers = iter([poll])

        def first_only(*arguments: Any) -> Any:
            ask = next(answers, None)
            if ask is None:
                raise StoreError("gone", code="unreachable")
            return ask(*arguments)

        monkeypatch.setattr(project.store.claims, "poll", first_only)
        assert len(project.tick(location).requests) == 1
        with pytest.raises(Exception, match="gone"):
            project.tick(location)


def at_work(project: GateProject, run: Run) -> None:
    """Dagster has not heard of the end of the run's last Dagster run."""
    event = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.RUN_START.value, job_name="gated", message="at work"
    )
    project.instance.report_dagster_event(event, run.dagster_run_ids[-1])


class TestClaims:
    """A claim that nobody has bound in time."""

    def claimed(self, project: GateProject) -> tuple[Run, dg.RunRequest]:
        project.publish()
        location = project.load()
        run = project.waiting(location)
        project.decide(run)
        (request,) = project.tick(location).requests
        return run, request

    def test_is_given_to_another_dagster_run_where_none_was_launched(self, project: GateProject):
        _, request = self.claimed(project)
        project.clock.advance(59)
        assert project.tick(project.load()).requests == []
        project.clock.advance(2)

        (again,) = project.tick(project.load()).requests

        assert again.run_key != request.run_key

    def test_is_kept_while_its_dagster_run_queues(self, project: GateProject):
        _, request = self.claimed(project)
        queued = launched(project, request, dg.DagsterRunStatus.QUEUED)
        for _ in range(3):
            project.clock.advance(3600)
            assert project.tick(project.load()).requests == []
        project.instance.report_run_canceled(queued)
        project.clock.advance(61)
        assert len(project.tick(project.load()).requests) == 1

    def test_is_kept_while_its_dagster_run_starts_but_not_for_ever(self, project: GateProject):
        _, request = self.claimed(project)
        starting = launched(project, request, dg.DagsterRunStatus.STARTING)
        project.clock.advance(70)
        assert project.tick(project.load()).requests == []
        project.clock.advance(900)

        (again,) = project.tick(project.load()).requests

        lost = project.instance.get_run_by_id(starting.run_id)
        assert lost is not None
        assert lost.status is dg.DagsterRunStatus.FAILURE
        # It comes too late, and starts nothing.
        location = project.load()
        late = location.get_job("gated").execute_in_process(
            instance=project.instance, tags=dict(request.tags), raise_on_error=False
        )
        assert not late.success
        assert project.run_request(location, again).status is RunStatus.SUCCEEDED
        (first,) = project.store.runs.list("default", limit=None)
        assert len(first.dagster_run_ids) == 2

    def test_a_copy_of_its_dagster_run_is_a_run_of_its_own(self, project: GateProject):
        run, request = self.claimed(project)
        location = project.load()
        assert project.run_request(location, request).status is RunStatus.SUCCEEDED
        copy = project.run(location, tags=request.tags)
        assert copy.id != run.id
        assert copy.status is RunStatus.WAITING


class TestHolding:
    def test_a_tick_is_held_open_until_a_decision_comes(self, threaded: GateProject):
        threaded.publish()
        location = threaded.load(hold_s=40.0)
        run = threaded.waiting(location)
        with background(lambda: threaded.tick(location)) as (began, answer):
            began.wait(30)
            threaded.decide(run)
        (tick,) = answer
        assert [request.tags["agentmesh/run_id"] for request in tick.requests] == [run.id]

    @pytest.mark.parametrize("settings", ["", "sensors: {use_threads: true, num_workers: 1}\n"])
    def test_it_looks_once_where_other_sensors_would_have_to_wait(
        self, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str
    ):
        looked: list[int] = []
        look = Gatekeeper.look
        monkeypatch.setattr(Gatekeeper, "look", lambda *args: (looked.append(1), look(*args))[1])
        with gate_project(sqlite_url, tmp_path / "home", settings) as project:
            project.publish()
            assert project.tick(project.load(poll_s=0.01, hold_s=20.0)).skipped == "nothing to continue"
        assert len(looked) == 1

    def test_it_ends_early_when_the_code_server_is_asked_to_stop(self, threaded: GateProject):
        threaded.publish()
        location = threaded.load(hold_s=40.0)
        event, over = threading.Event(), threading.Event()
        # As Dagster's code server has it, which goes on waiting for the calls that it has taken on.
        server = threading.Thread(
            target=lambda asked: asked.wait() and over.wait(), args=[event], name="grpc-server-termination"
        )
        server.start()
        try:
            with background(lambda: threaded.tick(location)) as (began, answer):
                began.wait(30)
                event.set()
            (tick,) = answer
            assert tick.skipped == "nothing to continue"
        finally:
            event.set()
            over.set()
            server.join()

    def test_the_next_sensor_takes_over_from_one_that_has_found_something(self, threaded: GateProject):
        threaded.publish()
        location = threaded.load()
        offered = location.get_sensor_def("agentmesh_gates").offered
        runs = [threaded.waiting(location) for _ in range(2)]
        sensors = [
            GateSensor(threaded.agentmesh, number=number, clock=threaded.clock).with_jobs(offered)
            for number in (1, 2)
        ]

        def tick(sensor: GateSensor) -> list[str]:
            found = sensor.evaluate(dg.build_sensor_context(instance=threaded.instance))
            assert isinstance(found, list)
            return [request.tags["agentmesh/run_id"] for request in found]

        with (
            background(lambda: tick(sensors[0])) as (_, first),
            background(lambda: tick(sensors[1])) as (_, second),
        ):
            threaded.decide(runs[0])
            wait_for(lambda: bool(first or second))
            threaded.decide(runs[1])
        assert sorted([first[0], second[0]]) == sorted([[runs[0].id], [runs[1].id]])

    def test_several_are_named_and_staggered(self, threaded: GateProject):
        sensors = build_gate_sensors(threaded.agentmesh, count=3)
        assert [sensor.name for sensor in sensors] == [
            "agentmesh_gates",
            "agentmesh_gates_2",
            "agentmesh_gates_3",
        ]
        held = [sensor._held_for_s(threaded.instance) for sensor in sensors]
        assert held == [44.0, 34.0, 24.0]
        assert max(held) < 60

    def test_it_is_held_shorter_where_dagster_gives_a_tick_less_time(
        self, threaded: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS", "20")
        assert GateSensor(threaded.agentmesh)._held_for_s(threaded.instance) == 15.0


class TestBesides:
    def test_its_targets_are_names_and_build_nothing(
        self, project: GateProject, monkeypatch: pytest.MonkeyPatch
    ):
        project.publish()
        monkeypatch.setattr(
            "agentmesh_dagster.orchestration.code_location.build_published_job",
            lambda *_a, **_k: pytest.fail("a job was built"),
        )
        sensor = project.load().get_sensor_def("agentmesh_gates")
        assert [target.job_name for target in sensor.targets] == ["gated", "agentmesh_finalize"]
        assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
        assert project.tick(project.load()).skipped == "nothing to continue"

    def test_notices_are_sent_beside_the_tick(self, project: GateProject):
        text = """\
        kind: workflow
        slug: gated
        nodes:
          - {{id: start, type: start}}
          - {{id: review, type: human, config: {{title: One}}, notify: [{{type: log}}]}}
          - {{id: end, type: end}}
        edges:
          - {{source: start, target: review}}
          - {{source: review, target: end}}
        """
        project.publish(text=text)
        location = project.load()
        wait = project.gate(project.waiting(location))

        assert project.tick(location).skipped == "nothing to continue"
        courier(project.agentmesh).wait(30)

        (notice,) = project.store.notices.list(wait.id)
        assert notice.sent_at is not None

    def test_canceling_a_waiting_run_closes_its_gates_and_its_queued_continuation(self, project: GateProject):
        project.publish(more="timeout: 3d")
        location = project.load()
        run = project.waiting(location)
        wait = project.gate(run)
        project.decide(run)
        (request,) = project.tick(location).requests
        queued = launched(project, request, dg.DagsterRunStatus.QUEUED)
        other = project.waiting(location)
        open_wait = project.gate(other)

        cancel_run(project.store, project.instance, run, by="bob")
        done = cancel_run(project.store, project.instance, other, by="bob")

        assert [closed.id for closed in done.closed] == [open_wait.id]
        assert done.run.status is RunStatus.CANCELED
        assert project.store.waits.get("default", wait.id).status is WaitStatus.DECIDED
        stopped = project.instance.get_run_by_id(queued.run_id)
        assert stopped is not None
        assert stopped.status is dg.DagsterRunStatus.CANCELED
        project.clock.advance(7200)
        assert project.tick(location).requests == []

    def test_a_canceled_run_is_not_revived_by_a_continuation_that_was_on_its_way(self, project: GateProject):
        project.publish()
        location = project.load()
        run = project.waiting(location)
        project.decide(run)
        (request,) = project.tick(location).requests
        cancel_run(project.store, project.instance, run, by="bob")

        late = location.get_job("gated").execute_in_process(
            instance=project.instance, tags=dict(request.tags), raise_on_error=False
        )

        assert not late.success
        assert project.store.runs.get(run.id).status is RunStatus.CANCELED

    def test_a_continuation_that_is_canceled_in_dagster_cancels_its_run(self, project: GateProject):
        project.publish()
        location = project.load()
        run = project.waiting(location)
        project.decide(run)
        (request,) = project.tick(location).requests
        queued = launched(project, request, dg.DagsterRunStatus.QUEUED)
        project.instance.report_run_canceled(queued)
        canceled = project.instance.get_run_by_id(queued.run_id)
        assert canceled is not None
        (_, sensor) = build_run_status_sensors(project.agentmesh)
        context = dg.build_run_status_sensor_context(
            sensor_name=sensor.name,
            dagster_event=dg.DagsterEvent(
                event_type_value=dg.DagsterEventType.RUN_CANCELED.value, job_name="gated"
            ),
            dagster_instance=project.instance,
            dagster_run=canceled,
        )

        said = sensor(context)

        assert run.id in said.skip_message
        assert project.store.runs.get(run.id).status is RunStatus.CANCELED

    def test_a_run_that_is_over_lets_its_lease_be_taken(self, project: GateProject):
        project.publish()
        run = project.waiting(project.load())
        assert take_lease(project.store, "next", run.id)


@contextmanager
def background(work: Any) -> Iterator[tuple[threading.Event, list[Any]]]:
    """Does work in a thread; gives an event of its beginning and the list that gets its answer."""
    began, answers = threading.Event(), []

    def run() -> None:
        began.set()
        answers.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield began, answers
    finally:
        thread.join(60)
        assert not thread.is_alive()


def wait_for(look: Any) -> None:
    pause = threading.Event()
    for _ in range(600):
        if look():
            return
        pause.wait(0.05)
    pytest.fail("not within 30 s")


@contextmanager
def webserver() -> Iterator[tuple[str, list[Any]]]:
    """Answers a reload as Dagster's webserver does."""
    asked: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["variables"])
            entry = {"__typename": "WorkspaceLocationEntry", "locationOrLoadError": None}
            body = json.dumps({"data": {"reloadRepositoryLocation": entry}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
