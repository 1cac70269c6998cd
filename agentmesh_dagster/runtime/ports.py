"""What the runtime needs of the world, as protocols: the journal, the model client, secrets.

`agentmesh_dagster.store` and `agentmesh_dagster.llm` fulfil them; `agentmesh_dagster.testing` offers simple ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from agentmesh_dagster.records import Event, Json, Run, RunStatus, Step


class Journal(Protocol):
    """Runs and steps, durable. Safe to call from many coroutines at once; one object per process.

    Writes are grouped: calls that come in together share one commit. A call returns after the commit that holds it,
    so what a caller reports finished is stored. A call that fails wrote nothing.

    Raises:
        StoreError: The database could not be reached or refused; `retryable` says whether waiting may help.
    """

    async def bind_run(self, run: Run, dagster_run_id: str, events: Sequence[Event] = ()) -> Run:
        """Stores a new run, or finds it: the stored run with `run.id`, with `dagster_run_id` among its Dagster runs.

        The events are written in the same transaction, where the Dagster run was not bound yet.

        A run that is final and is bound by a further Dagster run (a retry) becomes `running` again.
        """
        ...

    async def run_of(self, dagster_run_id: str) -> Run | None:
        """The run that a Dagster run works on, or None where it is bound to none."""
        ...

    async def steps(self, run_id: str, keys: Collection[str] | None = None) -> dict[str, Step]:
        """The steps of a run by key, all or those named; missing ones are left out."""
        ...

    async def record(self, step: Step, events: Sequence[Event] = ()) -> None:
        """Inserts or replaces the row of a step, with the events that speak of it, in one transaction.

        A row that becomes finished adds its tokens and cost to the run's totals, once; a `node` row that succeeded or
        failed adds one to `steps_executed`. A finished row is never replaced.

        Raises:
            ReplayError: The stored row is finished and differs (code `step-finished`).
        """
        ...

    async def record_events(self, events: Sequence[Event]) -> None:
        """Appends events."""
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
    ) -> bool:
        """Moves a run that is not final to `status`, by compare-and-set, with its events.

        Returns:
            Whether this call moved it; False where the run was final already (nothing is written then).
        """
        ...

    async def renew_lease(self, run_id: str, dagster_run_id: str, *, now: datetime, until: datetime) -> bool:
        """Takes or renews the lease of a run for a Dagster run.

        Returns:
            False where another Dagster run holds a lease that has not expired at `now`.
        """
        ...

    async def release_lease(self, run_id: str, dagster_run_id: str) -> None:
        """Gives the lease back; nothing happens where another Dagster run holds it."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One call of a model."""

    models: tuple[str, ...]
    """Tried in turn: the next one after a retryable failure."""
    messages: tuple[Mapping[str, Json], ...]
    """OpenAI chat messages: `{"role": "system" | "user" | "assistant", "content": str}`."""
    settings: Mapping[str, Json] = field(default_factory=dict[str, Any])
    """Rendered `model_settings`, `temperature` and `max_tokens`; secrets are in clear here and nowhere else."""
    output_schema: Mapping[str, Json] | None = None
    """Ask for an object of this JSON Schema."""
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
