"""What a decision on an approval may say, and when one closes it: pure, and the only place that knows.

The rules, in the order in which a vote is held to them:

1. The approval is open, and its deadline has not passed.
2. One person votes once. Where `separation` is asked for, the run's launcher may not vote.
3. Voters are among the assignees: names, and groups as `group:<name>`. Without assignees anybody may vote, and one
   vote is enough. Once `escalate_at` has passed, those in `escalate_to` may vote too.
4. With `ordered`, vote number k is by entry k of the assignees, or by somebody of that group; one of `escalate_to`
   stands in for whoever's turn it is. In 2 to 4 a delegate's vote is that of who delegated it (see `voters`).
5. The decision is a known word, and its data fits the form. A rejection's data is kept, and need not fit.
6. Where several must agree, they agree on the data too: a vote whose data differs from that of an earlier one with the
   same decision is refused, and the refusal names the fields. The approval stays open.

Where one vote is required, the first closes. Where more are, the vote closes that gives a choice its quorum, or that
leaves no choice which those who have not voted could still bring to it: then the answer is `rejected`, by the voter who
rejected, or by `quorum` where people chose different options. Voters who all agree and are only too few never reject;
the approval stays open until its groups have members enough, or its deadline comes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from agentmesh_dagster.constants import HANDLE_APPROVED, HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.errors import ApprovalError, ExpressionError
from agentmesh_dagster.records import Json, Vote, Wait, WaitKind
from agentmesh_dagster.specs.fields import as_list, as_object
from agentmesh_dagster.specs.fittings import Fit, fit_now
from agentmesh_dagster.specs.schema_parts import path_text
from agentmesh_dagster.specs.voters import (
    Groups,
    entries,
    normalized,
    people,
    place_of,
    refusal,
    require_approval,
    require_open,
)

HAPPENED: Final = "happened"
"""The call that was cut off took effect; the decision's data is its output."""
REPEAT: Final = "repeat"
FAIL: Final = "fail"
UNKNOWN_OPTIONS: Final = (HAPPENED, REPEAT, FAIL)
"""What people may say of a call that was cut off."""

BY_TIMEOUT: Final = "timeout"
"""Who decided, where a deadline did."""
BY_QUORUM: Final = "quorum"
"""Who rejected, where people chose different options and none can get its quorum any more."""

_MAX_ISSUES: Final = 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a valid vote came to."""

    vote: Vote
    """The vote as it is kept: its decision in canonical form, its data filled and coerced."""
    answer: Json
    """The approval's answer where the vote closes it, as `records.Wait.answer`; None: more votes are needed."""


def weigh(wait: Wait, votes: Sequence[Vote], vote: Vote, groups: Groups, fit: Fit = fit_now) -> Verdict:
    """Weighs a vote on an approval.

    Args:
        wait: The approval.
        votes: Those accepted before, the oldest first.
        vote: The one to weigh; `vote.at` is the present moment.
        groups: Members of the project's groups.
        fit: Fits data to the form.

    Raises:
        ApprovalError: The vote is refused: `no-approval`, `already-decided`, `gate-closed`, `already-voted`,
            `delegated`, `separation`, `not-assignee`, `not-your-turn`, `bad-decision`, or `form` and `data-conflict`
            with `context.issues`, a list of `{"path", "message"}`.
    """
    require_approval(wait)
    require_open(wait, vote.at)
    place = place_of(wait, votes, vote.by, vote.at, groups)
    decision = _decision(wait, vote.decision)
    accepted = Vote(
        by=vote.by,
        decision=decision,
        data=_data(wait, decision, vote.data, fit),
        comment=vote.comment,
        at=vote.at,
        delegator="" if place == vote.by else place,
    )
    _require_same_data(wait, votes, accepted)
    return Verdict(vote=accepted, answer=_answer(wait, votes, accepted, groups))


