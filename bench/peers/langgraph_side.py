"""LangGraph's side of `make bench-peers`: run by the Python of its virtual environment, never imported by the project.

`python langgraph_side.py FOLDER` says its versions in one line of JSON, then answers each line on stdin, the JSON of
what to run (`Work`), with a line of the seconds that it took: `{"wall_s": ..., "cpu_s": ...}`. Checkpoints go to SQLite
files in the folder, each run has a LangGraph thread of its own.

Written as its documentation does it: `SqliteSaver` with `invoke` where nodes are functions, `AsyncSqliteSaver` with
`ainvoke` where they are coroutines, `Send` for a fan-out over items, whose outputs a reducer gathers.
"""

# No `from __future__ import annotations` here: LangGraph reads the annotations of states.

import asyncio
import importlib.metadata
import json
import operator
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

PACKAGES = ("langgraph", "langgraph-checkpoint-sqlite", "langchain-core")


class Work(TypedDict):
    """What is asked for."""

    shape: str
    """`chain`, `foreach` or `fan`."""
    size: int
    """How many nodes or items."""
    is_async: bool
    durability: str | None
    """As `invoke` takes it; None is LangGraph's default."""
    synchronous: str | None
    """SQLite's pragma; None leaves it as LangGraph does, at FULL: a sync of the disk for each commit."""


class ChainState(TypedDict):
    """What a chain hands on."""

    value: int


class ItemsState(TypedDict):
    """A list, and what came of its items."""

    items: list[int]
    outputs: Annotated[list[int], operator.add]


def build_chain(work: Work) -> StateGraph[Any]:
    """So many nodes, each after the other, that do nothing."""

    def hand_on(state: ChainState) -> dict[str, int]:
        return {"value": state["value"]}

    async def hand_on_async(state: ChainState) -> dict[str, int]:
        return {"value": state["value"]}

    graph = StateGraph(ChainState)
    names = [f"n{number}" for number in range(work["size"])]
    for name in names:
        graph.add_node(name, hand_on_async if work["is_async"] else hand_on)
    for above, below in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(above, below)
    return graph


def build_foreach(work: Work) -> StateGraph[Any]:
    """A node for each item of a list, that does nothing."""

    def each(state: dict[str, int]) -> dict[str, list[int]]:
        return {"outputs": [state["item"]]}

    async def each_async(state: dict[str, int]) -> dict[str, list[int]]:
        return {"outputs": [state["item"]]}

    def spread(state: ItemsState) -> list[Send]:
        return [Send("each", {"item": item}) for item in state["items"]]

    graph = StateGraph(ItemsState)
    graph.add_node("each", each_async if work["is_async"] else each)
    graph.add_conditional_edges(START, spread, ["each"])
    graph.add_edge("each", END)
    return graph


def build_fan(work: Work) -> StateGraph[Any]:
    """So many nodes side by side, that sleep 100 ms."""

    async def pause(state: ItemsState) -> dict[str, list[int]]:
        await asyncio.sleep(0.1)
        return {"outputs": [1]}

    graph = StateGraph(ItemsState)
    for number in range(work["size"]):
        graph.add_node(f"n{number}", pause)
        graph.add_edge(START, f"n{number}")
        graph.add_edge(f"n{number}", END)
    return graph


BUILDERS = {"chain": build_chain, "foreach": build_foreach, "fan": build_fan}


class Runs:
    """Compiled graphs by what was asked for, each kept once it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._open = ExitStack()
        self._open_async = AsyncExitStack()
        self._graphs: dict[str, Any] = {}

    def seconds(self, work: Work) -> dict[str, float]:
        """Runs it once."""
        name = json.dumps(work)
        graph = self._graphs.get(name)
        if graph is None:
            graph = self._graphs[name] = BUILDERS[work["shape"]](work).compile(
                checkpointer=self._saver(work, self._folder / f"{len(self._graphs)}.db")
            )
        items = list(range(work["size"])) if work["shape"] == "foreach" else []
        given = {"value": 1} if work["shape"] == "chain" else {"items": items, "outputs": []}
        config: dict[str, Any] = {"configurable": {"thread_id": str(uuid4())}, "recursion_limit": 100}
        if work["shape"] == "foreach":
            config["max_concurrency"] = 16
        options = {} if work["durability"] is None else {"durability": work["durability"]}
        wall, cpu = time.perf_counter(), time.process_time()
        if work["is_async"]:
            result = self._loop.run_until_complete(graph.ainvoke(given, config, **options))
        else:
            result = graph.invoke(given, config, **options)
        took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        outputs = work["size"] if work["shape"] != "chain" else None
        if outputs is not None and len(result["outputs"]) != outputs:
            raise RuntimeError(f"{work} came to {len(result['outputs'])} outputs")
        return took

    def _saver(self, work: Work, file: Path) -> Any:
        pragma = f"PRAGMA synchronous={work['synchronous']}" if work["synchronous"] else None
        if work["is_async"]:
            return self._loop.run_until_complete(self._async_saver(file, pragma))
        saver = self._open.enter_context(SqliteSaver.from_conn_string(str(file)))
        saver.setup()
        if pragma is not None:
            saver.conn.execute(pragma)
        return saver

    async def _async_saver(self, file: Path, pragma: str | None) -> AsyncSqliteSaver:
        saver = await self._open_async.enter_async_context(AsyncSqliteSaver.from_conn_string(str(file)))
        await saver.setup()
        if pragma is not None:
            await saver.conn.execute(pragma)
        return saver

    def close(self) -> None:
        """Closes the files."""
        self._open.close()
        self._loop.run_until_complete(self._open_async.aclose())
        self._loop.close()


def main() -> None:
    """Answers until stdin ends."""
    runs = Runs(Path(sys.argv[1]))
    print(json.dumps({name: importlib.metadata.version(name) for name in PACKAGES}), flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(runs.seconds(json.loads(line))), flush=True)
    finally:
        runs.close()


if __name__ == "__main__":
    main()
