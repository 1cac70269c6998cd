"""Writes constraints.txt: exact versions of all dependencies, for each Python given on the command line.

    .venv/bin/python scripts/update_constraints.py python3.10 python3.11 python3.12 python3.13

Asks pip what it would install for the package with its extras, and so needs the network. The interpreters run on the
platform of this machine; a package that some of them do not need, or need in another version, gets a marker.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Exact versions of all dependencies, which the make targets install.
# Written by scripts/update_constraints.py; the ranges stand in pyproject.toml.
"""


def resolve(python: str) -> tuple[str, dict[str, str]]:
    """The Python's version, such as `3.11`, and the packages that pip would install for it."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "venv")
        subprocess.run([python, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        report = Path(folder, "report.json")
        asked = [f"{ROOT}[test,dev]"]
        subprocess.run([*pip, "install", "-q", "--dry-run", "--report", report, *asked], check=True)
        found = json.loads(report.read_text())
    packages = (item["metadata"] for item in found["install"])
    versions = {re.sub(r"[-_.]+", "-", p["name"]).lower(): p["version"] for p in packages}
    versions.pop("agentmesh-dagster")
    return found["environment"]["python_version"], versions


def lines(resolved: dict[str, dict[str, str]]) -> list[str]:
    """One line per package where all Pythons agree, otherwise one per version with a marker."""
    written: list[str] = []
    for name in sorted({name for versions in resolved.values() for name in versions}):
        pythons: dict[str, list[str]] = {}
        for python, versions in resolved.items():
            if name in versions:
                pythons.setdefault(versions[name], []).append(python)
        for version, users in pythons.items():
            marker = " or ".join(f'python_version == "{user}"' for user in users)
            written.append(f"{name}=={version}" + ("" if len(users) == len(resolved) else f" ; {marker}"))
    return written


def main(pythons: list[str]) -> None:
    if not pythons:
        sys.exit(f"{__doc__}\nName at least one Python.")
    resolved = dict(resolve(python) for python in pythons)
    text = HEADER + "\n".join(lines(resolved)) + "\n"
    Path(ROOT, "constraints.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