def require_binding(wait: Wait, binding: str | None) -> None:
    """Refuses a decision that was made on another call than the approval's; None binds to nothing.

    Raises:
        ApprovalError: `stale`.
    """
    if binding is not None and binding != wait.binding:
        raise refusal(
            wait, "stale", "the decision is for another call than the one that waits now; look at it again"
        )


def check_received(wait: Wait, data: Json, fit: Fit = fit_now) -> Json:
    """The data for a suspension or an event, with the form's defaults and its types.

    Raises:
        ApprovalError: `form`, with `context.issues`: the data does not fit the wait's schema, or is not JSON.
    """
    if wait.form_schema is None:
        _require_storable(wait, data)
        return data
    return _fitting(wait, data, fit)


def check_event(wait: Wait, data: Json) -> Json:
    """The payload of an event for a wait, with the schema's defaults and its types.

    Raises:
        ApprovalError: `form`: the data does not fit the wait's schema; `other-event`: the wait's condition (`when`)
            does not hold; `event-condition`: the condition failed.
    """
    unfit: ApprovalError | None = None
    fitted = data
    try:
        fitted = check_received(wait, data)
    except ApprovalError as error:
        unfit = error
    condition = as_object(wait.data)
    if condition is not None and "when" in condition:
        from agentmesh_dagster.specs.expressions import evaluate

        names = {**(as_object(condition.get("names")) or {}), "payload": fitted}
        failed: ExpressionError | None = None
        holds: Json = False
        try:
            holds = evaluate(str(condition["when"]), names, where=f"the condition of {wait.step_key!r}")
        except ExpressionError as error:
            failed = error
        if failed is not None:
            raise unfit or ApprovalError(failed.message, code="event-condition", path=wait.step_key)
        if not holds:
            raise ApprovalError(
                f"the event is not the one that {wait.step_key!r} waits for: its condition does not hold",
                code="other-event",
                path=wait.step_key,
            )
    if unfit is not None:
        raise unfit
    return fitted


def received_answer(data: Json, *, by: str, at: datetime) -> dict[str, Any]:
    """The answer of a suspension or an event whose data has come."""
    return {"decision": "received", "data": data, "by": by, "at": at.isoformat()}


def timeout_answer(
    wait: Wait, at: datetime, votes: Sequence[Vote] = (), fit: Fit = fit_now
) -> dict[str, Any]:
    """The answer of a wait whose moment has come.

    Data that an approval by timeout would take, and that does not fit the form, approves nothing: the answer is then
    `timeout`, with the reason as its comment.

    Args:
        wait: The wait; a timer has elapsed, all else has expired.
        at: When.
        votes: Those that were given, kept where several were required.
        fit: Fits data to the form.
    """
    if wait.kind is WaitKind.TIMER:
        return {"decision": "elapsed", "at": at.isoformat()}
    decision, data, comment = HANDLE_TIMEOUT, wait.timeout_data, ""
    if wait.on_timeout == "reject":
        decision = HANDLE_REJECTED
    elif wait.on_timeout == "approve":
        try:
            data = _data(wait, HANDLE_APPROVED, wait.timeout_data, fit)
            decision = HANDLE_APPROVED
        except ApprovalError as refused:
            comment = f"Not approved by timeout: {refused.message}"
    answer = {"decision": decision, "data": data, "by": BY_TIMEOUT, "at": at.isoformat(), "comment": comment}
    return {**answer, "votes": [_vote_json(v) for v in votes]} if wait.required > 1 else answer


# What a vote says -------------------------------------------------------------------------------------------


def options_of(wait: Wait) -> tuple[str, ...]:
    """The words that may be decided at an approval."""
    if wait.kind is WaitKind.UNKNOWN:
        return wait.options or UNKNOWN_OPTIONS
    return wait.options or (HANDLE_APPROVED, HANDLE_REJECTED)


