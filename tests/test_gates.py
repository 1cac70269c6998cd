"""Gates, suspensions, timers, events and approvals of tools in whole runs: what waits, who is told, how it goes on."""

from __future__ import annotations

import itertools

import pytest
from workflow_functions import notes

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.orchestration.host import AgentMesh, build_environment
from agentmesh_dagster.records import RunStatus, StepStatus, WaitKind, WaitStatus
from agentmesh_dagster.testing import Answer, run_workflow

FUNCTIONS = ("workflow_functions",)


@pytest.fixture(autouse=True)
def _notes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


def run(workflow, input=None, *others, **options):
    return run_workflow([*others, workflow], input, function_modules=FUNCTIONS, **options)


def workflow(nodes, edges, **more):
    return {
        "kind": "workflow",
        "slug": "sample",
        "nodes": [{"id": "start", "type": "start"}, *nodes],
        "edges": [{"source": a, "target": b, **({"source_handle": h[0]} if h else {})} for a, b, *h in edges],
        **more,
    }


def human(id="review", **config):
    extra = {key: config.pop(key) for key in ("on_error", "notify", "join") if key in config}
    return {"id": id, "type": "human", "config": {"title": "Pay {{ input.amount }}?", **config}, **extra}


def end(id="done", output=None):
    return {"id": id, "type": "end", "config": {} if output is None else {"output": output}}


def code(id="work", function="note", **input):
    return {
        "id": id,
        "type": "code",
        "config": {"function": f"workflow_functions:{function}", "input": input},
    }


def one_gate(**config):
    """start -> before -> review -> approved: paid | rejected: declined."""
    return workflow(
        [
            code("before", name="before", value="{{ input.amount }}"),
            human(**config),
            end("paid", {"by": "{{ steps.review.output.by }}", "data": "{{ steps.review.output.data }}"}),
            end("declined", "{{ steps.review.output.comment }}"),
        ],
        [
            ("start", "before"),
            ("before", "review"),
            ("review", "paid", "approved"),
            ("review", "declined", "rejected"),
        ],
    )


def chain(*nodes, **more):
    names = ["start", *[node["id"] for node in nodes], "done"]
    return workflow([*nodes, end()], list(itertools.pairwise(names)), **more)


