"""What is behind nodes: calls, graphs and tasks that code refers to, stops; distances and loops; bounds."""

import functools
import itertools
from typing import Literal

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool, tool
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from pancake_langgraph.topology import NodeInfo, extract, read_topology, to_mermaid
from pancake_langgraph.topology.lint import lint
from tests.contract.topology_script import Scripted, add


def quiet(state):
    return {"messages": []}


def plain(*names):
    graph = StateGraph(MessagesState)
    for name in names:
        graph.add_node(name, quiet)
    return graph


class Shelf(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document("page")]


def one_node(function):
    return StateGraph(MessagesState).add_node("node", function).add_edge(START, "node")


def node_of(function):
    return read_topology(one_node(function).compile()).node("node")


# -- calls ------------------------------------------------------------------------------------------------------------


def test_everything_that_a_node_calls_is_named():
    model, shelf = Scripted(), Shelf()

    def answer(state):
        pages = shelf.invoke("x")
        number = add.invoke({"a": 1, "b": 2})
        return {"messages": [model.invoke(f"{pages}{number}")]}

    info = node_of(answer)
    assert (info.kind, info.calls) == ("model", ("model", "retriever", "tools"))


def test_a_router_that_asks_a_model_counts_for_the_node_it_belongs_to():
    model = Scripted()

    def route(state) -> str:
        return str(model.invoke("where to?").content)

    graph = plain("a", "b").add_edge(START, "a").add_conditional_edges("a", route, ["b", END]).compile()
    info = read_topology(graph).node("a")
    assert (info.kind, info.calls) == ("plain", ("model",))


def test_models_behind_methods_partials_and_async_functions_are_found():
    class Team:
        def __init__(self):
            self.model = Scripted()
            self.other = Shelf()

        def _ask(self):
            return self.model.invoke("x")

        def node(self, state):
            return {"messages": [self._ask()]}

    async def later(state, model):
        return {"messages": [await model.ainvoke("x")]}

    assert node_of(Team().node).calls == ("model",)
    assert node_of(functools.partial(later, model=Scripted())).calls == ("model",)


def test_an_agents_model_node_calls_the_model_and_its_tools_node_what_the_tools_call():
    finder = create_retriever_tool(Shelf(), "find", "Finds.")
    topology = read_topology(create_agent(Scripted(), [add, finder]))
    assert topology.node("model").calls == ("model",)
    assert topology.node("tools").calls == ("retriever", "tools")


def test_an_agent_whose_tools_jump_only_leaves_by_its_tools_node():
    @tool
    def leave() -> Command:
        """Leave."""
        return Command(goto="other", graph=Command.PARENT)

    assert read_topology(create_agent(Scripted(), [leave])).unknown_sources == {"tools"}


# -- graphs that code runs ---------------------------------------------------------------------------------------------


def read_then(name):
    return plain("read", name).add_edge(START, "read").add_edge("read", name).compile()


def test_a_function_that_only_runs_a_graph_is_that_graph():
    inner = read_then("write")

    def run(state):
        return {"messages": inner.invoke(state)["messages"]}

    async def run_async(state):
        return {"messages": (await inner.ainvoke(state))["messages"]}

    for function in (run, run_async):
        topology = read_topology(one_node(function).compile())
        assert topology.node("node").kind == "subgraph"
        (hop,) = topology.hops(START)
        assert (hop.target, hop.is_certain) == ("node|read", True)


def test_a_function_that_may_run_a_graph_is_a_node_of_its_own():
    inner = read_then("write")

    def maybe(state):
        return inner.invoke(state) if state["messages"] else {"messages": []}

    topology = read_topology(one_node(maybe).compile())
    assert topology.node("node").kind == "plain"
    assert {(hop.target, hop.is_call) for hop in topology.hops("node")} == {(END, False), ("node|read", True)}
    assert {hop.target for hop in topology.hops("node|write")} == {END}
    assert topology.unknown_sources == frozenset()


def test_where_graphs_with_equal_names_differ_the_step_is_a_decision():
    one, other = read_then("write"), read_then("speak")

    def choose(state):
        return (one if state["messages"] else other).invoke(state)

    topology = read_topology(one_node(choose).compile())
    assert {(hop.target, hop.is_certain) for hop in topology.hops("node|read")} == {
        ("node|write", False),
        ("node|speak", False),
    }
    same = read_then("write")

    def either(state):
        return (one if state["messages"] else same).invoke(state)

    (hop,) = read_topology(one_node(either).compile()).hops("node|read")
    assert (hop.target, hop.is_certain) == ("node|write", True)


def test_agents_that_call_each_other_are_read_once_on_each_way():
    agents = {}

    def asking(name):
        @tool(f"ask_{name}")
        def ask(question: str) -> str:
            """Ask."""
            return str(agents[name].invoke({"messages": [HumanMessage(question)]}))

        return ask

    agents["a"] = create_agent(Scripted(), [asking("b")])
    agents["b"] = create_agent(Scripted(), [asking("a")])
    topology = read_topology(agents["a"])
    assert {node.id for node in topology.nodes} == {"model", "tools", "tools|model", "tools|tools"}
    assert topology.unknown_sources >= {"tools|tools"}


