"""Builds the request of an `http` tool from its config, its input and secrets; sends nothing.

Values must not change what a request is. In the URL every interpolated value is percent-encoded, `/`, `?`,
`#` and `..` included; headers take no line breaks. Only a value that begins the URL is taken as it is, since
that is how a base URL is given: `{{ secret('CRM_URL') }}/orders/{{ input.id }}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote, urlencode

from jinja2 import Environment, TemplateSyntaxError

from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.tools.errors import ToolRefused
from agentmesh_dagster.specs import expressions
from agentmesh_dagster.specs.tools import HttpToolConfig

if TYPE_CHECKING:
    import httpx

__all__ = ["HttpRequest", "build_request", "checked_headers", "parse_url", "port_of", "render_url"]

_LEXER: Final = Environment(keep_trailing_newline=True, autoescape=True)
_AUTHORITY: Final = re.compile(r"https?://[^/?#]*\Z", re.IGNORECASE)
_HOST_PART: Final = re.compile(r"[A-Za-z0-9._-]+\Z")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# The client's own: a tool that sets them could smuggle a second request or reach another virtual host.
_CLIENT_HEADERS: Final = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-length",
        "host",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """A request that is ready to be sent."""

    method: str
    url: httpx.URL
    headers: tuple[tuple[str, str], ...]
    body: bytes | None


def build_request(
    config: HttpToolConfig, names: Mapping[str, object], *, tool: str, idempotency_key: str
) -> HttpRequest:
    """Renders a config.

    Args:
        config: The tool's config.
        names: What its templates see: `input`, `config` and the function `secret`.
        tool: The tool's slug, for errors.
        idempotency_key: Sent as `Idempotency-Key` where the method is not GET or HEAD, unless the config sets
            one.

    Raises:
        ExpressionError: A template fails.
        ToolRefused: A value does not fit where it stands (codes `tool-url`, `tool-header`, `tool-body`).
    """
    where = f"tool {tool!r}, field config"
    url = parse_url(render_url(config.url, names, f"{where}.url"), f"{where}.url")
    query = _pairs(expressions.render(config.query, names, where=f"{where}.query"))
    if query:
        present = url.query.decode("ascii")
        url = url.copy_with(query=f"{present}&{urlencode(query)}".removeprefix("&").encode("ascii"))
    headers = checked_headers(
        expressions.render(config.headers, names, where=f"{where}.headers"), f"{where}.headers"
    )
    given = {name.lower() for name, _ in headers}
    body: bytes | None = None
    content_type = ""
    if config.json_body is not None:
        rendered = expressions.render(config.json_body, names, where=f"{where}.json")
        body, content_type = _json(rendered, f"{where}.json").encode("utf-8", "replace"), "application/json"
    elif config.form is not None:
        form = _pairs(expressions.render(config.form, names, where=f"{where}.form"))
        body, content_type = urlencode(form).encode("ascii"), "application/x-www-form-urlencoded"
    defaults = {
        "Accept": "application/json" if config.result == "json" else "*/*",
        "User-Agent": "agentmesh-dagster",
        "Content-Type": content_type,
        "Idempotency-Key": "" if config.method in ("GET", "HEAD") else idempotency_key,
    }
    headers += [(name, text) for name, text in defaults.items() if text and name.lower() not in given]
    return HttpRequest(method=config.method, url=url, headers=tuple(headers), body=body)


def parse_url(text: str, where: str) -> httpx.URL:
    """An absolute `http` or `https` URL without a user name and password.

    Raises:
        ToolRefused: It is none (code `tool-url`). The message does not quote it: it may hold a secret.
    """
    import httpx

    problem: str
    try:
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        problem = f"is not a URL: {error}"
    else:
        if url.scheme not in ("http", "https"):
            problem = "has to begin with http:// or https://"
        elif not url.raw_host:
            problem = "names no host"
        elif url.userinfo:
            problem = "holds a user name or password: send them in the header 'Authorization'"
        else:
            return url.copy_with(fragment=None)
    raise ToolRefused(f"{where}: the URL {problem}", code="tool-url")


def port_of(url: httpx.URL) -> int:
    """The port of an `http` or `https` URL, its scheme's where it names none."""
    return url.port or (443 if url.scheme == "https" else 80)


