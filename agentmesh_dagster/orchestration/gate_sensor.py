"""The gate sensors: they see what was decided, expired or came, and have Dagster continue the runs that waited for it.

Dagster's daemon looks at a sensor every 5 s at most. So a tick is held open and polls, where the daemon evaluates
sensors in threads; and because a tick that has found something ends, and the daemon comes back for the next one only in
its next round, several gate sensors take turns: one polls, the others wait to take over from it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

import dagster as dg

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.constants import ENV_DAGSTER_URL, GATE_SENSOR
from agentmesh_dagster.faults import fault_point
from agentmesh_dagster.orchestration.gate_internals import (
    is_stopping,
    location_name,
    sensor_timeout_s,
    sensor_workers,
    set_targets,
)
from agentmesh_dagster.orchestration.gate_poll import Gatekeeper, Look, Offered
from agentmesh_dagster.orchestration.notices import courier
from agentmesh_dagster.orchestration.reloading import reloader, reloader_url

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.host import AgentMesh

POLL_S: Final = 0.2
HOLD_S: Final = 44.0
"""Under the 60 s that Dagster gives a tick, and just before one of the daemon's rounds, which are 5 s apart."""
COUNT: Final = 3
_STAGGER_S: Final = 10.0
"""By how much each further sensor holds its ticks shorter, so that they do not all end in the same round."""
_OF_TIMEOUT: Final = 0.75
_BATCH_S: Final = 0.05
"""How long a tick that has claimed something waits for what is decided at the same moment."""
_UNTOLD_S: Final = 5.0
"""How long a tick that could not continue a run is held open, before it ends to say so."""
_SHOWN: Final = 5

_log = logging.getLogger(__name__)


