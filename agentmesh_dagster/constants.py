"""Words that cross a border: tags, events, statuses, entry points, environment variables. Each stands here once."""

from __future__ import annotations

from typing import Final

KINDS: Final = ("agent", "tool", "workflow", "network")
DEFAULT_PROJECT: Final = "default"

# Tags of Dagster runs.
TAG_RUN_ID: Final = "agentmesh/run_id"
TAG_STATUS: Final = "agentmesh/status"
TAG_PUBLICATION: Final = "agentmesh/publication"
TAG_PROJECT: Final = "agentmesh/project"
TAG_CATEGORY: Final = "agentmesh/category"
TAG_MODEL: Final = "agentmesh/model"
TAG_SOURCE: Final = "agentmesh/source"
TAG_CLAIM: Final = "agentmesh/claim"
"""The claim by which a Dagster run continues a run; copied by a re-execution, and bound once."""
TAG_PARENT_RUN_ID: Final = "agentmesh/parent_run_id"
"""The run that started the run of a Dagster run; for people, and never trusted."""

# Reconstruction metadata of the code location.
METADATA_PUBLICATION: Final = "agentmesh/publication"
METADATA_PINNED: Final = "agentmesh/pinned"
"""The names of the pinned jobs that the code location offers, separated by commas; each ends in its publication."""

PINNED_SUFFIX: Final = "__p"
"""`<job>__p<publication>` is the job of an older publication; no slug makes such a name by itself."""
DECIDE_JOB: Final = "agentmesh_decide"
GATE_SENSOR: Final = "agentmesh_gates"
FINALIZE_JOB: Final = "agentmesh_finalize"
"""The job that runs `on_failure` and `finally` of runs that have ended."""
RESERVED_EVENTS: Final = "agentmesh."
"""Events whose name begins so are sent by AgentMesh itself alone."""
EVENT_RUN_ENDED: Final = "agentmesh.run.ended"
"""The event that the end of a run sends which another run started; its key is the id of the run that ended."""

# Environment.
ENV_DATABASE_URL: Final = "AGENTMESH_DATABASE_URL"
ENV_PROJECT: Final = "AGENTMESH_PROJECT"
ENV_DAGSTER_URL: Final = "AGENTMESH_DAGSTER_URL"
ENV_HTTP_ALLOW: Final = "AGENTMESH_HTTP_ALLOW"
ENV_FUNCTION_MODULES: Final = "AGENTMESH_FUNCTION_MODULES"
ENV_CONSOLE_LEVEL: Final = "AGENTMESH_CONSOLE_LOG_LEVEL"
ENV_SECRETS_PROVIDER: Final = "AGENTMESH_SECRETS_PROVIDER"
ENV_CAPTURE_CONTENT: Final = "AGENTMESH_CAPTURE_CONTENT"
"""`false`: no prompts, answers, arguments, results, inputs and outputs in events and in Dagster's metadata."""
ENV_FAULT: Final = "AGENTMESH_FAULT"
"""`<point>#<n>`: the process kills itself when it comes to that fault point for the n-th time. For tests."""
ENV_FAULT_LOG: Final = "AGENTMESH_FAULT_LOG"
"""A file to which every fault point that is passed is written. For tests."""

# Entry-point groups.
GROUP_NODES: Final = "agentmesh_dagster.nodes"
GROUP_DEFINITIONS: Final = "agentmesh_dagster.definitions"
GROUP_SECRETS: Final = "agentmesh_dagster.secrets"
GROUP_NOTIFIERS: Final = "agentmesh_dagster.notifiers"

# The hidden op that ends a run; no node may be called so.
FINISH_OP: Final = "agentmesh_finish"

# The ops of a nested graph that are no nodes of the document; no node may be called so.
BEGIN_OP: Final = "agentmesh_begin"
END_OP: Final = "agentmesh_end"
ITEM_OP: Final = "agentmesh_item"
INLINE_OP: Final = "agentmesh_run"

# Handles of edges.
HANDLE_ERROR: Final = "error"
HANDLE_APPROVED: Final = "approved"
HANDLE_REJECTED: Final = "rejected"
HANDLE_TIMEOUT: Final = "timeout"

# The words in an approval's `assignees` that name a group and not a person begin so.
GROUP_PREFIX: Final = "group:"
