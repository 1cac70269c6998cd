"""What a node type is, and what it gets to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from agentmesh_dagster.constants import HANDLE_TIMEOUT
from agentmesh_dagster.records import Json, Step, StepStatus, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.called import run_called
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.journalled import StepAnswer, StepAsk, StepProgress, journalled_step
from agentmesh_dagster.runtime.row_buffer import RowBuffer
from agentmesh_dagster.runtime.scope import NodeIdentity, Scope, upstream_node
from agentmesh_dagster.runtime.session import RunSession
from agentmesh_dagster.runtime.step_context import StepContext
from agentmesh_dagster.runtime.waiting import closed_wait, new_wait
from agentmesh_dagster.specs.closure import content_hash
from agentmesh_dagster.specs.documents import NodeSpec
from agentmesh_dagster.specs.expressions import render
from agentmesh_dagster.specs.nodes import NodeConfig

ConfigT = TypeVar("ConfigT", bound=NodeConfig)


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LevelEnd:
    """What a pass through a level came to."""

    output: Json = None
    state: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """What its nodes have written to the state, joined."""


RunLevel = Callable[[Scope], Awaitable[LevelEnd]]
"""Raises the first failure once nothing more can run, or `Suspended` where something waits."""


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """What a node came to."""

    output: Json = None
    handles: tuple[str, ...] = ()
    """The named handles it chose, besides the default one."""
    takes_default: bool = True
    """Whether the edges without a handle are live, where the type has such."""
    status: StepStatus = StepStatus.SUCCEEDED
    """`SKIPPED`: the run goes past the node after all, and its edges are dead."""
    state: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """What the levels of a container have written to the state, as `specs.state` keeps it."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Numbers for people: how many items, iterations, failures."""
    child_run_id: str | None = None
    """The run that the node has started."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A node about to be asked: everything but the asking."""

    node: NodeSpec
    names: Mapping[str, Json]
    """What its expressions see."""
    scope: Scope
    """The pass through its level."""
    session: RunSession
    say: Say
    """Takes lines for the readable step log."""
    attached: frozenset[str | None] = frozenset()
    """The handles that its outgoing edges leave from; None for those without one."""
    rows: Mapping[str, Step] = field(default_factory=dict[str, Step])
    """The finished rows before it, by node id."""

    def render(self, template: Json, field_name: str) -> Json:
        """A config field, rendered; errors name the node and the field."""
        return render(template, self.names, where=f"node {self.node.id!r}, config.{field_name}")

    @property
    def upstream(self) -> Json:
        """The output of the live upstream node."""
        return self.names["context"]["last_output"]

    @property
    def upstream_source(self) -> str:
        """Whose output that is, for errors."""
        name = upstream_node(self.scope, self.node.id, self.rows)
        if name is not None:
            return f"the output of {self.scope.key(name)!r}"
        return "what came before the first nodes of this body (context.last_output)"


@dataclass
class _Calls:
    """Where a node stands among its calls."""

    finished: dict[str, int] = field(default_factory=dict[str, int])
    """By kind: the number of the last call that this attempt has the answer of."""
    asked: list[int] = field(default_factory=list[int])
    """The numbers of the model calls that this attempt has the answers of."""
    kept: int = 0
    """The number of the last model call whose answer led to a tool's call."""
    spent: set[int] = field(default_factory=set[int])
    """The numbers of the model calls whose answers an attempt that failed could not use."""
    open: int = 0
    """How many calls have no answer."""
    made: int = 0
    """How many calls of this attempt were really made."""
    attempt: int = 0
    """Which attempt of the node it is, over all Dagster runs of its run."""
    is_first: bool = True
    """Whether it is the first one of this Dagster run."""


