"""What the process that step processes are forked from does at its start and at its end.

That process imports this module among the libraries that it loads, and nobody else does.

It outlives a signal to all of a run's processes. A service manager ends a service with SIGTERM to each of its
processes; without their parent Dagster would take steps for dead that are still cleaning up. The parent ends when the
run's process has. A run's process that was killed leaves its socket folder behind; the parent then removes it. While
the run's process lives, it needs the folder: for its next such parent, should this one have failed, and to remove it.
"""

import atexit
import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Final

# A process closes its files a moment before its children get another parent.
_DYING_S: Final = 1.0


def _socket_folder() -> Path | None:
    """The folder that Python made for the socket on which this process was told to listen."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - an entry may be closed before it is looked at
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                address = (
                    found.getsockname() if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else ""
                )
        except OSError:
            continue
        if isinstance(address, str) and Path(address).parent.name.startswith("pymp-"):
            return Path(address).parent
    return None


def _remove_of_the_dead(folder: Path, owner: int) -> None:
    """Removes the folder once the process that made it is dead; while that one lives, the folder stays."""
    deadline_s = time.monotonic() + _DYING_S
    while os.getppid() == owner:
        if time.monotonic() >= deadline_s:
            return
        time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)


signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
if (_folder := _socket_folder()) is not None:
    # Forked processes end without exit functions.
    atexit.register(_remove_of_the_dead, _folder, os.getppid())
