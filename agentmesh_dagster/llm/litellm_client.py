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

from agentmesh_dagster.errors import ModelError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.ports import ModelReply, ModelRequest, ToolOffer
from agentmesh_dagster.runtime.secrets import Redactor

__all__ = ["DEFAULT_TIMEOUT_S", "LiteLLMClient", "preload"]

DEFAULT_TIMEOUT_S: Final = 600.0
_DETAIL_SHOWN: Final = 500
_SECRET_NAME: Final = re.compile(r"key|token|secret|password|credential|auth|header", re.IGNORECASE)
_SECRET_VARIABLE: Final = re.compile(r"(API_?KEY|TOKEN|SECRET|PASSWORD|ACCESS_KEY)\w*\Z")
# A key of which a provider shows a part, as in 'Incorrect API key provided: sk-ab***yz'.
_MASKED_KEY: Final = re.compile(r"\b(sk|pk|gsk|xai|AIza)[-_]?[\w*-]*\*{3,}[\w*-]*")
# What AgentMesh decides itself.
_RESERVED: Final = frozenset(
    (
        "model",
        "messages",
        "stream",
        "stream_options",
        "n",
        "num_retries",
        "max_retries",
        "fallbacks",
        "context_window_fallback_dict",
        "response_format",
        "timeout",
        "callbacks",
        "success_callback",
        "failure_callback",
        "logger_fn",
        "acompletion",
        "mock_response",
        "caching",
    )
)
# The same, where an agent has tools.
_RESERVED_WITH_TOOLS: Final = frozenset(("tools", "functions", "function_call"))
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
        # httpx logs every URL at INFO, and some providers take the key in the URL.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        return litellm


