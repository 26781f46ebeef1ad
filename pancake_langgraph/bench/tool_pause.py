"""Workload `tool-pause`: agents wait for tools while other threads press on the engine's pool.

Agents and pressing threads are LangGraph graphs.  An agent loops: a call that asks for a tool, the tool (a sleep of a
seeded 1-4 s), the next call.  A pressing thread repeats: one call over its own long context, then a short rest; each of
its runs goes from START to END.  All prompts are cut from real text; every thread's differs from its first line on.

Every thread's context has been read once, one after the other, before the clock starts: threads of a running service,
not a cold start.

The live set is the sum of all threads' prompts.  Pressure is live set over pool, swept by the number of pressing
threads with the pool fixed, so that one set of servers serves the whole sweep.
"""

from __future__ import annotations

import asyncio
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
    from `pause_s`, rests of pressing threads from `rest_s`; `prompt_words` words make one prompt.  An agent's last
    answer has `answer_tokens`, a pressing thread's `clerk_tokens` (it files letters: a word or two), a tool call at
    most `tool_tokens`.
    """

    num_agents: int = 3
    num_pressing: int = 3
    num_pauses: int = 2
    pause_s: tuple[float, float] = (1.0, 4.0)
    rest_s: tuple[float, float] = (1.0, 2.5)
    prompt_words: int = 1500
    answer_tokens: int = 4
    clerk_tokens: int = 2
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
    agents = [_Agent.build(plan, run, number, repeat) for number in range(plan.num_agents)]
    clerks = [_Clerk.build(plan, run, number, repeat) for number in range(plan.num_pressing)]
    for agent in agents:
        await agent.read_once()
    for clerk in clerks:
        await clerk.read_once()
    recorder = CallRecorder()
    agents_done = asyncio.Event()
    pressing = [asyncio.create_task(clerk.press(recorder, agents_done)) for clerk in clerks]
    started_s = time.perf_counter()
    try:
        program_s = await asyncio.gather(*(agent.work(recorder) for agent in agents))
    finally:
        agents_done.set()
        await asyncio.gather(*pressing)
    return ToolPauseRun(tuple(recorder.records), tuple(program_s), time.perf_counter() - started_s)


@dataclass(frozen=True, slots=True)
class _Agent:
    """One agent thread: its graph, and how long to wait before it starts to work."""

    number: int
    repeat: int
    graph: Any
    stagger_s: float

    @staticmethod
    def build(plan: ToolPausePlan, run: ArmRun, number: int, repeat: int) -> _Agent:
        rng = random.Random(f"{plan.seed}/{repeat}/agent/{number}")
        pauses_s = [rng.uniform(*plan.pause_s) for _ in range(plan.num_pauses)]
        graph = build_agent(plan, run, number, pauses_s)
        return _Agent(number, repeat, _attached(graph, run), rng.uniform(0.0, 2.0))

    async def read_once(self) -> None:
        """Let the agent answer once without a tool, in a thread of its own."""
        await self._run("You will get a job.", f"agent-{self.number}-before", turns=10_000, recorder=None)

    async def work(self, recorder: CallRecorder) -> float:
        """Run the loop; return its wall time in seconds."""
        await asyncio.sleep(self.stagger_s)
        started_s = time.perf_counter()
        text = f"Job {self.repeat}: look at it and say what you found."
        await self._run(text, f"agent-{self.number}", turns=0, recorder=recorder)
        return time.perf_counter() - started_s

    async def _run(self, text: str, thread_id: str, *, turns: int, recorder: CallRecorder | None) -> None:
        await self.graph.ainvoke(
            {"messages": [("user", text)], "turns": turns}, _config(thread_id, recorder, recursion_limit=200)
        )


@dataclass(frozen=True, slots=True)
class _Clerk:
    """One pressing thread: each turn is a run of its own, from START to END."""

    number: int
    repeat: int
    graph: Any
    rng: random.Random
    rest_s: tuple[float, float]

    @staticmethod
    def build(plan: ToolPausePlan, run: ArmRun, number: int, repeat: int) -> _Clerk:
        rng = random.Random(f"{plan.seed}/{repeat}/press/{number}")
        return _Clerk(number, repeat, _attached(build_clerk(plan, run, number), run), rng, plan.rest_s)

    async def read_once(self) -> None:
        """Answer once."""
        await self._run("Entry 0: file it.", recorder=None)

    async def press(self, recorder: CallRecorder, done: asyncio.Event) -> None:
        """Answer and rest until `done`."""
        await asyncio.sleep(self.rng.uniform(0.0, self.rest_s[1]))
        turn = 0
        while not done.is_set():
            turn += 1
            await self._run(f"Entry {self.repeat}-{turn}: file it.", recorder=recorder)
            await asyncio.sleep(self.rng.uniform(*self.rest_s))

    async def _run(self, text: str, *, recorder: CallRecorder | None) -> None:
        await self.graph.ainvoke({"messages": [("user", text)]}, _config(f"press-{self.number}", recorder))


def _attached(graph: Any, run: ArmRun) -> Any:
    return graph if run.runtime is None else attach(graph, runtime=run.runtime)


def _config(thread_id: str, recorder: CallRecorder | None, *, recursion_limit: int = 25) -> RunnableConfig:
    return RunnableConfig(
        configurable={"thread_id": thread_id},
        callbacks=[] if recorder is None else [recorder],
        recursion_limit=recursion_limit,
    )


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


def build_clerk(plan: ToolPausePlan, run: ArmRun, number: int) -> Any:
    """Build one pressing thread's graph: a single node over a long context of its own."""
    model = run.model(max_tokens=plan.clerk_tokens)
    system = SystemMessage(f"You are clerk {number}. {passages(plan.prompt_words, seed=2000 + number)}")

    async def clerk(state: PressState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([system, *state["messages"]], config)]}

    builder = StateGraph(PressState)
    builder.add_node("clerk", clerk)
    builder.add_edge(START, "clerk")
    builder.add_edge("clerk", END)
    return builder.compile(checkpointer=InMemorySaver())
