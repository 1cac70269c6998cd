"""Claims: who may continue a run, decided once for each time that it can go on.

The protocol is a lease with a compare-and-set, on the run's own row: a claim is made while the run stands still and no
other claim counts, is carried by one Dagster run as a tag, and is bound by it when it begins. A claim that is not
bound in time counts no more, and the next one waits twice as long for its Dagster run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    RowMapping,
    and_,
    case,
    exists,
    func,
    insert,
    literal,
    not_,
    null,
    or_,
    select,
    text,
    union_all,
    update,
)

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound, RunRefused
from agentmesh_dagster.faults import fault_point
from agentmesh_dagster.records import Claim, ReadyRun, RunStatus
from agentmesh_dagster.store.columns import UtcDateTime
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import (
    READY_WAITS,
    RETRIED_RUNS,
    claims,
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

# From this many unbound claims on, the window is the longest.
_MOST_MISSES: Final = 6
_CONTINUABLE: Final = {
    "gate": (RunStatus.WAITING.value,),
    "retry": (RunStatus.FAILED.value,),
    "resume": (RunStatus.WAITING.value, RunStatus.FAILED.value, RunStatus.CANCELED.value),
}
_BINDABLE: Final = (RunStatus.WAITING.value, RunStatus.FAILED.value, RunStatus.CANCELED.value)


@dataclass(frozen=True, kw_only=True)
class Poll:
    """What there is to do in a project."""

    ready: tuple[ReadyRun, ...] = field(default=())
    """Runs that can go on and that nobody continues; those that could first come first."""
    has_due: bool = False
    """Whether `waits.settle_due` has something to do."""
    has_notices: bool = False
    """Whether `notices.due` has some."""


class Claims:
    """Makes claims, and says what there is to claim. The journal binds them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def poll(self, project: str, now: datetime) -> Poll:
        """What there is to do in a project at a moment; one statement."""
        with self._database.read() as connection:
            rows = connection.execute(_poll(project, now)).mappings().all()
        words = {row["reason"] for row in rows}
        found = [row for row in rows if row["run_id"] is not None]
        found.sort(key=lambda row: (row["since"] or now, row["run_id"], row["ordinal"]))
        first: dict[str, RowMapping] = {}
        bound: dict[str, list[str]] = {}
        for row in found:
            first.setdefault(row["run_id"], row)
            bound.setdefault(row["run_id"], []).append(row["dagster_run_id"])
        return Poll(
            ready=tuple(_ready_run(row, bound[run_id]) for run_id, row in first.items()),
            has_due="due" in words,
            has_notices="notices" in words,
        )

    def claim(self, run_id: str, *, reason: str, now: datetime | None = None) -> Claim | None:
        """Claims a run, by compare-and-set on its row.

        Args:
            run_id: The run.
            reason: `gate`: it waits, and something that it waited for has come. `retry`: it failed after a Dagster
                run that came by a claim, and has retries left. `resume`: somebody asked for it; it waits, failed or
                was canceled.
            now: The moment; default the clock's.

        Returns:
            None where the run does not stand so, a Dagster run holds its lease, or another claim still counts.

        Raises:
            NotFound: There is no such run (code `no-run`).
        """
        fault_point("claim.before")
        moment = now or self._clock.now()
        with self._database.write() as connection:
            claim = self._claim(connection, run_id, reason, moment)
        fault_point("claim.after")
        return claim

    def renew(self, claim_id: str, now: datetime | None = None) -> bool:
        """Counts a claim from now again: its Dagster run is still on its way.

        Returns:
            False where the claim is bound, or was given back.
        """
        with self._database.write() as connection:
            renewed = connection.execute(
                update(runs)
                .where(
                    runs.c.id == select(claims.c.run_id).where(claims.c.id == claim_id).scalar_subquery(),
                    runs.c.claim_id == claim_id,
                )
                .values(claimed_at=now or self._clock.now())
            )
        return renewed.rowcount == 1

    def is_ready(self, run_id: str) -> bool:
        """Whether a run has an answer that no Dagster run has taken up, as `poll` asks it.

        It may be claimed all the same only as it stands: see `claim`.
        """
        with self._database.read() as connection:
            return connection.execute(select(_has_answer(run_id))).scalar_one()

    def _claim(self, connection: Connection, run_id: str, reason: str, now: datetime) -> Claim | None:
        statuses = _CONTINUABLE[reason]
        row = (
            connection.execute(
                select(runs.c.claim_id, runs.c.claim_misses)
                .where(runs.c.id == run_id)
                .with_for_update(key_share=True)
            )
            .mappings()
            .first()
        )
        if row is None:
            raise NotFound(f"there is no run {run_id!r}", code="no-run")
        conditions: list[ColumnElement[bool]] = [runs.c.status.in_(statuses), _is_free(now)]
        if reason == "gate":
            conditions.append(_has_answer(run_id))
        if reason == "retry":
            conditions.append(text(RETRIED_RUNS))  # pyright: ignore[reportArgumentType] - a condition in words
        if connection.execute(select(runs.c.id).where(runs.c.id == run_id, *conditions)).first() is None:
            return None
        claim = Claim(id=self._clock.new_id(), run_id=run_id, reason=reason, made_at=now)
        misses: int = row["claim_misses"]
        if row["claim_id"] is not None:
            give_back(connection, row["claim_id"])
            misses += 1
        connection.execute(
            insert(claims).values(id=claim.id, run_id=run_id, reason=reason, made_at=now, is_current=True)
        )
        connection.execute(
            update(runs)
            .where(runs.c.id == run_id)
            .values(claim_id=claim.id, claimed_at=now, claim_misses=misses)
        )
        return claim


