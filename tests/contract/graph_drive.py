"""Drives one graph on two savers, in both modes, and compares what they saw, for the saver's suites with real graphs.

A scenario runs twice, on the reference and on ours, and returns every state snapshot it saw.  They are compared as
text in which ids are replaced by numbers in order of appearance, so that links between snapshots count and ids do not.
"""

import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Interrupt, PregelTask, Send, StateSnapshot, interrupt

from pancake_langgraph.saver import PancakeSaver

CHILDREN = Path(__file__).parents[1] / "saver_children.py"
WAIT_S = 60
BOTH_MODES = pytest.mark.parametrize("mode", ["sync", "async"])
#: Backends on which a second saver object sees what the first one stored.
SHARED = pytest.mark.parametrize("saver_factory", ["sqlite", "redis"], indirect=True)
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{32}\b")


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class Drive:
    """A saver, and the graph methods of one mode behind one set of names."""

    def __init__(self, saver: BaseCheckpointSaver[Any], mode: str) -> None:
        self.saver: Any = saver
        self.is_async = mode == "async"
        self._tap(saver)
        self.on_writes: Callable[[Sequence[tuple[str, Any]]], None] = lambda writes: None

    def _tap(self, saver: Any) -> None:
        put_writes, aput_writes = saver.put_writes, saver.aput_writes

        def tapped(config: Any, writes: Any, *rest: Any) -> None:
            put_writes(config, writes, *rest)
            self.on_writes(writes)

        async def atapped(config: Any, writes: Any, *rest: Any) -> None:
            await aput_writes(config, writes, *rest)
            self.on_writes(writes)

        saver.put_writes, saver.aput_writes = tapped, atapped

    async def invoke(self, graph: Any, value: Any, config: Any, **options: Any) -> Any:
        if self.is_async:
            return await graph.ainvoke(value, config, **options)
        return graph.invoke(value, config, **options)

    async def state(self, graph: Any, config: Any, *, subgraphs: bool = False) -> Any:
        if self.is_async:
            return await graph.aget_state(config, subgraphs=subgraphs)
        return graph.get_state(config, subgraphs=subgraphs)

    async def history(self, graph: Any, config: Any, **options: Any) -> list[StateSnapshot]:
        if self.is_async:
            return [snapshot async for snapshot in graph.aget_state_history(config, **options)]
        return list(graph.get_state_history(config, **options))

    async def update(self, graph: Any, config: Any, values: Any, as_node: str | None = None) -> Any:
        if self.is_async:
            return await graph.aupdate_state(config, values, as_node)
        return graph.update_state(config, values, as_node)


def plain(value: Any) -> Any:
    """Return a snapshot, or what is in one, as plain data in one order; only the time of creation is left out."""
    if isinstance(value, StateSnapshot):
        fields = {name: plain(found) for name, found in value._asdict().items() if name != "created_at"}
        # The reference returns tuples in metadata (counters of incremental channels) as lists, we as tuples.
        return {**fields, "metadata": str(fields["metadata"]).replace("(", "[").replace(")", "]")}
    if isinstance(value, PregelTask):
        return {name: plain(found) for name, found in value._asdict().items()}
    if isinstance(value, Interrupt):
        return ("interrupt", plain(value.value), value.id)
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return repr(value)


def text_of(value: Any) -> str:
    numbers: dict[str, str] = {}
    return _ID.sub(lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), repr(plain(value)))


Scenario = Callable[[Drive], Any]


async def equals_reference(scenario: Scenario, saver: PancakeSaver, mode: str) -> None:
    expected = text_of(await scenario(Drive(InMemorySaver(), mode)))
    assert "values" in expected
    assert text_of(await scenario(Drive(saver, mode))) == expected


def thread(name: object = "t", **more: Any) -> Any:
    return {"configurable": {"thread_id": name, **more}}


def writer(name: str) -> Any:
    return lambda state: {"log": [name]}


def two_equal_subgraphs(saver: BaseCheckpointSaver[Any], checkpointer: bool | None) -> Any:
    def sub(prefix: str) -> Any:
        builder = StateGraph(Log).add_node("x", writer(f"{prefix}.x"))
        builder.add_node("y", lambda state: {"log": [f"{prefix}.y {interrupt(prefix)}"]})
        builder.add_node("z", lambda state: {"log": [f"{prefix}.z saw {len(state['log'])}"]})
        return builder.add_edge(START, "x").add_edge("x", "y").add_edge("y", "z").compile(checkpointer=checkpointer)

    builder = StateGraph(Log).add_node("one", sub("one")).add_node("two", sub("two"))
    return builder.add_edge(START, "one").add_edge("one", "two").compile(checkpointer=saver)


def log_graph(saver: BaseCheckpointSaver[Any], name: str = "n") -> Any:
    return StateGraph(Log).add_node(name, writer(name)).add_edge(START, name).compile(checkpointer=saver)


def three_asking(saver: BaseCheckpointSaver[Any]) -> Any:
    def ask(state: Any) -> Log:
        return {"log": [f"{state['who']}: {interrupt(state['who'])}"]}

    builder = StateGraph(Log).add_node("ask", ask)
    builder.add_conditional_edges(START, lambda state: [Send("ask", {"who": who}) for who in ("x", "y", "z")], ["ask"])
    return builder.compile(checkpointer=saver)
