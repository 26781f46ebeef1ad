"""Shapes whose question is which way: chains, loops, branches, routers, commands."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command

from pancake_langgraph._types import Prompt
from pancake_langgraph.bench.forecast_shapes import (
    Parts,
    Shape,
    agent_of,
    no_script,
    num_answers,
    one_message,
    speaker,
    system_prompt,
)
from pancake_langgraph.engines.fake_text import text_of

_QUEUES: Final = ("billing", "shipping", "returns")
_HUB_ODDS: Final[Mapping[str, float]] = {"left": 0.6, "middle": 0.3, "right": 0.1}
_OPEN_ODDS: Final[Mapping[str, float]] = {"often": 0.75, "seldom": 0.25}
_PASS_ODDS: Final[Mapping[str, float]] = {"publish": 0.7, "write": 0.3}


def _graph_of(parts: Parts, *agents: str) -> StateGraph[Any, Any, Any, Any]:
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    for agent in agents:
        builder.add_node(agent, speaker(parts, agent))
    return builder


def _drawn(rng: random.Random, odds: Mapping[str, float]) -> str:
    return rng.choices(list(odds), list(odds.values()))[0]


def chain(parts: Parts) -> Any:
    """Three agents in a row."""
    builder = _graph_of(parts, "plan", "write", "polish")
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "write")
    builder.add_edge("write", "polish")
    builder.add_edge("polish", END)
    return builder.compile(checkpointer=parts.saver)


def fixed_loop(parts: Parts) -> Any:
    """Writer and critic three times around, then the publisher."""
    builder = _graph_of(parts, "draft", "critic", "publish")
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "critic")
    builder.add_conditional_edges(
        "critic", lambda s: "draft" if num_answers(s["messages"]) < 6 else "publish", ["draft", "publish"]
    )
    builder.add_edge("publish", END)
    return builder.compile(checkpointer=parts.saver)


class _Ticket(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    queue: str


class Queue(TypedDict):
    """The queue that a ticket belongs to."""

    queue: Literal["billing", "shipping", "returns"]


def structured_router(parts: Parts) -> Any:
    """A model names the next agent in structured output, by what the user wrote."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Ticket)
    sorting = parts.model.with_structured_output(Queue, method="json_schema")
    system = SystemMessage(system_prompt("sorter"))

    async def sorter(state: _Ticket) -> dict[str, Any]:
        found: Any = await sorting.ainvoke([system, *state["messages"]])
        return {"queue": found["queue"]}

    builder.add_node("sorter", sorter)
    for queue in _QUEUES:
        builder.add_node(queue, speaker(parts, queue))
        builder.add_edge(queue, END)
    builder.add_edge(START, "sorter")
    builder.add_conditional_edges("sorter", lambda s: s["queue"], list(_QUEUES))
    return builder.compile(checkpointer=parts.saver)


def _ticket(number: int) -> dict[str, Any]:
    queue = random.Random(f"ticket {number}").choice(_QUEUES)
    return {"messages": [("user", f"Ticket {number}: this is about {queue}, please help.")]}


def _sort(prompt: Prompt) -> str | None:
    if agent_of(prompt) != "sorter":
        return None
    text = text_of(prompt.messages[-1])
    return f'{{"queue": "{next(q for q in _QUEUES if q in text)}"}}'


def alternating_router(parts: Parts) -> Any:
    """A hub sends to one of two agents in turn, four times, then ends."""
    builder = _graph_of(parts, "hub", "research", "write")

    def route(state: MessagesState) -> str:
        visit = num_answers(state["messages"]) // 2
        return END if visit == 4 else ("research", "write")[visit % 2]

    builder.add_edge(START, "hub")
    builder.add_conditional_edges("hub", route, ["research", "write", END])
    builder.add_edge("research", "hub")
    builder.add_edge("write", "hub")
    return builder.compile(checkpointer=parts.saver)


def random_router(parts: Parts) -> Any:
    """A hub draws one of three agents by lot; the ways are declared."""
    rng = random.Random(f"router {parts.seed}")
    builder = _graph_of(parts, "hub", *_HUB_ODDS)
    builder.add_edge(START, "hub")
    builder.add_conditional_edges("hub", lambda _: _drawn(rng, _HUB_ODDS), list(_HUB_ODDS))
    for agent in _HUB_ODDS:
        builder.add_edge(agent, END)
    return builder.compile(checkpointer=parts.saver)


def random_open_router(parts: Parts) -> Any:
    """A router draws by lot, and nothing is declared about where it may go."""
    rng = random.Random(f"open {parts.seed}")
    builder = _graph_of(parts, "gate", *_OPEN_ODDS)
    builder.add_edge(START, "gate")
    builder.add_conditional_edges("gate", lambda _: _drawn(rng, _OPEN_ODDS))
    for agent in _OPEN_ODDS:
        builder.add_edge(agent, END)
    return builder.compile(checkpointer=parts.saver)


def random_retry(parts: Parts) -> Any:
    """A check that calls no model sends the writer back by lot."""
    rng = random.Random(f"retry {parts.seed}")
    builder = _graph_of(parts, "write", "publish")

    async def check(state: MessagesState) -> dict[str, Any]:
        parts.work(0.2)
        return {"messages": []}

    builder.add_node("check", check)
    builder.add_edge(START, "write")
    builder.add_edge("write", "check")
    builder.add_conditional_edges("check", lambda _: _drawn(rng, _PASS_ODDS), list(_PASS_ODDS))
    builder.add_edge("publish", END)
    return builder.compile(checkpointer=parts.saver)