@dataclass(frozen=True, kw_only=True)
class NodeCall:
    """A node being run: its prepared request, and the journalled calls that it makes."""

    preparation: Preparation
    key: str
    request: Json
    run_level: RunLevel
    """Runs a pass through a level of a container to its end: walks it, or where ops have, reads what became of it."""
    buffer: RowBuffer | None = None
    """Where the rows of a container's passes wait; None where ops have run them."""
    is_fanned: bool = False
    """Whether the op of this process is one item of a container, whose other items have ops of their own."""
    has_waited: bool = False
    """Whether the node goes on after a wait: what has failed in it has failed."""
    _calls: _Calls = field(default_factory=_Calls)

    @property
    def goes_on(self) -> bool:
        """Whether this attempt has waited: what has failed in it stays failed, and is not run again."""
        return self.has_waited and self._calls.is_first

    @property
    def attempt(self) -> int:
        """Which attempt of the node it is, over all Dagster runs of its run."""
        return self._calls.attempt

    def begin_attempt(self, number: int) -> None:
        """Says which attempt follows."""
        self._calls.is_first = self._calls.attempt == 0
        self._calls.attempt = number

    @property
    def session(self) -> RunSession:
        """The run's session."""
        return self.preparation.session

    @property
    def scope(self) -> Scope:
        """The pass through the node's level."""
        return self.preparation.scope

    @property
    def environment(self) -> Environment:
        """The process's environment."""
        return self.preparation.session.environment

    @property
    def notify(self) -> list[Json]:
        """Who is told when the node waits for people: the project's notifiers and its own."""
        return [*self.environment.notify, *self.preparation.node.notify]

    def levels(self, node_type: NodeType[ConfigT], config: ConfigT) -> Mapping[str, Scope]:
        """The passes that the type says are the same each time."""
        return node_type.levels(config, self.preparation)

    async def run_pass(self, scope: Scope) -> LevelEnd:
        """Runs a pass to its end: a body's nodes, or a called workflow with its own `on_failure` and `finally`.

        Raises:
            Suspended: Something in it waits.
            Exception: What made it fail.
        """
        if scope.level.is_workflow:
            return await run_called(self, scope)
        return await self.run_level(scope)

    async def part(
        self,
        kind: str,
        key: str,
        request: Json,
        scope: Scope,
        work: PartWork | None = None,
        *,
        index: int,
        announce: bool = False,
    ) -> Step:
        """Runs one pass of a container as a journalled step of its own, or replays it.

        Args:
            kind: `item`, `iteration` or `branch`.
            key: Its step key.
            request: What tells it from another one under the same key.
            scope: The pass.
            work: Makes its answer; default: what the pass came to.
            index: From 0, of iterations from 1.
            announce: Whether its row is written before anything in it.

        Raises:
            Suspended: Something in it waits.
            Exception: What made it fail.
        """
        node = self.preparation.node
        called = ("workflow", scope.level.workflow.slug) if scope.level.is_workflow else None
        ask = StepAsk(
            key=key,
            kind=kind,
            node_id=node.id,
            node_type=node.type,
            node_name=node.name,
            parent_key=self.key,
            request=request,
            definition_hash=self.session.run.definition_hash,
            node_hash=self._identity.hash,
            entity=called,
            idempotent=True,
            announce=announce,
            node_key=self.key,
            iteration_index=index,
            is_light=scope.level.is_light(self.environment.node_types),
            buffer=self.buffer,
            opens_waits=self.is_fanned,
            may_wait=not scope.is_closing,
            keeps_time=scope.level.is_workflow and scope.level.workflow.settings.timeout_s is not None,
        )

        async def make(_progress: StepProgress) -> StepAnswer:
            return part_answer(await self.run_pass(scope)) if work is None else await work()

        row, _ = await journalled_step(self.session, ask, make)
        self.session.forget_below(key)
        return row

    async def step(
        self,
        kind: str,
        request: Json,
        call: Callable[[str], Awaitable[StepAnswer]],
        *,
        idempotent: bool = True,
        answer_schema: Json = None,
        under: str = "",
        entity: tuple[str, str] | None = None,
    ) -> tuple[Step, bool]:
        """Makes one call under the key `<node>/<kind>/<n>`, or replays it.

        `n` counts the calls of the node, over all its attempts: a failed call keeps its number and is made again under
        it, after the finished ones before it were replayed. Calls with an `under` of their own may be made side by
        side.

        Args:
            kind: `llm` or `tool`.
            request: What is asked, free of secrets.
            call: Makes the call; gets the step key, whose hash is the same in every attempt.
            idempotent: Whether the call may be repeated after it was cut off.
            answer_schema: What its output must fit, where a person says it of a call that was cut off.
            under: What stands for `n`, such as `2.0`: the model call that asked for it, and its place in that answer.
            entity: Kind and slug of what is called; default: those of the node.
        """
        calls = self._calls
        number = self._next(kind)
        key = f"{self.key}/{kind}/{under or number}"
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
            node_hash=self._identity.hash,
            entity=entity or self._identity.entity,
            idempotent=idempotent,
            announce=True,
            node_key=self.key,
            on_unknown=node.on_unknown,
            answer_schema=answer_schema,
            notify=self.notify,
            buffer=self.scope.buffer,
            may_wait=not self.scope.is_closing,
            waits_alone=True,
        )

        async def make(_progress: StepProgress) -> StepAnswer:
            calls.made += 1
            return await call(key)

        calls.open += 1
        answer = await journalled_step(self.session, ask, make)
        calls.open -= 1
        if not under:
            calls.finished[kind] = number
            if kind == "llm":
                calls.asked.append(number)
        return answer

    @property
    def _identity(self) -> NodeIdentity:
        return self.scope.level.identity(self.preparation.node.id, self.environment.node_types)

    def keep(self) -> None:
        """Says that the model's answers so far lead to calls of tools: no attempt asks for them anew."""
        self._calls.kept = max(self._calls.asked, default=0)

    def next_key(self, kind: str) -> str:
        """The key of the next call of a kind."""
        return f"{self.key}/{kind}/{self._next(kind)}"

    def _next(self, kind: str) -> int:
        number = self._calls.finished.get(kind, 0) + 1
        while kind == "llm" and number in self._calls.spent:
            number += 1
        return number

    def new_wait(self, kind: WaitKind, step_key: str = "", label: str = "") -> Wait:
        """A wait of this node, to be filled in and handed to `answer`."""
        return new_wait(self.session, kind, step_key or self.key, self.key, label)

    def answer(self, wait: Wait, superseded: Sequence[str] = ()) -> Wait:
        """The wait under the key and label of `wait`, once it is closed.

        One that was superseded is asked anew, and so is one whose time ran out and failed the node, when the node is
        retried: under the label with a number behind it.

        Args:
            wait: As it is to be opened, where there is none yet.
            superseded: Ids of open waits that nobody needs to decide any more.

        Raises:
            Suspended: It is open; the node waits.
        """
        return closed_wait(self.session, wait, self._is_spent, superseded)

    def _is_spent(self, wait: Wait) -> bool:
        if wait.status is WaitStatus.CANCELED:
            return wait.closed_by == "superseded"
        answer: Json = wait.answer
        failed_node = wait.status is WaitStatus.EXPIRED and answer["decision"] == HANDLE_TIMEOUT
        return failed_node and wait.on_timeout == "fail" and self.session.was_used_before(wait)

    def context(self, step_key: str) -> StepContext:
        """What a function that is called in this node gets."""
        return StepContext(
            session=self.session,
            step_key=step_key,
            node_key=self.key,
            # The same in every attempt: the other side can tell a repeated call from a new one.
            idempotency_key=content_hash([self.session.run.id, step_key]),
        )

    def start_over(self, *, cut_off: bool) -> bool:
        """Makes ready for another attempt, after one that failed.

        Where a call failed, or the attempt was cut off, the answers before are good: the next attempt replays them.
        Where all calls were answered, the model's answers are what the node could not use: the next attempt asks it
        anew, from the last answer on that led to a tool's call. What a tool answered is never asked for again.

        Returns:
            Whether the failed attempt was nothing but a replay of one that an earlier Dagster run made.
        """
        calls = self._calls
        is_spent = not calls.open and not cut_off
        useless = {number for number in calls.asked if number > calls.kept} if is_spent else set[int]()
        was_told_again = bool(useless) and not calls.made
        calls.spent |= useless
        calls.finished, calls.asked = {}, []
        calls.open, calls.made, calls.kept = 0, 0, 0
        return was_told_again


