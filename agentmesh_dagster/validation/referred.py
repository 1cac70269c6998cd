"""The documents that a node's config names, as far as a library has them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from agentmesh_dagster.specs.base import Reference, marked_fields
from agentmesh_dagster.specs.documents import AgentSpec, Document, ToolSpec
from agentmesh_dagster.specs.fields import as_list
from agentmesh_dagster.specs.resolve import Library
from agentmesh_dagster.specs.slugs import parse_reference


def referred(model: BaseModel, library: Library) -> Iterator[Document]:
    """The documents that a model names itself."""
    for marked in marked_fields(model):
        if not isinstance(marked.mark, Reference):
            continue
        for text in as_list(marked.value) or [marked.value]:
            reference = parse_reference(text, marked.mark.kind) if isinstance(text, str) else None
            found = library.get(marked.mark.kind, reference.slug, reference.version) if reference else None
            if found is not None:
                yield found.document


def tools_called(model: BaseModel, library: Library) -> Iterator[ToolSpec]:
    """The tools that a node calls, itself or through its agent and that agent's agents; called workflows left out."""
    open_documents = list(referred(model, library))
    seen: set[tuple[str, str]] = set()
    while open_documents:
        document = open_documents.pop()
        if (document.kind, document.slug) in seen:
            continue
        seen.add((document.kind, document.slug))
        if isinstance(document, ToolSpec):
            yield document
        elif isinstance(document, AgentSpec):
            open_documents += referred(document, library)
