"""Ways in which apps make their prompts: small real graphs whose model node is preceded by one that prepares state."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from pydantic import BaseModel
from typing_extensions import TypedDict

RULES = " ".join(f"rule{number}" for number in range(60))
SYSTEM = SystemMessage(f"You are the writer. {RULES}")


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    question: str
    plan: str
    points: list[str]
    facts: dict[str, Any]
    round: int


class Model(BaseModel):
    messages: Annotated[list[AnyMessage], add_messages] = []
    plan: str = ""


@dataclass
class Style:
    """One way to make prompts.

    `prompt` is the node's own code; `prepare` what the node before it writes in run `n`; `share` the part of the real
    prompt that has to be foreseen from run `from_run` on (counted from 1), or as `until` run where it must not be.
    """

    prompt: Callable[[Any], list[Any]]
    share: float = 0.999
    from_run: int = 3
    runs: int = 5
    prepare: Callable[[int], dict[str, Any]] = lambda n: {"plan": f"plan number {n}: " + " ".join([f"step{n}"] * 20)}
    keeps_thread: bool = False
    schema: type = State
    metadata: dict[str, Any] | None = None
    more_nodes: dict[str, Callable[[Any], dict[str, Any]]] = field(default_factory=dict)


def get(state: Any, name: str) -> Any:
    return getattr(state, name) if isinstance(state, BaseModel) else state.get(name)


def history(n: int) -> dict[str, Any]:
    """A thread with some past: three turns, one with a tool call."""
    call = {"name": "look", "args": {"q": f"q{n}"}, "id": f"c{n}"}
    return {
        "messages": [
            HumanMessage(f"first question {n} " + "word " * 20),
            AIMessage("", tool_calls=[call]),
            {"role": "tool", "content": f"found {n}", "tool_call_id": f"c{n}"},
            AIMessage(f"first answer {n} " + "thing " * 20),
            HumanMessage(f"second question {n}"),
        ]
    }


def without_tools(messages: list[Any]) -> list[Any]:
    return [m for m in messages if m.type != "tool" and not getattr(m, "tool_calls", None)]


def fields(n: int) -> dict[str, Any]:
    return {
        "question": f"why is the sky {['blue', 'red', 'grey'][n % 3]}?",
        "plan": f"look at light {n}, then at dust {n * 7}",
        "points": [f"point {letter}{n}" for letter in "abc"[: 2 + n % 2]],
        "facts": {"wave": 400 + n, "kind": f"light{n}", "list": [1, n]},
        "round": n,
    }


_IDS = itertools.count(10_000)


def clocked(state: Any) -> list[Any]:
    """A system prompt that is another one in every call, from its end on."""
    return [SystemMessage(f"{SYSTEM.content} The request is {next(_IDS) * 7919:x}."), *state["messages"]]


def trimmed(state: Any) -> list[Any]:
    return [SYSTEM, *state["messages"][-3:]]


def pictured(state: Any) -> list[Any]:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    return [SYSTEM, HumanMessage([{"type": "text", "text": "see"}, picture]), *state["messages"]]


TEMPLATE = ChatPromptTemplate.from_messages([("system", f"Declared. {RULES}"), ("user", "Plan: {plan}")])

STYLES: dict[str, Style] = {
    "system and messages": Style(lambda s: [SYSTEM, *s["messages"]], prepare=history, from_run=2),
    "messages only": Style(lambda s: s["messages"], prepare=history, from_run=2),
    "last two messages": Style(lambda s: [SYSTEM, *s["messages"][-2:]], prepare=history),
    "all but the last": Style(lambda s: [SYSTEM, *s["messages"][:-1]], prepare=history),
    "without tools": Style(lambda s: [SYSTEM, *without_tools(s["messages"])], prepare=history),
    "fields in a text": Style(
        lambda s: [SYSTEM, HumanMessage(f"Context: {s['plan']}\nQuestion: {s['question']}")], prepare=fields
    ),
    "a number in a text": Style(lambda s: [SYSTEM, HumanMessage(f"Round {s['round']} of many. Go.")], prepare=fields),
    "a joined list": Style(
        lambda s: [SYSTEM, HumanMessage("Points:\n- " + "\n- ".join(s["points"]) + "\nWrite!")], prepare=fields
    ),
    "a numbered list": Style(
        lambda s: [SYSTEM, HumanMessage("\n".join(f"{n}. {p}" for n, p in enumerate(s["points"], 1)))], prepare=fields
    ),
    "json": Style(lambda s: [SYSTEM, HumanMessage(f"Facts: {json.dumps(s['facts'])}")], prepare=fields),
    "indented json": Style(lambda s: [SYSTEM, HumanMessage(json.dumps(s["facts"], indent=2))], prepare=fields),
    "a key of a field": Style(lambda s: [SYSTEM, HumanMessage(f"Kind: {s['facts']['kind']}.")], prepare=fields),
    "a field in the system prompt": Style(
        lambda s: [SystemMessage(f"{RULES} Follow: {s['plan']}!"), *s["messages"]],
        prepare=lambda n: {**history(n), **fields(n)},
    ),
    "the last message in a text": Style(
        lambda s: [SYSTEM, HumanMessage(f"Answer this: <q>{s['messages'][-1].content}</q>")], prepare=history
    ),
    "an instruction behind the messages": Style(
        lambda s: [SYSTEM, *s["messages"], HumanMessage("Now write the summary.")], prepare=history
    ),
    "examples before the messages": Style(
        lambda s: [SYSTEM, HumanMessage("2+2?"), AIMessage("4"), *s["messages"]], prepare=history
    ),
    "a growing thread": Style(
        lambda s: [SYSTEM, *s["messages"]],
        prepare=lambda n: {"messages": [HumanMessage(f"turn {n}")]},
        keeps_thread=True,
        from_run=2,
        runs=6,
    ),
    "a thread that is trimmed": Style(
        trimmed, prepare=lambda n: {"messages": [HumanMessage(f"turn {n}")]}, keeps_thread=True, from_run=5, runs=9
    ),
    "messages that are replaced": Style(
        lambda s: [SYSTEM, *s["messages"]],
        prepare=lambda n: {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), HumanMessage(f"summary {n}")]},
        keeps_thread=True,
        runs=7,
    ),
    "an id in the system prompt": Style(clocked, prepare=history, share=0.45, from_run=4, runs=7),
    "a picture": Style(pictured, prepare=history, share=0.37),
    "pydantic state": Style(
        lambda s: [SYSTEM, HumanMessage(f"Follow {s.plan}."), *s.messages],
        prepare=lambda n: {**history(n), "plan": f"the plan {n}"},
        schema=Model,
    ),
    "declared as a template": Style(
        lambda s: TEMPLATE.format_messages(plan=s["plan"]),
        metadata={"pancake": {"prompt": TEMPLATE}},
        from_run=2,
    ),
    "declared as a function": Style(
        lambda s: [SYSTEM, HumanMessage(s["plan"].upper())],
        metadata={"pancake": {"prompt": lambda s: [SYSTEM, HumanMessage(s["plan"].upper())]}},
        from_run=2,
    ),
}


def build(style: Style, model: Any, run: Callable[[], int], saver: Any = None) -> Any:
    """Build the graph of a style: `prepare`, then `writer`, which calls the model."""

    async def prepare(state: Any) -> dict[str, Any]:
        return style.prepare(run())

    async def writer(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(style.prompt(state))]}

    builder: Any = StateGraph(style.schema)
    builder.add_node("prepare", prepare)
    builder.add_node("writer", writer, metadata=style.metadata)
    builder.add_edge(START, "prepare")
    builder.add_edge("prepare", "writer")
    builder.add_edge("writer", END)
    return builder.compile(checkpointer=saver)
