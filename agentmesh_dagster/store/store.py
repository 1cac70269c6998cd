"""The store: one object per database, and how it is opened."""

from __future__ import annotations

from types import TracebackType

from agentmesh_dagster.clock import Clock, SystemClock
from agentmesh_dagster.store import schema
from agentmesh_dagster.store.audit import AuditLog
from agentmesh_dagster.store.catalog import Catalog
from agentmesh_dagster.store.claims import Claims
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.groups import Groups
from agentmesh_dagster.store.journal import StoreJournal
from agentmesh_dagster.store.notices import Notices
from agentmesh_dagster.store.publications import Publications
from agentmesh_dagster.store.runs import Runs
from agentmesh_dagster.store.waits import Waits


class Store:
    """What AgentMesh keeps in one database. Made by `open_store`; safe for threads, and for children made by fork.

    Attributes:
        catalog: Projects, definitions and versions.
        publications: The log of what became live.
        runs: Runs, steps and events, for reading and for reconciliation.
        waits: Approvals, suspensions, timers and waits for events: what is open, and how it is answered.
        claims: Which runs can go on, and who continues them.
        notices: Messages about approvals, on their way.
        groups: Groups of people.
        audit: Who did what.
        journal: The asynchronous `runtime.ports.Journal`.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.catalog = Catalog(database, clock)
        self.publications = Publications(database, clock)
        self.runs = Runs(database, clock)
        self.waits = Waits(database, clock)
        self.claims = Claims(database, clock)
        self.notices = Notices(database)
        self.groups = Groups(database, clock)
        self.audit = AuditLog(database, clock)
        self.journal = StoreJournal(database, clock)

    @property
    def url(self) -> str:
        """The database's URL without its password."""
        return self._database.shown

    def status(self) -> schema.SchemaStatus:
        """Where the schema stands.

        Raises:
            StoreError: The database cannot be reached.
        """
        return schema.read_status(self._database)

    def upgrade(self) -> schema.SchemaStatus:
        """Brings the schema to this code's revision; several processes may call it at once.

        Raises:
            StoreError: The database cannot be reached, or is newer than this code (code `database-newer`).
        """
        return schema.upgrade(self._database, self._clock)

    def close(self) -> None:
        """Writes what the journal was asked for until now, and closes the connections."""
        self.journal.close()
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(url: str, *, clock: Clock | None = None, upgrade: bool | None = None) -> Store:
    """Opens a database.

    Args:
        url: `sqlite:///path` (folder and file are made where they are missing) or `postgresql://...`.
        clock: Where times and ids come from.
        upgrade: Whether an older schema is upgraded; None: on SQLite only.

    Raises:
        StoreError: `bad-url`, `unreachable`, `database-newer`, or `database-older`.
    """
    database = Database(url)
    try:
        database.make_folder()
        status = schema.read_status(database)
        may_upgrade = database.is_sqlite if upgrade is None else upgrade
        if may_upgrade and not status.is_up_to_date and not status.is_newer_than_code:
            status = schema.upgrade(database, clock or SystemClock())
        schema.check(status)
    except BaseException:
        database.close()
        raise
    return Store(database, clock or SystemClock())


def schema_status(url: str) -> schema.SchemaStatus:
    """Where the schema of a database stands, whatever it is; nothing is written.

    Raises:
        StoreError: `bad-url` or `unreachable`.
    """
    database = Database(url)
    try:
        return schema.read_status(database)
    finally:
        database.close()
