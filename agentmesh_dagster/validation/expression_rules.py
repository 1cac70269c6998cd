"""Rules of expressions: they parse, and name what is there where they stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import expressions
from agentmesh_dagster.specs.base import Condition, MarkedField, Template
from agentmesh_dagster.specs.documents import AgentSpec, EdgeSpec, NodeSpec, ToolSpec
from agentmesh_dagster.specs.fields import JsonObject, as_object, raw_marks
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.notify import NOTIFY_NAMES, NotifyConfig
from agentmesh_dagster.specs.problems import Problem, Suggestions, child_path, nearest, suggestion
from agentmesh_dagster.validation.graph_rules import GraphFacts
from agentmesh_dagster.validation.output_schemas import output_schema_of
from agentmesh_dagster.validation.view import NodeView, WorkflowView

BODY_NAMES: Final = ("item", "index", "iteration")
STEP_FIELDS: Final = ("output", "error", "status")
RUN_FIELDS: Final = ("id",)
WORKFLOW_NAMES: Final = frozenset(("input", "steps", "context", "run"))
_OPAQUE: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties")

SecretsKnown = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What the expressions at a place may name."""

    names: frozenset[str]
    allows_secrets: bool = False
    input_schema: JsonObject | None = None
    """The schema of `input`, where it is known."""
    node: NodeView | None = None
    """The node at which the expression stands, of a workflow."""
    sees_own: bool = False
    """Whether the node itself has run: in its `set`, and in the conditions of its edges."""
    workflow: WorkflowScope | None = None


@dataclass(frozen=True)
class WorkflowScope:
    """The steps and the state of a workflow, for all its expressions."""

    view: WorkflowView
    facts: GraphFacts
    by_name: Mapping[str, NodeView]
    setters: Mapping[str, Collection[str]]
    """Key of the state to the ids of the nodes that write it."""
    state_keys: Collection[str]
    state_is_open: bool
    near_steps: Suggestions
    near_keys: Suggestions
    near_inputs: Suggestions

    @staticmethod
    def of(view: WorkflowView, facts: GraphFacts) -> WorkflowScope:
        """The scope of a workflow."""
        by_name: dict[str, NodeView] = {}
        setters: dict[str, list[str]] = {}
        for node in view.nodes.values():
            by_name.setdefault(node.name, node)
            for key in as_object(node.raw.get("set")) or {}:
                setters.setdefault(key, []).append(node.id)
        schema = view.state_schema or {}
        properties = as_object(schema.get("properties")) or {}
        inputs = as_object((view.input_schema or {}).get("properties")) or {}
        return WorkflowScope(
            view=view,
            facts=facts,
            by_name=by_name,
            setters=setters,
            state_keys=tuple(properties),
            state_is_open=any(key in schema for key in _OPAQUE),
            near_steps=Suggestions(by_name),
            near_keys=Suggestions(sorted({*setters, *properties, "last_output"})),
            near_inputs=Suggestions(inputs),
        )


def workflow_expression_problems(
    view: WorkflowView, facts: GraphFacts, secrets_known: SecretsKnown | None
) -> Iterator[Problem]:
    """Problems of all expressions in a workflow's nodes and edges."""
    whole = WorkflowScope.of(view, facts)
    for node in view.all_nodes:
        scope = Scope(names=WORKFLOW_NAMES, input_schema=view.input_schema, node=node, workflow=whole)
        after = Scope(
            names=WORKFLOW_NAMES, input_schema=view.input_schema, node=node, sees_own=True, workflow=whole
        )
        config = as_object(node.raw.get("config"))
        if node.config_type is not None and config is not None:
            for marked in raw_marks(node.config_type, config, f"{node.path}.config"):
                yield from _marked_problems(marked, scope, secrets_known)
        for marked in raw_marks(NodeSpec, node.raw, node.path):
            yield from _marked_problems(marked, after, secrets_known)
    for edge in view.edges:
        node = view.nodes.get(edge.source) if edge.source is not None else None
        scope = Scope(
            names=WORKFLOW_NAMES,
            input_schema=view.input_schema,
            node=node,
            sees_own=True,
            workflow=whole if node is not None else None,
        )
        for marked in raw_marks(EdgeSpec, edge.raw, edge.path):
            yield from _marked_problems(marked, scope, secrets_known)


