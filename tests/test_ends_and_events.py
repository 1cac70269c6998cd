"""Nodes that end a way: `fail`, handles without an edge; and those that send and take events: `emit`, `webhook`."""

from __future__ import annotations

import pytest
from fake_http import FakeHttp

from agentmesh_dagster.records import RunStatus, StepStatus
from agentmesh_dagster.specs.base import parse_duration
from agentmesh_dagster.testing import Answer, run_workflow

FUNCTIONS = ("workflow_functions",)


def graph(nodes, edges, **more):
    edges = [dict(zip(("source", "target", "source_handle"), edge, strict=False)) for edge in edges]
    nodes = [{"id": "start", "type": "start"}, *nodes]
    return {"kind": "workflow", "slug": "sample", "nodes": nodes, "edges": edges, **more}


def end(id="done", **config):
    return {"id": id, "type": "end", "config": config}


def choice(*handles, mode="first", default=None):
    conditions = [{"when": f"'{handle}' in input.take", "handle": handle} for handle in handles]
    config = {"conditions": conditions, "mode": mode}
    return {"id": "pick", "type": "branch", "config": config | ({"default": default} if default else {})}


def run(document, input=None, *others, **options):
    return run_workflow([*others, document], input, function_modules=FUNCTIONS, slug="sample", **options)


class TestFail:
    def test_raises_with_code_and_message(self):
        node = {
            "id": "stop",
            "type": "fail",
            "config": {"code": "out-of-stock", "message": "No {{ input.what }} is left"},
        }
        result = run(
            graph([node, choice("a"), end()], [("start", "pick"), ("pick", "done", "a"), ("start", "stop")]),
            {"what": "tea", "take": ["a"]},
        )
        assert result.run.status is RunStatus.FAILED
        error = result.run.error
        assert (error["code"], error["message"]) == ("out-of-stock", "No tea is left")
        assert (error["domain"], error["category"], error["path"]) == ("workflow", "user", "stop")
        assert result.steps["stop"].status is StepStatus.FAILED
        assert result.steps["stop"].input == {"code": "out-of-stock", "message": "No tea is left"}

    def test_is_not_tried_again(self):
        node = {
            "id": "stop",
            "type": "fail",
            "config": {"message": "no"},
            "retry": {"max_attempts": 3, "delay_s": 0},
        }
        result = run(graph([node, end()], [("start", "stop"), ("start", "done")]))
        assert result.run.error["code"] == "failed"
        assert "step.retrying" not in [event.type for event in result.events]

    def test_in_a_body_may_be_handled_by_what_runs_it(self):
        stop = {"id": "stop", "type": "fail", "config": {"code": "odd", "message": "{{ item }} is odd"}}
        sort = {
            "id": "sort",
            "type": "branch",
            "config": {"conditions": [{"when": "item % 2 == 1", "handle": "odd"}], "default": "even"},
        }
        keep = {"id": "keep", "type": "transform", "config": {"output": "{{ item }}"}}
        body = {
            "nodes": [sort, stop, keep],
            "edges": [
                {"source": "sort", "target": "stop", "source_handle": "odd"},
                {"source": "sort", "target": "keep", "source_handle": "even"},
            ],
        }
        each = {
            "id": "each",
            "type": "foreach",
            "config": {"items": [2, 3, 4], "body": body, "on_item_error": "collect"},
        }
        result = run(
            graph([each, end(output="{{ steps.each.output }}")], [("start", "each"), ("each", "done")])
        )
        assert result.run.output[::2] == [2, 4]
        assert result.run.output[1]["error"]["code"] == "odd"

    def test_its_error_may_be_routed(self):
        node = {"id": "stop", "type": "fail", "config": {"code": "no", "message": "no"}, "on_error": "route"}
        document = graph(
            [node, end(output="{{ steps.stop.error.code }}")], [("start", "stop"), ("stop", "done", "error")]
        )
        assert run(document).run.output == "no"


class TestQuietEnds:
    def test_a_handle_without_an_edge_ends_the_run(self):
        document = graph(
            [choice("a", default="b"), end(output="a")], [("start", "pick"), ("pick", "done", "a")]
        )
        assert run(document, {"take": ["a"]}).run.output == "a"
        result = run(document, {"take": []})
        assert (result.run.status, result.run.output) == (RunStatus.SUCCEEDED, None)
        assert result.steps["done"].status is StepStatus.SKIPPED

    def test_a_node_without_an_edge_ends_its_way(self):
        note = {"id": "note", "type": "transform", "config": {"output": 1}}
        document = graph(
            [choice("a", default="b"), note, end(output="a")],
            [("start", "pick"), ("pick", "done", "a"), ("pick", "note", "b")],
        )
        result = run(document, {"take": []})
        assert (result.run.status, result.run.output) == (RunStatus.SUCCEEDED, None)

    def test_of_several_handles_one_may_end(self):
        document = graph(
            [choice("a", "b", mode="all"), end(output="a")], [("start", "pick"), ("pick", "done", "a")]
        )
        assert run(document, {"take": ["a", "b"]}).run.output == "a"
        assert run(document, {"take": ["b"]}).run.status is RunStatus.SUCCEEDED

    def test_a_decision_without_an_edge_ends_and_a_timeout_too(self):
        ask = {"id": "ask", "type": "human", "config": {"title": "?", "options": ["yes", "no"]}}
        document = graph([ask, end(output="yes")], [("start", "ask"), ("ask", "done", "yes")])
        assert run(document, answers=lambda _: Answer(decision="yes")).run.output == "yes"
        result = run(document, answers=lambda _: Answer(decision="no"))
        assert (result.run.status, result.run.output) == (RunStatus.SUCCEEDED, None)

    @pytest.mark.parametrize(
        ("document", "input"),
        [
            (graph([choice("a"), end()], [("start", "pick"), ("pick", "done", "a")]), {"take": []}),
            (
                {
                    **graph([end()], []),
                    "edges": [{"source": "start", "target": "done", "condition": "input.take"}],
                },
                {"take": []},
            ),
        ],
        ids=["no-condition-holds", "no-edge-is-live"],
    )
    def test_a_run_whose_every_way_was_skipped_fails(self, document, input):
        result = run(document, input)
        assert (result.run.status, result.run.error["code"]) == (RunStatus.FAILED, "no-end")

    def test_an_output_schema_holds_all_the_same(self):
        document = graph(
            [choice("a", default="b"), end(output="a")],
            [("start", "pick"), ("pick", "done", "a")],
            output_schema={"type": "string"},
        )
        assert run(document, {"take": []}).run.error["code"] == "run-output"

    def test_a_called_workflow_that_ends_so_gives_null(self):
        inner = {
            **graph([choice("a", default="b"), end(output="a")], [("start", "pick"), ("pick", "done", "a")]),
            "slug": "inner",
        }
        call = {"id": "call", "type": "workflow", "config": {"workflow": "inner", "input": {"take": []}}}
        document = graph(
            [call, end(output={"got": "{{ steps.call.output }}"})], [("start", "call"), ("call", "done")]
        )
        assert run(document, None, inner).run.output == {"got": None}


