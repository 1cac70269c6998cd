"""Refuses connections to other machines, in the test process and in every Python process that it starts.

`tests/conftest.py` installs it, and puts this folder on PYTHONPATH; `sitecustomize.py` installs it in child processes.
What does not go through Python's sockets (uvloop, gRPC) is not seen; the tests have no provider's key either.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

_Socket = socket.socket
_connect, _connect_ex, _sendto = _Socket.connect, _Socket.connect_ex, _Socket.sendto


class ConnectionRefusedByTests(ConnectionRefusedError):
    """A test tried to reach another machine."""


def is_local(address: object) -> bool:
    """Whether a socket address is on this machine: a Unix socket, a loopback address, or `localhost`."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0]).split("%")[0]
    if host in ("", "localhost"):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


def _check(address: object) -> None:
    if not is_local(address):
        raise ConnectionRefusedByTests(f"the tests connect to this machine only, not to {address!r}")


def _guarded_connect(self: _Socket, address: Any) -> None:
    _check(address)
    return _connect(self, address)


def _guarded_connect_ex(self: _Socket, address: Any) -> int:
    _check(address)
    return _connect_ex(self, address)


def _guarded_sendto(self: _Socket, data: Any, *args: Any) -> int:
    _check(args[-1])
    return _sendto(self, data, *args)


def install() -> None:
    """Guards all sockets of this process; a second call changes nothing."""
    _Socket.connect = _guarded_connect
    _Socket.connect_ex = _guarded_connect_ex
    _Socket.sendto = _guarded_sendto
