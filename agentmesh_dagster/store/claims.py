"""Claims: who may continue a run, decided once for each time that it can go on.

The protocol is a lease with a compare-and-set, on the run's own row: a claim is made while the run stands still, or has
not begun, and no other claim counts; it is carried by one Dagster run as a tag, and bound by it when it begins. A claim
that is not bound in time counts no more, and the next one waits twice as long for its Dagster run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import NotFound, RunRefused
from agentmesh_dagster.faults import fault_point
from agentmesh_dagster.records import Claim, Event, ReadyRun, RunStatus
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.ready_runs import conditions_of, has_answer, moments, poll_statement
from agentmesh_dagster.store.run_rows import dagster_runs_of, insert_events
from agentmesh_dagster.store.tables import claims, runs

MAX_FINALIZINGS: Final = 3
"""So many Dagster runs may begin to finalize one ending of a run, each after the one before was lost."""

_FINAL: Final = tuple(status.value for status in RunStatus if status.is_final)
_CONTINUABLE: Final = (RunStatus.WAITING.value, RunStatus.FAILED.value, RunStatus.CANCELED.value)
_BINDABLE: Final = {
    "gate": _CONTINUABLE,
    "retry": _CONTINUABLE,
    "resume": _CONTINUABLE,
    "start": (RunStatus.PENDING.value,),
    "finalize": _FINAL,
}
_CLAIM_COLUMNS: Final = tuple(claims.c[field.name] for field in fields(Claim))


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
        """What there is to do in a project at a moment.

        One statement, however much there is; and where runs can go on, one more for each 500 of them.
        """
        with self._database.read() as connection:
            asked = {"of_project": project, **moments(now)}
            rows = connection.execute(poll_statement(), asked).mappings().all()
            found = [row for row in rows if row["run_id"] is not None]
            bound = dagster_runs_of(connection, [row["run_id"] for row in found])
        words = {row["reason"] for row in rows}
        found.sort(key=lambda row: (row["since"] or now, row["run_id"]))
        return Poll(
            ready=tuple(_ready_run(row, bound[row["run_id"]]) for row in found),
            has_due="due" in words,
            has_notices="notices" in words,
        )

    def claim(self, run_id: str, *, reason: str, now: datetime | None = None) -> Claim | None:
        """Claims a run, by compare-and-set on its row.

        Args:
            run_id: The run.
            reason: `gate`: it waits, and something that it waited for has come. `retry`: it failed after a Dagster
                run that came by a claim, and has retries left. `resume`: somebody asked for it; it waits, failed or
                was canceled. `start`: another run started it, and no Dagster run is bound to it. `finalize`: it has
                ended, nobody retries it by itself, and what its end asks for has not been done. After
                `MAX_FINALIZINGS` Dagster runs that did not do it, it is given up, with the event
                `run.finalize_failed`.
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
            query = select(runs.c.id).where(runs.c.id == run_id, has_answer())
            return connection.execute(query).first() is not None

    def _claim(self, connection: Connection, run_id: str, reason: str, now: datetime) -> Claim | None:
        locked = select(runs).where(runs.c.id == run_id).with_for_update(key_share=True)
        row = connection.execute(locked).mappings().first()
        if row is None:
            raise NotFound(f"there is no run {run_id!r}", code="no-run")
        may = select(runs.c.id).where(runs.c.id == run_id, *conditions_of(reason))
        if connection.execute(may, moments(now)).first() is None:
            return None
        ending: int | None = row["endings"] if reason == "finalize" else None
        if ending is not None and _begun_finalizings(connection, run_id, ending) >= MAX_FINALIZINGS:
            self._give_up_finalizing(connection, row, now)
            return None
        claim = Claim(id=self._clock.new_id(), run_id=run_id, reason=reason, made_at=now)
        misses: int = row["claim_misses"]
        if row["claim_id"] is not None:
            give_back(connection, row["claim_id"])
            misses += 1
        connection.execute(
            insert(claims).values(
                id=claim.id, run_id=run_id, reason=reason, made_at=now, is_current=True, ending=ending
            )
        )
        connection.execute(
            update(runs)
            .where(runs.c.id == run_id)
            .values(claim_id=claim.id, claimed_at=now, claim_misses=misses)
        )
        return claim

    def _give_up_finalizing(self, connection: Connection, run: RowMapping, now: datetime) -> None:
        """Says that a run's end asks for nothing more. The caller has locked the run."""
        ending: int = run["endings"]
        values = {"finalized": ending, "claim_id": None, "claimed_at": None, "claim_misses": 0}
        connection.execute(update(runs).where(runs.c.id == run["id"]).values(**values))
        if run["claim_id"] is not None:
            give_back(connection, run["claim_id"])
        told = Event(
            id=self._clock.new_id(),
            at=now,
            project=run["project"],
            run_id=run["id"],
            type="run.finalize_failed",
            payload={"ending": ending, "attempts": MAX_FINALIZINGS},
        )
        insert_events(connection, self._database, [told])


def _begun_finalizings(connection: Connection, run_id: str, ending: int) -> int:
    """How many Dagster runs were bound to a run to finalize one of its endings."""
    bound = select(func.count()).where(
        claims.c.run_id == run_id,
        claims.c.ending == ending,
        claims.c.is_current,
        claims.c.dagster_run_id.is_not(None),
    )
    return connection.execute(bound).scalar_one()


def load_claim(connection: Connection, claim_id: str) -> Claim | None:
    """The claim of that id, or None."""
    row = connection.execute(select(*_CLAIM_COLUMNS).where(claims.c.id == claim_id)).mappings().first()
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
    if run["status"] not in _BINDABLE[claim.reason]:
        raise _lost(run["id"], f"the run is {run['status']} by now")
    spend_claim(connection, claim_id, dagster_run_id)
    return claim


def _lost(run_id: str, why: str) -> RunRefused:
    return RunRefused(
        f"this Dagster run was to continue run {run_id!r} by a claim, which does not count: {why}. It ends here, and "
        "nothing was done twice",
        code="claim-lost",
    )


def _ready_run(row: RowMapping, dagster_run_ids: Sequence[str]) -> ReadyRun:
    return ReadyRun(
        run_id=row["run_id"],
        kind=row["kind"],
        slug=row["slug"],
        publication=row["publication"],
        definition_hash=row["definition_hash"],
        dagster_run_ids=tuple(dagster_run_ids),
        reason=row["reason"],
        expired_claim=row["claim_id"],
    )
