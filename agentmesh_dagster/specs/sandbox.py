"""What an expression may do to values: look up, calculate, compare, turn into text, and how much of it.

Expressions come from stored documents and meet data from outside. No operation here reaches an attribute of a
Python object, changes a value, or makes one whose size the data or the author can blow up: every operation
that copies, compares or builds pays from one budget, in steps (0.25 microseconds or less on a common machine,
so that nothing holds an event loop for more than 100 ms) and in characters of new text. The budget counts work
and not time, so that a replay decides as the first pass did.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, cast

from agentmesh_dagster.records import Json

MAX_TEXT: Final = 1_000_000
"""Characters of one text, a rendered template included."""
MAX_NEW_TEXT: Final = 8_000_000
"""Characters of all texts that one evaluation makes."""
MAX_STEPS: Final = 400_000
"""Work of one evaluation: tokens read, nodes evaluated in loops, items visited, items made."""
MAX_ITEMS: Final = 100_000
"""Items of one list that an expression makes."""
MAX_INT_BITS: Final = 4_096
"""Bits of an integer in a document or expression, or that an expression makes: 1,233 digits."""
_SMALL: Final = 1 << 63
_MAX_FIELD_WIDTH: Final = 1_000
_MAX_KEYS_SHOWN: Final = 12


class Refusal(Exception):
    """An expression cannot be evaluated; the message goes to the author. It never contains a value.

    Args:
        message: What was wrong.
        code: `expression-missing`, `expression-limit`, `expression-refused` or `expression-failed`.
    """

    def __init__(self, message: str, code: str = "expression-failed") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Group(NamedTuple):
    """One group of the filter `groupby`."""

    grouper: Json
    list: list[Json]


class Loop(dict[str, Any]):
    """The name `loop` inside a `for` block."""


class SkippedStep(dict[str, Any]):
    """What expressions see of a step that was skipped: its status. What it would have had is undefined."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands for a name or key that is not there, until `default` accepts it or a use refuses it."""

    owner: str
    key: object
    value: object

    @property
    def is_skipped(self) -> bool:
        """Whether a step would have had it, and was skipped: `or` accepts that too."""
        return isinstance(self.value, SkippedStep)

    def refusal(self) -> Refusal:
        """The error that says which name is missing, in what, and what is there instead."""
        return Refusal(_explain_missing(self), "expression-missing")


class Evaluation:
    """One evaluation: the given names, the template's own variables, and what may still be spent.

    The templates of one JSON value share one.
    """

    __slots__ = ("characters", "names", "steps", "variables")

    def __init__(self, names: Mapping[str, object]) -> None:
        self.names = names
        self.variables: dict[str, Any] = {}
        self.steps = MAX_STEPS
        self.characters = MAX_NEW_TEXT

    def spend(self, steps: int) -> None:
        """Pays for work; raises `Refusal` when the budget is used up."""
        self.steps -= steps
        if self.steps < 0:
            raise Refusal(f"it does more than {MAX_STEPS} steps of work", "expression-limit")

    def reserve(self, length: int) -> None:
        """Pays for a text of `length` characters before it is made."""
        if length > MAX_TEXT:
            raise Refusal(f"it makes a text of more than {MAX_TEXT} characters", "expression-limit")
        self.characters -= length
        if self.characters < 0:
            raise Refusal(f"it makes more than {MAX_NEW_TEXT} characters of text", "expression-limit")
        self.spend(length >> 8)

    def made(self, text: str) -> str:
        """Pays for a text whose size was bounded already."""
        self.reserve(len(text))
        return text

    def reserve_items(self, count: int) -> None:
        """Pays for a list of `count` items before it is made."""
        if count > MAX_ITEMS:
            raise Refusal(f"it makes a list of more than {MAX_ITEMS} items", "expression-limit")
        self.spend(count)