def agent_expression_problems(raw: JsonObject, secrets_known: SecretsKnown | None) -> Iterator[Problem]:
    """Problems of an agent's expressions: what every workflow has, and secrets in the model settings."""
    for marked in raw_marks(AgentSpec, raw):
        is_setting = marked.path == "model_settings"
        names = frozenset[str]() if is_setting else WORKFLOW_NAMES - {"steps"}
        yield from _marked_problems(marked, Scope(names=names, allows_secrets=is_setting), secrets_known)


def tool_expression_problems(
    raw: JsonObject, config_type: type[Any] | None, secrets_known: SecretsKnown | None
) -> Iterator[Problem]:
    """Problems of a tool's expressions: `input` is the tool's input."""
    schema = as_object(raw.get("input_schema"))
    config = as_object(raw.get("config"))
    if config_type is not None and config is not None:
        scope = Scope(names=frozenset(("input",)), allows_secrets=True, input_schema=schema)
        for marked in raw_marks(config_type, config, "config"):
            yield from _marked_problems(marked, scope, secrets_known)
    for marked in raw_marks(ToolSpec, raw):
        yield from _marked_problems(
            marked, Scope(names=frozenset(("input",)), input_schema=schema), secrets_known
        )


def notify_expression_problems(
    model: type[NotifyConfig], raw: JsonObject, path: str, secrets_known: SecretsKnown | None
) -> Iterator[Problem]:
    """Problems of the templates in a notifier's config: `approval` is the approval that is told of."""
    scope = Scope(names=NOTIFY_NAMES, allows_secrets=True)
    for marked in raw_marks(model, raw, path):
        yield from _marked_problems(marked, scope, secrets_known)


def _marked_problems(
    marked: MarkedField, scope: Scope, secrets_known: SecretsKnown | None
) -> Iterator[Problem]:
    if isinstance(marked.mark, Condition):
        if isinstance(marked.value, str):
            yield from _text_problems(marked.value, marked.path, True, scope, secrets_known)
    elif isinstance(marked.mark, Template):
        for path, text in strings_at(marked.value, marked.path):
            yield from _text_problems(text, path, False, scope, secrets_known)


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
    text: str, path: str, bare: bool, scope: Scope, secrets_known: SecretsKnown | None
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
                "Use secrets in a tool's config or an agent's model_settings",
            )
        elif secrets_known is not None and not secrets_known(name):
            yield Problem.of(
                "secret-unconfigured",
                path,
                f"The secret {name!r} is not configured here",
                f"Set {name} in the environment, or in the secrets provider, of the machine that runs it",
            )
    told: set[tuple[str, ...]] = set()
    for reference in sorted(found):
        # Of steps.x.output.a and steps.x.output.b one missing x is told once.
        key = reference[:2]
        problem = _reference_problem(reference, path, scope)
        if problem is not None and key not in told:
            told.add(key)
            yield problem


def _reference_problem(reference: tuple[str, ...], path: str, scope: Scope) -> Problem | None:
    root = reference[0]
    if root not in scope.names:
        if root in BODY_NAMES:
            return Problem.of(
                "name-outside-body",
                path,
                f"{root!r} exists only inside the body of a foreach or loop node",
                "Use input, steps or context",
            )
        there = ", ".join(sorted(scope.names)) or "secret('NAME') alone"
        near = nearest(root, scope.names)
        mend = f"Did you mean {near!r}" if near else _root_mend(root, scope)
        return Problem.of(
            "name-unknown", path, f"There is no name {root[:80]!r} here; there is {there}", mend
        )
    if len(reference) < 2:
        return None
    if root == "steps" and scope.workflow is not None:
        return _step_problem(reference, path, scope, scope.workflow)
    if root == "context" and scope.workflow is not None:
        return _context_problem(reference[1], path, scope, scope.workflow)
    if root == "input":
        return _input_problem(reference[1], path, scope)
    if root == "run" and reference[1] not in RUN_FIELDS:
        return Problem.of("name-unknown", path, f"There is no run.{reference[1][:80]}", "There is run.id")
    return None


def _root_mend(root: str, scope: Scope) -> str:
    if scope.workflow is not None and root in scope.workflow.by_name:
        return f"Write steps.{root}.output"
    return "Text in expressions stands in quotes"


