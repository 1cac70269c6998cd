"""The configs of the built-in tool types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentmesh_dagster.specs.base import Duration, SpecModel, Template


class HttpToolConfig(SpecModel):
    """An HTTP request; in its templates `input` is the tool's input and `secret('NAME')` a secret."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"] = "GET"
    url: Annotated[str, Template()]
    query: Annotated[dict[str, Any], Template()] = Field(default_factory=dict)
    headers: Annotated[dict[str, Any], Template()] = Field(default_factory=dict)
    json_body: Annotated[Any, Template()] = Field(default=None, alias="json")
    form: Annotated[dict[str, Any] | None, Template()] = None
    timeout_s: Duration = Field(default=30.0, gt=0, le=3600)
    retries: int = Field(default=2, ge=0, le=10)
    max_bytes: int = Field(default=1_000_000, ge=1, le=100_000_000)
    result: Literal["auto", "json", "text"] = "auto"

    @model_validator(mode="after")
    def _one_body(self) -> HttpToolConfig:
        if self.json_body is not None and self.form is not None:
            raise ValueError("give either 'json' or 'form'")
        return self


class FunctionToolConfig(SpecModel):
    """A Python function, `module:callable`, from the allow-list of modules."""

    function: str


class BuiltinToolConfig(SpecModel):
    """A function that comes with AgentMesh."""

    name: Literal["calculator", "now", "generate_id", "json_path"]


BUILTIN_TOOL_CONFIGS: dict[str, type[SpecModel]] = {
    "http": HttpToolConfig,
    "function": FunctionToolConfig,
    "builtin": BuiltinToolConfig,
}
