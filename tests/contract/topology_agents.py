"""Shapes made by libraries: `create_agent` with middleware, supervisor, swarm, deepagents."""

import warnings
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    after_agent,
    after_model,
    before_agent,
    before_model,
    dynamic_prompt,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.types import Command
from pydantic import BaseModel

from tests.contract.topology_script import Shape, add, call_of, calls_of, finish_with, look_up

_ADD = call_of("add", a=1, b=2)


def agent(model: BaseChatModel, *middleware: AgentMiddleware, **options: Any) -> Any:
    options = {"tools": [add, look_up], "system_prompt": "You add.", "checkpointer": InMemorySaver()} | options
    return create_agent(model, middleware=middleware, **options)


def hooks(model: BaseChatModel) -> Any:
    """All four hooks as nodes of their own."""

    def note(state: Any, runtime: Any) -> None:
        return None

    return agent(
        model,
        before_agent(name="Open")(note),
        before_model(name="Before")(note),
        after_model(name="After")(note),
        after_agent(name="Close")(note),
    )


def jumps(model: BaseChatModel) -> Any:
    """Hooks that jump: to the end before the model, back to the model after it."""

    @before_model(can_jump_to=["end"])
    def guard(state: Any, runtime: Any) -> dict[str, Any] | None:
        return {"jump_to": "end"} if len(state["messages"]) > 4 else None

    @after_model(can_jump_to=["model", "end"])
    def retry(state: Any, runtime: Any) -> dict[str, Any] | None:
        said = state["messages"][-1].content
        return {"jump_to": said} if said in ("model", "end") else None

    return agent(model, guard, retry)


def wrapped(model: BaseChatModel) -> Any:
    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"You have {len(request.messages)} messages."

    return agent(model, prompt)


def human_in_the_loop(model: BaseChatModel) -> Any:
    return agent(model, HumanInTheLoopMiddleware(interrupt_on={"add": True}))


def summarizing(model: BaseChatModel) -> Any:
    return agent(model, SummarizationMiddleware(model, trigger=("messages", 3), keep=("messages", 1)))


def tool_limit(model: BaseChatModel) -> Any:
    return agent(model, ToolCallLimitMiddleware(run_limit=1, exit_behavior="end"))


def model_limit(model: BaseChatModel) -> Any:
    return agent(model, ModelCallLimitMiddleware(run_limit=2, exit_behavior="end"))


def to_dos(model: BaseChatModel) -> Any:
    return agent(model, TodoListMiddleware())


class Verdict(BaseModel):
    """The answer's form."""

    good: bool


def structured(model: BaseChatModel) -> Any:
    return agent(model, response_format=ToolStrategy(Verdict))


def return_direct(model: BaseChatModel) -> Any:
    return agent(model, tools=[add, finish_with])


def no_tools(model: BaseChatModel) -> Any:
    return agent(model, tools=[])


