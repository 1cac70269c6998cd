"""Waits, for people, senders of events and the clock: what is open, and every way in which it is answered."""

from __future__ import annotations

import builtins
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import Connection, exists, select

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Delegation, Delivery, Json, Vote, Wait, WaitKind, WaitStatus
from agentmesh_dagster.specs.decisions import (
    Verdict,
    check_received,
    received_answer,
    require_binding,
    weigh,
)
from agentmesh_dagster.specs.fittings import Fit, Fittings
from agentmesh_dagster.specs.voters import delegate, require_open
from agentmesh_dagster.store.audit import write_audit
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.groups import load_groups
from agentmesh_dagster.store.inbox import delete_expired, refuse_reserved, send_event
from agentmesh_dagster.store.run_rows import insert_events, lock_runs
from agentmesh_dagster.store.settling import settle_due
from agentmesh_dagster.store.tables import inbox, votes, waits
from agentmesh_dagster.store.wait_changes import close_siblings
from agentmesh_dagster.store.wait_rows import (
    add_notices,
    close_wait,
    insert_vote,
    load_votes,
    load_wait,
    refuse_nul,
    save_wait,
    vote_record,
    wait_event,
    wait_record,
)

KEEP_S: Final = 7 * 24 * 3600
"""How long an event that nothing waits for is kept."""

_SHORTEST_PREFIX: Final = 6
_SHOWN: Final = 5
_MAX_SHOWN: Final = 200


