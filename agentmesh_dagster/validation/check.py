"""Checks a document against all rules at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from pydantic import ValidationError

from agentmesh_dagster.constants import KINDS
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import Document, document_model
from agentmesh_dagster.specs.fields import JsonObject, as_list, as_object
from agentmesh_dagster.specs.names import job_name
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, AgentConfig, NodeConfig
from agentmesh_dagster.specs.normalize import Normalized, normalize
from agentmesh_dagster.specs.notify import BUILTIN_NOTIFY_CONFIGS, EmailNotify, NotifyConfig
from agentmesh_dagster.specs.problems import OF_OTHERS, Problem, suggestion
from agentmesh_dagster.specs.resolve import DocumentLibrary, Library, check_references
from agentmesh_dagster.specs.tools import BUILTIN_TOOL_CONFIGS
from agentmesh_dagster.validation.container_rules import container_problems
from agentmesh_dagster.validation.document_rules import (
    input_schema_problems,
    known_type,
    missing_references,
    reference_problems,
    schema_problems,
    slug_problems,
)
from agentmesh_dagster.validation.expression_rules import (
    agent_expression_problems,
    notify_expression_problems,
    tool_expression_problems,
    workflow_expression_problems,
)
from agentmesh_dagster.validation.function_rules import LookUp, function_problem, function_problems
from agentmesh_dagster.validation.gate_rules import approval_problems, gate_problems, notify_problems
from agentmesh_dagster.validation.mapping_rules import mapping_problems
from agentmesh_dagster.validation.prudence_rules import prudence_problems, unused_problems
from agentmesh_dagster.validation.raw_bodies import hollow, level_counts
from agentmesh_dagster.validation.read_view import Reading
from agentmesh_dagster.validation.shape import checked, json_problems
from agentmesh_dagster.validation.state_rules import state_problems
from agentmesh_dagster.validation.target import Target, model_setting_problems
from agentmesh_dagster.validation.view import WorkflowView
from agentmesh_dagster.validation.walk import levels_of

MAX_NODES: Final = 2_000
MAX_EDGES: Final = 10_000


@dataclass(frozen=True)
class Checked:
    """What the check of one document came to."""

    document: Document | None
    """The document; None where there are errors, besides those about what it refers to."""
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that keep the document from being stored."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems that block nothing."""
        return tuple(problem for problem in self.problems if problem.severity == "warning")


@dataclass(frozen=True, kw_only=True)
class _Context:
    node_configs: Mapping[str, type[NodeConfig]]
    tool_configs: Mapping[str, type[SpecModel]]
    notify_configs: Mapping[str, type[NotifyConfig]]
    library: Library | None
    target: Target | None
    look_up: LookUp | None


def validate_document(
    raw: Json,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
    notify_configs: Mapping[str, type[NotifyConfig]] = BUILTIN_NOTIFY_CONFIGS,
    library: Library | None = None,
    target: Target | None = None,
    look_up: LookUp | None = None,
) -> Checked:
    """Checks a normalised document; finds all problems at once, and never raises for what it finds.

    Args:
        raw: The document, in the spelling of `specs.normalize`.
        node_configs: Config models of the node types.
        tool_configs: Config models of the tool types.
        notify_configs: Config models of the notifiers.
        library: Where referred documents are found; without one, references are checked for their form alone.
        target: The deployment that it is for; without one, what a deployment allows is not looked at.
        look_up: Looks up Python functions; without it, they are checked for their form alone.
    """
    context = _Context(
        node_configs=node_configs,
        tool_configs=tool_configs,
        notify_configs=notify_configs,
        library=library,
        target=target,
        look_up=look_up,
    )
    if not isinstance(raw, dict):
        return _refused(
            "not-an-object", "", "The document is not an object", "Write 'kind: workflow', 'slug: ...', ..."
        )
    problems = list(json_problems(raw))
    document = as_object(cast("object", raw))
    if document is None or any(problem.code == "too-deep" for problem in problems):
        return Checked(None, tuple(problems))
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        if kind is None:
            return _refused("kind-unknown", "kind", "The document has no 'kind'", f"Add one: {known}")
        mend = suggestion(kind, KINDS) if isinstance(kind, str) else f"Known kinds are {known}"
        return _refused("kind-unknown", "kind", f"Unknown kind {str(kind)[:80]!r}", mend)
    problems += _all_problems(kind, document, context)
    model = document_model(kind)
    complete: Document | None = None
    if not _has_own_errors(problems):
        try:
            complete = model.model_validate(document)
        except ValidationError as error:
            # Each part was checked by itself; what only the whole refuses is told as it comes.
            sentence = str(error.errors()[0]["msg"])
            problems.append(Problem.of("field-invalid", "", sentence, "Correct the document"))
    if complete is not None and library is not None:
        held = _with_root(complete, library)
        problems += check_references(
            complete, held, node_configs=context.node_configs, tool_configs=context.tool_configs
        )
        if _has_own_errors(problems):
            complete = None
    return Checked(complete, tuple(_in_order(problems)))


