"""Workload `tool-pause`: agents wait for tools while other threads press on the engine's pool.

Agents and pressing threads are LangGraph graphs.  An agent loops: a call that asks for a tool, the tool (a sleep of a
seeded 1–4 s), the next call.  A pressing thread repeats: one call over its own long context, then a short rest; each of
its runs goes from START to END.  All prompts are cut from real text; every thread's differs from its first line on.

The live set is the sum of all threads' prompts.  Pressure is live set over pool, swept by the number of pressing
threads with the pool fixed, so that one set of servers serves the whole sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from pancake_langgraph.bench.arms import ArmRun
from pancake_langgraph.bench.recorder import CallRecord, CallRecorder
from pancake_langgraph.bench.text import passages
from pancake_langgraph.runtime import attach


@dataclass(frozen=True, slots=True)
class ToolPausePlan:
    """Size of the workload.

    `num_agents` threads pause for tools `num_pauses` times each; `num_pressing` threads press.  Pauses are drawn evenly
    from `pause_s`, rests of pressing threads from `rest_s`; `prompt_words` words make one prompt.
    """

    num_agents: int = 3
    num_pressing: int = 3
    num_pauses: int = 3
    pause_s: tuple[float, float] = (1.0, 4.0)
    rest_s: tuple[float, float] = (0.5, 1.5)
    prompt_words: int = 1150
    answer_tokens: int = 8
    tool_tokens: int = 24
    seed: int = 7


@dataclass(frozen=True, slots=True)
class ToolPauseRun:
    """What one arm did once: all calls, the agents' program times, and how long it took."""

    calls: tuple[CallRecord, ...]
    program_s: tuple[float, ...]
    wall_s: float

    def resumed(self) -> dict[str, CallRecord]:
        """Return the agents' calls after a pause, by label (`agent-i/turn`, turn ≥ 1)."""
        return {c.label: c for c in self.calls if c.label.startswith("agent-") and not c.label.endswith("/0")}


class AgentState(TypedDict):
    """State of an agent's thread."""

    messages: Annotated[list[AnyMessage], add_messages]
    turns: int


class PressState(TypedDict):
    """State of a pressing thread."""

    messages: list[AnyMessage]


async def run_tool_pause(plan: ToolPausePlan, run: ArmRun, *, repeat: int) -> ToolPauseRun:
    """Run the workload once on one arm."""
    recorder = CallRecorder()
    agents_done = asyncio.Event()
    pressing = [
        asyncio.create_task(_press(plan, run, recorder, number, repeat, agents_done))
        for number in range(plan.num_pressing)
    ]
    started_s = time.perf_counter()
    try:
        program_s = await asyncio.gather(
            *(_agent(plan, run, recorder, number, repeat) for number in range(plan.num_agents))
        )
    finally:
        agents_done.set()
        for task in pressing:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*pressing, return_exceptions=True)
    return ToolPauseRun(tuple(recorder.records), tuple(program_s), time.perf_counter() - started_s)


async def _agent(plan: ToolPausePlan, run: ArmRun, recorder: CallRecorder, number: int, repeat: int) -> float:
    rng = random.Random(f"{plan.seed}/{repeat}/agent/{number}")
    pauses_s = [rng.uniform(*plan.pause_s) for _ in range(plan.num_pauses)]
    graph = build_agent(plan, run, number, pauses_s)
    if run.runtime is not None:
        graph = attach(graph, runtime=run.runtime)
    await asyncio.sleep(number * 0.7)
    started_s = time.perf_counter()
    await graph.ainvoke(
        {"messages": [("user", "Look at the job and say what you found.")], "turns": 0},
        {"configurable": {"thread_id": f"agent-{number}"}, "callbacks": [recorder], "recursion_limit": 50},
    )
    return time.perf_counter() - started_s


def build_agent(plan: ToolPausePlan, run: ArmRun, number: int, pauses_s: list[float]) -> Any:
    """Build one agent: `agent` and `tools` in a loop, `len(pauses_s)` times."""
    remaining_s = iter(pauses_s)

    @tool
    async def inspect(part: Literal["log", "plan"]) -> str:
        """Inspect one part of the job."""
        await asyncio.sleep(next(remaining_s))
        return "ok"

    schema = {
        "type": "function",
        "function": {
            "name": "inspect",
            "description": "Inspect one part of the job.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"part": {"type": "string", "enum": ["log", "plan"]}},
                "required": ["part"],
                "additionalProperties": False,
            },
        },
    }
    asking = run.model(max_tokens=plan.tool_tokens).bind(
        tools=[schema], tool_choice={"type": "function", "function": {"name": "inspect"}}
    )
    answering = run.model(max_tokens=plan.answer_tokens).bind(tools=[schema], tool_choice="none")
    system = SystemMessage(f"You are inspector {number}. {passages(plan.prompt_words, seed=1000 + number)}")

    async def agent(state: AgentState, config: RunnableConfig) -> dict[str, Any]:
        model = asking if state["turns"] < len(pauses_s) else answering
        answer = await model.ainvoke([system, *state["messages"]], config)
        return {"messages": [answer], "turns": state["turns"] + 1}

    def route(state: AgentState) -> Literal["tools", "__end__"]:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else "__end__"

    builder = StateGraph(AgentState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([inspect]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", route)
    builder.add_edge("tools", "agent")
    return builder.compile(checkpointer=InMemorySaver())


async def _press(
    plan: ToolPausePlan, run: ArmRun, recorder: CallRecorder, number: int, repeat: int, done: asyncio.Event
) -> None:
    rng = random.Random(f"{plan.seed}/{repeat}/press/{number}")
    model = run.model(max_tokens=plan.answer_tokens)
    system = SystemMessage(f"You are clerk {number}. {passages(plan.prompt_words, seed=2000 + number)}")

    async def clerk(state: PressState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([system, *state["messages"]], config)]}

    builder = StateGraph(PressState)
    builder.add_node("clerk", clerk)
    builder.add_edge(START, "clerk")
    builder.add_edge("clerk", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    if run.runtime is not None:
        graph = attach(graph, runtime=run.runtime)
    await asyncio.sleep(number * 0.3)
    turn = 0
    while not done.is_set():
        turn += 1
        await graph.ainvoke(
            {"messages": [("user", f"Entry {turn}: file it.")]},
            {"configurable": {"thread_id": f"press-{number}"}, "callbacks": [recorder]},
        )
        await asyncio.sleep(rng.uniform(*plan.rest_s))
