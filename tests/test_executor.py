"""The executor, on real runs of a persistent instance."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import dagster as dg
import executor_jobs as jobs
import forked
import pytest
from dagster import DagsterEventType as Event
from dagster import DagsterRunStatus as Status
from dagster_server import descendants, is_alive, wait_until

from agentmesh_dagster.orchestration.executor import EXECUTOR_NAME, build_executor

TESTS = Path(__file__).parent

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def instance(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("EXECUTOR_TEST_DIR", str(tmp_path))
    # The processes of runs import the jobs and the package from here.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    with dg.DagsterInstance.get() as opened:
        yield opened


def execute(instance, job, **options):
    options.setdefault("raise_on_error", False)
    return dg.execute_job(dg.reconstructable(job), instance=instance, **options)


def step_events(instance, run_id):
    """The stored events of each step, in the order of storage."""
    events = {}
    for entry in instance.all_logs(run_id):
        if entry.dagster_event and entry.step_key:
            events.setdefault(entry.step_key, []).append(entry.dagster_event.event_type_value)
    return events


def most_at_once(lines):
    running, most = 0, 0
    for line in lines:
        running += {"begin": 1, "end": -1}.get(line.split()[0], 0)
        most = max(most, running)
    return most


class Started:
    """A run in a process of its own, which shall be interrupted."""

    def __init__(self, instance, job, ready):
        self.instance = instance
        self.process = forked.start([jobs.__file__, job])
        deadline = time.monotonic() + 60
        while not all(f"begin {name}" in jobs.notes() for name in ready):
            assert time.monotonic() < deadline, self.process.err
            assert self.process.poll() is None, self.process.err
            time.sleep(0.02)

    def run(self):
        (run,) = self.instance.get_runs()
        return run

    def end_seconds(self, number):
        sent = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return time.monotonic() - sent


@pytest.fixture
def start(instance):
    started = []

    def start_job(job, ready):
        started.append(Started(instance, job, ready))
        return started[-1]

    yield start_job
    for each in started:
        each.process.kill()


def test_a_full_pool_delays_steps_and_never_hangs(instance):
    instance.event_log_storage.set_concurrency_slots("llm", 2)
    assert execute(instance, jobs.pooled).success
    lines = jobs.notes()
    assert Counter(line.split()[0] for line in lines) == {"begin": 6, "end": 6}
    assert most_at_once(lines) == 2
    info = instance.event_log_storage.get_concurrency_info("llm")
    assert info.active_slot_count == 0
    assert info.pending_step_count == 0


def test_fifty_steps_run_at_once(instance):
    assert execute(instance, jobs.wide).success
    assert most_at_once(jobs.notes()) == 50


def test_max_concurrent_bounds_the_steps(instance):
    assert execute(instance, jobs.narrow).success
    assert most_at_once(jobs.notes()) == 2


@pytest.mark.parametrize("requested", [True, False], ids=["after_a_termination_request", "by_signal_alone"])
def test_sigterm_cancels_the_run_and_its_coroutines_clean_up(start, instance, requested):
    started = start("sleepy", ["s0", "s1"])
    if requested:
        instance.report_run_canceling(started.run())
    assert started.end_seconds(signal.SIGTERM) < 5
    run = started.run()
    assert run.status == Status.CANCELED
    assert {"cleanup s0", "cleanup s1"} <= set(jobs.notes())
    assert "end s0" not in jobs.notes()
    events = step_events(instance, run.run_id)
    assert events["s0"][-1] == events["s1"][-1] == "STEP_FAILURE"
    messages = [e.dagster_event.message for e in instance.all_logs(run.run_id, of_type=Event.ENGINE_EVENT)]
    assert any("received termination signal" in message for message in messages)


def test_a_signalled_run_that_dagster_will_retry_is_left_to_dagster(start, instance):
    with (Path(os.environ["DAGSTER_HOME"]) / "dagster.yaml").open("a") as settings:
        settings.write("run_retries: {enabled: true, max_retries: 1}\n")
    started = start("sleepy", ["s0", "s1"])
    assert started.end_seconds(signal.SIGTERM) < 5
    assert started.run().status == Status.FAILURE
    assert {"cleanup s0", "cleanup s1"} <= set(jobs.notes())


def test_a_step_that_does_not_stop_is_given_up(start, instance):
    started = start("stubborn", ["blocked"])
    instance.report_run_canceling(started.run())
    assert started.end_seconds(signal.SIGTERM) < 5
    run = started.run()
    assert run.status == Status.CANCELED
    (failure,) = instance.all_logs(run.run_id, of_type=Event.STEP_FAILURE)
    assert "did not stop within 0.5 s" in failure.dagster_event.step_failure_data.error.message


@pytest.mark.parametrize("job", ["sleepy_in_process", "sleepy_multiprocess", "sleepy_step_processes"])
def test_sigterm_ends_an_await_under_other_executors(start, instance, job):
    started = start(job, ["s0"])
    instance.report_run_canceling(started.run())
    assert started.end_seconds(signal.SIGTERM) < 8
    assert started.run().status == Status.CANCELED
    assert "cleanup s0" in jobs.notes()


@pytest.mark.parametrize("job", ["sleepy_multiprocess", "sleepy_step_processes"])
def test_sigterm_to_all_processes_of_a_run_cancels_it(start, instance, job):
    """As a service manager ends a service; the run sees the end of its steps, and not of what they were forked from."""
    started = start(job, ["s0"])
    instance.report_run_canceling(started.run())
    below = descendants(started.process.pid)
    assert len(below) >= 2  # the step, and the process that it was forked from
    for pid in (*below, started.process.pid):
        os.kill(pid, signal.SIGTERM)
    started.process.wait(60)
    run = started.run()
    assert run.status == Status.CANCELED
    texts = [entry.user_message for entry in instance.all_logs(run.run_id)]
    assert not [text for text in texts if "exited with code 255" in text]
    wait_until("its processes are gone", lambda: not any(map(is_alive, below)))


def test_one_failure_leaves_its_siblings_running(instance):
    result = execute(instance, jobs.failing)
    assert not result.success
    events = step_events(instance, result.run_id)
    assert events["bad"][-1] == "STEP_FAILURE"
    assert events["slow"][-1] == events["downstream_of_slow"][-1] == "STEP_SUCCESS"
    assert "downstream_of_bad" not in events
    assert jobs.notes() == ["begin slow", "end slow", "downstream_of_slow"]
    texts = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any("Dependencies for step downstream_of_bad failed: ['bad']" in text for text in texts)


def test_raise_on_error_raises_the_ops_error_after_its_siblings_ended(instance):
    with pytest.raises(ValueError, match="no good"):
        execute(instance, jobs.failing, raise_on_error=True)
    assert "end slow" in jobs.notes()
    (run,) = instance.get_runs()
    assert run.status == Status.FAILURE


def test_retries_by_policy_and_by_request(instance):
    result = execute(instance, jobs.retrying)
    events = step_events(instance, result.run_id)
    assert [
        e for e in events["by_policy"] if e != "STEP_OUTPUT" and not e.startswith(("LOADED", "HANDLED"))
    ] == [
        "STEP_START",
        "STEP_UP_FOR_RETRY",
        "STEP_RESTARTED",
        "STEP_UP_FOR_RETRY",
        "STEP_RESTARTED",
        "STEP_SUCCESS",
    ]
    assert "STEP_SUCCESS" in events["by_request"]
    assert events["hopeless"][-1] == "STEP_FAILURE"
    assert Counter(jobs.notes()) == {"attempt by_policy": 3, "attempt by_request": 2, "attempt hopeless": 3}
    times = {}
    for entry in instance.all_logs(result.run_id):
        if entry.step_key == "by_policy" and entry.dagster_event:
            times.setdefault(entry.dagster_event.event_type_value, []).append(entry.timestamp)
    assert times["STEP_RESTARTED"][0] - times["STEP_UP_FOR_RETRY"][0] >= 0.3


def test_retries_can_be_disabled(instance):
    result = execute(instance, jobs.unretried)
    (failure,) = instance.all_logs(result.run_id, of_type=Event.STEP_FAILURE)
    assert "retries are disabled" in failure.dagster_event.step_failure_data.error.message
    assert jobs.notes() == ["attempt"]


@pytest.mark.parametrize(
    "job", [jobs.same_ours, jobs.same_in_process, jobs.same_multiprocess, jobs.same_step_processes]
)
def test_the_same_job_runs_alike_under_each_executor(instance, job):
    result = execute(instance, job)
    assert not result.success
    ends = {
        step: [e for e in events if e in ("STEP_SUCCESS", "STEP_FAILURE", "STEP_SKIPPED")]
        for step, events in step_events(instance, result.run_id).items()
    }
    assert ends == {
        "each": ["STEP_SUCCESS"],
        "double[0]": ["STEP_SUCCESS"],
        "double[1]": ["STEP_SUCCESS"],
        "double[2]": ["STEP_SUCCESS"],
        "total": ["STEP_SUCCESS"],
        "choose": ["STEP_SUCCESS"],
        "taken": ["STEP_SUCCESS"],
        "not_taken": ["STEP_SKIPPED"],
        "join": ["STEP_SUCCESS"],
        "broken": ["STEP_FAILURE"],
    }
    assert Counter(jobs.notes()) == {
        "total 6": 1,
        "join says hello": 1,
        "failure hook broken": 1,
        "success hook double": 3,
        **{f"success hook {op}": 1 for op in ("each", "total", "choose", "taken", "join")},
    }
    hooks = Counter(
        e.dagster_event.event_type_value for e in instance.all_logs(result.run_id) if e.dagster_event
    )
    assert hooks["HOOK_COMPLETED"] == 9


@pytest.mark.parametrize("job", [jobs.no_resource, jobs.no_resource_in_process])
def test_a_resource_that_fails_to_start_fails_the_run_as_dagster_reports_it(instance, job):
    result = execute(instance, job)
    assert not result.success
    (failure,) = instance.all_logs(result.run_id, of_type=Event.RESOURCE_INIT_FAILURE)
    assert "cannot connect" in failure.dagster_event.engine_event_data.error.to_string()
    assert instance.get_run_by_id(result.run_id).status == Status.FAILURE
    assert jobs.notes() == []


def test_events_are_stored_in_order_and_seen_by_the_run_itself(instance):
    result = execute(instance, jobs.chain)
    assert result.success
    stored = [e.dagster_event for e in instance.all_logs(result.run_id) if e.dagster_event]
    steps = [(e.step_key, e.event_type_value) for e in stored if e.step_key]
    assert steps == [
        (f"c{i}", kind) for i in range(12) for kind in ("STEP_START", "STEP_OUTPUT", "STEP_SUCCESS")
    ]
    assert jobs.notes() == [f"c{i} sees {i + 1}" for i in range(1, 12)]
    yielded = Counter((e.step_key, e.event_type_value) for e in result.all_events)
    assert yielded == Counter((e.step_key, e.event_type_value) for e in stored)
    assert stored[-1].event_type_value == "PIPELINE_SUCCESS"


def test_events_reach_other_processes_while_the_run_goes_on(start, instance):
    started = start("sleepy", ["s0", "s1"])
    run = started.run()
    deadline = time.monotonic() + 2
    while len(step_events(instance, run.run_id)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_after_kill_9_only_the_last_moment_of_events_may_be_missing(start, instance):
    started = start("sleepy", ["s0", "s1"])
    run = started.run()
    deadline = time.monotonic() + 2
    while len(step_events(instance, run.run_id)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    started.end_seconds(signal.SIGKILL)
    assert step_events(instance, run.run_id) == {"s0": ["STEP_START"], "s1": ["STEP_START"]}


def test_the_log_of_each_step_and_the_output_of_the_run_are_kept(instance, capfd):
    result = execute(instance, jobs.talkative)
    assert result.success
    texts = {"ann": [], "bob": []}
    for entry in instance.all_logs(result.run_id):
        own_line = entry.dagster_event is None and entry.user_message.startswith(("ann", "bob"))
        if own_line:
            texts[entry.step_key].append(entry.user_message)
    for name, lines in texts.items():
        assert lines == [f"{name} {verb} {i}" for i in range(20) for verb in ("says", "shouts")]
    (captured,) = instance.all_logs(result.run_id, of_type=Event.LOGS_CAPTURED)
    data = captured.dagster_event.logs_captured_data
    key = [result.run_id, "compute_logs", data.file_key]
    log = instance.compute_log_manager.get_log_data(key)
    # The lines of threads mix: `print` writes a text and its end one after the other.
    assert all(text in log.stdout.decode() for text in ("ann prints", "bob prints"))
    assert all(text in log.stderr.decode() for text in ("ann complains", "bob complains"))
    assert instance.compute_log_manager.is_capture_complete(key)
    console = capfd.readouterr()
    assert "ann prints" in console.out
    assert "bob complains" in console.err


def test_settings_are_checked():
    assert build_executor().name == EXECUTOR_NAME
    with pytest.raises(ValueError, match="max_concurrent must be at least 1, got 0"):
        build_executor(max_concurrent=0)
    with pytest.raises(ValueError, match="cancel_grace_s must not be negative, got -1"):
        build_executor(cancel_grace_s=-1)
