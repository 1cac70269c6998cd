"""How slugs and node ids become names in Dagster and in expressions."""

from __future__ import annotations

import keyword

from agentmesh_dagster.constants import PINNED_SUFFIX

RESERVED_IN_DAGSTER = frozenset(
    {
        *("input", "output", "config", "conf", "context", "type", "meta"),
        *("dict", "int", "str", "float", "bool", "arg_dict", "input_arg_dict", "output_arg_dict"),
        *keyword.kwlist,
    }
)
"""Words that Dagster refuses as the name of a job, an op or an output."""


def identifier(name: str) -> str:
    """The name as Dagster and expressions see it: `refund-review` is `refund_review`."""
    return name.replace("-", "_")


def job_name(kind: str, slug: str) -> str:
    """The Dagster job of a definition: a workflow's slug; other kinds carry their kind (`network__triage`)."""
    return identifier(slug) if kind == "workflow" else f"{kind}__{identifier(slug)}"


def pinned_job_name(job: str, publication: int) -> str:
    """The job of an older publication, which runs that it started are continued with."""
    return f"{job}{PINNED_SUFFIX}{publication}"


def pinned_publication(job: str) -> int | None:
    """The publication of a pinned job, by its name; None of other jobs' names."""
    _, mark, number = job.rpartition(PINNED_SUFFIX)
    return int(number) if mark and number.isdecimal() else None
