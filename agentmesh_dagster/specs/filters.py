"""The filters and tests of expressions: Jinja's names, on JSON values, paid for from the evaluation's budget.

Left out on purpose: `attr` (reaches Python attributes), `random` (a replay would differ), and the HTML
filters that mark text as safe or take quadratic time. `int` and `float` refuse what is not a number unless a
default is given.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from jinja2 import filters as jinja_filters

from agentmesh_dagster.records import Json
from agentmesh_dagster.specs import sandbox
from agentmesh_dagster.specs.sandbox import (
    Evaluation,
    Group,
    Missing,
    Refusal,
    bounded,
    items_of,
    kind_of,
    lookup_path,
    to_text,
)

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

FILTERS: Final[dict[str, Function]] = {}
"""By name: called with the evaluation, the value, and the filter's arguments."""
TESTS: Final[dict[str, Function]] = {}
"""By name: called with the evaluation, the value, and the test's arguments."""
TAKES_MISSING: Final = frozenset(("default", "d", "defined", "undefined"))
"""Filters and tests that may be given a name or key that is not there."""


def _filter(*names: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        for name in names:
            FILTERS[name] = function
        return function

    return register


def apply_filter(state: Evaluation, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Applies one filter; unknown names and wrong arguments or values are `Refusal`s that show no value."""
    return _apply(FILTERS, "filter", state, name, value, args, kwargs)


def apply_test(state: Evaluation, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Applies one test."""
    return bool(_apply(TESTS, "test", state, name, value, args, kwargs))


def _apply(
    table: dict[str, Function],
    word: str,
    state: Evaluation,
    name: str,
    value: Any,
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    function = table.get(name)
    if function is None:
        raise Refusal(unknown(word, name), "expression-refused")
    if isinstance(value, Missing) and name not in TAKES_MISSING:
        raise value.refusal()
    state.spend(2 + (len(value) >> 4 if isinstance(value, str) else 0))
    try:
        return function(state, value, *args, **kwargs)
    except (TypeError, ValueError, AttributeError):
        raise Refusal(
            f"the {word} {name!r} cannot be applied to {kind_of(value)} with these arguments"
        ) from None


def unknown(word: str, name: str) -> str:
    """The sentence for an unknown or refused filter or test."""
    return (
        f"there is no {word} {name!r}; known are {', '.join(sorted(FILTERS if word == 'filter' else TESTS))}"
    )


def _text(state: Evaluation, value: Any) -> str:
    return to_text(state, value)


def _number(value: Any) -> Any:
    if not isinstance(value, (int, float)):
        raise Refusal(f"{kind_of(value)} is not a number")
    return value


def _getter(state: Evaluation, attribute: str | int | None, default: Any = None) -> Callable[[Any], Any]:
    """Gives an item, or what it holds under a dotted path; a missing one is refused without a default."""

    def get(item: Any) -> Any:
        state.spend(2)
        if attribute is None:
            return item
        found = lookup_path(item, attribute)
        if isinstance(found, Missing):
            if default is None:
                raise found.refusal()
            return default
        return found

    return get


def _fold(state: Evaluation, value: Any, case_sensitive: bool) -> Any:
    """What a value is sorted and grouped by: text without case unless asked for, numbers."""
    if isinstance(value, str):
        state.spend(1 + (len(value) >> 6))
        return value if case_sensitive else value.lower()
    if isinstance(value, (int, float)):
        return value
    raise Refusal(f"cannot order by {kind_of(value)}")


def _identity(state: Evaluation, value: Any, case_sensitive: bool) -> Any:
    """A hashable stand-in for a value, equal for equal values."""
    if isinstance(value, str):
        return ("text", _fold(state, value, case_sensitive))
    if isinstance(value, bool) or value is None:
        return ("word", value)
    return ("number", value) if isinstance(value, (int, float)) else ("json", sandbox.dump(state, value))


# Text -------------------------------------------------------------------------------------------------------


def _plain_text_filter(name: str, function: Callable[[str], Any], cost: float = 1 / 16) -> None:
    """A filter of text alone; `cost` is in steps for each character."""

    def apply(state: Evaluation, value: Any) -> Any:
        text = _text(state, value)
        state.spend(int(len(text) * cost))
        result = function(text)
        return state.made(result) if isinstance(result, str) else result

    FILTERS[name] = apply


def _title(text: str) -> str:
    return jinja_filters.do_title(text)


_plain_text_filter("upper", str.upper)
_plain_text_filter("lower", str.lower)
_plain_text_filter("capitalize", str.capitalize)
_plain_text_filter("title", _title, 1)
_plain_text_filter("wordcount", lambda text: len(text.split()))
_plain_text_filter("string", str)
_plain_text_filter("escape", html.escape)
_plain_text_filter("e", html.escape)


@_filter("trim")
def _trim(state: Evaluation, value: Any, chars: str | None = None) -> str:
    text = _text(state, value)
    if chars is not None:
        state.spend(len(text) * len(chars) >> 12)
    return state.made(text.strip(chars))


@_filter("replace")
def _replace(state: Evaluation, value: Any, old: str, new: str, count: int | None = None) -> str:
    return sandbox.replace_text(state, _text(state, value), old, new, -1 if count is None else count)


@_filter("center")
def _center(state: Evaluation, value: Any, width: int = 80) -> str:
    text = _text(state, value)
    state.reserve(max(len(text), width))
    return text.center(width)


@_filter("indent")
def _indent(
    state: Evaluation, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    text = _text(state, value)
    wide = len(width) if isinstance(width, str) else width
    state.spend(len(text) >> 2)
    state.reserve(len(text) + wide * (text.count("\n") + 2))
    return jinja_filters.do_indent(text, width, first, blank)


@_filter("truncate")
def _truncate(
    state: Evaluation, value: Any, length: int = 255, killwords: bool = False, end: str = "..."
) -> str:
    text = _text(state, value)
    if len(text) <= length:
        return text
    state.spend(4)
    kept = text[: max(length - len(end), 0)]
    return state.made((kept if killwords else kept.rsplit(" ", 1)[0]) + end)


@_filter("format")
def _format(state: Evaluation, value: Any, *args: Any, **kwargs: Any) -> str:
    return sandbox.format_percent(state, _text(state, value), kwargs or list(args))


@_filter("join")
def _join(state: Evaluation, value: Any, separator: str = "", attribute: str | int | None = None) -> str:
    get = _getter(state, attribute)
    return sandbox.join_text(state, [get(item) for item in items_of(state, value)], to_text(state, separator))


@_filter("urlencode")
def _urlencode(state: Evaluation, value: Any) -> str:
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        value = [(key, to_text(state, item)) for key, item in pairs]
        state.spend(sum(len(key) + len(item) for key, item in value))
    else:
        value = _text(state, value)
        state.spend(len(value) >> 1)
    return state.made(jinja_filters.do_urlencode(value))


@_filter("tojson")
def _tojson(state: Evaluation, value: Any, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= 8:
        raise Refusal("the indent of tojson is 0 to 8", "expression-limit")
    return sandbox.dump(state, value, indent)


@_filter("fromjson")
def _fromjson(state: Evaluation, value: Any) -> Json:
    if not isinstance(value, str):
        raise TypeError
    state.reserve(len(value))
    state.spend(len(value) >> 2)
    try:
        return sandbox.to_json(state, json.loads(value))
    except json.JSONDecodeError as error:
        raise Refusal(
            f"the text is not JSON ({error.msg}, line {error.lineno} column {error.colno})"
        ) from None
    except RecursionError:
        raise Refusal("the JSON text is nested too deeply", "expression-limit") from None


# Numbers ----------------------------------------------------------------------------------------------------


@_filter("abs")
def _abs(state: Evaluation, value: Any) -> Any:
    return abs(_number(value))


@_filter("round")
def _round(state: Evaluation, value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 30:
        raise Refusal("the precision of round is at most 30", "expression-limit")
    state.spend(4)
    return bounded(
        state, jinja_filters.do_round(bounded(state, _number(value)), precision, cast("Any", method))
    )


@_filter("filesizeformat")
def _filesizeformat(state: Evaluation, value: Any, binary: bool = False) -> str:
    state.spend(12)
    return jinja_filters.do_filesizeformat(bounded(state, _number(value)), binary)


_REQUIRED: Final = object()


@_filter("int")
def _int(state: Evaluation, value: Any, default: Any = _REQUIRED, base: int = 10) -> Any:
    try:
        if isinstance(value, str):
            if len(value) > 1000:
                raise ValueError
            state.spend(4)
            try:
                return bounded(state, int(value, base))
            except ValueError:
                return int(float(value))
        return int(value)
    except (TypeError, ValueError, OverflowError):
        if default is _REQUIRED:
            raise Refusal(f"{kind_of(value)} is not an integer; give a default: int(0)") from None
        return default


@_filter("float")
def _float(state: Evaluation, value: Any, default: Any = _REQUIRED) -> Any:
    try:
        if isinstance(value, str) and len(value) > 1000:
            raise ValueError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        if default is _REQUIRED:
            raise Refusal(f"{kind_of(value)} is not a number; give a default: float(0)") from None
        return default


# Lists and objects ------------------------------------------------------------------------------------------


@_filter("default", "d")
def _default(state: Evaluation, value: Any, default: Any = "", boolean: bool = False) -> Any:
    return default if isinstance(value, Missing) or (boolean and not value) else value


@_filter("length", "count")
def _length(state: Evaluation, value: Any) -> int:
    return len(value)


@_filter("first")
def _first(state: Evaluation, value: Any) -> Any:
    items = items_of(state, value)
    return items[0] if items else Missing("the list", 0, items)


@_filter("last")
def _last(state: Evaluation, value: Any) -> Any:
    items = items_of(state, value)
    return items[-1] if items else Missing("the list", -1, items)


@_filter("list")
def _list(state: Evaluation, value: Any) -> list[Any]:
    return items_of(state, value)


@_filter("items")
def _items(state: Evaluation, value: Any) -> list[Any]:
    return sandbox.call_method(state, value, "items", [], {}, "the value")


@_filter("dictsort")
def _dictsort(
    state: Evaluation, value: Any, case_sensitive: bool = False, by: str = "key", reverse: bool = False
) -> list[Any]:
    if by not in ("key", "value"):
        raise Refusal("dictsort sorts by 'key' or 'value'")
    place = 0 if by == "key" else 1
    pairs = _items(state, value)
    return _ordered(state, pairs, lambda pair: _fold(state, pair[place], case_sensitive), reverse)


def _ordered(state: Evaluation, items: list[Any], key: Callable[[Any], Any], reverse: bool) -> list[Any]:
    state.spend(len(items) * max(len(items).bit_length(), 1))
    try:
        return sorted(items, key=key, reverse=reverse)
    except TypeError:
        raise Refusal("cannot order numbers and text together") from None


@_filter("sort")
def _sort(
    state: Evaluation,
    value: Any,
    reverse: bool = False,
    case_sensitive: bool = False,
    attribute: str | int | None = None,
) -> list[Any]:
    paths = attribute.split(",") if isinstance(attribute, str) else [attribute]
    getters = [_getter(state, path) for path in paths]

    def key(item: Any) -> Any:
        return [_fold(state, get(item), case_sensitive) for get in getters]

    return _ordered(state, items_of(state, value), key, reverse)


@_filter("unique")
def _unique(
    state: Evaluation, value: Any, case_sensitive: bool = False, attribute: str | int | None = None
) -> list[Any]:
    get = _getter(state, attribute)
    seen: dict[Any, Any] = {}
    for item in items_of(state, value):
        seen.setdefault(_identity(state, get(item), case_sensitive), item)
    return list(seen.values())


@_filter("groupby")
def _groupby(
    state: Evaluation, value: Any, attribute: str | int, default: Any = None, case_sensitive: bool = False
) -> list[Group]:
    get = _getter(state, attribute, default)
    items = _ordered(
        state, items_of(state, value), lambda item: _fold(state, get(item), case_sensitive), False
    )
    groups: dict[Any, Group] = {}
    for item in items:
        found = get(item)
        groups.setdefault(_fold(state, found, case_sensitive), Group(found, [])).list.append(item)
    return list(groups.values())


def _extreme(
    state: Evaluation, value: Any, largest: bool, case_sensitive: bool, attribute: str | int | None
) -> Any:
    get = _getter(state, attribute)
    items = items_of(state, value)
    if not items:
        return Missing("the list", 0, items)
    try:
        return (max if largest else min)(items, key=lambda item: _fold(state, get(item), case_sensitive))
    except TypeError:
        raise Refusal("cannot order numbers and text together") from None


@_filter("min")
def _min(
    state: Evaluation, value: Any, case_sensitive: bool = False, attribute: str | int | None = None
) -> Any:
    return _extreme(state, value, False, case_sensitive, attribute)


@_filter("max")
def _max(
    state: Evaluation, value: Any, case_sensitive: bool = False, attribute: str | int | None = None
) -> Any:
    return _extreme(state, value, True, case_sensitive, attribute)


@_filter("sum")
def _sum(state: Evaluation, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    get = _getter(state, attribute)
    total = bounded(state, _number(start))
    for item in items_of(state, value):
        number = get(item)
        # Exact types are the common case; the sum of bounded integers pays as it grows.
        total += number if type(number) is float else bounded(state, _number(number))
    return bounded(state, total)


@_filter("reverse")
def _reverse(state: Evaluation, value: Any) -> Any:
    return state.made(value[::-1]) if isinstance(value, str) else items_of(state, value)[::-1]


@_filter("batch")
def _batch(state: Evaluation, value: Any, linecount: int, fill_with: Any = None) -> list[Any]:
    items = items_of(state, value)
    state.reserve_items(len(items) + linecount)
    rows = [items[start : start + linecount] for start in range(0, len(items), linecount)]
    if fill_with is not None and rows:
        rows[-1] += [fill_with] * (linecount - len(rows[-1]))
    return rows


@_filter("slice")
def _slice(state: Evaluation, value: Any, slices: int, fill_with: Any = None) -> list[Any]:
    items = items_of(state, value)
    state.reserve_items(len(items) + slices)
    size, longer = divmod(len(items), slices)
    columns: list[list[Any]] = []
    start = 0
    for number in range(slices):
        end = start + size + (number < longer)
        columns.append(
            items[start:end] + ([fill_with] if fill_with is not None and number >= longer > 0 else [])
        )
        start = end
    return columns


@_filter("map")
def _map(state: Evaluation, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
    items = items_of(state, value)
    if not args and "attribute" in kwargs:
        return [_getter(state, **kwargs)(item) for item in items]
    name, rest = args[0], list(args[1:])
    state.spend(3 * len(items))
    return [_present(apply_filter(state, name, item, rest, kwargs)) for item in items]


def _present(value: Any) -> Any:
    if isinstance(value, Missing):
        raise value.refusal()
    return value


def _chosen(
    state: Evaluation, value: Any, keep: bool, by_attribute: bool, args: tuple[Any, ...]
) -> list[Any]:
    items = items_of(state, value)
    state.spend(len(items))
    rest = list(args)
    attribute: Any = rest.pop(0) if by_attribute else None
    if isinstance(attribute, str) and attribute.startswith("__"):
        raise Refusal(
            f"names that begin with two underscores are refused: {attribute[:40]!r}", "expression-refused"
        )
    name: Any = rest.pop(0) if rest else None

    def holds(item: Any) -> bool:
        subject = lookup_path(item, attribute) if by_attribute else item
        if name is None:
            # A key that is not there is undefined, and so not true.
            return not isinstance(subject, Missing) and bool(subject)
        return apply_test(state, name, subject, rest, {})

    return [item for item in items if holds(item) is keep]


@_filter("select")
def _select(state: Evaluation, value: Any, *args: Any) -> list[Any]:
    return _chosen(state, value, True, False, args)


@_filter("reject")
def _reject(state: Evaluation, value: Any, *args: Any) -> list[Any]:
    return _chosen(state, value, False, False, args)


@_filter("selectattr")
def _selectattr(state: Evaluation, value: Any, attribute: str | int, *args: Any) -> list[Any]:
    return _chosen(state, value, True, True, (attribute, *args))


@_filter("rejectattr")
def _rejectattr(state: Evaluation, value: Any, attribute: str | int, *args: Any) -> list[Any]:
    return _chosen(state, value, False, True, (attribute, *args))


# Tests ------------------------------------------------------------------------------------------------------


def _not_less(state: Evaluation, left: Any, right: Any) -> bool:
    return not sandbox.less(state, left, right)


def _more(state: Evaluation, left: Any, right: Any) -> bool:
    return sandbox.less(state, right, left)


def _not_more(state: Evaluation, left: Any, right: Any) -> bool:
    return not sandbox.less(state, right, left)


def _divisible(state: Evaluation, value: Any, number: Any) -> bool:
    return bounded(state, _number(value)) % bounded(state, _number(number)) == 0


def _not_equal(state: Evaluation, left: Any, right: Any) -> bool:
    return not sandbox.equal(state, left, right)


def _value_test(names: str, function: Callable[[Any], Any]) -> None:
    def apply(state: Evaluation, value: Any) -> Any:
        return function(value)

    for name in names.split():
        TESTS[name] = apply


for _names, _compare in (
    ("== eq equalto sameas", sandbox.equal),
    ("!= ne", _not_equal),
    ("< lt lessthan", sandbox.less),
    ("<= le", _not_more),
    ("> gt greaterthan", _more),
    (">= ge", _not_less),
    ("in", sandbox.contains),
    ("divisibleby", _divisible),
):
    TESTS.update(dict.fromkeys(_names.split(), _compare))

_value_test("defined", lambda value: not isinstance(value, Missing))
_value_test("undefined", lambda value: isinstance(value, Missing))
_value_test("none null", lambda value: value is None)
_value_test("true", lambda value: value is True)
_value_test("false", lambda value: value is False)
_value_test("boolean", lambda value: isinstance(value, bool))
_value_test("integer", lambda value: type(value) is int)
_value_test("float", lambda value: isinstance(value, float))
_value_test("number", lambda value: isinstance(value, (int, float)))
_value_test("string", lambda value: isinstance(value, str))
_value_test("mapping", lambda value: isinstance(value, dict))
_value_test("sequence iterable", lambda value: isinstance(value, (list, tuple, str, range, dict)))
_value_test("lower", lambda value: _as_text(value).islower())
_value_test("upper", lambda value: _as_text(value).isupper())
_value_test("odd", lambda value: _number(value) % 2 == 1)
_value_test("even", lambda value: _number(value) % 2 == 0)


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refusal(f"{kind_of(value)} is not text")
    return value
