"""Whether what a node maps into a tool or workflow can fit its input schema, where both are known before a run."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import expressions
from agentmesh_dagster.specs.documents import ToolSpec, WorkflowSpec
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object
from agentmesh_dagster.specs.nodes import CodeConfig
from agentmesh_dagster.specs.problems import Problem, child_path, suggestion
from agentmesh_dagster.specs.resolve import Library
from agentmesh_dagster.specs.schema import check_schema, fill_and_coerce, is_static_subset, validate_value
from agentmesh_dagster.specs.slugs import parse_reference
from agentmesh_dagster.validation.document_rules import joined_path
from agentmesh_dagster.validation.function_rules import LookUp
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.output_schemas import output_schema_of
from agentmesh_dagster.validation.referred import referred
from agentmesh_dagster.validation.view import BodyView, NodeView, WorkflowView

_OPAQUE: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if")


@dataclass(frozen=True)
class _Sources:
    """The schemas of what expressions name."""

    input_schema: JsonObject | None
    outputs: ChainMap[str, JsonObject]
    """By the names of the nodes, the nearest level first."""


def mapping_problems(
    view: WorkflowView, levels: Sequence[Level], library: Library, look_up: LookUp | None
) -> Iterator[Problem]:
    """Sure misfits of the mapped inputs of a workflow's nodes and bodies.

    Args:
        view: The workflow.
        levels: Its levels.
        library: Where the tools and workflows are found.
        look_up: Looks up functions, whose signatures are their schemas.
    """
    found: dict[str, _Sources] = {}
    for level in levels:
        targets = {node.id: _target(node, library) for node in level.view.nodes.values()}
        own = dict(_outputs(level, targets, view.input_schema))
        if level.parent is None:
            sources = _Sources(_usable(view.input_schema), ChainMap(own))
        else:
            outer = found[level.parent.view.path]
            sources = _Sources(outer.input_schema, outer.outputs.new_child(own))
        found[level.view.path] = sources
        if level.body is not None:
            yield from _body_misfits(level.body, library, sources, look_up)
        for node in level.view.nodes.values():
            target = targets[node.id]
            path = f"{node.path}.config.input"
            mapped: Json = getattr(node.config, "input", None)
            if isinstance(node.config, CodeConfig):
                yield from _called(
                    mapped, node.config.function, f"function {node.config.function!r}", path, sources, look_up
                )
            elif target is not None:
                yield from _mapped(mapped, target, path, sources, look_up)


def _body_misfits(
    body: BodyView, library: Library, sources: _Sources, look_up: LookUp | None
) -> Iterator[Problem]:
    text: Json = body.raw.get("workflow")
    reference = parse_reference(text, "workflow") if isinstance(text, str) else None
    found = library.get("workflow", reference.slug, reference.version) if reference else None
    if found is not None and isinstance(found.document, WorkflowSpec):
        yield from _mapped(body.raw.get("input"), found.document, f"{body.path}.input", sources, look_up)


def _called(
    mapped: Json, function: Json, target: str, path: str, sources: _Sources, look_up: LookUp | None
) -> Iterator[Problem]:
    """Misfits of what a function gets: its signature is its schema."""
    if look_up is not None and isinstance(function, str) and mapped is not None:
        schema = look_up(function).input_schema
        if schema is not None:
            yield from _misfits(mapped, schema, path, target, sources)


def _mapped(
    mapped: Json, target: ToolSpec | WorkflowSpec, path: str, sources: _Sources, look_up: LookUp | None
) -> Iterator[Problem]:
    if isinstance(target, ToolSpec) and target.input_schema is None and target.type == "function":
        yield from _called(
            mapped, target.config.get("function"), f"tool {target.slug!r}", path, sources, look_up
        )
        return
    schema = _usable(target.input_schema)
    if schema is not None and mapped is not None:
        yield from _misfits(mapped, schema, path, f"{target.kind} {target.slug!r}", sources)


def _target(node: NodeView, library: Library) -> ToolSpec | WorkflowSpec | None:
    """The tool or workflow that a node's config names, where it names one."""
    if node.config is None:
        return None
    named = [d for d in referred(node.config, library) if isinstance(d, ToolSpec | WorkflowSpec)]
    return named[0] if len(named) == 1 else None


