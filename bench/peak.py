"""The most memory that this process has had at once. Run as a script, it says it of a Python that does nothing else."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_mb() -> float:
    """The peak of the resident set, in megabytes of 10^6 bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux that begins with the peak of the process which started this one.
        lines = status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6
    import resource

    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    )


if __name__ == "__main__":
    print(peak_mb())