def kind_of(value: object) -> str:
    """The JSON word for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple, range)):
        return "a list"
    return "something that is not JSON"


def lookup(value: Any, key: Any, owner: str) -> Any:
    """The item of an object, list or text under a key, or `Missing`; never a method or attribute.

    Args:
        value: What is looked into; a `Missing` stays the same `Missing`.
        key: Key of an object, or index.
        owner: How the author wrote `value`, for the error.
    """
    try:
        if isinstance(value, (dict, Mapping)):
            return cast("Mapping[Any, Any]", value)[key]
        if isinstance(value, (list, tuple, str, range)):
            if type(key) is int:
                return cast("list[Any]", value)[key]
            if isinstance(value, Group) and key in ("grouper", "list"):
                return value[0] if key == "grouper" else value[1]
    except (LookupError, TypeError):
        pass
    return value if isinstance(value, Missing) else Missing(owner, key, cast("object", value))


def lookup_path(value: Any, path: str | int, owner: str = "the item") -> Any:
    """Follows the `attribute=` argument of a filter: dotted keys and indexes."""
    for part in path.split(".") if isinstance(path, str) else (path,):
        value = lookup(value, int(part) if isinstance(part, str) and part.isdecimal() else part, owner)
    return value


def _explain_missing(missing: Missing) -> str:
    owner, key, value = missing.owner, missing.key, missing.value
    shown = repr(key if isinstance(key, (int, float)) else _cut(str(key)))
    if isinstance(value, SkippedStep):
        return (
            f"{owner}.{key} is undefined, because that step was skipped; write '... or ...', '... | default(...)' or "
            f"'{owner}.{key} is defined'"
        )
    if isinstance(value, Mapping):
        keys = sorted(str(k) for k in islice(cast("Mapping[Any, Any]", value), 10_000))
        there = ", ".join(repr(_cut(k)) for k in keys[:_MAX_KEYS_SHOWN]) or "nothing"
        total = len(cast("Mapping[Any, Any]", value))
        more = f" and {total - _MAX_KEYS_SHOWN} more" if total > _MAX_KEYS_SHOWN else ""
        near = difflib.get_close_matches(str(key)[:100], keys[:1000], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if not owner:
            return f"unknown name {shown}; there is {there}{more}{hint}"
        return f"{owner} has no key {shown}; it has {there}{more}{hint}"
    if isinstance(value, (list, tuple, str, range)) and isinstance(key, int):
        return f"{owner} has {len(cast('list[Any]', value))} items and none at index {key}"
    hint = f" (a method is called: {key}())" if isinstance(key, str) and key in METHODS else ""
    return f"{owner} is {kind_of(cast('object', value))} and has no key {shown}{hint}"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def weigh(state: Evaluation, value: Any) -> None:
    """Pays for visiting a whole value, shared parts as often as they occur."""
    stack: list[Any] = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, str):
            state.spend(1 + (len(current) >> 8))
        elif isinstance(current, Mapping):
            stack.extend(cast("Mapping[Any, Any]", current).values())
            state.spend(len(cast("Mapping[Any, Any]", current)) + 1)
        elif isinstance(current, (list, tuple)):
            stack.extend(cast("list[Any]", current))
            state.spend(len(cast("list[Any]", current)) + 1)


def items_of(state: Evaluation, value: Any) -> list[Any]:
    """The items of a list, keys of an object or characters of a text, paid for."""
    if isinstance(value, (list, tuple, str, range, Mapping)):
        sized = cast("list[Any]", value)
        state.spend(len(sized))
        return list(sized)
    raise Refusal(f"{kind_of(value)} has no items to go through")


def to_json(state: Evaluation, value: Any, depth: int = 0) -> Json:
    """A copy as plain JSON; text in it pays like new text. Raises `Refusal` for what JSON cannot hold."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        if depth:  # the copy shares the text, but whoever writes it down does not
            state.reserve(len(value))
        elif len(value) > MAX_TEXT:
            raise Refusal(f"it makes a text of more than {MAX_TEXT} characters", "expression-limit")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Refusal(f"the result {value} is not a number that JSON knows")
        return value
    if depth > 100:
        raise Refusal("the result is nested more than 100 levels deep", "expression-limit")
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        state.spend(3 * len(mapping) + 3)
        return {_object_key(state, k): to_json(state, v, depth + 1) for k, v in mapping.items()}
    if isinstance(value, (list, tuple, range)):
        items = cast("list[Any]", value)
        state.spend(len(items) + 3)
        return [to_json(state, v, depth + 1) for v in items]
    raise Refusal(f"the result is {kind_of(value)}")


def _object_key(state: Evaluation, key: Any) -> str:
    if not isinstance(key, str):
        raise Refusal(f"keys of an object are text, and one is {kind_of(key)}")
    state.reserve(len(key))
    return key


