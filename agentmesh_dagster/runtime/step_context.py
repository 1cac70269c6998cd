"""What a function of a `code` node or a `function` tool may know of its step, and how it waits in the middle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from agentmesh_dagster.errors import NodeError, TimeOver
from agentmesh_dagster.records import Json, Wait, WaitKind, WaitStatus
from agentmesh_dagster.runtime.waiting import Suspended, deadline_text, new_wait
from agentmesh_dagster.specs.base import DURATION_FORMS, parse_duration
from agentmesh_dagster.specs.schema import check_schema

if TYPE_CHECKING:
    from agentmesh_dagster.runtime.session import RunSession

MAX_LABEL_CHARS: Final = 100


class SuspendTimeout(TimeOver):
    """What a function suspended for did not come in time."""

    default_code = "suspend-timeout"


@dataclass
class StepContext:
    """What a function of a `code` node or a `function` tool may know of its step, and how it waits.

    A parameter that is annotated with this class gets it; it is no part of the function's input.
    """

    session: RunSession
    step_key: str
    """Such as `review`, or `pay/tool/1`: the same in every attempt."""
    node_key: str
    idempotency_key: str
    """The same for every attempt of this step: hand it to what must not happen twice."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.session.run.id

    def suspend(
        self,
        payload: Json = None,
        *,
        label: str = "",
        resume_schema: Json = None,
        timeout: str | float | None = None,
    ) -> Json:
        """Waits for data from outside, with no worker: `agentmesh runs resume RUN --label L --data JSON`.

        The first call ends the function (it raises `Suspended`, which is no `Exception`). When the data has come, the
        function is called again from its start, and this call returns the data. So what comes before it must bear
        being done twice.

        Args:
            payload: Shown to those who answer; any JSON.
            label: Tells several suspensions of one step apart.
            resume_schema: A JSON Schema that the data must fit.
            timeout: Seconds, or such as `3d`, from the first call on.

        Returns:
            The data.

        Raises:
            SuspendTimeout: It did not come in time.
            NodeError: Label, schema or timeout are wrong (code `bad-suspend`).
        """
        known = self.session.wait(self.step_key, label)
        if known is None:
            wait = new_wait(self.session, WaitKind.SUSPEND, self.step_key, self.node_key, label)
            wait = replace(
                wait,
                title=f"{self.node_key} is suspended" + (f" at {label}" if label else ""),
                data=self.session.redact(payload),
                form_schema=resume_schema,
                deadline_at=self._deadline(wait, label, resume_schema, timeout),
            )
            raise Suspended([wait])
        if known.status is WaitStatus.OPEN:
            raise Suspended([known])
        if known.status is WaitStatus.EXPIRED:
            place = f" at {label!r}" if label else ""
            raise SuspendTimeout(
                f"step {self.step_key!r} was not resumed{place} until {deadline_text(known)}",
                path=self.step_key,
            )
        return known.answer["data"] if known.answer else None

    def _deadline(self, wait: Wait, label: str, schema: Json, timeout: str | float | None) -> datetime | None:
        problem = None
        if len(label) > MAX_LABEL_CHARS or "\0" in label:
            problem = f"the label is longer than {MAX_LABEL_CHARS} characters, or has a NUL character"
        elif schema is not None and (issues := check_schema(schema)):
            problem = f"the resume_schema is no JSON Schema: {issues[0].message}"
        seconds: object = None
        try:
            seconds = parse_duration(timeout)
        except ValueError as error:
            problem = f"timeout: {error}"
        if problem is None and seconds is not None and not (isinstance(seconds, float) and seconds > 0):
            problem = f"timeout: {timeout!r} must be positive: {DURATION_FORMS}"
        if problem is not None:
            raise NodeError(f"suspend() in step {self.step_key!r}: {problem}", code="bad-suspend")
        return wait.created_at + timedelta(seconds=seconds) if isinstance(seconds, float) else None
