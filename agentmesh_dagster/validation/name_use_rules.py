"""Rules of what expressions name: names, steps, keys of the state, and fields of inputs and outputs."""

from __future__ import annotations

from typing import Final

from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.names import identifier
from agentmesh_dagster.specs.problems import Problem, nearest, suggestion
from agentmesh_dagster.validation.output_schemas import output_schema_of
from agentmesh_dagster.validation.scope import OPAQUE, Scope, Seen, WorkflowScope
from agentmesh_dagster.validation.view import NodeView

BODY_NAMES: Final = {"item": "foreach", "index": "foreach", "iteration": "loop"}
"""Names of bodies, and the type of the nodes in whose bodies they are there."""
STEP_FIELDS: Final = ("output", "error", "status")


def use_problem(reference: tuple[str, ...], path: str, scope: Scope) -> Problem | None:
    """What is wrong with a dotted name in the expression at a path."""
    root = reference[0]
    if root not in scope.names:
        return _unknown_name(root, path, scope)
    if len(reference) < 2:
        return None
    if root == "steps" and scope.workflow is not None and scope.seen is not None:
        return _step_problem(reference, path, scope, scope.workflow)
    if root == "context" and scope.workflow is not None and scope.seen is not None:
        return _context_problem(reference[1], path, scope, scope.workflow)
    if root == "input":
        return _input_problem(reference[1], path, scope)
    if root == "run" and reference[1] not in scope.run_fields:
        there = ", ".join(f"run.{name}" for name in scope.run_fields)
        verb = "is" if len(scope.run_fields) == 1 else "are"
        return Problem.of(
            "name-unknown", path, f"There is no run.{reference[1][:80]}", f"There {verb} {there}"
        )
    return None


def _unknown_name(root: str, path: str, scope: Scope) -> Problem:
    if root in BODY_NAMES:
        return Problem.of(
            "name-outside-body",
            path,
            f"{root!r} exists only inside the body of a {BODY_NAMES[root]} node",
            "Use input, steps or context",
        )
    there = ", ".join(sorted(scope.names)) or "secret('NAME') alone"
    near = nearest(root, scope.names)
    if near:
        mend = f"Did you mean {near!r}"
    elif any(root in seen.level.by_name for seen in scope.all_seen()):
        mend = f"Write steps.{root}.output"
    else:
        mend = "Text in expressions stands in quotes"
    return Problem.of("name-unknown", path, f"There is no name {root[:80]!r} here; there is {there}", mend)


def _step_problem(
    reference: tuple[str, ...], path: str, scope: Scope, whole: WorkflowScope
) -> Problem | None:
    name = reference[1]
    seen = next((seen for seen in scope.all_seen() if name in seen.level.by_name), None)
    if seen is None:
        return _unknown_step(name, path, scope, whole)
    wanted = seen.level.by_name[name]
    if not seen.has_step(wanted.id):
        return Problem.of(
            "step-not-upstream",
            path,
            _not_upstream(name, wanted, seen, scope),
            "Name a node that runs before, or add an edge",
        )
    if len(reference) > 2 and reference[2] not in STEP_FIELDS:
        return Problem.of(
            "step-field-unknown",
            path,
            f"There is no steps.{name}.{reference[2][:80]}; there are {', '.join(STEP_FIELDS)}",
            f"Write steps.{name}.output.{reference[2][:80]}",
        )
    if len(reference) > 3 and reference[2] == "output" and not wanted.is_start:
        return _output_problem(wanted, reference, path, seen, whole)
    return None


def _unknown_step(name: str, path: str, scope: Scope, whole: WorkflowScope) -> Problem:
    message = f"steps.{name[:80]} names no node"
    owner: NodeView | None = None
    for seen in scope.all_seen():
        container = seen.level.inside.get(name)
        if container is not None and container is owner:
            return Problem.of(
                "step-unknown",
                path,
                f"steps.{name[:80]} is no step here: it stands in another body of {container.id!r}",
                f"Name a node of this body, or one that runs before {container.id!r}",
            )
        if container is not None:
            return Problem.of(
                "step-unknown",
                path,
                f"steps.{name[:80]} is no step here: it stands in a body of {container.id!r}",
                f"Read steps.{container.name}.output",
            )
        owner = seen.level.owner
    # The suggestion is spelled as expressions spell it: node-1 is steps.node_1.
    spelled = identifier(name)
    there = [seen.level.by_name for seen in scope.all_seen()]
    if any(spelled in names for names in there):
        return Problem.of("step-unknown", path, message, f"Did you mean {spelled!r}")
    return Problem.of("step-unknown", path, message, whole.near_steps.mend(name, there))


def _not_upstream(name: str, wanted: NodeView, seen: Seen, scope: Scope) -> str:
    place = seen.node
    if place is None or wanted.id != place.id:
        before = f"{place.id!r}" if place is not None else "this place"
        return f"steps.{name} does not run before {before}: no way leads from it to there"
    if seen is scope.seen and scope.node is place:
        return f"{name!r} has not run yet: it is this node itself"
    return f"{name!r} has not run yet: it is the node that runs this body"


def _output_problem(
    wanted: NodeView, reference: tuple[str, ...], path: str, seen: Seen, whole: WorkflowScope
) -> Problem | None:
    """A field that a node's output can never have; an expression may ask for it and have a default."""
    schema = output_schema_of(wanted, seen.level.view, whole.view.input_schema)
    for depth, key in enumerate(reference[3:], 3):
        if schema is None or any(word in schema for word in OPAQUE):
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


def _context_problem(key: str, path: str, scope: Scope, whole: WorkflowScope) -> Problem | None:
    if key == "last_output" or key in whole.state_keys or whole.state_is_open:
        return None
    for number, seen in enumerate(scope.all_seen()):
        is_own_set = number == 0 and seen.node is not None and path.startswith(f"{seen.node.path}.set")
        if seen.has_key(key, is_own_set=is_own_set):
            return None
    writers = whole.writers.get(key, ())
    if writers:
        names = ", ".join(repr(name) for name in list(writers)[:5])
        return Problem.of(
            "context-unknown",
            path,
            f"context.{key[:80]} is set by {names}, and not before this place",
            "Set it in a node that runs before, or give it a default in state_schema",
        )
    return Problem.of("context-unknown", path, f"No node sets context.{key[:80]}", whole.near_keys.mend(key))


def _input_problem(key: str, path: str, scope: Scope) -> Problem | None:
    schema = scope.input_schema
    if schema is None or any(word in schema for word in OPAQUE):
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
