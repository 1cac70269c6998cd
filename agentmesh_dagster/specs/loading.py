"""Documents from files: YAML 1.2 (core rules) and JSON, as plain dicts, with every surprise refused by name.

PyYAML's event stream (libyaml where the wheel has it) gives syntax and places; the values are built here,
because no safe loader refuses duplicate keys, exploding aliases, deep nesting and YAML 1.1's `yes`/`no`/dates
at once. Merge keys (`<<`) are not part of YAML 1.2 and are refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import yaml

from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json

MAX_BYTES: Final = 2_000_000
"""Bytes of one file."""
MAX_DEPTH: Final = 64
"""Levels of lists and objects in one document."""
INPUTS_FOLDER: Final = "inputs"
"""Holds the inputs of example runs."""
MAX_DOCUMENTS: Final = 1_000
"""Documents of one YAML file."""
MAX_EVENTS: Final = 200_000
"""Keys, values, beginnings and ends of lists and objects in one YAML file."""
MAX_ANCHORS: Final = 1_000
"""Anchors of one file."""
MAX_INT_BITS: Final = 4_096
"""Bits of an integer, which are 1,233 digits."""
MAX_ALIASED: Final = 200_000
"""Values and characters that the aliases of one file may add, counted as often as they are used."""
SUFFIXES: Final = (".yaml", ".yml", ".json")

_Document = dict[str, Json]
# libyaml parses ten times as fast; the pure parser gives the same events where the wheel came without it.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL: Final = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEAN: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER: Final = re.compile(r"[-+]?[0-9]+\Z")
_BASED: Final = re.compile(r"0(?:o[0-7]+|x[0-9a-fA-F]+)\Z")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NOT_FINITE: Final = re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufffe\uffff]")
_LONG_INTEGER: Final = re.compile(r"[0-9]{1000}")
_TAG: Final = "tag:yaml.org,2002:"
_KINDS: Final[dict[str, type]] = {"int": int, "float": float, "bool": bool, "null": type(None)}
# A string (to its end, or the text's) or a bracket: what decides how deep a JSON text is nested.
_JSON_DEPTH: Final = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)


@dataclass(frozen=True)
class LoadedDocument:
    """One document and where it came from: the path of its file, with `#2` for the second document in it."""

    source: str
    data: _Document


def load_path(path: str | os.PathLike[str]) -> list[LoadedDocument]:
    """Loads a file, or every `.yaml`, `.yml` and `.json` file under a folder, in the order of their paths.

    Hidden files and folders and folders named `inputs` (the inputs of example runs) are left out, links to folders
    are not followed, and a link to a file outside the folder is refused.

    Raises:
        DefinitionError: A file cannot be read or is not a document (see `load_documents`), or there is none.
    """
    return [document for file in document_files(path) for document in _load_file(file)]


def document_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that `load_path` loads; a path that is no folder is one, whether it is there or not.

    Raises:
        DefinitionError: The folder cannot be read, holds a link out of it, or holds no such file.
    """
    root = Path(path)
    if not root.is_dir():
        return [root]
    files = sorted(_files_under(root))
    if not files:
        _refuse(str(root), "holds no .yaml, .yml or .json file", "document-empty")
    return files


def _files_under(root: Path) -> Iterator[Path]:
    inside = root.resolve()

    def fail(error: OSError) -> NoReturn:
        _refuse(str(error.filename), f"cannot be read: {error.strerror}", "document-unreadable")

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != INPUTS_FOLDER)
        for name in names:
            file = Path(folder, name)
            if name.startswith(".") or file.suffix.lower() not in SUFFIXES:
                continue
            if file.is_symlink() and not file.resolve().is_relative_to(inside):
                _refuse(
                    str(file), f"is a link out of {str(root)!r}; copy the file instead", "document-outside"
                )
            yield file


def _load_file(file: Path) -> list[LoadedDocument]:
    source = str(file)
    try:
        if file.exists() and not file.is_file():
            _refuse(source, "is not a regular file", "document-unreadable")
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        _refuse(source, f"cannot be read: {error.strerror}", "document-unreadable")
    documents = load_documents(data, source=source)
    if len(documents) == 1:
        return [LoadedDocument(source, documents[0])]
    return [LoadedDocument(f"{source}#{number}", document) for number, document in enumerate(documents, 1)]


