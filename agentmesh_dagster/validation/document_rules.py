"""Rules of one document as a whole: its slug, its schemas, and how its references are spelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import MarkedField, Reference, SchemaField
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object
from agentmesh_dagster.specs.names import RESERVED_IN_DAGSTER, identifier, job_name
from agentmesh_dagster.specs.problems import Problem, child_path, suggestion
from agentmesh_dagster.specs.resolve import Library, missing
from agentmesh_dagster.specs.schema import check_schema
from agentmesh_dagster.specs.slugs import is_slug, parse_reference


def slug_problems(kind: str, slug: Json) -> Iterator[Problem]:
    """The slug's form, and names that Dagster keeps for itself."""
    if not isinstance(slug, str):
        return
    if not is_slug(slug, kind):
        yield Problem.of(
            "slug-invalid",
            "slug",
            f"The slug {slug[:120]!r} is not well-formed",
            "Begin with an ASCII letter, then up to 99 ASCII letters, digits, '-' or '_', no two '-', '_' side by side",
        )
    elif kind == "workflow" and job_name(kind, slug) in RESERVED_IN_DAGSTER:
        yield Problem.of(
            "slug-reserved",
            "slug",
            f"Dagster keeps the name {identifier(slug)!r} for itself",
            "Choose another slug",
        )


def schema_problems(marks: Mapping[str, MarkedField]) -> Iterator[Problem]:
    """Schemas that are no JSON Schemas."""
    for marked in marks.values():
        if not isinstance(marked.mark, SchemaField) or as_object(marked.value) is None:
            continue
        for issue in check_schema(cast("dict[str, Any]", marked.value)):
            is_pattern = issue.code == "pattern-refused"
            yield Problem.of(
                issue.code,
                joined_path(marked.path, issue.path),
                f"The JSON Schema {'cannot be used' if is_pattern else 'is not valid'}: {issue.message.rstrip('.')}",
                "Write the regular expression in the syntax of RE2"
                if is_pattern
                else "Correct the schema (JSON Schema, draft 2020-12)",
            )


def joined_path(base: str, inner: str) -> str:
    """A path below another; `$` at its beginning is the value itself."""
    inner = inner.removeprefix("$").removeprefix(".")
    if not inner:
        return base
    return f"{base}{inner}" if inner.startswith("[") or not base else f"{base}.{inner}"


def input_schema_problems(raw: JsonObject) -> Iterator[Problem]:
    """The input of workflows and tools is an object."""
    schema = raw.get("input_schema")
    if isinstance(schema, dict) and cast("JsonObject", schema).get("type") != "object":
        given = cast("JsonObject", schema).get("type")
        yield Problem.of(
            "input-schema-not-object",
            "input_schema.type",
            "The input schema has no type" if given is None else f"The input schema is of type {given!r}",
            "Write type: object, and put the value into a property",
        )


def reference_problems(marks: Mapping[str, MarkedField]) -> Iterator[Problem]:
    """References that can name nothing."""
    for path, text, kind in _references(marks):
        if parse_reference(text, kind) is None:
            yield Problem.of(
                "reference-invalid",
                path,
                f"{text[:120]!r} is no slug of a stored {kind}",
                "Write its slug, such as 'triage', or 'triage@3' for its version 3",
            )


def missing_references(marks: Mapping[str, MarkedField], library: Library, own: str) -> Iterator[Problem]:
    """What a document with other errors names, and the library does not have; nothing beyond it is followed.

    Args:
        marks: The document's marked fields.
        library: Where the others are found.
        own: The document itself, as `<kind>/<slug>`: it need not be stored yet.
    """
    for path, text, kind in _references(marks):
        found = parse_reference(text, kind)
        if found is None or f"{kind}/{found.slug}" == own:
            continue
        if library.get(kind, found.slug, found.version) is None:
            yield missing(path, kind, found.slug, found.version, library)


def _references(marks: Mapping[str, MarkedField]) -> Iterator[tuple[str, str, str]]:
    """Path, text and kind of all references."""
    for marked in marks.values():
        if not isinstance(marked.mark, Reference):
            continue
        items = as_list(marked.value)
        places = (
            [(marked.path, marked.value)]
            if items is None
            else [(child_path(marked.path, n), item) for n, item in enumerate(items)]
        )
        for path, text in places:
            if isinstance(text, str):
                yield path, text, marked.mark.kind


def known_type(
    code: str, path: str, word: str, given: str, known: Mapping[str, type[BaseModel]]
) -> Iterator[Problem]:
    """A type that nothing registered."""
    if given not in known:
        yield Problem.of(
            code,
            path,
            f"Unknown {word} type {given[:80]!r}",
            suggestion(given, sorted(known)).replace("Known are", "Known types are"),
        )