def _step_problem(
    reference: tuple[str, ...], path: str, scope: Scope, whole: WorkflowScope
) -> Problem | None:
    name, node = reference[1], scope.node
    wanted = whole.by_name.get(name)
    if wanted is None:
        # The suggestion is spelled as expressions spell it: node-1 is steps.node_1.
        spelled = identifier(name)
        mend = f"Did you mean {spelled!r}" if spelled in whole.by_name else whole.near_steps.mend(name)
        return Problem.of("step-unknown", path, f"steps.{name[:80]} names no node", mend)
    if node is not None and not _sees(whole, wanted.id, scope):
        itself = wanted.id == node.id
        message = (
            f"{name!r} has not run yet: it is this node itself"
            if itself
            else (f"steps.{name} does not run before {node.id!r}: no way leads from it to there")
        )
        return Problem.of("step-not-upstream", path, message, "Name a node that runs before, or add an edge")
    if len(reference) > 2 and reference[2] not in STEP_FIELDS:
        return Problem.of(
            "step-field-unknown",
            path,
            f"There is no steps.{name}.{reference[2][:80]}; there are {', '.join(STEP_FIELDS)}",
            f"Write steps.{name}.output.{reference[2][:80]}",
        )
    if len(reference) > 3 and reference[2] == "output" and not wanted.is_start:
        return _output_problem(wanted, reference, path, whole.view)
    return None


def _output_problem(
    wanted: NodeView, reference: tuple[str, ...], path: str, view: WorkflowView
) -> Problem | None:
    """A field that a node's output can never have; an expression may ask for it and have a default."""
    schema = output_schema_of(wanted, view)
    for depth, key in enumerate(reference[3:], 3):
        if schema is None or any(word in schema for word in _OPAQUE):
            return None
        properties = as_object(schema.get("properties")) or {}
        if key not in properties and schema.get("additionalProperties") is False:
            known = ", ".join(properties) or "nothing"
            place = ".".join(reference[:depth])
            return Problem.of(
                "output-unknown",
                path,
                f"There is no {place}.{key[:80]}: {wanted.id!r}, of type {wanted.type!r}, gives {known}",
                suggestion(key, properties),
            )
        schema = as_object(properties.get(key))
    return None


def _sees(whole: WorkflowScope, upper: str, scope: Scope) -> bool:
    node = scope.node
    if node is None or node.id in whole.facts.uncertain:
        return True
    if upper == node.id:
        return scope.sees_own or node.id in whole.facts.reach.in_cycles
    return whole.facts.reach.is_above(upper, node.id)


def _context_problem(key: str, path: str, scope: Scope, whole: WorkflowScope) -> Problem | None:
    if key == "last_output" or key in whole.state_keys or whole.state_is_open:
        return None
    setters = whole.setters.get(key, ())
    own_set = scope.node is not None and path.startswith(f"{scope.node.path}.set")
    for setter in setters:
        if own_set and scope.node is not None and setter == scope.node.id:
            continue
        if _sees(whole, setter, scope):
            return None
    if setters:
        names = ", ".join(repr(name) for name in list(setters)[:5])
        return Problem.of(
            "context-unknown",
            path,
            f"context.{key[:80]} is set by {names}, and not before this place",
            "Set it in a node that runs before, or give it a default in state_schema",
        )
    return Problem.of("context-unknown", path, f"No node sets context.{key[:80]}", whole.near_keys.mend(key))


def _input_problem(key: str, path: str, scope: Scope) -> Problem | None:
    schema = scope.input_schema
    if schema is None or any(word in schema for word in _OPAQUE):
        return None
    properties = as_object(schema.get("properties")) or {}
    if key in properties:
        return None
    if schema.get("additionalProperties") is False:
        return Problem.of(
            "input-unknown",
            path,
            f"input.{key[:80]} can never be there: the input schema is closed and has no such property",
            scope.workflow.near_inputs.mend(key) if scope.workflow else suggestion(key, properties),
        )
    if properties and "additionalProperties" not in schema:
        return Problem.of(
            "input-undeclared",
            path,
            f"input.{key[:80]} is no property of the input schema",
            scope.workflow.near_inputs.mend(key) if scope.workflow else suggestion(key, properties),
        )
    return None
