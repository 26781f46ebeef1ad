"""Graphs of every kind, built around one chat model, with inputs and scripted answers: `SHAPES`.

`SHAPES[name].build(model)` compiles a fresh graph with an `InMemorySaver`; `Scripted(answers)` is a model that gives
the answers in the order of its calls.  Hand-written graphs are in here, those of libraries in `topology_agents`.
"""

import itertools
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt

from tests.contract.topology_agents import AGENT_SHAPES
from tests.contract.topology_script import Scripted, Shape, add, call_of, look_up

__all__ = ["SHAPES", "Scripted", "Shape"]


def role(model: BaseChatModel, name: str) -> Callable[[MessagesState], dict[str, list[Any]]]:
    """Make a node that asks the model, with its own system prompt before the shared messages."""

    def speak(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [model.invoke([SystemMessage(f"You are the {name}."), *state["messages"]])]}

    return speak


def team(model: BaseChatModel, *names: str) -> StateGraph:
    """Make a builder with one model node per name."""
    graph = StateGraph(MessagesState)
    for name in names:
        graph.add_node(name, role(model, name))
    return graph


def compiled(graph: StateGraph, **options: Any) -> Any:
    return graph.compile(checkpointer=InMemorySaver(), **options)


def last_text(state: MessagesState) -> str:
    return str(state["messages"][-1].content)


def chain(model: BaseChatModel) -> Any:
    graph = team(model, "outline", "draft", "polish").add_edge(START, "outline")
    return compiled(graph.add_edge("outline", "draft").add_edge("draft", "polish").add_edge("polish", END))


def path_map(model: BaseChatModel) -> Any:
    graph = team(model, "router", "sales", "support").add_edge(START, "router")
    graph.add_conditional_edges("router", last_text, {"buy": "sales", "fix": "support"})
    return compiled(graph)


def literal_route(model: BaseChatModel) -> Any:
    def judge(state: MessagesState) -> Literal["writer", "__end__"]:
        return END if last_text(state) == "good" else "writer"

    graph = team(model, "writer", "critic").add_edge(START, "writer").add_edge("writer", "critic")
    return compiled(graph.add_conditional_edges("critic", judge))


def no_path_map(model: BaseChatModel) -> Any:
    graph = team(model, "router", "sales", "support").add_edge(START, "router")
    return compiled(graph.add_conditional_edges("router", lambda state: last_text(state)))


def entry_route(model: BaseChatModel) -> Any:
    def door(state: MessagesState) -> str:
        return "short" if len(last_text(state)) < 20 else "long"

    graph = team(model, "short", "long", "finish").add_conditional_edges(START, door, ["short", "long"])
    return compiled(graph.add_edge("short", "finish").add_edge("long", "finish"))


def two_branches(model: BaseChatModel) -> Any:
    """Two decisions on one node, taken independently of each other."""
    graph = team(model, "a", "b", "c", "log", "drop").add_edge(START, "a")

    def who(state: MessagesState) -> str:
        return last_text(state)[:1]

    def what(state: MessagesState) -> str:
        return last_text(state)[1:]

    graph.add_conditional_edges("a", who, ["b", "c"]).add_conditional_edges("a", what, {"l": "log", "d": "drop"})
    return compiled(graph)


def join(model: BaseChatModel) -> Any:
    graph = team(model, "web", "papers", "rank", "merge").add_edge(START, "web").add_edge(START, "papers")
    return compiled(graph.add_edge("papers", "rank").add_edge(["web", "rank"], "merge").add_edge("merge", END))


def deferred(model: BaseChatModel) -> Any:
    graph = team(model, "web", "papers", "rank").add_node("merge", role(model, "merge"), defer=True)
    graph.add_edge(START, "web").add_edge(START, "papers").add_edge("papers", "rank")
    return compiled(graph.add_edge("web", "merge").add_edge("rank", "merge"))


def workers_of(state: MessagesState) -> list[Send]:
    return [Send("worker", {"messages": [HumanMessage(part)]}) for part in last_text(state).split()]


