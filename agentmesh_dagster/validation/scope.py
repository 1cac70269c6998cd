"""What expressions may name at a place: names, and the steps and the state of the levels that they see."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.specs.fields import JsonObject, as_object
from agentmesh_dagster.specs.problems import Suggestions
from agentmesh_dagster.validation.level import Level, body_writes, own_writes
from agentmesh_dagster.validation.view import NodeView, WorkflowView

RUN_FIELDS: Final = ("id", "started_at", "now")
ENDED_RUN_FIELDS: Final = (*RUN_FIELDS, "status", "error")
"""What `on_failure` and `finally` see of the run."""
WORKFLOW_NAMES: Final = frozenset(("input", "steps", "context", "run", "config"))
TOOL_NAMES: Final = frozenset(("input", "config"))
OPAQUE: Final = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties")
"""Keywords beside which `properties` do not say all of a schema."""


@dataclass(frozen=True)
class WorkflowScope:
    """What is the same for all expressions of a workflow."""

    view: WorkflowView
    levels: Mapping[str, Level]
    """By their paths."""
    writers: Mapping[str, Collection[str]]
    """Key of the state to the ids of the nodes that write it, of any level."""
    state_keys: Collection[str]
    state_is_open: bool
    near_steps: Suggestions
    near_keys: Suggestions
    near_inputs: Suggestions

    @staticmethod
    def of(view: WorkflowView, levels: Sequence[Level]) -> WorkflowScope:
        """The scope of a workflow."""
        names: dict[str, None] = {}
        writers: dict[str, list[str]] = {}
        for level in levels:
            names.update(dict.fromkeys(level.by_name))
            for node in level.view.nodes.values():
                for key in own_writes(node):
                    writers.setdefault(key, []).append(node.id)
        schema = view.state_schema or {}
        properties = as_object(schema.get("properties")) or {}
        inputs = as_object((view.input_schema or {}).get("properties")) or {}
        return WorkflowScope(
            view=view,
            levels={level.view.path: level for level in levels},
            writers=writers,
            state_keys=tuple(properties),
            state_is_open=any(key in schema for key in OPAQUE),
            near_steps=Suggestions(names),
            near_keys=Suggestions(sorted({*writers, *properties, "last_output"})),
            near_inputs=Suggestions(inputs),
        )


@dataclass(frozen=True)
class Seen:
    """What is seen of one level: what comes before a node of it, or all of it."""

    level: Level
    node: NodeView | None
    """None: all nodes of the level are seen."""
    sees_own: bool = False
    """Whether the node itself has run: in its `set`, and in the conditions of its edges."""

    def has_step(self, upper: str) -> bool:
        """Whether a node of the level, by its id, has run where the expression stands."""
        node, facts = self.node, self.level.facts
        if node is None or node.id in facts.uncertain:
            return True
        if upper == node.id:
            return self.sees_own or node.id in facts.reach.in_cycles
        return facts.reach.is_above(upper, node.id)

    def has_key(self, key: str, *, is_own_set: bool) -> bool:
        """Whether a node of the level has written a key of the state where the expression stands.

        Args:
            key: The key.
            is_own_set: Whether the expression stands in the `set` of the node itself, which sees what its bodies have
                written, and not what it writes itself.
        """
        node, facts = self.node, self.level.facts
        mask = self.level.writer_masks.get(key, 0)
        if not mask:
            return False
        # The pass before has written what comes later in the body of a loop.
        if node is None or node.id in facts.uncertain or self.level.repeats:
            return True
        if facts.reach.above(node.id) & mask:
            return True
        if not self.sees_own or not mask & facts.reach.mask([node.id]):
            return False
        return not is_own_set or key in body_writes(node)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What the expressions at a place may name."""

    names: frozenset[str]
    allows_secrets: bool = False
    input_schema: JsonObject | None = None
    """The schema of `input`, where it is known."""
    run_fields: tuple[str, ...] = RUN_FIELDS
    workflow: WorkflowScope | None = None
    seen: Seen | None = None
    """The level at which the expression stands; None where that is not known."""

    @property
    def node(self) -> NodeView | None:
        """The node at which the expression stands, of a workflow."""
        return self.seen.node if self.seen is not None else None

    def all_seen(self) -> Iterator[Seen]:
        """What is seen of the level and of those around it, the nearest first."""
        seen = self.seen
        while seen is not None:
            yield seen
            level = seen.level
            seen = Seen(level.parent, level.owner) if level.parent is not None else None


def level_scope(
    whole: WorkflowScope, level: Level, node: NodeView | None, *, sees_own: bool = False
) -> Scope:
    """The scope of an expression at a level: what comes before a node of it, or without one all of it."""
    return Scope(
        names=WORKFLOW_NAMES | level.names,
        input_schema=whole.view.input_schema,
        run_fields=ENDED_RUN_FIELDS if level.is_ending else RUN_FIELDS,
        workflow=whole,
        seen=Seen(level, node, sees_own),
    )
