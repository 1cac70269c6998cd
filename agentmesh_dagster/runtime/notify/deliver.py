"""Brings due notices to people: each is taken by compare-and-set, sent, and marked as sent or to be tried again.

A notice is delivered at least once. Who takes one pushes its next attempt `TAKEN_S` into the future, so that a process
that dies while it sends loses nothing; a receiver tells a repeat by the notice's id. What a notifier does changes
nothing about the approval: that stays open, and decidable.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Final, Protocol, cast

from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Event, Json, Notice, Wait, WaitStatus
from agentmesh_dagster.runtime.environment import Environment
from agentmesh_dagster.runtime.how_to_decide import moment, short_id
from agentmesh_dagster.runtime.notify.base import AnyNotifier, NotifyContext, Say
from agentmesh_dagster.runtime.notify.message import NoticeMessage, one_line, shortened
from agentmesh_dagster.runtime.secrets import Redactor
from agentmesh_dagster.specs.notify import NotifyConfig, notify_config

__all__ = ["BACKOFF_S", "SEND_LIMIT_S", "TAKEN_S", "Deliveries", "Notices", "Waits", "deliver"]

BACKOFF_S: Final = (10, 60, 300, 1_800, 7_200)
"""Seconds from a failed attempt to the next one; the last holds for all further ones."""
SEND_LIMIT_S: Final = 150.0
"""How long one attempt may take, whatever the notifier."""
TAKEN_S: Final = 240.0
"""How long a notice belongs to who took it."""
_AT_ONCE: Final = 8
_MAX_ERROR: Final = 1_000


class Notices(Protocol):
    """Of the store: messages on their way. Blocking; called from threads."""

    def due(self, project: str, now: datetime, /, *, limit: int = 50) -> Sequence[Notice]:
        """Those whose `next_at` has come, the oldest first."""
        ...

    def take(self, notice_id: str, /, *, now: datetime, until: datetime) -> bool:
        """Moves `next_at` from what has come to `until`, and counts an attempt; False where somebody else did."""
        ...

    def sent(self, notice_id: str, at: datetime, /) -> None:
        """Writes that it was delivered."""
        ...

    def failed(self, notice_id: str, error: str, next_at: datetime | None, /) -> None:
        """Writes that an attempt failed, and when it is tried again: never, where None."""
        ...


class Waits(Protocol):
    """Of the store: what notices speak of. Blocking; called from threads."""

    def get(self, project: str, wait_id: str, /) -> Wait:
        """The wait.

        Raises:
            ApprovalError: There is none.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Deliveries:
    """What became of the notices that were due."""

    sent: int = 0
    failed: int = 0
    """Tried again later."""
    given_up: int = 0
    dropped: int = 0
    """Not sent, because their approval is closed."""


class _Outcome(Enum):
    SENT = "sent"
    FAILED = "failed"
    GIVEN_UP = "given_up"
    DROPPED = "dropped"
    TAKEN = "taken"


async def deliver(
    project: str, notices: Notices, waits: Waits, environment: Environment, *, say: Say, limit: int = 50
) -> Deliveries:
    """Delivers what is due, many at once, one attempt each.

    It returns when the slowest receiver has answered: up to `SEND_LIMIT_S`, and more where many notices go to slow
    receivers. Who has other work does that beside it.

    Args:
        project: Whose notices.
        notices: Where they are.
        waits: What they speak of.
        environment: Secrets, HTTP client, clock, notifiers, and the journal, in which each delivery is an event.
        say: Takes a level (`debug`, `info`, `warning`) and a line: what `log` notifiers say, and what failed.
        limit: At most so many.

    Raises:
        StoreError: A row could not be read or written; the notices beside it were seen to first.
    """
    due = await asyncio.to_thread(notices.due, project, environment.clock.now(), limit=limit)
    # By type, so that slow receivers of one sort do not keep those of another waiting.
    turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))

    async def one(notice: Notice) -> _Outcome:
        async with turns[_type_of(notice.channel)]:
            return await _Delivery(notice, notices, waits, environment, say).run()

    outcomes = await asyncio.gather(*(one(notice) for notice in due), return_exceptions=True)
    count: Counter[_Outcome] = Counter()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        count[outcome] += 1
    return Deliveries(
        sent=count[_Outcome.SENT],
        failed=count[_Outcome.FAILED],
        given_up=count[_Outcome.GIVEN_UP],
        dropped=count[_Outcome.DROPPED],
    )


