"""`run_workflow`, as users call it in tests of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from control_flow import chain, node

from agentmesh_dagster.testing import run_workflow


def test_runs_of_several_threads_do_not_disturb_each_other():
    document = chain(*(node(f"n{n}", "transform", {"output": n}) for n in range(5)))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run_workflow([document]), range(12)))
    assert [result.run.status.value for result in results] == ["succeeded"] * 12
