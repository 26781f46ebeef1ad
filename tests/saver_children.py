"""Programs that the saver's contract suites start as processes of their own.

Usage: python saver_children.py PROGRAM WHERE [MORE]
"""

from __future__ import annotations

import asyncio
import enum
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage
from langgraph.checkpoint.base import Checkpoint, empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.saver import PancakeSaver


@dataclass
class Note:
    """A class of the app."""

    text: str


class Level(enum.Enum):
    """Another."""

    HIGH = "high"


class Noted(TypedDict):
    """A state that names both."""

    messages: Annotated[list[AnyMessage], add_messages]
    note: Note
    level: Level


def strict(where: str) -> None:
    """Compile under LANGGRAPH_STRICT_MSGPACK, which clones the saver with the types of the state's schema."""
    saver = PancakeSaver(where)
    told: list[object] = []
    saver.subscribe(told.append)
    builder = StateGraph(Noted).add_node("node", lambda state: {"note": Note("a"), "level": Level.HIGH})
    graph = builder.add_edge(START, "node").compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke({"messages": [HumanMessage("Hi")]}, config)
    values = graph.get_state(config).values
    print("same" if graph.checkpointer is saver else "cloned")
    print("shared" if told and values == graph.get_state(config).values else "apart")
    print(type(values["note"]).__name__, values["level"])
    saver.close()


PROGRAMS: dict[str, Callable[..., None]] = {"strict": strict}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
