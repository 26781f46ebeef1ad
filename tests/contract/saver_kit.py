"""A graph with a bit of everything, and the saver's own programs, for the suites about trouble."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

from pancake_langgraph.saver import PancakeSaver

CHILDREN = Path(__file__).parents[1] / "saver_children.py"
WAIT_S = 120
SHARED = pytest.mark.parametrize("saver_factory", ["sqlite", "redis"], indirect=True)
SQLITE = pytest.mark.parametrize("saver_factory", ["sqlite"], indirect=True)
REDIS = pytest.mark.parametrize("saver_factory", ["redis"], indirect=True)
MODES = pytest.mark.parametrize("mode", ["sync", "async"])

#: Some are kept within their list, some apart from it.
ITEMS = [f"{n} " * (n % 2 * 50 + 5) for n in range(40)]


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    items: list[str]
    extra: Any


def thread(name: str = "t", **more: Any) -> Any:
    return {"configurable": {"thread_id": name, **more}}


def chat_graph(saver: PancakeSaver) -> Any:
    """Return a graph whose states have a bit of everything: a long list, a message, a nested value, open writes."""

    def answer(state: Chat) -> Any:
        return {"messages": [AIMessage("Hello", id="a")], "items": ITEMS, "extra": {"x": 1}}

    builder = StateGraph(Chat).add_node(answer).add_node("ask", lambda state: {"extra": interrupt("Go on?")})
    return builder.add_edge(START, "answer").add_edge("answer", "ask").compile(checkpointer=saver)


def run_chat(saver: PancakeSaver, name: str = "t") -> list[CheckpointTuple]:
    chat_graph(saver).invoke({"messages": [HumanMessage("Hi", id="h")], "items": [], "extra": None}, thread(name))
    return list(saver.list(thread(name)))


async def call(graph: Any, mode: str, value: Any, **options: Any) -> Any:
    if mode == "async":
        return await graph.ainvoke(value, thread(), **options)
    return await asyncio.to_thread(graph.invoke, value, thread(), **options)


def load_children() -> ModuleType:
    """Load the programs; there is no package `tests`."""
    spec = importlib.util.spec_from_file_location("pancake_saver_children", CHILDREN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(CHILDREN), program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
