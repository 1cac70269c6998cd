"""What runs when a run goes on: only what was answered, and in the pass in which the answer is there."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from test_agent_tools import calls, function, scripted
from test_agent_tools import workflow as asking
from test_nested_graphs import body, chain, edge, foreach, gate, note, parallel, workflow
from workflow_functions import notes

from agentmesh_dagster import faults
from agentmesh_dagster.constants import ENV_FAULT_LOG
from agentmesh_dagster.records import RunStatus, StepStatus, WaitKind, WaitStatus
from agentmesh_dagster.store import open_store
from agentmesh_dagster.testing import Answer, run_workflow

FUNCTIONS = ("workflow_functions", "flow_functions")


@pytest.fixture(autouse=True)
def noted(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


@pytest.fixture(params=["dagster", "inline"])
def execution(request):
    return request.param


def run(document, execution="dagster", input=None, **options):
    document = {**document, "settings": {"execution": execution}}
    return run_workflow([document], input or {}, function_modules=FUNCTIONS, **options)


def suspends(id, name=None):
    """Notes each call, and suspends."""
    config = {"function": "flow_functions:ask_in_between", "input": {"name": name or id}}
    return {"id": id, "type": "code", "config": config}


def side_by_side(*nodes, **more):
    edges = [edge("start", node["id"]) for node in nodes] + [edge(node["id"], "end") for node in nodes]
    return workflow(list(nodes), edges, **more)


def only(*steps):
    """Answers what waits at these steps, and leaves the rest."""
    return lambda wait: answer(wait) if wait.step_key in steps else None


def answer(wait):
    return Answer(data=wait.data if wait.kind is WaitKind.SUSPEND else None)


class TestOnlyWhatWasAnswered:
    def test_of_two_suspended_nodes(self, execution):
        result = run(side_by_side(suspends("a"), suspends("b")), execution, answers=only("a"))
        assert result.run.status is RunStatus.WAITING, result.run.error
        assert Counter(notes()) == {"a called": 2, "b called": 1}
        assert result.steps["a"].status is StepStatus.SUCCEEDED
        assert result.steps["b"].status is StepStatus.WAITING
        assert len(result.run.dagster_run_ids) == 2

    def test_of_two_branches(self, execution):
        both = parallel("both", left=body(suspends("a"), note("after", 1)), right=body(suspends("b")))
        result = run(chain(both), execution, answers=only("both/left/a"))
        assert result.run.status is RunStatus.WAITING, result.run.error
        assert Counter(notes()) == {"a called": 2, "after": 1, "b called": 1}

    @pytest.mark.parametrize("fanout", [True, False])
    def test_of_items(self, execution, fanout):
        nodes = (suspends("ask", "{{ item }}"), note("after", 1))
        each = foreach("each", *nodes, items="{{ ['p', 'q', 'r'] }}", fanout=fanout)
        result = run(chain(each), execution, answers=only("each[1]/ask"))
        assert result.run.status is RunStatus.WAITING, result.run.error
        assert Counter(notes()) == {"p called": 1, "q called": 2, "r called": 1, "after": 1}

    def test_of_an_agents_calls(self):
        wanted = calls(("ask", {"name": "a"}), ("ask", {"name": "b"}), ("pay", {"name": "paid"}))
        documents = [
            scripted(
                {"tool_calls": [{"tool": name, "arguments": given} for name, given in _pairs(wanted)]},
                {"text": "Done."},
                tools=["ask", "pay"],
            ),
            {**function("ask", "ask_in_between"), "config": {"function": "flow_functions:ask_in_between"}},
            function("pay", "note", side_effects=True, requires_approval=True),
            asking(),
        ]
        first = only("ask/tool/1.0")
        result = run_workflow(documents, {}, function_modules=FUNCTIONS, answers=first)
        assert result.run.status is RunStatus.WAITING, result.run.error
        assert Counter(notes()) == {"a called": 2, "b called": 1}
        approved = only("ask/tool/1.0", "ask/tool/1.2")
        run_workflow(documents, {}, function_modules=FUNCTIONS, answers=approved)
        assert Counter(notes()) == {"a called": 4, "b called": 2, "paid": 1}

    def test_all_go_on_in_the_end(self, execution):
        both = parallel("both", left=body(suspends("a")), right=body(gate("b"), suspends("c")))
        result = run(chain(both), execution, answers=answer)
        assert result.run.status is RunStatus.SUCCEEDED, result.run.error
        assert Counter(notes()) == {"a called": 2, "c called": 2}
        assert all(wait.used_at is not None for wait in result.waits)

    def test_a_call_that_goes_on_is_on_record_as_running(self, tmp_path, monkeypatch):
        """So that one that is killed then is not repeated without a person saying so."""
        log = tmp_path / "points"
        monkeypatch.setenv(ENV_FAULT_LOG, str(log))
        monkeypatch.setattr(faults, "_state", [faults._armed()])
        wanted = {"tool_calls": [{"tool": "ask", "arguments": {"name": "a"}}]}
        tool = function("ask", "ask_in_between", side_effects=True)
        tool["config"]["function"] = "flow_functions:ask_in_between"
        documents = [scripted(wanted, {"text": "Done."}, tools=["ask"]), tool, asking()]
        result = run_workflow(documents, {}, function_modules=FUNCTIONS, answers=answer)
        assert result.succeeded, result.run.error
        points = [
            point for point in log.read_text().split() if point.startswith(("journal.record.tool", "tool"))
        ]
        assert points.index("journal.record.tool.running.after#2") < points.index("tool.call.before#2")
        asked = [event.type for event in result.events if event.step_key == "ask/tool/1.0"]
        assert asked.count("tool.request") == 1


def _pairs(wanted):
    return [(one["name"], one["arguments"]) for one in wanted["tool_calls"]]


def hook(id, key="", **config):
    return {"id": id, "type": "webhook", "config": {"event": "paid", "key": key, **config}}


def send(database_url, key, data, **more):
    with open_store(database_url) as store:
        return store.waits.send_event("default", "paid", key, data, **more)


class TestKeptEvents:
    def test_one_is_taken_in_the_pass_that_opens_its_wait(self, database_url, execution):
        assert send(database_url, "k", {"amount": 1}).is_kept
        document = chain(hook("paid", "k"), note("after", "{{ steps.paid.output.amount }}"))
        result = run(document, execution, database_url=database_url)
        assert result.run.status is RunStatus.SUCCEEDED, result.run.error
        assert len(result.run.dagster_run_ids) == 1
        assert result.steps["after"].output == 1
        assert result.steps["paid"].attempt == 1
        (wait,) = result.waits
        assert wait.status is WaitStatus.DECIDED
        assert wait.used_at is not None
        with open_store(database_url) as store:
            assert not store.claims.is_ready(result.run.id)

    def test_several_waits_take_their_own(self, database_url, execution):
        for key, amount in (("q", 4), ("p", 1), ("q", 2), ("p", 3)):
            assert send(database_url, key, amount).is_kept
        each = foreach("each", hook("one", "{{ item }}"), hook("two", "{{ item }}"), items="{{ ['p', 'q'] }}")
        each["config"]["body"]["nodes"].append(
            {
                "id": "told",
                "type": "transform",
                "config": {"output": ["{{ steps.one.output }}", "{{ steps.two.output }}"]},
            }
        )
        each["config"]["body"]["edges"].append(edge("two", "told"))
        document = side_by_side(each, hook("rest", "r"), output="{{ steps.each.output }}")
        result = run(document, execution, database_url=database_url)
        assert result.run.status is RunStatus.WAITING, result.run.error
        # The oldest first.
        assert result.steps["each"].output == [[1, 3], [4, 2]]
        assert len(result.run.dagster_run_ids) == 1
        assert result.run.suspended_steps == ("rest",)

    def test_one_that_does_not_fit_is_left(self, database_url):
        schema = {"type": "object", "required": ["amount"]}
        assert send(database_url, "k", {"other": 1}).is_kept
        result = run(chain(hook("paid", "k", payload_schema=schema)), database_url=database_url)
        assert result.run.status is RunStatus.WAITING
        assert send(database_url, "k", {"amount": 1}).completed == (result.waits[0].id,)

    def test_events_that_are_sent_meanwhile_are_taken_once(self, database_url):
        """Whether one comes before its wait, with it or after it: one wait takes it, and nothing else."""
        keys = [f"k{number}" for number in range(12)]
        nodes = [hook(f"n{number}", key) for number, key in enumerate(keys)]
        shown = [f"{{{{ steps.n{number}.output }}}}" for number in range(len(keys))]
        deliveries = []

        def send_all():
            with open_store(database_url) as store:
                deliveries.extend(store.waits.send_event("default", "paid", key, key) for key in keys)

        sender = threading.Thread(target=send_all)
        document = chain(
            *nodes[:6], parallel("both", left=body(*nodes[6:9]), right=body(*nodes[9:])), output=shown[:6]
        )
        sender.start()
        try:
            run(document, database_url=database_url)
        finally:
            sender.join()
        with open_store(database_url) as store:
            (row,) = store.runs.list("default")
            waits = store.waits.list("default", run_id=row.id, limit=None)
            # What was there in time was taken in the only pass; the rest asks for the next one.
            answered = [wait for wait in waits if wait.status is WaitStatus.DECIDED]
            assert [wait.answer["data"] for wait in answered] == [wait.event_key for wait in answered]
            unused = [wait for wait in answered if wait.used_at is None]
            assert store.claims.is_ready(row.id) == bool(unused)
            if row.status is not RunStatus.WAITING:
                assert (row.status, len(answered), unused) == (RunStatus.SUCCEEDED, len(keys), [])
            completed = [wait_id for each in deliveries for wait_id in each.completed]
            kept = sum(each.is_kept for each in deliveries)
            assert len(completed) == len(set(completed))
            assert len(completed) + kept == len(keys)
            # All have been sent: no wait is left without its event.
            assert len(answered) == len(waits)
