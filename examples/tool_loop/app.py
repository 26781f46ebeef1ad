"""Shows one agent that calls a tool, waits for it, and goes on with the same context.

    START -> agent -> tools -> agent -> END

While `tools` runs, the next model call is known: the same agent, with the same prompt plus the tool's answer.
The first call is made to use the tool (`tool_choice`), so that also a very small model takes part in the loop.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel, Field

SYSTEM_PROMPT = """\
You are the timetable clerk of a small railway line. Travelers ask you about the trains of one station.
Look the station up before you answer, name the train and its time, and keep to two short sentences.
Never invent a train. If a station has no train left today, say so and name the first one tomorrow."""

_TIMETABLE = {
    "harbor": "Harbor: 07:12 local, 09:40 express, 18:05 local.",
    "mill": "Mill: 07:31 local, 18:24 local.",
    "summit": "Summit: 08:02 local, 10:15 express.",
}


class State(TypedDict):
    """The conversation."""

    messages: Annotated[list[AnyMessage], add_messages]


class Station(BaseModel):
    """Which station to look up."""

    station: str = Field(description="Name of the station.", max_length=24)


def timetable_tool(*, delay_s: float = 0.0) -> BaseTool:
    """Make the tool; `delay_s` stands for a slow timetable service."""

    @tool("timetable", args_schema=Station)
    def timetable(station: str) -> str:
        """Look up today's trains of one station."""
        time.sleep(delay_s)
        unknown = f"No station of that name. Known: {', '.join(sorted(_TIMETABLE))}."
        return _TIMETABLE.get(station.strip().lower(), unknown)

    return timetable


def build_graph(
    model: BaseChatModel, *, tool_delay_s: float = 0.0, checkpointer: BaseCheckpointSaver[Any] | None = None
) -> CompiledStateGraph[State, None, State, State]:
    """Build the graph around `model`, which must be able to bind tools."""
    tools = [timetable_tool(delay_s=tool_delay_s)]
    asking = model.bind_tools(tools, tool_choice="timetable", strict=True).bind(max_tokens=64)
    answering = model.bind_tools(tools, tool_choice="none", strict=True).bind(max_tokens=32)

    def agent(state: State) -> dict[str, Any]:
        has_facts = any(isinstance(message, ToolMessage) for message in state["messages"])
        chosen = answering if has_facts else asking
        return {"messages": [chosen.invoke([SystemMessage(SYSTEM_PROMPT), *state["messages"]])]}

    graph = StateGraph(State)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile(checkpointer=checkpointer)


def inputs() -> State:
    """Return an input for one run."""
    return {"messages": [HumanMessage("When does the first train leave from Harbor?", id="question")]}
