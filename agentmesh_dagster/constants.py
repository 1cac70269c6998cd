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

# Reconstruction metadata of the code location.
METADATA_PUBLICATION: Final = "agentmesh/publication"

# Environment.
ENV_DATABASE_URL: Final = "AGENTMESH_DATABASE_URL"
ENV_PROJECT: Final = "AGENTMESH_PROJECT"
ENV_DAGSTER_URL: Final = "AGENTMESH_DAGSTER_URL"
ENV_HTTP_ALLOW: Final = "AGENTMESH_HTTP_ALLOW"
ENV_FUNCTION_MODULES: Final = "AGENTMESH_FUNCTION_MODULES"
ENV_CONSOLE_LEVEL: Final = "AGENTMESH_CONSOLE_LOG_LEVEL"
ENV_SECRETS_PROVIDER: Final = "AGENTMESH_SECRETS_PROVIDER"

# Entry-point groups.
GROUP_NODES: Final = "agentmesh_dagster.nodes"
GROUP_DEFINITIONS: Final = "agentmesh_dagster.definitions"
GROUP_SECRETS: Final = "agentmesh_dagster.secrets"

# The hidden op that ends a run; no node may be called so.
FINISH_OP: Final = "agentmesh_finish"

# Handles of edges.
HANDLE_ERROR: Final = "error"