def _outputs(
    level: Level, targets: Mapping[str, ToolSpec | WorkflowSpec | None], input_schema: JsonObject | None
) -> Iterator[tuple[str, JsonObject]]:
    for node in level.view.nodes.values():
        target = targets[node.id]
        # A workflow that nobody waits for gives the id of its run.
        is_known = target is not None and not getattr(node.config, "async_", False)
        schema = target.output_schema if target is not None and is_known else None
        usable = _usable(schema if is_known else output_schema_of(node, level.view, input_schema))
        # With on_error: continue the output may be null.
        if usable is not None and node.spec is not None and node.spec.on_error == "fail":
            yield node.name, usable


def _usable(schema: Json) -> JsonObject | None:
    found = as_object(schema)
    return found if found is not None and not check_schema(found) else None


def _misfits(value: Json, schema: Json, path: str, target: str, sources: _Sources) -> Iterator[Problem]:
    node = as_object(schema)
    if node is None:
        return
    if isinstance(value, str) and expressions.is_template(value):
        given = _schema_of(value, sources)
        for sentence in is_static_subset(given, node) if given is not None else ():
            yield _mismatch(
                path, f"{value.strip()[:80]} cannot fit the input of {target}: {_plain(sentence)}"
            )
        return
    mapped = as_object(value)
    properties = as_object(node.get("properties")) or {}
    if (
        mapped is not None
        and not any(word in node for word in _OPAQUE)
        and node.get("type") in (None, "object")
    ):
        yield from _object_misfits(mapped, node, properties, path, target, sources)
        return
    items = as_list(value)
    if items is not None and any(_has_template(item) for item in items):
        inner = node.get("items")
        if "prefixItems" not in node and not any(word in node for word in _OPAQUE):
            for index, item in enumerate(items):
                yield from _misfits(item, inner, child_path(path, index), target, sources)
        return
    if not _has_template(value):
        for issue in validate_value(node, fill_and_coerce(node, value)):
            yield _mismatch(
                joined_path(path, issue.path),
                f"The value does not fit the input of {target}: {issue.message.rstrip('.')}",
            )


def _object_misfits(
    mapped: JsonObject, node: JsonObject, properties: JsonObject, path: str, target: str, sources: _Sources
) -> Iterator[Problem]:
    for name in as_list(node.get("required")) or []:
        default = as_object(properties.get(name)) or {}
        if (
            isinstance(name, str)
            and name not in mapped
            and "default" not in default
            and "$ref" not in default
        ):
            yield Problem.of(
                "mapping-missing",
                path,
                f"{target} requires {name!r}, and the input does not give it",
                f"Add {name!r}",
            )
    for key, value in mapped.items():
        below = child_path(path, key)
        if key in properties:
            # A sub-schema may refer to definitions of the whole one.
            yield from _misfits(value, _with_definitions(properties[key], node), below, target, sources)
        elif node.get("additionalProperties") is False and "patternProperties" not in node:
            yield Problem.of(
                "mapping-unknown", below, f"{target} takes no {key[:80]!r}", suggestion(key, properties)
            )


def _with_definitions(schema: Json, root: JsonObject) -> Json:
    found = as_object(schema)
    if found is None:
        return schema
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **found}


def _mismatch(path: str, message: str) -> Problem:
    return Problem.of("mapping-mismatch", path, message, "Map a value of the right type")


def _plain(sentence: str) -> str:
    return sentence.removeprefix("$: ").rstrip(".")


def _has_template(value: Json) -> bool:
    return any(expressions.is_template(text) for text in expressions.strings_of(value))


def _schema_of(text: str, sources: _Sources) -> JsonObject | None:
    """The schema of what a template gives: of one name alone what is known of it, of text around it a string."""
    stripped = text.strip()
    if stripped.startswith("{%") or "{%" in stripped:
        return None
    inner = stripped[2:-2].strip() if stripped.startswith("{{") and stripped.endswith("}}") else ""
    if not inner or "{{" in inner:
        return {"type": "string"}
    if text != stripped:
        return None
    keys = inner.split(".")
    try:
        if expressions.references(text, bare=False) != frozenset([tuple(keys)]):
            return None
    except ExpressionError:
        return None
    if keys[0] == "input":
        return _below(sources.input_schema, keys[1:])
    if keys[0] == "steps" and len(keys) > 2 and keys[2] == "output":
        return _below(sources.outputs.get(keys[1]), keys[3:])
    return None


def _below(schema: JsonObject | None, keys: list[str]) -> JsonObject | None:
    root = schema
    for key in keys:
        if schema is None or any(word in schema for word in _OPAQUE):
            return None
        schema = as_object((as_object(schema.get("properties")) or {}).get(key))
    if schema is None or root is None:
        return None
    return cast("dict[str, Any]", _with_definitions(schema, root))
