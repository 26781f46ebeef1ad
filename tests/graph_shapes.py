"""Graph shapes that need no model server: each function builds one compiled graph (loaded by path, see the tests)."""

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send
from pydantic import Field


class Trail(TypedDict):
    seen: Annotated[list[str], operator.add]


class ScriptedModel(BaseChatModel):
    """Answers from a list of messages, in order, then with plain text."""

    script: list[AIMessage] = Field(default_factory=list)
    calls: list[int] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> "ScriptedModel":
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any):
        self.calls.append(len(messages))
        index = len(self.calls) - 1
        answer = self.script[index] if index < len(self.script) else AIMessage("done")
        return ChatResult(generations=[ChatGeneration(message=answer.model_copy())])


def call_of(name: str, call_id: str = "1", **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": call_id}])


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@dataclass
class Shape:
    """A graph, an input that runs it, and what must be said about it."""

    build: Callable[[], Any]
    unknown: set[str] = field(default_factory=set)
    successors: dict[str, set[str]] = field(default_factory=dict)
    inputs: Any = field(default_factory=lambda: {"seen": []})


def step(name: str) -> Callable[[Trail], dict[str, list[str]]]:
    def run(state: Trail) -> dict[str, list[str]]:
        return {"seen": [name]}

    return run


def builder(*names: str) -> StateGraph:
    graph = StateGraph(Trail)
    for name in names:
        graph.add_node(name, step(name))
    return graph


def chain(num_nodes: int = 3):
    names = [f"n{i}" for i in range(num_nodes)]
    graph = builder(*names)
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    return graph.compile(checkpointer=InMemorySaver())


def path_map():
    graph = builder("a", "b", "c").add_edge(START, "a")
    graph.add_conditional_edges("a", lambda state: "right", {"left": "b", "right": "c"})
    return graph.compile(checkpointer=InMemorySaver())


def literal_route():
    def route(state: Trail) -> Literal["b", "__end__"]:
        return "b"

    graph = builder("a", "b").add_edge(START, "a").add_conditional_edges("a", route)
    return graph.compile(checkpointer=InMemorySaver())


def no_path_map():
    def route(state: Trail):
        return "b" if len(state["seen"]) < 9 else "c"

    graph = builder("a", "b", "c").add_edge(START, "a").add_conditional_edges("a", route)
    return graph.compile(checkpointer=InMemorySaver())


def join():
    graph = builder("a", "b", "b2", "c").add_edge(START, "a").add_edge(START, "b").add_edge("b", "b2")
    return graph.add_edge(["a", "b2"], "c").compile(checkpointer=InMemorySaver())


def deferred():
    graph = builder("a", "b", "b2").add_node("last", step("last"), defer=True)
    graph.add_edge(START, "a").add_edge(START, "b").add_edge("b", "b2").add_edge("a", "last").add_edge("b2", "last")
    return graph.compile(checkpointer=InMemorySaver())


def send():
    def fan_out(state: Trail):
        return [Send("work", {"seen": []}) for _ in range(3)]

    graph = builder("plan", "work", "merge").add_edge(START, "plan")
    graph.add_conditional_edges("plan", fan_out, ["work"]).add_edge("work", "merge")
    return graph.compile(checkpointer=InMemorySaver())


def command_declared():
    def a(state: Trail) -> Command[Literal["b", "c"]]:
        return Command(goto="c", update={"seen": ["a"]})

    return builder("b", "c").add_node("a", a).add_edge(START, "a").compile(checkpointer=InMemorySaver())


def command_undeclared():
    def a(state: Trail):
        return Command(goto="c", update={"seen": ["a"]})

    return builder("b", "c").add_node("a", a).add_edge(START, "a").compile(checkpointer=InMemorySaver())


def _jump(target: str) -> Command:
    return Command(goto=target)


def command_in_helper():
    def a(state: Trail):
        return _jump("b")

    return builder("b").add_node("a", a).add_edge(START, "a").compile(checkpointer=InMemorySaver())


def edge_and_command():
    def a(state: Trail) -> Command[Literal["c"]]:
        return Command(goto="c", update={"seen": ["a"]})

    graph = builder("b", "c").add_node("a", a).add_edge(START, "a").add_edge("a", "b")
    return graph.compile(checkpointer=InMemorySaver())


def loop():
    def again(state: Trail) -> Literal["work", "__end__"]:
        return "work" if len(state["seen"]) < 6 else END

    graph = builder("work", "check").add_edge(START, "work").add_edge("work", "check")
    return graph.add_conditional_edges("check", again).compile(checkpointer=InMemorySaver())


def endless_loop():
    graph = builder("a", "b", "island").add_edge(START, "a").add_edge("a", "b").add_edge("b", "a")
    return graph.add_edge("island", END).compile(checkpointer=InMemorySaver())


def nested():
    inner = builder("a", "b").add_edge(START, "a").add_edge("a", "b").compile()
    middle = builder("a").add_node("inner", inner).add_edge(START, "a").add_edge("a", "inner").compile()
    graph = builder("a", "c").add_node("sub", middle)
    graph.add_edge(START, "a").add_edge("a", "sub").add_edge("sub", "c")
    return graph.compile(checkpointer=InMemorySaver())


def nested_parent_command():
    def leave(state: Trail):
        return Command(goto="c", graph=Command.PARENT)

    inner = StateGraph(Trail).add_node("leave", leave).add_edge(START, "leave").compile()
    graph = builder("b", "c").add_node("sub", inner, destinations=("b", "c")).add_edge(START, "sub")
    return graph.compile(checkpointer=InMemorySaver())


def functional():
    @task
    def work(value: int) -> int:
        return value + 1

    @entrypoint(checkpointer=InMemorySaver())
    def flow(value: int) -> int:
        return work(value).result()

    return flow


def agent():
    model = ScriptedModel(script=[call_of("add", a=1, b=2)])
    return create_agent(model, [add], system_prompt="You add.", checkpointer=InMemorySaver())


def supervisor():
    from langgraph_supervisor import create_supervisor

    math = create_agent(ScriptedModel(script=[call_of("add", a=1, b=2)]), [add], name="math")
    poet = create_agent(ScriptedModel(), [add], name="poet")
    boss = ScriptedModel(script=[call_of("transfer_to_math")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library builds on a deprecated constructor
        return create_supervisor([math, poet], model=boss).compile(checkpointer=InMemorySaver())


def swarm():
    from langgraph_swarm import create_handoff_tool, create_swarm

    to_bob, to_alice = create_handoff_tool(agent_name="Bob"), create_handoff_tool(agent_name="Alice")
    alice = create_agent(ScriptedModel(script=[call_of("transfer_to_bob")]), [add, to_bob], name="Alice")
    bob = create_agent(ScriptedModel(), [to_alice], name="Bob")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_swarm([alice, bob], default_active_agent="Alice").compile(checkpointer=InMemorySaver())


def router(labels: list[str], *, declared: bool = True):
    """A loop whose router goes through `labels` by position, then ends."""

    def route(state: Trail) -> str:
        done = sum(name != "route" for name in state["seen"])
        return labels[done] if done < len(labels) else END

    workers = sorted(set(labels))
    graph = builder("route", *workers).add_edge(START, "route")
    graph.add_conditional_edges("route", route, [*workers, END] if declared else None)
    for worker in workers:
        graph.add_edge(worker, "route")
    return graph.compile(checkpointer=InMemorySaver())


def messages_graph():
    """A hand-written node that closes over a model."""
    model = ScriptedModel()

    def write(state: MessagesState):
        return {"messages": [model.invoke(state["messages"])]}

    return (
        StateGraph(MessagesState)
        .add_node("write", write)
        .add_edge(START, "write")
        .compile(checkpointer=InMemorySaver())
    )


_ASK = {"messages": [{"role": "user", "content": "hello"}]}

SHAPES: dict[str, Shape] = {
    "chain": Shape(chain, successors={START: {"n0"}, "n0": {"n1"}, "n2": {END}}),
    "path_map": Shape(path_map, successors={"a": {"b", "c"}, "b": {END}}),
    "literal_route": Shape(literal_route, successors={"a": {"b", END}}),
    "no_path_map": Shape(no_path_map, unknown={"a"}, successors={"a": {"b", "c"}}),
    "join": Shape(join, successors={START: {"a", "b"}, "a": {"c"}, "b2": {"c"}}),
    "deferred": Shape(deferred, successors={"a": {"last"}, "b": {"b2"}}),
    "send": Shape(send, successors={"plan": {"work"}, "work": {"merge"}}),
    "command_declared": Shape(command_declared, successors={"a": {"b", "c"}}),
    "command_undeclared": Shape(command_undeclared, unknown={"a"}, successors={"a": {"c"}}),
    "command_in_helper": Shape(command_in_helper, unknown={"a"}, successors={"b": {END}}),
    "edge_and_command": Shape(edge_and_command, successors={"a": {"b", "c"}}),
    "loop": Shape(loop, successors={"work": {"check"}, "check": {"work", END}}),
    "nested": Shape(nested, successors={"a": {"sub"}, "sub": {"c"}, "sub|a": {"sub|inner"}}),
    "nested_parent_command": Shape(nested_parent_command, unknown={"sub|leave"}, successors={"sub": {"b", "c"}}),
    "functional": Shape(
        functional,
        unknown={"flow", "flow|work"},
        successors={START: {"flow"}, "flow": {"flow|work"}, "flow|work": {"flow|__end__"}},
        inputs=1,
    ),
    "agent": Shape(agent, successors={"tools": {"model"}, "model": {"tools", END}}, inputs=_ASK),
    "supervisor": Shape(
        supervisor,
        successors={"math": {"supervisor"}, "supervisor": {"math", "poet", END}, START: {"supervisor"}},
        inputs=_ASK,
    ),
    "swarm": Shape(swarm, successors={START: {"Alice", "Bob"}, "Alice|tools": {"Alice|model", "Bob"}}, inputs=_ASK),
    "router": Shape(lambda: router(["x", "y", "x"]), successors={"route": {"x", "y", END}}),
    "messages_graph": Shape(messages_graph, successors={"write": {END}}, inputs=_ASK),
}