def state_tool(model: BaseChatModel) -> Any:
    """A tool that answers with a Command, which only updates the state."""

    @tool
    def remember(what: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Remember this."""
        return Command(update={"messages": [ToolMessage(what, tool_call_id=tool_call_id)]})

    return agent(model, tools=[remember])


def own_handoff(model: BaseChatModel) -> Any:
    """A graph of agents with a handoff tool of the user's own, without metadata."""
    from langgraph.graph import START, MessagesState, StateGraph

    @tool
    def to_billing(tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Hand over to billing."""
        done = ToolMessage("over", tool_call_id=tool_call_id)
        return Command(goto="billing", graph=Command.PARENT, update={"messages": [done]})

    front = create_agent(model, [to_billing, add], name="front")
    billing = create_agent(model, [add], name="billing")
    graph = StateGraph(MessagesState).add_node("front", front).add_node("billing", billing).add_edge(START, "front")
    return graph.compile(checkpointer=InMemorySaver())


def handoff_beside_edge(model: BaseChatModel) -> Any:
    """A handoff out of an agent that a fixed edge leaves as well: both run."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph_swarm import create_handoff_tool

    front = create_agent(model, [create_handoff_tool(agent_name="billing")], name="front")
    billing = create_agent(model, [add], name="billing")
    audit = create_agent(model, [], name="audit")
    graph = StateGraph(MessagesState).add_node("front", front).add_node("billing", billing).add_node("audit", audit)
    graph.add_edge(START, "front").add_edge("front", "audit")
    return graph.compile(checkpointer=InMemorySaver())


def supervisor(model: BaseChatModel) -> Any:
    from langgraph_supervisor import create_supervisor

    math = create_agent(model, [add], name="math")
    poet = create_agent(model, [look_up], name="poet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library builds on a deprecated constructor
        return create_supervisor([math, poet], model=model).compile(checkpointer=InMemorySaver())


def supervisor_of_supervisors(model: BaseChatModel) -> Any:
    from langgraph_supervisor import create_supervisor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        math = create_agent(model, [add], name="math")
        inner = create_supervisor([math], model=model, supervisor_name="lead").compile(name="science")
        poet = create_agent(model, [look_up], name="poet")
        return create_supervisor([inner, poet], model=model).compile(checkpointer=InMemorySaver())


def swarm(model: BaseChatModel) -> Any:
    from langgraph_swarm import create_handoff_tool, create_swarm

    alice = create_agent(model, [add, create_handoff_tool(agent_name="Bob")], name="Alice")
    bob = create_agent(model, [create_handoff_tool(agent_name="Alice")], name="Bob")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_swarm([alice, bob], default_active_agent="Alice").compile(checkpointer=InMemorySaver())


def deep_agent(model: BaseChatModel) -> Any:
    from deepagents import create_deep_agent

    helpers = [{"name": "searcher", "description": "Searches.", "system_prompt": "You search.", "tools": [look_up]}]
    return create_deep_agent(model, [add], subagents=helpers, checkpointer=InMemorySaver())


def agent_in_tool(model: BaseChatModel) -> Any:
    """An agent whose tool runs another agent."""
    helper = create_agent(model, [look_up], system_prompt="You look words up.", name="helper")

    @tool
    def ask_helper(question: str) -> str:
        """Ask the helper."""
        return str(helper.invoke({"messages": [HumanMessage(question)]})["messages"][-1].content)

    return agent(model, tools=[add, ask_helper])


_ASK_HELPER = call_of("ask_helper", question="x")
_PING_PONG = tuple(call_of(f"transfer_to_{'alice' if turn % 2 else 'bob'}", f"{turn}") for turn in range(60))

AGENT_SHAPES: dict[str, Shape] = {
    "agent": Shape(agent, (_ADD, "three")),
    "agent_parallel_tools": Shape(agent, (calls_of("add", "add", a=1, b=2), "three")),
    "agent_hooks": Shape(hooks, (_ADD, "three")),
    "agent_jumps": Shape(jumps, ("model", "end"), others=((_ADD, _ADD, _ADD), ("fine",))),
    "agent_wrapped": Shape(wrapped, (_ADD, "three")),
    "agent_human": Shape(
        human_in_the_loop,
        (_ADD, "three"),
        resumes=(Command(resume={"decisions": [{"type": "approve"}]}),),
    ),
    "agent_summary": Shape(summarizing, (_ADD, "so far", "three"), others=(("three",),)),
    "agent_tool_limit": Shape(tool_limit, (_ADD, call_of("add", "2", a=1, b=2)), others=(("three",),)),
    "agent_model_limit": Shape(model_limit, (_ADD, _ADD, _ADD), others=(("three",),)),
    "agent_to_dos": Shape(to_dos, (call_of("write_todos", todos=[{"content": "x", "status": "pending"}]), "ok")),
    "agent_structured": Shape(structured, (_ADD, call_of("Verdict", good=True)), varies={"tools"}),
    "agent_return_direct": Shape(return_direct, (call_of("finish_with", text="x"),), others=((_ADD, "three"),)),
    "agent_no_tools": Shape(no_tools, ("hello",)),
    "agent_state_tool": Shape(state_tool, (call_of("remember", what="x"), "ok")),
    "agent_in_tool": Shape(agent_in_tool, (_ASK_HELPER, "word", "ok"), others=((_ADD, "three"),)),
    "own_handoff": Shape(own_handoff, (call_of("to_billing"), "paid"), others=((_ADD, "ok"),), unknown={"front|tools"}),
    "handoff_beside_edge": Shape(handoff_beside_edge, (call_of("transfer_to_billing"),), others=(("ok",),)),
    "supervisor": Shape(
        supervisor,
        (call_of("transfer_to_math"), _ADD, "three", call_of("transfer_to_poet", "2"), "rhyme", "all done"),
    ),
    "supervisor_parallel": Shape(supervisor, (calls_of("transfer_to_math", "transfer_to_poet"), "three", "rhyme")),
    "supervisor_nested": Shape(
        supervisor_of_supervisors,
        (call_of("transfer_to_science"), call_of("transfer_to_math", "2"), "three", "done", "all done"),
    ),
    "swarm": Shape(
        swarm,
        (call_of("transfer_to_bob"), call_of("transfer_to_alice", "2"), _ADD, "ok"),
        others=((call_of("transfer_to_bob"), "ok"),),
    ),
    "swarm_ping_pong": Shape(
        swarm, _PING_PONG, raises=GraphRecursionError, varies={"Alice", "Alice|model", "Bob", "Bob|model"}
    ),
    "deep_agent": Shape(
        deep_agent,
        (call_of("task", subagent_type="searcher", description="x"), call_of("look_up", word="x"), "word", "ok"),
        others=((_ADD, "three"),),
    ),
}
