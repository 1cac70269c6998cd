"""What a published workflow looks like as a Dagster job: names, ports, wires, tags, pools, metadata."""

from __future__ import annotations

import itertools

import dagster as dg
import pytest
from dagster._core.definitions.utils import DISALLOWED_NAMES
from dagster._core.execution.api import create_execution_plan

from agentmesh_dagster.compiler.item_keys import NO_ITEM, item_key, mapping_key
from agentmesh_dagster.compiler.job import build_job
from agentmesh_dagster.compiler.levels import op_names
from agentmesh_dagster.compiler.snapshot import construct_pinned
from agentmesh_dagster.errors import DefinitionError, DocumentInvalid
from agentmesh_dagster.orchestration.code_location import (
    build_code_location,
    build_published_job,
    named_executors,
)
from agentmesh_dagster.orchestration.host import AgentMesh
from agentmesh_dagster.runtime.registry import node_types
from agentmesh_dagster.store import open_store
from agentmesh_dagster.testing import publish_documents, run_workflow

ECHO = {"kind": "agent", "slug": "echo", "model": "offline/echo"}


def transform(id, **more):
    return {"id": id, "type": "transform", "config": {"output": id}, **more}


def workflow(nodes, edges, **more):
    nodes = [{"id": "start", "type": "start"}, *nodes, {"id": "end", "type": "end"}]
    return {"kind": "workflow", "slug": "refund-review", "nodes": nodes, "edges": edges, **more}


def edge(source, target, handle=None, condition=None):
    found = {"source": source, "target": target, "source_handle": handle, "condition": condition}
    return {name: value for name, value in found.items() if value is not None}


@pytest.fixture
def store(sqlite_url):
    with open_store(sqlite_url) as opened:
        yield opened


@pytest.fixture
def compiled(store, sqlite_url):
    """Compiles the last of some documents; the job is as a run worker would build it."""

    def build(*documents):
        published = publish_documents(store, list(documents))[-1]
        resource = AgentMesh(database_url=sqlite_url).resource()
        return build_published_job(published, resource=resource, executors=named_executors())

    return build


def incoming(job, name):
    """The outputs that an op waits for, as `node.output`."""
    inputs = job.graph.dependency_structure.input_to_upstream_outputs_for_node(name)
    return sorted(
        f"{output.node_name}.{output.output_name}" for outputs in inputs.values() for output in outputs
    )


def outputs(job, name):
    return {output.name: output for output in job.graph.node_named(name).definition.output_defs}


def branching():
    branch = {
        "id": "size",
        "type": "branch",
        "config": {"conditions": [{"when": "input.x", "handle": "class"}], "default": "sehr groß"},
    }
    return workflow(
        [branch, transform("a"), transform("b-1", join="all")],
        [
            edge("start", "size"),
            edge("size", "a", "class"),
            edge("size", "b-1", "class", "input.y"),
            edge("size", "end", "sehr groß"),
            edge("a", "b-1"),
            edge("b-1", "end"),
        ],
    )


