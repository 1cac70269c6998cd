"""Every rule for documents, once. All problems of a document are found at once, each with a code, a path and a mend.

`RULES` lists the rules with their codes and severities; `rules_table()` prints them. A part that is wrong hides no
problem of another part, and what only follows from one problem is not told as another.
"""

from agentmesh_dagster.specs.problems import RULES, Problem, Rule
from agentmesh_dagster.validation.check import (
    MAX_EDGES,
    MAX_NODES,
    Checked,
    CheckedSource,
    job_collision,
    validate_document,
    validate_raw,
    validate_set,
)
from agentmesh_dagster.validation.target import TARGET_CODES, Target

__all__ = [
    "MAX_EDGES",
    "MAX_NODES",
    "RULES",
    "TARGET_CODES",
    "Checked",
    "CheckedSource",
    "Problem",
    "Rule",
    "Target",
    "job_collision",
    "rules_table",
    "validate_document",
    "validate_raw",
    "validate_set",
]


def rules_table() -> str:
    """All rules as a Markdown table."""
    lines = ["| code | severity | rule |", "|---|---|---|"]
    lines += [f"| `{code}` | {rule.severity} | {rule.meaning} |" for code, rule in RULES.items()]
    return "\n".join(lines)