def load_documents(text_or_bytes: str | bytes, *, source: str) -> list[_Document]:
    """Parses the documents in a text: JSON when the source's name ends so, otherwise YAML 1.2.

    Args:
        text_or_bytes: The text; bytes are UTF-8.
        source: Name for errors, such as the path of the file.

    Returns:
        One dict per document; a YAML text may hold several, separated by `---`.

    Raises:
        DefinitionError: Too large, not UTF-8, a control character, a syntax error, a duplicate key, a key
        that is not
            text, a tag, a merge key, NaN or infinity, more than `MAX_DEPTH` levels, exploding aliases, a
            document that is not an object, or no document at all. Line and column are in the message and in
            `context`.
    """
    text = _decode(text_or_bytes, source)
    values = _load_json(text, source) if source.lower().endswith(".json") else _load_yaml(text, source)
    if not values:
        _refuse(source, "is empty; write a document that begins with kind:", "document-empty")
    for value in values:
        if not isinstance(value, dict):
            hint = "; write one document per file, or several separated by --- in YAML" if value else ""
            _refuse(source, f"is {_word(value)}, and a document is an object{hint}", "document-not-object")
    if "\\" in text:  # only an escape can bring in what the check of the text did not see
        _check_escaped(values, source)
    return cast("list[_Document]", values)


def _check_escaped(values: list[Json], source: str) -> None:
    """Refuses what neither UTF-8 nor a database can hold: lone surrogates and NUL."""
    text = json.dumps(values, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in text):
        _refuse(source, "holds half of a surrogate pair (\\ud800 to \\udfff)", "document-encoding")
    if "\\u0000" in text.replace("\\\\", ""):
        _refuse(source, "holds an escaped NUL character; remove it", "document-control-character")


def _refuse(source: str, problem: str, code: str, place: tuple[int, int] | None = None) -> NoReturn:
    """Raises the error; `place` is line and column, from 1."""
    at = f":{place[0]}:{place[1]}" if place else ""
    context = {"line": place[0], "column": place[1]} if place else {}
    raise DefinitionError(f"{source}{at}: {problem}", code=code, path=source, context=context)


def _word(value: Json) -> str:
    if isinstance(value, bool):
        return "a boolean"
    words = {list: "a list", dict: "an object", str: "text", int: "a number", float: "a number"}
    return words.get(cast("Any", type(value)), "null")


def _decode(data: str | bytes, source: str) -> str:
    size = len(data)
    if size > MAX_BYTES or (isinstance(data, str) and len(data.encode("utf-8", "surrogatepass")) > MAX_BYTES):
        _refuse(source, f"is larger than {MAX_BYTES} bytes", "document-too-large")
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data.encode("utf-8").decode("utf-8")
    except UnicodeError as error:
        start = cast("UnicodeDecodeError", error).start
        _refuse(
            source, f"is not UTF-8: invalid byte at offset {start}; save it as UTF-8", "document-encoding"
        )
    text = text.removeprefix("\ufeff")
    control = _CONTROL.search(text)
    if control is not None:
        line = text.count("\n", 0, control.start()) + 1
        column = control.start() - text.rfind("\n", 0, control.start())
        problem = f"holds the control character U+{ord(control.group()):04X}; remove it"
        _refuse(source, problem, "document-control-character", (line, column))
    return text


# JSON -------------------------------------------------------------------------------------------------------


class _DuplicateKey(Exception):
    """Two equal keys in one JSON object."""


def _unique_pairs(pairs: list[tuple[str, Json]]) -> _Document:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return made


