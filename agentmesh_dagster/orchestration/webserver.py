"""Talks to a running Dagster webserver over GraphQL."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Final

from agentmesh_dagster.errors import AgentMeshError

LOCATION: Final = "agentmesh"

_UNREACHABLE: Final = "DagsterUserCodeUnreachableError"
_RELOAD: Final = """
mutation Reload($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) {
    __typename
    ... on WorkspaceLocationEntry { loadStatus locationOrLoadError { __typename ... on PythonError { message } } }
    ... on ReloadNotSupported { message }
    ... on RepositoryLocationNotFound { message }
    ... on UnauthorizedError { message }
    ... on PythonError { message }
  }
}
"""


class WebserverError(AgentMeshError):
    """The Dagster webserver could not be reached, or refused."""

    domain = "orchestration"
    category = "third_party"
    default_code = "webserver"


def reload_code_location(url: str, name: str = LOCATION, *, timeout_s: float = 120.0) -> None:
    """Tells a webserver to load a code location anew, and waits until it has.

    Args:
        url: The webserver's address, such as `http://127.0.0.1:3000`.
        name: The location's name in `workspace.yaml`.
        timeout_s: How long to wait; a location with many jobs takes about 20 ms for each.

    Raises:
        WebserverError: It could not be reached, does not know the location, or could not load it.
    """
    problem = _reload(url, name, timeout_s)
    if problem is not None and _UNREACHABLE in problem:
        # Where the code server was killed, Dagster starts a new one and then fails at ending the old: the second time
        # it finds the new one.
        problem = _reload(url, name, timeout_s)
    if problem is not None:
        raise WebserverError(f"the code location {name!r} does not load: {problem}")


def _reload(url: str, name: str, timeout_s: float) -> str | None:
    """Asks for one reload, and returns why the location did not load."""
    answer = query(url, _RELOAD, {"name": name}, timeout_s=timeout_s)["reloadRepositoryLocation"]
    if answer["__typename"] != "WorkspaceLocationEntry":
        raise WebserverError(f"the webserver at {url} did not reload {name!r}: {answer.get('message')}")
    loaded: dict[str, Any] = answer.get("locationOrLoadError") or {}
    return str(loaded["message"]).strip() if loaded.get("__typename") == "PythonError" else None


def query(
    url: str, text: str, variables: dict[str, Any] | None = None, *, timeout_s: float = 30.0
) -> dict[str, Any]:
    """Runs a GraphQL query and returns its data.

    Raises:
        WebserverError: No answer, or an answer with errors.
    """
    if not url.startswith(("http://", "https://")):
        raise WebserverError(
            f"{url!r} is no http address of a Dagster webserver, such as 'http://127.0.0.1:3000'"
        )
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked above
        f"{url.rstrip('/')}/graphql",
        data=json.dumps({"query": text, "variables": variables or {}}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - the scheme was checked above
            body: dict[str, Any] = json.load(response)
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError) as error:
        raise WebserverError(f"no Dagster webserver answers at {url}: {error}; is it running?") from error
    if body.get("errors"):
        raise WebserverError(f"the webserver at {url} refused: {body['errors'][0].get('message')}")
    return body["data"]