class TestHuman:
    def test_waits_without_a_worker(self):
        result = run(one_gate(body="**Look**", data={"amount": "{{ input.amount }}"}), {"amount": 900})
        assert result.run.status is RunStatus.WAITING
        assert result.run.suspended_steps == ("review",)
        assert result.dagster_result.success
        assert result.steps["review"].status is StepStatus.WAITING
        assert "paid" not in result.steps
        [wait] = result.waits
        assert (wait.kind, wait.title, wait.body) == (WaitKind.HUMAN, "Pay 900?", "**Look**")
        assert wait.data == {"amount": 900}
        assert [e.type for e in result.events if e.step_key == "review"] == [
            "step.started",
            "step.waiting_human",
        ]
        assert result.events[-1].type == "run.waiting"
        shown = next(
            event.event_specific_data.metadata
            for event in result.dagster_result.get_step_success_events()
            + list(result.dagster_result.all_events)
            if event.event_type_value == "STEP_OUTPUT" and event.step_key == "review"
        )
        assert shown["waits for"].value == "Pay 900?"
        assert f"approvals approve {wait.id[:8]}" in shown["how to decide"].value

    def test_goes_on_once_approved(self):
        result = run(one_gate(), {"amount": 900}, answers=lambda _: Answer(by="anna", data={"note": "ok"}))
        assert result.run.status is RunStatus.SUCCEEDED
        assert result.run.output == {"by": "anna", "data": {"note": "ok"}}
        assert len(result.run.dagster_run_ids) == 2
        assert notes() == ["before"]
        review = result.steps["review"]
        assert review.status is StepStatus.SUCCEEDED
        assert review.attempt == 1
        assert result.steps["declined"].status is StepStatus.SKIPPED
        assert result.waits[0].used_at is not None

    def test_takes_the_rejected_handle(self):
        answer = Answer(decision="rejected", comment="too much")
        result = run(one_gate(), {"amount": 900}, answers=lambda _: answer)
        assert result.run.output == "too much"

    def test_rejection_without_an_edge_fails_the_run(self):
        answers = lambda _: Answer(decision="rejected", comment="no", by="bob")  # noqa: E731
        result = run(chain(human()), {"amount": 1}, answers=answers)
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "rejected"
        assert "bob" in result.run.error["message"]

    def test_options_each_have_a_handle(self):
        graph = workflow(
            [human(options=["now", "later"]), end("a", "A"), end("b", "B")],
            [("start", "review"), ("review", "a", "now"), ("review", "b", "later")],
        )
        assert run(graph, {"amount": 1}, answers=lambda _: Answer(decision="later")).run.output == "B"

    def test_several_options(self):
        graph = workflow(
            [human(options=["mail", "call", "visit"], multiple=True), *(end(x, x) for x in ("a", "b", "c"))],
            [("start", "review"), ("review", "a", "mail"), ("review", "b", "call"), ("review", "c", "visit")],
        )
        result = run(graph, {"amount": 1}, answers=lambda _: Answer(decision=["mail", "visit"]))
        assert result.run.output == {"a": "a", "c": "c"}

    def test_prefilled_form_edits_an_upstream_output(self):
        form = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}
        graph = chain(
            code("draft", name="draft", value={"text": "hello"}),
            human(form_schema=form, prefill="{{ steps.draft.output }}"),
        )
        result = run(
            graph, {"amount": 1}, answers=lambda wait: Answer(data={"text": wait.prefill["text"] + "!"})
        )
        assert result.run.output["data"] == {"text": "hello!"}

    @pytest.mark.parametrize(
        ("on_timeout", "status"),
        [("approve", "succeeded"), ("reject", "succeeded"), ("fail", "failed"), ("route", "succeeded")],
    )
    def test_time_runs_out(self, on_timeout, status):
        graph = one_gate(timeout="1h", on_timeout=on_timeout, timeout_data={"late": True})
        if on_timeout == "route":
            graph["nodes"].append(end("late", "{{ steps.review.output.data }}"))
            graph["edges"].append({"source": "review", "target": "late", "source_handle": "timeout"})
        result = run(graph, {"amount": 1}, answers=lambda _: Answer(decision="timeout"))
        assert result.run.status.value == status
        assert result.waits[0].status is WaitStatus.EXPIRED
        if on_timeout == "approve":
            assert result.run.output["data"] == {"late": True}
        if on_timeout == "route":
            assert result.run.output == {"late": True}
        if on_timeout == "fail":
            assert result.run.error["code"] == "gate-timeout"

    def test_launcher_may_not_decide_and_must_be_known(self):
        result = run(one_gate(separation=True), {"amount": 1})
        assert result.run.error["code"] == "launcher-unknown"
        result = run(one_gate(separation=True), {"amount": 1}, tags={"user": "eve"})
        assert result.waits[0].launcher == "eve"


def two_gates(**config):
    """Two gates side by side, each followed by a note, and a join behind both."""
    return workflow(
        [
            human("left", **config),
            human("right"),
            code("after_left", name="after_left", value=1),
            code("after_right", name="after_right", value=2),
            {**end("done", "{{ [steps.after_left.output, steps.after_right.output] }}"), "join": "all"},
        ],
        [
            ("start", "left"),
            ("start", "right"),
            ("left", "after_left", "approved"),
            ("right", "after_right", "approved"),
            ("after_left", "done"),
            ("after_right", "done"),
        ],
    )