def send(model: BaseChatModel) -> Any:
    graph = team(model, "planner", "worker", "merge").add_edge(START, "planner")
    graph.add_conditional_edges("planner", workers_of, ["worker"]).add_edge("worker", "merge")
    return compiled(graph)


def send_undeclared(model: BaseChatModel) -> Any:
    graph = team(model, "planner", "worker", "merge").add_edge(START, "planner")
    return compiled(graph.add_conditional_edges("planner", lambda state: workers_of(state)).add_edge("worker", "merge"))


def send_from_command(model: BaseChatModel) -> Any:
    plan = role(model, "planner")

    def planner(state: MessagesState) -> Command[Literal["worker"]]:
        update = plan(state)
        return Command(update=update, goto=workers_of({"messages": update["messages"]}))

    graph = team(model, "worker").add_node("merge", role(model, "merge"), defer=True).add_node("planner", planner)
    return compiled(graph.add_edge(START, "planner").add_edge("worker", "merge"))


def send_to_subgraph(model: BaseChatModel) -> Any:
    inner = team(model, "read", "note").add_edge(START, "read").add_edge("read", "note").compile()
    graph = team(model, "planner", "merge").add_node("worker", inner).add_edge(START, "planner")
    return compiled(graph.add_conditional_edges("planner", workers_of, ["worker"]).add_edge("worker", "merge"))


def command_literal(model: BaseChatModel) -> Any:
    think = role(model, "router")

    def router(state: MessagesState) -> Command[Literal["sales", "support"]]:
        update = think(state)
        return Command(update=update, goto=str(update["messages"][-1].content))

    return compiled(team(model, "sales", "support").add_node("router", router).add_edge(START, "router"))


def command_destinations(model: BaseChatModel) -> Any:
    def router(state: MessagesState):
        return Command(goto=last_text(state))

    graph = team(model, "think", "sales", "support").add_edge(START, "think").add_edge("think", "router")
    return compiled(graph.add_node("router", router, destinations={"sales": "buys", "support": "asks"}))


def command_undeclared(model: BaseChatModel) -> Any:
    def router(state: MessagesState):
        return Command(goto=last_text(state))

    graph = team(model, "think", "sales", "support").add_edge(START, "think").add_edge("think", "router")
    return compiled(graph.add_node("router", router))


def command_many(model: BaseChatModel) -> Any:
    def split(state: MessagesState) -> Command[Literal["left", "right"]]:
        return Command(goto=last_text(state).split())

    graph = team(model, "think", "left", "right").add_edge(START, "think").add_edge("think", "split")
    return compiled(graph.add_node("split", split))


def edge_and_command(model: BaseChatModel) -> Any:
    def a(state: MessagesState) -> Command[Literal["c"]]:
        return Command(goto="c" if last_text(state) == "more" else ())

    graph = team(model, "think", "b", "c").add_node("a", a).add_edge(START, "think").add_edge("think", "a")
    return compiled(graph.add_edge("a", "b"))


def command_parent(model: BaseChatModel) -> Any:
    def leave(state: MessagesState):
        if last_text(state) == "stay":
            return {"messages": []}
        return Command(goto="lawyer", graph=Command.PARENT)

    office = team(model, "clerk", "file").add_node("leave", leave).add_edge(START, "clerk").add_edge("clerk", "leave")
    inner = office.add_edge("leave", "file").compile()
    graph = team(model, "lawyer", "archive").add_node("office", inner).add_edge(START, "office")
    return compiled(graph.add_edge("office", "archive"))


def command_parent_declared(model: BaseChatModel) -> Any:
    def leave(state: MessagesState):
        return Command(goto=last_text(state), graph=Command.PARENT)

    inner = team(model, "clerk").add_node("leave", leave).add_edge(START, "clerk").add_edge("clerk", "leave").compile()
    graph = team(model, "lawyer", "archive").add_node("office", inner, destinations=("lawyer", "archive"))
    return compiled(graph.add_edge(START, "office"))


