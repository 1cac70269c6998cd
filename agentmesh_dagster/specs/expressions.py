"""Expressions in documents: Jinja's language, parsed by Jinja, evaluated here on JSON values.

Jinja's lexer and parser give the syntax tree; `evaluator` turns the tree into closures over `sandbox`.
Jinja's own compiler is not used: the code it generates cannot bound work or memory, folds constants while
compiling, and finds attributes before keys. Statements that load or define templates, and every filter, test
and method that is not listed in `filters` and `sandbox`, do not exist here.

`{{ x }}` alone in a string gives the value with its type; with anything around it, text. A condition is a
bare expression. A value that is looked up and not calculated is shared with the given names, so results are
not to be changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

from jinja2 import TemplateSyntaxError

from agentmesh_dagster.errors import ExpressionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.specs.evaluator import Program, compile_text
from agentmesh_dagster.specs.sandbox import Evaluation, Refusal

MAX_JSON_DEPTH: Final = 100
"""Levels of lists and objects around templates."""


def render(template: Json, names: Mapping[str, object], *, where: str = "") -> Json:
    """Renders every string in a JSON value; keys of objects stay as they are.

    All its templates share one budget.

    Args:
        template: Any JSON value.
        names: What expressions may name: `input`, `steps`, `context`, `run`, `item`, ...; values are JSON,
            mappings, or functions such as `secret`.
        where: Place for errors, such as `"node 'pay', field config.input"`; the path inside `template` is
            added.

    Returns:
        A new JSON value; looked-up parts are shared with `names`.

    Raises:
        ExpressionError: An expression does not parse, is refused, names what is not there, or fails.
    """
    return _render(template, Evaluation(names), where, 0)


def _render(template: Json, state: Evaluation, where: str, depth: int) -> Json:
    if isinstance(template, str):
        if not is_template(template):
            return template
        return _run(template, False, state, where)
    if depth > MAX_JSON_DEPTH:
        raise ExpressionError(
            f"{_at(where)}nested more than {MAX_JSON_DEPTH} levels deep", code="expression-limit"
        )
    if isinstance(template, Mapping):
        items = cast("Mapping[str, Json]", template).items()
        return {key: _render(value, state, _inside(where, key), depth + 1) for key, value in items}
    if isinstance(template, (list, tuple)):
        values = cast("list[Json]", template)
        return [_render(value, state, f"{where}[{i}]", depth + 1) for i, value in enumerate(values)]
    return template


def evaluate(expression: str, names: Mapping[str, object], *, where: str = "") -> Json:
    """Evaluates a bare expression, such as a condition; arguments and errors as in `render`."""
    return _run(expression, True, Evaluation(names), where)


def check(text: str, *, bare: bool) -> None:
    """Raises `ExpressionError` when a template, or a `bare` expression, can never be evaluated."""
    if bare or is_template(text):
        _program(text, bare, "")


def references(text: str, *, bare: bool) -> frozenset[tuple[str, ...]]:
    """The dotted names that a template or expression looks up, as far as they are constant.

    `steps['a'].output.risk == input.items[0].x` gives `("steps", "a", "output", "risk")` and `("input",
    "items")`. Variables of `for`, `set` and `with` are left out, and so are the functions `range`, `dict` and
    `secret`.
    """
    return _program(text, bare, "").references if bare or is_template(text) else frozenset()


def named_values(expression: str, names: Mapping[str, object]) -> dict[str, Json]:
    """What a bare expression looks up in some names, and nothing beside it: enough to evaluate it elsewhere.

    What is not there, or is no JSON, is left out.
    """
    found: dict[str, Json] = {}
    whole: set[tuple[str, ...]] = set()
    # Sorted: what is looked up as a whole comes before its parts.
    for path in sorted(references(expression, bare=True)):
        if any(path[:depth] in whole for depth in range(1, len(path))):
            continue
        value: object = names
        place = found
        for depth, key in enumerate(path, 1):
            inner = _members(value)
            if key not in inner:
                break
            value = inner[key]
            if depth < len(path) and _members(value):
                place = place.setdefault(key, {})
                continue
            if value is None or isinstance(value, (str, int, float, list, dict)):
                place[key] = value
                whole.add(path[:depth])
            break
    return found


def _members(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def secrets_used(template: Json) -> frozenset[str]:
    """The names in all `secret('NAME')` of a JSON value."""
    found: set[str] = set()
    for text in strings_of(template):
        if is_template(text):
            found |= _program(text, False, "").secrets
    return frozenset(found)


def strings_of(template: Json) -> Iterator[str]:
    """All strings of a JSON value that `render` would look at."""
    stack: list[Json] = [template]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            stack.extend(cast("Mapping[str, Json]", value).values())
        elif isinstance(value, (list, tuple)):
            stack.extend(cast("list[Json]", value))


def is_template(text: str) -> bool:
    """Whether a string holds anything to render."""
    return "{" in text and ("{{" in text or "{%" in text or "{#" in text)


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _inside(where: str, key: str) -> str:
    return f"{where}.{key}" if where else f"field {key}"


def _run(text: str, bare: bool, state: Evaluation, where: str) -> Json:
    program = _program(text, bare, where)
    try:
        state.spend(program.cost)
        if state.variables:
            state.variables = {}
        return program.run(state)
    except Refusal as error:
        message, code = error.message, error.code
    except RecursionError:
        message, code = "it is nested too deeply", "expression-limit"
    except ZeroDivisionError:
        message, code = "division by zero", "expression-failed"
    except OverflowError:
        message, code = "a number is too large", "expression-limit"
    raise _error(text, where, message, code)


def _error(text: str, where: str, message: str, code: str) -> ExpressionError:
    # Raised outside the handlers, so that no chained error shows a value that may be a secret.
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return ExpressionError(f"{_at(where)}{message} (in {shown!r})", code=code, context={"expression": shown})


def _program(text: str, bare: bool, where: str) -> Program:
    try:
        return compile_text(text, bare)
    except TemplateSyntaxError as error:
        line = f", line {error.lineno}" if "\n" in text else ""
        message, code = f"cannot be parsed: {error.message}{line}", "expression-syntax"
    except Refusal as error:
        message, code = error.message, error.code
    except RecursionError:
        message, code = "it is nested too deeply", "expression-limit"
    except ValueError:
        message, code = "cannot be parsed: a number has too many digits", "expression-syntax"
    raise _error(text, where, message, code)