class TestShape:
    def test_ops_are_named_by_node_and_defined_under_the_jobs_name(self, compiled):
        job = compiled(branching())
        assert job.name == "refund_review"
        nodes = {node.name: node.definition.name for node in job.graph.nodes}
        assert nodes == {
            name: f"refund_review__{name}"
            for name in ("start", "size", "a", "b_1", "end", "agentmesh_finish")
        }

    def test_outputs_are_one_for_each_way_out_and_optional(self, compiled):
        job = compiled(branching())
        ports = outputs(job, "size")
        assert list(ports) == ["class_", "class_when", "sehr_gro_udf"]
        assert [port.description for port in ports.values()] == ["class", "class, when input.y", "sehr groß"]
        assert not any(port.is_required for port in ports.values())
        assert all(port.dagster_type.display_name == "Nothing" for port in ports.values())
        assert list(outputs(job, "start")) == ["next", "done"]
        assert list(outputs(job, "end")) == ["done"]

    def test_outputs_have_the_names_of_the_handles(self, compiled):
        gate = {"id": "ask", "type": "human", "config": {"title": "?"}}
        job = compiled(
            workflow(
                [gate, transform("a")],
                [
                    edge("start", "ask"),
                    edge("ask", "a", "approved"),
                    edge("ask", "end", "rejected"),
                    edge("a", "end"),
                ],
            )
        )
        assert list(outputs(job, "ask")) == ["approved", "rejected", "waiting"]
        assert incoming(job, "a") == ["ask.approved"]

    def test_every_handle_gets_an_output_of_its_own(self, compiled):
        """What Dagster refuses or AgentMesh uses itself, and what comes to the same name, runs all the same."""
        handles = [
            *sorted(DISALLOWED_NAMES),
            *("done", "waiting", "next", "upstream", "items", "done_2", "input_", "a b", "a-b", "a_b", "A_b"),
            *("承認", "却下", "é", "e", "!", "?", "_", "__", " ", "x" * 200, "x" * 201, "u627f"),
        ]
        conditions = [{"when": f"input.way == {n}", "handle": handle} for n, handle in enumerate(handles)]
        branch = {"id": "size", "type": "branch", "config": {"conditions": conditions, "mode": "all"}}
        targets = [transform(f"n{n}") for n in range(len(handles))]
        ways = [edge("size", f"n{n}", handle) for n, handle in enumerate(handles)]
        ends = [edge(f"n{n}", "end") for n in range(len(handles))]
        document = workflow([branch, *targets], [edge("start", "size"), *ways, *ends])
        job = compiled(document)
        assert [port.description for port in outputs(job, "size").values()] == handles
        taken = [incoming(job, f"n{n}") for n in range(len(handles))]
        assert len({name for (name,) in taken}) == len(handles)
        named = dict(zip(handles, (name.removeprefix("size.") for (name,) in taken), strict=True))
        assert {
            name: named[name] for name in ("next", "items", "a_b", "done_2", "a b", "é", "e", "承認")
        } == {
            "next": "next",
            "items": "items",
            "a_b": "a_b",
            "done_2": "done_2",
            "a b": "a_b_2",
            "é": "e_2",
            "e": "e",
            "承認": "u627f_u8a8d",
        }
        assert (named["done"], named["input"], named["input_"]) == ("done_", "input__2", "input_")

    def test_joins_are_fan_ins_and_finish_waits_for_start_and_all_sinks(self, compiled):
        job = compiled(branching())
        assert incoming(job, "b_1") == ["a.next", "size.class_when"]
        assert incoming(job, "end") == ["b_1.next", "size.sehr_gro_udf"]
        assert incoming(job, "agentmesh_finish") == ["end.done", "start.done"]
        assert incoming(job, "start") == []

    def test_two_edges_between_two_nodes_are_one_wire_for_each_port(self, compiled):
        job = compiled(
            workflow(
                [transform("a")],
                [
                    edge("start", "a", condition="input.x"),
                    edge("start", "a", condition="input.y"),
                    edge("a", "end"),
                ],
            )
        )
        assert incoming(job, "a") == ["start.next_when", "start.next_when_2"]

    def test_handles_that_dagster_refuses_as_names_work_in_a_run(self):
        assert run_workflow([branching()], {"x": False, "y": True}).succeeded
        result = run_workflow([branching()], {"x": True, "y": True})
        assert result.succeeded
        assert result.steps["b-1"].predecessor_keys == ("size", "a")
        assert {e.step_key for e in result.dagster_result.all_node_events if e.is_step_success} >= {"b_1"}

    def test_an_op_of_every_node_type(self, compiled):
        tool = {"kind": "tool", "slug": "sum", "type": "builtin", "config": {"name": "calculator"}}
        types = [
            {"id": "ask", "type": "agent", "config": {"agent": "echo"}},
            {"id": "sum", "type": "tool", "config": {"tool": "sum", "input": {"expression": "1+1"}}},
            {"id": "calc", "type": "code", "config": {"function": "workflow_functions:double"}},
            {
                "id": "pause",
                "type": "delay",
                "config": {"seconds": 1},
                "description": "Lets the dust settle.",
            },
        ]
        names = ["start", *(node["id"] for node in types), "end"]
        edges = [edge(a, b) for a, b in itertools.pairwise(names)]
        job = compiled(tool, ECHO, workflow(types, edges))
        ops = {node.name: node.definition for node in job.graph.nodes}
        kinds = {
            name: {tag for tag in op.tags if tag.startswith("dagster/kind/")} for name, op in ops.items()
        }
        assert kinds["ask"] == {"dagster/kind/ai"}
        assert "dagster/kind/builtin" in kinds["sum"]
        assert kinds["calc"] == {"dagster/kind/python"}
        assert kinds["pause"] == {"dagster/kind/timer"}
        assert ops["ask"].tags["agentmesh/model"] == "offline/echo"
        assert ops["ask"].description == "asks agent echo"
        assert ops["pause"].description == "Lets the dust settle."
        assert ops["ask"].pool == "llm_offline"
        assert ops["calc"].pool is None

    @pytest.mark.parametrize(
        ("model", "pool"),
        [
            ("gpt-4o", "llm_openai"),
            ("openai/gpt-5-mini", "llm_openai"),
            ("azure_ai/x/y:1", "llm_azure_ai"),
            ("z-ai/größe 3", "llm_z_ai"),
        ],
    )
    def test_pools_are_named_by_provider(self, compiled, model, pool):
        node = {
            "id": "ask",
            "type": "agent",
            "config": {"agent": "echo", "prompt": "x", "model": [model, "other/x"]},
        }
        op = (
            compiled(ECHO, workflow([node], [edge("start", "ask"), edge("ask", "end")]))
            .graph.node_named("ask")
            .definition
        )
        assert op.pool == pool
        assert op.tags["agentmesh/model"] == model


