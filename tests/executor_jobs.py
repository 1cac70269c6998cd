"""Jobs for the executor's tests. Ops write what happened to a file in EXECUTOR_TEST_DIR: every process can.

Run as a program, it executes one job: `python executor_jobs.py <job>`.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import dagster as dg

from agentmesh_dagster.orchestration.executor import agentmesh_executor, build_executor
from agentmesh_dagster.orchestration.step_processes import multiprocess_executor
from agentmesh_dagster.runtime.loop import run_on_loop

NOTHING = {"h_0": dg.Out(dg.Nothing)}
UPSTREAM = {"upstream": dg.In(dg.Nothing)}


def note(text):
    with (Path(os.environ["EXECUTOR_TEST_DIR"]) / "notes").open("a") as notes:
        notes.write(f"{text}\n")


def notes():
    path = Path(os.environ["EXECUTOR_TEST_DIR"]) / "notes"
    return path.read_text().splitlines() if path.exists() else []


def sleeper(name, seconds, pool=None, **options):
    @dg.op(name=name, out=NOTHING, pool=pool, **options)
    def body():
        async def sleep():
            note(f"begin {name}")
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                # A cleanup that takes a while must not be cut off.
                await asyncio.sleep(0.3)
                note(f"cleanup {name}")
                raise
            note(f"end {name}")

        run_on_loop(sleep())
        yield dg.Output(None, "h_0")

    return body


def graph(name, ops, dependencies=None, executor=None, **options):
    return dg.GraphDefinition(name=name, node_defs=ops, dependencies=dependencies or {}).to_job(
        executor_def=executor or build_executor(cancel_grace_s=5), **options
    )


def after(*sources):
    return {"upstream": dg.MultiDependencyDefinition([dg.DependencyDefinition(s, "h_0") for s in sources])}


def pooled():
    return graph("pooled", [sleeper(f"p{i}", 0.1, pool="llm") for i in range(6)])


def wide():
    return graph("wide", [sleeper(f"w{i}", 1.0) for i in range(50)])


def narrow():
    return graph(
        "narrow", [sleeper(f"n{i}", 0.05) for i in range(6)], executor=build_executor(max_concurrent=2)
    )


def sleepy():
    return graph("sleepy", [sleeper("s0", 30), sleeper("s1", 30)])


def sleepy_in_process():
    return graph("sleepy_in_process", [sleeper("s0", 30)], executor=dg.in_process_executor)


def sleepy_multiprocess():
    return graph("sleepy_multiprocess", [sleeper("s0", 30)], executor=dg.multiprocess_executor)


def sleepy_step_processes():
    return graph("sleepy_step_processes", [sleeper("s0", 30)], executor=multiprocess_executor)


def stubborn():
    @dg.op
    def blocked():
        note("begin blocked")
        time.sleep(60)

    return graph("stubborn", [blocked], executor=build_executor(cancel_grace_s=0.5))


def failing():
    @dg.op(out=NOTHING)
    def bad():
        raise ValueError("no good")

    @dg.op(ins=UPSTREAM)
    def downstream_of_bad():
        note("never")

    @dg.op(ins=UPSTREAM)
    def downstream_of_slow():
        note("downstream_of_slow")

    return graph(
        "failing",
        [bad, sleeper("slow", 0.5), downstream_of_bad, downstream_of_slow],
        {"downstream_of_bad": after("bad"), "downstream_of_slow": after("slow")},
    )


def retrying():
    def flaky(name, seen, failure):
        @dg.op(
            name=name,
            retry_policy=dg.RetryPolicy(max_retries=2, delay=0.3) if failure is ValueError else None,
        )
        def body():
            note(f"attempt {name}")
            if notes().count(f"attempt {name}") < seen:
                raise failure()

        return body

    return graph(
        "retrying",
        [
            flaky("by_policy", 3, ValueError),
            flaky("by_request", 2, lambda: dg.RetryRequested(max_retries=1)),
            flaky("hopeless", 9, ValueError),
        ],
    )


def unretried():
    @dg.op
    def flaky():
        note("attempt")
        raise dg.RetryRequested(max_retries=3)

    return graph(
        "unretried",
        [flaky],
        executor=agentmesh_executor.configured({"retries": {"disabled": {}}}, "unretried"),
    )


def _same(name, executor):
    """Branches, a join, dynamic outputs, values, an async op, hooks, a resource."""

    @dg.success_hook
    def told_success(context):
        note(f"success hook {context.op.name}")

    @dg.failure_hook
    def told_failure(context):
        note(f"failure hook {context.op.name}")

    @dg.op(out=dg.DynamicOut(int))
    def each():
        for i in range(3):
            yield dg.DynamicOutput(i, mapping_key=str(i))

    @dg.op
    def double(x: int) -> int:
        return 2 * x

    @dg.op
    async def total(xs: list) -> int:
        await asyncio.sleep(0)
        note(f"total {sum(xs)}")
        return sum(xs)

    @dg.op(out={"h_0": dg.Out(dg.Nothing, is_required=False), "h_1": dg.Out(dg.Nothing, is_required=False)})
    def choose():
        yield dg.Output(None, "h_0")

    @dg.op(ins=UPSTREAM, out=NOTHING)
    def taken():
        yield dg.Output(None, "h_0")

    @dg.op(ins=UPSTREAM, out=NOTHING)
    def not_taken():
        yield dg.Output(None, "h_0")

    @dg.op(ins=UPSTREAM, required_resource_keys={"greeting"})
    def join(context):
        note(f"join says {context.resources.greeting}")

    @dg.op
    def broken():
        raise dg.Failure("on purpose", allow_retries=False)

    @dg.graph(name=name)
    def everything():
        total(each().map(double).collect())
        left, right = choose()
        join([taken(left), not_taken(right)])
        broken()

    return everything.to_job(
        executor_def=executor,
        hooks={told_success, told_failure},
        resource_defs={"greeting": dg.ResourceDefinition.hardcoded_resource("hello")},
    )


def same_ours():
    return _same("same_ours", build_executor())


def same_in_process():
    return _same("same_in_process", dg.in_process_executor)


def same_multiprocess():
    return _same("same_multiprocess", dg.multiprocess_executor)


def same_step_processes():
    return _same("same_step_processes", multiprocess_executor)


def _no_resource(name, executor):
    @dg.resource
    def broken_resource():
        raise RuntimeError("cannot connect")

    @dg.op(required_resource_keys={"db"})
    def uses():
        note("never")

    return graph(name, [uses], executor=executor, resource_defs={"db": broken_resource})


def no_resource():
    return _no_resource("no_resource", build_executor())


def no_resource_in_process():
    return _no_resource("no_resource_in_process", dg.in_process_executor)


def talkative():
    barrier = threading.Barrier(2, timeout=20)

    def talker(name):
        @dg.op(name=name)
        def body(context):
            barrier.wait()
            for i in range(20):
                context.log.info(f"{name} says {i}")
                dg.get_dagster_logger().info(f"{name} shouts {i}")
                logging.getLogger("unmanaged").info("nobody listens")
            print(f"{name} prints")
            print(f"{name} complains", file=sys.stderr)
            barrier.wait()

        return body

    return graph("talkative", [talker("ann"), talker("bob")])


def chain():
    @dg.op(name="c0", out=NOTHING)
    def first():
        yield dg.Output(None, "h_0")

    def link(name):
        @dg.op(name=name, ins=UPSTREAM, out=NOTHING)
        def body(context):
            # A reader in the run's own process sees every event that happened before.
            stored = context.instance.all_logs(context.run_id, of_type=dg.DagsterEventType.STEP_START)
            note(f"{name} sees {len(stored)}")
            yield dg.Output(None, "h_0")

        return body

    names = [f"c{i}" for i in range(12)]
    return graph("chain", [first, *map(link, names[1:])], {b: after(a) for a, b in pairwise(names)})


if __name__ == "__main__":
    with dg.DagsterInstance.get() as persistent:
        dg.execute_job(dg.reconstructable(globals()[sys.argv[1]]), instance=persistent, raise_on_error=False)
