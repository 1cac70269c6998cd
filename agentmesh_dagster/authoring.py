"""From files to published versions: reading, checking, storing, publishing, exporting. Nothing here runs a workflow."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentmesh_dagster.constants import GROUP_DEFINITIONS
from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.errors import DefinitionError, DocumentInvalid, NotFound
from agentmesh_dagster.records import Json, Publication, Version
from agentmesh_dagster.runtime.functions import FunctionRegistry
from agentmesh_dagster.runtime.notify.registry import notifier_configs
from agentmesh_dagster.runtime.registry import node_configs
from agentmesh_dagster.runtime.secrets import load_provider
from agentmesh_dagster.runtime.tools.errors import ToolRefused
from agentmesh_dagster.specs.canonical import canonical, dump_json, dump_yaml
from agentmesh_dagster.specs.closure import Closure
from agentmesh_dagster.specs.documents import Document, document_model
from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.loading import LoadedDocument, document_files, load_documents, load_path
from agentmesh_dagster.specs.problems import OF_OTHERS, OF_REFERENCES, Problem
from agentmesh_dagster.specs.resolve import PinnedDocument, references_of, resolve_closure
from agentmesh_dagster.validation import (
    TARGET_CODES,
    Checked,
    CheckedSource,
    Target,
    validate_document,
    validate_raw,
)
from agentmesh_dagster.validation.function_rules import LookedUp, LookUp

if TYPE_CHECKING:
    from agentmesh_dagster.store import Store

# What is published first: a workflow's closure takes the versions that its agents and tools have then.
_PLACES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class CheckedDocument:
    """A document of a file, with what is wrong with it."""

    source: str
    kind: str | None
    slug: str | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the check of some files came to."""

    documents: tuple[CheckedDocument, ...]

    @property
    def errors(self) -> list[tuple[str, Problem]]:
        """Source and problem, of each error."""
        return [(d.source, p) for d in self.documents for p in d.problems if p.severity == "error"]

    @property
    def warnings(self) -> list[tuple[str, Problem]]:
        """Source and problem, of each warning."""
        return [(d.source, p) for d in self.documents for p in d.problems if p.severity == "warning"]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A document that was stored."""

    kind: str
    slug: str
    version: int
    is_new: bool
    """Whether this import made the version; an unchanged document keeps its newest."""
    publication: Publication | None
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version that is live."""

    publication: Publication
    is_new: bool
    """Whether this call made it; what is live already in the same form stays."""
    warnings: tuple[Problem, ...]


class StoreLibrary:
    """The documents of a project: the published version of each, else its newest; of workflows the published alone."""

    def __init__(self, store: Store, project: str) -> None:
        self._store = store
        self._project = project

    def get(self, kind: str, slug: str, version: int | None) -> PinnedDocument | None:
        """The document at that version, or at the one that is in use."""
        try:
            found = self._store.catalog.get(self._project, kind, slug)
        except NotFound:
            return None
        if found.archived_at is not None:
            return None
        in_use = (
            found.published_version if kind == "workflow" else found.published_version or found.latest_version
        )
        number = version or in_use
        if number is None or number > found.latest_version:
            return None
        stored = self._store.catalog.get_version(self._project, kind, slug, number)
        return PinnedDocument(version=number, document=parse_stored(stored), is_active=found.is_active)

    def names(self, kind: str) -> Sequence[str]:
        """The slugs of a kind."""
        return [definition.slug for definition in self._store.catalog.list(self._project, kind)]


