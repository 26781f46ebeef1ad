"""Shapes made of agents with tools: tool loops, `create_agent`, supervisor, swarm, and the functional API."""

from __future__ import annotations

import random
import warnings
from typing import Any, Final

from langchain_core.messages import SystemMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from pancake_langgraph._types import Prompt
from pancake_langgraph.bench.forecast_shapes import (
    TOPICS,
    Parts,
    Shape,
    agent_of,
    no_script,
    one_message,
    system_prompt,
)
from pancake_langgraph.engines.fake_text import FakeAnswer, FakeToolCall, text_of

_TOOL_S: Final = 1.5
_TEAM: Final = ("finder", "counter", "writer", "checker")


def _look_up(parts: Parts) -> BaseTool:
    async def look_up(query: str) -> str:
        parts.work(_TOOL_S)
        return f"found a page on {query}"

    return StructuredTool.from_function(
        coroutine=look_up, name="look_up", description="Look something up in the archive."
    )


def _looking(prompt: Prompt, rounds: int) -> FakeAnswer | None:
    """Return a call of the tool until it was called `rounds` times since the last message of the user."""
    roles = [str(message.get("role")) for message in prompt.messages]
    since = len(roles) - 1 - roles[::-1].index("user")
    asked = roles[since:].count("tool")
    return FakeAnswer(tool_calls=(FakeToolCall("look_up", {"query": f"page {asked}"}),)) if asked < rounds else None


# -- tool loops -------------------------------------------------------------------------------------------------------


def tool_rounds(parts: Parts) -> Any:
    """A hand-written tool loop whose number of rounds the model chooses."""
    tool = _look_up(parts)
    model = parts.model.bind_tools([tool])
    system = SystemMessage(system_prompt("scout"))

    async def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([system, *state["messages"]])]}

    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([tool]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges(
        "agent", lambda s: "tools" if getattr(s["messages"][-1], "tool_calls", None) else END, ["tools", END]
    )
    builder.add_edge("tools", "agent")
    return builder.compile(checkpointer=parts.saver)


def _chosen_rounds(prompt: Prompt) -> FakeAnswer | None:
    text = next(text_of(m) for m in prompt.messages if m.get("role") == "user")
    return _looking(prompt, random.Random(text).randint(1, 3))


def created_agent(parts: Parts) -> Any:
    """`create_agent` that calls its tool twice."""
    from langchain.agents import create_agent

    return create_agent(
        parts.model, [_look_up(parts)], system_prompt=system_prompt("scout"), checkpointer=parts.saver, name="scout"
    )


def _two_rounds(prompt: Prompt) -> FakeAnswer | None:
    return _looking(prompt, 2)


def agent_with_middleware(parts: Parts) -> Any:
    """`create_agent` with a node before each call, a prompt that depends on the turn, and one after the agent."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import AgentMiddleware, dynamic_prompt

    class Budget(AgentMiddleware[Any, Any]):
        """Counts in nodes of its own."""

        async def abefore_model(self, state: Any, runtime: Any) -> None:
            """Take a moment."""
            parts.work(0.05)

        async def aafter_agent(self, state: Any, runtime: Any) -> None:
            """Take a moment."""
            parts.work(0.05)

    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"{system_prompt('scout')}\nMessages so far: {len(request.messages)}."

    return create_agent(parts.model, [_look_up(parts)], middleware=[Budget(), prompt], checkpointer=parts.saver)


# -- several agents ---------------------------------------------------------------------------------------------------


def supervisor(parts: Parts) -> Any:
    """Four agents under a supervisor that hands over by tools, in an order of its own."""
    from langchain.agents import create_agent
    from langgraph_supervisor import create_supervisor

    agents: list[Any] = [
        create_agent(parts.model, [_look_up(parts)], system_prompt=system_prompt(name), name=name) for name in _TEAM
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that package builds its agent by LangGraph's old function
        made = create_supervisor(agents, model=parts.model, prompt=system_prompt("boss"))
    return made.compile(checkpointer=parts.saver)


def _supervise(prompt: Prompt) -> FakeAnswer | str | None:
    agent = agent_of(prompt)
    if agent == "boss":
        called = [
            call["function"]["name"]
            for message in prompt.messages
            for call in message.get("tool_calls") or ()
            if call["function"]["name"].startswith("transfer_to_")
        ]
        if len(called) < len(_TEAM):
            return FakeAnswer(tool_calls=(FakeToolCall(f"transfer_to_{_TEAM[len(called)]}"),))
        return None
    return _looking(prompt, 1) if agent == "finder" and prompt.messages[-1].get("role") != "tool" else None


def swarm(parts: Parts) -> Any:
    """Two agents that hand over to each other twice."""
    from langchain.agents import create_agent
    from langgraph_swarm import create_handoff_tool, create_swarm

    agents: list[Any] = [
        create_agent(
            parts.model,
            [create_handoff_tool(agent_name=other), _look_up(parts)],
            system_prompt=system_prompt(name),
            name=name,
        )
        for name, other in (("alice", "bob"), ("bob", "alice"))
    ]
    return create_swarm(agents, default_active_agent="alice").compile(checkpointer=parts.saver)


def _swarming(prompt: Prompt) -> FakeAnswer | None:
    handed = sum(
        call["function"]["name"].startswith("transfer_to_")
        for message in prompt.messages
        for call in message.get("tool_calls") or ()
    )
    other = {"alice": "bob", "bob": "alice"}.get(agent_of(prompt))
    return FakeAnswer(tool_calls=(FakeToolCall(f"transfer_to_{other}"),)) if other and handed < 3 else None


# -- functional API ---------------------------------------------------------------------------------------------------


def functional(parts: Parts) -> Any:
    """An entrypoint that calls three tasks, the second one twice."""

    async def ask(agent: str, text: str) -> str:
        return (await parts.model.ainvoke([SystemMessage(system_prompt(agent)), ("user", text)])).text

    @task
    async def outline(topic: str) -> str:
        return await ask("outline", f"Topic: {topic}")

    @task
    async def section(outlined: str, number: int) -> str:
        return await ask("section", f"Outline: {outlined}\nWrite section {number}.")

    @task
    async def edit(text: str) -> str:
        return await ask("edit", f"Edit: {text}")

    @entrypoint(checkpointer=parts.saver)
    async def report(topic: str) -> str:
        outlined = await outline(topic)
        first = await section(outlined, 1)
        second = await section(outlined, 2)
        return await edit(f"{first} {second}")

    return report


def _topic(number: int) -> str:
    return f"{TOPICS[number % len(TOPICS)]} in year {number}"


AGENT_SHAPES: Final[tuple[Shape, ...]] = (
    Shape("tool-rounds", "agent", tool_rounds, one_message, _chosen_rounds),
    Shape("create-agent", "agent", created_agent, one_message, _two_rounds, packages=("langchain",)),
    Shape("agent-middleware", "agent", agent_with_middleware, one_message, _two_rounds, packages=("langchain",)),
    Shape(
        "supervisor",
        "handoff",
        supervisor,
        one_message,
        _supervise,
        routes_by_model=True,
        packages=("langchain", "langgraph-supervisor"),
    ),
    Shape(
        "swarm",
        "handoff",
        swarm,
        one_message,
        _swarming,
        routes_by_model=True,
        packages=("langchain", "langgraph-swarm"),
    ),
    Shape("functional", "functional", functional, _topic, no_script),
)
