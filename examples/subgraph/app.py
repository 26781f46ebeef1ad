"""Shows a sub-graph as a node: two agents with a shared conversation inside, one agent outside.

    START -> desk[ draft -> edit ] -> publisher -> END

Agents inside are told apart by their namespace (`desk|draft`), not by their node name alone.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph

PROMPTS: dict[str, str] = {
    "draft": """\
You write the first draft of a notice for the village board from what people tell you. Say what, where and when, in
that order. Leave out opinions. One or two sentences are enough.""",
    "edit": """\
You edit drafts of notices for the village board. Shorten them, put the day first, replace long words by short ones,
and keep every fact. Give back the notice only, without remarks.""",
    "publisher": """\
You put notices on the village board. Give the edited notice a headline of at most five words in capital letters, then
repeat the notice word for word below it.""",
}


class State(TypedDict):
    """The conversation."""

    messages: Annotated[list[AnyMessage], add_messages]


def build_graph(
    model: BaseChatModel, *, checkpointer: BaseCheckpointSaver[Any] | None = None
) -> CompiledStateGraph[State, None, State, State]:
    """Build the graph around `model`."""
    short = model.bind(max_tokens=32)

    def agent(name: str) -> Any:
        def run(state: State) -> dict[str, Any]:
            return {"messages": [short.invoke([SystemMessage(PROMPTS[name]), *state["messages"]])]}

        return run

    desk = StateGraph(State)
    desk.add_node("draft", agent("draft"))
    desk.add_node("edit", agent("edit"))
    desk.add_edge(START, "draft")
    desk.add_edge("draft", "edit")
    desk.add_edge("edit", END)

    graph = StateGraph(State)
    graph.add_node("desk", desk.compile())
    graph.add_node("publisher", agent("publisher"))
    graph.add_edge(START, "desk")
    graph.add_edge("desk", "publisher")
    graph.add_edge("publisher", END)
    return graph.compile(checkpointer=checkpointer)


def inputs() -> State:
    """Return an input for one run."""
    text = "Someone should know that the ferry does not run on Friday because they paint it, at the old pier."
    return {"messages": [HumanMessage(text, id="story")]}
