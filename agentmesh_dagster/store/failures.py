"""What a database error becomes: a `StoreError` in one or two lines, without SQL, parameters or passwords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from agentmesh_dagster.errors import StoreError

# PostgreSQL's classes of SQLSTATE that another attempt may overcome: connection, resources, shutdown.
_UNAVAILABLE_STATES = ("08", "53", "57P")
_DISK_FULL_STATE = "53100"
# Two transactions met: a deadlock or a serialization failure.
_CONFLICT_STATE = "40"


class StoreUnavailable(StoreError):
    """The database could not be reached, or was too busy; the same call may succeed later."""

    default_code = "unreachable"

    def __init__(
        self, message: str, *, code: str | None = None, context: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code=code, context=context)

    @property
    def retryable(self) -> bool:
        return True


def shown_url(url: URL) -> str:
    """The URL for people: without its password, nor what its query may hide."""
    return url.set(drivername=url.get_backend_name(), query={}).render_as_string(hide_password=True)


def store_error(error: Exception, url: URL) -> StoreError:
    """The error to raise in place of SQLAlchemy's or the driver's."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable(
            f"the database {shown_url(url)} has no free connection; too many calls at once in this process",
            code="busy",
        )
    cause = error.orig if isinstance(error, DBAPIError) else error
    reason = _first_line(cause)
    # psycopg2 and psycopg name it differently.
    state: str | None = getattr(cause, "pgcode", None) or getattr(cause, "sqlstate", None)
    # PEP 249 fixes the names of a driver's errors, not their module.
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if state is not None and state.startswith(_CONFLICT_STATE):
        return StoreUnavailable(
            f"two writers met in the database {shown_url(url)}: {reason}. Try again", code="conflict"
        )
    if "IntegrityError" in kinds:
        return StoreError(f"the database {shown_url(url)} refused a row: {reason}", code="refused")
    if kinds & {"OperationalError", "InterfaceError"}:
        sqlite = url.get_backend_name() == "sqlite"
        if _is_full(reason, state, sqlite):
            return StoreUnavailable(
                f"the database {shown_url(url)} could not write: {reason}. Free space on its disk",
                code="disk-full",
            )
        if sqlite and "locked" in reason:
            return StoreUnavailable(
                f"the database {shown_url(url)} stayed locked by another process. Try again, or see who holds it",
                code="busy",
            )
        if _is_unreachable(reason, state, sqlite) or (
            isinstance(error, DBAPIError) and error.connection_invalidated
        ):
            return StoreUnavailable(
                f"the database {shown_url(url)} cannot be reached: {reason}.\n"
                "Check that it runs, and that AGENTMESH_DATABASE_URL names it."
            )
    return StoreError(f"the database {shown_url(url)} could not do this: {reason}")


def _is_full(reason: str, state: str | None, sqlite: bool) -> bool:
    # SQLite calls it an I/O error where its log, and not its file, could not grow.
    return ("is full" in reason or "disk I/O error" in reason) if sqlite else state == _DISK_FULL_STATE


def _is_unreachable(reason: str, state: str | None, sqlite: bool) -> bool:
    if sqlite:
        return "unable to open" in reason
    return state is None or state.startswith(_UNAVAILABLE_STATES)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
