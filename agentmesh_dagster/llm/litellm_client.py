"""Calls real models through LiteLLM; nothing else imports it.

Importing LiteLLM takes seconds, so that happens at the first call, in a thread. LiteLLM's own retries,
callbacks, telemetry, price download and logging are off: AgentMesh retries, journals and prices calls itself,
and LiteLLM's log lines may quote requests.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Mapping
from typing import Any, Final, cast

from pydantic import ValidationError

from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.llm.destinations import Destination
from agentmesh_dagster.llm.litellm_internals import guard_clients, outgoing_to
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest, ToolOffer
from agentmesh_dagster.runtime.secrets import Secrets
from agentmesh_dagster.specs.models import endpoint_word

__all__ = ["DEFAULT_TIMEOUT_S", "LiteLLMClient", "preload"]

DEFAULT_TIMEOUT_S: Final = 600.0
_DETAIL_SHOWN: Final = 200
# A key of which a provider shows a part, as in 'Incorrect API key provided: sk-ab***yz'.
_CLASS_NAMES: Final = re.compile(r"(?:(?:litellm\.)?\w+(?:Error|Exception)\s*[:-]\s*)+")
"""What LiteLLM puts in front of a provider's words: `litellm.BadRequestError: OpenAIException - `."""
_MASKED_KEY: Final = re.compile(r"\b(sk|pk|gsk|xai|AIza)[-_]?[\w*-]*\*{3,}[\w*-]*")
# Settings that are AgentMesh's own.
_OWN_SETTINGS: Final = frozenset(("timeout_s", "replies"))
_load_lock = threading.Lock()


def preload() -> Any:
    """Imports LiteLLM, and turns off what it would do unasked.

    Takes seconds the first time; safe to call again, from any thread.

    Returns:
        The module `litellm`.
    """
    with _load_lock:
        # At import LiteLLM would otherwise download a price list, and read a `.env` file into the
        # environment.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
        with warnings.catch_warnings():
            # LiteLLM's and its dependencies' deprecations are theirs to mend.
            warnings.simplefilter("ignore")
            litellm: Any = importlib.import_module("litellm")
            # Its answer types are finished at their first use, with further warnings.
            litellm.ModelResponse()
        litellm.suppress_debug_info = True
        litellm.set_verbose = False
        litellm.turn_off_message_logging = True
        # aiohttp sessions would warn when the process ends; httpx needs no closing.
        litellm.disable_aiohttp_transport = True
        for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.CRITICAL)
            logger.propagate = False
        guard_clients()
        # httpx logs every URL at INFO, and some providers take the key in the URL.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        return litellm