class TestTwoGates:
    @pytest.mark.parametrize("first", ["left", "right"])
    def test_in_either_order(self, first):
        asked = []

        def answers(wait):
            asked.append(wait.step_key)
            return Answer() if wait.step_key == first or len(set(asked)) == 1 or len(asked) > 2 else None

        result = run(two_gates(), {"amount": 1}, answers=answers)
        assert result.run.output == [1, 2]
        assert sorted(notes()) == ["after_left", "after_right"]

    def test_at_the_same_moment(self):
        result = run(two_gates(), {"amount": 1}, answers=lambda _: Answer())
        assert result.run.output == [1, 2]
        assert len(result.run.dagster_run_ids) == 2

    def test_one_branch_goes_on_while_the_other_waits(self):
        result = run(two_gates(), {"amount": 1}, answers=lambda w: Answer() if w.step_key == "left" else None)
        assert result.run.status is RunStatus.WAITING
        assert notes() == ["after_left"]
        assert result.run.suspended_steps == ("right",)

    def test_decision_closes_the_siblings(self):
        graph = workflow(
            [human("left", cancel_siblings=True), human("right"), end("a", "A"), end("b", "B")],
            [("start", "left"), ("start", "right"), ("left", "a"), ("right", "b")],
        )
        result = run(graph, {"amount": 1}, answers=lambda w: Answer() if w.step_key == "left" else None)
        assert result.run.status is RunStatus.SUCCEEDED
        assert result.run.output == "A"
        assert result.steps["right"].status is StepStatus.SKIPPED
        assert {w.step_key: w.closed_by for w in result.waits} == {"left": "decision", "right": "sibling"}

    def test_rejected_sibling_fails_the_run_and_leaves_the_other_open(self):
        def answers(wait):
            return Answer(decision="rejected") if wait.step_key == "left" else None

        result = run(two_gates(), {"amount": 1}, answers=answers)
        assert result.run.status is RunStatus.FAILED
        assert {w.step_key: w.status for w in result.waits}["right"] is WaitStatus.OPEN

    def test_gate_behind_a_gate(self):
        graph = chain(human("one"), code("mid", name="mid"), human("two"), code("last", name="last"))
        result = run(graph, {"amount": 1}, answers=lambda _: Answer())
        assert result.run.status is RunStatus.SUCCEEDED
        assert len(result.run.dagster_run_ids) == 3
        assert notes() == ["mid", "last"]

    def test_a_failed_branch_beside_a_gate(self):
        graph = workflow(
            [human("gate"), code("bad", "fail"), end("a"), end("b")],
            [("start", "gate"), ("start", "bad"), ("gate", "a"), ("bad", "b")],
        )
        result = run(graph, {"amount": 1})
        assert result.run.status is RunStatus.FAILED
        assert result.waits[0].status is WaitStatus.OPEN


class TestSuspend:
    def test_twice_in_one_function(self):
        answers = {"first": {"name": "Ada"}, "second": [1, 2]}
        graph = chain(code("work", "ask_twice", subject="refund"))
        result = run(graph, answers=lambda w: Answer(data=answers[w.label]))
        assert result.run.status is RunStatus.SUCCEEDED
        assert result.run.output == {"first": {"name": "Ada"}, "second": [1, 2]}
        assert notes() == ["called"] * 3
        assert [(w.step_key, w.label, w.data) for w in result.waits] == [
            ("work", "first", {"subject": "refund"}),
            ("work", "second", {"after": {"name": "Ada"}}),
        ]

    def test_of_an_async_function(self):
        result = run(chain(code("work", "ask_later")), answers=lambda _: Answer(data="yes"))
        assert result.run.output == {"got": "yes", "key": "work"}

    def test_of_a_function_tool(self):
        tool = {
            "kind": "tool",
            "slug": "ask",
            "type": "function",
            "side_effects": True,
            "config": {"function": "workflow_functions:ask_once"},
        }
        graph = chain({"id": "call", "type": "tool", "config": {"tool": "ask", "input": {}}})
        result = run(graph, None, tool, answers=lambda _: Answer(data={"go": True}))
        assert result.run.status is RunStatus.SUCCEEDED
        assert result.run.output == {"go": True}
        assert result.waits[0].step_key == "call/tool/1"
        assert result.waits[0].node_id == "call"

    def test_time_runs_out(self):
        result = run(
            chain(code("work", "ask_once", timeout="2h")), answers=lambda _: Answer(decision="timeout")
        )
        assert result.run.status is RunStatus.FAILED
        assert "was not resumed" in result.run.error["message"]

    def test_bad_label(self):
        result = run(chain(code("work", "bad_label")))
        assert result.run.status is RunStatus.FAILED
        assert "label is longer" in result.run.error["message"]


