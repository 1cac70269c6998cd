"""Regular expressions in schemas: which take exponential time, and the shortest text that one matches.

Both read Python's own parse of the expression, so that they speak of what `re` will do.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any, Final, cast

# The parser has no public name; it is `sre_parse` up to Python 3.10 and `re._parser` from 3.11.
_PARSER: Final[Any] = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MANY: Final = 1_000
_MAX_LENGTH: Final = 20_000
_CANDIDATES: Final = "a0A-_ .,/:@!#x1Z"
_CATEGORIES: Final = {
    "CATEGORY_DIGIT": "0",
    "CATEGORY_WORD": "a",
    "CATEGORY_SPACE": " ",
    "CATEGORY_NOT_DIGIT": "a",
    "CATEGORY_NOT_WORD": " ",
    "CATEGORY_NOT_SPACE": "a",
}
_REPEATS: Final = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def takes_exponential_time(pattern: str) -> bool:
    """Whether an unbounded repetition repeats nothing but another one, as in `(a+)+`, `(a*b?)*` or `(x|y+)*`.

    Finds the usual mistakes; it is no proof that a pattern is harmless. Raises `re.error` for what does not
    parse.
    """
    return _risky(list(_PARSER.parse(pattern)))


def _risky(items: list[Any]) -> bool:
    for operator, argument in items:
        name = str(operator)
        if name in _REPEATS[:2]:
            _, most, inner = argument
            body = list(inner)
            if int(most) >= _MANY and _is_open_ended(body):
                return True
            if _risky(body):
                return True
        elif (
            (name == "SUBPATTERN" and _risky(list(argument[-1])))
            or (name == "BRANCH" and any(_risky(list(branch)) for branch in argument[1]))
            or (name in ("ASSERT", "ASSERT_NOT") and _risky(list(argument[1])))
        ):
            return True
    return False


def _is_open_ended(items: list[Any]) -> bool:
    """Whether it is an unbounded repetition with nothing beside it that must be there."""
    endless, mandatory = 0, 0
    for operator, argument in items:
        name = str(operator)
        if name in _REPEATS[:2]:
            least, most, inner = argument
            if int(most) >= _MANY:
                endless += 1
            elif int(least) > 0:
                mandatory += 1
            elif _is_open_ended(list(inner)):
                endless += 1
        elif name == "SUBPATTERN":
            if _is_open_ended(list(argument[-1])):
                endless += 1
            else:
                mandatory += 1
        elif name == "BRANCH":
            if any(_is_open_ended(list(branch)) for branch in argument[1]):
                endless += 1
            else:
                mandatory += 1
        elif name not in ("AT", "ASSERT", "ASSERT_NOT"):
            mandatory += 1
    return endless > 0 and mandatory == 0


def shortest_match(pattern: str, min_length: int) -> str | None:
    """A short text that a pattern is found in, `None` when none was made up.

    Repetitions are made as short as they may be, and then longer until there are `min_length` characters.
    """
    parsed = list(_PARSER.parse(pattern))
    for extra in range(min_length + 1):
        text = _construct(parsed, extra)
        if text is None:
            return None
        anchored = pattern.endswith(("$", r"\Z"))
        if len(text) < min_length and not anchored:
            text += "a" * (min_length - len(text))
        if len(text) >= min_length and re.search(pattern, text):
            return text
    return None


def _construct(items: list[Any], extra: int) -> str | None:
    parts: list[str] = []
    for operator, argument in items:
        part = _construct_one(str(operator), argument, extra)
        if part is None:
            return None
        parts.append(part)
    return "".join(parts)


def _construct_one(name: str, argument: Any, extra: int) -> str | None:
    if name == "LITERAL":
        return chr(cast("int", argument))
    if name == "ANY":
        return "a"
    if name == "NOT_LITERAL":
        return next(c for c in _CANDIDATES if ord(c) != argument)
    if name == "IN":
        return _construct_class(list(argument))
    if name in _REPEATS:
        least, most, inner = argument
        part = _construct(list(inner), 0)
        count = min(int(least) + extra, int(most))
        return None if part is None or count * len(part) > _MAX_LENGTH else part * count
    if name == "SUBPATTERN":
        return _construct(list(argument[-1]), extra)
    if name == "BRANCH":
        return _construct(list(argument[1][0]), extra)
    if name in ("AT", "ASSERT", "ASSERT_NOT"):
        return ""  # whether it holds is seen when the whole text is tried
    return None


def _construct_class(members: list[Any]) -> str | None:
    if str(members[0][0]) == "NEGATE":
        return next((c for c in _CANDIDATES if not any(_has(member, c) for member in members[1:])), None)
    name, argument = str(members[0][0]), members[0][1]
    if name == "RANGE":
        return chr(argument[0])
    return _CATEGORIES.get(str(argument)) if name == "CATEGORY" else chr(argument)


def _has(member: Any, character: str) -> bool:
    name, argument = str(member[0]), member[1]
    if name == "RANGE":
        return bool(argument[0] <= ord(character) <= argument[1])
    if name == "LITERAL":
        return bool(argument == ord(character))
    kind = str(argument).removeprefix("CATEGORY_")
    found = re.match(
        {"DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s"}.get(kind.removeprefix("NOT_"), r"\Z"), character
    )
    return (found is None) if kind.startswith("NOT_") else (found is not None)