class LiteLLMClient:
    """Calls one model at a time.

    Args:
        secrets: For `redact`: what a provider answers may repeat a key.
    """

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._litellm: Any = None

    async def complete(self, destination: Destination, request: ModelRequest) -> ModelReply:
        """Calls a model once.

        Args:
            destination: Which model, and where it is.
            request: What to ask; its `models` are not looked at, and its settings are such as documents may make.

        Returns:
            The reply, with the tokens that the provider counted, and the cost by LiteLLM's price list: 0.0
            where the price is not known. It may repeat a key.

        Raises:
            ModelError: The call failed. Its code is `model-rate-limited`, `model-timeout`,
                `model-unavailable`, `model-auth`, `model-bad-request`, `model-malformed` (the answer could
                not be read) or `model-host` (it would have gone to a host that is not the destination's); all but
                `model-auth`, `model-bad-request` and `model-host` are retryable. No key is in the message.
        """
        if self._litellm is None:
            self._litellm = await asyncio.to_thread(preload)
        arguments = _arguments(self._litellm, destination, request)
        timeout_s = arguments["timeout"]
        failure: ModelError
        with outgoing_to(destination) as outgoing:
            try:
                # LiteLLM's own time-out bounds each wait for the network; this one bounds the whole call.
                response = await within(self._litellm.acompletion(**arguments), timeout_s)
                return self._reply(destination, response)
            except (DeadlinePassed, asyncio.TimeoutError):
                failure = _error(destination, f"did not answer within {timeout_s:g} s", "model-timeout")
            except ModelError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - LiteLLM passes on errors of many libraries; none is lost
                failure = self._mapped(destination, error, timeout_s)
        if outgoing.refused:
            failure = _error(destination, _host_problem(destination, outgoing.refused), "model-host")
        # Outside the handlers: a chained error would show what was redacted.
        raise failure

    def _reply(self, destination: Destination, response: Any) -> ModelReply:
        choices = getattr(response, "choices", None)
        if not choices or getattr(choices[0], "message", None) is None:
            raise _error(destination, "answered without a message", "model-malformed")
        message = choices[0].message
        usage = getattr(response, "usage", None)
        text = message.content
        if text is not None and not isinstance(text, str):
            raise _error(destination, "answered with a message that is no text", "model-malformed")
        return ModelReply(
            text=text or "",
            model=destination.name,
            input_tokens=getattr(usage, "prompt_tokens", None) or 0,
            output_tokens=getattr(usage, "completion_tokens", None) or 0,
            cost_usd=self._cost_usd(destination.model, response),
            finish_reason=choices[0].finish_reason or "stop",
            tool_calls=tuple(_tool_call(call) for call in getattr(message, "tool_calls", None) or ()),
        )

    def _cost_usd(self, model: str, response: Any) -> float:
        try:
            return float(self._litellm.completion_cost(completion_response=response, model=model))
        except Exception:  # noqa: BLE001 - no price is known (a local model, a new one): that fails no call
            return 0.0

    def _mapped(self, destination: Destination, error: Exception, timeout_s: float) -> ModelError:
        status: object = getattr(error, "status_code", None)
        code = _code(error, status if isinstance(status, int) else None)
        if code == "model-timeout":
            return _error(destination, f"did not answer within {timeout_s:g} s", code)
        detail = _shortened(_reason(self._secrets.redact(str(getattr(error, "message", None) or error))))
        words = {
            "model-rate-limited": "refused the call for now (rate limit)",
            "model-auth": "refused the key: look at the endpoint's 'api_key', or the provider's environment variable",
            "model-bad-request": "refused the request",
            "model-malformed": "answered with what cannot be read",
            "model-unavailable": "could not be reached, or failed",
        }
        shown = f" with status {status}" if isinstance(status, int) and code != "model-malformed" else ""
        answered = status if isinstance(status, int) and _has_answered(error, code) else None
        return _error(destination, f"{words[code]}{shown}: {detail}", code, status=answered)

    async def aclose(self) -> None:
        """Closes the connections that LiteLLM keeps for the running event loop."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()


def _arguments(litellm: Any, destination: Destination, request: ModelRequest) -> dict[str, Any]:
    own_timeout: Json = request.settings.get("timeout_s")
    settings = {name: value for name, value in request.settings.items() if name not in _OWN_SETTINGS}
    bounds = [float(bound) for bound in (request.timeout_s, own_timeout) if bound is not None]
    if request.tools and not _takes_tools(litellm, destination):
        # LiteLLM would leave them out without a word.
        raise _error(
            destination,
            "cannot be offered tools: LiteLLM knows no way to call tools with it; take another model, or an agent "
            "without tools",
            "model-bad-request",
        )
    messages: list[Mapping[str, Json]] = list(request.messages)
    arguments: dict[str, Any] = {
        # A parameter that a model does not know is left out: a list of models shares one set of settings.
        "drop_params": True,
        **settings,
        **destination.arguments,
        "model": destination.model,
        "timeout": min(bounds, default=DEFAULT_TIMEOUT_S),
        "num_retries": 0,
        "max_retries": 0,
        "stream": False,
    }
    if request.output_schema is not None:
        schema = dict(request.output_schema)
        if _takes_schema(litellm, destination, bool(request.tools)):
            arguments["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": schema},
            }
        else:
            messages.insert(0, {"role": "system", "content": _schema_text(schema)})
    if request.tools:
        arguments["tools"] = [_offer(tool) for tool in request.tools]
        # Otherwise LiteLLM imports its proxy's MCP gateway at each call with tools, whose packages are not installed.
        arguments["_skip_mcp_handler"] = True
        if not request.may_call:
            arguments["tool_choice"] = "none"
    if request.idempotency_key and destination.provider == "openai":
        headers = cast("dict[str, Any]", destination.arguments.get("extra_headers") or {})
        arguments["extra_headers"] = {"Idempotency-Key": request.idempotency_key, **headers}
    arguments["messages"] = [dict(message) for message in messages]
    return arguments


def _takes_schema(litellm: Any, destination: Destination, has_tools: bool) -> bool:
    """Whether `response_format` may carry a schema: OpenAI-compatible servers, and models known to take one.

    For some of the others LiteLLM makes a tool of the schema, which does not go together with an agent's own.
    """
    if destination.has_own_server or destination.provider == "openai":
        return True
    return not has_tools and bool(litellm.supports_response_schema(model=destination.model))


def _takes_tools(litellm: Any, destination: Destination) -> bool:
    """Whether LiteLLM hands tools on; of a model that it does not know, the call itself says what is wrong."""
    with warnings.catch_warnings():
        # LiteLLM imports the provider's part here, with warnings that are its own to mend.
        warnings.simplefilter("ignore")
        known = litellm.get_supported_openai_params(
            model=destination.model.partition("/")[2], custom_llm_provider=destination.provider
        )
    return known is None or "tools" in known


def _offer(tool: ToolOffer) -> dict[str, Json]:
    schema = dict(tool.input_schema)
    if schema.get("type") == "object":
        # OpenAI refuses an object's schema without them.
        schema.setdefault("properties", {})
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _schema_text(schema: dict[str, Any]) -> str:
    return (
        "Answer with one JSON value and nothing else: no explanation, no code fence."
        f" It has to be valid under this JSON Schema:\n{json.dumps(schema, ensure_ascii=False)}"
    )


def _error(destination: Destination, problem: str, code: str, *, status: int | None = None) -> ModelError:
    return ModelError(
        f"the model {destination.name!r} {problem}",
        provider=destination.provider,
        model=destination.name,
        retryable=code not in ("model-auth", "model-bad-request", "model-host"),
        code=code,
        context=None if status is None else {"status": status},
    )


def _has_answered(error: Exception, code: str) -> bool:
    """Whether a status is the server's: LiteLLM makes one up where no connection came about."""
    names: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        names |= {cls.__name__ for cls in type(cause).__mro__}
        cause = cause.__cause__ or cause.__context__
    return code != "model-malformed" and not names & {"APIConnectionError", "TransportError"}


