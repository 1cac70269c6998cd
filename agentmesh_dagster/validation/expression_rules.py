"""Rules of expressions: they parse, their secrets may stand there, and they name what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import expressions
from agentmesh_dagster.specs.base import Condition, MarkedField, Template
from agentmesh_dagster.specs.documents import AgentSpec, BodySpec, EdgeSpec, NodeSpec, ToolSpec
from agentmesh_dagster.specs.fields import JsonObject, as_object, raw_marks
from agentmesh_dagster.specs.notify import NOTIFY_NAMES, NotifyConfig
from agentmesh_dagster.specs.problems import Problem, child_path
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.name_use_rules import use_problem
from agentmesh_dagster.validation.scope import (
    TOOL_NAMES,
    WORKFLOW_NAMES,
    Scope,
    Seen,
    WorkflowScope,
    level_scope,
)
from agentmesh_dagster.validation.target import Target
from agentmesh_dagster.validation.view import BodyView, NodeView, WorkflowView


def workflow_expression_problems(
    view: WorkflowView, levels: Sequence[Level], target: Target | None
) -> Iterator[Problem]:
    """Problems of all expressions in a workflow's nodes, edges and bodies."""
    whole = WorkflowScope.of(view, levels)
    for level in levels:
        if level.body is not None:
            yield from _body_problems(level.body, level_scope(whole, level, None), target)
        for node in level.view.all_nodes:
            yield from _node_problems(node, level, whole, target)
        for edge in level.view.edges:
            node = level.view.nodes.get(edge.source) if edge.source is not None else None
            scope = level_scope(whole, level, node, sees_own=True)
            if node is None:
                scope = replace(scope, seen=None)
            for marked in raw_marks(EdgeSpec, edge.raw, edge.path):
                yield from _marked_problems(marked, scope, target)


def _body_problems(body: BodyView, scope: Scope, target: Target | None) -> Iterator[Problem]:
    own = {key: value for key, value in body.raw.items() if key not in ("nodes", "edges")}
    for marked in raw_marks(BodySpec, own, body.path):
        yield from _marked_problems(marked, scope, target)


def _node_problems(
    node: NodeView, level: Level, whole: WorkflowScope, target: Target | None
) -> Iterator[Problem]:
    scope = level_scope(whole, level, node)
    config = as_object(node.raw.get("config"))
    if node.config_type is not None and config is not None:
        for marked in raw_marks(node.config_type, config, f"{node.path}.config"):
            place = scope
            if isinstance(marked.mark, Condition) and (marked.mark.names or marked.mark.body):
                place = _condition_scope(marked.mark, node, scope, whole.levels)
            yield from _marked_problems(marked, place, target)
    after = level_scope(whole, level, node, sees_own=True)
    for marked in raw_marks(NodeSpec, node.raw, node.path):
        yield from _marked_problems(marked, after, target)


def _condition_scope(mark: Condition, node: NodeView, scope: Scope, levels: Mapping[str, Level]) -> Scope:
    """The scope of a container's condition: what the node sees, names of its own, and all steps of a body."""
    scope = replace(scope, names=scope.names | set(mark.names))
    if not mark.body:
        return scope
    body = next((body for body in node.bodies if body.field == mark.body), None)
    # Where the body is missing that is told, and nothing is known of its steps.
    return replace(scope, seen=Seen(levels[body.path], None) if body is not None else None)


def agent_expression_problems(raw: JsonObject, target: Target | None) -> Iterator[Problem]:
    """Problems of an agent's expressions: what every workflow has; in the model settings the deployment's values."""
    for marked in raw_marks(AgentSpec, raw):
        is_setting = marked.path == "model_settings"
        names = frozenset(("config",)) if is_setting else WORKFLOW_NAMES - {"steps"}
        yield from _marked_problems(marked, Scope(names=names), target)


def tool_expression_problems(
    raw: JsonObject, config_type: type[Any] | None, target: Target | None
) -> Iterator[Problem]:
    """Problems of a tool's expressions: `input` is the tool's input."""
    schema = as_object(raw.get("input_schema"))
    config = as_object(raw.get("config"))
    if config_type is not None and config is not None:
        scope = Scope(names=TOOL_NAMES, allows_secrets=True, input_schema=schema)
        for marked in raw_marks(config_type, config, "config"):
            yield from _marked_problems(marked, scope, target)
        if target is not None and "url" in config:
            yield from target.destination_problems(config["url"], strings_at(config, "config"))
    for marked in raw_marks(ToolSpec, raw):
        yield from _marked_problems(marked, Scope(names=TOOL_NAMES, input_schema=schema), target)


def notify_expression_problems(
    model: type[NotifyConfig], raw: JsonObject, path: str, target: Target | None
) -> Iterator[Problem]:
    """Problems of the templates in a notifier's config: `approval` is the approval that is told of."""
    scope = Scope(names=NOTIFY_NAMES, allows_secrets=model.takes_secrets)
    for marked in raw_marks(model, raw, path):
        yield from _marked_problems(marked, scope, target)
    if target is not None and "url" in raw:
        yield from target.destination_problems(raw["url"], strings_at(raw, path))


def _marked_problems(marked: MarkedField, scope: Scope, target: Target | None) -> Iterator[Problem]:
    if isinstance(marked.mark, Condition):
        if isinstance(marked.value, str):
            yield from _text_problems(marked.value, marked.path, True, scope, target)
    elif isinstance(marked.mark, Template):
        for path, text in strings_at(marked.value, marked.path):
            yield from _text_problems(text, path, False, scope, target)


def strings_at(value: Json, path: str) -> Iterator[tuple[str, str]]:
    """All texts in a JSON value, with their paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from strings_at(item, child_path(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from strings_at(item, child_path(path, index))


def _text_problems(
    text: str, path: str, bare: bool, scope: Scope, target: Target | None
) -> Iterator[Problem]:
    try:
        expressions.check(text, bare=bare)
        found = expressions.references(text, bare=bare)
        secrets = expressions.secrets_used(f"{{{{ {text} }}}}" if bare else text)
    except ExpressionError as error:
        braces = bare and text.strip().startswith("{{")
        mend = "Write the condition without the braces" if braces else "Correct the expression"
        yield Problem.of("expression-invalid", path, error.message.rstrip("."), mend)
        return
    for name in sorted(secrets):
        if not scope.allows_secrets:
            yield Problem.of(
                "secret-misplaced",
                path,
                f"The secret {name!r} may not be used here",
                "Use secrets in a tool's config or a webhook; a model's key stands in an endpoint of the deployment",
            )
        elif target is not None:
            yield from target.secret_problems(name, path)
    told: set[tuple[str, ...]] = set()
    for reference in sorted(found):
        # Of steps.x.output.a and steps.x.output.b one missing x is told once.
        key = reference[:2]
        problem = use_problem(reference, path, scope)
        if key in told:
            continue
        told.add(key)
        if problem is not None:
            yield problem
        elif target is not None and reference[0] == "config" and len(reference) > 1:
            yield from target.config_problems(reference[1], path)
