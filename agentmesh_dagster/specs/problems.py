"""What can be wrong with a document: the record, and the list of all rules.

Each rule has one code, which is stable; its severity and meaning stand in `RULES` and nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, Literal

from agentmesh_dagster.records import Json

Severity = Literal["error", "warning"]

_SHOWN: Final = 30
"""How many known words a mend lists."""


@dataclass(frozen=True)
class Rule:
    """One rule that documents are held to."""

    severity: Severity
    meaning: str


@dataclass(frozen=True)
class Problem:
    """One place where a document breaks a rule."""

    code: str
    path: str
    """Place in the document, such as `nodes[3].config.prompt`; empty for the document itself."""
    message: str
    """What is wrong."""
    mend: str
    """What to do about it."""
    severity: Severity = "error"

    @staticmethod
    def of(code: str, path: str, message: str, mend: str) -> Problem:
        """A problem with the severity of its rule.

        Raises:
            KeyError: `code` is not in `RULES`.
        """
        return Problem(code, path, message, mend, RULES[code].severity)

    def to_json(self) -> Json:
        """The problem as a JSON object."""
        return {
            "code": self.code,
            "severity": self.severity,
            "path": self.path,
            "message": self.message,
            "mend": self.mend,
        }

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        line = f"{self.severity} {self.code}: {place}{self.message}. {self.mend}."
        return " ".join(line.split())


def _error(meaning: str) -> Rule:
    return Rule("error", meaning)


def _warning(meaning: str) -> Rule:
    return Rule("warning", meaning)


RULES: Final[dict[str, Rule]] = {
    # Shape.
    "not-an-object": _error("A document is an object."),
    "not-json": _error("Every value is one that JSON and the database can hold."),
    "too-deep": _error("Lists and objects nest at most 64 levels deep."),
    "too-many-nodes": _error("A workflow has at most 2,000 nodes, with those in bodies."),
    "too-many-edges": _error("A workflow has at most 10,000 edges, with those in bodies."),
    "kind-unknown": _error("`kind` is workflow, agent, tool or network."),
    "field-unknown": _error("Every field is a known one."),
    "field-missing": _error("Required fields are there."),
    "field-invalid": _error("Every value fits its field."),
    "slug-invalid": _error(
        "A slug begins with a letter and holds letters, digits, `-` and `_`, no two adjacent."
    ),
    "slug-reserved": _error("A workflow's slug is no name that Dagster reserves."),
    "node-type-unknown": _error("A node's type is registered."),
    "tool-type-unknown": _error("A tool's type is known."),
    "schema-invalid": _error("JSON Schemas are valid schemas."),
    "pattern-refused": _error(
        "Regular expressions are those of RE2: no look-around, no back references, at most 1,000 characters."
    ),
    "input-schema-not-object": _error("A workflow's and a tool's input schema is of type object."),
    # Graph.
    "node-id-invalid": _error(
        "A node id begins with a letter and holds letters, digits, `-` and `_`, no two adjacent."
    ),
    "node-id-duplicate": _error("Node ids are unique."),
    "node-id-collision": _error(
        "Node ids are unique after `-` became `_`, and are no names of AgentMesh's own ops."
    ),
    "start-missing": _error("A workflow has a start node."),
    "start-duplicate": _error("A workflow has one start node."),
    "end-missing": _error("A workflow has at least one end node."),
    "edge-dangling": _error("Edges begin and end at nodes."),
    "edge-duplicate": _error("No two edges say the same."),
    "edge-into-start": _error("No edge leads into a start node."),
    "edge-out-of-end": _error("No edge leaves an end node."),
    "handle-unknown": _error("An edge's `source_handle` is one that its source offers."),
    "handle-missing": _error("An edge from a node without a default handle says which handle."),
    "handle-uncovered": _warning(
        "Each handle of a branch has an edge, and so has each way out of a human node but `rejected`."
    ),
    "handle-error-unrouted": _error("An edge from the handle `error` needs `on_error: route` on its source."),
    "error-edge-missing": _error("A node with `on_error: route` has an edge from its handle `error`."),
    "branch-no-default": _warning("A branch says what happens when no condition is true."),
    "node-unreachable": _error("Every node can be reached from the start node."),
    "node-dead-end": _warning("Every node leads to an end node."),
    "cycle": _error("The graph has no cycle."),
    "set-key-invalid": _error("Keys of `set` are identifiers."),
    "join-too-many": _error("A node's `join` asks for no more edges than lead into it."),
    "setting-without-effect": _warning("No setting stands where it does nothing."),
    # Containers and their bodies.
    "body-start-end": _error("A body has no start and end nodes."),
    "node-id-shadows": _error("A node in a body bears no name of a node of a level around it."),
    "branch-name-invalid": _error("Branches of a parallel node are named as nodes are, each its own."),
    "wait-too-many": _error("A parallel node waits for no more branches than it has."),
    "too-many-iterations": _error("A loop's `max_iterations` stays within `settings.max_iterations`."),
    "wait-in-finally": _error(
        "Nothing in `on_failure` and `finally` waits for longer than a worker sits out."
    ),
    # State.
    "reducer-unknown": _error("A key's `reducer` is replace, append, merge or sum."),
    "reducer-unfit": _error("A key's `reducer` suits its type."),
    "state-conflict": _error(
        "Of two writes of one key of the state one comes after the other, or the key names a `reducer`."
    ),
    # Gates: human nodes, tools that require approval, and who is told.
    "gate-options": _error("A human node's options are distinct words, none of them `timeout` or `error`."),
    "gate-assignees": _error("Those who may decide are distinct names, and groups as `group:<name>`."),
    "gate-quorum": _error("As many as must agree can agree."),
    "gate-timeout": _error(
        "What a timeout leads to stands beside a `timeout`, and is something it can lead to."
    ),
    "gate-escalation": _error("`escalate_after` and `escalate_to` stand together."),
    "gate-form": _error("A form is the schema of an object, and data that is written for it fits."),
    "event-reserved": _error("An emit node's event has a name of the workflow's own."),
    "notifier-unknown": _error("A notifier's type is registered."),
    "secret-literal": _warning("Secrets are not written in clear."),
    # Expressions.
    "expression-invalid": _error("Expressions parse."),
    "name-unknown": _error("Expressions name only what is there."),
    "name-outside-body": _error("`item`, `index` and `iteration` exist in bodies alone."),
    "step-unknown": _error("`steps.x` names a node of this level or of one around it."),
    "step-not-upstream": _error("`steps.x` names a node that runs before."),
    "step-field-unknown": _error("Of a step there are `output`, `error` and `status`."),
    "output-unknown": _warning("`steps.x.output.f` is a field that nodes of that type give."),
    "context-unknown": _error("`context.k` is a key that a node before sets or the state schema has."),
    "input-unknown": _error("`input.x` is not excluded by a closed input schema."),
    "input-undeclared": _warning("`input.x` is a property of the input schema."),
    "secret-misplaced": _error("`secret('NAME')` stands in the configs of tools and webhooks alone."),
    "secret-refused": _error("The deployment allows the secret (a warning until the document is published)."),
    "secret-host": _error(
        "The deployment lets the host have the secret (a warning until the document is published)."
    ),
    "model-setting": _error("`model_settings` change how a model answers, and not where it is."),
    "model-refused": _error(
        "A model's name begins with an endpoint of the deployment, or with a provider that needs none (a warning until "
        "the document is published)."
    ),
    "mail-server": _error("The SMTP server stands in the deployment, and in no document."),
    "mail-unconfigured": _error(
        "The deployment has a mail server (a warning until the document is published)."
    ),
    "config-missing": _error("The deployment has the value (a warning until the document is published)."),
    "secret-unconfigured": _warning("Secrets are configured where the check runs."),
    # References and other documents.
    "reference-invalid": _error("A reference is a slug, or a slug with `@` and a version."),
    "reference-missing": _error("What a document refers to exists (a warning until it is published)."),
    "reference-inactive": _error("What a document refers to is active (a warning until it is published)."),
    "reference-conflict": _error("All that a workflow reaches agrees on one version of each document."),
    "reference-cycle": _error("No workflow contains itself."),
    "mapping-missing": _error("A mapped input gives what the target's input schema requires."),
    "mapping-unknown": _error("A mapped input gives nothing that the target's closed input schema excludes."),
    "mapping-mismatch": _error("A mapped value can fit the target's input schema."),
    "function-unknown": _error("A function that a document names can be called."),
    "function-unavailable": _warning(
        "The module of a function can be imported, and is allowed, where the check runs."
    ),
    "document-duplicate": _error("One import holds each document once."),
    "job-name-collision": _error("No two documents become the same Dagster job."),
    # Prudence.
    "side-effect-ungated": _warning("A tool with side effects has a gate before it."),
    "too-many-for-max-steps": _warning("A workflow has no more nodes than `settings.max_steps` lets run."),
    "output-schema-shadowed": _warning(
        "Fields of an agent's object do not bear the names of its other outputs."
    ),
    "not-in-effect": _warning("Every field has an effect in this release."),
    "timeout-missing": _warning("Nodes that wait for something outside have a timeout."),
}
"""All rules by code, in the order in which a page prints them."""

OF_REFERENCES: Final = frozenset(("reference-missing", "reference-inactive"))
"""Rules about what is to be there once a document is published."""
OF_OTHERS: Final = OF_REFERENCES | {
    "mapping-missing",
    "mapping-unknown",
    "mapping-mismatch",
    "function-unknown",
}
"""Rules about a document and others together: a document that breaks them can be stored, and not published."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where nothing is near."""
    options = {option.casefold(): option for option in known}
    found = difflib.get_close_matches(word.casefold(), list(options), n=1, cutoff=0.6)
    return options[found[0]] if found else None


