"""The one way to write a document: stored, hashed and exported in this form.

Keys of models stand in the models' order and defaults are left out. The keys of free data (metadata, JSON Schemas,
mapped inputs, outputs) and the names of branches keep the author's order: models are asked for fields in it, and
prompts and forms are written in it. An export has the same bytes from every database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import StringIO
from typing import Any, Final, cast

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.base import SpecModel
from agentmesh_dagster.specs.documents import Document, NodeSpec, ToolSpec
from agentmesh_dagster.specs.nodes import BUILTIN_NODE_CONFIGS, NodeConfig
from agentmesh_dagster.specs.tools import BUILTIN_TOOL_CONFIGS

__all__ = ["canonical", "dump_json", "dump_yaml"]


def canonical(
    document: Document,
    *,
    node_configs: Mapping[str, type[NodeConfig]] = BUILTIN_NODE_CONFIGS,
    tool_configs: Mapping[str, type[SpecModel]] = BUILTIN_TOOL_CONFIGS,
) -> dict[str, Any]:
    """The stored form of a document, as plain JSON.

    Args:
        document: A valid document. Version suffixes of references (`triage@3`) are kept.
        node_configs: Config models of the node types; a config of another type is free data.
        tool_configs: The same of the tool types.
    """
    return {"kind": document.kind, **_Writer(node_configs, tool_configs).model(document)}


class _Writer:
    def __init__(
        self, node_configs: Mapping[str, type[BaseModel]], tool_configs: Mapping[str, type[BaseModel]]
    ) -> None:
        self._node_configs = node_configs
        self._tool_configs = tool_configs

    def model(self, model: BaseModel) -> dict[str, Any]:
        """A model's set fields; `kind` is left to the caller."""
        dumped = model.model_dump(mode="json", by_alias=True)
        done: dict[str, Any] = {}
        for name, info in type(model).model_fields.items():
            value, key = getattr(model, name), info.alias or name
            if name == "kind" or (
                not info.is_required() and _same(value, info.get_default(call_default_factory=True))
            ):
                continue
            if name == "config" and isinstance(model, (NodeSpec, ToolSpec)):
                done[key] = self._config(model)
            else:
                done[key] = self._value(value, dumped[key])
        return {key: value for key, value in done.items() if key != "config" or value}

    def _config(self, owner: NodeSpec | ToolSpec) -> Json:
        known = (self._node_configs if isinstance(owner, NodeSpec) else self._tool_configs).get(owner.type)
        if known is None:
            return owner.config
        try:
            return self.model(known.model_validate(owner.config))
        except ValidationError:
            # An invalid config has no canonical form of its own; drafts are kept as they are.
            return owner.config

    def _value(self, value: object, dumped: Json) -> Json:
        if isinstance(value, BaseModel):
            return self.model(value)
        if isinstance(value, (list, tuple)):
            items = cast("list[object]", value)
            return [self._value(item, dumped[index]) for index, item in enumerate(items)]
        if isinstance(value, dict):
            # Their keys are free; models may stand under them.
            held = cast("dict[str, object]", value)
            return {key: self._value(item, dumped[key]) for key, item in held.items()}
        return dumped


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


_INVISIBLE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def dump_json(document: Mapping[str, Json]) -> str:
    """Canonical JSON text, indented, with a final line break."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # JSON allows these as they are; files do not survive them.
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def dump_yaml(document: Mapping[str, Json]) -> str:
    """Canonical YAML text, which YAML 1.1 and 1.2 read alike: what either could take for something else is quoted."""
    writer = YAML(typ="safe", pure=True)
    writer.Representer = _Representer
    writer.default_flow_style = False
    writer.allow_unicode = True
    writer.width = 1_000_000
    writer.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue] - typed by its default
    out = StringIO()
    writer.dump(document, out)  # pyright: ignore[reportUnknownMemberType] - ruamel.yaml is partly typed
    return out.getvalue()


_PLAIN: Final = re.compile(r"[^\W\d_][\w./@+-]*(?: [\w./@+(-][\w./@+();,'?!-]*)*\Z", re.ASCII)
_WORDS: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf"))
_BLOCK: Final = re.compile(r"(?!\s)[^\r\x85\u2028\u2029\ufeff\x00-\x08\x0b-\x1f\x7f-\x9f\t]*\Z")


class _Representer(SafeRepresenter):
    """Chooses how a text is written; everything else is YAML's usual way."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> ScalarNode:
        style = '"'
        if "\n" in text:
            if _BLOCK.match(text) and not any(line != line.rstrip() for line in text.split("\n")):
                style = "|"
        elif _PLAIN.match(text) and text.lower() not in _WORDS:
            style = ""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style or None)  # pyright: ignore[reportUnknownMemberType] - ruamel.yaml is partly typed

    def represent_number(self, number: float) -> ScalarNode:
        text = repr(number)
        if "e" in text and "." not in text:
            # YAML 1.1 takes 1e-07 for text.
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)  # pyright: ignore[reportUnknownMemberType] - ruamel.yaml is partly typed


_Representer.add_representer(float, _Representer.represent_number)  # pyright: ignore[reportUnknownMemberType] - ruamel.yaml is partly typed
_Representer.add_representer(str, _Representer.represent_text)  # pyright: ignore[reportUnknownMemberType] - ruamel.yaml is partly typed
