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
    """Of a run that has ended: how long Dagster runs worked on it. Time in which it waited does not count."""
    suspended_at: datetime | None = None
    suspended_steps: tuple[str, ...] = ()
    resumed_at: datetime | None = None
    steps_executed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    retries_left: int = 0
    """How often AgentMesh itself may still retry the run after a failure (`dagster/max_retries`)."""
    worked_ms: int = 0
    """How long Dagster runs worked on it before the present one; the time between them does not count."""
    deadline_at: datetime | None = None
    """When it fails though it waits (`timeout_includes_waiting`)."""
    finalizers: str = ""
    """What its workflow runs at its end: empty, `failure` (`on_failure` alone), or `always` (`finally`, and maybe
    `on_failure`)."""
    endings: int = 0
    """How often it has come to a final status."""
    finalized: int = 0
    """The last ending whose `on_failure` and `finally` have been run, or that needed none."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One journalled unit inside a run, under a key that is its path (`classify/llm/2`)."""

    run_id: str
    key: str
    node_id: str
    node_type: str
    node_name: str = ""
    kind: str = "node"
    """`node`, `llm`, `tool`, `route`, `item`, `iteration`, `branch`, `memory` or `guardrail`."""
    parent_key: str | None = None
    predecessor_keys: tuple[str, ...] = ()
    iteration_index: int | None = None
    attempt: int = 1
    status: StepStatus = StepStatus.PENDING
    input: Json = None
    """What was asked, rendered; of a node that only computes what it read, by dotted name, bounded."""
    output: Json = None
    error: Json = None
    fingerprint: str = ""
    """A hash of what was asked; a row without `node_hash` has one of the whole closure in it too."""
    node_hash: str = ""
    """Of the node with all that it refers to; empty in rows of earlier releases."""
    entity_kind: str | None = None
    """`agent`, `tool` or `workflow`: what the step is about."""
    entity_slug: str | None = None
    model_used: str | None = None
    child_run_id: str | None = None
    routing_decision: Json = None
    """On node rows `{"handles": [...], "edges": [...], "set": {...}}`: the handles chosen, the numbers of the live
    outgoing edges, and what the node wrote to the state (as `specs.state` keeps it). A failed row that has one was
    handled (`on_error`)."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    queued_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duration_ms: int | None = None
    """How long it worked. Time in which the run waited does not count."""
    dagster_run_id: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the row is an answer: replayed, never run again."""
        if self.status is StepStatus.FAILED:
            return self.routing_decision is not None
        return self.status in (StepStatus.SUCCEEDED, StepStatus.SKIPPED)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One change of a step, as the journal writes it."""

    step: Step
    """The row as it is to stand."""
    events: tuple[Event, ...] = ()
    """Those that speak of it."""
    opened: tuple[Wait, ...] = ()
    """Waits that are added, each once (by run, step key and label), with their notices."""
    used: tuple[str, ...] = ()
    """Ids of waits whose answers are taken up: they get `used_at`, where they are closed and have none."""
    superseded: tuple[str, ...] = ()
    """Ids of waits that nobody needs to decide any more: they are canceled, where they are open. An id may stand in
    `used` too."""


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
    `decision`, `decision-refused`, `delegation`, `delegation-refused`, `launch-refused`."""
    entity: str
    """`<kind>/<slug>`, `run/<id>`, `group/<name>`; of a decision on nothing known `approval/<id as given>`."""
    version: int | None = None
    detail: Json = None


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Which process works on a run, and for how long it is believed to.

    One process at a time holds a run. Its step processes, where it has some, work under the same lease.
    """

    run_id: str
    dagster_run_id: str
    """The Dagster run that the process executes."""
    holder: str
    """The process: an id of its own, made when it opened the run."""
    length_s: float
    """How long the lease lasts when it is taken or renewed."""
    left_s: float = 0.0
    """How long it still lasted when it was read, by the database's clock; 0 or less: it has run out."""

    @property
    def is_live(self) -> bool:
        """Whether it had not run out when it was read."""
        return self.left_s > 0


class WaitKind(str, Enum):
    """What a wait waits for."""

    HUMAN = "human"
    """People, at a `human` node."""
    TOOL = "tool"
    """People, who approve a tool's call."""
    UNKNOWN = "unknown"
    """People, who say whether a call that was cut off took effect."""
    SUSPEND = "suspend"
    """Data for `suspend(...)` inside a function or a plugin's node."""
    TIMER = "timer"
    """A moment."""
    EVENT = "event"
    """A named event with a correlation key."""

    @property
    def is_approval(self) -> bool:
        """Whether people decide it, by votes."""
        return self in (WaitKind.HUMAN, WaitKind.TOOL, WaitKind.UNKNOWN)


