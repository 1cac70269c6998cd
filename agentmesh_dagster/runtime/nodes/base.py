"""What a node type is, and what it gets to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from agentmesh_dagster.records import Json, Step
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.journalled import StepAnswer, StepAsk, StepProgress, journalled_step
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.nodes import NodeConfig

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """What a node came to."""

    output: Json = None
    handles: tuple[str, ...] = ()
    """The named handles it chose, besides the default one."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A node about to be asked: everything but the asking."""

    node: NodeSpec
    names: Mapping[str, Json]
    """What its expressions see."""
    session: RunSession
    say: Say
    """Takes lines for the readable step log."""

    def render(self, template: Json, field_name: str) -> Json:
        """A config field, rendered; errors name the node and the field."""
        return render(template, self.names, where=f"node {self.node.id!r}, config.{field_name}")

    @property
    def upstream(self) -> Json:
        """The output of the live upstream node."""
        return self.names["context"]["last_output"]


@dataclass
class _Calls:
    """Where a node stands among its calls."""

    finished: dict[str, int] = field(default_factory=dict[str, int])
    """By kind: how many calls have an answer, spent ones included."""
    spent: dict[str, int] = field(default_factory=dict[str, int])
    """How many of the first model calls belong to attempts that got all their answers and failed."""
    is_open: bool = False
    """Whether the last call has no answer."""
    made: int = 0
    """How many calls of this attempt were really made."""


@dataclass(frozen=True, kw_only=True)
class NodeCall:
    """A node being run: its prepared request, and the journalled calls that it makes."""

    preparation: Preparation
    key: str
    request: Json
    _calls: _Calls = field(default_factory=_Calls)

    @property
    def session(self) -> RunSession:
        """The run's session."""
        return self.preparation.session

    @property
    def environment(self) -> Environment:
        """The process's environment."""
        return self.preparation.session.environment

    async def step(
        self,
        kind: str,
        request: Json,
        call: Callable[[str], Awaitable[StepAnswer]],
        *,
        idempotent: bool = True,
    ) -> tuple[Step, bool]:
        """Makes one call under the key `<node>/<kind>/<n>`, or replays it.

        `n` counts the calls of the node, over all its attempts: a failed call keeps its number and is made again under
        it, after the finished ones before it were replayed.

        Args:
            kind: `llm` or `tool`.
            request: What is asked, free of secrets.
            call: Makes the call; gets the step key, whose hash is the same in every attempt.
            idempotent: Whether the call may be repeated after it was cut off.
        """
        calls = self._calls
        number = calls.finished.get(kind, 0) + 1
        key = f"{self.key}/{kind}/{number}"
        node = self.preparation.node
        ask = StepAsk(
            key=key,
            kind=kind,
            node_id=node.id,
            node_type=node.type,
            node_name=node.name,
            parent_key=self.key,
            request=request,
            definition_hash=self.session.run.definition_hash,
            idempotent=idempotent,
            announce=True,
        )

        async def make(_progress: StepProgress) -> StepAnswer:
            calls.made += 1
            return await call(key)

        calls.is_open = True
        answer = await journalled_step(self.session, ask, make)
        calls.is_open = False
        calls.finished[kind] = number
        return answer

    def start_over(self, *, cut_off: bool) -> bool:
        """Makes ready for another attempt, after one that failed.

        Where a call failed, or the attempt was cut off, the answers before are good: the next attempt replays them.
        Where all calls were answered, the model's answers are what the node could not use: the next attempt asks it
        anew. What a tool answered is never asked for again.

        Returns:
            Whether the failed attempt was nothing but a replay of one that an earlier Dagster run made.
        """
        calls = self._calls
        is_spent = not calls.is_open and not cut_off
        was_told_again = (
            is_spent and not calls.made and calls.finished.get("llm", 0) > calls.spent.get("llm", 0)
        )
        if is_spent:
            calls.spent = {"llm": calls.finished.get("llm", 0)}
        calls.finished = dict(calls.spent)
        calls.is_open, calls.made = False, 0
        return was_told_again


class NodeType(ABC, Generic[ConfigT]):
    """One type of node: a config model, a pure preparation, and a body. Stateless; one object per process."""

    name: ClassVar[str]
    config_model: type[ConfigT]
    kinds: ClassVar[tuple[str, ...]] = ()
    """Dagster's kind tags, shown on the op."""
    is_pure: ClassVar[bool] = False
    """Instant and without effect: no `running` row is written, and no log line."""

    def parse(self, node: NodeSpec) -> ConfigT:
        """The node's config as its model; the document was validated before."""
        return self.config_model.model_validate(node.config)

    def describe(self, config: ConfigT) -> str:
        """One line for the op's description, where the node has none."""
        return ""

    def request(self, config: ConfigT, preparation: Preparation) -> Json:
        """The rendered input: what the journal keeps and the fingerprint covers. Pure; no secret in it."""
        return None

    @abstractmethod
    async def run(self, config: ConfigT, call: NodeCall) -> NodeResult:
        """Does the node's work."""


AnyNodeType = NodeType[Any]
