"""The journal's hottest write, a step with its events, as SQL that is compiled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, cast

from sqlalchemy import Connection, bindparam, not_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.expression import Executable

from agentmesh_dagster.errors import NotFound, ReplayError, StoreError
from agentmesh_dagster.records import Event, Json, Step, StepStatus
from agentmesh_dagster.store.columns import moment_to_text
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.exact import exact_text, to_jsonb_text, to_text
from agentmesh_dagster.store.run_rows import STEP_JSON, last_bound, require_last, step_record
from agentmesh_dagster.store.tables import events, runs, steps

_COUNTED = (StepStatus.SUCCEEDED, StepStatus.FAILED)


class _Cursor(Protocol):
    """What PEP 249 and the drivers' named parameters give."""

    def execute(self, operation: str, parameters: Mapping[str, Any], /) -> object: ...
    def fetchone(self) -> Sequence[Any] | None: ...
    def close(self) -> object: ...


class _PsycopgCursor(_Cursor, Protocol):
    """What psycopg2 adds: a statement as it goes to the server, and several of them in one message."""

    def mogrify(self, operation: str, parameters: Mapping[str, Any], /) -> bytes: ...
    def execute(self, operation: str | bytes, parameters: Mapping[str, Any] | None = None, /) -> object: ...


_Statement = tuple[str, Mapping[str, Any]]