class LiteLLMClient:
    """Calls one model at a time; without state of its own."""

    def __init__(self) -> None:
        self._litellm: Any = None

    async def complete(self, model: str, request: ModelRequest) -> ModelReply:
        """Calls a model once.

        Args:
            model: LiteLLM's name of the model.
            request: What to ask; its `models` are not looked at.

        Returns:
            The reply, with the tokens that the provider counted, and the cost by LiteLLM's price list: 0.0
            where the price is not known.

        Raises:
            ModelError: The call failed. Its code is `model-rate-limited`, `model-timeout`,
                `model-unavailable`, `model-auth`, `model-bad-request` or `model-malformed` (the answer could
                not be read); all but `model-auth` and `model-bad-request` are retryable. No key is in the
                message.
        """
        if self._litellm is None:
            self._litellm = await asyncio.to_thread(preload)
        arguments = _arguments(self._litellm, model, request)
        timeout_s = arguments["timeout"]
        failure: ModelError
        try:
            # LiteLLM's own time-out bounds each wait for the network; this one bounds the whole call.
            response = await asyncio.wait_for(self._litellm.acompletion(**arguments), timeout_s)
            return self._reply(model, response)
        except asyncio.TimeoutError:
            failure = _error(self._litellm, model, f"did not answer within {timeout_s:g} s", "model-timeout")
        except ModelError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - LiteLLM passes on errors of many libraries; none is lost
            failure = self._mapped(model, request.settings, error, timeout_s)
        # Outside the handlers: a chained error would show what was redacted.
        raise failure

    def _reply(self, model: str, response: Any) -> ModelReply:
        choices = getattr(response, "choices", None)
        if not choices or getattr(choices[0], "message", None) is None:
            raise _error(self._litellm, model, "answered without a message", "model-malformed")
        message = choices[0].message
        usage = getattr(response, "usage", None)
        text = message.content
        if text is not None and not isinstance(text, str):
            raise _error(self._litellm, model, "answered with a message that is no text", "model-malformed")
        return ModelReply(
            text=text or "",
            model=model,
            input_tokens=getattr(usage, "prompt_tokens", None) or 0,
            output_tokens=getattr(usage, "completion_tokens", None) or 0,
            cost_usd=self._cost_usd(model, response),
            finish_reason=choices[0].finish_reason or "stop",
            tool_calls=tuple(_tool_call(call) for call in getattr(message, "tool_calls", None) or ()),
        )

    def _cost_usd(self, model: str, response: Any) -> float:
        try:
            return float(self._litellm.completion_cost(completion_response=response, model=model))
        except Exception:  # noqa: BLE001 - no price is known (a local model, a new one): that fails no call
            return 0.0

    def _mapped(
        self, model: str, settings: Mapping[str, Json], error: Exception, timeout_s: float
    ) -> ModelError:
        status: object = getattr(error, "status_code", None)
        code = _code(error, status if isinstance(status, int) else None)
        if code == "model-timeout":
            return _error(self._litellm, model, f"did not answer within {timeout_s:g} s", code)
        detail = _redacted(str(getattr(error, "message", None) or error), settings)
        words = {
            "model-rate-limited": "refused the call for now (rate limit)",
            "model-auth": "refused the key: look at 'api_key' in model_settings, or the provider's variable",
            "model-bad-request": "refused the request",
            "model-malformed": "answered with what cannot be read",
            "model-unavailable": "could not be reached, or failed",
        }
        shown = f" with status {status}" if isinstance(status, int) and code != "model-malformed" else ""
        answered = status if isinstance(status, int) and _has_answered(error, code) else None
        return _error(self._litellm, model, f"{words[code]}{shown}: {detail}", code, status=answered)

    async def aclose(self) -> None:
        """Closes the connections that LiteLLM keeps for the running event loop."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()


def _arguments(litellm: Any, model: str, request: ModelRequest) -> dict[str, Any]:
    settings = dict(request.settings)
    own_timeout: Json = settings.pop("timeout_s", None)
    bounds = [float(bound) for bound in (request.timeout_s, own_timeout) if bound is not None]
    reserved = sorted(
        (_RESERVED | _RESERVED_WITH_TOOLS if request.tools else _RESERVED).intersection(settings)
    )
    if reserved:
        raise _error(
            litellm,
            model,
            f"cannot be called: model_settings may not hold {reserved[0]!r}",
            "model-bad-request",
        )
    if request.tools and not _takes_tools(litellm, model, settings):
        # LiteLLM would leave them out without a word.
        raise _error(
            litellm,
            model,
            "cannot be offered tools: LiteLLM knows no way to call tools with it; take another model, or an agent "
            "without tools",
            "model-bad-request",
        )
    messages: list[Mapping[str, Json]] = list(request.messages)
    arguments: dict[str, Any] = {
        # A parameter that a model does not know is left out: a list of models shares one set of settings.
        "drop_params": True,
        **settings,
        "model": model,
        "timeout": min(bounds, default=DEFAULT_TIMEOUT_S),
        "num_retries": 0,
        "max_retries": 0,
        "stream": False,
    }
    if request.output_schema is not None:
        schema = dict(request.output_schema)
        if _takes_schema(litellm, model, settings, bool(request.tools)):
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
    if request.idempotency_key and _provider(litellm, model, settings) == "openai":
        headers = cast("dict[str, Any]", settings.get("extra_headers") or {})
        arguments["extra_headers"] = {"Idempotency-Key": request.idempotency_key, **headers}
    arguments["messages"] = [dict(message) for message in messages]
    return arguments


def _takes_schema(litellm: Any, model: str, settings: Mapping[str, Json], has_tools: bool) -> bool:
    """Whether `response_format` may carry a schema: OpenAI-compatible servers, and models known to take one.

    For some of the others LiteLLM makes a tool of the schema, which does not go together with an agent's own.
    """
    if settings.get("api_base") or _provider(litellm, model, settings) == "openai":
        return True
    return not has_tools and bool(litellm.supports_response_schema(model=model))


def _takes_tools(litellm: Any, model: str, settings: Mapping[str, Json]) -> bool:
    """Whether LiteLLM hands tools on; of a model that it does not know, the call itself says what is wrong."""
    try:
        name, provider, _, _ = litellm.get_llm_provider(model, api_base=settings.get("api_base"))
    except Exception:  # noqa: BLE001 - an unknown model
        return True
    with warnings.catch_warnings():
        # LiteLLM imports the provider's part here, with warnings that are its own to mend.
        warnings.simplefilter("ignore")
        known = litellm.get_supported_openai_params(model=name, custom_llm_provider=provider)
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


def _provider(litellm: Any, model: str, settings: Mapping[str, Json] | None = None) -> str:
    try:
        _, provider, _, _ = litellm.get_llm_provider(model, api_base=(settings or {}).get("api_base"))
    except Exception:  # noqa: BLE001 - an unknown model: the call itself says so
        return model.partition("/")[0] if "/" in model else ""
    return str(provider)


def _error(litellm: Any, model: str, problem: str, code: str, *, status: int | None = None) -> ModelError:
    return ModelError(
        f"the model {model!r} {problem}",
        provider=_provider(litellm, model),
        model=model,
        retryable=code not in ("model-auth", "model-bad-request"),
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


def _redacted(text: str, settings: Mapping[str, Json]) -> str:
    """An error's text without keys, on one line, cut."""
    known = _secret_values(settings, False)
    known |= {
        value for name, value in os.environ.items() if len(value) >= 8 and _SECRET_VARIABLE.search(name)
    }
    text = text.partition("Traceback (most recent call last)")[0]
    text = _MASKED_KEY.sub("***", Redactor(known).redact_text(text))
    text = " ".join(text.replace("litellm.", "").split())
    return text if len(text) <= _DETAIL_SHOWN else text[: _DETAIL_SHOWN - 3] + "..."


def _secret_values(value: Json, is_secret: bool) -> set[str]:
    """Strings under names such as `api_key` or `extra_headers`, at any depth."""
    if isinstance(value, str):
        return {value} if is_secret else set()
    found: set[str] = set()
    if isinstance(value, Mapping):
        for name, item in cast("Mapping[str, Json]", value).items():
            found |= _secret_values(item, is_secret or _SECRET_NAME.search(name) is not None)
    elif isinstance(value, list):
        for item in cast("list[Json]", value):
            found |= _secret_values(item, is_secret)
    return found


def _tool_call(call: Any) -> dict[str, Json]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
