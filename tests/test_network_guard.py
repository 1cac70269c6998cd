"""The tests themselves: no process of theirs reaches another machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import httpx
import pytest

OTHER_MACHINE = "192.0.2.1"  # reserved for documentation (RFC 5737): nobody answers there


def test_other_machines_are_out_of_reach():
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError, match="this machine only"):
        sock.connect((OTHER_MACHINE, 443))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{OTHER_MACHINE}/", timeout=5)


def test_this_machine_is_in_reach():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        assert sock.getpeername() == server.getsockname()


def test_child_processes_are_guarded_too():
    code = f"import socket; socket.create_connection(('{OTHER_MACHINE}', 443), timeout=5)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert "this machine only" in child.stderr


def test_no_key_or_setting_from_outside():
    foreign = [n for n in os.environ if n.startswith(("AGENTMESH_", "OPENAI_")) or n.endswith("_API_KEY")]
    assert foreign == []
    assert "DAGSTER_HOME" not in os.environ
