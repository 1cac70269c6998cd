"""Spells foreign expressions the one way: `${x}` is `{{ x }}`, and `user_input` is `input`."""

from __future__ import annotations

import re
from typing import Final

from agentmesh_dagster.records import Json

NAMES: Final = {"user_input": "input", "userInput": "input", "loopItem": "item", "loopIndex": "index"}
"""Names in expressions, and what they are called here."""

_TOKEN: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\W\d]\w*|\s+|.""", re.DOTALL)
_SIMPLE: Final = re.compile(r"[\w.\[\]]+\Z")


def canonical_templates(value: Json) -> Json:
    """Rewrites all templates in a JSON value; text outside of expressions stays as it is."""
    if isinstance(value, str):
        return canonical_template(value)
    if isinstance(value, list):
        return [canonical_templates(item) for item in value]  # pyright: ignore[reportUnknownVariableType] - any JSON
    if isinstance(value, dict):
        return {key: canonical_templates(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType] - any JSON
    return value


def canonical_template(text: str) -> str:
    """Rewrites one template. A `$` before `{{` is a dollar sign; text that is not closed is left as it is."""
    if "{" not in text:
        return text
    parts: list[str] = []
    at = 0
    while at < len(text):
        pair = text[at : at + 2]
        if pair == "{#":
            end = text.find("#}", at + 2)
            end = len(text) if end < 0 else end + 2
            parts.append(text[at:end])
        elif pair in ("{{", "{%"):
            close = "}}" if pair == "{{" else "%}"
            inner = _inside(text, at + 2, close)
            if inner is None:
                return "".join(parts) + text[at:]
            end = at + 4 + len(inner)
            parts.append(pair + renamed(inner) + close)
        elif pair == "${" and text[at + 2 : at + 3] != "{" and (inner := _inside(text, at + 2, "}")):
            end = at + 3 + len(inner)
            parts.append(f"{{{{ {renamed(inner.strip())} }}}}")
        else:
            end = at + 1
            parts.append(text[at])
        at = end
    return "".join(parts)


def canonical_condition(text: str) -> str:
    """Rewrites one bare expression; `${x}` in it is `x`."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        inner = _inside(text, at + 2, "}") if text.startswith("${", at) else None
        if inner:
            end = at + 3 + len(inner)
            whole = not text[:at].strip() and not text[end:].strip()
            bare = inner.strip()
            parts.append(bare if whole or _SIMPLE.match(bare) else f"({bare})")
        else:
            token = _TOKEN.match(text, at)
            end = token.end() if token else len(text)
            parts.append(text[at:end])
        at = end
    return renamed("".join(parts))


def renamed(expression: str) -> str:
    """Renames whole names; attributes, keyword arguments and text in quotes stay."""
    if not any(name in expression for name in (*NAMES, "result")):
        return expression
    tokens: list[str] = _TOKEN.findall(expression)
    before = ""
    for index, token in enumerate(tokens):
        if _is_result(tokens, index):
            tokens[index] = "output"
        if token in NAMES and before != ".":
            after = "".join(tokens[index + 1 : index + 4]).lstrip()
            if not after.startswith("=") or after.startswith("=="):
                tokens[index] = NAMES[token]
        if not token.isspace():
            before = token
    return "".join(tokens)


def _is_result(tokens: list[str], index: int) -> bool:
    """Whether a name is `result` of a step: `steps.x.result`."""
    if tokens[index] != "result":
        return False
    before = tokens[max(0, index - 5) : index]
    return before[-4:-2] == ["steps", "."] and before[-1] == "." and (len(before) < 5 or before[0] != ".")


def _inside(text: str, start: int, close: str) -> str | None:
    """What stands between `start` and the closing mark; marks in quotes and in inner braces do not close."""
    depth = 0
    at = start
    while at < len(text):
        if depth == 0 and text.startswith(close, at):
            return text[start:at]
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        if token.group() == "{":
            depth += 1
        elif token.group() == "}":
            depth -= 1
        at = token.end()
    return None
