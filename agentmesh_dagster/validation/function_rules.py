"""Rules of the Python functions that documents name: where the check runs they can be looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.fields import JsonObject
from agentmesh_dagster.specs.nodes import CodeConfig
from agentmesh_dagster.specs.problems import Problem
from agentmesh_dagster.validation.view import WorkflowView


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """What became of looking up a function."""

    input_schema: JsonObject | None = None
    """What its signature says; None where it was not found."""
    output_schema: JsonObject | None = None
    problem: str = ""
    """Why it cannot be called."""
    is_sure: bool = False
    """Whether that holds wherever the document runs, and not only where the check does."""


LookUp = Callable[[str], LookedUp]
"""Looks up `module:callable`."""


def function_problems(view: WorkflowView, look_up: LookUp) -> Iterator[Problem]:
    """Problems of the functions of a workflow's `code` nodes."""
    for node in view.every_node():
        if isinstance(node.config, CodeConfig):
            yield from function_problem(node.config.function, f"{node.path}.config.function", look_up)


def function_problem(reference: Json, path: str, look_up: LookUp) -> Iterator[Problem]:
    """The problem of a function that cannot be called, where it cannot."""
    found = look_up(reference) if isinstance(reference, str) else LookedUp()
    if found.problem and found.is_sure:
        yield Problem.of("function-unknown", path, found.problem, "Correct the name, or write the function")
    elif found.problem:
        yield Problem.of(
            "function-unavailable", path, found.problem, "See that it can be called where the runs execute"
        )
