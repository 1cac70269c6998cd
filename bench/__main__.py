"""`python -m bench`: runs the benchmarks, each in a process of its own, and prints what they found.

The exit code is 0 also where a target is missed: the machine may be busy, and a person reads the lines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from bench import chain, cold, gates, imports, journal, many, parallel, polls, scale, walker
from bench.report import Findings, as_json, as_table
from bench.sizes import SMOKE_VARIABLE

BENCHMARKS: dict[str, Callable[[], Findings]] = {
    module.NAME: module.run
    for module in (chain, parallel, walker, many, cold, scale, imports, journal, gates, polls)
}
PROFILES: dict[str, Callable[[], Findings]] = {walker.NAME: walker.profile}


def main() -> None:
    """Reads the arguments, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures AgentMesh.")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(BENCHMARKS),
        metavar="NAME",
        help=f"one of {', '.join(BENCHMARKS)}; may be repeated",
    )
    parser.add_argument(
        "--profile",
        action="append",
        choices=list(PROFILES),
        metavar="NAME",
        help="print where its time goes, function by function, and measure nothing",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run at the smallest size, to see that it works: the numbers mean nothing",
    )
    options = parser.parse_args()
    if options.smoke and not os.environ.get(SMOKE_VARIABLE):
        # The sizes are read when the benchmarks are imported, which has happened in this process.
        os.environ[SMOKE_VARIABLE] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]])
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "yes"
    # Packages come with bytecode, a source tree only has it once it was written: the first, uncounted round does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    load_before = os.getloadavg()[0]
    if options.profile:
        findings = [_done(name, PROFILES[name]) for name in options.profile]
    else:
        findings = [_done(name, BENCHMARKS[name]) for name in options.only or BENCHMARKS]
    machine = _machine(load_before)
    if options.json:
        print(json.dumps({**as_json(findings), "machine": machine}, indent=2))
    else:
        print(f"{as_table(findings)}\n\nMachine: {machine}")
        if options.smoke:
            print("A smoke run, at the smallest sizes: the numbers mean nothing.")


def _done(name: str, work: Callable[[], Findings]) -> Findings:
    began = time.monotonic()
    print(f"{name} ...", file=sys.stderr, end="", flush=True)
    # A fresh process for each: what one leaves behind (threads, caches, memory) is not the next one's.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(work).result()
    print(f" {time.monotonic() - began:.0f} s", file=sys.stderr)
    return found


def _machine(load_before: float) -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, load {load_before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}"
    )


if __name__ == "__main__":
    main()
