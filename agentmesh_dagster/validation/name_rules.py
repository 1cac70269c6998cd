"""Rules of names: ids of nodes, names of branches, keys of the state, and settings that mean nothing on a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, cast

from agentmesh_dagster.constants import BEGIN_OP, END_OP, FINISH_OP, INLINE_OP, ITEM_OP
from agentmesh_dagster.specs.base import NODE_ID_PATTERN
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.problems import Problem
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.view import BodyView, NodeView

RESERVED: Final = frozenset((BEGIN_OP, END_OP, FINISH_OP, INLINE_OP, ITEM_OP))
"""Names of ops that are no nodes of a document."""
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_FORM: Final = (
    "Begin with an ASCII letter, then up to 62 ASCII letters, digits, '-', '_', no two '-', '_' side by side"
)


def name_problems(level: Level) -> Iterator[Problem]:
    """Problems of the names at one level, and of its nodes' settings."""
    yield from _node_names(level)
    for node in level.view.all_nodes:
        yield from _branch_names(node)
        yield from _node_settings(node, is_body=level.body is not None)


def _node_names(level: Level) -> Iterator[Problem]:
    by_id: dict[str, NodeView] = {}
    by_name: dict[str, NodeView] = {}
    for node in level.view.all_nodes:
        path = f"{node.path}.id"
        if not NODE_ID_PATTERN.match(node.id):
            yield Problem.of(
                "node-id-invalid", path, f"The node id {node.id[:80]!r} is not well-formed", _FORM
            )
        first = by_id.setdefault(node.id, node)
        if first is not node:
            yield Problem.of(
                "node-id-duplicate",
                path,
                f"{first.path} has the id {node.id!r} already",
                "Give one of them another id",
            )
            continue
        if node.name in RESERVED:
            yield Problem.of(
                "node-id-collision",
                path,
                f"{node.id!r} is the name of an op that AgentMesh adds by itself",
                "Give the node another id",
            )
        same = by_name.setdefault(node.name, node)
        if same is not node:
            yield Problem.of(
                "node-id-collision",
                path,
                f"The ids {same.id!r} ({same.path}) and {node.id!r} are both {node.name!r} in expressions",
                "Rename one of them",
            )
        outer = next((o.by_name[node.name] for o in level.enclosing() if node.name in o.by_name), None)
        # Of a start or end node it is told that it does not belong in a body.
        if outer is not None and not (node.is_start or node.is_end):
            yield Problem.of(
                "node-id-shadows",
                path,
                f"steps.{node.name} is {outer.id!r} ({outer.path}) of a level around this body already",
                "Rename one of them",
            )


def _branch_names(node: NodeView) -> Iterator[Problem]:
    by_name: dict[tuple[str, str], BodyView] = {}
    for body in node.bodies:
        if body.branch is None:
            continue
        name = identifier(body.branch)
        if not NODE_ID_PATTERN.match(body.branch):
            yield _branch(body, f"The branch name {body.branch[:80]!r} is not well-formed", _FORM)
        elif name in RESERVED:
            yield _branch(
                body,
                f"{body.branch!r} is the name of an op that AgentMesh adds by itself",
                "Choose another name",
            )
        first = by_name.setdefault((body.field, name), body)
        if first is not body:
            yield _branch(
                body,
                f"The branches {first.branch!r} and {body.branch!r} are both {name!r} in Dagster",
                "Rename one of them",
            )


def _branch(body: BodyView, message: str, mend: str) -> Problem:
    return Problem.of("branch-name-invalid", body.path, message, mend)


def _node_settings(node: NodeView, *, is_body: bool) -> Iterator[Problem]:
    keys = node.raw.get("set")
    if isinstance(keys, dict):
        for key in cast("dict[object, object]", keys):
            if isinstance(key, str) and (not _IDENTIFIER.match(key) or key == "last_output"):
                yield Problem.of(
                    "set-key-invalid",
                    f"{node.path}.set",
                    f"{key[:80]!r} cannot be written as context.{key[:80]}",
                    "Use letters, digits and '_', not beginning with a digit; 'last_output' is taken",
                )
    # Of a body's start and end nodes it is told that they are there.
    if (node.is_start or node.is_end) and not is_body:
        for name, default in (
            ("retry", None),
            ("timeout_s", None),
            ("on_error", "fail"),
            ("on_unknown", "human"),
        ):
            if node.raw.get(name) not in (None, default):
                yield Problem.of(
                    "setting-without-effect",
                    f"{node.path}.{name}",
                    f"{name!r} does nothing on a node of type {node.type!r}",
                    "Remove it",
                )