def render_url(template: str, names: Mapping[str, object], where: str) -> str:
    """The text of a URL whose interpolated values cannot change what it addresses; see the module.

    Raises:
        ExpressionError: A template fails.
        ToolRefused: A value does not fit where it stands (code `tool-url`).
    """
    made = ""
    has_values_in_path = False
    for source, is_expression in _parts(template.strip(), where):
        if not is_expression:
            made += source
            continue
        value = expressions.render(source, names, where=where)
        if made == "":
            if not isinstance(value, str):
                raise ToolRefused(f"{where}: {source} is not text, and it begins the URL", code="tool-url")
            made = value
            continue
        text = _text(value)
        if "?" not in made and "#" not in made and (value is None or text == ""):
            raise ToolRefused(
                f"{where}: {source} is empty, which would address something else", code="tool-url"
            )
        if _AUTHORITY.match(made):
            if not _HOST_PART.match(text):
                raise ToolRefused(
                    f"{where}: {source} is a part of the host's name, and is no such name",
                    code="tool-url",
                )
            made += text
            continue
        has_values_in_path = has_values_in_path or "?" not in made
        made += quote(text, safe="", errors="replace")
    if has_values_in_path:
        path = made.partition("?")[0].partition("#")[0].partition("://")[2]
        if any(unquote(segment) in (".", "..") for segment in path.split("/")[1:]):
            raise ToolRefused(f"{where}: a segment of the path is '.' or '..'", code="tool-url")
    return made


def _parts(template: str, where: str) -> list[tuple[str, bool]]:
    """The literal text and the `{{ ... }}` of a template, in order, as written."""
    parts: list[tuple[str, bool]] = []
    inside: list[str] | None = None
    try:
        for _, kind, text in _LEXER.lex(template):
            if kind == "variable_begin":
                inside = [text]
            elif kind == "variable_end" and inside is not None:
                parts.append(("".join([*inside, text]), True))
                inside = None
            elif inside is not None:
                inside.append(text)
            elif kind == "data":
                parts.append((text, False))
            else:
                raise ToolRefused(
                    f"{where}: a URL takes {{{{ }}}} only, no {{% %}} and {{# #}}", code="tool-url"
                )
    except TemplateSyntaxError as error:
        raise ToolRefused(f"{where}: cannot be parsed: {error.message}", code="tool-url") from error
    return parts


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _pairs(values: Json) -> list[tuple[str, str]]:
    """Members for a query or a form: null is left out, a list repeats its name, an object becomes JSON."""
    pairs: list[tuple[str, str]] = []
    for name, value in cast("Mapping[str, Json]", values).items():
        items = cast("list[Json]", value) if isinstance(value, list) else [value]
        pairs.extend(
            (name, _text(item).encode("utf-8", "replace").decode()) for item in items if item is not None
        )
    return pairs


def checked_headers(values: Json, where: str) -> list[tuple[str, str]]:
    """The headers of an object of names and values; null is left out, and what is no text becomes JSON.

    Raises:
        ToolRefused: A name or value cannot be sent, or is the client's to set (code `tool-header`).
    """
    headers: list[tuple[str, str]] = []
    for name, value in cast("Mapping[str, Json]", values).items():
        if value is None:
            continue
        text = _text(value).strip(" \t")
        problem = ""
        if not _TOKEN.match(name):
            problem = "is no name of a header"
        elif name.lower() in _CLIENT_HEADERS:
            problem = "is set by the HTTP client"
        elif _CONTROL.search(text):
            problem = "holds a line break or another control character"
        elif not _is_latin1(text):
            problem = "holds characters that a header cannot carry (outside latin-1)"
        if problem:
            raise ToolRefused(f"{where}: {name!r} {problem}", code="tool-header")
        headers.append((name, text))
    return headers


def _is_latin1(text: str) -> bool:
    return all(ord(character) < 256 for character in text)


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        problem = str(error)
    raise ToolRefused(f"{where}: cannot be written as JSON: {problem}", code="tool-body")
