"""Shows parallel work: `Send` starts one worker per text, and a join waits for all of them.

    START -> (worker x N) -> join -> END

All workers share one system prompt, so its KV is the same for each of them; the join starts when the last is done.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send

WORKER_PROMPT = """\
You are one of several readers in an archive. Each reader gets one letter and writes down, in one sentence, who wrote
it, to whom, and what the writer wanted. Do not guess what the letter does not say."""

JOIN_PROMPT = """\
You are the head of the reading room. You get the sentences of all readers, one for each letter, and write one
paragraph for the catalogue: what the letters have in common, and which of them is the odd one out."""


class State(TypedDict):
    """`letters` in, one numbered finding for each of them, `catalogue` out."""

    letters: list[str]
    findings: Annotated[list[str], operator.add]
    catalogue: str


class Task(TypedDict):
    """What one worker gets."""

    number: int
    letter: str


def build_graph(
    model: BaseChatModel, *, checkpointer: BaseCheckpointSaver[Any] | None = None
) -> CompiledStateGraph[State, None, State, State]:
    """Build the graph around `model`."""
    short = model.bind(max_tokens=24)

    def deal(state: State) -> list[Send]:
        return [Send("worker", Task(number=n, letter=text)) for n, text in enumerate(state["letters"], start=1)]

    def worker(state: Task) -> dict[str, Any]:
        answer = short.invoke(
            [SystemMessage(WORKER_PROMPT), HumanMessage(f"Letter {state['number']}:\n{state['letter']}")]
        )
        return {"findings": [f"{state['number']}. {answer.content}"]}

    def join(state: State) -> dict[str, Any]:
        answer = short.invoke([SystemMessage(JOIN_PROMPT), HumanMessage("\n".join(sorted(state["findings"])))])
        return {"catalogue": str(answer.content)}

    graph = StateGraph(State)
    graph.add_node("worker", worker, input_schema=Task)
    graph.add_node("join", join)
    graph.add_conditional_edges(START, deal, ["worker"])
    graph.add_edge("worker", "join")
    graph.add_edge("join", END)
    return graph.compile(checkpointer=checkpointer)


def inputs() -> State:
    """Return an input for one run."""
    return {
        "letters": [
            "Dear aunt, the goat has eaten the curtains again. Could you lend us yours until spring? Your Ada",
            "To the mayor: the bridge at the mill still has no railing. We ask you for the third time. The millers",
            "Dear Tom, I passed the examination! Tell mother first, then everybody else. Your brother Will",
        ],
        "findings": [],
        "catalogue": "",
    }