EDGES = [edge("start", "a"), edge("a", "end")]


def chain(*nodes, **more):
    """A workflow whose nodes come one after the other."""
    names = ["start", *(node["id"] for node in nodes), "end"]
    return workflow(list(nodes), [edge(a, b) for a, b in itertools.pairwise(names)], **more)


def parallel(id, branches, **more):
    return {"id": id, "type": "parallel", "config": {"branches": branches, **more.pop("config", {})}, **more}


def call(id, slug, **more):
    return {"id": id, "type": "workflow", "config": {"workflow": slug}, **more}


def foreach(id, *nodes, **more):
    config = {"items": [1, 2], "body": {"nodes": list(nodes)}, **more.pop("config", {})}
    return {"id": id, "type": "foreach", "config": config, **more}


TRIAGE = {
    **chain(transform("look"), foreach("each", transform("note"), config={"fanout": True})),
    "slug": "triage",
}


def nested():
    """Every container that becomes a graph, beside each other and in each other."""
    left = {
        "nodes": [
            transform("draft"),
            transform("tidy-up"),
            parallel("in-ner", {"one": {"nodes": [transform("x")]}}),
        ],
        "edges": [edge("draft", "tidy-up")],
    }
    both = parallel("both", {"left": left, "ri-ght": {"workflow": "triage"}}, description="Two ways.")
    return chain(both, call("call", "triage"), foreach("each", transform("note"), config={"fanout": True}))


def plan_steps(job):
    """Dagster's own step keys, with those that each hangs on."""
    return dict(create_execution_plan(job).get_all_step_deps())


def pinned_of(store):
    """What the jobs of the last publication are built from."""
    return construct_pinned(store.publications.get(store.publications.newest_id("default")))


