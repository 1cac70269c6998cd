"""`python -m bench.peak_run ROOT SLUG PUBLICATION ITEMS`: the peak memory of a process that runs a workflow inline.

It runs it with an empty list, and then, unless ITEMS is 0, with so many items.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.inline import Walks
from bench.peak import peak_mb


def main() -> None:
    """Runs, and prints the megabytes."""
    root, slug, publication, items = sys.argv[1:]
    walks = Walks(Path(root), {slug: int(publication)})
    for count in dict.fromkeys((0, int(items))):
        walks.run(slug, {"items": list(range(count))})
    walks.close()
    print(peak_mb())


if __name__ == "__main__":
    main()
