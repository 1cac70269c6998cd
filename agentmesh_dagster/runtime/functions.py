"""Python functions that documents may name: `module:callable`, from the allow-list of modules.

`code` nodes and `function` tools share this. A document comes from a person or a model, so it may name only
functions that are written in modules which the deployment allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentmesh_dagster.constants import ENV_FUNCTION_MODULES
from agentmesh_dagster.errors import ToolError
from agentmesh_dagster.records import Json
from agentmesh_dagster.runtime.step_context import StepContext
from agentmesh_dagster.runtime.tools.errors import FunctionFailed, ToolRefused

__all__ = ["Function", "FunctionRegistry", "run_in_thread", "to_json"]

_REFERENCE: Final = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)\Z", re.ASCII)
_FRAMES_SHOWN: Final = 20
_TRACEBACK_CHARS: Final = 4_000
_KEYWORD_KINDS: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that may be called, with what its signature says."""

    reference: str
    """`module:callable`."""
    call: Callable[..., Any]
    is_async: bool
    arguments: type[BaseModel]
    """Takes the input object apart; its fields are `a0`, `a1`, ... under the parameters' names as aliases."""
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    """None where the return annotation is missing, or has no JSON Schema."""
    context_parameter: str | None = None
    """The parameter that gets the step's context."""

    async def __call__(self, value: Json, context: StepContext | None = None) -> Json:
        """Calls the function with the members of an object as keyword arguments.

        A sync function runs in a thread of its own; when the caller is canceled or times out, the thread goes
        on to its end and its result is dropped.

        Args:
            value: An object, or null for none. Parameters get the types of their annotations (dates, models,
                enums).
            context: For the parameter that is annotated with `StepContext`, where there is one.

        Returns:
            What the function returned, as JSON; pydantic models, dataclasses, dates, sets and so on are
            converted.

        Raises:
            ToolRefused: The input does not fit the signature (code `tool-input`).
            FunctionFailed: The function raised (code `function-failed`), or returned what JSON cannot hold
                (`tool-output`).
        """
        keywords = self._keywords(value)
        if self.context_parameter is not None:
            keywords[self.context_parameter] = context
        failure: FunctionFailed
        try:
            if self.is_async:
                result = await self.call(**keywords)
            else:
                result = await run_in_thread(lambda: self.call(**keywords))
                if inspect.isawaitable(result):  # a plain function around an async one
                    result = await result
            return to_json(result, self.reference)
        except ToolError:
            raise
        # SystemExit: a function that calls sys.exit() must not end the worker.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the user's, and becomes the tool's error
            detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            failure = FunctionFailed(
                f"{self.reference} failed: {detail}",
                code="function-failed",
                retryable=True,
                context={"exception": type(error).__name__, "traceback": _own_frames(error)},
            )
        raise failure

    def _keywords(self, value: Json) -> dict[str, Any]:
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ToolRefused(
                f"{self.reference} takes an object of keyword arguments, not {_kind(value)}",
                code="tool-input",
            )
        try:
            parsed = self.arguments.model_validate(value)
        except ValidationError as error:
            lines = [
                f"{'.'.join(str(part) for part in problem['loc']) or 'input'}: {problem['msg']}"
                for problem in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            message = "\n".join(lines)
        else:
            fields = self.arguments.model_fields
            given = {
                str(fields[name].alias): getattr(parsed, name)
                for name in fields
                if name in parsed.model_fields_set
            }
            return {**given, **(parsed.model_extra or {})}
        raise ToolRefused(message, code="tool-input")


def _own_frames(error: BaseException) -> str:
    """Where a function failed, from its own first frame on; bounded."""
    frames = error.__traceback__
    while (
        frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__
    ):
        frames = frames.tb_next
    shown = "".join(traceback.format_exception(type(error), error, frames, limit=_FRAMES_SHOWN, chain=False))
    return shown[-_TRACEBACK_CHARS:]


class FunctionRegistry:
    """Finds functions by reference; one per process or project.

    Args:
        modules: Allowed modules; each allows the modules below it too (`my.tools` allows `my.tools.crm`).
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        self.modules: tuple[str, ...] = tuple(dict.fromkeys(name.strip() for name in modules if name.strip()))
        self._found: dict[str, Function] = {}

    @classmethod
    def from_environment(cls, modules: Iterable[str] = ()) -> FunctionRegistry:
        """Allows the modules in `AGENTMESH_FUNCTION_MODULES` (separated by commas), and those given."""
        return cls([*os.environ.get(ENV_FUNCTION_MODULES, "").split(","), *modules])

    def resolve(self, reference: str) -> Function:
        """Imports the module if need be and returns the function. The first call may be slow; see `load`.

        Raises:
            ToolRefused: The reference is malformed (code `function-reference`), not allowed
                (`function-not-allowed`), leads to no function (`function-not-found`), or its signature cannot
                be called with JSON (`function-signature`).
        """
        found = self._found.get(reference)
        if found is None:
            found = self._found[reference] = self._resolve(reference)
        return found

    async def load(self, reference: str) -> Function:
        """As `resolve`, with the import in a thread."""
        found = self._found.get(reference)
        return found if found is not None else await run_in_thread(lambda: self.resolve(reference))

    def allows(self, module: str) -> bool:
        """Whether functions written in that module may be called."""
        return any(module == allowed or module.startswith(allowed + ".") for allowed in self.modules)

    def _resolve(self, reference: str) -> Function:
        parts = _REFERENCE.match(reference)
        if parts is None:
            raise ToolRefused(
                f"{reference!r} is not a function: write 'module:callable', such as 'shop.tools:find_order'",
                code="function-reference",
            )
        module_name, name = parts.groups()
        if name.startswith("_"):
            raise ToolRefused(
                f"{reference!r} is private: only public functions are called", code="function-not-allowed"
            )
        self._check_allowed(module_name, reference)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ToolRefused(
                f"the module of {reference!r} cannot be imported: {type(error).__name__}: {error}",
                code="function-not-found",
            ) from error
        candidate = getattr(module, name, None)
        if candidate is None:
            raise ToolRefused(
                f"the module {module_name!r} has no function {name!r}", code="function-not-found"
            )
        written = inspect.unwrap(candidate) if callable(candidate) else candidate
        if not inspect.isfunction(written):
            raise ToolRefused(
                f"{reference!r} is {_kind(candidate)}, not a function: write a function that uses it",
                code="function-not-found",
            )
        if written.__module__ != module_name:
            # `from os import system` in an allowed module does not allow `os`.
            self._check_allowed(written.__module__, reference)
        return _describe(reference, cast("Callable[..., Any]", candidate))

    def _check_allowed(self, module: str, reference: str) -> None:
        if not self.allows(module):
            allowed = f"allowed are {', '.join(self.modules)}" if self.modules else "no module is allowed yet"
            raise ToolRefused(
                f"functions of the module {module!r} may not be called ({reference!r}; {allowed}): add it to"
                f" {ENV_FUNCTION_MODULES} (module names, separated by commas) where runs execute",
                code="function-not-allowed",
                context={"module": module},
            )


def _describe(reference: str, function: Callable[..., Any]) -> Function:
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise ToolRefused(
            f"the signature of {reference!r} cannot be read: {error}", code="function-signature"
        ) from error
    fields: dict[str, Any] = {}
    takes_more = False
    context_parameter: str | None = None
    for index, parameter in enumerate(signature.parameters.values()):
        annotation = hints.get(parameter.name, Any)
        if annotation is StepContext and parameter.kind in _KEYWORD_KINDS:
            context_parameter = parameter.name
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            takes_more = True
        elif parameter.kind in _KEYWORD_KINDS:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[f"a{index}"] = (annotation, Field(default=default, alias=parameter.name))
        elif (
            parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            and parameter.default is inspect.Parameter.empty
        ):
            raise ToolRefused(
                f"{reference!r} cannot be called: its parameter {parameter.name!r} is positional-only,"
                " and arguments are given by name",
                code="function-signature",
            )
    config = ConfigDict(
        extra="allow" if takes_more else "forbid", validate_by_name=False, validate_by_alias=True
    )
    try:
        arguments = create_model("Arguments", __config__=config, **fields)
        input_schema = _without_titles(arguments.model_json_schema(mode="validation"))
    except (PydanticUserError, PydanticSchemaGenerationError) as error:
        raise ToolRefused(
            f"{reference!r} takes what JSON cannot give: {str(error).splitlines()[0]}",
            code="function-signature",
        ) from error
    input_schema.setdefault("properties", {})
    return Function(
        reference=reference,
        call=function,
        is_async=inspect.iscoroutinefunction(function),
        arguments=arguments,
        input_schema=input_schema,
        output_schema=_output_schema(hints),
        context_parameter=context_parameter,
    )


def _output_schema(hints: Mapping[str, Any]) -> dict[str, Any] | None:
    if "return" not in hints or hints["return"] is Any:
        return None
    try:
        return _without_titles(TypeAdapter(hints["return"]).json_schema(mode="serialization"))
    except (PydanticUserError, PydanticSchemaGenerationError):
        # A class that pydantic does not know may still turn into JSON; then nothing is promised about it.
        return None


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the titles that pydantic makes up from names (`a0` here)."""

    def clean(value: Any, is_schema: bool) -> Any:
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            names = {"properties", "$defs", "patternProperties"}
            return {
                key: item
                if key in ("default", "const", "enum", "examples") and is_schema
                else clean(item, not (is_schema and key in names))
                for key, item in members.items()
                if not (is_schema and key == "title" and isinstance(item, str))
            }
        if isinstance(value, list):
            return [clean(item, is_schema) for item in cast("list[Any]", value)]
        return value

    return clean(schema, True)


def to_json(value: object, source: str) -> Json:
    """A value as plain JSON.

    Args:
        value: JSON, or what pydantic converts to it (models, dataclasses, dates, decimals, sets, enums,
            bytes, ...).
        source: Who made the value, for the error.

    Raises:
        FunctionFailed: JSON cannot hold it, NaN and infinities included (code `tool-output`).
    """
    problem: str
    try:
        converted = to_jsonable_python(value)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0]
    else:
        place = _not_finite(converted, "result")
        if place is None:
            return converted
        problem = f"{place} is not a finite number"
    raise FunctionFailed(
        f"{source} returned {_kind(value)} that cannot be written as JSON: {problem}",
        code="tool-output",
        answer_lost=True,
    )


def _not_finite(value: Any, path: str) -> str | None:
    if isinstance(value, float):
        return None if value - value == 0 else path
    if isinstance(value, dict):
        pairs = ((f"{path}.{key}", item) for key, item in cast("dict[str, Any]", value).items())
    elif isinstance(value, list):
        pairs = ((f"{path}[{index}]", item) for index, item in enumerate(cast("list[Any]", value)))
    else:
        return None
    return next((found for place, item in pairs if (found := _not_finite(item, place)) is not None), None)


def _kind(value: object) -> str:
    return f"{'an' if type(value).__name__[0] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"


async def run_in_thread(work: Callable[[], Any]) -> Any:
    """Runs blocking work in a daemon thread of its own, with the caller's context variables.

    Not the loop's thread pool: that is small, shared with name resolution, and waited for when the process
    ends, so that a few functions that hang would stop everything.

    Returns:
        What `work` returned.

    Raises:
        BaseException: What `work` raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def body() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (context.run(work), None)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=body, name="agentmesh-function", daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result