def load_claim(connection: Connection, claim_id: str) -> Claim | None:
    """The claim of that id, or None."""
    row = connection.execute(select(claims).where(claims.c.id == claim_id)).mappings().first()
    return None if row is None else Claim(**row)


def give_back(connection: Connection, claim_id: str) -> None:
    """Says of a claim that it counts no more. The caller has locked its run, and changes the run's row."""
    connection.execute(
        update(claims)
        .where(claims.c.id == claim_id, claims.c.dagster_run_id.is_(None))
        .values(is_current=False)
    )


def spend_claim(connection: Connection, claim_id: str, dagster_run_id: str) -> None:
    """Binds a claim that nobody has bound to a Dagster run, and does nothing for its run."""
    connection.execute(
        update(claims)
        .where(claims.c.id == claim_id, claims.c.dagster_run_id.is_(None))
        .values(dagster_run_id=dagster_run_id)
    )


def bind_claim(
    connection: Connection, run: RowMapping, claim_id: str, dagster_run_id: str, *, is_bound: bool
) -> Claim:
    """Binds a run's claim to a Dagster run. The caller has locked the run, and changes its row.

    Args:
        connection: In a transaction that writes.
        run: The run's row.
        claim_id: The claim.
        dagster_run_id: Who continues the run by it.
        is_bound: Whether the Dagster run is bound to the run already, as it says for the second time.

    Raises:
        RunRefused: The claim is not this Dagster run's, or does not count (code `claim-lost`).
    """
    claim = load_claim(connection, claim_id)
    if claim is None or claim.run_id != run["id"]:
        raise _lost(run["id"], "it was not made for this run")
    if claim.dagster_run_id is not None:
        if claim.dagster_run_id == dagster_run_id and is_bound:
            return claim
        raise _lost(run["id"], f"the Dagster run {claim.dagster_run_id!r} came with it before")
    if run["claim_id"] != claim_id:
        raise _lost(run["id"], "it was given back, because no Dagster run came with it in time")
    if run["status"] not in _BINDABLE:
        raise _lost(run["id"], f"the run is {run['status']} by now")
    spend_claim(connection, claim_id, dagster_run_id)
    return claim


def _lost(run_id: str, why: str) -> RunRefused:
    return RunRefused(
        f"this Dagster run was to continue run {run_id!r} by a claim, which does not count: {why}. It ends here, and "
        "nothing was done twice",
        code="claim-lost",
    )


def _poll(project: str, now: datetime) -> CompoundSelect[Any]:
    # From the answers to their runs: few are not taken up, however many runs wait.
    answered = (
        select(waits.c.run_id, func.min(waits.c.ready_at).label("since"))
        .where(waits.c.project == project, text(READY_WAITS))
        .group_by(waits.c.run_id)
        .subquery()
    )
    gates = (
        _ready("gate", answered.c.since, now)
        .select_from(answered.join(runs, runs.c.id == answered.c.run_id))
        .where(runs.c.status == RunStatus.WAITING.value)
    )
    retries = _ready("retry", runs.c.finished_at, now).where(runs.c.project == project, text(RETRIED_RUNS))
    ready = union_all(gates, retries).subquery()
    with_dagster_runs = select(ready, dagster_runs.c.dagster_run_id, dagster_runs.c.ordinal).join(
        dagster_runs, dagster_runs.c.run_id == ready.c.run_id
    )
    nothing = [null()] * 8
    due = or_(
        exists().where(waits.c.project == project, waits.c.next_at <= now),
        exists().where(inbox.c.project == project, inbox.c.expires_at <= now),
    )
    told = exists().where(notices.c.project == project, notices.c.next_at <= now)
    return union_all(
        with_dagster_runs,
        select(literal("due"), *nothing).where(due),
        select(literal("notices"), *nothing).where(told),
    )


def _ready(reason: str, since: ColumnElement[datetime], now: datetime) -> Any:
    return select(
        literal(reason).label("reason"),
        runs.c.id.label("run_id"),
        runs.c.slug,
        runs.c.publication,
        runs.c.definition_hash,
        runs.c.claim_id,
        since.label("since"),
    ).where(_is_free(now))


def _is_free(now: datetime) -> ColumnElement[bool]:
    """Of a run: no claim counts, and no Dagster run holds a lease."""
    windows = {
        misses: literal(now - timedelta(seconds=window_s(misses)), UtcDateTime)
        for misses in range(_MOST_MISSES)
    }
    longest = literal(now - timedelta(seconds=LONGEST_WINDOW_S), UtcDateTime)
    counts_since = case(windows, value=runs.c.claim_misses, else_=longest)
    live = exists().where(leases.c.run_id == runs.c.id, leases.c.expires_at > now)
    return and_(or_(runs.c.claim_id.is_(None), runs.c.claimed_at <= counts_since), not_(live))


def _has_answer(run_id: str) -> ColumnElement[bool]:
    return exists().where(waits.c.run_id == run_id, text(READY_WAITS))


def window_s(misses: int) -> int:
    """How long a claim waits for its Dagster run when so many before it were never bound."""
    return min(FIRST_WINDOW_S * 2**misses, LONGEST_WINDOW_S)


def _ready_run(row: RowMapping, dagster_run_ids: Sequence[str]) -> ReadyRun:
    return ReadyRun(
        run_id=row["run_id"],
        slug=row["slug"],
        publication=row["publication"],
        definition_hash=row["definition_hash"],
        dagster_run_ids=tuple(dagster_run_ids),
        reason=row["reason"],
        expired_claim=row["claim_id"],
    )
