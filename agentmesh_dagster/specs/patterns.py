r"""Regular expressions of documents: searched by RE2 in linear time, and the shortest text that one matches.

RE2 is imported at the first pattern. It knows no look-around, no back references and no possessive repetition: what it
cannot search for is refused by its name. Classes such as `\d` and `\w` are ASCII, as in JSON Schema's dialect.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any, Final, cast

MAX_PATTERN: Final = 1_000
"""Characters of one regular expression."""
MAX_PROGRAM: Final = 10_000
"""Instructions that one regular expression comes to."""
_MAX_MEMORY: Final = 4 << 20
# Where RE2 can cache no more states it takes up to 8 ns for each byte and instruction: 0.16 s at most.
_MAX_WORK: Final = 20_000_000

# How RE2's error begins, and what the author wrote.
_REFUSED: Final = (
    ("invalid perl operator: (?=", "uses look-ahead (?=...)"),
    ("invalid perl operator: (?!", "uses negative look-ahead (?!...)"),
    ("invalid perl operator: (?<=", "uses look-behind (?<=...)"),
    ("invalid perl operator: (?<!", "uses negative look-behind (?<!...)"),
    ("invalid perl operator: (?>", "uses an atomic group (?>...)"),
    ("invalid perl operator: (?(", "uses a conditional (?(...)...)"),
    ("invalid perl operator: (?#", "uses a comment (?#...)"),
    ("invalid escape sequence: \\k", "uses a back reference \\k"),
    ("bad repetition operator: ", "repeats a repetition, as possessive repetitions do"),
    ("invalid repetition size: ", "repeats something more than 1000 times"),
    ("pattern too large", "is too large: its repetitions multiply"),
)
_BACK_REFERENCE: Final = re.compile(r"invalid escape sequence: \\([1-9])")
_NAMED_REFERENCE: Final = re.compile(r"\(\?P=(\w*)")
# An escape, `\\` too, so that what follows one is never taken for another.
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


class Work:
    """What several searches may cost together, in bytes of text by instructions."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class PatternRefused(Exception):
    """A regular expression cannot be used, or not on so long a text; the message says why."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    search: Any
    size: int


def refusal_of(pattern: str) -> str | None:
    """Why a regular expression cannot be used; None where it can.

    The sentence goes on from "the regular expression" or stands alone.
    """
    try:
        _compile(pattern)
    except PatternRefused as refusal:
        return str(refusal)
    return None


def is_found(pattern: str, text: str, work: Work | None = None) -> bool:
    """Whether a regular expression matches anywhere in a text.

    Args:
        pattern: The regular expression.
        text: Any text.
        work: What this search and those before it may cost together.

    Raises:
        PatternRefused: It cannot be used, the text is too long for one of its size, or the work is used up.
    """
    compiled = _compile(pattern)
    # Half a surrogate pair has no UTF-8; it counts as a question mark.
    encoded = text.encode("utf-8", "replace")
    cost = len(encoded) * compiled.size
    if cost > _MAX_WORK:
        raise PatternRefused(
            f"a text of {len(encoded)} bytes is too long for the regular expression {_shown(pattern)}: it may be "
            f"searched for in {_MAX_WORK // compiled.size} bytes; simplify it, or bound the text"
        )
    if work is not None:
        work.left -= cost
        if work.left < 0:
            raise PatternRefused("its texts are too many for the schema's regular expressions")
    return compiled.search(encoded) is not None


@functools.lru_cache(maxsize=256)
def _compile(pattern: str) -> _Compiled:
    if len(pattern) > MAX_PATTERN:
        raise PatternRefused(f"the regular expression is longer than {MAX_PATTERN} characters")
    re2 = importlib.import_module("re2")
    options: Any = re2.Options()
    options.log_errors = False
    options.never_capture = True  # only whether it is found is asked
    options.max_mem = _MAX_MEMORY
    try:
        compiled: Any = re2.compile(_translated(pattern), options)
    except re2.error as error:
        raise PatternRefused(_named(pattern, error)) from None
    except UnicodeEncodeError:
        raise PatternRefused("the regular expression holds half of a surrogate pair") from None
    if compiled.programsize > MAX_PROGRAM:
        raise PatternRefused(
            f"the regular expression is too large: its repetitions come to {compiled.programsize} instructions, and "
            f"at most {MAX_PROGRAM} are allowed"
        )
    return _Compiled(compiled.search, max(compiled.programsize, compiled.reverseprogramsize, 1))


def _translated(pattern: str) -> str:
    r"""The pattern as RE2 writes it: `\u00e9` as `\x{00e9}`, and Python's `\Z` as `\z`."""

    def escape(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        if code:
            return f"\\x{{{code}}}"
        return "\\z" if found[0] == "\\Z" else found[0]

    return _ESCAPE.sub(escape, pattern)


def _named(pattern: str, error: Exception) -> str:
    reason: Any = error.args[0] if error.args else ""
    text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
    reference = _BACK_REFERENCE.match(text)
    named = _NAMED_REFERENCE.search(pattern)
    if reference is not None:
        what = f"uses a back reference \\{reference[1]}"
    elif named is not None and text.startswith("invalid perl operator: (?P"):
        what = f"uses a back reference (?P={named[1][:40]})"
    else:
        what = next((name for begin, name in _REFUSED if text.startswith(begin)), "")
    if what:
        return f"the regular expression {what}, which a search in linear time cannot do; write it without"
    return f"is not a regular expression: {text[:120]}"


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")


# The shortest match -----------------------------------------------------------------------------------------

# The parser has no public name; it is `sre_parse` up to Python 3.10 and `re._parser` from 3.11.
_PARSER_NAME: Final = "re._parser" if sys.version_info >= (3, 11) else "sre_parse"
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


def shortest_match(pattern: str, min_length: int) -> str | None:
    r"""A short text that a pattern is found in, `None` when none was made up.

    Reads Python's own parse of the pattern; one that only RE2 can read, as with `\p{L}`, has none. Repetitions are
    made as short as they may be, and then longer until there are `min_length` characters.

    Raises:
        PatternRefused: The pattern cannot be used.
    """
    _compile(pattern)
    try:
        parsed = list(importlib.import_module(_PARSER_NAME).parse(pattern))
    except (re.error, FutureWarning, OverflowError, RecursionError):
        return None
    for extra in range(min_length + 1):
        text = _construct(parsed, extra)
        if text is None:
            return None
        anchored = pattern.endswith(("$", r"\Z"))
        if len(text) < min_length and not anchored:
            text += "a" * (min_length - len(text))
        if len(text) >= min_length and is_found(pattern, text):
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