def crowd(size):
    """Agents of which each can ask every other one: far too many ways to read."""
    agents = {}

    def asking(name):
        @tool(f"ask_{name}")
        def ask(question: str) -> str:
            """Ask."""
            return str(agents[name].invoke({"messages": [HumanMessage(question)]}))

        return ask

    names = [f"agent{number}" for number in range(size)]
    for name in names:
        agents[name] = create_agent(Scripted(), [asking(other) for other in names if other != name])
    return agents["agent0"]


def test_graphs_that_call_graphs_are_read_three_deep_and_what_is_deeper_is_unknown():
    topology = read_topology(crowd(5))
    assert max(node.id.count("|") for node in topology.nodes) == 3
    assert "tools|tools|tools|tools" in topology.unknown_sources


def test_reading_stops_at_the_bound_and_says_that_more_may_run(monkeypatch):
    graph = crowd(7)
    read = []
    monkeypatch.setattr(extract, "NodeInfo", lambda *args, **fields: read.append(args) or NodeInfo(*args, **fields))
    monkeypatch.setattr(extract, "_MAX_NODES", 40)
    topology = read_topology(graph)
    assert len(read) <= 40 + 2
    cut = [n.id for n in topology.nodes if n.kind == "tools" and topology.node(f"{n.id}|model") is None]
    assert cut
    assert set(cut) <= topology.unknown_sources


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_tasks_are_found_in_the_order_in_which_the_code_names_them():
    model = Scripted()

    @task
    def zero(text: str) -> str:
        return str(model.invoke(text).content)

    @task
    def alpha(text: str) -> str:
        return text

    @entrypoint()
    def flow(text: str) -> str:
        first = zero(text).result()
        return alpha(first).result()

    topology = read_topology(flow)
    assert [node.id for node in topology.nodes] == ["flow", "flow|alpha", "flow|zero"]
    assert topology.node("flow|zero").kind == "model"
    chain = [[hop.target for hop in topology.hops(source)] for source in ("flow", "flow|zero", "flow|alpha")]
    assert chain == [["flow|zero"], ["flow|alpha"], [END]]
    assert {edge.kind for edge in topology.edges if edge.source != START} == {"unknown"}
    assert topology.unknown_sources == {"flow", "flow|alpha", "flow|zero"}
    assert topology.steps_to_end("flow") is None
    assert 'zero"]' in to_mermaid(topology) or "zero<br/>" in to_mermaid(topology)


def test_a_task_that_calls_itself_or_another_is_read_once():
    @task
    def inner(number: int) -> int:
        return inner(number - 1).result() if number else 0

    @task
    def outer(number: int) -> int:
        return inner(number).result()

    @entrypoint()
    def flow(number: int) -> int:
        return outer(number).result()

    assert {node.id for node in read_topology(flow).nodes} >= {"flow", "flow|outer", "flow|outer|inner"}
    assert len(read_topology(flow).nodes) < 20


# -- stops -------------------------------------------------------------------------------------------------------------


def test_static_and_dynamic_stops_are_properties_of_nodes():
    def ask(state):
        return {"messages": [HumanMessage(interrupt("sure?"))]}

    graph = plain("a", "b").add_node("ask", ask).add_edge(START, "a").add_edge("a", "b").add_edge("b", "ask")
    topology = read_topology(graph.compile(interrupt_before=["b"], interrupt_after=["b", "a"]))
    assert {node.id: node.stops for node in topology.nodes} == {
        "a": ("after",),
        "b": ("before", "after"),
        "ask": ("inside",),
    }
    everywhere = read_topology(graph.compile(interrupt_before="*"))
    assert all("before" in node.stops for node in everywhere.nodes)


def test_a_sub_graph_keeps_its_own_stops():
    inner = plain("a").add_edge(START, "a").compile(interrupt_after=["a"])
    topology = read_topology(StateGraph(MessagesState).add_node("sub", inner).add_edge(START, "sub").compile())
    assert topology.node("sub|a").stops == ("after",)
    assert topology.node("sub").stops == ()


# -- distances and loops -----------------------------------------------------------------------------------------------


def test_the_end_is_as_far_as_the_farthest_branch():
    graph = plain("fork", "short", "long", "longer").add_edge(START, "fork").add_edge("fork", "short")
    topology = read_topology(graph.add_edge("fork", "long").add_edge("long", "longer").compile())
    assert topology.steps_to_end("fork") == 3
    assert topology.steps_to_end("short") == 1


def test_a_decision_takes_the_shortest_way_and_a_join_waits():
    graph = plain("a", "b", "c", "d", "e").add_edge(START, "a").add_conditional_edges("a", quiet, ["b", "e"])
    topology = read_topology(graph.add_edge("b", "c").add_edge("c", "d").compile())
    assert topology.steps_to_end("a") == 2
    joined = plain("fast", "slow", "slower", "merge").add_edge(START, "fast").add_edge(START, "slow")
    topology = read_topology(joined.add_edge("slow", "slower").add_edge(["fast", "slower"], "merge").compile())
    assert topology.steps_to_end("fast") == topology.steps_to_end("slow") == 3
    assert topology.steps_to("merge")["fast"] == 2