def _host_problem(destination: Destination, host: str) -> str:
    allowed = ", ".join(rule.host for rule in destination.hosts)
    return (
        f"was not asked: the request, or a redirect of it, would go to {host!r}, and calls go to {allowed} only. "
        f"{endpoint_word()}"
    )


def _code(error: Exception, status: int | None) -> str:
    """The stable word for an error of LiteLLM, by the names of its classes (they derive from OpenAI's)."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, json.JSONDecodeError) or "APIResponseValidationError" in names:
        return "model-malformed"
    if "APITimeoutError" in names or "TimeoutException" in names or status in (408, 504):
        return "model-timeout"
    if "RateLimitError" in names or status == 429:
        return "model-rate-limited"
    if status in (401, 403):
        return "model-auth"
    if _is_unreadable(error):
        return "model-malformed"
    if status is not None and 400 <= status < 500 and status != 409:
        return "model-bad-request"
    return "model-unavailable"


def _is_unreadable(error: Exception) -> bool:
    """Whether the provider answered, but not with what LiteLLM could take apart; LiteLLM calls that a status 500."""
    seen: BaseException | None = error.__cause__ or error.__context__
    while seen is not None:
        # A bare `APIError` of LiteLLM's is its own finding; those of a provider's answer are of derived classes.
        is_finding = type(seen).__name__ == "APIError" and type(seen).__module__.startswith("litellm")
        if is_finding or isinstance(seen, (json.JSONDecodeError, ValidationError)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _reason(text: str) -> str:
    """What the provider says is wrong, without the names of classes and the JSON around it."""
    text = _CLASS_NAMES.sub("", text.strip())
    try:
        body: Any = json.loads(text)
    except ValueError:
        return text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = cast("dict[str, Any]", body)[key]
    return body if isinstance(body, str) else text


def _shortened(text: str) -> str:
    """A provider's text on one line, cut."""
    text = text.partition("Traceback (most recent call last)")[0]
    text = " ".join(_MASKED_KEY.sub("***", text).replace("litellm.", "").split())
    return text if len(text) <= _DETAIL_SHOWN else text[: _DETAIL_SHOWN - 3] + "..."


def _tool_call(call: Any) -> dict[str, Json]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