def open_commands(parts: Parts) -> Any:
    """Three agents that jump by commands, none of which is declared."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)

    def jumping(agent: str, target: str) -> Any:
        speak = speaker(parts, agent)

        async def jump(state: MessagesState):  # type: ignore[no-untyped-def]  # noqa: ANN202  # nothing is declared
            return Command(goto=target, update=await speak(state))

        return jump

    for agent, target in (("triage", "fix"), ("fix", "verify"), ("verify", END)):
        builder.add_node(agent, jumping(agent, target))
    builder.add_edge(START, "triage")
    return builder.compile(checkpointer=parts.saver)


def handoff_pipeline(parts: Parts) -> Any:
    """Agents that hand over by commands with declared targets; the first asks back once."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    intake, expert, closing = (speaker(parts, agent) for agent in ("intake", "expert", "closing"))

    async def intake_node(state: MessagesState) -> Command[Literal["expert"]]:
        return Command(goto="expert", update=await intake(state))

    async def expert_node(state: MessagesState) -> Command[Literal["intake", "closing"]]:
        asks_back = num_answers(state["messages"]) < 2
        return Command(goto="intake" if asks_back else "closing", update=await expert(state))

    builder.add_node("intake", intake_node)
    builder.add_node("expert", expert_node)
    builder.add_node("closing", closing)
    builder.add_edge(START, "intake")
    builder.add_edge("closing", END)
    return builder.compile(checkpointer=parts.saver)


def reflection(parts: Parts) -> Any:
    """One agent writes, another reads it with turned roles, twice."""
    builder = _graph_of(parts, "author")
    system = SystemMessage(system_prompt("reader"))

    async def reader(state: MessagesState) -> dict[str, Any]:
        first, *rest = state["messages"]
        turned = [first, *(HumanMessage(m.text) if m.type == "ai" else m for m in rest)]
        answer = await parts.model.ainvoke([system, *turned])
        return {"messages": [HumanMessage(answer.text)]}

    builder.add_node("reader", reader)
    builder.add_edge(START, "author")
    builder.add_conditional_edges(
        "author", lambda s: END if num_answers(s["messages"]) > 2 else "reader", ["reader", END]
    )
    builder.add_edge("reader", "author")
    return builder.compile(checkpointer=parts.saver)


def debate(parts: Parts) -> Any:
    """Two sides speak in turn, three times each; then a judge."""
    builder = _graph_of(parts, "pro", "contra", "judge")
    builder.add_edge(START, "pro")
    builder.add_edge("pro", "contra")
    builder.add_conditional_edges("contra", lambda s: "judge" if num_answers(s["messages"]) >= 6 else "pro")
    builder.add_edge("judge", END)
    return builder.compile(checkpointer=parts.saver)


class _Project(TypedDict):
    goal: str
    steps: list[str]
    done: Annotated[list[str], lambda old, new: [*old, *new]]
    report: str


def plan_and_execute(parts: Parts) -> Any:
    """A planner writes steps, an executor works them off one by one, a reporter sums up; the state has no messages."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Project)

    async def ask(agent: str, text: str) -> str:
        return (await parts.model.ainvoke([SystemMessage(system_prompt(agent)), HumanMessage(text)])).text

    async def planner(state: _Project) -> dict[str, Any]:
        return {"steps": (await ask("planner", f"Goal: {state['goal']}")).split()[:3]}

    async def executor(state: _Project) -> dict[str, Any]:
        done = state["done"]
        text = f"Goal: {state['goal']}\nDone so far:\n" + "\n".join(done) + f"\nNow: {state['steps'][len(done)]}"
        return {"done": [await ask("executor", text)]}

    async def reporter(state: _Project) -> dict[str, Any]:
        return {"report": await ask("reporter", f"Goal: {state['goal']}\nResults:\n" + "\n".join(state["done"]))}

    for name, node in (("planner", planner), ("executor", executor), ("reporter", reporter)):
        builder.add_node(name, node)
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "executor")
    builder.add_conditional_edges(
        "executor", lambda s: "executor" if len(s["done"]) < len(s["steps"]) else "reporter", ["executor", "reporter"]
    )
    builder.add_edge("reporter", END)
    return builder.compile(checkpointer=parts.saver)


def _goal(number: int) -> dict[str, Any]:
    return {"goal": f"goal {number}: " + system_prompt(f"goal{number % 9}"), "steps": [], "done": [], "report": ""}


def _shape(build: Any, family: str, **more: Any) -> Shape:
    given: dict[str, Any] = {"inputs": one_message, "script": no_script, **more}
    return Shape(build.__name__.replace("_", "-"), family, build, **given)


ROUTE_SHAPES: Final[tuple[Shape, ...]] = (
    _shape(chain, "edges"),
    _shape(fixed_loop, "loop"),
    _shape(structured_router, "router", inputs=_ticket, script=_sort, routes_by_model=True),
    _shape(alternating_router, "router"),
    _shape(random_router, "random", odds={"hub": _HUB_ODDS}),
    _shape(random_open_router, "random", odds={"gate": _OPEN_ODDS}),
    _shape(random_retry, "random", odds={"check": _PASS_ODDS}),
    _shape(open_commands, "command"),
    _shape(handoff_pipeline, "command"),
    _shape(reflection, "loop"),
    _shape(debate, "loop"),
    _shape(plan_and_execute, "loop", inputs=_goal),
)
