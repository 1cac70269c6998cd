"""The journal's hottest write, steps with their events: few statements, compiled once, past SQLAlchemy's own work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, cast

from sqlalchemy import BindParameter, Connection, bindparam, not_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement

from agentmesh_dagster.errors import NotFound, ReplayError, StoreError
from agentmesh_dagster.records import Entry, Event, Json, Step, StepStatus
from agentmesh_dagster.store.columns import moment_to_text, to_text
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.run_rows import lease_holder, require_holder, step_record
from agentmesh_dagster.store.tables import events, runs, steps

_COUNTED: Final = (StepStatus.SUCCEEDED, StepStatus.FAILED)
_ANSWER: Final = ("status", "fingerprint", "node_hash", "output", "error", "routing_decision")
"""What makes two finished rows of a step the same answer."""
_MAX_KEYS_IN_QUERY: Final = 256
_STEP_COLUMNS: Final = tuple(column.name for column in steps.columns)
_EVENT_COLUMNS: Final = tuple(column.name for column in events.columns if column.name != "seq")

_Row = Sequence[Any]


class _Cursor(Protocol):
    """What PEP 249 and the drivers' named parameters give."""

    def execute(self, operation: str, parameters: _Row, /) -> object: ...
    def executemany(self, operation: str, parameters: Sequence[_Row], /) -> object: ...
    def fetchall(self) -> Sequence[_Row]: ...
    def close(self) -> object: ...


class _PsycopgCursor(_Cursor, Protocol):
    """What psycopg2 adds: a statement as it goes to the server, and several of them in one message."""

    def mogrify(self, operation: str, parameters: _Row, /) -> bytes: ...
    def execute(self, operation: str | bytes, parameters: Any = None, /) -> object: ...


class _Find(NamedTuple):
    """A query by keys, whose parameters are the keys with the run's id before and after them so many times."""

    sql: str
    ids_before: int
    ids_after: int


class _Insert(NamedTuple):
    """An INSERT of one row, and its parts, of which PostgreSQL's INSERT of many rows is made."""

    sql: str
    head: bytes
    row: str
    tail: bytes


@dataclass(frozen=True, slots=True)
class _Merged:
    """What entries come to that are written in order: the last row of each key, and what was said on the way."""

    rows: dict[str, Step] = field(default_factory=dict[str, Step])
    events: list[Event] = field(default_factory=list[Event])
    counted: set[str] = field(default_factory=set[str])
    """The keys of nodes that succeeded or failed."""


