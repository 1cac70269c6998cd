"""How a node may end, as far as its config tells: the handles that it chooses together."""

from __future__ import annotations

from collections.abc import Iterator

from agentmesh_dagster.constants import HANDLE_REJECTED, HANDLE_TIMEOUT
from agentmesh_dagster.specs.nodes import BranchConfig, HumanConfig, NodeConfig, WebhookConfig


def choices(config: NodeConfig | None) -> Iterator[frozenset[str | None]]:
    """The handles that a node may choose together, for each of its choices; nothing for types that choose none.

    Of edges without a handle it is None that says whether they are live.
    """
    own = config.handles() if config is not None else ()
    match config:
        case BranchConfig(mode="first"):
            yield from (frozenset((handle,)) for handle in own)
        case HumanConfig():
            # A rejection or a timeout takes no edge without a handle.
            lone = {HANDLE_TIMEOUT} | ({HANDLE_REJECTED} - set(config.options or ()))
            decided = [handle for handle in own if handle not in lone]
            if config.multiple:
                yield frozenset((None, *decided))
            else:
                yield from (frozenset((None, handle)) for handle in decided)
            yield from (frozenset((handle,)) for handle in own if handle in lone)
        case WebhookConfig(on_timeout="route"):
            yield frozenset((None,))
            yield frozenset((HANDLE_TIMEOUT,))
        case _:
            return
