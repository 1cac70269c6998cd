"""What there is to do in a project, asked in one statement; and on which condition a run may be claimed for it.

The statement is asked several times a second: it is built once, and its moments are parameters (`moments`).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cache
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Text,
    TextClause,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    not_,
    null,
    or_,
    select,
    text,
    union_all,
)

from agentmesh_dagster.records import RunStatus
from agentmesh_dagster.store.columns import UtcDateTime, database_moment
from agentmesh_dagster.store.tables import (
    READY_WAITS,
    RETRIED_RUNS,
    STARTING_RUNS,
    UNFINALIZED_RUNS,
    dagster_runs,
    inbox,
    leases,
    notices,
    runs,
    waits,
)

FIRST_WINDOW_S: Final = 60
"""How long the first claim waits for its Dagster run; each later one twice as long as the one before."""

LONGEST_WINDOW_S: Final = 3600

LEFT_TO_DAGSTER_S: Final = 3600
"""How long a failed run with retries left, which Dagster retries and not AgentMesh, is held for one that goes on."""

# From this many unbound claims on, the window is the longest.
_MOST_MISSES: Final = 6
_RESUMABLE: Final = (RunStatus.WAITING.value, RunStatus.FAILED.value, RunStatus.CANCELED.value)

_PROJECT: Final = bindparam("of_project", type_=Text)
_NOW: Final = bindparam("now", type_=UtcDateTime)

_Conditions = list[ColumnElement[bool] | TextClause]


def window_s(misses: int) -> int:
    """How long a claim waits for its Dagster run when so many before it were never bound."""
    return min(FIRST_WINDOW_S * 2**misses, LONGEST_WINDOW_S)


def moments(now: datetime) -> dict[str, datetime]:
    """The parameters of `poll_statement`, besides the project, and of `conditions_of`."""
    ago = {f"window_{misses}": window_s(misses) for misses in range(_MOST_MISSES + 1)}
    ago["left"] = LEFT_TO_DAGSTER_S
    return {"now": now, **{name: now - timedelta(seconds=seconds) for name, seconds in ago.items()}}


def conditions_of(reason: str) -> _Conditions:
    """On what a run may be claimed, for a reason as a claim's; with the parameters `moments`."""
    if reason == "gate":
        return [_is_free(), runs.c.status == RunStatus.WAITING.value, has_answer()]
    if reason == "resume":
        return [_is_free(), runs.c.status.in_(_RESUMABLE)]
    return [_is_free(), *_OF_ITSELF[reason]()]


def has_answer() -> ColumnElement[bool]:
    """Of a run: something that it waited for has come, and no Dagster run has taken it up."""
    return exists().where(waits.c.run_id == runs.c.id, text(READY_WAITS))


@cache
def poll_statement() -> CompoundSelect[Any]:
    """What there is to do in the project `of_project` at a moment, with the parameters `moments`.

    Returns:
        Rows of `reason`, `run_id`, `kind`, `slug`, `publication`, `definition_hash`, `claim_id` and `since`, for each
        run that can go on. And a row of the reason `due` or `notices` alone, where something is.
    """
    # From the answers to their runs: few are not taken up, however many runs wait.
    answered = (
        select(waits.c.run_id, func.min(waits.c.ready_at).label("since"))
        .where(waits.c.project == _PROJECT, text(READY_WAITS))
        .group_by(waits.c.run_id)
        .subquery()
    )
    gates = (
        _ready("gate", answered.c.since)
        .select_from(answered.join(runs, runs.c.id == answered.c.run_id))
        .where(runs.c.status == RunStatus.WAITING.value)
    )
    by_themselves = [
        _ready(reason, since).where(runs.c.project == _PROJECT, *_OF_ITSELF[reason]())
        for reason, since in (
            ("retry", runs.c.finished_at),
            ("start", runs.c.created_at),
            ("finalize", runs.c.finished_at),
        )
    ]
    nothing = [null()] * 7
    due = or_(
        exists().where(waits.c.project == _PROJECT, waits.c.next_at <= _NOW),
        exists().where(inbox.c.project == _PROJECT, inbox.c.expires_at <= _NOW),
    )
    told = exists().where(notices.c.project == _PROJECT, notices.c.next_at <= _NOW)
    return union_all(
        gates,
        *by_themselves,
        select(literal("due"), *nothing).where(due),
        select(literal("notices"), *nothing).where(told),
    )


def _ready(reason: str, since: ColumnElement[datetime]) -> Any:
    return select(
        literal(reason).label("reason"),
        runs.c.id.label("run_id"),
        runs.c.kind,
        runs.c.slug,
        runs.c.publication,
        runs.c.definition_hash,
        runs.c.claim_id,
        since.label("since"),
    ).where(_is_free())


def _ago(name: str) -> ColumnElement[datetime]:
    return bindparam(name, type_=UtcDateTime)


def _is_free() -> ColumnElement[bool]:
    """Of a run: no claim counts, and no process holds a lease."""
    windows = {misses: _ago(f"window_{misses}") for misses in range(_MOST_MISSES)}
    counts_since = case(windows, value=runs.c.claim_misses, else_=_ago(f"window_{_MOST_MISSES}"))
    live = exists().where(leases.c.run_id == runs.c.id, leases.c.expires_at > database_moment(0.0))
    return and_(or_(runs.c.claim_id.is_(None), runs.c.claimed_at <= counts_since), not_(live))


def _is_retried() -> _Conditions:
    return [text(RETRIED_RUNS)]


def _starts() -> _Conditions:
    return [text(STARTING_RUNS), not_(exists().where(dagster_runs.c.run_id == runs.c.id))]


def _finalizes() -> _Conditions:
    """An ended run whose end is the last one, as far as anybody knows.

    A failed run with retries left is retried: by a claim, or by Dagster itself. Whoever finds that it is not says so
    (`give_up_retries`). What Dagster makes of its own retries nobody may be there to see, so that such a run counts as
    ended after a while; should it be retried after all, its next end asks again.
    """
    is_given_up = and_(not_(runs.c.by_claim), runs.c.finished_at <= _ago("left"))
    has_ended = or_(runs.c.status != RunStatus.FAILED.value, runs.c.retries_left <= 0, is_given_up)
    return [text(UNFINALIZED_RUNS), has_ended]


_OF_ITSELF: Final = {"retry": _is_retried, "start": _starts, "finalize": _finalizes}