class StepWriter:
    """Writes steps and events in the caller's transaction, which has locked their runs (`lock_runs`)."""

    def __init__(self, database: Database) -> None:
        self._is_sqlite = database.is_sqlite
        # SQLite's driver takes a number as it is, and asks for an adapter of a bool.
        self._flags = (0, 1) if database.is_sqlite else (False, True)
        self._finds: dict[int, _Find] = {}
        upsert: sqlite.Insert | postgresql.Insert = database.insert(steps)
        own = [name for name in _STEP_COLUMNS if name not in ("run_id", "key")]
        self._upsert = self._insert(
            upsert.on_conflict_do_update(
                index_elements=["run_id", "key"],
                set_={name: upsert.excluded[name] for name in own},
                where=not_(steps.c.finished),
            ),
            _STEP_COLUMNS,
        )
        self._add_event = self._insert(
            database.insert(events).on_conflict_do_nothing(index_elements=["id"]), _EVENT_COLUMNS
        )
        self._add_totals, _ = self._compiled(
            update(runs)
            .values(
                steps_executed=runs.c.steps_executed + bindparam("more_steps"),
                input_tokens=runs.c.input_tokens + bindparam("more_input"),
                output_tokens=runs.c.output_tokens + bindparam("more_output"),
                cost_usd=runs.c.cost_usd + bindparam("more_cost"),
            )
            .where(runs.c.id == bindparam("of_run"))
        )

    def write_entries(
        self, connection: Connection, entries: Sequence[Entry], holder: str | None = None
    ) -> None:
        """Inserts or replaces the rows of steps of one run, adds their events, and adds to the run's totals.

        It comes to the same as writing them in order. Of entries with the same key the last one is written; against a
        row that was finished before, only the last one is held, because a batch may be repeated as a whole.

        Args:
            connection: In a transaction that has locked the run.
            entries: The entries.
            holder: Who writes, and must hold the run's lease; None: not asked.

        Raises:
            NotFound: The run is not stored (code `no-run`).
            ReplayError: A finished row, stored or written here, differs from a later one (code `step-finished`).
            RunRefused: The writer does not hold the run's lease any more (code `lease-lost`).
            ValueError: The steps are of several runs.
        """
        run_id = entries[0].step.run_id
        merged = _merge(run_id, entries)
        cursor: _Cursor = connection.connection.cursor()
        try:
            stored, found = self._look_up(cursor, run_id, tuple(merged.rows))
            if holder is not None:
                require_holder(run_id, holder, found)
            finished = {key for key, (is_finished, _) in stored.items() if is_finished}
            if finished:
                for key in finished:
                    _require_same(_stored_step(connection, run_id, key), merged.rows[key])
                merged = _merge(run_id, [entry for entry in entries if entry.step.key not in finished])
            self._write(
                cursor, run_id, merged, {key for key, (_, is_counted) in stored.items() if is_counted}
            )
        finally:
            cursor.close()

    def write_events(self, connection: Connection, records: Sequence[Event]) -> None:
        """Appends events; one whose id is stored already is left out."""
        cursor: _Cursor = connection.connection.cursor()
        try:
            self._execute(cursor, (), records, None)
        finally:
            cursor.close()

    def _look_up(
        self, cursor: _Cursor, run_id: str, keys: Sequence[str]
    ) -> tuple[dict[str, tuple[bool, bool]], str | None]:
        """Of the keys that have a row, whether it is finished and whether it is counted; and who holds the run.

        Raises:
            NotFound: The run is not stored (code `no-run`).
        """
        stored: dict[str, tuple[bool, bool]] = {}
        holder: str | None = None
        for start in range(0, len(keys), _MAX_KEYS_IN_QUERY):
            part = tuple(keys[start : start + _MAX_KEYS_IN_QUERY])
            # Few lengths, so that few statements are compiled and prepared: the last key fills the rest.
            length = 1 << (len(part) - 1).bit_length()
            find = self._finds.get(length) or self._find(length)
            ids = (run_id,)
            its_keys = (*part, *part[-1:] * (length - len(part)))
            cursor.execute(find.sql, ids * find.ids_before + its_keys + ids * find.ids_after)
            found = cursor.fetchall()
            if not found:
                raise NotFound(
                    f"there is no run {run_id!r}, so its step {keys[0]!r} has no place", code="no-run"
                )
            holder = found[0][3]
            stored.update(
                (key, (finished, counted)) for key, finished, counted, _ in found if key is not None
            )
        return stored, holder

    def _find(self, length: int) -> _Find:
        names = [f"key_{number}" for number in range(length)]
        keys: list[BindParameter[str]] = [bindparam(name) for name in names]
        its_steps = (steps.c.run_id == runs.c.id) & steps.c.key.in_(keys)
        query = (
            select(steps.c.key, steps.c.finished, steps.c.counted, lease_holder(bindparam("of_run")))
            .select_from(runs.outerjoin(steps, its_steps))
            .where(runs.c.id == bindparam("of_run"))
        )
        sql, order = self._compiled(query)
        before = order.index(names[0])
        find = self._finds[length] = _Find(sql, before, len(order) - before - length)
        return find

    def _write(self, cursor: _Cursor, run_id: str, merged: _Merged, counted: set[str]) -> None:
        """Writes rows, of which the keys in `counted` have been added to `steps_executed` before."""
        rows: list[_Row] = []
        input_tokens = output_tokens = 0
        cost_usd = 0.0
        for key, step in merged.rows.items():
            is_finished = step.is_finished
            if is_finished:
                input_tokens += step.input_tokens
                output_tokens += step.output_tokens
                cost_usd += step.cost_usd
            rows.append(self._step_row(step, is_finished, key in merged.counted or key in counted))
        more = (len(merged.counted - counted), input_tokens, output_tokens, cost_usd)
        self._execute(cursor, rows, merged.events, (*more, run_id) if any(more) else None)

    def _execute(
        self,
        cursor: _Cursor,
        rows: Sequence[_Row],
        records: Sequence[Event],
        totals: _Row | None,
    ) -> None:
        of_events = [self._event_row(event) for event in records]
        inserts = [pair for pair in ((self._upsert, rows), (self._add_event, of_events)) if pair[1]]
        if self._is_sqlite:
            for insert, its_rows in inserts:
                cursor.executemany(insert.sql, its_rows)
            if totals is not None:
                cursor.execute(self._add_totals, totals)
        elif inserts:
            # One message to the server and one answer, in place of one for each statement.
            sender = cast("_PsycopgCursor", cursor)
            message = [
                insert.head + b",".join([sender.mogrify(insert.row, row) for row in its_rows]) + insert.tail
                for insert, its_rows in inserts
            ]
            if totals is not None:
                message.append(sender.mogrify(self._add_totals, totals))
            sender.execute(b";".join(message))

    def _step_row(self, step: Step, is_finished: bool, is_counted: bool) -> _Row:
        """The values of `_STEP_COLUMNS`, in that order."""
        if (
            "\0"
            in f"{step.key}{step.node_id}{step.node_name}{step.fingerprint}{step.model_used}{step.parent_key}"
        ):
            _refuse_nul(step)
        flags = self._flags
        queued_at, started_at, finished_at = step.queued_at, step.started_at, step.finished_at
        input_, output, error, routing = step.input, step.output, step.error, step.routing_decision
        return (
            step.run_id,
            step.key,
            step.node_id,
            step.node_type,
            step.node_name,
            step.kind,
            step.parent_key,
            _keys_text(step.predecessor_keys),
            step.iteration_index,
            step.attempt,
            step.status.value,
            flags[is_finished],
            flags[is_counted],
            step.fingerprint,
            step.model_used,
            step.child_run_id,
            step.input_tokens,
            step.output_tokens,
            step.cost_usd,
            None if queued_at is None else _moment_text(queued_at),
            None if started_at is None else _moment_text(started_at),
            None if finished_at is None else _moment_text(finished_at),
            step.duration_ms,
            step.dagster_run_id,
            None if input_ is None else _fast_text(input_),
            None if output is None else _fast_text(output),
            None if error is None else _fast_text(error),
            None if routing is None else _fast_text(routing),
            step.node_hash,
            step.entity_kind,
            step.entity_slug,
        )

    def _event_row(self, event: Event) -> _Row:
        """The values of `_EVENT_COLUMNS`, in that order."""
        payload = event.payload
        return (
            event.id,
            _moment_text(event.at),
            event.project,
            event.run_id,
            event.step_key,
            event.type,
            None if payload is None else _fast_text(payload),
        )

    def _insert(self, statement: sqlite.Insert | postgresql.Insert, columns: Sequence[str]) -> _Insert:
        # `inline`: nobody asks for the number that an event gets.
        sql, _ = self._compiled(statement.inline(), columns)
        head, values, rest = sql.partition(" VALUES ")
        row, conflict, tail = rest.partition(" ON CONFLICT ")
        return _Insert(sql, f"{head}{values}".encode(), row, f"{conflict}{tail}".encode())

    def _compiled(
        self, statement: ClauseElement, columns: Sequence[str] | None = None
    ) -> tuple[str, Sequence[str]]:
        """The statement with parameters by position, and their names in the order of their positions."""
        dialect = (
            sqlite.dialect(paramstyle="qmark") if self._is_sqlite else postgresql.dialect(paramstyle="format")
        )
        compiled = cast("SQLCompiler", statement.compile(dialect=dialect, column_keys=columns))
        return str(compiled), compiled.positiontup or ()