def _has_own_errors(problems: Sequence[Problem]) -> bool:
    return any(problem.severity == "error" and problem.code not in OF_OTHERS for problem in problems)


def _with_root(document: Document, library: Library) -> Library:
    return DocumentLibrary([document], library)


def _refused(code: str, path: str, message: str, mend: str) -> Checked:
    return Checked(None, (Problem.of(code, path, message, mend),))


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Errors before warnings, each kind as found."""
    unique = list(dict.fromkeys(problems))
    return sorted(unique, key=lambda problem: problem.severity != "error")


def _all_problems(kind: str, raw: JsonObject, context: _Context) -> list[Problem]:
    reading = Reading(context.node_configs)
    problems, marks = reading.problems, reading.marks
    model = document_model(kind)
    shape = raw
    if kind == "workflow":
        problems += _too_large(raw, context)
        if problems:
            return problems
        # Nodes and edges are checked one by one.
        none: list[Json] = []
        shape = hollow(model, raw)
        shape |= {name: none for name in ("nodes", "edges") if as_list(raw.get(name)) is not None}
    checked(model, shape, "", problems)
    problems += slug_problems(kind, raw.get("slug"))
    reading.collect(model, shape, "")
    problems += unused_problems(kind, raw)
    if kind in ("workflow", "tool"):
        problems += input_schema_problems(raw)
    if kind == "agent":
        problems += agent_expression_problems(raw, context.target)
        problems += model_setting_problems(raw.get("model_settings"))
    if kind in ("agent", "network") and context.target is not None:
        problems += context.target.model_problems(raw.get("model"), "model")
    if kind == "tool":
        problems += _tool_problems(raw, context, reading)
    view = reading.workflow(raw) if kind == "workflow" else None
    problems += schema_problems(marks)
    problems += reference_problems(marks)
    if view is not None:
        problems += _workflow_problems(view, context)
    if context.library is not None and any(problem.severity == "error" for problem in problems):
        # A right document is followed through all that it reaches.
        problems += missing_references(marks, context.library, f"{kind}/{raw.get('slug')}")
    return problems


def _too_large(raw: JsonObject, context: _Context) -> Iterator[Problem]:
    there = level_counts(raw, context.node_configs)
    for name, limit in (("nodes", MAX_NODES), ("edges", MAX_EDGES)):
        if there[name] > limit:
            own = as_list(raw.get(name)) or ()
            inner = "" if len(own) == there[name] else ", with those in bodies"
            message = f"There are {there[name]} {name}{inner}, and at most {limit} are allowed"
            yield Problem.of(f"too-many-{name}", name, message, "Divide the work among several workflows")


def _workflow_problems(view: WorkflowView, context: _Context) -> list[Problem]:
    """Problems of a workflow besides those of its parts' shapes."""
    problems: list[Problem] = []
    levels = levels_of(view, problems)
    problems += workflow_expression_problems(view, levels, context.target)
    problems += gate_problems(view)
    if context.target is not None:
        for node in view.every_node():
            config = as_object(node.raw.get("config")) if node.config_type is AgentConfig else None
            if config is not None:
                problems += context.target.model_problems(config.get("model"), f"{node.path}.config.model")
    problems += _told(view, context)
    problems += container_problems(view, levels, context.library)
    problems += state_problems(view, levels)
    if context.look_up is not None:
        problems += function_problems(view, context.look_up)
    if context.library is not None:
        problems += mapping_problems(view, levels, context.library, context.look_up)
    problems += prudence_problems(view, levels, context.library)
    return problems


def _tool_problems(raw: JsonObject, context: _Context, reading: Reading) -> list[Problem]:
    problems: list[Problem] = []
    config_type: type[SpecModel] | None = None
    kind = raw.get("type")
    if isinstance(kind, str):
        problems += known_type("tool-type-unknown", "type", "tool", kind, context.tool_configs)
        config_type = context.tool_configs.get(kind)
    config = as_object(raw.get("config", {}))
    if config_type is not None and config is not None:
        checked(config_type, config, "config", problems)
        reading.collect(config_type, config, "config")
    problems += tool_expression_problems(raw, config_type, context.target)
    problems += approval_problems(raw)
    if kind == "function" and config is not None and context.look_up is not None:
        problems += function_problem(config.get("function"), "config.function", context.look_up)
    return problems


