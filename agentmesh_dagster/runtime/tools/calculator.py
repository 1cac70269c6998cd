"""Arithmetic on text, without `eval`: Python's parser gives the tree, and only known nodes are calculated.

Sizes are checked before an operation is done, so that `9**9**9` is refused at once.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentmesh_dagster.runtime.tools.errors import ToolRefused

__all__ = ["calculate"]

Number = int | float

MAX_LENGTH: Final = 500
MAX_BITS: Final = 4096
"""Size of the largest integer; more than a thousand decimal digits."""


class _Refusal(Exception):
    """The expression cannot be calculated; the text says why."""


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression.

    Args:
        expression: Numbers, `+ - * / // % **`, parentheses, the functions `abs ceil exp floor log log10 max
            min round sqrt`, and `pi` and `e`.

    Raises:
        ToolRefused: It is something else, has no finite real value, or is too large (code `tool-input`).
    """
    problem: str
    try:
        if len(expression) > MAX_LENGTH:
            raise _Refusal(f"it is longer than {MAX_LENGTH} characters")
        result = _value(ast.parse(expression.strip(), mode="eval").body)
        if isinstance(result, float) and not math.isfinite(result):
            raise _Refusal("the result is too large")
        return result
    except _Refusal as refusal:
        problem = str(refusal)
    except ZeroDivisionError:
        problem = "it divides by zero"
    except OverflowError:
        problem = "a number is too large"
    except (RecursionError, MemoryError):
        problem = "it is nested too deeply"
    except SyntaxError as error:
        problem = f"it cannot be read ({error.msg})"
    except ValueError as error:
        problem = str(error)
    raise ToolRefused(f"expression: {problem}: {expression[:100]!r}", code="tool-input")


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # pyright: ignore[reportArgumentType] - its type was looked at
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is None:
            raise _Refusal(
                f"there is no function {node.func.id!r}; known are {', '.join(sorted(_FUNCTIONS))}"
            )
        try:
            return _bounded(function(*(_value(argument) for argument in node.args)))
        except TypeError as error:
            raise _Refusal(f"{node.func.id} cannot be called so") from error
    raise _Refusal("only numbers, + - * / // % **, parentheses and a few functions are calculated")


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _Refusal("a number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise _Refusal("a number is too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > MAX_BITS and base not in (-1, 0, 1):
            raise _Refusal("a number is too large")
        if base in (-1, 0, 1):
            return base if exponent % 2 else base * base
    result: Any = base**exponent
    if isinstance(result, complex):
        raise _Refusal("a negative number has no real power with that exponent")
    return result


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 300:
        raise _Refusal("round takes a whole number of digits, at most 300")
    return round(value, digits) if digits else round(value)


_CONSTANTS: Final[Mapping[str, float]] = {"pi": math.pi, "e": math.e}
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": abs,
    "ceil": math.ceil,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "log10": math.log10,
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": math.sqrt,
}
