"""Profiles a CSV file: the `code` node of the workflow `data-quality-report`."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
"""Files are named relative to the repository's root, and no file outside of it is read."""

MAX_BYTES: Final = 50_000_000
NULL_WORDS: Final = frozenset({"", "null", "none", "na", "n/a", "nan"})
HIGH_NULL_SHARE: Final = 0.2
"""From this share of empty values on, a column is a problem of high severity."""
ALMOST_ALL: Final = 0.8
"""A column has a type when this share of its values has it; the others are findings."""
LINES_SHOWN: Final = 5

_INTEGER: Final = re.compile(r"[+-]?\d+\Z")
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z")


@dataclass
class _Column:
    """What has been seen of one column; `types` holds the lines of the values by guessed type."""

    name: str
    nulls: int = 0
    values: set[str] = field(default_factory=set[str])
    types: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def add(self, value: str, line: int) -> None:
        if value.strip().lower() in NULL_WORDS:
            self.nulls += 1
            return
        self.values.add(value)
        self.types.setdefault(_type_of(value.strip()), []).append(line)

    def guess(self) -> str:
        """The type that almost all values have: integer, number, boolean, date, text; or `empty`, `mixed`."""
        counts = Counter({name: len(lines) for name, lines in self.types.items()})
        if not counts:
            return "empty"
        if "number" in counts:
            counts["number"] += counts.pop("integer", 0)
        name, count = counts.most_common(1)[0]
        return name if count >= ALMOST_ALL * counts.total() else "mixed"

    def lines_of_other_types(self) -> list[int]:
        """Lines whose value is not of the guessed type; any value is a text."""
        guess = self.guess()
        fitting = {guess, "integer"} if guess == "number" else {guess}
        if guess in ("text", "mixed"):
            return []
        return sorted(line for name, lines in self.types.items() if name not in fitting for line in lines)


def profile_csv(path: str) -> dict[str, Any]:
    """Counts rows, empty values, types and duplicates of a CSV file with a header line, and lists what looks wrong.

    Args:
        path: The file, relative to the repository's root. UTF-8, comma-separated.

    Returns:
        `path`; `rows`, the number of data rows; `columns`, a list of `{name, type, nulls, distinct}`;
        `duplicate_rows`, rows that repeat an earlier one; `issues`, a list of `{severity, column, message}` with
        severity `high` or `low`, high ones first (`column` is null for the whole file); `severity`, the worst of
        them, or `none`.

    Raises:
        ValueError: The path leaves the repository, or the file is missing, too large, empty or not UTF-8.
    """
    lines = _rows_of(_checked(path))
    _, header = next(lines, (0, list[str]()))
    if not header:
        raise ValueError(f"{path!r} is empty: a header line with the names of the columns is expected")
    columns = [_Column(name.strip() or f"column {number}") for number, name in enumerate(header, 1)]
    rows = 0
    seen: Counter[tuple[str, ...]] = Counter()
    ragged: list[int] = []
    for line, row in lines:
        rows += 1
        seen[tuple(row)] += 1
        if len(row) != len(columns):
            ragged.append(line)
        for column, value in zip(columns, row, strict=False):
            column.add(value, line)
    duplicates = rows - len(seen)
    issues = [*_file_issues(header, rows, ragged, duplicates), *_column_issues(columns, rows)]
    issues.sort(key=lambda issue: issue["severity"] != "high")
    return {
        "path": path,
        "rows": rows,
        "columns": [
            {"name": c.name, "type": c.guess(), "nulls": c.nulls, "distinct": len(c.values)} for c in columns
        ],
        "duplicate_rows": duplicates,
        "issues": issues,
        "severity": issues[0]["severity"] if issues else "none",
    }


def _checked(path: str) -> Path:
    file = (ROOT / path).resolve()
    if not file.is_relative_to(ROOT):
        raise ValueError(f"{path!r} leaves the repository: name a file in it, relative to its root")
    if not file.is_file():
        raise ValueError(f"there is no file {path!r} in the repository")
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path!r} is larger than {MAX_BYTES // 1_000_000} MB")
    return file


def _rows_of(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows with the number of the line on which they end; empty lines are passed over."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text)
            for row in reader:
                if row:
                    yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name!r} is not UTF-8: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ValueError(f"{file.name!r} is not a CSV file: {error}") from error


def _file_issues(
    header: list[str], rows: int, ragged: list[int], duplicates: int
) -> Iterator[dict[str, Any]]:
    repeated = [name for name, count in Counter(name.strip() for name in header).items() if count > 1]
    if repeated:
        yield _issue("high", None, f"columns share a name: {', '.join(map(repr, repeated))}")
    if not rows:
        yield _issue("high", None, "no data rows")
    if ragged:
        yield _issue("high", None, f"not {len(header)} values in {_count(ragged, 'row')}")
    if duplicates:
        yield _issue("low", None, f"duplicate rows: {duplicates} of {rows}")


def _column_issues(columns: list[_Column], rows: int) -> Iterator[dict[str, Any]]:
    for column in columns:
        if column.nulls:
            severity = "high" if column.nulls >= HIGH_NULL_SHARE * rows else "low"
            yield _issue(severity, column.name, f"empty values: {column.nulls} of {rows}")
        if column.guess() == "mixed":
            yield _issue("low", column.name, f"mixed types: {', '.join(sorted(column.types))}")
        if other := column.lines_of_other_types():
            yield _issue("high", column.name, f"not of type {column.guess()}: {_count(other, 'value')}")


def _issue(severity: str, column: str | None, message: str) -> dict[str, Any]:
    return {"severity": severity, "column": column, "message": message}


def _count(lines: list[int], noun: str) -> str:
    shown = ", ".join(map(str, lines[:LINES_SHOWN])) + (", ..." if len(lines) > LINES_SHOWN else "")
    return f"{len(lines)} {noun}{'s' if len(lines) > 1 else ''} (line {shown})"


def _is_date(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


_TESTS: Final[tuple[tuple[str, Callable[[str], object]], ...]] = (
    ("integer", _INTEGER.match),
    ("number", _NUMBER.match),
    ("boolean", lambda value: value.lower() in ("true", "false")),
    ("date", _is_date),
)


def _type_of(value: str) -> str:
    return next((name for name, fits in _TESTS if fits(value)), "text")
