"""What a model writes tells the next agent while its answer still streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph

from pancake_langgraph._types import Candidate, Prompt, ThreadId
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.forecast import Clue
from pancake_langgraph.forecast.transitions import TransitionForecaster
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.runtime.signals import Closed, FieldWritten, FirstPiece, Opened, Requested, ToolNamed
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from pancake_langgraph.topology import read_topology
from tests.contract.runtime_bed import State

#: Which agent each kind of work goes to; no name of one is a name of the other.
AGENTS = {"prose": "writer", "proof": "critic", "facts": "finder"}


class Diary(TransitionForecaster):
    """Writes down what it is asked and what it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, tuple[Clue, ...], tuple[Candidate, ...]]] = []

    def candidates(self, graph_id: str, node: str, **more: Any) -> tuple[Candidate, ...]:
        found = super().candidates(graph_id, node, **more)
        self.asked.append((node, tuple(more.get("clues", ())), found))
        return found

    def chance_after(self, node: str, clue: Clue, target: str) -> float:
        """Return the chance of `target` when `clue` was the last that was written."""
        [found] = [found for at, clues, found in self.asked if at == node and clues[-1:] == (clue,)][:1]
        return max((c.p_next for c in found if c.node == target), default=0.0)


def wanted(prompt: Any) -> str:
    return str(prompt.messages[-1]["content"]).strip()


def calls_task(prompt: Any) -> FakeAnswer:
    return FakeAnswer(tool_calls=(FakeToolCall("task", {"description": "anything", "kind": wanted(prompt)}),))


def answers_object(prompt: Any) -> str:
    return '{"reason": "it fits", "next": "' + wanted(prompt) + '"}'


@contextmanager
def opened(script: Any) -> Iterator[tuple[Runtime, Diary, PancakeChatModel]]:
    diary = Diary()
    engine = FakeEngine(FakeEngineSettings(pool_blocks=200, max_model_len_tokens=1200, script=script))
    with FakeEngineServer(engine) as server:
        settings = RuntimeSettings(engine="fake")
        with Runtime(settings, engine=BridgedEngine(server), forecaster=diary) as runtime:
            yield runtime, diary, PancakeChatModel(model="fake", base_url=server.base_url, max_tokens=40)
            assert runtime.wait_idle()
            assert runtime.statistics().failed_signals == 0
        runtime.check_integrity()


def with_agents(builder: StateGraph) -> Any:
    for name in AGENTS.values():
        builder.add_node(name, lambda _: {})
        builder.add_edge(name, END)
    return builder.compile()


@tool
def task(description: str, kind: str) -> str:
    """Give work to somebody."""
    return description


@pytest.mark.parametrize("is_told_by_stream", [True, False], ids=["streamed", "whole answer only"])
def test_an_argument_of_a_tool_call_tells_the_agent_behind_the_tools_node(is_told_by_stream: bool) -> None:
    """As in deep agents: `model` calls `task(kind=…)`, `tools` runs, and only the argument says who comes then."""
    with opened(calls_task) as (runtime, diary, model):
        bound = model.bind_tools([task])

        def ask(state: State) -> dict[str, Any]:
            return {"messages": [bound.invoke([SystemMessage("You share out."), *state["messages"]])]}

        def tools(state: State) -> dict[str, Any]:
            return {"messages": [ToolMessage("given", tool_call_id=state["messages"][-1].tool_calls[0]["id"])]}

        def route(state: State) -> str:
            (call,) = next(m for m in reversed(state["messages"]) if isinstance(m, AIMessage)).tool_calls
            return AGENTS[call["args"]["kind"]]

        builder = StateGraph(State).add_node("model", ask).add_node("tools", tools)
        builder.add_edge(START, "model").add_edge("model", "tools")
        builder.add_conditional_edges("tools", route, list(AGENTS.values()))
        graph = attach(with_agents(builder), runtime=runtime)
        if not is_told_by_stream:
            handler = graph.config["callbacks"][0]
            handler.on_wire_field = lambda *_: None
            handler.on_wire_tool_name = lambda *_: None
        for kind in [*AGENTS] * 6:
            graph.invoke({"messages": [("user", kind)]})
        assert runtime.wait_idle()
        diary.asked.clear()
        for kind, agent in AGENTS.items():
            graph.invoke({"messages": [("user", kind)]})
            assert runtime.wait_idle()
            # While `model` still writes, and again when `tools` begins.
            assert diary.chance_after("model", Clue("task", "kind", kind), agent) >= 0.8
            assert diary.chance_after("tools", Clue("task", "kind", kind), agent) >= 0.8
            diary.asked.clear()


def test_the_structured_answer_of_a_router_tells_the_next_agent() -> None:
    with opened(answers_object) as (runtime, diary, model):

        def ask(state: State) -> dict[str, Any]:
            return {"messages": [model.invoke([SystemMessage("You route."), *state["messages"]])]}

        def route(state: State) -> str:
            return next(agent for kind, agent in AGENTS.items() if f'"{kind}"' in str(state["messages"][-1].content))

        builder = StateGraph(State).add_node("ask", ask).add_edge(START, "ask")
        builder.add_conditional_edges("ask", route, list(AGENTS.values()))
        graph = attach(with_agents(builder), runtime=runtime)
        for kind in [*AGENTS] * 6:
            graph.invoke({"messages": [("user", kind)]})
        assert runtime.wait_idle()
        for kind, agent in AGENTS.items():
            diary.asked.clear()
            graph.invoke({"messages": [("user", kind)]})
            assert runtime.wait_idle()
            assert diary.chance_after("ask", Clue("", "next", kind), agent) >= 0.8


