"""A gate from Dagster's own parts, as a Dagster user writes it: a table, a sensor that looks at it, a second job.

BENCH_APPROVALS is the SQLite file with the table.
"""

# No `from __future__ import annotations` here: Dagster reads the annotations of ops.

import os
import sqlite3
import time
from contextlib import closing
from typing import Any

import dagster as dg

TABLE = """CREATE TABLE IF NOT EXISTS approvals (
  id INTEGER PRIMARY KEY, decision TEXT, decided_at REAL, dagster_run_id TEXT, began_at REAL
)"""


def connect() -> sqlite3.Connection:
    """Opens the table's file."""
    return sqlite3.connect(os.environ["BENCH_APPROVALS"], timeout=10)


@dg.op(config_schema={"gates": int})
def ask(context: dg.OpExecutionContext) -> None:
    """Asks so many questions."""
    with closing(connect()) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(TABLE)
        connection.executemany(
            "INSERT INTO approvals (id) VALUES (?)",
            [(number,) for number in range(context.op_config["gates"])],
        )


@dg.op(config_schema={"approval": int})
def act(context: dg.OpExecutionContext) -> None:
    """The first step after the decision."""
    began_at = time.time()
    with closing(connect()) as connection, connection:
        connection.execute(
            "UPDATE approvals SET began_at = ?, dagster_run_id = ? WHERE id = ?",
            (began_at, context.run_id, context.op_config["approval"]),
        )


@dg.job
def before_the_gate() -> None:
    """What comes before the decision."""
    ask()


@dg.job
def after_the_gate() -> None:
    """What comes after it."""
    act()


@dg.sensor(job=after_the_gate, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def decisions(context: dg.SensorEvaluationContext) -> Any:
    """Requests a run for each decision since the last tick."""
    seen_until = float(context.cursor or 0)
    with closing(connect()) as connection:
        connection.execute(TABLE)
        found = connection.execute(
            "SELECT id, decided_at FROM approvals WHERE decided_at > ? ORDER BY decided_at", (seen_until,)
        ).fetchall()
    if not found:
        return dg.SkipReason("nothing was decided")
    context.update_cursor(str(found[-1][1]))
    return [
        dg.RunRequest(run_key=str(id_), run_config={"ops": {"act": {"config": {"approval": id_}}}})
        for id_, _ in found
    ]


defs = dg.Definitions(jobs=[before_the_gate, after_the_gate], sensors=[decisions])
