"""The notifier `log`: one line for those who look at the sensor's log."""

from __future__ import annotations

from agentmesh_dagster.runtime.how_to_decide import short_id
from agentmesh_dagster.runtime.notify.base import Notifier, NotifyContext
from agentmesh_dagster.runtime.notify.message import NoticeMessage, one_line
from agentmesh_dagster.specs.notify import LogNotify

__all__ = ["LogNotifier"]


class LogNotifier(Notifier[LogNotify]):
    """Says what waits, and how to decide, in one line."""

    name = "log"
    config_model = LogNotify

    async def send(self, config: LogNotify, message: NoticeMessage, context: NotifyContext) -> None:
        wait = message.wait
        first = f": {message.how_to_decide[0]}" if message.how_to_decide else ""
        line = (
            f"{message.subject} (approval {short_id(wait)} of run {wait.run_id}, step {wait.step_key}){first}"
        )
        context.say(config.level, one_line(line))
