"""Shows a handoff: the first agent names the next one with a tool call, and `Command(goto=...)` goes there.

    START -> front_desk -> (repairs | orders) -> END

The name of the desk is known as soon as the tool call's arguments arrive, which is before the node has returned.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command
from pydantic import BaseModel, Field

Desk = Literal["repairs", "orders"]

FRONT_DESK_PROMPT = """\
You are the front desk of a bicycle shop. You do not solve problems yourself: you find out which desk can help and
transfer the customer there. Broken or worn parts go to repairs. New parts, bicycles, prices go to orders."""

DESK_PROMPTS: dict[str, str] = {
    "repairs": """\
You are the repair desk of a bicycle shop. Name the likely cause of the customer's trouble, say what the workshop will
do about it, and how long that takes: brakes half a day, wheels one day, gears two days. Answer in two sentences.""",
    "orders": """\
You are the order desk of a bicycle shop. Say which part or bicycle fits the customer's wish, whether it is in stock
(tires, chains and lights always are), and when it can be collected. Answer in two sentences.""",
}


class State(TypedDict):
    """The conversation."""

    messages: Annotated[list[AnyMessage], add_messages]


class Transfer(BaseModel):
    """Where the customer goes."""

    desk: Desk = Field(description="The desk that can help.")


@tool("transfer", args_schema=Transfer)
def transfer(desk: str) -> str:
    """Transfer the customer to another desk."""
    return f"Transferred to {desk}."


def build_graph(
    model: BaseChatModel, *, checkpointer: BaseCheckpointSaver[Any] | None = None
) -> CompiledStateGraph[State, None, State, State]:
    """Build the graph around `model`, which must be able to bind tools."""
    choosing = model.bind_tools([transfer], tool_choice="transfer", strict=True).bind(max_tokens=48)
    answering = model.bind(max_tokens=32)

    def front_desk(state: State) -> Command[Desk]:
        answer = choosing.invoke([SystemMessage(FRONT_DESK_PROMPT), *state["messages"]])
        desk = _chosen_desk(answer)
        replies = [ToolMessage(transfer.invoke({"desk": desk}), tool_call_id=call["id"]) for call in answer.tool_calls]
        return Command(goto=desk, update={"messages": [answer, *replies]})

    def desk_node(name: str) -> Any:
        def desk(state: State) -> dict[str, Any]:
            return {"messages": [answering.invoke([SystemMessage(DESK_PROMPTS[name]), *state["messages"]])]}

        return desk

    graph = StateGraph(State)
    graph.add_node("front_desk", front_desk)
    for name in DESK_PROMPTS:
        graph.add_node(name, desk_node(name))
    graph.add_edge(START, "front_desk")
    return graph.compile(checkpointer=checkpointer)


def _chosen_desk(answer: AIMessage) -> Desk:
    """Return the desk that the model named; without a valid call the customer goes to repairs."""
    desk = answer.tool_calls[0]["args"].get("desk") if answer.tool_calls else None
    return "orders" if desk == "orders" else "repairs"


def inputs() -> State:
    """Return an input for one run."""
    return {"messages": [HumanMessage("My rear brake squeals when it rains.", id="question")]}
