from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentmesh_dagster.errors import ToolError
from agentmesh_dagster.runtime.functions import FunctionRegistry, run_in_thread

MODULE = """
from __future__ import annotations
import asyncio, dataclasses, datetime, enum, functools, sys, threading
from os import system
from typing import Annotated, Any, Optional
from pydantic import BaseModel, Field
from shop_other import helper

class Level(str, enum.Enum):
    LOW = "low"
    HIGH = "high"

class Order(BaseModel):
    id: str
    amount: float = Field(ge=0)

@dataclasses.dataclass
class Receipt:
    order: Order
    at: datetime.date

def add(a: int, b: int = 2) -> int:
    return a + b

async def later(seconds: float, *, note: str = "") -> dict[str, Any]:
    await asyncio.sleep(seconds)
    return {"note": note, "loop": True}

def pay(order: Order, level: Level, when: datetime.date) -> Receipt:
    assert isinstance(order, Order) and isinstance(level, Level) and isinstance(when, datetime.date)
    return Receipt(order, when)

def schema(json: Annotated[str, Field(description="Any text")], model_config: Optional[int] = None) -> str:
    return f"{json}{model_config}"

def everything(**fields):
    return fields

def thread_name() -> str:
    return threading.current_thread().name

def fails(word: str):
    raise ValueError(f"no {word}")

def exits():
    sys.exit(3)

def positional(a, /):
    return a

def takes_object(lock: threading.Lock):
    return 1

def gives_object():
    return threading.Lock()

def gives_nan():
    return {"rows": [1.0, float("nan")]}

def wrong_type() -> int:
    return "text"

def wrapped_async(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@wrapped_async
async def decorated(a: int) -> int:
    return a

@functools.lru_cache
def cached(a: int) -> int:
    return a

def _private():
    return 1

not_a_function = Level
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_tools.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "shop_other.py").write_text("def helper():\n    return 1\n", encoding="utf-8")
    (tmp_path / "shop_broken.py").write_text("import no_such_library\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shop_tools", "shop_other", "shop_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def registry() -> FunctionRegistry:
    return FunctionRegistry(["shop_tools", "shop_broken"])


def call(registry: FunctionRegistry, name: str, value: Any = None) -> Any:
    async def body() -> Any:
        function = await registry.load(f"shop_tools:{name}")
        return await function(value)

    return asyncio.run(body())


def refused(registry: FunctionRegistry, name: str, value: Any = None) -> ToolError:
    with pytest.raises(ToolError) as caught:
        call(registry, name, value)
    return caught.value


def test_sync_and_async_functions_take_keyword_arguments(registry: FunctionRegistry) -> None:
    assert call(registry, "add", {"a": 1}) == 3
    assert call(registry, "add", {"a": 1, "b": 5}) == 6
    assert call(registry, "later", {"seconds": 0, "note": "x"}) == {"note": "x", "loop": True}
    assert call(registry, "everything", {"a": [1], "b": None}) == {"a": [1], "b": None}
    assert call(registry, "cached", {"a": 4}) == 4
    assert call(registry, "decorated", {"a": 4}) == 4


def test_annotations_give_types_and_results_become_json(registry: FunctionRegistry) -> None:
    value = {"order": {"id": "A1", "amount": 5}, "level": "high", "when": "2026-01-31"}
    assert call(registry, "pay", value) == {"order": {"id": "A1", "amount": 5.0}, "at": "2026-01-31"}


def test_sync_functions_run_beside_the_loop(registry: FunctionRegistry) -> None:
    assert call(registry, "thread_name") != threading.current_thread().name


def test_schemas_come_from_the_signature(registry: FunctionRegistry) -> None:
    add = registry.resolve("shop_tools:add")
    assert add.input_schema == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert add.output_schema == {"type": "integer"}
    odd = registry.resolve("shop_tools:schema").input_schema
    assert odd["properties"]["json"] == {"type": "string", "description": "Any text"}
    assert list(odd["properties"]) == ["json", "model_config"]
    free = registry.resolve("shop_tools:everything")
    assert (free.input_schema, free.output_schema) == (
        {"type": "object", "properties": {}, "additionalProperties": True},
        None,
    )
    pay = registry.resolve("shop_tools:pay")
    assert set(pay.input_schema["properties"]) == {"order", "level", "when"}
    assert pay.output_schema is not None
    assert pay.output_schema["required"] == ["order", "at"]


def test_parameters_with_awkward_names_work(registry: FunctionRegistry) -> None:
    assert call(registry, "schema", {"json": "x", "model_config": 1}) == "x1"


@pytest.mark.parametrize(
    ("reference", "code", "message"),
    [
        ("os:system", "function-not-allowed", "AGENTMESH_FUNCTION_MODULES"),
        ("shop_tools:system", "function-not-found", "not a function"),
        ("shop_tools:helper", "function-not-allowed", "'shop_other'"),
        ("shop_toolsx:add", "function-not-allowed", "'shop_toolsx'"),
        ("shop_tools:_private", "function-not-allowed", "private"),
        ("shop_tools:__builtins__", "function-not-allowed", "private"),
        ("shop_tools:Order.model_validate", "function-reference", "module:callable"),
        ("shop_tools.add", "function-reference", "module:callable"),
        ("../shop_tools:add", "function-reference", "module:callable"),
        ("shop_tools:missing", "function-not-found", "no function 'missing'"),
        ("shop_tools:not_a_function", "function-not-found", "not a function"),
        ("shop_broken:add", "function-not-found", "no_such_library"),
        ("shop_tools.below:add", "function-not-found", "cannot be imported"),
        ("shop_tools:positional", "function-signature", "positional-only"),
        ("shop_tools:takes_object", "function-signature", "JSON"),
    ],
)
def test_refused_references(registry: FunctionRegistry, reference: str, code: str, message: str) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        registry.resolve(reference)
    assert (caught.value.code, caught.value.category) == (code, "user")


def test_allow_list_comes_from_the_environment_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTMESH_FUNCTION_MODULES", "shop_tools, other.tools")
    registry = FunctionRegistry.from_environment(["given"])
    assert registry.modules == ("shop_tools", "other.tools", "given")
    assert [registry.allows(name) for name in ("other.tools.crm", "other", "given", "shop")] == [
        True,
        False,
        True,
        False,
    ]


def test_bad_arguments_are_named_one_per_line(registry: FunctionRegistry) -> None:
    error = refused(registry, "add", {"a": "five", "c": 1})
    assert error.code == "tool-input"
    lines = error.message.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a", "c"]
    assert "object of keyword arguments" in refused(registry, "add", [1, 2]).message


@pytest.mark.parametrize(
    ("name", "value", "code", "message"),
    [
        ("fails", {"word": "stock"}, "function-failed", "shop_tools:fails failed: ValueError: no stock"),
        ("exits", {}, "function-failed", "SystemExit: 3"),
        ("gives_object", {}, "tool-output", "returned a lock"),
        ("gives_nan", {}, "tool-output", r"result\.rows\[1\] is not a finite number"),
    ],
)
def test_failures_are_plain_errors(
    registry: FunctionRegistry, name: str, value: Any, code: str, message: str
) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        call(registry, name, value)
    assert caught.value.code == code
    assert "Traceback" not in caught.value.message
    assert caught.value.__cause__ is None


def test_threads_see_the_callers_context_and_do_not_outlive_interest() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    release = threading.Event()

    async def body() -> None:
        variable.set("seen")
        assert await run_in_thread(variable.get) == "seen"
        task = asyncio.create_task(run_in_thread(release.wait))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    hanging = [thread for thread in threading.enumerate() if thread.name == "agentmesh-function"]
    assert all(thread.daemon for thread in hanging)
    release.set()
    for thread in hanging:
        thread.join(5)
        assert not thread.is_alive()