class StepWriter:
    """Writes steps and events in the caller's transaction, which has locked their runs (`lock_runs`)."""

    def __init__(self, database: Database) -> None:
        self._is_sqlite = database.is_sqlite
        dialect: Dialect = (
            sqlite.dialect(paramstyle="named") if database.is_sqlite else database.engine.dialect
        )

        def compiled(statement: Executable, names: Sequence[str] | None = None) -> str:
            return str(statement.compile(dialect=dialect, column_keys=names))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType] - every statement has it

        step_names = [column.name for column in steps.columns]
        upsert: sqlite.Insert | postgresql.Insert = database.insert(steps)
        self._upsert = compiled(
            upsert.on_conflict_do_update(
                index_elements=["run_id", "key"],
                set_={name: upsert.excluded[name] for name in step_names if name not in ("run_id", "key")},
                where=not_(steps.c.finished),
            ),
            step_names,
        )
        self._add_event = compiled(
            database.insert(events).on_conflict_do_nothing(index_elements=["id"]),
            [column.name for column in events.columns if column.name != "seq"],
        )
        self._find = compiled(
            select(runs.c.id, steps.c.finished, steps.c.counted, last_bound(bindparam("of_run")))
            .select_from(
                runs.outerjoin(steps, (steps.c.run_id == runs.c.id) & (steps.c.key == bindparam("step_key")))
            )
            .where(runs.c.id == bindparam("of_run"))
        )
        self._add_totals = compiled(
            update(runs)
            .where(runs.c.id == bindparam("of_run"))
            .values(
                steps_executed=runs.c.steps_executed + bindparam("more_steps"),
                input_tokens=runs.c.input_tokens + bindparam("more_input"),
                output_tokens=runs.c.output_tokens + bindparam("more_output"),
                cost_usd=runs.c.cost_usd + bindparam("more_cost"),
            )
        )

    def write_step(self, connection: Connection, step: Step, records: Sequence[Event]) -> None:
        """Inserts or replaces the row of a step, adds its events, and adds to the totals of its run.

        Raises:
            NotFound: The run is not stored (code `no-run`).
            ReplayError: The stored row is finished and differs (code `step-finished`).
            RunRefused: A later Dagster run than the step's is bound to the run (code `lease-lost`).
        """
        cursor: _Cursor = connection.connection.cursor()
        try:
            cursor.execute(self._find, {"of_run": step.run_id, "step_key": step.key})
            found = cursor.fetchone()
            if found is None:
                raise NotFound(
                    f"there is no run {step.run_id!r}, so its step {step.key!r} has no place", code="no-run"
                )
            _, was_finished, was_counted, last = found
            if step.dagster_run_id:
                require_last(step.run_id, step.dagster_run_id, last)
            if was_finished:
                _compare(connection, step)
                return
            _refuse_nul(step)
            counts = step.kind == "node" and step.status in _COUNTED
            is_finished = step.is_finished
            row = self._step_row(step, finished=is_finished, counted=counts or bool(was_counted))
            statements: list[_Statement] = [(self._upsert, row), *self._event_statements(records)]
            more_steps = int(counts and not was_counted)
            tokens = (step.input_tokens, step.output_tokens, step.cost_usd) if is_finished else (0, 0, 0.0)
            if more_steps or any(tokens):
                more = {"more_input": tokens[0], "more_output": tokens[1], "more_cost": tokens[2]}
                statements.append(
                    (self._add_totals, {"of_run": step.run_id, "more_steps": more_steps, **more})
                )
            self._execute(cursor, statements)
        finally:
            cursor.close()

    def write_events(self, connection: Connection, records: Sequence[Event]) -> None:
        """Appends events; one whose id is stored already is left out."""
        cursor: _Cursor = connection.connection.cursor()
        try:
            self._execute(cursor, self._event_statements(records))
        finally:
            cursor.close()

    def _event_statements(self, records: Sequence[Event]) -> list[_Statement]:
        return [(self._add_event, self._event_row(event)) for event in records]

    def _execute(self, cursor: _Cursor, statements: Sequence[_Statement]) -> None:
        if self._is_sqlite:
            for sql, parameters in statements:
                cursor.execute(sql, parameters)
        elif statements:
            # One message to the server and one answer, in place of one for each statement.
            sender = cast("_PsycopgCursor", cursor)
            sender.execute(b";".join(sender.mogrify(sql, parameters) for sql, parameters in statements))

    def _step_row(self, step: Step, *, finished: bool, counted: bool) -> dict[str, Any]:
        moment = self._moment
        json_text = self._json
        return {
            "run_id": step.run_id,
            "key": step.key,
            "node_id": step.node_id,
            "node_type": step.node_type,
            "node_name": step.node_name,
            "kind": step.kind,
            "parent_key": step.parent_key,
            "predecessor_keys": json_text(step.predecessor_keys),
            "iteration_index": step.iteration_index,
            "attempt": step.attempt,
            "status": step.status.value,
            "finished": finished,
            "counted": counted,
            "fingerprint": step.fingerprint,
            "model_used": step.model_used,
            "child_run_id": step.child_run_id,
            "input_tokens": step.input_tokens,
            "output_tokens": step.output_tokens,
            "cost_usd": step.cost_usd,
            "queued_at": moment(step.queued_at),
            "started_at": moment(step.started_at),
            "finished_at": moment(step.finished_at),
            "duration_ms": step.duration_ms,
            "dagster_run_id": step.dagster_run_id,
            "input": json_text(step.input),
            "output": json_text(step.output),
            "error": json_text(step.error),
            "routing_decision": json_text(step.routing_decision),
            "exact": None
            if self._is_sqlite
            else exact_text({name: getattr(step, name) for name in STEP_JSON}),
        }

    def _event_row(self, event: Event) -> dict[str, Any]:
        return {
            "id": event.id,
            "at": self._moment(event.at),
            "project": event.project,
            "run_id": event.run_id,
            "step_key": event.step_key,
            "type": event.type,
            "payload": self._json(event.payload),
            "exact": None if self._is_sqlite else exact_text({"payload": event.payload}),
        }

    def _json(self, value: Json) -> str | None:
        if value is None:
            return None
        return to_text(value) if self._is_sqlite else to_jsonb_text(value)

    def _moment(self, value: datetime | None) -> Any:
        if value is None:
            return None
        text = moment_to_text(value)
        return text if self._is_sqlite else value


def _refuse_nul(step: Step) -> None:
    """In JSON a NUL character is kept; PostgreSQL's text cannot hold one, so no database gets one there."""
    for name in ("key", "node_id", "node_name", "fingerprint", "model_used", "parent_key"):
        if "\0" in (getattr(step, name) or ""):
            raise StoreError(f"the {name} of the step {step.key!r} has a NUL character", code="nul-character")


def _compare(connection: Connection, step: Step) -> None:
    """A finished row stays: an equal answer is fine, since a writer may repeat itself after an outage."""
    row = (
        connection.execute(select(steps).where(steps.c.run_id == step.run_id, steps.c.key == step.key))
        .mappings()
        .one()
    )
    stored = step_record(row)
    for name in ("status", "fingerprint", "output", "error", "routing_decision"):
        if getattr(stored, name) != getattr(step, name):
            raise ReplayError(
                f"the step {step.key!r} of run {step.run_id!r} is finished ({stored.status.value}), "
                f"and another {name} cannot replace its own",
                code="step-finished",
                path=step.key,
            )