PartWork = Callable[[], Awaitable[StepAnswer]]


def part_answer(end: LevelEnd, *handles: str) -> StepAnswer:
    """The answer of a pass that came to its end."""
    decision: dict[str, Json] = {"handles": list(handles), "edges": []}
    if end.state:
        decision["set"] = dict(end.state)
    return StepAnswer(output=end.output, routing_decision=decision)


def state_of(row: Step) -> Mapping[str, Json]:
    """What a pass has written to the state."""
    decision: Mapping[str, Json] = row.routing_decision or {}
    return decision.get("set", {})


class NodeType(ABC, Generic[ConfigT]):
    """One type of node: a config model, a pure preparation, and a body. Stateless; one object per process."""

    name: ClassVar[str]
    config_model: type[ConfigT]
    kinds: ClassVar[tuple[str, ...]] = ()
    """Dagster's kind tags, shown on the op."""
    is_pure: ClassVar[bool] = False
    """Instant and without effect: no `running` row is written, and no log line."""
    shows_waiting: ClassVar[bool] = False
    """Whether waiting is what the type is for: then its op shows what it waits for in an output of its own."""

    def levels(self, config: ConfigT, preparation: Preparation) -> Mapping[str, Scope]:
        """The passes of a container that are the same each time, by the step key under which their rows stand.

        A `parallel` has its branches, a `workflow` the one that is called. Pure.
        """
        return {}

    def parse(self, node: NodeSpec) -> ConfigT:
        """The node's config as its model; the document was validated before."""
        return self.config_model.model_validate(node.config)

    def describe(self, config: ConfigT) -> str:
        """One line for the op's description, where the node has none."""
        return ""

    async def load(self, config: ConfigT, session: RunSession) -> None:
        """Makes ready what `request` needs and what would hold up the event loop there; kept in the session."""
        return

    def request(self, config: ConfigT, preparation: Preparation) -> Json:
        """The rendered input: what the journal keeps and the fingerprint covers. Pure; no secret in it."""
        return None

    def read(self, config: ConfigT, preparation: Preparation) -> Json:
        """What the journal keeps as the input instead, where the request is the output already; None: the request."""
        return None

    @abstractmethod
    async def run(self, config: ConfigT, call: NodeCall) -> NodeResult:
        """Does the node's work."""


AnyNodeType = NodeType[Any]
