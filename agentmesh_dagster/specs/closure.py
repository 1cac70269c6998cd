"""The closure: a workflow with all that it reaches, at fixed versions. Stored at publishing, read by run workers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from pydantic import Field

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import AgentSpec, NetworkSpec, ToolSpec, WorkflowSpec

# Made once: `json.dumps` makes one for each call that asks for more than its defaults.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

_CONFIG_NAME = re.compile(r"\bconfig\s*\.\s*([A-Za-z_]\w*)")


class PinnedAgent(SpecModel):
    version: int
    document: AgentSpec


class PinnedTool(SpecModel):
    version: int
    document: ToolSpec


class PinnedWorkflow(SpecModel):
    version: int
    document: WorkflowSpec


class PinnedNetwork(SpecModel):
    version: int
    document: NetworkSpec


class Closure(SpecModel):
    """The root (`kind`, `slug`) stands in the map of its own kind, beside what it reaches; keys are slugs."""

    format: int = 1
    kind: str
    slug: str
    agents: dict[str, PinnedAgent] = Field(default_factory=dict)
    tools: dict[str, PinnedTool] = Field(default_factory=dict)
    workflows: dict[str, PinnedWorkflow] = Field(default_factory=dict)
    networks: dict[str, PinnedNetwork] = Field(default_factory=dict)

    @property
    def workflow(self) -> WorkflowSpec:
        """The root, of a workflow's closure."""
        return self.workflows[self.slug].document

    def document(self, kind: str, slug: str) -> AgentSpec | ToolSpec | WorkflowSpec | NetworkSpec:
        """A document that it holds.

        Raises:
            KeyError: It holds none of that kind and slug.
        """
        by_kind: dict[str, Mapping[str, PinnedAgent | PinnedTool | PinnedWorkflow | PinnedNetwork]] = {
            "agent": self.agents,
            "tool": self.tools,
            "workflow": self.workflows,
            "network": self.networks,
        }
        return by_kind[kind][slug].document

    def to_json(self) -> Json:
        """The closure as JSON; `Closure.model_validate` reads it back."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {
            "format": self.format,
            "kind": self.kind,
            "slug": self.slug,
        }

    def config_used(self, config: Mapping[str, Json]) -> dict[str, Json]:
        """The values of a deployment that its documents name as `config.NAME`, and perhaps a few that they do not."""
        text = _CANONICAL.encode(self.to_json()) if config else ""
        if "config[" in text.replace("config [", "config["):
            return dict(config)
        named = set(_CONFIG_NAME.findall(text))
        return {name: value for name, value in config.items() if name in named}

    def hash(self) -> str:
        """SHA-256 (hex) over the canonical JSON: one definition hash for all that the run may reach."""
        return content_hash(self.to_json())


def content_hash(value: Json) -> str:
    """SHA-256 (hex) over canonical JSON: keys sorted, no spaces."""
    return hashlib.sha256(_CANONICAL.encode(value).encode()).hexdigest()