def _decision(wait: Wait, decision: Json) -> Json:
    """The decision in canonical form: where several options may be chosen, a list in the options' order."""
    options = options_of(wait)
    if not wait.multiple:
        if not isinstance(decision, str) or decision not in options:
            raise refusal(
                wait,
                "bad-decision",
                f"{_word(decision)} cannot be decided; choose one of {', '.join(options)}",
            )
        return decision
    chosen = [decision] if isinstance(decision, str) else as_list(decision)
    if not chosen:
        raise refusal(wait, "bad-decision", f"choose at least one of {', '.join(options)}")
    for option in chosen:
        if not isinstance(option, str) or option not in options:
            raise refusal(
                wait, "bad-decision", f"{_word(option)} cannot be chosen; choose of {', '.join(options)}"
            )
    if len(set(chosen)) < len(chosen):
        raise refusal(wait, "bad-decision", "an option is chosen twice")
    return [option for option in options if option in chosen]


def _word(value: Json) -> str:
    return repr(value[:60]) if isinstance(value, str) else "this value"


def _data(wait: Wait, decision: Json, data: Json, fit: Fit) -> Json:
    _require_storable(wait, data)
    if wait.kind is WaitKind.UNKNOWN and decision == HAPPENED:
        # It is the output of a call, of any type.
        return data if wait.form_schema is None else _fitting(wait, data, fit)
    needs_form = wait.kind is not WaitKind.UNKNOWN and decision != HANDLE_REJECTED
    if data is None and needs_form:
        if wait.kind is WaitKind.TOOL:
            return wait.prefill  # the arguments as they were asked for, and shown without their secrets
        data = wait.prefill
    elif data is not None and as_object(data) is None:
        raise _unfit(wait, [{"path": "$", "message": "must be an object"}])
    if not needs_form or wait.form_schema is None:
        return cast("Json", data)
    return _fitting(wait, {} if data is None else data, fit)


def _fitting(wait: Wait, data: Json, fit: Fit) -> Json:
    _require_storable(wait, data)
    fitted = fit(wait.form_schema, data)
    if fitted.issues:
        raise _unfit(wait, list(fitted.issues))
    return fitted.data


def _require_storable(wait: Wait, data: Json) -> None:
    try:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        raise _unfit(wait, [{"path": "$", "message": "is not JSON that can be stored"}]) from None
    if "\\u0000" in text and any("\x00" in found for found in _texts(data)):
        raise _unfit(wait, [{"path": "$", "message": "holds the character NUL, which cannot be stored"}])


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from _texts(item)


def _require_same_data(wait: Wait, votes: Sequence[Vote], vote: Vote) -> None:
    """Refuses data that differs from what earlier voters with the same decision gave: which of them would count?"""
    if _required(wait) == 1 or vote.decision == HANDLE_REJECTED:
        return
    agreeing = [earlier for earlier in votes if earlier.decision == vote.decision]
    if not agreeing or any(_same_json(earlier.data, vote.data) for earlier in agreeing):
        return
    earlier = agreeing[-1]
    fields = sorted(_differences(earlier.data, vote.data, ()))[:_MAX_ISSUES]
    names = ", ".join(fields)
    word = "arguments differ" if wait.kind is WaitKind.TOOL else "data differs"
    raise refusal(
        wait,
        "data-conflict",
        f"the {word} from what {earlier.by} decided, in {names}: give the same data, or reject. The approval "
        "stays open",
        {"issues": [{"path": name, "message": f"differs from the vote of {earlier.by}"} for name in fields]},
    )


def _same_json(first: Json, second: Json) -> bool:
    # `True == 1` in Python, and not in JSON.
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _differences(first: Json, second: Json, path: tuple[str | int, ...]) -> Iterator[str]:
    """The places in which two values differ; a value that only one of them has is one place."""
    one, other = as_object(first), as_object(second)
    left, right = as_list(first), as_list(second)
    if one is not None and other is not None:
        for name in dict.fromkeys((*one, *other)):
            if name in one and name in other:
                yield from _differences(one[name], other[name], (*path, name))
            else:
                yield path_text((*path, name))
    elif left is not None and right is not None and len(left) == len(right):
        for index, (item, opposite) in enumerate(zip(left, right, strict=True)):
            yield from _differences(item, opposite, (*path, index))
    elif not _same_json(first, second):
        yield path_text(path)


