"""What the tests of threads that move share: graphs to fill savers with, and ways to look at what they hold."""

import dataclasses
import operator
import time
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send, StateSnapshot, interrupt

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
#: Rows of another saver that name what must not be called, by the code of LangGraph's wire.
CRAFTED = {
    0: ("os", "system", "echo called"),
    1: ("os", "system", ["echo called"]),
    2: ("subprocess", "run", {"args": ["true"]}),
    3: ("os", "system", "echo called", "__call__"),
    4: ("os", "system", {}),
    5: ("os", "system", {}, "model_validate_json"),
}


@dataclasses.dataclass
class Order:
    item: str
    count: int


class Chat(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    pair: tuple[int, str]
    seen: Annotated[list[str], operator.add]


def talk(saver: BaseCheckpointSaver[Any]) -> Any:
    """A fan-out, a sub-graph with its own namespace, and an interrupt."""
    inner = StateGraph(Chat)
    inner.add_node("deep", lambda state: {"seen": ["deep"]})
    inner.add_node("ask", lambda state: {"seen": [interrupt({"question": ("really", 1)})]})
    inner.add_edge(START, "deep")
    inner.add_edge("deep", "ask")
    inner.add_edge("ask", END)
    graph = StateGraph(Chat)
    graph.add_node("answer", lambda state: {"messages": [AIMessage("hello", id="a1")], "pair": (1, "one")})
    graph.add_node("work", lambda state: {"seen": state["seen"]})
    graph.add_node("inner", inner.compile())
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", lambda state: [Send("work", {"seen": [name]}) for name in "cab"], ["work"])
    graph.add_edge("work", "inner")
    graph.add_edge("inner", END)
    return graph.compile(checkpointer=saver)


def run_talk(saver: BaseCheckpointSaver[Any], thread_id: str) -> None:
    talk(saver).invoke({"messages": [HumanMessage("hi", id="h1")]}, thread(thread_id))


def thread(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id}}


def everything(saver: BaseCheckpointSaver[Any], thread_id: str = "t1") -> list[CheckpointTuple]:
    return sorted(saver.list(thread(thread_id)), key=lambda found: sorted(found.config["configurable"].items()))


def merged(state: list[Any], updates: list[Any]) -> list[Any]:
    return [*state, *(item for update in updates for item in update)]


class Delta(TypedDict):
    notes: Annotated[list[str], DeltaChannel(merged, snapshot_frequency=1000)]
    long: Annotated[list[str], operator.add]


def noted(saver: BaseCheckpointSaver[Any]) -> Any:
    graph = StateGraph(Delta)
    graph.add_node("note", lambda state: {"notes": [f"note {len(state['notes'])}"]})
    graph.add_edge(START, "note")
    graph.add_edge("note", END)
    return graph.compile(checkpointer=saver)


def history(
    saver: BaseCheckpointSaver[Any], thread_id: str, graph: Callable[[BaseCheckpointSaver[Any]], Any] = talk
) -> list[StateSnapshot]:
    """Return all states of a thread, as LangGraph makes them from what is stored."""
    return list(graph(saver).get_state_history(thread(thread_id)))


def failing_once() -> tuple[Callable[[BaseCheckpointSaver[Any]], Any], list[str]]:
    """Return a graph of two tasks, of which one fails at first, and a list of the runs of both.

    It fails once what the other one wrote is stored.
    """
    runs: list[str] = []

    def graph(saver: BaseCheckpointSaver[Any]) -> Any:
        def good(state: Chat) -> Chat:
            runs.append("good")
            return {"seen": ["good"]}

        def bad(state: Chat, config: RunnableConfig) -> Chat:
            runs.append("bad")
            if runs.count("bad") > 1:
                return {"seen": ["bad"]}
            where = thread(config["configurable"]["thread_id"])
            while not any(value == ["good"] for item in saver.list(where) for _, _, value in item.pending_writes or ()):
                time.sleep(0.01)
            raise RuntimeError("not yet")

        graph = StateGraph(Chat)
        for node in (good, bad):
            graph.add_node(node.__name__, node)
            graph.add_edge(START, node.__name__)
        return graph.compile(checkpointer=saver)

    return graph, runs
