"""Every node type but the agent, in whole runs: what it answers, how it fails, what the journal keeps."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from typing import ClassVar

import dagster as dg
import pytest
from fake_http import FakeHttp

from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.errors import DocumentInvalid
from agentmesh_dagster.records import RunSource, RunStatus, StepStatus
from agentmesh_dagster.testing import run_workflow

FUNCTIONS = ("workflow_functions",)


def chain(*nodes, **more):
    """A workflow `start -> nodes -> end`; the last node may be an end of its own."""
    nodes = list(nodes)
    if nodes[-1]["type"] != "end":
        nodes.append({"id": "end", "type": "end"})
    nodes.insert(0, {"id": "start", "type": "start"})
    edges = [{"source": a["id"], "target": b["id"]} for a, b in itertools.pairwise(nodes)]
    return {"kind": "workflow", "slug": "sample", "nodes": nodes, "edges": edges, **more}


def transform(id="value", output="{{ input }}", **more):
    return {"id": id, "type": "transform", "config": {"output": output}, **more}


def code(id="work", function="double", input=None, **more):
    config = {"function": f"workflow_functions:{function}"}
    if input is not None:
        config["input"] = input
    return {"id": id, "type": "code", "config": config, **more}


def run(workflow, input=None, *others, **options):
    options.setdefault("deployment", Deployment.of(secrets=["SHOP_TOKEN"]))
    return run_workflow([*others, workflow], input, function_modules=FUNCTIONS, **options)


@pytest.fixture(autouse=True)
def _notes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKFLOW_NOTES", str(tmp_path / "notes"))


class TestStart:
    SCHEMA: ClassVar = {
        "type": "object",
        "required": ["order"],
        "properties": {
            "order": {"type": "string", "pattern": "^[A-Z]+$"},
            "amount": {"type": "number", "minimum": 0, "default": 12.5},
            "address": {"type": "object", "properties": {"country": {"type": "string", "default": "DE"}}},
            "count": {"type": ["integer", "string"]},
        },
    }

    def test_fills_defaults_and_answers_with_the_input(self):
        result = run(chain(transform(), input_schema=self.SCHEMA), {"order": "AB", "address": {}})
        expected = {"order": "AB", "amount": 12.5, "address": {"country": "DE"}}
        assert result.run.output == expected
        assert result.run.input == expected
        assert result.steps["start"].output == expected

    def test_coerces_without_loss(self):
        schema = {
            "type": "object",
            "properties": {"n": {"anyOf": [{"type": "integer"}]}, "m": {"type": "integer"}},
        }
        result = run(chain(transform(), input_schema=schema), {"m": 4})
        assert result.run.output == {"m": 4}

    def test_invalid_input_fails_the_run_and_names_every_field(self):
        result = run(chain(transform(), input_schema=self.SCHEMA), {"order": "ab1", "amount": -3})
        assert not result.succeeded
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "run-input"
        assert "order" in result.run.error["message"]
        assert "amount" in result.run.error["message"]
        assert result.steps["start"].status is StepStatus.FAILED
        assert set(result.steps) == {"start"}

    def test_the_launch_form_refuses_what_it_can_before_the_run(self):
        with pytest.raises(dg.DagsterInvalidConfigError, match="order"):
            run(chain(transform(), input_schema=self.SCHEMA), {"amount": 3})

    def test_says_where_the_run_came_from(self):
        assert run(chain(transform())).run.source is RunSource.TEST


class TestEnd:
    def test_default_output_is_the_upstream_output(self):
        assert run(chain(transform(output={"a": [1, "{{ input.x }}"]})), {"x": None}).run.output == {
            "a": [1, None]
        }

    def test_output_is_evaluated(self):
        end = {
            "id": "done",
            "type": "end",
            "config": {"output": {"sum": "{{ input.a + input.b }}", "s": "{{ input.a }}!"}},
        }
        assert run(chain(end), {"a": 1, "b": 2.5}).run.output == {"sum": 3.5, "s": "1!"}

    def test_null_is_an_output(self):
        assert (
            run(
                chain(transform(), {"id": "e", "type": "end", "config": {"output": "{{ none }}"}}), {"a": 1}
            ).run.output
            is None
        )

    def test_several_ends_are_keyed_by_node_id(self):
        workflow = {
            "kind": "workflow",
            "slug": "two",
            "nodes": [
                {"id": "start", "type": "start"},
                {"id": "left-end", "type": "end", "config": {"output": "l"}},
                {"id": "right", "type": "end", "config": {"output": "r"}},
            ],
            "edges": [{"source": "start", "target": "left-end"}, {"source": "start", "target": "right"}],
        }
        assert run(workflow).run.output == {"left-end": "l", "right": "r"}

    def test_an_output_outside_the_output_schema_fails_the_run(self):
        schema = {"type": "object", "required": ["total"], "properties": {"total": {"type": "number"}}}
        result = run(chain(transform(output={"total": "{{ input.x }}"}), output_schema=schema), {"x": "many"})
        assert result.run.status is RunStatus.FAILED
        assert not result.succeeded
        assert result.run.error["code"] == "run-output"
        assert "total" in result.run.error["message"]
        assert result.run.output is None
        assert result.events[-1].type == "run.failed"


class TestTransform:
    def test_keeps_types(self):
        output = {
            "n": "{{ input.n }}",
            "list": ["{{ input.n }}", "x{{ input.n }}"],
            "flag": True,
            "none": None,
        }
        result = run(chain(transform(output=output)), {"n": 7})
        assert result.run.output == {"n": 7, "list": [7, "x7"], "flag": True, "none": None}

    def test_an_undefined_name_says_which_where_and_what_is_there(self):
        result = run(chain(transform(output="{{ input.amuont }}")), {"amount": 7})
        error = result.run.error
        assert result.run.status is RunStatus.FAILED
        assert error["domain"] == "expression"
        for part in ("amuont", "value", "config.output", "amount"):
            assert part in error["message"]
        assert result.steps["value"].error == error


class TestCode:
    @pytest.mark.parametrize("function", ["double", "double_later"])
    def test_calls_sync_and_async_functions(self, function):
        result = run(chain(code(function=function, input={"number": "{{ input.x }}"})), {"x": 21})
        assert result.run.output == 42
        assert result.steps["work"].input == {
            "function": f"workflow_functions:{function}",
            "input": {"number": 21},
        }

    def test_default_input_is_the_upstream_output(self):
        assert run(chain(transform(output={"number": 4}), code())).run.output == 8

    def test_an_exception_fails_the_node_with_its_message(self):
        result = run(chain(code(function="fail", input={"message": "the tape is full"})))
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "function-failed"
        assert "the tape is full" in result.run.error["message"]

    def test_a_module_that_is_not_allowed_is_refused(self):
        node = {"id": "bad", "type": "code", "config": {"function": "os:getcwd"}}
        result = run(chain(node))
        assert result.run.status is RunStatus.FAILED
        assert "os" in result.run.error["message"]
        assert result.run.error["category"] == "user"

    def test_input_that_does_not_fit_the_signature_is_named(self):
        result = run(chain(code(input={"nmber": 1})))
        assert result.run.error["code"] == "tool-input"
        assert "number" in result.run.error["message"]


class TestTool:
    CALCULATOR: ClassVar = {
        "kind": "tool",
        "slug": "sum",
        "type": "builtin",
        "config": {"name": "calculator"},
    }

    def http(self, url, **more):
        config = {
            "method": "POST",
            "url": url + "/echo/{{ input.order }}",
            "headers": {"X-Token": "{{ secret('SHOP_TOKEN') }}"},
            "json": {"amount": "{{ input.amount }}"},
        }
        schema = {
            "type": "object",
            "required": ["order"],
            "properties": {"order": {"type": "string"}, "amount": {"type": "integer", "default": 5}},
        }
        return {
            "kind": "tool",
            "slug": "shop",
            "type": "http",
            "config": config,
            "input_schema": schema,
            **more,
        }

    @pytest.fixture
    def shop(self, monkeypatch):
        monkeypatch.setenv("AGENTMESH_HTTP_ALLOW", "127.0.0.1")
        monkeypatch.setenv("SHOP_TOKEN", "very-secret-token-1")
        with FakeHttp() as server:
            yield server

    def node(self, **more):
        return {
            "id": "call",
            "type": "tool",
            "config": {"tool": "shop", "input": {"order": "{{ input.order }}"}},
            **more,
        }

    def test_calls_over_http_with_defaults_and_keeps_the_call_as_a_step(self, shop):
        result = run(chain(self.node()), {"order": "A1"}, self.http(shop.url))
        assert result.succeeded, result.run.error
        (call,) = shop.calls
        assert call.path == "/echo/A1"
        assert call.headers["x-token"] == "very-secret-token-1"
        assert call.body.replace(" ", "") == '{"amount":5}'
        step = result.steps["call/tool/1"]
        assert (step.kind, step.parent_key, step.status) == ("tool", "call", StepStatus.SUCCEEDED)
        assert step.input == {"tool": "shop", "input": {"order": "A1", "amount": 5}}
        assert result.steps["call"].output == step.output
        types = [e.type for e in result.events if e.step_key == "call/tool/1"]
        assert types == ["tool.request", "tool.response"]
        assert "very-secret-token-1" not in repr((result.run, result.steps, result.events))

    def test_input_that_does_not_fit_is_refused_before_the_call(self, shop):
        workflow = chain(
            {
                "id": "call",
                "type": "tool",
                "config": {"tool": "shop", "input": {"order": "{{ input.order }}"}},
            }
        )
        result = run(workflow, {"order": {"no": "text"}}, self.http(shop.url))
        assert result.run.error["code"] == "tool-input"
        assert "order" in result.run.error["message"]
        assert shop.calls == []
        assert "call/tool/1" not in result.steps

    def test_a_failing_status_is_an_error_with_the_body(self, shop):
        tool = {"kind": "tool", "slug": "shop", "type": "http", "config": {"url": shop.url + "/status/404"}}
        result = run(
            chain({"id": "call", "type": "tool", "config": {"tool": "shop", "input": {}}}), None, tool
        )
        assert result.run.status is RunStatus.FAILED
        assert "404" in result.run.error["message"]
        assert result.steps["call/tool/1"].status is StepStatus.FAILED


class TestBranch:
    def workflow(self, conditions, *, default=None, mode="first", handles=("high", "mid", "low"), **more):
        config = {"conditions": conditions, "mode": mode}
        if default:
            config["default"] = default
        nodes = [{"id": "start", "type": "start"}, {"id": "size", "type": "branch", "config": config}]
        edges = [{"source": "start", "target": "size"}]
        for handle in handles:
            nodes.append({"id": handle, "type": "end", "config": {"output": handle}})
            edges.append({"source": "size", "target": handle, "source_handle": handle})
        return {"kind": "workflow", "slug": "branching", "nodes": nodes, "edges": edges, **more}

    CONDITIONS: ClassVar = [
        {"when": "input.x > 100", "handle": "high"},
        {"when": "input.x > 10", "handle": "mid"},
    ]

    @pytest.mark.parametrize(("x", "taken"), [(500, "high"), (50, "mid"), (5, "low")])
    def test_the_first_true_condition_wins_else_the_default(self, x, taken):
        result = run(self.workflow(self.CONDITIONS, default="low"), {"x": x})
        assert result.run.output == taken
        assert result.steps["size"].output == {"taken": [taken]}
        assert result.steps["size"].routing_decision["handles"] == [taken]
        skipped = {key for key, step in result.steps.items() if step.status is StepStatus.SKIPPED}
        assert skipped == {"high", "mid", "low"} - {taken}

    def test_all_takes_every_true_one(self):
        result = run(self.workflow(self.CONDITIONS, default="low", mode="all"), {"x": 500})
        assert result.run.output == {"high": "high", "mid": "mid"}

    def test_all_takes_the_default_when_none_is_true(self):
        assert run(self.workflow(self.CONDITIONS, default="low", mode="all"), {"x": 1}).run.output == "low"

    def test_no_match_without_default_fails_the_run_and_names_the_branch(self):
        result = run(self.workflow(self.CONDITIONS, handles=("high", "mid")), {"x": 1})
        assert result.run.status is RunStatus.FAILED
        assert not result.succeeded
        assert result.run.error["code"] == "no-end"
        assert "'size'" in result.run.error["message"]
        assert result.run.error["context"]["stopped_after"] == ["size"]
        assert result.steps["size"].status is StepStatus.SUCCEEDED
        assert result.steps["high"].status is StepStatus.SKIPPED

    def test_a_condition_that_fails_names_its_place(self):
        result = run(
            self.workflow(
                [{"when": "input.y > 1", "handle": "high"}], default="low", handles=("high", "low")
            ),
            {},
        )
        assert "config.conditions[0].when" in result.run.error["message"]


class TestDelay:
    def delay(self, **config):
        return {"id": "pause", "type": "delay", "config": config}

    def test_waits_inline(self):
        result = run(chain(self.delay(seconds="{{ input.s }}")), {"s": 0.2})
        assert result.succeeded
        assert 0.2 <= result.steps["pause"].output["waited_s"] < 2
        assert result.steps["pause"].duration_ms >= 150

    def test_longer_than_inline_s_holds_no_worker(self):
        result = run(chain(self.delay(seconds="{{ input.long }}")), {"long": "2h"})
        assert result.run.status is RunStatus.WAITING
        assert result.steps["pause"].status is StepStatus.WAITING

    def test_until_a_moment_in_the_past_does_not_wait(self):
        result = run(chain(self.delay(until="2020-01-01T00:00:00Z")))
        assert result.succeeded
        assert result.steps["pause"].output["waited_s"] < 1

    def test_until_a_moment_soon(self):
        soon = (datetime.now(timezone.utc) + timedelta(seconds=1.5)).isoformat()
        result = run(chain(self.delay(until="{{ input.at }}")), {"at": soon})
        assert result.succeeded
        assert result.steps["pause"].finished_at >= datetime.fromisoformat(soon)

    @pytest.mark.parametrize(
        ("config", "value"),
        [
            ({"seconds": "{{ input.v }}"}, "soon"),
            ({"seconds": "{{ input.v }}"}, -1),
            ({"seconds": "{{ input.v }}"}, None),
            ({"until": "{{ input.v }}"}, "tomorrow"),
            ({"until": "{{ input.v }}"}, 5),
        ],
    )
    def test_what_is_no_time_is_an_expression_error_of_the_node(self, config, value):
        result = run(chain(self.delay(**config)), {"v": value})
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["domain"] == "expression"
        assert "'pause'" in result.run.error["message"]
        assert result.steps["pause"].status is StepStatus.FAILED


class TestRetry:
    def test_attempts_are_counted_and_waited_for(self):
        node = code(function="fail_first", input={"name": "x", "failures": 2})
        node["retry"] = {"max_attempts": 3, "delay_s": 0.1, "backoff": "exponential"}
        result = run(chain(node))
        assert result.succeeded
        assert result.run.output == 3
        step = result.steps["work"]
        assert step.attempt == 3
        assert step.status is StepStatus.SUCCEEDED
        assert step.error is None
        assert step.duration_ms >= 300
        retrying = [e.payload for e in result.events if e.type == "step.retrying"]
        assert [(p["attempt"], p["delay_s"]) for p in retrying] == [(1, 0.1), (2, 0.2)]
        assert "call 1 of x fails" in retrying[0]["error"]["message"]

    def test_the_last_failure_is_the_nodes(self):
        node = code(function="fail_first", input={"name": "x", "failures": 9})
        node["retry"] = {"max_attempts": 2, "delay_s": 0}
        result = run(chain(node))
        assert result.run.status is RunStatus.FAILED
        assert result.steps["work"].attempt == 2
        assert "call 2 of x fails" in result.steps["work"].error["message"]

    def test_what_cannot_succeed_later_is_not_tried_again(self):
        node = code(input={"nmber": 1}, retry={"max_attempts": 5, "delay_s": 0})
        result = run(chain(node))
        assert result.steps["work"].attempt == 1


class TestTimeout:
    def test_a_hang_is_cut_off_and_cleaned_up(self):
        import workflow_functions

        result = run(chain(code(function="hang", input={"name": "h"}, timeout_s=0.3)))
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "timeout"
        assert "timeout_s = 0.3" in result.run.error["message"]
        assert workflow_functions.notes() == ["h", "h cleaned up"]

    def test_the_next_attempt_may_succeed(self):
        node = code(function="hang_once", input={"name": "h"}, timeout_s=0.3)
        result = run(chain({**node, "retry": {"max_attempts": 2, "delay_s": 0}}))
        assert result.run.output == "answered"
        assert result.steps["work"].attempt == 2

    def test_the_workflows_node_timeout_holds_for_nodes_without_their_own(self):
        result = run(chain(code(function="hang", input={"name": "h"}), settings={"node_timeout_s": 0.3}))
        assert result.run.error["code"] == "timeout"


class TestRows:
    def test_run_steps_and_events_of_a_plain_run(self):
        workflow = chain(
            transform("a", {"number": 2}, name="First"), code("b"), transform("c", "{{ steps.b.output }}")
        )
        result = run(workflow)
        run_row = result.run
        assert run_row.id == result.dagster_result.run_id
        assert run_row.dagster_run_ids == (run_row.id,)
        assert (run_row.status, run_row.output, run_row.error) == (RunStatus.SUCCEEDED, 4, None)
        assert run_row.steps_executed == 5
        assert run_row.started_at <= run_row.finished_at
        assert run_row.duration_ms >= 0
        assert (run_row.slug, run_row.kind, run_row.version) == ("sample", "workflow", 1)
        keys = ["start", "a", "b", "c", "end"]
        assert sorted(result.steps, key=keys.index) == keys
        for before, key in zip(["", *keys], keys, strict=False):
            step = result.steps[key]
            assert step.predecessor_keys == ((before,) if before else ())
            assert (step.kind, step.attempt, step.parent_key) == ("node", 1, None)
            assert step.status is StepStatus.SUCCEEDED
            assert step.started_at <= step.finished_at
            assert step.dagster_run_id == run_row.id
            assert step.fingerprint
        assert result.steps["a"].node_name == "First"
        expected = ["run.started"]
        expected += [f"{word} {key}" for key in keys for word in ("step.started", "step.completed")]
        expected += ["run.completed"]
        assert [f"{e.type} {e.step_key}" if e.step_key else e.type for e in result.events] == expected
        assert all(a.at <= b.at for a, b in zip(result.events, result.events[1:], strict=False))

    def test_dagster_sees_each_node_as_an_op_with_a_preview(self):
        result = run(chain(transform("a", {"x": 1}))).dagster_result
        (output,) = [e for e in result.events_for_node("a") if e.is_successful_output]
        assert output.step_output_data.metadata["output"].value == '{"x": 1}'
        assert output.step_output_data.metadata["status"].value == "succeeded"

    def test_a_failed_node_is_a_failed_op_with_its_message(self):
        result = run(chain(code(function="fail"))).dagster_result
        failure = result.failure_data_for_node("work")
        assert "no luck" in failure.user_failure_data.description
        assert failure.user_failure_data.metadata["code"].value == "function-failed"
        assert result.failure_data_for_node("agentmesh_finish") is None

    def test_a_longer_output_is_shown_as_json(self):
        result = run(chain(transform("a", {"x": "y" * 300}))).dagster_result
        (output,) = [e for e in result.events_for_node("a") if e.is_successful_output]
        assert output.step_output_data.metadata["output"].value == {"x": "y" * 300}

    def test_a_large_output_is_cut_in_the_preview_and_whole_in_the_journal(self):
        result = run(chain(transform("a", "{{ input.long }}")), {"long": "ä" * 5000})
        (output,) = [e for e in result.dagster_result.events_for_node("a") if e.is_successful_output]
        assert len(output.step_output_data.metadata["output"].value) < 2200
        assert result.run.output == "ä" * 5000


class TestState:
    STATE: ClassVar = {
        "type": "object",
        "properties": {"total": {"type": "number", "default": 1}, "names": {"type": "array", "default": []}},
    }

    def test_defaults_writes_and_reads(self):
        workflow = chain(
            transform("a", "{{ context.total }}", set={"total": "{{ context.total + 5 }}"}),
            transform(
                "b",
                {"total": "{{ context.total }}", "names": "{{ context.names }}"},
                set={"free": "{{ steps.b.output.total }}"},
            ),
            transform("c", ["{{ context.total }}", "{{ context.free }}", "{{ context.last_output.total }}"]),
            state_schema=self.STATE,
        )
        result = run(workflow)
        assert result.steps["a"].output == 1
        assert result.steps["b"].output == {"total": 6, "names": []}
        assert result.run.output == [6, 6, 6]
        assert result.steps["a"].routing_decision["set"] == {"total": 6}

    def test_a_write_outside_the_state_schema_fails_the_node(self):
        workflow = chain(transform("a", "x", set={"total": "{{ steps.a.output }}"}), state_schema=self.STATE)
        result = run(workflow)
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "state"
        assert "set.total" in result.run.error["message"]
        assert result.steps["a"].status is StepStatus.FAILED

    def test_siblings_do_not_see_each_other_and_a_join_sees_both_in_topological_order(self):
        workflow = {
            "kind": "workflow",
            "slug": "join",
            "state_schema": {
                "type": "object",
                "properties": {"who": {"type": "string", "default": "none", "reducer": "replace"}},
            },
            "nodes": [
                {"id": "start", "type": "start"},
                transform("a", "{{ context.who }}", set={"who": "a"}),
                transform("b", "{{ context.who }}", set={"who": "b"}),
                transform("c", "{{ context.who }}", join="all"),
                {
                    "id": "end",
                    "type": "end",
                    "config": {"output": "{{ [steps.a.output, steps.b.output, steps.c.output] }}"},
                },
            ],
            "edges": [
                {"source": "start", "target": "b"},
                {"source": "start", "target": "a"},
                {"source": "a", "target": "c"},
                {"source": "b", "target": "c"},
                {"source": "c", "target": "end"},
            ],
        }
        assert run(workflow).run.output == ["none", "none", "b"]


class TestBounds:
    def test_max_steps_fails_the_run(self):
        nodes = [transform(f"n{i}", "x") for i in range(5)]
        result = run(chain(*nodes, settings={"max_steps": 3}))
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "max-steps"
        assert result.run.steps_executed == 4  # three that ran, and the one that was refused
        assert "n3" not in result.steps

    def test_max_steps_is_not_an_error_that_a_node_may_handle(self):
        nodes = [transform(f"n{i}", "x", on_error="continue") for i in range(5)]
        result = run(chain(*nodes, settings={"max_steps": 3}))
        assert result.run.status is RunStatus.FAILED
        assert result.run.error["code"] == "max-steps"

    def test_exactly_max_steps_is_enough(self):
        assert run(chain(transform("a", "x"), settings={"max_steps": 3})).succeeded


class TestHelper:
    def test_invalid_documents_are_refused_before_anything_runs(self):
        with pytest.raises(DocumentInvalid):
            run(chain({"id": "a", "type": "transform", "config": {}}))

    def test_the_workflow_must_be_clear(self):
        with pytest.raises(ValueError, match="sample"):
            run(chain(transform("a", "1")), None, {**chain(transform("b", "2")), "slug": "other"})
        other = {**chain(transform("b", "2")), "slug": "other"}
        assert run(chain(transform("a", "1")), None, other, slug="other").run.output == "2"

    def test_runs_on_a_database_and_an_instance_of_ones_own(self, sqlite_url):
        from agentmesh_dagster.store import open_store

        with dg.DagsterInstance.ephemeral() as instance:
            result = run(
                chain(transform("a", "1")), database_url=sqlite_url, instance=instance, tags={"team": "x"}
            )
            stored = instance.get_run_by_id(result.run.id)
        assert stored.tags["team"] == "x"
        assert stored.tags["agentmesh/run_id"] == result.run.id
        assert stored.tags["agentmesh/status"] == "succeeded"
        with open_store(sqlite_url) as store:
            assert store.runs.get(result.run.id) == result.run
