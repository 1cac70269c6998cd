"""Which database and project a process works on, and what its documents may use; and how a folder says it.

Dagster is imported at first use: the command line reads the record too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentmesh_dagster.deployment import AllowedSecret, Deployment, Endpoint, MailServer
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.records import Json
from agentmesh_dagster.settings import database_url, project_root, project_slug

if TYPE_CHECKING:
    from agentmesh_dagster.orchestration.host import AgentMeshResource, Host
    from agentmesh_dagster.store import Store

_RESOURCES: Final = "resources"
_NAME: Final = "agentmesh"


@dataclass(frozen=True, kw_only=True)
class AgentMesh:
    """How a process works on AgentMesh runs: which database, which project, which functions may be called.

    Equal records share one store and one environment per process.
    """

    database_url: str
    """A SQLAlchemy URL; `sqlite:///path` or `postgresql://...`."""
    project: str = "default"
    function_modules: tuple[str, ...] = ()
    """Modules whose functions `code` nodes and `function` tools may call, besides `AGENTMESH_FUNCTION_MODULES`."""
    root: Path | None = None
    """The project's folder: functions of modules in it can be called."""
    lease_s: float = 60.0
    """How long a run's lease lasts unrenewed; a killed worker's run is found out after that."""
    notify: tuple[Json, ...] = field(default=(), hash=False)
    """Who is told of every gate: notifiers' configs, such as `{"type": "log"}`; see `specs.notify`."""
    capture_content: bool = True
    """Whether events carry prompts, answers, arguments and results, and Dagster's metadata inputs and outputs. The
    environment variable `AGENTMESH_CAPTURE_CONTENT=false` turns it off too."""
    deployment: Deployment = field(default=Deployment(), hash=False)
    """What the documents of the project may use."""

    @staticmethod
    def of_project(
        start: Path | None = None,
        *,
        function_modules: tuple[str, ...] = (),
        lease_s: float = 60.0,
        notify: tuple[Json, ...] = (),
        capture_content: bool = True,
        secrets: Iterable[str | AllowedSecret] = (),
        endpoints: Mapping[str, Endpoint] | None = None,
        mail: MailServer | None = None,
        config: Mapping[str, Json] | None = None,
        private_hosts: Iterable[str] = (),
    ) -> AgentMesh:
        """The one that the environment and the project's folder name.

        Args:
            start: A folder of the project; default the working directory.
            function_modules: See the field.
            lease_s: See the field.
            notify: See the field.
            capture_content: See the field.
            secrets: The secrets that documents may name: a name or pattern such as `CRM_*` that every host may get,
                or an `AllowedSecret`.
            endpoints: Servers of models by the name that agents write before the `/`; see `Endpoint`.
            mail: The SMTP server of `email` notifiers.
            config: What expressions read as `config.NAME`; JSON, and no secrets.
            private_hosts: What tools and webhooks may reach besides the public internet; see `Deployment`.

        Raises:
            DefinitionError: A part of the deployment is not well-formed (code `deployment`).
        """
        root = project_root(start)
        return AgentMesh(
            database_url=database_url(root),
            project=project_slug(),
            function_modules=function_modules,
            root=root,
            lease_s=lease_s,
            notify=notify,
            capture_content=capture_content,
            deployment=Deployment.of(
                secrets=secrets, endpoints=endpoints, mail=mail, config=config, private_hosts=private_hosts
            ),
        )

    def store(self) -> Store:
        """The process's store of this database, opened at the first call.

        Raises:
            StoreError: The database cannot be reached, or its schema does not fit.
        """
        return _store(self.database_url)

    def host(self) -> Host:
        """The process's host."""
        return _host(self)

    def resource(self) -> AgentMeshResource:
        """The Dagster resource `agentmesh` of the compiled jobs."""
        from agentmesh_dagster.orchestration.host import AgentMeshResource

        return AgentMeshResource(self)


@cache
def _store(url: str) -> Store:
    from agentmesh_dagster.store import open_store

    return open_store(url)


@cache
def _host(agentmesh: AgentMesh) -> Host:
    from agentmesh_dagster.orchestration.host import Host

    return Host(agentmesh)


def _forget_connections() -> None:
    _store.cache_clear()
    _host.cache_clear()


# A forked child may use neither the parent's connections nor its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)


def agentmesh_of_folder(root: Path) -> AgentMesh:
    """The record `agentmesh` that a project's folder has in `resources/__init__.py`; its default without that file.

    Args:
        root: The project's folder.

    Raises:
        DefinitionError: The file cannot be loaded, or has no such record (code `resources`).
    """
    file = root.resolve() / _RESOURCES / "__init__.py"
    if not file.is_file():
        return AgentMesh.of_project(root)
    found = getattr(_loaded_resources(file), _NAME, None)
    if not isinstance(found, AgentMesh):
        raise DefinitionError(
            f"{file} gives no {_NAME!r}: write {_NAME} = AgentMesh.of_project(Path(__file__).parent)",
            code="resources",
        )
    return found


def _loaded_resources(file: Path) -> Any:
    """The module `resources` of a project, under the name by which its code location imports it too."""
    loaded = sys.modules.get(_RESOURCES)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    # That of another project, which this process has worked on before.
    for name in [name for name in sys.modules if name.partition(".")[0] == _RESOURCES]:
        del sys.modules[name]
    root = str(file.parent.parent)
    sys.path.insert(0, root)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(_RESOURCES)
    except Exception as error:  # a person's own file may raise anything
        raise DefinitionError(
            f"{file} cannot be loaded: {type(error).__name__}: {error}", code="resources"
        ) from error
    finally:
        sys.path.remove(root)
