"""What is stored, as frozen records. The store returns them, the runtime writes them; a change makes a new one.

Times are UTC with a zone. JSON values are plain Python (`dict`, `list`, `str`, `int`, `float`, `bool`, `None`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, TypeAlias

Json: TypeAlias = Any


class RunStatus(str, Enum):
    """Where a run stands."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def is_final(self) -> bool:
        """Whether nothing goes on by itself; a failed run may still be retried."""
        return self in (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELED)


class StepStatus(str, Enum):
    """Where a journalled step stands."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    WAITING = "waiting"
    CANCELED = "canceled"
    UNKNOWN = "unknown"


class RunSource(str, Enum):
    """Who or what started a run."""

    UI = "ui"
    CLI = "cli"
    API = "api"
    SCHEDULE = "schedule"
    TRIGGER = "trigger"
    WEBHOOK = "webhook"
    TEST = "test"
    NETWORK = "network"
    WORKFLOW = "workflow"
    BATCH = "batch"


@dataclass(frozen=True, kw_only=True)
class Project:
    """A namespace for definitions and runs."""

    slug: str
    name: str
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class Definition:
    """An agent, tool, workflow or network, whatever its versions say."""

    id: str
    project: str
    kind: str
    slug: str
    name: str
    type: str = "user"
    """`user`, or `system`: supplied by code, runnable and copyable, never edited or deleted."""
    description: str = ""
    category: str = ""
    tags: tuple[str, ...] = ()
    is_active: bool = True
    is_template: bool = False
    source_template_id: str | None = None
    owner: str = ""
    created_by: str = ""
    updated_by: str = ""
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None = None
    revision: int = 1
    """Grows by one with every edit: the optimistic lock."""
    latest_version: int = 0
    published_version: int | None = None
    publication_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Version:
    """One immutable version of a definition."""

    definition_id: str
    project: str
    kind: str
    slug: str
    number: int
    document: Json
    """The canonical document."""
    hash: str
    message: str = ""
    created_by: str = ""
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class Publication:
    """One row of the append-only log of what became (`publish`) or ceased to be (`unpublish`) live."""

    id: int
    project: str
    kind: str
    slug: str
    version: int
    action: str
    by: str
    at: datetime
    message: str = ""
    closure: Json = None
    """The resolved closure (see `specs.closure.Closure`), on `publish` rows."""
    closure_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """What the listing of a code location needs of a live publication: no closure."""

    publication_id: int
    project: str
    kind: str
    slug: str
    version: int
    closure_hash: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution of a workflow, network or agent; may span several Dagster runs."""

    id: str
    """The id of the first Dagster run."""
    project: str
    kind: str
    slug: str
    version: int
    publication: int
    definition_hash: str
    mode: str = "dagster"
    source: RunSource = RunSource.UI
    triggered_by: str = ""
    trigger_id: str | None = None
    parent_run_id: str | None = None
    parent_step_key: str | None = None
    dagster_run_ids: tuple[str, ...] = ()
    thread_id: str | None = None
    resource_id: str | None = None
    input: Json = None
    request_context: Json = None
    output: Json = None
    error: Json = None
    """An error as JSON (`AgentMeshError.to_json`)."""
    status: RunStatus = RunStatus.PENDING
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duration_ms: int | None = None
    suspended_at: datetime | None = None
    suspended_steps: tuple[str, ...] = ()
    resumed_at: datetime | None = None
    steps_executed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One journalled unit inside a run, under a key that is its path (`classify/llm/2`)."""

    run_id: str
    key: str
    node_id: str
    node_type: str
    node_name: str = ""
    kind: str = "node"
    """`node`, `llm`, `tool`, `route`, `item`, `iteration`, `memory` or `guardrail`."""
    parent_key: str | None = None
    predecessor_keys: tuple[str, ...] = ()
    iteration_index: int | None = None
    attempt: int = 1
    status: StepStatus = StepStatus.PENDING
    input: Json = None
    """What was asked, rendered."""
    output: Json = None
    error: Json = None
    fingerprint: str = ""
    model_used: str | None = None
    child_run_id: str | None = None
    routing_decision: Json = None
    """On node rows `{"handles": [...], "edges": [...], "set": {...}}`: the handles chosen, the numbers of the live
    outgoing edges, and what the node wrote to the state. A failed row that has one was handled (`on_error`)."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duration_ms: int | None = None
    dagster_run_id: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the row is an answer: replayed, never run again."""
        if self.status is StepStatus.FAILED:
            return self.routing_decision is not None
        return self.status in (StepStatus.SUCCEEDED, StepStatus.SKIPPED)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A structured log record of a run."""

    id: str
    at: datetime
    project: str
    run_id: str
    type: str
    """`run.started`, `step.completed`, `agent.request`, `tool.response`, ..."""
    step_key: str | None = None
    payload: Json = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Who did what to which thing, and when."""

    id: str
    at: datetime
    project: str
    actor: str
    action: str
    """`import`, `edit`, `publish`, `unpublish`, `delete`, `activate`, `deactivate`, `copy`; of runs `cancel`, `retry`,
    `decision`."""
    entity: str
    """`<kind>/<slug>` or `run/<id>`."""
    version: int | None = None
    detail: Json = None


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Which Dagster run works on a run, and until when it is believed to."""

    run_id: str
    dagster_run_id: str
    expires_at: datetime
