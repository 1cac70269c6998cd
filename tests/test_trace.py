"""What is left of a run for those who read it later: steps, events, Dagster's metadata, and how long it worked."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from cli_project import call

from agentmesh_dagster.clock import SystemClock
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.orchestration.host import AgentMesh, build_environment
from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.runtime.excerpts import EVENT_CHARS, READ_CHARS, excerpt
from agentmesh_dagster.settings import captures_content
from agentmesh_dagster.testing import Answer, WorkflowResult, run_workflow

PRIVATE = "Ada's address is 12 Vine Street"
TOKEN = "trace-secret-token-77"

DOCUMENTS = [
    {
        "kind": "tool",
        "slug": "double",
        "type": "function",
        "config": {"function": "workflow_functions:double"},
    },
    {
        "kind": "agent",
        "slug": "triage",
        "model": "offline/script",
        "instructions": "Be brief.",
        "tools": ["double"],
        "model_settings": {
            "replies": [
                {"tool_calls": [{"tool": "double", "arguments": {"number": 21}}]},
                f"it is 42; {PRIVATE}",
            ]
        },
    },
    {
        "kind": "workflow",
        "slug": "traced",
        "input_schema": {"type": "object"},
        "nodes": [
            {"id": "start", "type": "start"},
            {
                "id": "shape",
                "name": "Shape it",
                "type": "transform",
                "config": {
                    "output": {"n": "{{ input.list | length }}", "who": "{{ input.who.name | upper }}"}
                },
            },
            {
                "id": "size",
                "type": "branch",
                "config": {
                    "conditions": [{"when": "steps.shape.output.n > 2", "handle": "large"}],
                    "default": "small",
                },
            },
            {
                "id": "ask",
                "type": "agent",
                "config": {"agent": "triage", "prompt": "Who? {{ input.private }}"},
            },
            {
                "id": "gate",
                "type": "human",
                "config": {"title": "Refund {{ input.private }}?", "body": "{{ input.private }}"},
            },
            {
                "id": "pay",
                "type": "tool",
                "config": {"tool": "double", "input": {"number": 4}},
            },
            {"id": "end", "type": "end", "config": {"output": {"paid": "{{ steps.pay.output }}"}}},
            {"id": "never", "type": "end"},
        ],
        "edges": [
            {"source": "start", "target": "shape"},
            {"source": "shape", "target": "size"},
            {"source": "size", "target": "ask", "source_handle": "large"},
            {"source": "size", "target": "never", "source_handle": "small"},
            {"source": "ask", "target": "gate"},
            {"source": "gate", "target": "pay", "source_handle": "approved"},
            {"source": "gate", "target": "never", "source_handle": "rejected"},
            {"source": "pay", "target": "end"},
        ],
    },
]
INPUT = {"list": [1, 2, 3], "who": {"name": "Ada"}, "private": PRIVATE}
ANSWER = Answer(decision="approved", by="dora", comment="fine")


def traced(database_url: str | None = None, answer: Answer | None = ANSWER) -> WorkflowResult:
    return run_workflow(
        DOCUMENTS,
        INPUT,
        slug="traced",
        function_modules=["workflow_functions"],
        answers=lambda _wait: answer,
        database_url=database_url,
    )


def shown_in_dagster(result: WorkflowResult) -> dict[str, dict[str, object]]:
    """What the ops of the last Dagster run showed, by step."""
    return {
        event.step_key: {name: value.value for name, value in event.event_specific_data.metadata.items()}
        for event in result.dagster_result.all_events
        if event.event_type_value == "STEP_OUTPUT"
    }


class TestSteps:
    def test_all_that_is_known_of_each_step(self, sqlite_url, monkeypatch, capsys):
        monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)
        run = traced(sqlite_url).run
        assert run.status is RunStatus.SUCCEEDED, run.error
        steps = {step["key"]: step for step in call(capsys, "runs", "steps", run.id, "--json").json}
        shown = call(capsys, "runs", "show", run.id, "--json").json
        assert {step["key"]: step for step in shown["steps"]} == steps

        shape = steps["shape"]
        assert (shape["id"], shape["node_id"], shape["node_name"]) == (f"{run.id}/shape", "shape", "Shape it")
        assert shape["input"] == {"input.list": [1, 2, 3], "input.who.name": "Ada"}
        assert shape["output"] == {"n": 3, "who": "ADA"}
        assert shape["dagster_run_id"] == run.dagster_run_ids[0]
        assert (shape["predecessor_keys"], shape["parent_key"], shape["iteration_index"]) == (
            ["start"],
            None,
            None,
        )
        assert steps["size"]["routing_decision"]["handles"] == ["large"]
        assert steps["size"]["input"] == {"steps.shape.output.n": 3}
        assert steps["end"]["input"] == {"steps.pay.output": 8}
        assert {key: (step["entity_kind"], step["entity_slug"]) for key, step in steps.items()} == {
            "start": (None, None),
            "shape": (None, None),
            "size": (None, None),
            "ask": ("agent", "triage"),
            "ask/llm/1": ("agent", "triage"),
            "ask/tool/1.0": ("tool", "double"),
            "ask/llm/2": ("agent", "triage"),
            "gate": (None, None),
            "pay": ("tool", "double"),
            "pay/tool/1": ("tool", "double"),
            "end": (None, None),
            "never": (None, None),
        }
        assert steps["ask/llm/1"]["model_used"] == "offline/script"
        assert steps["ask/llm/1"]["parent_key"] == "ask"
        [approval] = steps["gate"]["approvals"]
        assert (approval["status"], approval["answer"]["decision"]) == ("decided", "approved")
        [vote] = approval["votes"]
        assert (vote["by"], vote["decision"], vote["comment"]) == ("dora", "approved", "fine")
        assert steps["pay"]["dagster_run_id"] == run.dagster_run_ids[1]
        assert all(step["approvals"] == [] for key, step in steps.items() if key != "gate")

    def test_the_text_shows_labels_and_on_request_input_and_output(self, sqlite_url, monkeypatch, capsys):
        monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)
        run = traced(sqlite_url).run
        lines = call(capsys, "runs", "steps", run.id).out.splitlines()
        assert any("shape" in line and "Shape it" in line for line in lines)
        assert any("pay" in line and "double" in line for line in lines)
        assert any("dora" in line and "approved" in line and "fine" in line for line in lines)
        assert any("size" in line and "to large" in line for line in lines)
        assert not any(PRIVATE in line for line in lines)
        full = call(capsys, "runs", "steps", run.id, "--step", "ask", "--input", "--output").out
        assert f"Who? {PRIVATE}" in full
        assert "it is 42" in full
        assert "shape" not in full
        assert call(capsys, "runs", "steps", run.id, "--step", "as").code == 2

    def test_items_say_their_index_and_children_their_run(self, sqlite_url, monkeypatch, capsys):
        monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)
        each = {
            "id": "each",
            "type": "foreach",
            "config": {
                "items": "{{ input.items }}",
                "body": {
                    "nodes": [{"id": "twice", "type": "transform", "config": {"output": "{{ item * 2 }}"}}],
                    "edges": [],
                },
            },
        }
        document = {
            "kind": "workflow",
            "slug": "items",
            "nodes": [{"id": "start", "type": "start"}, each, {"id": "end", "type": "end"}],
            "edges": [{"source": "start", "target": "each"}, {"source": "each", "target": "end"}],
        }
        run = run_workflow([document], {"items": [5, 6]}, database_url=sqlite_url).run
        steps = call(capsys, "runs", "steps", run.id, "--step", "each", "--json").json
        items = [step for step in steps if step["kind"] == "item"]
        assert [(step["iteration_index"], step["parent_key"]) for step in items] == [(0, "each"), (1, "each")]
        inner = [step for step in steps if step["node_id"] == "twice"]
        assert [(step["input"], step["output"]) for step in inner] == [({"item": 5}, 10), ({"item": 6}, 12)]


class TestEvents:
    def test_calls_carry_what_was_asked_and_answered(self):
        events = [
            (event.type, event.step_key, event.payload)
            for event in traced().events
            if event.type.startswith(("agent.", "tool."))
        ]
        found = {(kind, key): payload for kind, key, payload in events}
        assert found["agent.request", "ask/llm/1"]["prompt"] == f"Who? {PRIVATE}"
        [asked] = found["agent.response", "ask/llm/1"]["tool_calls"]
        assert "double" in json.dumps(asked)
        assert found["agent.response", "ask/llm/2"]["text"] == f"it is 42; {PRIVATE}"
        request = found["tool.request", "ask/tool/1.0"]
        assert (request["tool"], request["arguments"]) == ("double", {"number": 21})
        assert found["tool.response", "ask/tool/1.0"]["result"] == 42
        assert found["tool.response", "pay/tool/1"]["result"] == 8

    def test_they_are_bounded(self):
        long = "x" * (EVENT_CHARS * 3)
        agent = {"kind": "agent", "slug": "echo", "model": "offline/echo"}
        document = {
            "kind": "workflow",
            "slug": "long",
            "nodes": [
                {"id": "start", "type": "start"},
                {"id": "ask", "type": "agent", "config": {"agent": "echo", "prompt": "{{ input.text }}"}},
                {"id": "end", "type": "end"},
            ],
            "edges": [{"source": "start", "target": "ask"}, {"source": "ask", "target": "end"}],
        }
        result = run_workflow([agent, document], {"text": long})
        sizes = [len(json.dumps(event.payload)) for event in result.events]
        assert EVENT_CHARS < max(sizes) < EVENT_CHARS + 500
        [prompt] = [event.payload["prompt"] for event in result.events if event.type == "agent.request"]
        assert prompt.endswith(f"... ({len(long)} characters)")
        # All of it is in the journal.
        assert result.steps["ask/llm/1"].output["text"] == long


class TestPrivacy:
    def test_neither_events_nor_dagster_show_content_where_it_is_turned_off(self, monkeypatch):
        monkeypatch.setenv("AGENTMESH_CAPTURE_CONTENT", "false")
        waiting = traced(answer=None)
        done = traced()
        assert done.run.output == {"paid": 8}
        for result in (waiting, done):
            events = json.dumps([event.payload for event in result.events])
            metadata = json.dumps(shown_in_dagster(result), default=str)
            assert PRIVATE not in events
            assert PRIVATE not in metadata
            assert '"arguments"' not in events
            assert "it is 42" not in events
        assert "output" not in shown_in_dagster(done)["pay"]
        assert done.steps["ask"].input["prompt"] == f"Who? {PRIVATE}"

    def test_what_is_neither_true_nor_false_is_refused(self):
        with pytest.raises(DefinitionError, match="AGENTMESH_CAPTURE_CONTENT is 'perhaps'"):
            captures_content({"AGENTMESH_CAPTURE_CONTENT": "perhaps"})

    def test_a_code_location_turns_it_off_too(self, sqlite_url):
        off = AgentMesh(database_url=sqlite_url, capture_content=False)
        assert not build_environment(off).captures_content
        assert build_environment(AgentMesh(database_url=sqlite_url)).captures_content

    def test_dagster_shows_the_input_beside_the_output(self):
        shown = shown_in_dagster(traced())
        assert shown["pay"]["input"] == '{"tool": "double", "input": {"number": 4}}'
        assert shown["pay"]["output"] == "8.0"
        names = list(shown["pay"])
        assert names.index("input") + 1 == names.index("output")
        waiting = shown_in_dagster(traced(answer=None))
        assert waiting["shape"]["input"] == '{"input.list": [1, 2, 3], "input.who.name": "Ada"}'
        assert waiting["shape"]["output"] == '{"n": 3, "who": "ADA"}'
        assert waiting["gate"]["question"] == PRIVATE


class TestExcerpts:
    def test_what_is_short_stays_as_it_is(self):
        value = {"a": [1, 2.5, None, True, "text"], "b": {"c": []}}
        assert excerpt(value, 200) == value

    def test_long_values_are_cut_and_say_so(self):
        assert excerpt("abcdef", 4) == "abcd... (6 characters)"
        assert excerpt(list(range(1000)), 40) == [0, 1, 2, 3, "... (996 more)"]
        cut = excerpt({str(n): n for n in range(1000)}, 60)
        assert list(cut)[-1] == "..."
        assert len(json.dumps(excerpt([["x" * 50] * 100] * 100, 1000))) < 2000

    def test_a_row_of_a_node_that_reads_much_stays_small(self):
        read = {
            "id": "read",
            "type": "transform",
            "config": {"output": "{{ input.items | length }} {{ input['items'][0] }}"},
        }
        document = {
            "kind": "workflow",
            "slug": "much",
            "nodes": [{"id": "start", "type": "start"}, read, {"id": "end", "type": "end"}],
            "edges": [{"source": "start", "target": "read"}, {"source": "read", "target": "end"}],
        }
        result = run_workflow([document], {"items": ["x" * 100] * 5000})
        assert READ_CHARS / 2 < len(json.dumps(result.steps["read"].input)) < READ_CHARS * 2


@pytest.fixture
def pause(monkeypatch):
    """Makes the time on the wall jump; work still takes what it takes."""
    passed = [timedelta()]
    monkeypatch.setattr(SystemClock, "now", lambda _self: datetime.now(timezone.utc) + passed[0])

    def jump(_wait: object) -> Answer:
        passed[0] += timedelta(hours=5)
        return ANSWER

    return jump


class TestWaitingIsNoWork:
    LONG_MS = 3600 * 1000

    def test_of_a_run_and_its_gate(self, pause, sqlite_url, monkeypatch, capsys):
        monkeypatch.setenv("AGENTMESH_DATABASE_URL", sqlite_url)
        result = run_workflow(
            DOCUMENTS,
            INPUT,
            slug="traced",
            function_modules=["workflow_functions"],
            answers=pause,
            database_url=sqlite_url,
        )
        run, gate = result.run, result.steps["gate"]
        assert (run.finished_at - run.started_at) > timedelta(hours=5)
        assert (gate.finished_at - gate.started_at) > timedelta(hours=5)
        assert gate.duration_ms < self.LONG_MS
        assert run.duration_ms < self.LONG_MS
        stats = call(capsys, "stats", "workflow", "traced", "--json").json
        assert stats["mean_duration_ms"] < self.LONG_MS

    @pytest.mark.parametrize("execution", ["", "inline"])
    def test_of_what_stands_around_it(self, pause, execution):
        gate = {"id": "gate", "type": "human", "config": {"title": "?"}}
        sink = {"id": "sink", "type": "transform", "config": {"output": 1}}
        body = {
            "nodes": [gate, sink],
            "edges": [{"source": "gate", "target": "sink", "source_handle": "approved"}],
        }
        both = {
            "id": "both",
            "type": "parallel",
            "config": {
                "branches": {
                    "left": body,
                    "right": {
                        "nodes": [
                            {
                                "id": "each",
                                "type": "foreach",
                                "config": {"items": [1, 2], "body": body},
                            }
                        ],
                        "edges": [],
                    },
                }
            },
        }
        document = {
            "kind": "workflow",
            "slug": "around",
            "settings": {"execution": execution} if execution else {},
            "nodes": [{"id": "start", "type": "start"}, both, {"id": "end", "type": "end"}],
            "edges": [{"source": "start", "target": "both"}, {"source": "both", "target": "end"}],
        }
        result = run_workflow([document], {}, answers=pause)
        assert result.succeeded, result.run.error
        waited = [key for key in result.steps if key not in ("start", "end")]
        assert "both/right/each[0]" in waited
        assert {key for key in waited if (result.steps[key].duration_ms or 0) > self.LONG_MS} == set()
        assert result.run.duration_ms < self.LONG_MS

    def test_of_a_run_that_is_canceled_while_it_waits(self, pause, sqlite_url):
        from agentmesh_dagster.store import open_store

        result = traced(sqlite_url, answer=None)
        pause(None)
        with open_store(sqlite_url) as store:
            store.runs.set_status(result.run.id, [RunStatus.WAITING], RunStatus.CANCELED)
            run = store.runs.get(result.run.id)
        assert run.finished_at - run.started_at > timedelta(hours=5)
        assert run.duration_ms < self.LONG_MS