def _load_json(text: str, source: str) -> list[Json]:
    if not text.strip():
        return []
    depth = 0
    for found in _JSON_DEPTH.finditer(text):
        depth += 1 if found.group() in "[{" else -1 if found.group() in "]}" else 0
        if depth > MAX_DEPTH:
            _refuse(source, f"is nested more than {MAX_DEPTH} levels deep", "document-too-deep")

    def refuse_constant(word: str) -> NoReturn:
        _refuse(source, f"{word} is not a JSON number; use null or text", "document-number")

    def parse_float(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            _refuse(source, f"the number {digits[:40]} is too large", "document-number")
        return value

    def parse_int(digits: str) -> int:
        value = int(digits)
        if value.bit_length() > MAX_INT_BITS:
            _refuse(source, f"an integer has more than {MAX_INT_BITS} bits", "document-number")
        return value

    try:
        return [
            json.loads(
                text,
                object_pairs_hook=_unique_pairs,
                parse_constant=refuse_constant,
                parse_float=parse_float,
                # A hook takes time for each number, and few files have one of so many digits.
                parse_int=parse_int if _LONG_INTEGER.search(text) else None,
            )
        ]
    except json.JSONDecodeError as error:
        _refuse(source, f"is not JSON: {error.msg}", "document-syntax", (error.lineno, error.colno))
    except _DuplicateKey as error:
        # JSON is also YAML, and only the YAML events know the line.
        _Builder(source).build(text)
        _refuse(
            source, f"the key {_shown(error.args[0])} stands twice in one object", "document-duplicate-key"
        )
    except ValueError:
        _refuse(source, "an integer has too many digits", "document-number")


# YAML -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Frame:
    """A list or object that is still open."""

    value: Any
    anchor: str | None
    weight_before: int
    key: str | None = None
    height: int = 0
    lines: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class _Anchored:
    value: Json
    weight: int
    height: int


def _load_yaml(text: str, source: str) -> list[Json]:
    return _Builder(source).build(text)


class _Builder:
    """Builds plain values from parser events, on a stack of its own: depth never becomes recursion."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._documents: list[Json] = []
        self._stack: list[_Frame] = []
        self._anchors: dict[str, _Anchored] = {}
        self._open_anchors: set[str] = set()
        self._weight = 0
        self._aliased = 0
        self._begun = 0
        self._named = 0

    def build(self, text: str) -> list[Json]:
        handlers: dict[type, Callable[[Any], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: self._start,
            yaml.SequenceStartEvent: self._start,
            yaml.MappingEndEvent: self._end,
            yaml.SequenceEndEvent: self._end,
            yaml.AliasEvent: self._alias,
            yaml.DocumentStartEvent: self._document,
        }
        try:
            events = cast("Iterator[Any]", cast("Any", yaml).parse(text, Loader=_LOADER))
            for number, event in enumerate(events):
                if number >= MAX_EVENTS:
                    self._fail(event, "holds too many values; split the file", "document-too-large")
                handler = handlers.get(event.__class__)
                if handler is not None:
                    handler(event)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = (mark.line + 1, mark.column + 1) if mark else None
            problem = " ".join(part for part in (error.context, error.problem) if part)
            hint = "; indent with spaces, not tabs" if "start any token" in problem else ""
            _refuse(self._source, f"is not YAML: {problem}{hint}", "document-syntax", place)
        except yaml.YAMLError as error:
            _refuse(self._source, f"is not YAML: {error}", "document-syntax")
        return self._documents

    def _fail(self, event: Any, problem: str, code: str) -> NoReturn:
        mark = event.start_mark
        _refuse(self._source, problem, code, (mark.line + 1, mark.column + 1))

    def _document(self, event: Any) -> None:
        self._anchors.clear()
        self._begun += 1
        if self._begun > MAX_DOCUMENTS:
            problem = f"holds more than {MAX_DOCUMENTS} documents; split the file"
            self._fail(event, problem, "document-too-large")
        if event.version and tuple(event.version) != (1, 2):
            self._fail(event, "asks for another YAML than 1.2; remove the %YAML line", "document-syntax")

    def _check_tag(self, event: Any, allowed: tuple[str, ...]) -> str | None:
        """The short name of a standard tag; custom tags are refused."""
        tag: str | None = event.tag
        if tag is None:
            return None
        short = tag.removeprefix(_TAG)
        if short not in allowed:
            shown = f"!!{short}" if tag.startswith(_TAG) else tag
            self._fail(event, f"the tag {_shown(shown)} is not known; write plain values", "document-tag")
        return short

    def _start(self, event: Any) -> None:
        is_object = type(event) is yaml.MappingStartEvent
        self._check_tag(event, ("map",) if is_object else ("seq",))
        if len(self._stack) >= MAX_DEPTH:
            self._fail(event, f"is nested more than {MAX_DEPTH} levels deep", "document-too-deep")
        if self._stack and isinstance(self._stack[-1].value, dict) and self._stack[-1].key is None:
            word = "an object ({{ ... }} must be quoted)" if is_object else "a list"
            self._fail(event, f"a key is {word}; keys are text", "document-key")
        if event.anchor:
            self._count_anchor(event)
            self._open_anchors.add(event.anchor)
        self._stack.append(_Frame({} if is_object else [], event.anchor, self._weight))
        self._weight += 1

    def _count_anchor(self, event: Any) -> None:
        self._named += 1
        if self._named > MAX_ANCHORS:
            problem = f"holds more than {MAX_ANCHORS} anchors; write the values out"
            self._fail(event, problem, "document-alias")

    def _end(self, event: Any) -> None:
        frame = self._stack.pop()
        height = frame.height + 1
        if frame.anchor:
            self._open_anchors.discard(frame.anchor)
            self._anchors[frame.anchor] = _Anchored(frame.value, self._weight - frame.weight_before, height)
        self._add(frame.value, height, event)

    def _alias(self, event: Any) -> None:
        name: str = event.anchor
        if name in self._open_anchors:
            self._fail(event, f"the alias *{name} stands inside what it names", "document-alias")
        anchored = self._anchors.get(name)
        if anchored is None:
            self._fail(event, f"the alias *{name} names nothing above it", "document-alias")
        self._aliased += anchored.weight
        if self._aliased > MAX_ALIASED:
            self._fail(event, "its aliases expand to too much; write the values out", "document-alias")
        if len(self._stack) + anchored.height > MAX_DEPTH:
            self._fail(event, f"is nested more than {MAX_DEPTH} levels deep", "document-too-deep")
        self._weight += anchored.weight
        self._add(_copy(anchored.value), anchored.height, event)

    def _scalar(self, event: Any) -> None:
        tag = self._check_tag(event, ("str", "int", "float", "bool", "null"))
        text: str = event.value
        value: Json = (
            text if tag == "str" or (not event.implicit[0] and tag is None) else self._resolve(event, text)
        )
        if tag in _KINDS and type(value) is int and tag == "float":
            value = float(value)
        if tag in _KINDS and type(value) is not _KINDS[tag]:
            self._fail(event, f"{_shown(text)} is not of the type !!{tag}", "document-tag")
        weight = 1 + len(text)
        self._weight += weight
        if event.anchor:
            self._count_anchor(event)
            self._anchors[event.anchor] = _Anchored(value, weight, 0)
        self._add(value, 0, event)

    def _resolve(self, event: Any, text: str) -> Json:
        """YAML 1.2 core schema: null, booleans, numbers; all else, dates and `yes` included, is text."""
        if text in _NULL:
            return None
        if text in _BOOLEAN:
            return _BOOLEAN[text]
        if text[0] not in "+-.0123456789":
            return text
        if _INTEGER.match(text):
            return self._number(event, text, int)
        if _BASED.match(text):
            return self._number(event, text, lambda digits: int(digits, 0))
        if _FLOAT.match(text):
            return self._number(event, text, float)
        if _NOT_FINITE.match(text):
            self._fail(
                event, f"{text} is not a number that JSON knows; quote it or use null", "document-number"
            )
        return text

    def _number(self, event: Any, text: str, make: Callable[[str], int | float]) -> int | float:
        try:
            value = make(text)
        except ValueError:
            self._fail(event, "an integer has too many digits", "document-number")
        if type(value) is int and value.bit_length() > MAX_INT_BITS:
            self._fail(event, f"an integer has more than {MAX_INT_BITS} bits", "document-number")
        if isinstance(value, float) and not math.isfinite(value):
            self._fail(event, f"the number {text[:40]} is too large", "document-number")
        return value

    def _add(self, value: Json, height: int, event: Any) -> None:
        if not self._stack:
            if value is not None:  # what stands between two --- may be empty
                self._documents.append(value)
            return
        frame = self._stack[-1]
        frame.height = max(frame.height, height)
        held: Any = frame.value
        if type(held) is list:
            cast("list[Json]", held).append(value)
        elif frame.key is None:
            frame.key = self._key(frame, value, event)
        else:
            held[frame.key] = value
            frame.key = None

    def _key(self, frame: _Frame, key: Json, event: Any) -> str:
        if not isinstance(key, str):
            shown = json.dumps(key)[:40]
            self._fail(event, f"the key {shown} is {_word(key)}; keys are text: quote it", "document-key")
        if key == "<<" and not getattr(event, "style", None):
            self._fail(event, "merge keys (<<) are not YAML 1.2; write the fields out", "document-key")
        line: int = event.start_mark.line + 1
        if key in frame.value:
            first = frame.lines[key]
            problem = f"the key {_shown(key)} stands twice in one object, first in line {first}"
            self._fail(event, problem, "document-duplicate-key")
        frame.lines[key] = line
        return key


def _copy(value: Json) -> Json:
    """A copy, so that two uses of an anchor share nothing; depth is bounded by `MAX_DEPTH`."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in cast("_Document", value).items()}
    if isinstance(value, list):
        return [_copy(item) for item in cast("list[Json]", value)]
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