class Waits:
    """Reads and answers waits; the journal opens them and takes their answers up."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def list(
        self,
        project: str,
        *,
        run_id: str | None = None,
        kinds: Collection[WaitKind] | None = None,
        statuses: Collection[WaitStatus] | None = None,
        limit: int | None = 50,
    ) -> builtins.list[Wait]:
        """The oldest first.

        Args:
            project: The project's slug.
            run_id: Those of one run.
            kinds: Those of these kinds.
            statuses: Those that stand so.
            limit: At most so many; None for all.
        """
        query = select(waits).where(waits.c.project == project)
        if run_id is not None:
            query = query.where(waits.c.run_id == run_id)
        if kinds is not None:
            query = query.where(waits.c.kind.in_([kind.value for kind in kinds]))
        if statuses is not None:
            query = query.where(waits.c.status.in_([status.value for status in statuses]))
        query = query.order_by(waits.c.created_at, waits.c.id).limit(limit)
        with self._database.read() as connection:
            return [wait_record(row) for row in connection.execute(query).mappings()]

    def get(self, project: str, wait_id: str) -> Wait:
        """The wait.

        Args:
            project: The project's slug.
            wait_id: Its id, or six or more characters with which that id alone begins.

        Raises:
            ApprovalError: The project has none (code `no-approval`), or several ids begin so (`ambiguous-approval`).
        """
        with self._database.read() as connection:
            return _find(connection, project, wait_id)

    def votes(self, wait_id: str) -> builtins.list[Vote]:
        """The accepted votes on an approval, the oldest first; of a suspension the one that answered it."""
        with self._database.read() as connection:
            return load_votes(connection, wait_id)

    def votes_of_run(self, run_id: str) -> dict[str, builtins.list[Vote]]:
        """The accepted votes on all approvals of a run, by wait; each approval's oldest first."""
        query = (
            select(votes)
            .join(waits, waits.c.id == votes.c.wait_id)
            .where(waits.c.run_id == run_id)
            .order_by(votes.c.seq)
        )
        found: dict[str, builtins.list[Vote]] = {}
        with self._database.read() as connection:
            for row in connection.execute(query).mappings():
                found.setdefault(row["wait_id"], []).append(vote_record(row))
        return found

    def decide(self, project: str, wait_id: str, vote: Vote, *, binding: str | None = None) -> Wait:
        """Gives a vote on an approval, or the data for a suspension, whose vote's `decision` is None.

        In one transaction: the vote, the wait where the vote closes it, the gates that it closes with it, the run's
        events and the audit. Of several at once the first valid one that closes wins.

        Args:
            project: The project's slug.
            wait_id: As for `get`.
            vote: The vote; `vote.at` is the present moment.
            binding: What the voter saw the approval bound to (`Wait.binding`); None: not asked.

        Returns:
            The wait as it stands then; still open where more votes are needed.

        Raises:
            ApprovalError: The vote is refused; that has been recorded, in the audit (`decision-refused`) and among the
                run's events, without its data.
            NotFound: There is no such project (code `no-project`).
            StoreError: The comment has a NUL character (code `nul-character`).
        """
        refuse_nul({"comment": vote.comment}, "a decision")

        def decide(fit: Fit) -> Wait | ApprovalError:
            with self._database.write() as connection:
                self._database.require_project(connection, project)
                return self._decide(connection, project, wait_id, vote, binding, fit)

        outcome = Fittings().repeated(decide)
        if isinstance(outcome, ApprovalError):
            raise outcome
        return outcome

    def delegate(self, project: str, wait_id: str, delegation: Delegation) -> Wait:
        """Delegates a vote on an approval, or takes it back where `to` is the one who delegated it.

        In one transaction: the wait, its notices, the run's event and the audit. A vote that is given at the same
        time comes before or after it.

        Args:
            project: The project's slug.
            wait_id: As for `get`.
            delegation: The delegation; `delegation.at` is the present moment.

        Returns:
            The wait with the delegation.

        Raises:
            ApprovalError: The delegation is refused; that has been recorded, in the audit (`delegation-refused`) and
                among the run's events.
            NotFound: There is no such project (code `no-project`).
            StoreError: The comment has a NUL character (code `nul-character`).
        """
        refuse_nul({"comment": delegation.comment}, "a delegation")
        with self._database.write() as connection:
            self._database.require_project(connection, project)
            outcome = self._delegate(connection, project, wait_id, delegation)
        if isinstance(outcome, ApprovalError):
            raise outcome
        return outcome

    def send_event(
        self,
        project: str,
        name: str,
        key: str,
        data: Json,
        *,
        by: str = "",
        event_id: str | None = None,
        keep_s: float = KEEP_S,
    ) -> Delivery:
        """Delivers a named event to every open wait for it, in one transaction.

        A wait whose schema the data does not fit stays open, and its run gets the event `event.refused`. An event that
        answers no wait is kept for the first one that comes and that it fits, until it expires.

        Args:
            project: The project's slug.
            name: The event's name.
            key: The correlation key; empty where there is none.
            data: Any JSON.
            by: Who sends it.
            event_id: An id of the sender's own: for `keep_s` an event of the same id is a duplicate, and does nothing.
            keep_s: How long it is kept, in seconds; 0: not at all.

        Raises:
            ApprovalError: The name is of the events that AgentMesh sends itself (code `reserved-event`).
            NotFound: There is no such project (code `no-project`).
            StoreError: 1,000 events of that name are kept already (code `events-full`), or the name, key or id cannot
                be one (`bad-event`, `nul-character`), or the data is not JSON (`not-json`).
        """
        refuse_reserved(name)
        return send_event(
            self._database,
            self._clock,
            project,
            name,
            key,
            data,
            by=by,
            event_id=event_id,
            keep_s=keep_s,
        )

    def settle_due(self, project: str, now: datetime, *, limit: int = 500) -> builtins.list[Wait]:
        """Does what the clock asks for at a moment; several may do it at once, and each thing is done once.

        Timers elapse, waits whose deadline has passed expire with the answer that `on_timeout` says, those who may
        decide are reminded (once), and approvals are escalated. Events whose time is over are forgotten.

        Args:
            project: The project's slug.
            now: The moment.
            limit: At most about so many waits; call again while `claims.poll` says that more are due.

        Returns:
            The waits that were changed, as they stand now.
        """
        old = exists().where(inbox.c.project == project, inbox.c.expires_at <= now)
        with self._database.read() as connection:
            has_old = connection.execute(select(old)).scalar_one()
        if has_old:
            delete_expired(self._database, project, now)
        return settle_due(self._database, self._clock, project, now, limit)

    def _decide(
        self,
        connection: Connection,
        project: str,
        wait_id: str,
        vote: Vote,
        binding: str | None,
        fit: Fit,
    ) -> Wait | ApprovalError:
        try:
            found = _find(connection, project, wait_id)
        except ApprovalError as refusal:
            self._record_refused_vote(connection, project, None, wait_id, vote, refusal)
            return refusal
        lock_runs(connection, [found.run_id])
        wait = load_wait(connection, found.id) or found
        try:
            verdict = self._weigh(connection, wait, vote, binding, fit)
        except ApprovalError as refusal:
            self._record_refused_vote(connection, project, wait, wait_id, vote, refusal)
            return refusal
        return self._accept(connection, wait, verdict)

    def _delegate(
        self, connection: Connection, project: str, wait_id: str, delegation: Delegation
    ) -> Wait | ApprovalError:
        by, to = _printable(delegation.by), _printable(delegation.to)
        wait: Wait | None = None
        try:
            found = _find(connection, project, wait_id)
            lock_runs(connection, [found.run_id])
            wait = load_wait(connection, found.id) or found
            groups = load_groups(connection, project)
            changed = delegate(wait, load_votes(connection, wait.id), delegation, groups)
        except ApprovalError as refusal:
            what: dict[str, Json] = {"code": refusal.code, "by": by, "to": to}
            self._record_refusal(connection, project, wait, wait_id, "delegation-refused", what)
            return refusal
        save_wait(connection, changed)
        add_notices(connection, self._clock, changed, "delegated", delegation.at)
        said: dict[str, Json] = {"by": by, "to": to}
        insert_events(connection, self._database, [wait_event(self._clock, changed, "delegated", said)])
        detail = {"approval": wait.id, "to": to, "step_key": wait.step_key, "comment": delegation.comment}
        self._audit(connection, project, "delegation", by, f"run/{wait.run_id}", detail)
        return changed

    def _weigh(
        self, connection: Connection, wait: Wait, vote: Vote, binding: str | None, fit: Fit
    ) -> Verdict:
        if wait.kind is WaitKind.SUSPEND:
            require_open(wait, vote.at)
            if vote.decision is not None:
                raise ApprovalError(
                    f"{wait.step_key!r} is suspended: there is nothing to decide, it waits for data alone "
                    "(`agentmesh runs resume`)",
                    code="bad-decision",
                    path=wait.step_key,
                    context={"approval": wait.id},
                )
            data = check_received(wait, vote.data, fit)
            by = _printable(vote.by)
            answer = received_answer(data, by=by, at=vote.at)
            return Verdict(vote=replace(vote, by=by, decision=answer["decision"], data=data), answer=answer)
        if wait.kind.is_approval:
            require_open(wait, vote.at)
            require_binding(wait, binding)
        groups = load_groups(connection, wait.project)
        return weigh(wait, load_votes(connection, wait.id), vote, groups, fit)

    def _accept(self, connection: Connection, wait: Wait, verdict: Verdict) -> Wait:
        vote = verdict.vote
        insert_vote(connection, wait.id, vote)
        said = {"decision": vote.decision, "by": vote.by, **_in_place_of(vote.delegator)}
        if wait.kind.is_approval:
            insert_events(connection, self._database, [wait_event(self._clock, wait, "voted", said)])
        if verdict.answer is not None:
            wait = close_wait(
                connection,
                wait,
                status=WaitStatus.DECIDED,
                closed_by="decision",
                answer=verdict.answer,
                decided_at=vote.at,
            )
            final = {key: verdict.answer[key] for key in ("decision", "by", "for") if key in verdict.answer}
            insert_events(connection, self._database, [wait_event(self._clock, wait, "decided", final)])
            close_siblings(connection, self._database, self._clock, wait)
        detail = {
            "approval": wait.id,
            "decision": vote.decision,
            "step_key": wait.step_key,
            "comment": vote.comment,
            **_in_place_of(vote.delegator),
        }
        self._audit(connection, wait.project, "decision", vote.by, f"run/{wait.run_id}", detail)
        return wait

    def _record_refused_vote(
        self,
        connection: Connection,
        project: str,
        wait: Wait | None,
        wait_id: str,
        vote: Vote,
        refusal: ApprovalError,
    ) -> None:
        by, decision = _printable(vote.by), _words(vote.decision)
        what: dict[str, Json] = {"code": refusal.code, "by": by, "decision": decision}
        if refusal.code == "data-conflict":
            # The names of the fields, and never what they hold.
            what["fields"] = [issue["path"] for issue in refusal.context["issues"]]
            if wait is not None:
                add_notices(connection, self._clock, wait, "conflict", vote.at)
        self._record_refusal(connection, project, wait, wait_id, "decision-refused", what)

    def _record_refusal(
        self,
        connection: Connection,
        project: str,
        wait: Wait | None,
        wait_id: str,
        action: str,
        what: dict[str, Json],
    ) -> None:
        if wait is None:
            shown = _printable(wait_id)
            detail = {"approval": shown, **what}
            self._audit(connection, project, action, what["by"], f"approval/{shown}", detail)
            return
        insert_events(connection, self._database, [wait_event(self._clock, wait, "refused", what)])
        detail = {"approval": wait.id, "step_key": wait.step_key, **what}
        self._audit(connection, project, action, what["by"], f"run/{wait.run_id}", detail)

    def _audit(
        self, connection: Connection, project: str, action: str, actor: str, entity: str, detail: Json
    ) -> None:
        write_audit(connection, self._clock, project, action, actor=actor, entity=entity, detail=detail)


