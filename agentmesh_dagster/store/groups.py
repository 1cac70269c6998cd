"""Groups of people, by which an approval names those who may decide."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, delete, insert, select

from agentmesh_dagster.clock import Clock
from agentmesh_dagster.constants import GROUP_PREFIX
from agentmesh_dagster.errors import NotFound, StoreError
from agentmesh_dagster.store.audit import write_audit
from agentmesh_dagster.store.engine import Database
from agentmesh_dagster.store.tables import group_members

_MAX_NAME: Final = 200


class Groups:
    """The groups of projects. A change counts for the votes that come after it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def set(self, project: str, group: str, members: Sequence[str], *, by: str = "") -> None:
        """Makes a group, or gives it other members.

        Args:
            project: The project's slug.
            group: Its name, without the `group:` that approvals write before it.
            members: Names of people, at least one; one that is given twice counts once.
            by: Who does it, for the audit.

        Raises:
            NotFound: There is no such project (code `no-project`).
            StoreError: The group or a member has no usable name, or there is no member (code `bad-group`).
        """
        _check_name("a group's name", group)
        for member in members:
            _check_name(f"a member's name in the group {group!r}", member)
        if not members:
            raise StoreError(f"the group {group!r} needs a member; remove it otherwise", code="bad-group")
        names = builtins.list(dict.fromkeys(members))
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            _delete(connection, project, group)
            connection.execute(
                insert(group_members),
                [
                    {"project": project, "group_name": group, "member": member, "ordinal": ordinal}
                    for ordinal, member in enumerate(names)
                ],
            )
            entity = f"group/{group}"
            write_audit(
                connection, self._clock, project, "edit", actor=by, entity=entity, detail={"members": names}
            )

    def all(self, project: str) -> dict[str, tuple[str, ...]]:
        """Each group's members, in the order in which they were given."""
        with self._database.read() as connection:
            return load_groups(connection, project)

    def remove(self, project: str, group: str, *, by: str = "") -> None:
        """Removes a group; nobody may vote by it any more.

        Raises:
            NotFound: There is no such project (code `no-project`) or group (`no-group`).
        """
        with self._database.write() as connection:
            self._database.lock_project(connection, project)
            if not _delete(connection, project, group):
                raise NotFound(f"the project {project!r} has no group {group!r}", code="no-group")
            write_audit(connection, self._clock, project, "delete", actor=by, entity=f"group/{group}")


def load_groups(connection: Connection, project: str) -> dict[str, tuple[str, ...]]:
    """Each group's members."""
    query = (
        select(group_members.c.group_name, group_members.c.member)
        .where(group_members.c.project == project)
        .order_by(group_members.c.group_name, group_members.c.ordinal)
    )
    found: dict[str, tuple[str, ...]] = {}
    for group, member in connection.execute(query):
        found[group] = (*found.get(group, ()), member)
    return found


def _delete(connection: Connection, project: str, group: str) -> int:
    return connection.execute(
        delete(group_members).where(group_members.c.project == project, group_members.c.group_name == group)
    ).rowcount


def _check_name(what: str, name: str) -> None:
    if not name.strip() or name != name.strip() or not name.isprintable() or len(name) > _MAX_NAME:
        raise StoreError(
            f"{what} cannot be {name[:_MAX_NAME]!r}: it is printable text without spaces around it, at most "
            f"{_MAX_NAME} characters",
            code="bad-group",
        )
    if name.startswith(GROUP_PREFIX):
        raise StoreError(
            f"{what} cannot begin with {GROUP_PREFIX!r}: groups hold people, and are named without it",
            code="bad-group",
        )
