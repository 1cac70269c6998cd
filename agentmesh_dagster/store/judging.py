"""Whether events fit the waits for them: found out outside of any transaction.

Schemas and conditions come from documents, and may take their time. A transaction that meets a wait and an event which
nobody has judged raises `Unjudged` and rolls back; whoever began it lets `Unjudged.judge` work, and begins it anew. The
judgements stand in `Database.judgements` meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentmesh_dagster.errors import ApprovalError
from agentmesh_dagster.records import Json, Wait
from agentmesh_dagster.specs.decisions import check_event
from agentmesh_dagster.store.engine import Database

MAX_JUDGINGS: Final = 10
_MAX_REMEMBERED: Final = 2_000


@dataclass(frozen=True)
class Judgement:
    """Whether an event fits a wait."""

    data: Json = None
    """The payload, with the defaults and the types of the wait's schema."""
    refusal: ApprovalError | None = None


@dataclass(frozen=True)
class Pair:
    """A wait, and an event that came for it."""

    wait: Wait
    token: str
    """What tells the event from all others."""
    data: Json


class Unjudged(Exception):
    """A transaction needs to know of some pairs whether they fit: it rolls back, and they are judged first."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        super().__init__(f"{len(pairs)} events are to be judged")
        self.pairs = tuple(pairs)

    def judge(self, database: Database) -> None:
        """Judges the pairs. Not in a transaction, and not on an event loop."""
        if len(database.judgements) > _MAX_REMEMBERED:
            database.judgements.clear()
        for pair in self.pairs:
            try:
                found = Judgement(data=check_event(pair.wait, pair.data))
            except ApprovalError as refusal:
                found = Judgement(refusal=refusal)
            database.judgements[pair.wait.id, pair.token] = found
