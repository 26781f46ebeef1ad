"""Shapes whose question is how many and when: joins, fan-outs, deferred nodes, sub-graphs."""

from __future__ import annotations

import random
from typing import Annotated, Any, Final, TypedDict

from langchain_core.messages import AnyMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send

from pancake_langgraph.bench.forecast_shapes import Parts, Shape, no_script, one_message, speaker


class _Wide(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    width: int


def _wide(number: int) -> dict[str, Any]:
    return {**one_message(number), "width": random.Random(f"width {number}").randint(1, 4)}


def diamond(parts: Parts) -> Any:
    """One node, two in parallel, a join."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    for agent in ("open", "left", "right", "close"):
        builder.add_node(agent, speaker(parts, agent))
    builder.add_edge(START, "open")
    builder.add_edge("open", "left")
    builder.add_edge("open", "right")
    builder.add_edge(["left", "right"], "close")
    builder.add_edge("close", END)
    return builder.compile(checkpointer=parts.saver)


def uneven_join(parts: Parts) -> Any:
    """A join of a branch of two nodes and a branch of one."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    for agent in ("open", "long", "longer", "short", "close"):
        builder.add_node(agent, speaker(parts, agent))
    builder.add_edge(START, "open")
    builder.add_edge("open", "long")
    builder.add_edge("open", "short")
    builder.add_edge("long", "longer")
    builder.add_edge(["longer", "short"], "close")
    builder.add_edge("close", END)
    return builder.compile(checkpointer=parts.saver)


def fan_out(parts: Parts) -> Any:
    """Between one and four workers with one shared context, then one that gathers."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Wide)
    for agent in ("split", "worker", "gather"):
        builder.add_node(agent, speaker(parts, agent))
    builder.add_edge(START, "split")
    builder.add_conditional_edges(
        "split", lambda s: [Send("worker", _part(s, number)) for number in range(s["width"])], ["worker"]
    )
    builder.add_edge("worker", "gather")
    builder.add_edge("gather", END)
    return builder.compile(checkpointer=parts.saver)


def _part(state: _Wide, number: int) -> dict[str, Any]:
    return {"messages": [*state["messages"], ("user", f"Take part {number}.")]}


def deferred_reduce(parts: Parts) -> Any:
    """Mappers, some of which take a second step, and a reducer that waits for all of them."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Wide)
    for agent in ("split", "mapper", "tidy"):
        builder.add_node(agent, speaker(parts, agent))
    builder.add_node("reduce", speaker(parts, "reduce"), defer=True)
    builder.add_edge(START, "split")
    builder.add_conditional_edges(
        "split",
        lambda s: [
            *(Send("mapper", _part(s, number)) for number in range(s["width"])),
            Send("tidy", _part(s, 9)),
        ],
        ["mapper", "tidy"],
    )
    builder.add_edge("mapper", "reduce")
    builder.add_edge("tidy", "reduce")
    builder.add_edge("reduce", END)
    return builder.compile(checkpointer=parts.saver)


def _team(parts: Parts) -> Any:
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    for agent in ("search", "sum_up"):
        builder.add_node(agent, speaker(parts, agent))
    builder.add_edge(START, "search")
    builder.add_edge("search", "sum_up")
    builder.add_edge("sum_up", END)
    return builder.compile()


def nested(parts: Parts) -> Any:
    """A team as a sub-graph between two agents."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    builder.add_node("intake", speaker(parts, "intake"))
    builder.add_node("team", _team(parts))
    builder.add_node("review", speaker(parts, "review"))
    builder.add_edge(START, "intake")
    builder.add_edge("intake", "team")
    builder.add_edge("team", "review")
    builder.add_edge("review", END)
    return builder.compile(checkpointer=parts.saver)


def same_team_twice(parts: Parts) -> Any:
    """One sub-graph under two nodes."""
    team = _team(parts)
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    builder.add_node("first", team)
    builder.add_node("middle", speaker(parts, "middle"))
    builder.add_node("second", team)
    builder.add_edge(START, "first")
    builder.add_edge("first", "middle")
    builder.add_edge("middle", "second")
    builder.add_edge("second", END)
    return builder.compile(checkpointer=parts.saver)


def sent_teams(parts: Parts) -> Any:
    """A sub-graph started several times at once."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(_Wide)
    builder.add_node("split", speaker(parts, "split"))
    builder.add_node("team", _team(parts))
    builder.add_node("gather", speaker(parts, "gather"))
    builder.add_edge(START, "split")
    builder.add_conditional_edges(
        "split", lambda s: [Send("team", _part(s, number)) for number in range(s["width"])], ["team"]
    )
    builder.add_edge("team", "gather")
    builder.add_edge("gather", END)
    return builder.compile(checkpointer=parts.saver)


def _shape(build: Any, family: str, inputs: Any = one_message) -> Shape:
    return Shape(build.__name__.replace("_", "-"), family, build, inputs, no_script)


JOIN_SHAPES: Final[tuple[Shape, ...]] = (
    _shape(diamond, "join"),
    _shape(uneven_join, "join"),
    _shape(fan_out, "fan-out", _wide),
    _shape(deferred_reduce, "fan-out", _wide),
    _shape(nested, "sub-graph"),
    _shape(same_team_twice, "sub-graph"),
    _shape(sent_teams, "sub-graph", _wide),
)