def to_text(state: Evaluation, value: Any) -> str:
    """A value inside text: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(bounded(state, value))
    return dump(state, value)


def bounded(state: Evaluation, value: Any) -> Any:
    """A number; an integer pays by its size, and is refused beyond `MAX_INT_BITS`."""
    if type(value) is int and not -_SMALL < value < _SMALL:
        bits = value.bit_length()
        if bits > MAX_INT_BITS:
            raise Refusal(f"an integer has more than {MAX_INT_BITS} bits", "expression-limit")
        state.spend(bits >> 5)
    return value


# As `json.dumps` makes one at each call.
_encode: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def dump(state: Evaluation, value: Any, indent: int | None = None) -> str:
    """JSON text of a value, its size paid for before it is made (indentation and escapes aside)."""
    before = state.steps
    plain = to_json(state, value)
    if indent is None:
        text = _encode(plain)
    else:
        state.spend(2 * (before - state.steps))
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)
    state.spend(6)
    return state.made(text)


# Operators --------------------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _no_operator(word: str, left: object, right: object) -> Refusal:
    return Refusal(f"cannot {word} {kind_of(left)} and {kind_of(right)}")


def add(state: Evaluation, left: Any, right: Any) -> Any:
    if _is_number(left) and _is_number(right):
        return bounded(state, bounded(state, left) + bounded(state, right))
    if isinstance(left, str) and isinstance(right, str):
        state.reserve(len(left) + len(right))
        return left + right
    if isinstance(left, (list, range)) and isinstance(right, (list, range)):
        state.reserve_items(len(cast("list[Any]", left)) + len(cast("list[Any]", right)))
        return [*left, *right]
    raise _no_operator("add", cast("object", left), right)


def subtract(state: Evaluation, left: Any, right: Any) -> Any:
    if _is_number(left) and _is_number(right):
        return bounded(state, bounded(state, left) - bounded(state, right))
    raise _no_operator("subtract", left, right)


def multiply(state: Evaluation, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, (str, list)):
        left, right = cast("Any", right), left
    if isinstance(left, str) and isinstance(right, int):
        state.reserve(len(left) * max(right, 0))
        return left * right
    if isinstance(left, (list, range)) and isinstance(right, int):
        state.reserve_items(len(cast("list[Any]", left)) * max(right, 0))
        return list(cast("list[Any]", left)) * right
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(state, left.bit_length() + right.bit_length())
        return left * right
    if _is_number(cast("object", left)) and _is_number(right):
        return left * right
    raise _no_operator("multiply", cast("object", left), right)


def divide(state: Evaluation, left: Any, right: Any) -> Any:
    if _is_number(left) and _is_number(right):
        return bounded(state, left) / bounded(state, right)
    raise _no_operator("divide", left, right)


def floor_divide(state: Evaluation, left: Any, right: Any) -> Any:
    if _is_number(left) and _is_number(right):
        return bounded(state, bounded(state, left) // bounded(state, right))
    raise _no_operator("divide", left, right)


def modulo(state: Evaluation, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        return format_percent(state, left, right)
    if _is_number(left) and _is_number(right):
        return bounded(state, bounded(state, left) % bounded(state, right))
    raise _no_operator("take the remainder of", left, right)


def power(state: Evaluation, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if right > 0:
            _check_bits(state, left.bit_length() * right)
        return left**right
    if _is_number(left) and _is_number(right):
        result = left**right
        if not isinstance(result, complex):
            return result
        raise Refusal("a negative number has no power with that exponent")
    raise _no_operator("take the power of", left, right)


def _check_bits(state: Evaluation, bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise Refusal(f"it makes an integer of more than {MAX_INT_BITS} bits", "expression-limit")
    state.spend(bits >> 5)


def equal(state: Evaluation, left: Any, right: Any) -> bool:
    if isinstance(left, (dict, list, tuple, str)) and isinstance(right, (dict, list, tuple, str)):
        weigh(state, left)
        weigh(state, right)
    if isinstance(left, range):
        left = list(left)
    return bool(left == (list(right) if isinstance(right, range) else right))


def less(state: Evaluation, left: Any, right: Any) -> bool:
    if (_is_number(left) and _is_number(right)) or (isinstance(left, str) and isinstance(right, str)):
        if isinstance(left, str):
            state.spend(len(left) >> 8)
        return left < right
    raise _no_operator("order", left, right)


def contains(state: Evaluation, item: Any, container: Any) -> bool:
    if isinstance(container, str):
        if not isinstance(item, str):
            raise Refusal(f"cannot look for {kind_of(item)} in text")
        state.spend(len(container) >> 4)
        return item in container
    if isinstance(container, Mapping):
        return isinstance(item, str) and item in container
    if isinstance(container, range):
        return type(item) is int and item in container
    if isinstance(container, (list, tuple)):
        members = cast("list[Any]", container)
        for member in members:
            state.spend(1)
            if equal(state, member, item):
                return True
        return False
    raise Refusal(f"cannot look for something in {kind_of(container)}")


_PERCENT_FIELD = re.compile(r"%(?:\(([^)]*)\))?([-+ 0#]*)(\d*)(?:\.(\d*))?(.?)", re.DOTALL)


def format_percent(state: Evaluation, template: str, values: Any) -> str:
    """`'%s: %.2f' % [name, price]`, with bounded widths; values as everywhere in text."""
    arguments = list(cast("list[Any]", values)) if isinstance(values, (list, tuple)) else [values]
    used = 0
    parts: list[str] = []
    end = 0
    for field in _PERCENT_FIELD.finditer(template):
        name, flags, width, precision, letter = field.groups()
        parts.append(template[end : field.start()])
        end = field.end()
        if letter == "%":
            parts.append("%")
            continue
        if letter not in "sdiufFeEgGxXo" or not letter:
            raise Refusal(f"the format {field.group()[:20]!r} is not known; use %s, %d, %f, %e, %g, %x")
        if (
            len(width) > 4
            or len(precision or "") > 4
            or int(width or 0) > _MAX_FIELD_WIDTH
            or int(precision or 0) > 100
        ):
            raise Refusal("the width of a format is too large", "expression-limit")
        if name is not None:
            value = lookup(values, name, "the value")
        else:
            value = (
                arguments[used] if used < len(arguments) else Missing("the list of values", used, arguments)
            )
            used += 1
        if isinstance(value, Missing):
            raise value.refusal()
        if letter == "s":
            value = to_text(state, value)
        elif not _is_number(value):
            raise Refusal(f"the format %{letter} takes a number and got {kind_of(value)}")
        else:
            bounded(state, value)
        point = "" if precision is None else f".{precision}"
        parts.append(state.made(f"%{flags}{width}{point}{letter}" % (value,)))
        state.spend(8)
    if used and used < len(arguments):
        raise Refusal("there are more values than places in the format")
    parts.append(template[end:])
    return state.made("".join(parts))


# Methods ----------------------------------------------------------------------------------------------------

_TEXT_METHODS: Final = frozenset(
    [
        "capitalize",
        "casefold",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    ]
)
_PADDING_METHODS: Final = frozenset(("center", "ljust", "rjust", "zfill"))
_OBJECT_METHODS: Final = frozenset(("get", "items", "keys", "values"))
METHODS: Final = (
    _TEXT_METHODS | _PADDING_METHODS | _OBJECT_METHODS | {"count", "cycle", "join", "replace", "rsplit"}
)
"""Names of all methods that some type has."""


def call_method(
    state: Evaluation, value: Any, name: str, args: list[Any], kwargs: dict[str, Any], owner: str
) -> Any:
    """Calls one of the safe methods of text, lists and objects; there are no others."""
    if isinstance(value, Missing):
        raise value.refusal()
    try:
        if isinstance(value, str):
            return _call_on_text(state, value, name, args, kwargs)
        if isinstance(value, Loop) and name == "cycle" and args:
            return args[value["index0"] % len(args)]
        if isinstance(value, Mapping) and name in _OBJECT_METHODS:
            return _call_on_object(state, cast("Mapping[str, Any]", value), name, *args, **kwargs)
        if isinstance(value, (list, tuple)) and name in ("count", "index"):
            return _call_on_list(state, cast("list[Any]", value), name, *args, **kwargs)
    except (TypeError, ValueError):
        raise Refusal(f"{name}() cannot be called so on {owner}") from None
    kind = kind_of(cast("object", value))
    raise Refusal(f"{kind} has no method {name!r} here ({owner})", "expression-refused")


def _call_on_text(state: Evaluation, value: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    state.spend(1 + (len(value) >> 4))
    if name in _TEXT_METHODS:
        _pay_for_arguments(state, value, name, args)
        args = [tuple(cast("list[Any]", a)) if isinstance(a, list) else a for a in args]
        result = getattr(value, name)(*args, **kwargs)
        if isinstance(result, str):
            return state.made(result)
        if isinstance(result, (list, tuple)):
            parts = list(cast("Iterable[str]", result))
            state.reserve_items(len(parts))
            state.reserve(len(value))
            return parts
        return result
    if name in _PADDING_METHODS:
        if not args or type(args[0]) is not int:
            raise TypeError
        state.reserve(max(args[0], len(value)))
        return getattr(value, name)(*args, **kwargs)
    if name == "count":
        return value.count(*args, **kwargs)
    if name == "rsplit":
        state.spend((len(value) * len(args[0]) >> 10) if args and isinstance(args[0], str) else 0)
        parts = value.rsplit(*args, **kwargs)
        state.reserve_items(len(parts))
        state.reserve(len(value))
        return parts
    if name == "replace":
        return replace_text(state, value, *args, **kwargs)
    if name == "join":
        return join_text(state, items_of(state, args[0] if args else None), value)
    hint = "; write 'text' ~ value or '%s' % value" if name in ("format", "format_map") else ""
    raise Refusal(f"text has no method {name!r} here{hint}", "expression-refused")


def _pay_for_arguments(state: Evaluation, value: str, name: str, args: list[Any]) -> None:
    """What some methods do for each character or item of their arguments."""
    if name == "title":
        state.spend(len(value) >> 3)
    for argument in args:
        if isinstance(argument, list):
            weigh(state, argument)
        elif isinstance(argument, str) and name in ("strip", "lstrip", "rstrip"):
            state.spend(len(value) * len(argument) >> 12)


def _call_on_object(
    state: Evaluation, value: Mapping[str, Any], name: str, key: Any = None, default: Any = None
) -> Any:
    if name == "get":
        return value[key] if isinstance(key, str) and key in value else default
    state.spend(2 * len(value))
    if name == "items":
        return [[k, v] for k, v in value.items()]
    return list(value) if name == "keys" else list(value.values())


def _call_on_list(state: Evaluation, value: list[Any], name: str, item: Any) -> int:
    found = [index for index, member in enumerate(value) if equal(state, member, item)]
    state.spend(len(value))
    if name == "count":
        return len(found)
    if not found:
        raise Refusal("the list has no such item to give the index of")
    return found[0]


def replace_text(state: Evaluation, value: str, old: Any, new: Any, count: Any = -1) -> str:
    """`str.replace`, the size of its result paid for before it is made."""
    if not isinstance(old, str) or not isinstance(new, str) or type(count) is not int:
        raise TypeError
    state.spend(1 + (len(value) >> 4))
    found = value.count(old) if count < 0 else min(count, value.count(old))
    state.reserve(max(len(value), len(value) + found * (len(new) - len(old))))
    return value.replace(old, new, count)


def join_text(state: Evaluation, items: list[Any], separator: str) -> str:
    """Items as text, joined, the size of the result paid for before it is made."""
    parts = [to_text(state, item) for item in items]
    state.spend(len(parts))
    state.reserve(sum(map(len, parts)) + len(separator) * max(len(parts) - 1, 0))
    return separator.join(parts)


def safe_range(state: Evaluation, *args: Any) -> range:
    """`range` of a bounded length."""
    if not args or len(args) > 3 or any(type(a) is not int for a in args):
        raise Refusal("range takes one to three integers")
    if len(args) == 3 and args[2] == 0:
        raise Refusal("the step of a range is not 0")
    made = range(*args)
    # len() of a huge range raises, so its ends are compared
    if made and abs(made[-1] - made[0]) // abs(made.step) >= MAX_ITEMS:
        raise Refusal(f"range has more than {MAX_ITEMS} items", "expression-limit")
    return made


OPERATORS: Final[Mapping[str, Callable[[Evaluation, Any, Any], Any]]] = {
    "+": add,
    "-": subtract,
    "*": multiply,
    "/": divide,
    "//": floor_divide,
    "%": modulo,
    "**": power,
}
