"""What the import of a code location does, seen from a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from bench.projects import Project

_CODE: Final = """
import json, sys, time
import dagster as dg
began = time.perf_counter()
import agentmesh_dagster
package_s = time.perf_counter() - began
built = []
make = dg.JobDefinition.__init__
def count(self, *args, **kwargs):
    make(self, *args, **kwargs)
    built.append(self.name)
dg.JobDefinition.__init__ = count
namespace = {"__file__": sys.argv[1], "__name__": "code_location"}
with open(sys.argv[1], encoding="utf-8") as file:
    code = compile(file.read(), sys.argv[1], "exec")
began = time.perf_counter()
exec(code, namespace)
names = namespace["location"].job_names
import_s = time.perf_counter() - began
at_import = len(built)
namespace["location"].get_job(sys.argv[2])
workflows = [name for name in names if not name.startswith("agentmesh_")]
print(json.dumps({"import_s": import_s, "workflows": len(workflows), "built_at_import": at_import, "built": built,
                  "litellm": "litellm" in sys.modules}))
"""


@dataclass(frozen=True)
class Loaded:
    """What loading a code location came to."""

    import_s: float
    """Importing the file and listing the names of its jobs; Dagster itself is imported before."""
    workflows: int
    """How many of its jobs are of stored workflows."""
    built_at_import: int
    built: list[str]
    """The jobs built in all, after one was asked for."""
    litellm: bool
    """Whether LiteLLM was imported."""


def load_code_location(project: Project, job: str) -> Loaded:
    """Loads the project's code location in a fresh process, and asks it for one job."""
    file = project.root / "definitions" / "code_location.py"
    said = subprocess.run(
        [sys.executable, "-c", _CODE, str(file), job],
        cwd=project.root,
        env={**os.environ, **project.env},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return Loaded(**json.loads(said))