def _merge(run_id: str, entries: Sequence[Entry]) -> _Merged:
    merged = _Merged()
    rows, records, counted = merged.rows, merged.events, merged.counted
    for entry in entries:
        step = entry.step
        key = step.key
        if step.run_id != run_id:
            raise ValueError(f"the steps of one write are of the runs {run_id!r} and {step.run_id!r}")
        before = rows.get(key)
        if before is not None and before.is_finished:
            _require_same(before, step)
            continue
        rows[key] = step
        if entry.events:
            records += entry.events
        if step.kind == "node" and step.status in _COUNTED:
            counted.add(key)
    return merged


def _refuse_nul(step: Step) -> None:
    """In JSON a NUL character is kept; PostgreSQL's text cannot hold one, so no database gets one there."""
    for name in ("key", "node_id", "node_name", "fingerprint", "model_used", "parent_key"):
        if "\0" in (getattr(step, name) or ""):
            raise StoreError(f"the {name} of the step {step.key!r} has a NUL character", code="nul-character")


def _stored_step(connection: Connection, run_id: str, key: str) -> Step:
    query = select(steps).where(steps.c.run_id == run_id, steps.c.key == key)
    return step_record(connection.execute(query).mappings().one())


def _require_same(finished: Step, step: Step) -> None:
    """A finished row stays: an equal answer is fine, since a writer may repeat itself after an outage.

    So is the begin of the step that it ended, which an outage has kept back.
    """
    begins = step.status is StepStatus.RUNNING and step.dagster_run_id == finished.dagster_run_id
    if begins and step.fingerprint == finished.fingerprint:
        return
    for name in _ANSWER:
        if getattr(finished, name) != getattr(step, name):
            raise ReplayError(
                f"the step {step.key!r} of run {step.run_id!r} is finished ({finished.status.value}), "
                f"and another {name} cannot replace its own",
                code="step-finished",
                path=step.key,
            )


@lru_cache(maxsize=16)
def _second_text(year: int, month: int, day: int, hour: int, minute: int, second: int) -> str:
    """What the texts of a second's moments begin with."""
    return moment_to_text(datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc))[:20]


def _moment_text(at: datetime) -> str:
    """As `moment_to_text`, in half the time."""
    if at.tzinfo is not timezone.utc:
        return moment_to_text(at)
    second = _second_text(at.year, at.month, at.day, at.hour, at.minute, at.second)
    return f"{second}{at.microsecond:06d}+00:00"


@lru_cache(maxsize=64)
def _keys_text(keys: tuple[str, ...]) -> str:
    return to_text(keys)


def _construct_encoder() -> Callable[[Json, int], Iterable[str]] | None:
    """The encoder that `json.dumps` makes for each value anew, without its look-out for cycles; CPython has it."""
    construct: Any = getattr(json.encoder, "c_make_encoder", None)
    if construct is None:
        return None
    refuse = json.JSONEncoder().default
    return construct(None, refuse, json.encoder.encode_basestring, None, ":", ",", False, False, False)


_encode: Final = _construct_encoder()


def _fast_text(value: Json) -> str:
    """As `to_text`, in a third of the time."""
    if _encode is None:
        return to_text(value)
    try:
        text = "".join(_encode(value, 0))
        text.encode()
    except (TypeError, ValueError, RecursionError):
        # It says what is wrong, or escapes what no encoding has.
        return to_text(value)
    return text