class TestNestedGraphs:
    def test_containers_are_graphs_named_by_their_path(self, compiled):
        job = compiled(TRIAGE, nested())
        assert type(job.graph.node_named("both").definition) is dg.GraphDefinition
        both = job.graph.node_named("both").definition
        assert both.name == "refund_review__both"
        assert both.description == "Two ways."
        assert {node.name: node.definition.name for node in both.nodes} == {
            "agentmesh_begin": "refund_review__both__agentmesh_begin",
            "left": "refund_review__both__left",
            "ri_ght": "refund_review__both__ri_ght",
            "agentmesh_end": "refund_review__both__agentmesh_end",
        }
        left = both.node_named("left").definition
        assert {node.name: node.definition.name for node in left.nodes} == {
            "draft": "refund_review__both__left__draft",
            "tidy_up": "refund_review__both__left__tidy_up",
            "in_ner": "refund_review__both__left__in_ner",
        }
        called = job.graph.node_named("call").definition
        assert {node.name for node in called.nodes} == {
            "start",
            "look",
            "each",
            "end",
            "agentmesh_begin",
            "agentmesh_end",
        }

    def test_step_keys_are_those_of_dagster(self, compiled, store, sqlite_url):
        job = compiled(TRIAGE, nested())
        assert plan_steps(job).keys() == op_names(pinned_of(store), node_types())
        assert {
            "both.agentmesh_begin",
            "both.left.in_ner.one.x",
            "both.ri_ght.each.agentmesh_item[?]",
            "call.each.agentmesh_end",
            "each.agentmesh_item[?]",
            "agentmesh_finish",
        } <= plan_steps(job).keys()

    def test_levels_hang_on_begin_and_end_on_begin_and_all_their_sinks(self, compiled):
        steps = plan_steps(compiled(TRIAGE, nested()))
        assert steps["both.agentmesh_begin"] == {"start"}
        for root in ("left.draft", "left.in_ner.agentmesh_begin", "ri_ght.start"):
            assert steps[f"both.{root}"] == {"both.agentmesh_begin"}
        assert steps["both.left.tidy_up"] == {"both.left.draft"}
        assert steps["both.agentmesh_end"] == {
            "both.agentmesh_begin",
            "both.left.tidy_up",
            "both.left.in_ner.agentmesh_end",
            "both.ri_ght.end",
        }
        assert steps["call.start"] == {"call.agentmesh_begin"}
        assert steps["call.agentmesh_end"] == {"call.agentmesh_begin", "call.end"}
        assert steps["each.agentmesh_item[?]"] == {"each.agentmesh_begin"}
        assert steps["each.agentmesh_end"] == {"each.agentmesh_begin", "each.agentmesh_item[?]"}
        assert steps["end"] == {"each.agentmesh_end"}

    def test_a_containers_ways_out_are_outputs_of_its_graph(self, compiled):
        ways = [
            edge("start", "a"),
            edge("a", "end", condition="input.x"),
            edge("a", "b", condition="input.y"),
            edge("b", "end"),
        ]
        job = compiled(workflow([parallel("a", {"one": {"nodes": [transform("x")]}}), transform("b")], ways))
        assert [(name, port.description) for name, port in outputs(job, "a").items()] == [
            ("next_when", "next, when input.x"),
            ("next_when_2", "next, when input.y"),
        ]
        assert incoming(job, "b") == ["a.next_when_2"]
        assert incoming(job, "end") == ["a.next_when", "b.next"]

    @pytest.mark.parametrize(
        "walked",
        [
            parallel("it", {"one": {"nodes": [transform("x")]}}, config={"wait": "any"}),
            parallel("it", {"one": {"nodes": [transform("x")]}}, timeout_s=5),
            call("it", "triage", on_error="continue"),
            call("it", "triage", retry={"max_attempts": 2}),
            foreach("it", transform("x")),
            foreach("it", transform("x"), config={"fanout": True}, on_error="continue"),
            {
                "id": "it",
                "type": "loop",
                "config": {"until": "true", "max_iterations": 3, "body": {"nodes": [transform("x")]}},
            },
        ],
        ids=lambda node: node["type"],
    )
    def test_what_dagster_cannot_do_is_one_op(self, compiled, walked):
        job = compiled(TRIAGE, chain(walked))
        assert plan_steps(job).keys() == {"start", "it", "end", "agentmesh_finish"}

    def test_a_body_in_a_walked_container_has_no_ops(self, compiled):
        outer = foreach("outer", parallel("both", {"one": {"nodes": [transform("x")]}}))
        assert plan_steps(compiled(chain(outer))).keys() == {"start", "outer", "end", "agentmesh_finish"}

    def test_two_paths_never_give_one_name(self, compiled):
        one = {"nodes": [transform("b_c")]}
        other = {"nodes": [transform("c")]}
        job = compiled(chain(parallel("p", {"a": one, "a_b": other}), parallel("p_a", {"b": other})))
        names = {definition.name for definition in job.all_node_defs}
        assert {"refund_review__p__a__b_c", "refund_review__p__a_b__c", "refund_review__p_a__b__c"} <= names

    def test_kinds_model_and_pool_of_nodes_in_a_branch(self, compiled):
        ask = {"id": "ask", "type": "agent", "config": {"agent": "echo", "prompt": "x"}}
        job = compiled(ECHO, chain(parallel("both", {"left": {"nodes": [ask]}})))
        both = job.graph.node_named("both").definition
        op = both.node_named("left").definition.node_named("ask").definition
        assert op.pool == "llm_offline"
        assert op.tags["agentmesh/model"] == "offline/echo"
        kinds = {f"dagster/kind/{kind}" for kind in node_types()["parallel"].kinds}
        assert kinds <= both.node_named("agentmesh_begin").definition.tags.keys()
        assert kinds <= both.node_named("agentmesh_end").definition.tags.keys()

    def test_a_walked_container_in_which_somebody_is_asked_can_show_it(self, compiled):
        ask = {"id": "ask", "type": "human", "config": {"title": "Well?"}}
        asking = {**chain(ask), "slug": "asking"}
        job = compiled(asking, chain(foreach("asks", call("it", "asking")), foreach("quiet", transform("x"))))
        assert "waiting" in outputs(job, "asks")
        assert "waiting" not in outputs(job, "quiet")

    def test_an_inline_workflow_is_one_op(self, compiled, store):
        job = compiled(TRIAGE, {**nested(), "settings": {"execution": "inline"}})
        assert plan_steps(job).keys() == {"agentmesh_run"}
        assert op_names(pinned_of(store), node_types()) == {"agentmesh_run"}

    def test_the_definition_is_the_same_json_twice(self, compiled):
        definition = compiled(TRIAGE, nested()).metadata["agentmesh/definition"].value
        assert definition["nodes"][1]["config"]["branches"]["ri-ght"] == {"workflow": "triage"}