class Suggestions:
    """Nearest known words for many wrong ones, with a bound on the work: a large document may be wrong everywhere."""

    _MOST = 100

    def __init__(self, known: Iterable[str]) -> None:
        self._known = tuple(known)
        self._found: dict[str, str | None] = {}

    def nearest(self, word: str) -> str | None:
        """The known word most like `word`; None where nothing is near, or after many other words."""
        if word not in self._found:
            if len(self._found) >= self._MOST:
                return None
            self._found[word] = nearest(word[:120], self._known)
        return self._found[word]

    def mend(self, word: str, there: Sequence[Collection[str]] | None = None) -> str:
        """The nearest known word, or the list of the known ones.

        Args:
            word: The wrong one.
            there: Groups of those that can be named at its place; default: all can.
        """
        groups = [self._known] if there is None else there
        near = self.nearest(word)
        return _mend(near if any(near in group for group in groups) else None, *groups)


def suggestion(word: str, known: Iterable[str]) -> str:
    """A mend: the nearest known word, or the list of the known ones."""
    names = tuple(known)
    return _mend(nearest(word[:120], names), names)


def _mend(near: str | None, *groups: Collection[str]) -> str:
    if near is not None:
        return f"Did you mean {near!r}"
    names = list(islice(chain(*groups), _SHOWN))
    if not names:
        return "There is none to choose from"
    total = sum(len(group) for group in groups)
    more = f" and {total - _SHOWN} more" if total > _SHOWN else ""
    return f"Known are {', '.join(repr(name) for name in names)}{more}"


def child_path(path: str, key: str | int) -> str:
    """The path of a value below `path`: `nodes[3]`, `nodes[3].config`, `metadata['a b']`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if key and all(c.isalnum() or c in "_-@$" for c in key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key[:60]!r}]"