@dataclass(frozen=True)
class _Delivery:
    """One attempt to deliver one notice."""

    notice: Notice
    notices: Notices
    waits: Waits
    environment: Environment
    say: Say

    async def run(self) -> _Outcome:
        now = self.environment.clock.now()
        until = now + timedelta(seconds=TAKEN_S)
        if not await asyncio.to_thread(self.notices.take, self.notice.id, now=now, until=until):
            return _Outcome.TAKEN
        try:
            wait = await asyncio.to_thread(self.waits.get, self.notice.project, self.notice.wait_id)
        except ApprovalError as error:
            await self._mark(error.message, None)
            return _Outcome.DROPPED
        if wait.status is not WaitStatus.OPEN:
            await self._mark(f"not sent: the approval is {wait.status.value}", None)
            return _Outcome.DROPPED
        problem = await self._attempt(wait)
        if problem is None:
            await asyncio.to_thread(self.notices.sent, self.notice.id, self.environment.clock.now())
            await self._record("approval.notified", wait)
            return _Outcome.SENT
        return await self._failed(wait, problem)

    async def _attempt(self, wait: Wait) -> str | None:
        """Sends; gives what went wrong, without secrets."""
        environment = self.environment
        if self.notice.attempts >= _max_attempts(self.notice.channel):
            return "the process that made the last attempt ended in the middle of it"
        known = Redactor()
        try:
            notifier = environment.notifiers(_type_of(self.notice.channel))
            message = NoticeMessage.of(self.notice, wait)
            config = self._config(notifier, message, known)
            context = NotifyContext(
                secrets=environment.secrets,
                http=environment.http,
                clock=environment.clock,
                mail=environment.deployment.mail,
                say=self._redacted_say,
            )
            await within(notifier.send(config, message, context), SEND_LIMIT_S)
        except Exception as error:  # noqa: BLE001 - whatever a notifier raises, the approval and the others go on
            if isinstance(error, DeadlinePassed):
                return f"it took longer than {SEND_LIMIT_S:g} s"
            text: str = environment.secrets.redact_error(error)["message"]
            return shortened(one_line(known.redact_text(text)), _MAX_ERROR)
        return None

    def _config(self, notifier: AnyNotifier, message: NoticeMessage, known: Redactor) -> NotifyConfig:
        written = {
            field: value
            for field, value in cast("Mapping[str, Json]", self.notice.channel).items()
            # Of a gate that an earlier release opened.
            if field not in notifier.config_model.retired_fields
        }
        secrets = self.environment.secrets.use()
        # The deployment's values as they are now: a notice is of today, and no replay renders it again.
        names: dict[str, object] = {
            "approval": message.approval,
            "config": self.environment.deployment.config,
        }
        if notifier.config_model.takes_secrets:
            names["secret"] = secrets.lookup
        rendered = notifier.render(written, names)
        # Also those that were written in clear, or came from elsewhere than `secret()`.
        known.add(*(v for f in notifier.config_model.secret_fields if isinstance(v := rendered.get(f), str)))
        config = notify_config(rendered, {notifier.name: notifier.config_model})
        host, port = notifier.destination(config) or (None, 0)
        secrets.check_destination(host, port)
        return config

    async def _failed(self, wait: Wait, problem: str) -> _Outcome:
        notice, limit = self.notice, _max_attempts(self.notice.channel)
        made = min(notice.attempts + 1, limit)
        what = (
            f"the notifier {_type_of(notice.channel)!r} did not deliver notice {notice.id} ({notice.reason}) of "
            f"approval {short_id(wait)}, attempt {made} of {limit}: {problem}"
        )
        if made >= limit:
            self.say("warning", f"{what}; it is given up, and the approval stays open")
            await self._mark(problem, None)
            await self._record("approval.notify_failed", wait, error=problem)
            return _Outcome.GIVEN_UP
        wait_s = BACKOFF_S[min(notice.attempts, len(BACKOFF_S) - 1)]
        next_at = self.environment.clock.now() + timedelta(seconds=wait_s)
        self.say("warning", f"{what}; tried again at {moment(next_at)}")
        await self._mark(problem, next_at)
        return _Outcome.FAILED

    async def _mark(self, error: str, next_at: datetime | None) -> None:
        await asyncio.to_thread(self.notices.failed, self.notice.id, error, next_at)

    async def _record(self, type: str, wait: Wait, **facts: Json) -> None:
        clock, notice = self.environment.clock, self.notice
        payload = {
            "approval": wait.id,
            "notice": notice.id,
            "notifier": _type_of(notice.channel),
            "reason": notice.reason,
            "attempt": notice.attempts + 1,
            **facts,
        }
        event = Event(
            id=clock.new_id(),
            at=clock.now(),
            project=wait.project,
            run_id=wait.run_id,
            type=type,
            step_key=wait.step_key,
            payload=payload,
        )
        await self.environment.journal.record_events([event])

    def _redacted_say(self, level: str, line: str) -> None:
        self.say(level, str(self.environment.secrets.redact(line)))


def _type_of(channel: Json) -> str:
    name: object = cast("Mapping[str, Json]", channel).get("type") if isinstance(channel, Mapping) else None
    return name if isinstance(name, str) else ""


def _max_attempts(channel: Json) -> int:
    """As the config says, even where the rest of it cannot be read."""
    given: object = (
        cast("Mapping[str, Json]", channel).get("max_attempts") if isinstance(channel, Mapping) else None
    )
    return given if isinstance(given, int) else NotifyConfig.model_fields["max_attempts"].default