class TestEmit:
    @staticmethod
    def document(**webhook):
        tell = {
            "id": "tell",
            "type": "emit",
            "config": {"event": "paid", "key": "{{ input.order }}", "data": {"amount": "{{ input.amount }}"}},
        }
        wait = {
            "id": "wait",
            "type": "webhook",
            "config": {"event": "paid", "key": "{{ input.order }}", **webhook},
        }
        nodes = [tell, wait, end(output="{{ steps.wait.output }}")]
        return graph(nodes, [("start", "tell"), ("tell", "wait"), ("wait", "done")])

    def test_is_taken_by_a_run_that_waits_for_it(self):
        # What it sends is kept, and answers the wait that is opened next; the run goes on with it.
        result = run(self.document(), {"order": "A-1", "amount": 3}, answers=lambda _: None)
        (wait,) = result.waits
        assert wait.answer["data"] == {"amount": 3}
        assert wait.answer["by"] == f"run/{result.run.id}"
        sent = [event for event in result.events if event.type == "event.sent"]
        assert [(event.step_key, event.payload) for event in sent] == [
            ("tell", {"name": "paid", "key": "A-1"})
        ]
        assert result.steps["tell"].output["event"] == "paid"

    def test_a_condition_sees_the_payload_and_the_run(self):
        document = self.document(when="payload.amount >= input.least")
        asked = []

        def answer(wait):
            asked.append(wait)
            return Answer(data={"amount": 4 + len(asked)})

        result = run(document, {"order": "A", "amount": 3, "least": 6}, answers=answer)
        assert result.run.output == {"amount": 6}
        assert asked[0].data == {"when": "payload.amount >= input.least", "names": {"input": {"least": 6}}}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("PT5M", 300),
        ("P3D", 259_200),
        ("P1DT12H", 129_600),
        ("PT0.5S", 0.5),
        ("PT1,5M", 90),
        ("P2W", 1_209_600),
        ("P1M", None),
        ("P1Y", None),
        ("P", None),
        ("PT", None),
        ("P1DT", None),
        ("PT5X", None),
        ("-PT5M", None),
    ],
)
def test_durations(text, seconds):
    if seconds is None:
        with pytest.raises(ValueError, match="'PT5M', 'P3D'"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


def test_durations_in_documents_are_iso_too():
    wait = {"id": "wait", "type": "delay", "config": {"seconds": "PT0.01S"}, "timeout_s": "PT1M"}
    later = {"id": "later", "type": "delay", "config": {"seconds": "{{ input.pause }}"}}
    document = graph([wait, later, end()], [("start", "wait"), ("wait", "later"), ("later", "done")])
    assert run(document, {"pause": "PT0S"}).succeeded


class TestFamilies:
    """Whose fault an error is: the user's, the system's, or a third party's."""

    @staticmethod
    def error_of(node, **options):
        result = run(graph([node, end()], [("start", node["id"]), (node["id"], "done")]), **options)
        return result.run.error

    def test_a_timeout_is_nobodys_input(self):
        late = {"id": "late", "type": "delay", "config": {"seconds": 9}, "timeout_s": 0.01}
        error = self.error_of(late)
        assert (error["code"], error["category"]) == ("timeout", "system")
        gone = {"id": "gone", "type": "webhook", "config": {"event": "paid", "timeout": "PT1H"}}
        error = self.error_of(gone, answers=lambda _: Answer(decision="timeout"))
        assert (error["code"], error["category"]) == ("event-timeout", "system")

    def test_a_function_is_no_third_party(self):
        node = {"id": "work", "type": "code", "config": {"function": "workflow_functions:fail", "input": {}}}
        error = self.error_of(node)
        assert (error["code"], error["category"]) == ("function-failed", "user")

    def test_the_status_of_a_server_is_named(self, monkeypatch):
        monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
        tool = {
            "kind": "tool",
            "slug": "ask",
            "type": "http",
            "config": {"method": "GET", "url": "/status/404", "retries": 0},
        }
        node = {"id": "call", "type": "tool", "config": {"tool": "ask", "input": {}}, "on_error": "route"}
        with FakeHttp() as server:
            tool["config"]["url"] = f"{server.url}/status/404"
            document = graph(
                [node, end(output="{{ steps.call.error.status }}")],
                [("start", "call"), ("call", "done", "error")],
            )
            assert run(document, None, tool).run.output == 404