def test_no_distance_is_told_where_only_a_guess_or_nothing_leads_to_the_end():
    def jump(state):
        return Command(goto="done")

    graph = plain("done").add_node("jump", jump).add_edge(START, "jump").compile()
    topology = read_topology(graph)
    assert topology.steps_to_end("jump") is None
    assert topology.steps_to_end("done") == 1
    ring = plain("a", "b", "c").add_edge(START, "a").add_edge("a", "b").add_edge("b", "a").add_edge("b", "c").compile()
    assert read_topology(ring).steps_to_end("a") is None  # c ends, but a and b run on


def test_loops_are_the_sets_of_nodes_that_come_round():
    graph = plain("a", "b", "c", "d", "e").add_edge(START, "a").add_edge("a", "b").add_edge("b", "a")
    graph.add_edge("b", "c").add_conditional_edges("c", quiet, ["c", "d"]).add_edge("d", "e")
    assert read_topology(graph.compile()).loops == ({"a", "b"}, {"c"})
    assert read_topology(create_agent(Scripted(), [add])).loops == ({"model", "tools"},)
    assert read_topology(read_then("write")).loops == ()


def test_agents_that_hand_over_to_each_other_are_a_loop():
    from langgraph_swarm import create_handoff_tool, create_swarm

    one = create_agent(Scripted(), [create_handoff_tool(agent_name="two")], name="one")
    two = create_agent(Scripted(), [create_handoff_tool(agent_name="one")], name="two")
    topology = read_topology(create_swarm([one, two], default_active_agent="one").compile())
    assert topology.loops == ({"one|model", "one|tools", "two|model", "two|tools"},)


# -- joins and jumps across levels -------------------------------------------------------------------------------------


def test_a_deferred_node_waits_for_its_own_level_only():
    inner = plain("a").add_node("last", quiet, defer=True).add_edge(START, "a").add_edge("a", "last").compile()
    graph = plain("before", "other", "other2", "other3").add_node("sub", inner).add_edge(START, "before")
    graph.add_edge("before", "sub").add_edge("before", "other").add_edge("other", "other2").add_edge("other2", "other3")
    topology = read_topology(graph.compile())
    (hop,) = topology.hops("sub|a")
    assert topology.steps_between(hop) == 1


def test_a_node_that_may_leave_its_graph_has_no_certain_exit():
    def leave(state):
        return Command(goto="b", graph=Command.PARENT) if state["messages"] else {"messages": []}

    inner = plain("file").add_node("leave", leave).add_edge(START, "leave").add_edge("leave", "file").compile()
    graph = plain("b", "c").add_node("sub", inner).add_edge(START, "sub").add_edge("sub", "c").compile()
    topology = read_topology(graph)
    assert {hop.target: hop.is_certain for hop in topology.hops("sub|leave")} == {
        "sub|file": False,
        "b": False,
        "c": False,
    }


def test_declared_targets_do_not_cover_a_way_out_of_the_graph():
    def act(state) -> Command[Literal["file"]]:
        return Command(goto="b", graph=Command.PARENT) if state["messages"] else Command(goto="file")

    inner = plain("file").add_node("act", act).add_edge(START, "act").compile()
    topology = read_topology(plain("b").add_node("sub", inner).add_edge(START, "sub").compile())
    assert topology.unknown_sources == {"sub|act"}
    assert {hop.target for hop in topology.hops("sub|act")} >= {"sub|file", "b"}


def test_five_hundred_nodes_are_read_in_one_pass(monkeypatch):
    names = [f"n{number:03}" for number in range(500)]
    graph = plain(*names).add_edge(START, names[0])
    for source, target in itertools.pairwise(names):
        graph.add_conditional_edges(source, quiet, [target, names[0], END])
    topology = read_topology(graph.compile())
    assert len(topology.nodes) == 500
    assert topology.steps_to_end(names[-1]) == 1
    (loop,) = topology.loops
    assert len(loop) == 499
    assert lint(topology) == ()


def test_a_runnable_that_raises_on_every_attribute_leaves_the_rest_readable():
    class Raising:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    thing = Raising()

    def node(state):
        return thing or quiet(state)

    topology = read_topology(
        plain("next").add_node("node", node).add_edge(START, "node").add_edge("node", "next").compile()
    )
    assert [hop.target for hop in topology.hops("node")] == ["next"]
    assert topology.unknown_sources == frozenset()


@pytest.mark.parametrize("goto", ["worker", [Send("worker", {"messages": []})], ["worker", "other"]])
def test_commands_without_declared_targets_are_unknown_however_they_go(goto):
    def planner(state):
        return Command(goto=goto)

    graph = plain("worker", "other").add_node("planner", planner).add_edge(START, "planner").compile()
    assert read_topology(graph).unknown_sources == {"planner"}