def _in_place_of(delegator: str) -> dict[str, Json]:
    return {"for": delegator} if delegator else {}


def _find(connection: Connection, project: str, wait_id: str) -> Wait:
    wanted = wait_id.strip()
    shown = repr(_printable(wanted))
    if len(wanted) < _SHORTEST_PREFIX or "\0" in wanted:
        raise ApprovalError(
            f"there is no approval {shown}; give its id, or {_SHORTEST_PREFIX} or more characters with which it "
            "begins",
            code="no-approval",
        )
    mine = select(waits).where(waits.c.project == project)
    exact = connection.execute(mine.where(waits.c.id == wanted)).mappings().first()
    if exact is not None:
        return wait_record(exact)
    like = mine.where(waits.c.id.startswith(wanted.lower(), autoescape=True)).order_by(waits.c.id)
    rows = connection.execute(like.limit(_SHOWN + 1)).mappings().all()
    if not rows:
        raise ApprovalError(
            f"there is no approval {shown} in the project {project!r}; `agentmesh approvals list` shows what is",
            code="no-approval",
        )
    if len(rows) > 1:
        ids = [row["id"] for row in rows[:_SHOWN]]
        more = ", ..." if len(rows) > _SHOWN else ""
        raise ApprovalError(
            f"several approvals begin with {shown}: {', '.join(ids)}{more}; give more characters",
            code="ambiguous-approval",
            context={"approvals": ids},
        )
    return wait_record(rows[0])


def _printable(text: str) -> str:
    """Text of whoever was refused, fit to be stored and shown."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_SHOWN])


def _words(decision: Json) -> Json:
    """What was to be decided, where it is a word or several; anything else may be data, and is not repeated."""
    if isinstance(decision, str):
        return _printable(decision)
    if isinstance(decision, list):
        items = cast("list[Any]", decision)
        return [_words(item) if isinstance(item, str) else None for item in items[:20]]
    return None