class Authoring:
    """The documents of one project.

    Args:
        store: The database.
        project: The project's slug.
        actor: Who does it, for the audit.
        deployment: What documents may use where they run; without one, that is not checked before they run.
        function_modules: Modules whose functions documents may call, besides `AGENTMESH_FUNCTION_MODULES`.
    """

    def __init__(
        self,
        store: Store,
        project: str,
        *,
        actor: str,
        deployment: Deployment | None = None,
        function_modules: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._function_modules = function_modules
        self._target = Target(deployment=deployment, project=project, has_secret=_secret_is_known)
        self._project = project
        self._actor = actor

    def check(self, paths: Sequence[Path]) -> Report:
        """All problems of the documents in files and folders, at once; nothing is written.

        They are those that `publish` would find, but for references to documents that are neither in the files nor
        stored: these are warnings.

        Raises:
            DefinitionError: A file cannot be read, or holds no document.
        """
        return self._report(*_read(paths))

    def check_stored(self, kind: str, slug: str, *, version: int | None = None) -> Report:
        """All problems of a stored version, as `publish` would tell them.

        Raises:
            NotFound: There is no such definition or version.
        """
        stored = self._store.catalog.get_version(self._project, kind, slug, version)
        problems = self._checked(stored).problems
        source = f"{kind} {slug}, version {stored.number}"
        return Report(documents=(CheckedDocument(source=source, kind=kind, slug=slug, problems=problems),))

    def check_documents(self, documents: Sequence[Json], *, source: str = "documents") -> Report:
        """As `check`, of documents that are no files.

        Args:
            documents: The documents, as files would give them.
            source: What problems name as their place: its first document is `documents#1`.

        Raises:
            DefinitionError: One is not a JSON object.
        """
        return self._report(_plain(documents, source), [])

    def _report(self, loaded: Sequence[LoadedDocument], unread: Sequence[CheckedDocument]) -> Report:
        checked = self._check(loaded, warned=OF_REFERENCES)
        return Report(
            documents=(
                *unread,
                *(
                    CheckedDocument(
                        source=source,
                        kind=_word(found, "kind"),
                        slug=_word(found, "slug"),
                        problems=found.checked.problems,
                    )
                    for source, found in checked
                ),
            )
        )

    def import_paths(
        self, paths: Sequence[Path], *, publish: bool = False, message: str = ""
    ) -> tuple[Imported, ...]:
        """Stores the documents in files and folders: all of them, or none.

        Args:
            paths: Files and folders; documents may refer to each other in any order.
            publish: Whether their newest versions become live too.
            message: For the versions and the publications.

        Raises:
            DefinitionError: A file cannot be read, or holds no document.
            DocumentInvalid: Some document has errors; all errors of all documents are in it.
            StoreError: The store refused; nothing was stored.
        """
        return self._import(*_read(paths), publish=publish, message=message)

    def import_documents(
        self,
        documents: Sequence[Json],
        *,
        source: str = "documents",
        publish: bool = False,
        message: str = "",
    ) -> tuple[Imported, ...]:
        """As `import_paths`, of documents that are no files.

        Args:
            documents: The documents, as files would give them.
            source: What problems name as their place.
            publish: See `import_paths`.
            message: See `import_paths`.

        Raises:
            DefinitionError: One is not a JSON object.
            DocumentInvalid: See `import_paths`.
            StoreError: See `import_paths`.
        """
        return self._import(_plain(documents, source), [], publish=publish, message=message)

    def _import(
        self,
        loaded: Sequence[LoadedDocument],
        unread: Sequence[CheckedDocument],
        *,
        publish: bool,
        message: str,
    ) -> tuple[Imported, ...]:
        # What concerns other documents too blocks nothing but their publication.
        checked = self._check(loaded, warned=frozenset() if publish else OF_OTHERS)
        errors = [{**p.to_json(), "source": d.source} for d in unread for p in d.problems]
        errors += [{**p.to_json(), "source": s} for s, found in checked for p in found.checked.errors]
        if errors:
            places = ", ".join(dict.fromkeys(str(error["source"]) for error in errors[:_PLACES_SHOWN]))
            raise DocumentInvalid(f"{_count(len(errors), 'problem')} in {places}; nothing was stored", errors)
        documents = [found.checked.document for _, found in checked if found.checked.document is not None]
        before = {(d.kind, d.slug): d.latest_version for d in self._store.catalog.list(self._project)}
        versions = self._store.catalog.save_many(
            self._project,
            [canonical(document, node_configs=node_configs()) for document in documents],
            by=self._actor,
            message=message,
        )
        live = self._publish_all(versions, message) if publish else {}
        return tuple(
            Imported(
                kind=version.kind,
                slug=version.slug,
                version=version.number,
                is_new=before.get((version.kind, version.slug), 0) < version.number,
                publication=live.get((version.kind, version.slug)),
                warnings=found.checked.warnings,
            )
            for version, (_, found) in zip(versions, checked, strict=True)
        )

    def publish(self, kind: str, slug: str, *, version: int | None = None, message: str = "") -> Published:
        """Makes a version live, with the versions of all that it reaches.

        Args:
            kind: Of the definition.
            slug: Of the definition.
            version: Default: the newest.
            message: For the log.

        Raises:
            NotFound: There is no such definition or version.
            DocumentInvalid: What it refers to is missing, inactive, or contains it.
        """
        stored = self._store.catalog.get_version(self._project, kind, slug, version)
        document = parse_stored(stored)
        library = StoreLibrary(self._store, self._project)
        checked = self._checked(stored)
        if checked.errors:
            problems = [problem.to_json() for problem in checked.errors]
            raise DocumentInvalid(f"{kind} {slug!r} cannot be published; nothing was changed", problems)
        live = self._store.publications.live_one(self._project, kind, slug)
        publication = self._publish_checked(stored, document, library, message)
        is_new = live is None or live.id != publication.id
        return Published(publication=publication, is_new=is_new, warnings=checked.warnings)

    def unpublish(self, kind: str, slug: str, *, message: str = "") -> Publication:
        """Ends what is live under a slug; runs that have started go on.

        Raises:
            NotFound: There is no such definition.
            StoreError: It is not published (code `not-published`).
        """
        return self._store.publications.unpublish(self._project, kind, slug, by=self._actor, message=message)

    def export(
        self, kind: str, slug: str, *, version: int | None = None, format: Literal["yaml", "json"] = "yaml"
    ) -> str:
        """A version in its canonical form: the same bytes from every database, and again after an import.

        Raises:
            NotFound: There is no such definition or version.
        """
        stored = self._store.catalog.get_version(self._project, kind, slug, version)
        document = canonical(parse_stored(stored), node_configs=node_configs())
        return dump_json(document) if format == "json" else dump_yaml(document)

    def diff(self, kind: str, slug: str, first: int, second: int) -> str:
        """A unified diff of two versions in canonical YAML; empty where they are equal.

        Raises:
            NotFound: There is no such definition or version.
        """
        before = self.export(kind, slug, version=first).splitlines(keepends=True)
        after = self.export(kind, slug, version=second).splitlines(keepends=True)
        name = f"{kind}/{slug} version"
        return "".join(difflib.unified_diff(before, after, f"{name} {first}", f"{name} {second}"))

    def sync_system(self) -> tuple[Imported, ...]:
        """Stores and publishes the documents that installed packages supply, as `type: system`.

        A package offers them under the entry-point group `agentmesh_dagster.definitions`: an entry point that is a
        folder or file (`pathlib.Path`), or a function that gives one, or that gives a list of documents.

        Raises:
            DefinitionError: A package's documents cannot be loaded (code `bad-plugin`).
            DocumentInvalid: They have errors.
        """
        points = tuple(entry_points(group=GROUP_DEFINITIONS))
        raws = [raw for point in points for raw in _supplied(point)]
        if not raws:
            return ()
        library = StoreLibrary(self._store, self._project)
        found = validate_raw(
            raws,
            node_configs=node_configs(),
            notify_configs=notifier_configs(),
            library=library,
            target=self._target,
        )
        errors = [problem.to_json() for source in found for problem in source.checked.errors]
        if errors:
            names = ", ".join(repr(point.name) for point in points)
            raise DocumentInvalid(f"documents supplied by the packages behind {names} have errors", errors)
        before = {(d.kind, d.slug): d.latest_version for d in self._store.catalog.list(self._project)}
        versions = self._store.catalog.save_many(
            self._project,
            [canonical(s.checked.document, node_configs=node_configs()) for s in found if s.checked.document],
            by=self._actor,
            type="system",
        )
        live = self._publish_all(versions, "")
        return tuple(
            Imported(
                kind=version.kind,
                slug=version.slug,
                version=version.number,
                is_new=before.get((version.kind, version.slug), 0) < version.number,
                publication=live.get((version.kind, version.slug)),
                warnings=(),
            )
            for version in versions
        )

    @property
    def _publishing(self) -> Target:
        return replace(self._target, is_publishing=True)

    def _publish_checked(
        self, stored: Version, document: Document, library: StoreLibrary, message: str
    ) -> Publication:
        closure = resolve_closure(document, stored.number, library, node_configs=node_configs())
        problems = self._refused(closure)
        if problems:
            raise DocumentInvalid(
                f"{stored.kind} {stored.slug!r} cannot be published: what it refers to uses what the deployment does "
                "not allow",
                problems,
            )
        return self._store.publications.publish(
            self._project, stored.kind, stored.slug, stored.number, closure, by=self._actor, message=message
        )

    def _refused(self, closure: Closure) -> list[dict[str, Any]]:
        """What the deployment does not allow to the documents that a closure's root refers to."""
        if self._target.deployment is None:
            return []
        found: list[dict[str, Any]] = []
        for pinned in (*closure.agents.values(), *closure.tools.values(), *closure.workflows.values()):
            document = pinned.document
            if (document.kind, document.slug) == (closure.kind, closure.slug):
                continue
            checked = validate_document(
                canonical(document, node_configs=node_configs()),
                node_configs=node_configs(),
                notify_configs=notifier_configs(),
                target=self._publishing,
            )
            found += [
                {**problem.to_json(), "source": f"{document.kind} {document.slug!r}"}
                for problem in checked.errors
                if problem.code in TARGET_CODES
            ]
        return found

    def _publish_all(self, versions: Sequence[Version], message: str) -> dict[tuple[str, str], Publication]:
        """Publishes what was checked just now, together with all that it refers to."""
        library = StoreLibrary(self._store, self._project)
        documents = {(version.kind, version.slug): (version, parse_stored(version)) for version in versions}
        referred = {
            key: [
                (found.kind, found.slug)
                for found in references_of(document, node_configs=node_configs())
                if (found.kind, found.slug) in documents
            ]
            for key, (_, document) in documents.items()
        }
        return {
            key: self._publish_checked(*documents[key], library, message) for key in _callees_first(referred)
        }

    def _checked(self, stored: Version) -> Checked:
        """A stored version with what is wrong with it."""
        return validate_document(
            stored.document,
            node_configs=node_configs(),
            notify_configs=notifier_configs(),
            library=StoreLibrary(self._store, self._project),
            target=self._publishing,
            look_up=_looking_up(self._function_modules),
        )

    def _check(
        self, loaded: Sequence[LoadedDocument], *, warned: frozenset[str]
    ) -> list[tuple[str, CheckedSource]]:
        """The documents with what is wrong with each.

        Args:
            loaded: The documents.
            warned: Codes of problems that are warnings here.
        """
        found = validate_raw(
            [document.data for document in loaded],
            node_configs=node_configs(),
            notify_configs=notifier_configs(),
            library=StoreLibrary(self._store, self._project),
            target=replace(self._target, is_publishing=warned != OF_OTHERS),
            look_up=_looking_up(self._function_modules),
        )
        return [(loaded[source.source].source, _with_warnings(source, warned)) for source in found]


def _with_warnings(source: CheckedSource, codes: frozenset[str]) -> CheckedSource:
    problems = [
        replace(problem, severity="warning") if problem.code in codes else problem
        for problem in source.checked.problems
    ]
    in_order = tuple(sorted(problems, key=lambda problem: problem.severity != "error"))
    return replace(source, checked=replace(source.checked, problems=in_order))


def _read(paths: Sequence[Path]) -> tuple[list[LoadedDocument], list[CheckedDocument]]:
    """The documents of files and folders; and the files that hold none that can be read."""
    loaded: list[LoadedDocument] = []
    unread: list[CheckedDocument] = []
    for file in [file for path in paths for file in document_files(path)]:
        try:
            loaded += load_path(file)
        except DefinitionError as error:
            if not file.exists():
                # A mistake on the command line, and not in a file.
                raise
            problem = Problem(error.code, "", error.message, "Correct the file")
            unread.append(CheckedDocument(source=str(file), kind=None, slug=None, problems=(problem,)))
    return loaded, unread


def _plain(documents: Sequence[Json], source: str) -> list[LoadedDocument]:
    """Documents from Python, held to what a JSON file may contain.

    Raises:
        DefinitionError: One is not a JSON object (codes as of `load_documents`, and `document-not-json`).
    """
    loaded: list[LoadedDocument] = []
    for number, document in enumerate(documents, 1):
        place = f"{source}#{number}"
        try:
            text = json.dumps(document, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise DefinitionError(
                f"{place} is not JSON: {error}; documents consist of dicts with string keys, lists, strings, numbers, "
                "booleans and None",
                code="document-not-json",
            ) from None
        loaded += [LoadedDocument(place, data) for data in load_documents(text, source=f"{place}.json")]
    return loaded


def parse_stored(version: Version) -> Document:
    """The model of a stored version.

    Raises:
        DefinitionError: A later or earlier release wrote it in a form that this one cannot read.
    """
    content: dict[str, Any] = dict(version.document)
    try:
        return document_model(version.kind).model_validate(content)
    except ValueError as error:
        raise DefinitionError(
            f"version {version.number} of {version.kind} {version.slug!r} cannot be read by this release: {error}",
            code="stored-document",
        ) from error


def _secret_is_known(name: str) -> bool:
    return bool(load_provider().get(name))


def _looking_up(modules: Sequence[str]) -> LookUp:
    """Looks up functions as runs do, in the modules that are allowed here."""
    registry = FunctionRegistry.from_environment(modules)

    @cache
    def look_up(reference: str) -> LookedUp:
        try:
            found = registry.resolve(reference)
        except ToolRefused as refused:
            if refused.code == "function-not-allowed" and not registry.modules:
                # Nothing is allowed here: this is no place where runs execute, and tells nothing.
                return LookedUp()
            is_sure = refused.code != "function-not-allowed" and refused.__cause__ is None
            return LookedUp(problem=refused.message, is_sure=is_sure)
        return LookedUp(input_schema=found.input_schema, output_schema=found.output_schema)

    return look_up


def _supplied(point: EntryPoint) -> list[Json]:
    try:
        value: Any = point.load()
        value = value() if callable(value) else value
    except Exception as error:
        raise DefinitionError(
            f"the documents of entry point {point.name!r} ({GROUP_DEFINITIONS}) cannot be loaded: "
            f"{type(error).__name__}: {error}; mend or uninstall the package",
            code="bad-plugin",
        ) from error
    if isinstance(value, Path):
        return [document.data for document in load_path(value)]
    return list(value)


def _word(source: CheckedSource, key: str) -> str | None:
    value = (as_object(source.raw) or {}).get(key)
    return value if isinstance(value, str) else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_Key = tuple[str, str]


def _callees_first(referred: Mapping[_Key, Sequence[_Key]]) -> list[_Key]:
    """The documents in an order in which each comes after those that it names, but for agents that name each other."""
    order: dict[_Key, None] = {}
    begun: set[_Key] = set()
    for root in referred:
        open_keys = [root]
        while open_keys:
            key = open_keys[-1]
            below = [other for other in referred[key] if other not in begun]
            if key in begun or not below:
                order.setdefault(open_keys.pop())
                begun.add(key)
                continue
            begun.add(key)
            open_keys += below
    return list(order)