def _told(view: WorkflowView, context: _Context) -> Iterator[Problem]:
    """Problems of those who are told of approvals."""
    for node in view.every_node():
        for model, raw, path, problems in notify_problems(node, context.notify_configs):
            yield from problems
            if model is not None:
                yield from notify_expression_problems(model, raw, path, context.target)
            if model is EmailNotify and context.target is not None:
                yield from context.target.mail_problems(path)


def validate_set(documents: Sequence[Json]) -> list[tuple[Problem, ...]]:
    """Problems between the documents of one import, each told at the later one; one tuple for each document."""
    seen: dict[tuple[str, str], int] = {}
    jobs: dict[str, tuple[str, str]] = {}
    found: list[tuple[Problem, ...]] = []
    for number, value in enumerate(documents):
        problems: list[Problem] = []
        document = as_object(value) or {}
        kind, slug = document.get("kind"), document.get("slug")
        if isinstance(kind, str) and isinstance(slug, str):
            first = seen.setdefault((kind, slug), number)
            if first != number:
                problems.append(
                    Problem.of(
                        "document-duplicate",
                        "slug",
                        f"The {kind} {slug!r} is there twice, as documents {first + 1} and {number + 1}",
                        "Keep one, or give one another slug",
                    )
                )
            problem = job_collision(kind, slug, jobs)
            if problem is not None:
                problems.append(problem)
            jobs.setdefault(job_name(kind, slug), (kind, slug))
        found.append(tuple(problems))
    return found


def job_collision(kind: str, slug: str, jobs: Mapping[str, tuple[str, str]]) -> Problem | None:
    """The problem of a document whose Dagster job another document has.

    Args:
        kind: Of the document.
        slug: Of the document.
        jobs: Job name to the kind and slug of the document that has it.
    """
    job = job_name(kind, slug)
    other = jobs.get(job)
    if other is None or other == (kind, slug):
        return None
    return Problem.of(
        "job-name-collision",
        "slug",
        f"The {kind} {slug!r} and the {other[0]} {other[1]!r} are both the Dagster job {job!r}",
        "Choose another slug",
    )


@dataclass(frozen=True)
class CheckedSource:
    """One document of an import, checked; paths are those of the author's text."""

    raw: Json
    """The normalised document."""
    source: int
    """The number of the raw document that it was written in."""
    checked: Checked


def validate_raw(
    raws: Sequence[Json],
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
    notify_configs: Mapping[str, type[NotifyConfig]] = BUILTIN_NOTIFY_CONFIGS,
    library: Library | None = None,
    target: Target | None = None,
    look_up: LookUp | None = None,
) -> list[CheckedSource]:
    """Normalises and checks documents as read from files, together: they find each other before the library's.

    Args:
        raws: Documents as their authors wrote them.
        node_configs: Config models of the node types.
        tool_configs: Config models of the tool types.
        notify_configs: Config models of the notifiers.
        library: Where documents outside of `raws` are found; without one, references are checked for form alone.
        target: The deployment that they are for.
        look_up: Looks up Python functions.
    """
    normalized = [normalize(raw, node_configs=node_configs, tool_configs=tool_configs) for raw in raws]
    places = [(number, n, inner) for number, n in enumerate(normalized) for inner in range(len(n.documents))]
    documents = [n.documents[inner] for _, n, inner in places]

    def check(document: Json, seen: Library | None, of: Target | None = target) -> Checked:
        return validate_document(
            document,
            node_configs=node_configs,
            tool_configs=tool_configs,
            notify_configs=notify_configs,
            library=seen,
            target=of,
            look_up=look_up,
        )

    # What a deployment does not allow is there all the same, for those who refer to it.
    results = [check(document, None, None if library is not None else target) for document in documents]
    if library is not None:
        valid = [result.document for result in results if result.document is not None]
        everything = DocumentLibrary(valid, library)
        results = [check(document, everything) for document in documents]
    between = validate_set(documents)
    return [
        CheckedSource(document, number, _at_author(result, between[n], normal, inner))
        for n, ((number, normal, inner), document, result) in enumerate(
            zip(places, documents, results, strict=True)
        )
    ]


def _at_author(result: Checked, more: tuple[Problem, ...], normal: Normalized, inner: int) -> Checked:
    origin = normal.origins[inner]
    problems = tuple(replace(p, path=origin.author_path(p.path)) for p in (*result.problems, *more))
    return Checked(None if more else result.document, tuple(_in_order(problems)))