class TestTimersAndEvents:
    def test_long_delay_holds_no_worker(self):
        graph = chain({"id": "later", "type": "delay", "config": {"seconds": "2d"}})
        result = run(graph)
        assert result.run.status is RunStatus.WAITING
        [wait] = result.waits
        assert wait.kind is WaitKind.TIMER
        assert abs((wait.deadline_at - wait.created_at).total_seconds() - 2 * 86400) < 1
        result = run(graph, answers=lambda _: Answer())
        assert result.run.status is RunStatus.SUCCEEDED

    def test_event(self):
        graph = chain(
            {"id": "paid", "type": "webhook", "config": {"event": "payment", "key": "{{ input.order }}"}}
        )
        result = run(graph, {"order": "A-1"}, answers=lambda _: Answer(data={"amount": 3}))
        assert result.run.output == {"amount": 3}
        assert (result.waits[0].event_name, result.waits[0].event_key) == ("payment", "A-1")

    @pytest.mark.parametrize("on_timeout", ["fail", "route"])
    def test_event_that_does_not_come(self, on_timeout):
        config = {"event": "payment", "timeout": "1d", "on_timeout": on_timeout, "timeout_data": "none"}
        graph = workflow(
            [{"id": "paid", "type": "webhook", "config": config}, end("a"), end("late")],
            [
                ("start", "paid"),
                ("paid", "a"),
                *([("paid", "late", "timeout")] if on_timeout == "route" else []),
            ],
        )
        if on_timeout == "fail":
            graph["nodes"].pop()
        result = run(graph, answers=lambda _: Answer(decision="timeout"))
        if on_timeout == "fail":
            assert result.run.error["code"] == "event-timeout"
        else:
            assert result.run.output == "none"


def tool_run(requires_approval=True, answers=None, on_error="fail", **more):
    tool = {
        "kind": "tool",
        "slug": "pay",
        "type": "function",
        "side_effects": True,
        "config": {"function": "workflow_functions:note"},
        "requires_approval": requires_approval,
        **more,
    }
    node = {
        "id": "call",
        "type": "tool",
        "on_error": on_error,
        "config": {"tool": "pay", "input": {"name": "paid", "value": "{{ input.amount }}"}},
    }
    return run(chain(node), {"amount": 5}, tool, answers=answers)


class TestToolApproval:
    def test_shows_the_exact_arguments_and_calls_once(self):
        result = tool_run()
        assert result.run.status is RunStatus.WAITING
        [wait] = result.waits
        assert wait.kind is WaitKind.TOOL
        assert wait.data == {"tool": "pay", "arguments": {"name": "paid", "value": 5}}
        assert len(wait.binding) == 64
        assert notes() == []
        result = tool_run(answers=lambda _: Answer())
        assert result.run.output == 5
        assert notes() == ["paid"]

    def test_expression_sees_the_arguments(self):
        assert tool_run("input.value > 10").run.status is RunStatus.SUCCEEDED
        assert tool_run("input.value > 4").run.status is RunStatus.WAITING

    def test_edited_arguments(self):
        result = tool_run(answers=lambda w: Answer(data={**w.prefill, "value": 3}))
        assert result.run.output == 3
        assert result.steps["call/tool/1"].input == {"tool": "pay", "input": {"name": "paid", "value": 3}}

    def test_refusal_is_the_tools_error(self):
        refuse = Answer(decision="rejected", comment="not today", by="bob")
        result = tool_run(answers=lambda _: refuse)
        assert result.run.error["code"] == "approval-refused"
        assert "refused by bob: not today" in result.run.error["message"]
        assert notes() == []

    def test_timeout(self):
        result = tool_run(answers=lambda _: Answer(decision="timeout"), approval={"timeout": "1h"})
        assert result.run.error["code"] == "gate-timeout"


class TestProjectNotifiers:
    @pytest.mark.parametrize(
        ("config", "code"),
        [
            ({"type": "nonsense"}, "notify-invalid"),
            ({"type": "webhook", "url": "https://x.example", "secret": "CLEAR"}, "secret-literal"),
        ],
    )
    def test_wrong_ones_are_refused_before_a_gate_opens(self, tmp_path, config, code):
        agentmesh = AgentMesh(database_url=f"sqlite:///{tmp_path}/agentmesh.db", notify=(config,))
        with pytest.raises(DefinitionError) as refused:
            build_environment(agentmesh)
        assert refused.value.code == code
        assert "CLEAR" not in str(refused.value)
