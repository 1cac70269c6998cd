"""What the catalog checks before it stores a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel
from sqlalchemy import Connection, select

from agentmesh_dagster.constants import KINDS
from agentmesh_dagster.errors import DefinitionError, StoreError
from agentmesh_dagster.records import Definition, Json
from agentmesh_dagster.specs.names import job_name
from agentmesh_dagster.specs.slugs import is_slug
from agentmesh_dagster.store.columns import from_text, to_text
from agentmesh_dagster.store.tables import definitions

Document = BaseModel | Mapping[str, Json]
"""A model of `specs.documents`, or its canonical JSON with `kind` and `slug`."""


def canonical(document: Document) -> dict[str, Json]:
    if isinstance(document, BaseModel):
        dumped = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        content: dict[str, Json] = {"kind": getattr(document, "kind", None), **dumped}
    else:
        content = dict(document)
    kind, slug = content.get("kind"), content.get("slug")
    if kind not in KINDS or not isinstance(slug, str):
        raise DefinitionError("a document needs a `kind` and a `slug` to be stored", code="bad-document")
    check_slug(slug, kind)
    content = from_text(to_text(content))  # refuses what is no JSON; a copy that nobody else changes
    if _has_nul(content):
        raise StoreError(
            f"the {kind} {slug!r} has a NUL character (\\0) in a text; remove it", code="nul-character"
        )
    return content


def _has_nul(value: Json) -> bool:
    """Whether a string anywhere in the value, keys included, has a NUL character."""
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(item) for key, item in cast("dict[str, Any]", value).items())
    if isinstance(value, list | tuple):
        return any(_has_nul(item) for item in cast("list[Any]", value))
    return False


def check_slug(slug: str, kind: str = "") -> None:
    """Refuses what is no slug; of a kind that may be written inline in a node, generated ones are slugs."""
    if not is_slug(slug, kind):
        raise DefinitionError(
            f"{slug!r} is no slug: an ASCII letter, then ASCII letters, digits, single '-' or '_', at most 100",
            code="bad-slug",
        )


def check_type(found: Definition | None, kind: str, slug: str, type_: str) -> None:
    if found is None or found.type == type_ or (found.archived_at is not None and found.type != "system"):
        return
    if found.type == "system":
        raise supplied_by_code(kind, slug, "edited")
    raise StoreError(
        f"code supplies a {kind} {slug!r}, and the project has one of its own; delete or copy that first",
        code="slug-taken",
    )


def check_revision(found: Definition | None, kind: str, slug: str, expected: int | None) -> None:
    is_there = found is not None and found.archived_at is None
    revision = found.revision if found is not None and is_there else 0
    if expected is None or expected == revision:
        return
    if found is None or not is_there:
        raise StoreError(
            f"the {kind} {slug!r}, edited at revision {expected}, is not there any more; import it as new",
            code="edit-conflict",
        )
    raise StoreError(
        f"the {kind} {slug!r} was changed by {found.updated_by!r} at {found.updated_at.isoformat(timespec='seconds')}: "
        f"it is at revision {revision}, and the edit began at {expected}. Read it again and repeat the edit",
        code="edit-conflict",
        context={"by": found.updated_by, "at": found.updated_at.isoformat(), "revision": revision},
    )


def check_collision(connection: Connection, project: str, kind: str, slug: str) -> None:
    job = job_name(kind, slug)
    other = connection.execute(
        select(definitions.c.slug).where(
            definitions.c.project == project,
            definitions.c.job_name == job,
            definitions.c.archived_at.is_(None),
            definitions.c.slug != slug,
        )
    ).scalar()
    if other is not None:
        raise StoreError(
            f"the {kind} {slug!r} cannot be stored beside {other!r}: both are named {job!r} in Dagster; rename one",
            code="name-collision",
            context={"other": other, "job": job},
        )


def supplied_by_code(kind: str, slug: str, done: str) -> StoreError:
    return StoreError(
        f"the {kind} {slug!r} is supplied by code, and cannot be {done}; "
        f"`agentmesh copy {kind} {slug} NEW` makes your own",
        code="system-document",
    )
