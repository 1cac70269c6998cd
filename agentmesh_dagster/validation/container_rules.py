"""Rules of containers (parallel, foreach, loop), and of what may not wait when the run has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentmesh_dagster.specs.fields import as_object
from agentmesh_dagster.specs.nodes import (
    DelayConfig,
    ForeachConfig,
    HumanConfig,
    LoopConfig,
    ParallelConfig,
    WebhookConfig,
)
from agentmesh_dagster.specs.problems import Problem
from agentmesh_dagster.specs.resolve import Library
from agentmesh_dagster.validation.level import Level
from agentmesh_dagster.validation.referred import tools_called
from agentmesh_dagster.validation.view import NodeView, WorkflowView


def container_problems(
    view: WorkflowView, levels: Sequence[Level], library: Library | None
) -> Iterator[Problem]:
    """Problems of a workflow's containers, of its time, and of what it runs when it has ended."""
    settings = as_object(view.raw.get("settings")) or {}
    if settings.get("timeout_includes_waiting") is True and settings.get("timeout_s") is None:
        yield _idle(
            "settings.timeout_includes_waiting",
            "the workflow has no timeout_s",
            "Add timeout_s, or remove it",
        )
    for level in levels:
        for node in level.view.nodes.values():
            config = node.config
            if isinstance(config, ParallelConfig):
                yield from _parallel(node, config)
            elif isinstance(config, LoopConfig):
                yield from _loop(node, config, view)
            elif isinstance(config, ForeachConfig):
                yield from _foreach(node, config, level, view)
            if level.is_ending:
                yield from _waits(node, view.settings.inline_s, library)


def _parallel(node: NodeView, config: ParallelConfig) -> Iterator[Problem]:
    wait, there = config.wait, len(config.branches)
    if isinstance(wait, int) and wait > there:
        yield Problem.of(
            "wait-too-many",
            f"{node.path}.config.wait",
            f"{node.id!r} waits for {wait} of its branches, and has {there}",
            "Write a smaller number, or 'all'",
        )


def _loop(node: NodeView, config: LoopConfig, view: WorkflowView) -> Iterator[Problem]:
    bound = view.settings.max_iterations
    if config.max_iterations > bound:
        yield Problem.of(
            "too-many-iterations",
            f"{node.path}.config.max_iterations",
            f"{node.id!r} may repeat {config.max_iterations} times, and settings.max_iterations is {bound}",
            "Write a smaller number, or raise settings.max_iterations",
        )


def _foreach(node: NodeView, config: ForeachConfig, level: Level, view: WorkflowView) -> Iterator[Problem]:
    path = f"{node.path}.config"
    if config.max_failures is not None and config.on_item_error == "fail":
        yield _idle(
            f"{path}.max_failures",
            "the first item that fails ends the node",
            "Write on_item_error: collect or skip, or remove it",
        )
    if not config.fanout:
        return
    reason = _one_op(node, level, view)
    if reason is not None:
        yield _idle(f"{path}.fanout", f"{reason}, so that all items run in one op", "Remove one of the two")
    elif "concurrency" in config.model_fields_set:
        yield _idle(
            f"{path}.concurrency",
            "with fanout the executor bounds how many items are at work",
            "Write settings.max_concurrent, or remove one of the two",
        )


def _one_op(node: NodeView, level: Level, view: WorkflowView) -> str | None:
    """Why a foreach runs in one op, whatever its `fanout` says."""
    if not _is_seen(level):
        return "the node stands in a body that runs in one op"
    if view.settings.execution == "inline":
        return "settings.execution is 'inline'"
    if node.spec is None:
        return None
    for name, is_given in (
        ("retry", node.spec.retry is not None),
        ("timeout_s", node.spec.timeout_s is not None),
        ("on_error", node.spec.on_error != "fail"),
    ):
        if is_given:
            return f"the node has {name!r} of its own"
    return None


def _is_seen(level: Level) -> bool:
    """Whether Dagster sees the nodes of a level: the workflow's own, and those of branches that are nested graphs."""
    owner = level.owner
    if level.body is None:
        return True
    if owner is None or owner.spec is None or level.parent is None:
        return False
    spec, config = owner.spec, owner.config
    if spec.retry is not None or spec.timeout_s is not None or spec.on_error != "fail":
        return False
    return isinstance(config, ParallelConfig) and config.wait == "all" and _is_seen(level.parent)


def _idle(path: str, why: str, mend: str) -> Problem:
    name = path.rpartition(".")[2]
    return Problem.of("setting-without-effect", path, f"{name!r} does nothing here: {why}", mend)


# What runs when the run has ended ---------------------------------------------------------------------------


def _waits(node: NodeView, inline_s: float, library: Library | None) -> Iterator[Problem]:
    """What would wait without a worker, where nothing continues a run."""
    config, path = node.config, node.path
    if isinstance(config, HumanConfig | WebhookConfig):
        yield _wait(path, f"{node.id!r}, of type {node.type!r}, waits for an answer from outside")
    elif isinstance(config, DelayConfig) and isinstance(config.seconds, float) and config.seconds > inline_s:
        yield _wait(f"{path}.config.seconds", _too_long(node, config.seconds, inline_s))
    elif isinstance(config, LoopConfig) and config.delay_s > inline_s:
        yield _wait(f"{path}.config.delay_s", _too_long(node, config.delay_s, inline_s))
    elif config is not None and library is not None:
        for tool in tools_called(config, library):
            if tool.requires_approval is not False:
                yield _wait(path, f"{node.id!r} may call the tool {tool.slug!r}, which people must approve")


def _too_long(node: NodeView, seconds: float, inline_s: float) -> str:
    return f"{node.id!r} waits for {seconds:g} s, and a worker sits out at most {inline_s:g} s"


def _wait(path: str, message: str) -> Problem:
    return Problem.of(
        "wait-in-finally",
        path,
        f"{message}; 'on_failure' and 'finally' run once, in one go",
        "Let it wait in the workflow itself, or in a workflow that a node calls with async: true",
    )
