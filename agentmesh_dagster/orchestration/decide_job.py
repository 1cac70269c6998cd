"""The job `agentmesh_decide`: deciding from Dagster's own launch form, without the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import dagster as dg

from agentmesh_dagster.constants import DECIDE_JOB, GATE_SENSOR
from agentmesh_dagster.errors import AgentMeshError
from agentmesh_dagster.orchestration.decisions import (
    ProjectStore,
    decide_approval,
    delegate_approval,
    issue_lines,
)
from agentmesh_dagster.records import Json, Wait, WaitStatus

_OP: Final = "decide"

_FIELDS: Final[dict[str, dg.Field]] = {
    "approval": dg.Field(
        dg.String,
        description="Id of an approval or a suspension, or the first 6 or more characters of it. "
        "The waiting step's metadata shows it, and `agentmesh approvals list`.",
    ),
    "decision": dg.Field(
        dg.ScalarUnion(dg.String, dg.Array(dg.String)),
        is_required=False,
        description="`approved` or `rejected`; at an approval with options one of them, or a list where several may "
        "be chosen; of a call that was cut off `happened`, `repeat` or `fail`. Left out for a suspension.",
    ),
    "data": dg.Field(
        dg.Noneable(dg.Any),
        is_required=False,
        description="What the form asks for, the changed arguments of a tool's call, or what a suspension waits for.",
    ),
    "delegate_to": dg.Field(
        dg.String,
        is_required=False,
        description="Instead of `decision`: who may vote in the place of `by`. Their own name takes the vote back.",
    ),
    "comment": dg.Field(dg.String, is_required=False, default_value="", description="Why; kept with it."),
    "by": dg.Field(
        dg.String,
        is_required=False,
        description="Who decides. Default: the tag `user` of this Dagster run.",
    ),
    "binding": dg.Field(
        dg.String,
        is_required=False,
        description="The approval's `binding`, of a tool's call: refused where another call waits now.",
    ),
}


def build_decide_job(agentmesh: ProjectStore) -> dg.JobDefinition:
    """The job `agentmesh_decide`: votes on an approval, delegates a vote, or answers a suspension, of a project.

    Its launch config stands at the root: `approval`, `decision`, `data`, `delegate_to`, `comment`, `by`, `binding`. A
    refusal fails the Dagster run with its reason.

    Args:
        agentmesh: Database and project.
    """

    def compute(op_context: Any, _inputs: Any) -> Iterator[dg.Output[None]]:
        config: Mapping[str, Json] = op_context.op_config
        try:
            by = config.get("by") or op_context.run.tags.get("user") or _nobody()
            wait = (
                _delegate(agentmesh, config, by)
                if "delegate_to" in config
                else _decide(agentmesh, config, by)
            )
        except AgentMeshError as error:
            raise dg.Failure(
                description="\n".join([error.message, *issue_lines(error)]),
                metadata={"code": error.code, "error": dg.MetadataValue.json(error.to_json())},
                allow_retries=False,
            ) from None
        yield dg.Output(None, "done", metadata=_metadata(agentmesh, wait))

    op = dg.OpDefinition(
        compute_fn=compute,
        name=_OP,
        outs={"done": dg.Out(dg.Nothing)},
        config_schema=_FIELDS,
        description="Votes on an approval, delegates a vote, or answers a suspension.",
    )
    return dg.JobDefinition(
        name=DECIDE_JOB,
        graph_def=dg.GraphDefinition(name=DECIDE_JOB, node_defs=[op]),
        description=(
            "Decides an approval, or answers a suspended step. The run that waits for it goes on by the sensor "
            f"{GATE_SENSOR}."
        ),
        config=dg.ConfigMapping(config_schema=_FIELDS, config_fn=_inner_config),
        executor_def=dg.in_process_executor,
    )


def _decide(agentmesh: ProjectStore, config: Mapping[str, Json], by: str) -> Wait:
    return decide_approval(
        agentmesh,
        config["approval"],
        config.get("decision"),
        by=by,
        data=config.get("data"),
        comment=config["comment"],
        binding=config.get("binding"),
    )


def _delegate(agentmesh: ProjectStore, config: Mapping[str, Json], by: str) -> Wait:
    unused = [name for name in ("decision", "data", "binding") if config.get(name) is not None]
    if unused:
        raise AgentMeshError(
            f"`delegate_to` is instead of a decision: leave out {', '.join(f'`{name}`' for name in unused)}",
            code="bad-delegation",
        )
    return delegate_approval(
        agentmesh, config["approval"], config["delegate_to"], by=by, comment=config["comment"]
    )


def _inner_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"ops": {_OP: {"config": dict(config)}}}


def _nobody() -> str:
    raise AgentMeshError("say who decides: `by` in the launch config, or the tag `user`", code="no-name")


def _metadata(agentmesh: ProjectStore, wait: Wait) -> dict[str, Any]:
    """What the vote or delegation came to."""
    answer: dict[str, Json] = wait.answer or {}
    votes = agentmesh.store().waits.votes(wait.id)
    shown: dict[str, Any] = {
        "approval": wait.id,
        "title": wait.title,
        "step": wait.step_key,
        "status": wait.status.value,
        "run": wait.run_id,
        "answer": dg.MetadataValue.json(answer) if answer else None,
        "votes": f"{len(votes)} of {wait.required}" if wait.required > 1 else None,
        "delegated": ", ".join(f"by {each.by} to {each.to}" for each in wait.delegations),
        "next": _next(wait),
    }
    return {name: value for name, value in shown.items() if value not in (None, "")}


def _next(wait: Wait) -> str:
    if wait.status is WaitStatus.OPEN:
        return "more people must agree" if wait.required > 1 else "it stays open until somebody decides"
    return f"the run goes on by the sensor {GATE_SENSOR}"
