"""Walks the levels of a workflow: its own, and those of all its bodies."""

from __future__ import annotations

from agentmesh_dagster.specs.problems import Problem
from agentmesh_dagster.validation.graph_rules import graph_problems
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.name_rules import name_problems
from agentmesh_dagster.validation.view import BodyView, NodeView, WorkflowView


def levels_of(view: WorkflowView, problems: list[Problem]) -> list[Level]:
    """All levels in document order, each before those inside of it; adds the problems of their names and graphs."""
    done: list[Level] = []

    # A document nests lists and objects at most 64 levels deep, and so bodies at most 16.
    def enter(level: Level) -> None:
        problems.extend(name_problems(level))
        done.append(level)
        for node in level.view.all_nodes:
            for body in node.bodies:
                enter(_inner(level, node, body, problems))

    top = Level(view=view.top, facts=graph_problems(view.top, problems))
    enter(top)
    for body in view.endings:
        enter(_inner(top, None, body, problems))
    return done


def _inner(parent: Level, owner: NodeView | None, body: BodyView, problems: list[Problem]) -> Level:
    return Level(
        view=body.level,
        facts=graph_problems(body.level, problems),
        body=body,
        parent=parent,
        owner=owner,
        names=parent.names | body.names,
        is_ending=parent.is_ending or owner is None,
    )
