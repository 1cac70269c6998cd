"""What the runtime needs of the world, as protocols: the journal, the model client, secrets.

`agentmesh_dagster.store` and `agentmesh_dagster.llm` fulfil them; `agentmesh_dagster.testing` offers simple ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from agentmesh_dagster.records import (
    Claim,
    Entry,
    Event,
    Json,
    Lease,
    Publication,
    Run,
    RunStatus,
    Step,
    Wait,
)


class Journal(Protocol):
    """Runs and steps, durable. Safe to call from many coroutines at once; one object per process.

    Writes are grouped: calls that come in together share one commit. A call returns after the commit that holds it,
    so what a caller reports finished is stored. A call that fails wrote nothing.

    Raises:
        StoreError: The database could not be reached or refused; `retryable` says whether waiting may help.
    """

    async def bind_run(
        self,
        run: Run,
        dagster_run_id: str,
        events: Sequence[Event] = (),
        *,
        claim: str | None = None,
        lease: Lease | None = None,
    ) -> Run:
        """Stores a new run, or finds it: the stored run with `run.id`, with `dagster_run_id` among its Dagster runs.

        The events are written in the same transaction, where the Dagster run was not bound yet.

        A run that is waiting or final and is bound by a further Dagster run becomes `running` again. Where it was
        `canceled`, its waits that the cancellation closed are open again.

        Args:
            run: As it is to be stored, where it is new.
            dagster_run_id: The Dagster run.
            events: Of this binding.
            claim: The claim by which the Dagster run continues the run: it is bound in the same transaction, by
                compare-and-set. Without one, a further Dagster run withdraws a claim that nobody has bound.
            lease: Taken in the same transaction: a worker that is killed right after it is found out when the lease
                has run out, and of two that race, the loser leaves no trace on the run.

        Raises:
            RunRefused: The claim is bound to another Dagster run, or was given back meanwhile (code `claim-lost`), or
                the run is neither waiting nor failed nor canceled (code `claim-lost` too); or another process holds a
                lease that has not run out: of the same Dagster run (`second-process`), or of another one
                (`lease-held`). Nothing is written then.
        """
        ...

    async def claim(self, claim_id: str) -> Claim | None:
        """The claim of that id, or None where the store has none."""
        ...

    async def spend_claim(self, claim_id: str, dagster_run_id: str) -> None:
        """Binds a claim that was given back to the Dagster run that came too late with it, and does no more.

        So a re-execution of that Dagster run finds the claim bound, and starts a run of its own.
        """
        ...

    async def waits(self, run_id: str, node_key: str | None = None) -> tuple[Wait, ...]:
        """The waits of a run, or of one of its nodes and the steps in it, the oldest first."""
        ...

    async def run_of(self, dagster_run_id: str) -> Run | None:
        """The run that a Dagster run works on, or None where it is bound to none."""
        ...

    async def run(self, run_id: str) -> Run | None:
        """The run of that id, whether a Dagster run is bound to it or not."""
        ...

    async def published(self, project: str, kind: str, slug: str) -> Publication | None:
        """What is published of a definition now, with its closure; None where nothing is."""
        ...

    async def start_child(self, run: Run, events: Sequence[Event] = (), *, holder: str | None = None) -> Run:
        """Stores a `pending` run that no Dagster run works on yet, or finds it by its id.

        A gate sensor asks Dagster for its first Dagster run, by a claim (`start`). When it ends, the event
        `EVENT_RUN_ENDED` with its id as key is sent in its project, with the payload `{run_id, status, output, error}`.

        Raises:
            RunRefused: The holder does not hold the lease of the run that starts it any more (code `lease-lost`).
        """
        ...

    async def steps(
        self, run_id: str, keys: Collection[str] | None = None, *, needed: bool = False
    ) -> dict[str, Step]:
        """The steps of a run by key, all or those named; missing ones are left out.

        Args:
            run_id: The run.
            keys: Those asked for.
            needed: Leaves out those under a finished step (their `parent_key`'s row is finished): a finished step never
                runs again, so nothing asks for what stands under it.
        """
        ...

    async def record(self, entries: Sequence[Entry], *, holder: str | None = None) -> None:
        """Inserts or replaces the rows of steps of one run, in order and in one transaction: all of it or nothing.

        With them their events, and what they change in the run's waits; an event that was kept for a wait which is
        opened answers it at once.

        A row that becomes finished adds its tokens and cost to the run's totals, once; a `node` row that succeeded or
        failed adds one to `steps_executed`. A finished row is never replaced.

        Args:
            entries: The entries.
            holder: Who writes, as `Lease.holder` says it; here and in the other writes, None is not asked.

        Raises:
            ReplayError: The stored row is finished and differs (code `step-finished`).
            RunRefused: The holder does not hold the run's lease any more (code `lease-lost`).
        """
        ...

    async def record_events(self, events: Sequence[Event], *, holder: str | None = None) -> None:
        """Appends events.

        Raises:
            RunRefused: The holder does not hold the lease of their run any more (code `lease-lost`).
        """
        ...

    async def emit(
        self, receipt: Event, name: str, key: str, data: Json, *, keep_s: float, holder: str | None = None
    ) -> str:
        """Sends a named event in the name of a step, once.

        Args:
            receipt: The event of the sending run that says so, with its step: written in the same transaction. Where
                the run has one of that type for that step, nothing is sent.
            name: The event's name.
            key: The correlation key.
            data: The payload.
            keep_s: How long it is kept where nothing waits for it.
            holder: Who sends it, and must hold the lease of the sending run.

        Returns:
            The id of the event that was sent, now or before.

        Raises:
            ApprovalError: The payload fits none of the waits for it (code `form`), or the name is reserved.
            RunRefused: The holder does not hold it any more (code `lease-lost`).
            StoreError: Too many are kept already (code `events-full`), or name or key are none (`bad-event`).
        """
        ...

    async def finish_run(
        self,
        run_id: str,
        status: RunStatus,
        *,
        at: datetime,
        output: Json = None,
        error: Json = None,
        events: Sequence[Event] = (),
        holder: str | None = None,
    ) -> bool:
        """Moves a run that is not final to `status`, by compare-and-set, with its events.

        Args:
            run_id: The run.
            status: Where it goes.
            at: When.
            output: Stored with a final status.
            error: Stored with a final status.
            events: Of this change.
            holder: Who says so; None: not asked.

        Returns:
            Whether this call moved it; False where the run was final already (nothing is written then).

        Raises:
            RunRefused: The holder does not hold the run's lease any more (code `lease-lost`).
        """
        ...

    async def finalized(self, run_id: str, ending: int, *, holder: str | None = None) -> None:
        """Says that what a run's ending asks for (`on_failure`, `finally`) has been done."""
        ...

    async def take_lease(self, lease: Lease) -> None:
        """Takes the lease of a run for a process, or renews it. Leases are measured by the database's clock.

        Raises:
            RunRefused: Another process holds one that has not run out: of the same Dagster run (code `second-process`),
                or of another one (`lease-held`).
        """
        ...

    async def renew_lease(self, run_id: str, holder: str) -> bool:
        """Makes a lease last for its whole length again.

        Returns:
            False where the holder does not hold the run any more: another process took it, be it to report the run.
        """
        ...

    async def release_lease(self, run_id: str, holder: str) -> None:
        """Gives the lease back; nothing happens where another process holds it."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolOffer:
    """A tool that a model may ask to be called."""

    name: str
    """Letters, digits, `_` and `-`, 64 at most: what providers take."""
    description: str
    input_schema: Mapping[str, Json]
    """JSON Schema of the arguments, an object's."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One call of a model."""

    models: tuple[str, ...]
    """Tried in turn: the next one after a retryable failure."""
    messages: tuple[Mapping[str, Json], ...]
    """OpenAI chat messages: `{"role": "system" | "user" | "assistant", "content": str}`; an assistant's may have
    `tool_calls`, and each of them is answered by `{"role": "tool", "tool_call_id": id, "content": str}`."""
    settings: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Rendered `model_settings`, `temperature` and `max_tokens`; see `specs.models`."""
    output_schema: Mapping[str, Json] | None = None
    """Ask for an object of this JSON Schema."""
    tools: tuple[ToolOffer, ...] = ()
    may_call: bool = True
    """Whether the model may ask for calls now; the conversation's earlier calls need the tools named all the same."""
    timeout_s: float | None = None
    """Bound on one provider call."""
    idempotency_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelReply:
    """What a model answered."""

    text: str
    model: str
    """The model that answered, as the agent names it."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    finish_reason: str = "stop"
    tool_calls: tuple[Mapping[str, Json], ...] = ()
    """As OpenAI has them: `{"id": str, "type": "function", "function": {"name": str, "arguments": JSON text}}`."""
    failures: tuple[Mapping[str, Json], ...] = ()
    """Errors (as JSON) of the models tried before."""


class ModelClient(Protocol):
    """Calls models.

    Raises:
        ModelError: No model answered; the last model's error, with the others in its context.
    """

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Calls the first model that answers."""
        ...


class SecretProvider(Protocol):
    """Where secrets come from."""

    def get(self, name: str) -> str | None:
        """The secret of that name, or None where there is none."""
        ...
