"""The ends of a run: what each asks for, who waits for it, and when that has been done."""

from __future__ import annotations

from typing import Any, Final, cast

from sqlalchemy import Connection, RowMapping, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound
from agentmesh_dagster.records import Json, RunStatus
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.inbox import send_run_ended
from agentmesh_dagster.store.run_rows import lease_holder, require_holder
from agentmesh_dagster.store.tables import runs

RUN_TIMEOUT: Final = "run-timeout"
"""The code of the error of a run whose time is over."""

_ENDS_WAITS: Final = (RunStatus.CANCELED, RunStatus.SUCCEEDED)


def counted_ending(run: RowMapping, status: RunStatus) -> dict[str, Any]:
    """What one more end changes in a run's row: the number of its ends, and whether this one asks for anything.

    Args:
        run: The run's row before.
        status: How it ends.
    """
    ending: int = run["endings"] + 1
    is_failure = run["finalizers"] == "failure" and status is RunStatus.FAILED
    asks = run["finalizers"] == "always" or is_failure
    return {"endings": ending} if asks else {"endings": ending, "finalized": ending}


def ends_waits(status: RunStatus, error: Json) -> bool:
    """Whether nobody waits any more for what is open in a run that comes to a status.

    The waits of a failed run stay open, for its retry; not of one whose time is over.
    """
    return status in _ENDS_WAITS or (status is RunStatus.FAILED and is_run_timeout(error))


def is_retried(run: RowMapping, status: RunStatus) -> bool:
    """Whether a run that comes to a status is yet to be retried by AgentMesh, as far as its row says.

    Whoever finds that it may not be says so (`Runs.give_up_retries`).
    """
    return status is RunStatus.FAILED and bool(run["by_claim"]) and run["retries_left"] > 0


def is_run_timeout(error: Json) -> bool:
    """Whether a run's error is that its time was over."""
    return isinstance(error, dict) and cast("dict[str, Json]", error).get("code") == RUN_TIMEOUT


def announce_ending(connection: Connection, database: Database, clock: Clock, run: RowMapping) -> None:
    """Tells those who wait for the end of a run, where another run started it.

    Args:
        connection: In a transaction that has locked the run, and written its end.
        database: The connection's database.
        clock: Gives the moment and the ids.
        run: The run's row before.

    Raises:
        RunsBusy: Other transactions have locked runs that wait for it.
    """
    if run["parent_run_id"] is not None:
        ended = connection.execute(select(runs).where(runs.c.id == run["id"])).mappings().one()
        send_run_ended(connection, database, clock, ended)


def mark_finalized(connection: Connection, run_id: str, ending: int, holder: str | None) -> None:
    """Says that what one of a run's ends asked for has been done. The caller has locked the run.

    Raises:
        NotFound: The run is not stored (code `no-run`).
        RunRefused: The holder, where one is named, does not hold the run's lease (code `lease-lost`).
    """
    known = connection.execute(select(runs.c.id, lease_holder(run_id)).where(runs.c.id == run_id)).first()
    if known is None:
        raise NotFound(f"there is no run {run_id!r}", code="no-run")
    if holder is not None:
        require_holder(run_id, holder, known[1])
    connection.execute(
        update(runs)
        .where(runs.c.id == run_id, runs.c.finalized < ending, runs.c.endings >= ending)
        .values(finalized=ending)
    )