class TestItemKeys:
    KEYS = (
        "0",
        "17",
        "order-1",
        "order_1",
        "a b",
        "größe",
        "日本",
        "",
        "_",
        "__",
        "_5f_",
        "none_",
        "A/B",
        "\U0001f600",
    )

    def test_any_key_becomes_one_that_dagster_takes_and_back(self):
        for key in self.KEYS:
            dg.DynamicOutput(None, mapping_key=mapping_key(key))
            assert item_key(mapping_key(key)) == key

    def test_no_two_keys_become_the_same_and_none_the_placeholder(self):
        found = [mapping_key(key) for key in self.KEYS]
        assert len(set(found)) == len(found)
        assert NO_ITEM not in found
        dg.DynamicOutput(None, mapping_key=NO_ITEM)


class TestJob:
    def test_metadata_carries_version_and_definition(self, compiled):
        document = workflow([transform("a")], EDGES, name="Refund review", description="Decides a refund.")
        job = compiled(document)
        assert job.description == "Decides a refund."
        metadata = job.metadata
        assert metadata["agentmesh/version"].value == 1
        definition = metadata["agentmesh/definition"].value
        assert definition["slug"] == "refund-review"
        assert [node["id"] for node in definition["nodes"]] == ["start", "a", "end"]
        again = compiled({**document, "description": "Other."})
        assert again.metadata["agentmesh/version"].value == 2
        assert again.metadata["agentmesh/publication"].value > metadata["agentmesh/publication"].value
        assert (
            again.metadata["agentmesh/definition_hash"].value != metadata["agentmesh/definition_hash"].value
        )

    def test_link_name_and_purity(self, store, sqlite_url):
        published = publish_documents(store, [workflow([transform("a")], EDGES)])[-1]
        pinned = construct_pinned(published)
        options = {
            "node_types": node_types(),
            "resource": AgentMesh(database_url=sqlite_url).resource(),
            "executors": named_executors(),
        }
        job = build_job(pinned, **options, name="refund_review__p7", link="https://example.org/x")
        assert job.name == "refund_review__p7"
        assert job.metadata["agentmesh/source"].value == "https://example.org/x"
        assert job.graph.node_named("a").definition.name == "refund_review__p7__a"
        twice = [build_job(pinned, **options).get_job_snapshot() for _ in range(2)]
        assert twice[0] == twice[1]

    def test_settings_become_tags_and_executor(self, compiled):
        settings = {
            "tags": {"team": "x y"},
            "priority": 3,
            "executor": "in_process",
            "max_concurrent": 4,
        }
        job = compiled(workflow([transform("a")], EDGES, settings=settings, category="Kunden-Support äöü"))
        assert job.executor_def.name == "in_process"
        assert job.run_tags["team"] == "x y"
        assert job.run_tags["dagster/priority"] == "3"
        assert job.run_tags["agentmesh/project"] == "default"
        assert job.tags["agentmesh/category"] == "Kunden-Support äöü"

    @pytest.mark.parametrize(
        ("executor", "name"),
        [
            ("default", "agentmesh_threads"),
            ("threads", "agentmesh_threads"),
            ("multiprocess", "multiprocess"),
        ],
    )
    def test_executors(self, compiled, executor, name):
        job = compiled(
            workflow([transform("a")], EDGES, settings={"executor": executor, "max_concurrent": 2})
        )
        assert job.executor_def.name == name

    def test_a_job_without_required_input_launches_with_no_config(self, compiled):
        schema = {"type": "object", "properties": {"x": {"type": "string", "default": "d"}}}
        end = workflow(
            [{"id": "a", "type": "transform", "config": {"output": "{{ input.x }}"}}],
            EDGES,
            input_schema=schema,
        )
        assert dg.validate_run_config(compiled(end), None) is not None
        assert run_workflow([end]).run.output == "d"

    def test_launch_config_is_the_input_at_the_root(self, compiled):
        schema = {"type": "object", "required": ["order"], "properties": {"order": {"type": "string"}}}
        job = compiled(workflow([transform("a")], EDGES, input_schema=schema))
        dg.validate_run_config(job, {"order": "A"})
        with pytest.raises(dg.DagsterInvalidConfigError, match="order"):
            dg.validate_run_config(job, {"order": 5})
        with pytest.raises(dg.DagsterInvalidConfigError):
            dg.validate_run_config(job, {})

    def test_an_unpublication_cannot_be_compiled(self, store):
        from agentmesh_dagster.authoring import Authoring

        publish_documents(store, [workflow([transform("a")], EDGES)])
        gone = Authoring(store, "default", actor="t").unpublish("workflow", "refund-review")
        with pytest.raises(DefinitionError, match="published nothing"):
            construct_pinned(gone)


