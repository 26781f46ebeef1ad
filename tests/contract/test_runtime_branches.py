"""Branches that run beside each other: what one of them chooses says nothing about the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.runtime.expectations import Expectation
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer

LEFT, RIGHT = ("left-1", "left-2"), ("right-1", "right-2")


class State(TypedDict):
    """What both branches read."""

    messages: Annotated[list[AnyMessage], add_messages]


@contextmanager
def opened() -> Iterator[tuple[Runtime, PancakeChatModel]]:
    engine = FakeEngine(FakeEngineSettings(pool_blocks=200, max_model_len_tokens=1200, script=lambda _: "done"))
    with (
        FakeEngineServer(engine) as server,
        Runtime(RuntimeSettings(engine="fake"), engine=BridgedEngine(server)) as runtime,
    ):
        yield runtime, PancakeChatModel(model="fake", base_url=server.base_url, max_tokens=8)
        assert runtime.wait_idle()
        assert runtime.statistics().failed_signals == 0


def agents(builder: Any, model: PancakeChatModel, *names: str) -> None:
    for name in names:

        def work(state: State, name: str = name) -> dict[str, Any]:
            system = SystemMessage(f"You are {name}. " + "Keep to the point. " * 12)
            return {"messages": [model.invoke([system, *state["messages"][:1]])]}

        builder.add_node(name, work)


def given_up(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that gets the node and reason of each expected call that is given up before its run ends."""
    runtime.start()
    actor, found = runtime._actor, []
    assert actor is not None
    drop = actor.drop

    def spy(expectation: Expectation, reason: str) -> None:
        if reason != "run ended":
            found.append((expectation.place.node, reason))
        drop(expectation, reason)

    monkeypatch.setattr(actor, "drop", spy)
    return found


def run(graph: Any, times: int, runtime: Runtime) -> None:
    for number in range(times):
        graph.invoke({"messages": [("user", f"job {number}")]}, {"configurable": {"thread_id": f"t{number}"}})
        assert runtime.wait_idle()


def test_the_start_of_one_branch_leaves_alone_what_the_other_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (runtime, model):
        gone = given_up(runtime, monkeypatch)
        builder = StateGraph(State)
        agents(builder, model, "P", "B", "C", "X", "Y")
        for source, target in ((START, "P"), ("P", "B"), ("P", "C"), ("B", "X"), ("C", "Y"), ("X", END), ("Y", END)):
            builder.add_edge(source, target)
        run(attach(builder.compile(), runtime=runtime), 5, runtime)
        assert not gone


def test_a_router_that_sends_to_several_nodes_at_once_keeps_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (runtime, model):
        gone = given_up(runtime, monkeypatch)
        builder = StateGraph(State)
        agents(builder, model, "P", "B", "C")
        builder.add_edge(START, "P").add_conditional_edges("P", lambda _: ["B", "C"], ["B", "C"])
        builder.add_edge("B", END).add_edge("C", END)
        graph = attach(builder.compile(), runtime=runtime)
        run(graph, 8, runtime)
        gone.clear()
        run(graph, 4, runtime)
        assert not gone


def build(model: PancakeChatModel, seen: list[tuple[str, tuple[str, ...]]], runtime: Runtime) -> Any:
    """Return a graph that goes two ways at once; at the end of each a choice that is always the same."""

    def agent(name: str) -> Any:
        def work(state: State) -> dict[str, Any]:
            seen.append((name, tuple(expected.node for expected in runtime.expectations())))
            return {"messages": [model.invoke([SystemMessage(f"You are {name}."), *state["messages"][:1]])]}

        return work

    builder = StateGraph(State)
    for side, agents in (("left", LEFT), ("right", RIGHT)):
        builder.add_node(side, lambda _: {}).add_edge(START, side)
        for name in agents:
            builder.add_node(name, agent(name)).add_edge(name, END)
        builder.add_conditional_edges(side, lambda _, chosen=agents[0]: chosen, list(agents))
    return builder.compile()


def test_a_choice_in_one_branch_leaves_alone_what_the_other_may_choose() -> None:
    seen: list[tuple[str, tuple[str, ...]]] = []
    with opened() as (runtime, model):
        graph = attach(build(model, seen, runtime), runtime=runtime)
        run(graph, 8, runtime)
        del seen[:]
        graph.invoke({"messages": [("user", "one more job")]}, {"configurable": {"thread_id": "last"}})
    assert {name for name, _ in seen} == {LEFT[0], RIGHT[0]}
    for name, expected in seen:
        assert name in expected, (name, expected)