def _unfit(wait: Wait, issues: list[dict[str, str]]) -> ApprovalError:
    first = f"{issues[0]['path']}: {issues[0]['message']}"
    more = f" (and {len(issues) - 1} more)" if len(issues) > 1 else ""
    word = "data does" if wait.kind is not WaitKind.TOOL else "arguments do"
    message = f"the {word} not fit: {first}{more}"
    return refusal(wait, "form", message, {"issues": issues})


# Counting ---------------------------------------------------------------------------------------------------


def _required(wait: Wait) -> int:
    return wait.required if wait.assignees else 1


def _answer(wait: Wait, votes: Sequence[Vote], vote: Vote, groups: Groups) -> Json:
    required = _required(wait)
    everybody = [*votes, vote]
    if required == 1:
        return _closing(wait, vote, vote.decision, everybody)
    counts = Counter(choice for v in everybody if (choice := _choice(wait, v)) is not None)
    own = _choice(wait, vote)
    if own is not None and counts[own] >= required:
        return _closing(wait, vote, vote.decision, everybody)
    agree = len({_choice(wait, v) for v in everybody}) == 1 and own is not None
    if not agree and max(counts.values(), default=0) + _to_come(wait, everybody, vote.at, groups) < required:
        return _no_agreement(wait, everybody)
    return None


def _no_agreement(wait: Wait, votes: Sequence[Vote]) -> dict[str, Any]:
    """The answer of votes of which none can get its quorum any more; never in the name of somebody who agreed."""
    rejecting = [vote for vote in votes if vote.decision == HANDLE_REJECTED]
    if rejecting:
        return _closing(wait, rejecting[-1], HANDLE_REJECTED, votes)
    chosen = "; ".join(f"{vote.by}: {_shown_decision(vote.decision)}" for vote in votes)
    nobody = Vote(by=BY_QUORUM, decision=None, comment=f"No agreement: {chosen}", at=votes[-1].at)
    return _closing(wait, nobody, HANDLE_REJECTED, votes)


def _shown_decision(decision: Json) -> str:
    chosen = as_list(decision)
    return str(decision) if chosen is None else ", ".join(map(str, chosen))


def _choice(wait: Wait, vote: Vote) -> str | None:
    """What a vote counts for; None: for nothing."""
    if wait.kind is WaitKind.TOOL and vote.decision == HANDLE_APPROVED:
        return json.dumps(vote.data, sort_keys=True)
    if vote.decision == HANDLE_REJECTED and not wait.options:
        return None
    return json.dumps(vote.decision)


def _to_come(wait: Wait, votes: Sequence[Vote], at: datetime, groups: Groups) -> int:
    """How many votes can still be given."""
    if wait.ordered:
        return max(len(wait.assignees) - len(votes), 0)
    gone = {normalized(name) for vote in votes for name in (vote.by, vote.delegator)}
    if wait.separation:
        gone.add(normalized(wait.launcher))
    pool = {normalized(person) for person in people(entries(wait, at), groups)}
    return len(pool - gone)


def _closing(wait: Wait, vote: Vote, decision: Json, votes: Sequence[Vote]) -> dict[str, Any]:
    answer = {
        "decision": decision,
        "data": vote.data,
        "by": vote.by,
        **({"for": vote.delegator} if vote.delegator else {}),
        "at": vote.at.isoformat(),
        "comment": vote.comment,
    }
    return {**answer, "votes": [_vote_json(v) for v in votes]} if wait.required > 1 else answer


def _vote_json(vote: Vote) -> dict[str, Any]:
    return {
        "by": vote.by,
        **({"for": vote.delegator} if vote.delegator else {}),
        "decision": vote.decision,
        "data": vote.data,
        "comment": vote.comment,
        "at": vote.at.isoformat(),
    }
