"""What a process brings to the runs that it works on: journal, model client, secrets, tools, node types, clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.deployment import Deployment
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.functions import FunctionRegistry
from agentmesh_dagster.runtime.notify.registry import find_notifier
from agentmesh_dagster.runtime.ports import Journal, ModelClient
from agentmesh_dagster.runtime.registry import node_types
from agentmesh_dagster.runtime.secrets import Secrets
from agentmesh_dagster.runtime.tools.http_client import HttpClient

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.nodes.base import NodeType
    from agentmesh_dagster.runtime.notify.base import Notifier


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One per process; all parts are safe to use from many coroutines of the process's loop."""

    journal: Journal
    models: ModelClient
    secrets: Secrets
    functions: FunctionRegistry
    http: HttpClient
    clock: Clock = field(default_factory=SystemClock)
    node_types: Mapping[str, NodeType[Any]] = field(default_factory=node_types)
    notifiers: Callable[[str], Notifier[Any]] = find_notifier
    """Gives the notifier of a name, or raises."""
    deployment: Deployment = field(default=Deployment())
    """What the documents of the project may use."""
    notify: tuple[Json, ...] = ()
    """The project's notifiers: told of every gate, besides those of its node."""
    lease_s: float = 60.0
    """How long a run's lease lasts without being renewed; it is renewed at a third of it."""
    captures_content: bool = True
    """Whether events carry prompts, answers, arguments and results, and Dagster's metadata inputs and outputs."""
