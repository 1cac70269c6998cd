"""Follows references: from a document to all that it reaches, each at a fixed version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast, runtime_checkable

from pydantic import BaseModel, ValidationError

from agentmesh_dagster.constants import KINDS
from agentmesh_dagster.errors import DocumentInvalid
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import Reference, SpecModel, marked_fields
from agentmesh_dagster.specs.closure import (
    Closure,
    PinnedAgent,
    PinnedNetwork,
    PinnedTool,
    PinnedWorkflow,
    content_hash,
)
from agentmesh_dagster.specs.documents import (
    AgentSpec,
    Document,
    NetworkSpec,
    NodeSpec,
    ToolSpec,
    WorkflowSpec,
)
from agentmesh_dagster.specs.graph import Edge
from agentmesh_dagster.specs.levels import PlacedBody, all_parts, node_parts
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, NodeConfig
from agentmesh_dagster.specs.problems import Problem, child_path, suggestion
from agentmesh_dagster.specs.slugs import parse_reference
from agentmesh_dagster.specs.tools import BUILTIN_TOOL_CONFIGS

__all__ = [
    "DocumentLibrary",
    "FoundReference",
    "Library",
    "NamingLibrary",
    "PinnedDocument",
    "check_references",
    "missing",
    "node_entity",
    "node_hash",
    "references_of",
    "resolve_closure",
]

_MAX_CHAIN: Final = 20
_NOT_HASHED: Final = {"name", "description", "metadata", "position"}


@dataclass(frozen=True, kw_only=True)
class PinnedDocument:
    """A document at a version."""

    version: int
    document: Document
    is_active: bool = True


class Library(Protocol):
    """Where referred documents are found."""

    def get(self, kind: str, slug: str, version: int | None) -> PinnedDocument | None:
        """The document at that version, or at the version that the library chooses; None where there is none."""
        ...


@runtime_checkable
class NamingLibrary(Library, Protocol):
    """A library that can tell what it holds, for suggestions."""

    def names(self, kind: str) -> Sequence[str]:
        """The slugs of a kind."""
        ...


class DocumentLibrary:
    """Documents in memory, all at version 1, before those of another library."""

    def __init__(self, documents: Sequence[Document], beneath: Library | None = None) -> None:
        self._documents = {(d.kind, d.slug): d for d in documents}
        self._beneath = beneath

    def get(self, kind: str, slug: str, version: int | None) -> PinnedDocument | None:
        """The document held here, unless another version is asked for; else what the library beneath has."""
        beneath = None if self._beneath is None else self._beneath.get(kind, slug, version)
        document = self._documents.get((kind, slug))
        if document is None or (version is not None and beneath is not None):
            return beneath
        if version is not None and version != 1:
            return None
        return PinnedDocument(version=1, document=document)

    def names(self, kind: str) -> Sequence[str]:
        """The slugs of a kind, here and beneath."""
        own = [slug for held, slug in self._documents if held == kind]
        more = self._beneath.names(kind) if isinstance(self._beneath, NamingLibrary) else ()
        return list(dict.fromkeys([*own, *more]))


@dataclass(frozen=True)
class FoundReference:
    """One place where a document names another."""

    path: str
    kind: str
    slug: str
    version: int | None


def references_of(
    document: Document,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
) -> Iterator[FoundReference]:
    """All well-formed references of a document, by the marks of its models and of the configs of known types."""
    for model, path in _models_of(document, node_configs, tool_configs):
        for marked in marked_fields(model, path):
            if isinstance(marked.mark, Reference):
                yield from _read(marked.mark.kind, marked.value, marked.path)
    if isinstance(document, NetworkSpec):
        for group, slugs in document.primitives.items():
            kind = group.removesuffix("s")
            if kind in KINDS:
                yield from _read(kind, slugs, child_path("primitives", group))


def node_entity(config: NodeConfig) -> tuple[str, str] | None:
    """Kind and slug of the agent, tool or workflow that a node is about; None of other nodes."""
    for marked in marked_fields(config):
        if isinstance(marked.mark, Reference) and isinstance(marked.value, str):
            return marked.mark.kind, marked.value.partition("@")[0]
    return None


def node_hash(
    node: NodeSpec,
    edges: Sequence[Edge],
    closure: Closure,
    *,
    schema: Json = None,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
) -> str:
    """SHA-256 (hex) of a node with all that it refers to, which an edit elsewhere in the workflow leaves as it is.

    Covers the node without its name, description, metadata and place in an editor; handles and conditions of the edges
    that leave it; its bodies; and the documents that it reaches, whatever their versions.

    Args:
        node: The node.
        edges: Those that leave it.
        closure: What its references are resolved to.
        schema: That of the workflow's input or output, where it is the node that checks it.
        node_configs: Config models of the node types, whose marks tell the references.
    """
    waiting = list(_references_in(node, node_configs))
    reached: dict[str, Json] = {}
    while waiting:
        found = waiting.pop()
        name = f"{found.kind}/{found.slug}"
        if name not in reached:
            document = closure.document(found.kind, found.slug)
            reached[name] = document.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            waiting += references_of(document, node_configs=node_configs)
    own = node.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=_NOT_HASHED)
    return content_hash([own, [[edge.handle, edge.condition] for edge in edges], schema, reached])


def _references_in(node: NodeSpec, node_configs: Mapping[str, type[NodeConfig]]) -> Iterator[FoundReference]:
    for part in node_parts(node, node_configs):
        model = part.body if isinstance(part, PlacedBody) else part.config
        for marked in marked_fields(model) if model is not None else ():
            if isinstance(marked.mark, Reference):
                yield from _read(marked.mark.kind, marked.value, marked.path)


def _models_of(
    document: Document,
    node_configs: Mapping[str, type[NodeConfig]],
    tool_configs: Mapping[str, type[SpecModel]],
) -> Iterator[tuple[BaseModel, str]]:
    yield document, ""
    if isinstance(document, WorkflowSpec):
        for part in all_parts(document, node_configs):
            if isinstance(part, PlacedBody):
                yield part.body, part.path
            elif part.config is not None:
                yield part.config, f"{part.path}.config"
    elif isinstance(document, ToolSpec) and document.type in tool_configs:
        try:
            yield tool_configs[document.type].model_validate(document.config), "config"
        except ValidationError:
            # A wrong config is a problem of its own, which the validation tells.
            return


def _read(kind: str, value: object, path: str) -> Iterator[FoundReference]:
    many = isinstance(value, (list, tuple))
    for index, text in enumerate(cast("list[object]", value) if many else [value]):
        found = parse_reference(text, kind) if isinstance(text, str) else None
        if found is not None:
            yield FoundReference(child_path(path, index) if many else path, kind, found.slug, found.version)


def check_references(
    document: Document,
    library: Library,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
) -> list[Problem]:
    """What keeps a document's closure from being resolved: missing and inactive documents, conflicts, and cycles.

    Looks through everything that the document reaches. A problem in a reached document is told at the place in this
    document by which it is reached, and names the document that it stands in.
    """

    def find(of: Document) -> Iterator[FoundReference]:
        return references_of(of, node_configs=node_configs, tool_configs=tool_configs)

    return _Walk(library, find).run(document, 0).problems


def resolve_closure(
    document: Document,
    version: int,
    library: Library,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
) -> Closure:
    """The closure of a document: itself and all that it reaches.

    Versions are those that references pin (`triage@3`), else the library's choice.

    Args:
        document: The root, valid.
        version: The root's version.
        library: Where the others are found.
        node_configs: Config models of the node types, whose marks tell the references.
        tool_configs: The same of the tool types.

    Raises:
        DocumentInvalid: Some reference cannot be resolved; all such problems are in it.
    """

    def find(of: Document) -> Iterator[FoundReference]:
        return references_of(of, node_configs=node_configs, tool_configs=tool_configs)

    walk = _Walk(library, find).run(document, version)
    if walk.problems:
        first = walk.problems[0]
        more = f" (and {len(walk.problems) - 1} more)" if len(walk.problems) > 1 else ""
        raise DocumentInvalid(
            f"{document.kind} {document.slug!r}: {first.path}: {first.message}. {first.mend}{more}",
            [problem.to_json() for problem in walk.problems],
        )
    return walk.closure(document)


def missing(
    path: str, kind: str, slug: str, version: int | None, library: Library, inside: str = ""
) -> Problem:
    """The problem of a reference that the library cannot follow; `inside` says in which other document it stands."""
    if version is not None and library.get(kind, slug, None) is not None:
        message = f"The {kind} {slug!r} has no version {version}{inside}"
        return Problem.of("reference-missing", path, message, "Name one that exists")
    names = library.names(kind) if isinstance(library, NamingLibrary) else ()
    if slug in names:
        message = f"The {kind} {slug!r} is stored, and no version of it is published{inside}"
        return Problem.of(
            "reference-missing", path, message, f"Publish it first: agentmesh publish {kind} {slug}"
        )
    mend = (
        suggestion(slug, names)
        if names
        else f"Import the {kind} {slug!r}, and publish it, or correct the name"
    )
    return Problem.of("reference-missing", path, f"There is no {kind} {slug!r}{inside}", mend)


_Key = tuple[str, str]


@dataclass(frozen=True)
class _Arrival:
    """How the walk came to a document."""

    path: str
    chain: tuple[_Key, ...]


class _Walk:
    """One walk over all that a document reaches, each document once."""

    def __init__(self, library: Library, find: Callable[[Document], Iterator[FoundReference]]) -> None:
        self._library = library
        self._find = find
        self._pinned: dict[_Key, PinnedDocument] = {}
        self._arrivals: dict[_Key, _Arrival] = {}
        self._targets: dict[_Key, list[_Key]] = {}
        self._answers: dict[tuple[str, str, int | None], PinnedDocument | None] = {}
        self._missing: set[tuple[str, str, str, int | None]] = set()
        self.problems: list[Problem] = []

    def run(self, document: Document, version: int) -> _Walk:
        root: _Key = (document.kind, document.slug)
        self._pinned[root] = PinnedDocument(version=version, document=document)
        self._arrivals[root] = _Arrival("", (root,))
        open_keys: list[_Key] = [root]
        while open_keys:
            key = open_keys.pop(0)
            self._targets[key] = []
            for reference in self._find(self._pinned[key].document):
                found = self._follow(key, reference)
                if found is not None:
                    open_keys.append(found)
        self._find_cycles()
        return self

    def _follow(self, owner: _Key, reference: FoundReference) -> _Key | None:
        """Pins what a reference names; returns its key where it is new."""
        key = (reference.kind, reference.slug)
        arrival = self._arrivals[owner]
        path = arrival.path or reference.path
        inside = f" (in {_chain_text(arrival.chain[1:])}, {reference.path})" if arrival.path else ""
        self._targets[owner].append(key)
        if key in self._arrivals and len(self._arrivals[key].chain) == 1:
            # The root, whatever version is asked for: a cycle, told as such.
            return None
        found = self._get(reference)
        if found is None:
            self._tell_missing(path, inside, reference)
            return None
        known = self._pinned.get(key)
        if known is not None:
            if known.version != found.version:
                self._conflict(path, inside, key, known.version, found.version)
            return None
        if not found.is_active:
            self._tell(
                "reference-inactive",
                path,
                f"The {key[0]} {key[1]!r} is inactive{inside}",
                "Activate it, or name another",
            )
        self._pinned[key] = found
        self._arrivals[key] = _Arrival(path, (*arrival.chain, key))
        return key

    def _get(self, reference: FoundReference) -> PinnedDocument | None:
        asked = (reference.kind, reference.slug, reference.version)
        if asked not in self._answers:
            self._answers[asked] = self._library.get(*asked)
        return self._answers[asked]

    def _conflict(self, path: str, inside: str, key: _Key, first: int, second: int) -> None:
        self._tell(
            "reference-conflict",
            path,
            f"The {key[0]} {key[1]!r} is asked for in version {second}{inside}, and in version {first} by "
            f"{self._arrivals[key].path}",
            "Pin one version everywhere",
        )

    def _tell_missing(self, path: str, inside: str, reference: FoundReference) -> None:
        key = (path, reference.kind, reference.slug, reference.version)
        if key in self._missing:
            return
        self._missing.add(key)
        self.problems.append(
            missing(path, reference.kind, reference.slug, reference.version, self._library, inside)
        )

    def _tell(self, code: str, path: str, message: str, mend: str) -> None:
        self.problems.append(Problem.of(code, path, message, mend))

    def _find_cycles(self) -> None:
        """Tells each cycle that goes through a workflow once, by the chain that closes it."""
        done: set[_Key] = set()
        for root in list(self._targets):
            if root in done:
                continue
            chain: list[_Key] = [root]
            on_chain = {root}
            work = [iter(self._targets[root])]
            while work:
                key = next(work[-1], None)
                if key is None:
                    work.pop()
                    left = chain.pop()
                    on_chain.discard(left)
                    done.add(left)
                elif key in on_chain:
                    self._tell_cycle([*chain[chain.index(key) :], key])
                elif key not in done and key in self._targets:
                    chain.append(key)
                    on_chain.add(key)
                    work.append(iter(self._targets[key]))

    def _tell_cycle(self, cycle: list[_Key]) -> None:
        # Agents may hand over to each other: their steps are bounded when they run.
        workflow = next((key for key in cycle if key[0] in ("workflow", "network")), None)
        if workflow is None:
            return
        second = cycle[1]
        path = self._arrivals[cycle[0]].path or self._arrivals[second].path or self._self_path(second)
        self._tell(
            "reference-cycle",
            path,
            f"The {workflow[0]} {workflow[1]!r} contains itself: {_chain_text(cycle)}",
            "Remove one of these references; repeat work with a loop node",
        )

    def _self_path(self, key: _Key) -> str:
        references = self._find(self._pinned[key].document)
        return next((r.path for r in references if (r.kind, r.slug) == key), "")

    def closure(self, root: Document) -> Closure:
        """The closure of a walk without problems."""
        agents: dict[str, PinnedAgent] = {}
        tools: dict[str, PinnedTool] = {}
        workflows: dict[str, PinnedWorkflow] = {}
        networks: dict[str, PinnedNetwork] = {}
        for (_, slug), pinned in sorted(self._pinned.items()):
            document, version = pinned.document, pinned.version
            if isinstance(document, AgentSpec):
                agents[slug] = PinnedAgent(version=version, document=document)
            elif isinstance(document, ToolSpec):
                tools[slug] = PinnedTool(version=version, document=document)
            elif isinstance(document, WorkflowSpec):
                workflows[slug] = PinnedWorkflow(version=version, document=document)
            else:
                networks[slug] = PinnedNetwork(version=version, document=document)
        return Closure(
            kind=root.kind, slug=root.slug, agents=agents, tools=tools, workflows=workflows, networks=networks
        )


def _chain_text(keys: Sequence[_Key]) -> str:
    shown = [f"{kind} {slug!r}" for kind, slug in keys[:_MAX_CHAIN]]
    return " -> ".join([*shown, *(["..."] if len(keys) > _MAX_CHAIN else [])])