class TestNames:
    def test_reserved_words_as_a_slug_or_a_node_are_refused_or_work(self, compiled):
        """Either the validation says so by name, or Dagster takes them: nothing in between."""
        slugs = [
            (word, workflow([transform("a")], EDGES) | {"slug": word}) for word in sorted(DISALLOWED_NAMES)
        ]
        nodes = [
            (word, workflow([transform(word)], [edge("start", word), edge(word, "end")]))
            for word in sorted(DISALLOWED_NAMES)
        ]
        for word, document in slugs + nodes:
            problems, job = "", None
            try:
                job = compiled(document)
            except DocumentInvalid as refused:
                problems = str(refused.problems)
            assert job is not None or word in problems

    @pytest.mark.parametrize("name", ["agentmesh_finish", "agentmesh-finish"])
    def test_the_hidden_ops_name_cannot_be_taken(self, compiled, name):
        with pytest.raises(DocumentInvalid) as refused:
            compiled(workflow([transform(name)], [edge("start", name), edge(name, "end")]))
        assert name in str(refused.value.problems)

    def test_node_ids_that_become_the_same_name_are_refused(self, compiled):
        nodes = [transform("a-b"), transform("a_b")]
        edges = [edge("start", "a-b"), edge("start", "a_b"), edge("a-b", "end"), edge("a_b", "end")]
        with pytest.raises(DocumentInvalid) as refused:
            compiled(workflow(nodes, edges))
        assert "a_b" in str(refused.value.problems)


class TestCodeLocation:
    def test_jobs_are_listed_by_name_and_built_when_asked_for(self, store, sqlite_url):
        publish_documents(
            store,
            [ECHO, workflow([transform("a")], EDGES), {**workflow([transform("a")], EDGES), "slug": "other"}],
        )
        location = build_code_location(AgentMesh(database_url=sqlite_url))
        assert sorted(location.job_names) == [
            "agentmesh_decide",
            "agentmesh_finalize",
            "other",
            "refund_review",
        ]
        assert location.get_job("other").graph.node_named("a")

    def test_a_workflows_name_cannot_be_taken_by_a_job_of_ones_own(self, store, sqlite_url):
        publish_documents(store, [workflow([transform("a")], EDGES)])

        @dg.job
        def refund_review():
            pass

        with pytest.raises(DefinitionError, match="refund_review"):
            build_code_location(AgentMesh(database_url=sqlite_url), jobs=[refund_review])