def nested(model: BaseChatModel) -> Any:
    """Three levels with equal node names."""
    inner = team(model, "read", "write").add_edge(START, "read").add_edge("read", "write").compile()
    middle = team(model, "read").add_node("inner", inner).add_edge(START, "read").add_edge("read", "inner").compile()
    graph = team(model, "read", "write").add_node("middle", middle).add_edge(START, "read")
    return compiled(graph.add_edge("read", "middle").add_edge("middle", "write"))


def same_subgraph_twice(model: BaseChatModel) -> Any:
    inner = team(model, "read", "note").add_edge(START, "read").add_edge("read", "note").compile()
    graph = StateGraph(MessagesState).add_node("first", inner).add_node("second", inner)
    return compiled(graph.add_edge(START, "first").add_edge("first", "second"))


def subgraph_in_function(model: BaseChatModel) -> Any:
    """A node that calls one of two graphs itself, or none."""
    legal = team(model, "lawyer").add_edge(START, "lawyer").compile()
    money = team(model, "banker").add_edge(START, "banker").compile()

    def consult(state: MessagesState) -> dict[str, list[Any]]:
        kind = last_text(state)
        if kind == "none":
            return {"messages": []}
        chosen = legal if kind == "legal" else money
        return {"messages": chosen.invoke({"messages": state["messages"]})["messages"][-1:]}

    graph = team(model, "router", "close").add_node("consult", consult).add_edge(START, "router")
    return compiled(graph.add_edge("router", "consult").add_edge("consult", "close"))


def tools_loop(model: BaseChatModel) -> Any:
    """The hand-written agent: `tools_condition` and a `ToolNode`."""
    bound = model.bind_tools([add, look_up])

    def agent(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([add, look_up]))
    graph.add_edge(START, "agent").add_conditional_edges("agent", tools_condition).add_edge("tools", "agent")
    return compiled(graph)