def test_a_destination_that_is_the_name_of_a_node_is_known_in_the_first_run() -> None:
    with opened(answers_object) as (runtime, diary, model):

        def ask(state: State) -> dict[str, Any]:
            return {"messages": [model.invoke([SystemMessage("You route."), *state["messages"]])]}

        builder = StateGraph(State).add_node("ask", ask).add_edge(START, "ask")
        builder.add_conditional_edges("ask", lambda s: s["messages"][0].content, list(AGENTS.values()))
        graph = attach(with_agents(builder), runtime=runtime)
        graph.invoke({"messages": [("user", "critic")]})
        assert runtime.wait_idle()
        assert diary.chance_after("ask", Clue("", "next", "critic"), "critic") >= 0.9


def test_all_that_a_call_writes_in_one_burst_is_looked_at_once() -> None:
    with opened(answers_object) as (runtime, diary, _):
        builder = StateGraph(State).add_node("ask", lambda _: {}).add_edge(START, "ask")
        builder.add_conditional_edges("ask", lambda _: "writer", list(AGENTS.values()))
        graph_id = runtime.learn_topology(read_topology(with_agents(builder)))
        run_id, node_id, call_id = uuid4(), uuid4(), uuid4()
        started = {"thread_id": ThreadId("t"), "graph_id": graph_id}
        runtime.post(Opened(1.0, run_id, None, SpanKind.RUN, "graph", **started))
        runtime.post(Opened(1.0, node_id, run_id, SpanKind.NODE, "ask", checkpoint_ns="ask:1", step=1, **started))
        runtime.post(Opened(1.0, call_id, node_id, SpanKind.CALL, "ask", checkpoint_ns="ask:1", step=1, **started))
        runtime.post(Requested(1.0, call_id, Prompt(()), None, None))
        assert runtime.wait_idle()
        diary.asked.clear()
        is_over = threading.Event()
        runtime._background.call(is_over.wait)  # what is posted now is taken in together
        runtime.post(ToolNamed(2.0, call_id, "give_to"))
        runtime.post(FirstPiece(2.0, call_id, None))
        runtime.post(FieldWritten(2.0, call_id, "give_to", "name", "critic"))
        is_over.set()
        assert runtime.wait_idle()
        told = (Clue("give_to"), Clue("give_to", "name", "critic"))
        assert [(node, clues) for node, clues, _ in diary.asked] == [("ask", told)]
        runtime.post(ToolNamed(2.0, call_id, "more"))
        runtime.post(Closed(3.0, node_id, SpanStatus.OK))  # before anything else is taken in
        assert runtime.wait_idle()
        assert [clues for _, clues, _ in diary.asked[1:]] == [(*told, Clue("more"))]


def test_what_led_to_an_agent_tells_nothing_about_what_its_own_answer_leads_to() -> None:
    """A supervisor names an agent, the agent answers, the supervisor's turn comes: the old name is no evidence."""
    order = ["writer", "critic"]

    def hands_over(prompt: Any) -> Any:
        if "You lead." not in str(prompt.messages[0]["content"]):
            return "done"
        turn = sum(1 for message in prompt.messages if message["role"] == "tool")
        if turn == len(order):
            return "all done"
        return FakeAnswer(tool_calls=(FakeToolCall("give_to", {"name": order[turn]}),))

    with opened(hands_over) as (runtime, diary, model):
        leading = model.bind_tools([give_to])

        def lead(state: State) -> dict[str, Any]:
            answer = leading.invoke([SystemMessage("You lead."), *state["messages"]])
            return {"messages": [answer, *[ToolMessage("given", tool_call_id=c["id"]) for c in answer.tool_calls]]}

        def work(state: State) -> dict[str, Any]:
            return {"messages": [model.invoke([SystemMessage("You work."), *state["messages"]])]}

        def route(state: State) -> str:
            last = next(m for m in reversed(state["messages"]) if isinstance(m, AIMessage))
            return last.tool_calls[0]["args"]["name"] if last.tool_calls else END

        builder = StateGraph(State).add_node("lead", lead).add_edge(START, "lead")
        for name in order:
            builder.add_node(name, work).add_edge(name, "lead")
        builder.add_conditional_edges("lead", route, [*order, END])
        graph = attach(builder.compile(), runtime=runtime)
        for number in range(6):
            graph.invoke({"messages": [("user", f"job {number}")]})
        assert runtime.wait_idle()
        diary.asked.clear()
        graph.invoke({"messages": [("user", "one more job")]})
        assert runtime.wait_idle()
        turns = [found for node, clues, found in diary.asked if node == "lead" and not clues]
        likely = [[c.node for c in found if c.steps == 1 and c.p_next > 0.5] for found in turns]
        assert likely == [["writer"], ["critic"], []]


@tool
def give_to(name: str) -> str:
    """Give the work to somebody."""
    return name