class WaitStatus(str, Enum):
    """Where a wait stands."""

    OPEN = "open"
    DECIDED = "decided"
    """It has an answer: of people, of an event, or because its moment came."""
    EXPIRED = "expired"
    """Its deadline passed; the answer says what that means."""
    CANCELED = "canceled"
    """Nobody waits any more; `closed_by` says why."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Something that a step waits for while no worker does: a gate, a suspension, a timer, an event.

    A wait that people decide is an approval. One per run, step key and label, for ever: its answer is what a replay
    reads.
    """

    id: str
    project: str
    run_id: str
    step_key: str
    label: str = ""
    kind: WaitKind
    node_id: str = ""
    """The workflow's node that waits, or in which the step that waits stands."""
    title: str = ""
    body: str = ""
    """Markdown."""
    data: Json = None
    """Shown to those who decide; of a suspension its payload, of a tool call `{"tool": slug, "arguments": {...}}`, of
    an event with a condition `{"when": expression, "names": what it sees of the run}`."""
    options: tuple[str, ...] = ()
    """What may be decided; empty: `approved` or `rejected`."""
    multiple: bool = False
    """Whether several options may be chosen at once."""
    form_schema: Json = None
    """JSON Schema of the data given with a decision; None: any object, or nothing."""
    prefill: Json = None
    """The form's first values."""
    assignees: tuple[str, ...] = ()
    """Who may decide: names, and groups as `group:<name>`; empty: anybody."""
    required: int = 1
    """How many of them must agree."""
    ordered: bool = False
    """Whether they vote in the order in which they are listed."""
    separation: bool = False
    """Whether the run's launcher may not decide."""
    launcher: str = ""
    """Who launched the run."""
    delegations: tuple[Delegation, ...] = ()
    """Of people who may vote: to whom they have delegated that."""
    on_timeout: str = "fail"
    """`approve`, `reject`, `fail` or `route`."""
    timeout_data: Json = None
    cancel_siblings: bool = False
    binding: str = ""
    """Hash of what an approval of a tool call is given for: tool, arguments and definition."""
    event_name: str = ""
    event_key: str = ""
    notify: Json = None
    """A list of notifiers' configs as written, secrets unrendered."""
    created_at: datetime
    deadline_at: datetime | None = None
    """When it expires; of a timer, the moment itself."""
    remind_at: datetime | None = None
    """When those who may decide are reminded; None: never, or done."""
    escalate_at: datetime | None = None
    """When `escalate_to` may decide too; None: never, or done."""
    escalate_to: tuple[str, ...] = ()
    status: WaitStatus = WaitStatus.OPEN
    closed_by: str = ""
    """`decision`, `timeout`, `timer`, `event`, `sibling` (another gate's `cancel_siblings`), `run` (canceled or over),
    or `superseded` (what it was asked for no longer stands)."""
    answer: Json = None
    """Of an approval `{"decision": "approved" | "rejected" | "timeout" | option | [options], "data", "by", "at",
    "comment"}`, with `for` where a delegate voted, and `votes` where several were required; of a timer `{"decision":
    "elapsed", "at"}`; of a suspension and an event `{"decision": "received", "data", "by", "at"}`. `decision` is
    `timeout` where `on_timeout` is `fail` or `route`."""
    decided_at: datetime | None = None
    used_at: datetime | None = None
    """When a Dagster run of its run took the answer up; until then a decided wait asks for a continuation."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One person's word on an approval; every accepted one is kept."""

    by: str
    decision: Json
    """`approved`, `rejected`, an option, or a list of options where `multiple`."""
    data: Json = None
    comment: str = ""
    at: datetime
    delegator: str = ""
    """In whose place a delegate voted; empty: in the voter's own."""


@dataclass(frozen=True, kw_only=True)
class Delegation:
    """One person's vote on an approval, delegated to another."""

    by: str
    to: str
    comment: str = ""
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to continue a run once: made by the store, carried by one Dagster run as a tag."""

    id: str
    run_id: str
    reason: str
    """`gate`: something that was waited for has come; `retry`: the run failed and is retried; `resume`: somebody asked
    for it; `start`: another run started it, and it has not begun; `finalize`: it has ended, and its `on_failure` and
    `finally` are due."""
    made_at: datetime
    dagster_run_id: str | None = None
    """The Dagster run that it is bound to."""
    is_current: bool = True
    """False when it was given back, because no Dagster run had bound it in time."""


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A run that can go on and that nobody continues."""

    run_id: str
    kind: str
    slug: str
    publication: int
    definition_hash: str
    dagster_run_ids: tuple[str, ...]
    reason: str
    """As a claim's: `gate`, `retry`, `start` or `finalize`."""
    expired_claim: str | None = None
    """A claim that was made for it and that no Dagster run has bound in time."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What became of an event that was sent."""

    event_id: str
    completed: tuple[str, ...] = ()
    """The ids of the waits that it answered."""
    is_kept: bool = False
    """Whether it waits for a wait, until it expires."""
    is_duplicate: bool = False
    """Whether an event of this id was delivered before; nothing was done then."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A message to people about an approval, on its way to one notifier."""

    id: str
    wait_id: str
    project: str
    reason: str
    """`opened`, `reminder` or `escalated`."""
    channel: Json
    """The notifier's config as written, secrets unrendered: `{"type": "webhook", ...}`."""
    attempts: int = 0
    next_at: datetime | None = None
    """When it is tried next; None: sent, or given up."""
    sent_at: datetime | None = None
    error: str = ""
    """Why the last attempt failed."""