class GateSensor(dg.SensorDefinition):
    """A gate sensor. `build_code_location` tells it which jobs there are; by itself it continues none."""

    def __init__(
        self,
        agentmesh: AgentMesh,
        *,
        number: int = 1,
        poll_s: float = POLL_S,
        hold_s: float = HOLD_S,
        minimum_interval_s: int = 1,
        offered: Offered | None = None,
        clock: Clock | None = None,
    ) -> None:
        def evaluate(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
            return self.evaluate(context)

        super().__init__(  # pyright: ignore[reportUnknownMemberType] - Dagster types its metadata in part
            name=GATE_SENSOR if number == 1 else f"{GATE_SENSOR}_{number}",
            evaluation_fn=evaluate,
            minimum_interval_seconds=minimum_interval_s,
            description="Continues runs that waited for a decision, an answer, an event or a moment, retries those "
            "that failed after such a wait, begins those that other runs have started, and finalizes those that ended.",
            default_status=dg.DefaultSensorStatus.RUNNING,
        )
        self.agentmesh = agentmesh
        self.offered = offered or Offered()
        self._number = number
        self._poll_s = poll_s
        self._hold_s = hold_s
        self._clock = clock or SystemClock()
        set_targets(self, self.offered.jobs)

    def with_jobs(self, offered: Offered) -> GateSensor:
        """The same sensor, which continues runs with these jobs. They are named, not built."""
        return GateSensor(
            self.agentmesh,
            number=self._number,
            poll_s=self._poll_s,
            hold_s=self._hold_s,
            minimum_interval_s=self.minimum_interval_seconds or 0,
            offered=offered,
            clock=self._clock,
        )

    def evaluate(self, context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        """One tick."""
        until = time.monotonic() + self._held_for_s(context.instance)
        keeper = Gatekeeper(
            store=self.agentmesh.store(),
            instance=context.instance,
            project=self.agentmesh.project,
            offered=self.offered,
            clock=self._clock,
        )
        look = Look()
        turns = _turns(self.agentmesh)
        with turns.taken(until) as is_mine:
            if not is_mine:
                return dg.SkipReason("another gate sensor of this code location was looking")
            began = time.monotonic()
            while True:
                self._look(keeper, look, location_name(context))
                now = time.monotonic()
                is_worth_saying = turns.is_news(look) and now > began + _UNTOLD_S
                if look.requests or is_worth_saying or is_stopping() or now + self._poll_s >= until:
                    break
                time.sleep(self._poll_s)
            if look.requests:
                # What is decided at the same moment goes out with it.
                time.sleep(min(_BATCH_S, self._poll_s))
                self._look(keeper, look, location_name(context))
            turns.was_said(look)
        if not look.requests:
            return dg.SkipReason(_words(look))
        fault_point("launch.before")
        for run_id, reason in look.held_back.items():
            context.log.info(f"run {run_id} can go on, and does not yet: {reason}")
        fault_point("launch.after")
        return look.requests

    def _look(self, keeper: Gatekeeper, look: Look, location: str | None) -> None:
        try:
            keeper.look(look)
        except Exception:
            if not look.requests:
                raise
            # What is claimed already is launched, whatever of AgentMesh or Dagster failed; the next tick says it, if it
            # lasts.
            _log.warning("a gate sensor could not look at everything", exc_info=True)
        if look.has_notices:
            courier(self.agentmesh).send()
        if look.missing:
            reloader(self.agentmesh).ask(look.missing, location)

    def _held_for_s(self, instance: dg.DagsterInstance) -> float:
        """How long a tick may be held open; 0 where other sensors would have to wait for it."""
        if sensor_workers(instance) <= self._number:
            return 0.0
        wanted = max(self._hold_s - _STAGGER_S * (self._number - 1), min(self._hold_s, _STAGGER_S))
        return min(wanted, _OF_TIMEOUT * sensor_timeout_s())


def build_gate_sensors(
    agentmesh: AgentMesh,
    *,
    count: int = COUNT,
    poll_s: float = POLL_S,
    hold_s: float = HOLD_S,
    minimum_interval_s: int = 1,
) -> list[dg.SensorDefinition]:
    """Gate sensors that take turns: so many decisions within one round of the daemon (5 s) are seen at once.

    A claim is atomic: however many there are, each run is continued once. A tick is held open where `dagster.yaml` has
    `sensors: {use_threads: true}` with more `num_workers` than there are gate sensors; otherwise each tick looks once.

    Args:
        agentmesh: Database and project.
        count: How many.
        poll_s: How often the one whose turn it is looks.
        hold_s: How long a tick is held open at most.
        minimum_interval_s: The shortest time between two ticks of one of them.
    """
    return [
        GateSensor(
            agentmesh, number=number, poll_s=poll_s, hold_s=hold_s, minimum_interval_s=minimum_interval_s
        )
        for number in range(1, count + 1)
    ]


def build_gate_sensor(
    agentmesh: AgentMesh, *, poll_s: float = POLL_S, hold_s: float = HOLD_S, minimum_interval_s: int = 1
) -> dg.SensorDefinition:
    """One gate sensor; see `build_gate_sensors`."""
    return GateSensor(agentmesh, poll_s=poll_s, hold_s=hold_s, minimum_interval_s=minimum_interval_s)


def with_offered(sensors: Sequence[dg.SensorDefinition], offered: Offered) -> list[dg.SensorDefinition]:
    """The sensors of a code location, in which gate sensors know its jobs."""
    return [sensor.with_jobs(offered) if isinstance(sensor, GateSensor) else sensor for sensor in sensors]


@dataclass(frozen=True)
class _Turns:
    """Who of this process's gate sensors polls, and what they have said. Only who has the turn reads and says."""

    lock: threading.Lock
    _said: dict[str, str] = field(default_factory=dict[str, str])
    """Why runs are held back, as the last tick said."""

    def is_news(self, look: Look) -> bool:
        """Whether a run is held back for a reason that was not said yet: what lasts ends no tick early twice."""
        return any(self._said.get(run_id) != reason for run_id, reason in look.held_back.items())

    def was_said(self, look: Look) -> None:
        """Remembers what a tick says."""
        self._said.clear()
        self._said.update(look.held_back)

    @contextmanager
    def taken(self, until: float) -> Generator[bool]:
        """Waits for the turn, until that moment at most; gives whether it came."""
        is_mine = self.lock.acquire(blocking=False)
        while not is_mine and time.monotonic() < until and not is_stopping():
            is_mine = self.lock.acquire(timeout=POLL_S)
        try:
            yield is_mine
        finally:
            if is_mine:
                self.lock.release()


@cache
def _turns(_agentmesh: AgentMesh) -> _Turns:
    return _Turns(threading.Lock())


def _words(look: Look) -> str:
    """Why a tick requests no run."""
    if not look.held_back:
        return "nothing to continue"
    shown = [f"run {run_id}: {reason}" for run_id, reason in list(look.held_back.items())[:_SHOWN]]
    more = len(look.held_back) - len(shown)
    hint = f" (with {ENV_DAGSTER_URL} set, the sensor does so)" if look.missing and not reloader_url() else ""
    return "; ".join(shown) + hint + (f"; and {more} more" if more else "")
