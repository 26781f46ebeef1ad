"""Branches that run beside each other: what one of them chooses says nothing about the other."""

from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer

LEFT, RIGHT = ("left-1", "left-2"), ("right-1", "right-2")


class State(TypedDict):
    """What both branches read."""

    messages: Annotated[list[AnyMessage], add_messages]


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
    engine = FakeEngine(FakeEngineSettings(pool_blocks=200, max_model_len_tokens=1200, script=lambda _: "done"))
    seen: list[tuple[str, tuple[str, ...]]] = []
    with (
        FakeEngineServer(engine) as server,
        Runtime(RuntimeSettings(engine="fake"), engine=BridgedEngine(server)) as runtime,
    ):
        model = PancakeChatModel(model="fake", base_url=server.base_url, max_tokens=8)
        graph = attach(build(model, seen, runtime), runtime=runtime)
        for number in range(8):
            graph.invoke({"messages": [("user", f"job {number}")]}, {"configurable": {"thread_id": f"t{number}"}})
        del seen[:]
        graph.invoke({"messages": [("user", "one more job")]}, {"configurable": {"thread_id": "last"}})
        assert runtime.wait_idle()
        assert runtime.statistics().failed_signals == 0
    assert {name for name, _ in seen} == {LEFT[0], RIGHT[0]}
    for name, expected in seen:
        assert name in expected, (name, expected)
