"""`agentmesh dev`: Dagster's UI and daemon on this project."""

from __future__ import annotations

import os
import signal
import socket
import sys

import click

from agentmesh_dagster.cli.context import CliContext, pass_cli
from agentmesh_dagster.constants import ENV_DAGSTER_URL
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.settings import WORKSPACE_FILE, dagster_home, database_url, make_private


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535))
@pass_cli
def dev(cli: CliContext, host: str, port: int) -> None:
    """Start the Dagster UI and daemon on this project, with the database's schema brought up to date.

    Runs until Ctrl-C. While it runs, `agentmesh publish` with AGENTMESH_DAGSTER_URL set to its address
    makes new jobs appear at once.
    """
    from agentmesh_dagster.scaffold import write_dagster_yaml
    from agentmesh_dagster.store import open_store

    workspace = cli.root / WORKSPACE_FILE
    if not workspace.is_file():
        raise DefinitionError(
            f"there is no {WORKSPACE_FILE} in {cli.root} or above: run this in a project's folder, or make one with "
            "`agentmesh init DIR`",
            code="no-project",
        )
    _check_port(host, port)
    home = dagster_home(cli.root)
    make_private(home)
    write_dagster_yaml(home)
    open_store(database_url(cli.root), upgrade=True).close()
    url = f"http://{host}:{port}"
    environment = {**os.environ, "DAGSTER_HOME": str(home), ENV_DAGSTER_URL: url}
    click.echo(f"Dagster UI: {url}")
    click.echo(f"in another terminal: export {ENV_DAGSTER_URL}={url}")
    sys.stdout.flush()
    # A shell may start background jobs with Ctrl-C ignored, and Dagster's processes would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(cli.root)
    arguments = [sys.executable, "-m", "dagster", "dev", "-w", str(workspace), "-h", host, "-p", str(port)]
    os.execve(sys.executable, arguments, environment)  # noqa: S606 - no shell is wanted


def _check_port(host: str, port: int) -> None:
    # Dagster starts all its processes first, and then says it in a traceback.
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise DefinitionError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose others with --host and --port",
            code="port-taken",
        ) from error