class Shelf(BaseRetriever):
    """Always finds the same page."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document("A page.")]


def retrieval(model: BaseChatModel) -> Any:
    shelf = Shelf()

    def fetch(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [HumanMessage(shelf.invoke(last_text(state))[0].page_content)]}

    def grade(state: MessagesState) -> Literal["answer", "rewrite"]:
        return "rewrite" if last_text(state) == "bad" else "answer"

    graph = team(model, "grader", "answer", "rewrite").add_node("fetch", fetch).add_edge(START, "fetch")
    graph.add_edge("fetch", "grader").add_conditional_edges("grader", grade).add_edge("rewrite", "fetch")
    return compiled(graph)


def interrupted(model: BaseChatModel) -> Any:
    """Stops before one node, after another, and inside a third."""

    def approve(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [HumanMessage(str(interrupt("go on?")))]}

    graph = team(model, "draft", "review", "send").add_node("approve", approve).add_edge(START, "draft")
    graph.add_edge("draft", "review").add_edge("review", "approve").add_edge("approve", "send")
    return compiled(graph, interrupt_before=["review"], interrupt_after=["review"])


def failing(model: BaseChatModel) -> Any:
    """A node that fails on some answers, with a handler that takes over."""

    def act(state: MessagesState) -> dict[str, list[Any]]:
        if last_text(state) == "boom":
            raise ValueError("the tool broke")
        return {"messages": []}

    def rescue(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [HumanMessage("It broke.")]}

    graph = team(model, "think", "report").add_node("act", act, error_handler=rescue).add_edge(START, "think")
    return compiled(graph.add_edge("think", "act").add_edge("act", "report"))


def endless(model: BaseChatModel) -> Any:
    graph = team(model, "ping", "pong").add_edge(START, "ping").add_edge("ping", "pong").add_edge("pong", "ping")
    return compiled(graph)


def long_chain(model: BaseChatModel) -> Any:
    """Five hundred nodes, of which a run takes a dozen."""
    names = [f"n{number:03}" for number in range(499)]
    graph = team(model, "router", *names)
    graph.add_edge(START, "router").add_conditional_edges("router", last_text, [*names, END])
    for source, target in itertools.pairwise(names):
        graph.add_edge(source, target)
    return compiled(graph)


class Clerk:
    """Nodes that are methods; the model is a field that another method uses."""

    def __init__(self, model: BaseChatModel) -> None:
        self._model = model

    def _ask(self, state: MessagesState) -> Any:
        return self._model.invoke(state["messages"])

    def answer(self, state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [self._ask(state)]}

    def route(self, state: MessagesState) -> str:
        return "answer" if str(self._ask(state).content) == "again" else END


def methods(model: BaseChatModel) -> Any:
    """Methods as node and as a router that asks the model itself."""
    clerk = Clerk(model)
    graph = StateGraph(MessagesState).add_node("answer", clerk.answer).add_edge(START, "answer")
    return compiled(graph.add_conditional_edges("answer", clerk.route, ["answer", END]))


class Raising:
    """Whatever is asked of it, it raises; only a call works."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no look inside")

    def __call__(self, state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": []}


def raising_object(model: BaseChatModel) -> Any:
    thing = Raising()

    def act(state: MessagesState) -> dict[str, list[Any]]:
        return thing(state)

    graph = team(model, "think").add_node("act", act).add_edge(START, "think").add_edge("think", "act")
    return compiled(graph)


def interrupted_inside(model: BaseChatModel) -> Any:
    """A stop within a sub-graph, before one of its nodes."""
    inner = team(model, "read", "write").add_edge(START, "read").add_edge("read", "write")
    graph = team(model, "close").add_node("sub", inner.compile(interrupt_before=["write"])).add_edge(START, "sub")
    return compiled(graph.add_edge("sub", "close"))


def subgraph_adapter(model: BaseChatModel) -> Any:
    """A node that does nothing but translate the state for a graph, which so stands for the node."""
    inner = team(model, "read", "note").add_edge(START, "read").add_edge("read", "note").compile()

    async def study(state: MessagesState) -> dict[str, list[Any]]:
        found = await inner.ainvoke({"messages": state["messages"][-1:]})
        return {"messages": found["messages"][-1:]}

    def study_sync(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": inner.invoke({"messages": state["messages"][-1:]})["messages"][-1:]}

    graph = team(model, "open", "close").add_node("study", RunnableLambda(study_sync, study)).add_edge(START, "open")
    return compiled(graph.add_edge("open", "study").add_edge("study", "close"))


def task_in_node(model: BaseChatModel) -> Any:
    """A node of a graph that calls a task."""

    @task
    def fetch(word: str) -> str:
        return str(model.invoke(word).content)

    def act(state: MessagesState) -> dict[str, list[Any]]:
        return {"messages": [HumanMessage(fetch(last_text(state)).result())]}

    graph = team(model, "close").add_node("act", act).add_edge(START, "act").add_edge("act", "close")
    return compiled(graph)


class Plan(TypedDict):
    """State without messages."""

    topic: str
    parts: list[str]
    texts: Annotated[list[str], operator.add]


def plain_state(model: BaseChatModel) -> Any:
    """Plan and execute over a state of strings."""

    def plan(state: Plan) -> dict[str, Any]:
        return {"parts": str(model.invoke(f"Plan: {state['topic']}").content).split()}

    def execute(state: Plan) -> dict[str, Any]:
        done = str(model.invoke(f"Do: {state['parts'][0]}").content)
        return {"parts": state["parts"][1:], "texts": [done]}

    def more(state: Plan) -> str:
        return "execute" if state["parts"] else "finish"

    graph = StateGraph(Plan).add_node("plan", plan).add_node("execute", execute)
    graph.add_node("finish", lambda state: {"texts": ["end"]}).add_edge(START, "plan").add_edge("plan", "execute")
    return compiled(graph.add_conditional_edges("execute", more, ["execute", "finish"]))


def functional(model: BaseChatModel) -> Any:
    @task
    def draft(topic: str) -> str:
        return str(model.invoke(f"Write about {topic}").content)

    @task
    def check(text: str) -> bool:
        return str(model.invoke(f"Good? {text}").content) == "yes"

    @entrypoint(checkpointer=InMemorySaver())
    def essay(topic: str) -> str:
        text = draft(topic).result()
        while not check(text).result():
            text = draft(topic).result()
        return text

    return essay


def functional_with_graph(model: BaseChatModel) -> Any:
    """A workflow whose task runs a graph."""
    inner = team(model, "read", "note").add_edge(START, "read").add_edge("read", "note").compile()

    @task
    def study(text: str) -> str:
        return str(inner.invoke({"messages": [HumanMessage(text)]})["messages"][-1].content)

    @entrypoint(checkpointer=InMemorySaver())
    def flow(text: str) -> str:
        return study(text).result()

    return flow


_BUY, _FIX = ("buy",), ("fix",)

SHAPES: dict[str, Shape] = {
    "chain": Shape(chain),
    "path_map": Shape(path_map, _BUY, others=(_FIX,)),
    "literal_route": Shape(literal_route, ("text", "bad", "text", "good"), others=(("text", "good"),)),
    "no_path_map": Shape(no_path_map, ("sales",), others=(("support",),), unknown={"router"}),
    "entry_route": Shape(entry_route, inputs={"messages": [HumanMessage("short")]}, varies={START}),
    "two_branches": Shape(two_branches, ("bl",), others=(("cd",),)),
    "join": Shape(join),
    "deferred": Shape(deferred),
    "send": Shape(send, ("one two three",), others=(("one",),), varies={"planner"}),
    "send_undeclared": Shape(send_undeclared, ("one two",), unknown={"planner"}),
    "send_from_command": Shape(send_from_command, ("one two",), varies={"planner"}),
    "send_to_subgraph": Shape(send_to_subgraph, ("one two",), varies={"planner"}),
    "command_literal": Shape(command_literal, ("sales",), others=(("support",),)),
    "command_destinations": Shape(command_destinations, ("sales",), others=(("support",),)),
    "command_undeclared": Shape(command_undeclared, ("sales",), others=(("support",),), unknown={"router"}),
    "command_many": Shape(command_many, ("left right",), others=(("left",), ("right",))),
    "edge_and_command": Shape(edge_and_command, ("more",), others=(("less",),)),
    "command_parent": Shape(command_parent, ("go",), others=(("stay",),), unknown={"office|leave"}),
    "command_parent_declared": Shape(
        command_parent_declared, ("lawyer",), others=(("archive",),), unknown={"office|leave"}
    ),
    "nested": Shape(nested),
    "same_subgraph_twice": Shape(same_subgraph_twice),
    "subgraph_in_function": Shape(subgraph_in_function, ("legal",), others=(("money",), ("none",))),
    "tools_loop": Shape(tools_loop, (call_of("add", a=1, b=2), call_of("look_up", word="x"))),
    "retrieval": Shape(retrieval, ("bad", "better", "fine")),
    "interrupted": Shape(interrupted, resumes=(None, None, Command(resume="yes"))),
    "failing": Shape(failing, ("boom",), others=(("fine",),), unknown={"__error_handler__act"}),
    "endless": Shape(endless, raises=GraphRecursionError),
    "plain_state": Shape(plain_state, ("one two",), inputs={"topic": "bread", "parts": [], "texts": []}),
    "long_chain": Shape(long_chain, ("n488",), others=(("__end__",),)),
    "methods": Shape(methods, ("text", "again", "text", "enough"), others=(("text", "enough"),)),
    "raising_object": Shape(raising_object),
    "interrupted_inside": Shape(interrupted_inside, resumes=(None,)),
    "subgraph_adapter": Shape(subgraph_adapter),
    "task_in_node": Shape(task_in_node, unknown={"act|fetch"}),
    "functional": Shape(functional, ("text", "no", "text", "yes"), inputs="bread", unknown=None),
    "functional_with_graph": Shape(functional_with_graph, inputs="bread", unknown={"flow", "flow|study"}),
    **AGENT_SHAPES,
}
