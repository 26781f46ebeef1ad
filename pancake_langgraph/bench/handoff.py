"""Workload `handoff`: a supervisor hands over to four agents, one after the other, by tool calls.

The pool is smaller than the five contexts together, so that an agent's context is lost before its turn comes again.
The supervisor names the next agent in the first piece of its tool call; what follows of the call is the time in which
that agent's context can be brought back.  The same team has worked a few times before the clock starts, in other
threads: a service that has just learnt how its team works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.bench.arms import ArmRun
from pancake_langgraph.bench.recorder import CallRecord, CallRecorder
from pancake_langgraph.bench.text import passages
from pancake_langgraph.runtime import attach


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Size of the workload.

    `prompt_words` words make one system prompt (about 1.5 tokens each); an agent answers with `answer_tokens`, a
    handoff has at most `handoff_tokens`, enough for a whole call.  The team works `practice` times before the clock
    starts.
    """

    agents: tuple[str, ...] = ("finder", "counter", "writer", "checker")
    prompt_words: int = 720
    answer_tokens: int = 4
    handoff_tokens: int = 48
    practice: int = 3


@dataclass(frozen=True, slots=True)
class HandoffRun:
    """What one arm did once."""

    calls: tuple[CallRecord, ...]
    program_s: tuple[float, ...]
    wall_s: float


class TeamState(TypedDict):
    """State of a team's thread; `handed` counts the handoffs."""

    messages: Annotated[list[AnyMessage], add_messages]
    handed: int


async def run_handoff(plan: HandoffPlan, run: ArmRun, *, repeat: int) -> HandoffRun:
    """Let the team practice unrecorded, then work once on the clock."""
    graph = build_team(plan, run)
    if run.runtime is not None:
        graph = attach(graph, runtime=run.runtime)
    recorder = CallRecorder()
    for number in range(plan.practice):
        await _work(graph, f"before-{repeat}-{number}", f"Job {repeat}: look at letter {number}.", [])
    started_s = time.perf_counter()
    await _work(graph, "team", f"Job {repeat}: look at the last letter.", [recorder])
    elapsed_s = time.perf_counter() - started_s
    return HandoffRun(tuple(recorder.records), (elapsed_s,), elapsed_s)


async def _work(graph: Any, thread_id: str, text: str, callbacks: list[Any]) -> None:
    config = RunnableConfig(configurable={"thread_id": thread_id}, callbacks=callbacks, recursion_limit=50)
    await graph.ainvoke({"messages": [("user", text)], "handed": 0}, config)


def build_team(plan: HandoffPlan, run: ArmRun) -> Any:
    """Build the graph: the supervisor, its agents, and the way back from each."""
    tools = [_handoff_schema(agent) for agent in plan.agents]
    model = run.model(max_tokens=plan.handoff_tokens)
    closing = run.model(max_tokens=plan.answer_tokens).bind(tools=tools, tool_choice="none")
    system = SystemMessage(f"You are the head of a team. {passages(plan.prompt_words, seed=3000)}")

    async def supervisor(state: TeamState, config: RunnableConfig) -> dict[str, Any]:
        prompt = [system, *state["messages"]]
        if state["handed"] == len(plan.agents):
            return {"messages": [await closing.ainvoke(prompt, config)], "handed": state["handed"] + 1}
        name = tools[state["handed"]]["function"]["name"]
        handing = model.bind(tools=tools, tool_choice={"type": "function", "function": {"name": name}})
        answer = await handing.ainvoke(prompt, config)
        calls = getattr(answer, "tool_calls", [])
        done = [ToolMessage("Handed over.", tool_call_id=call["id"]) for call in calls]
        return {"messages": [answer, *done], "handed": state["handed"] + 1}

    builder = StateGraph(TeamState)
    builder.add_node("supervisor", supervisor)
    for number, agent in enumerate(plan.agents):
        builder.add_node(agent, _agent(plan, run, agent, number))
        builder.add_edge(agent, "supervisor")
    builder.add_edge(START, "supervisor")
    builder.add_conditional_edges(
        "supervisor",
        lambda state: plan.agents[state["handed"] - 1] if state["handed"] <= len(plan.agents) else END,
        [*plan.agents, END],
    )
    return builder.compile(checkpointer=InMemorySaver())


def _agent(plan: HandoffPlan, run: ArmRun, agent: str, number: int) -> Any:
    model = run.model(max_tokens=plan.answer_tokens)
    system = SystemMessage(f"You are the {agent} of a team. {passages(plan.prompt_words, seed=3001 + number)}")

    async def work(state: TeamState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([system, *state["messages"]], config)]}

    return work


def _handoff_schema(agent: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": f"transfer_to_{agent}",
            "description": f"Hand the job over to the {agent}.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"urgency": {"type": "string", "enum": ["usual", "high"]}},
                "required": ["urgency"],
                "additionalProperties": False,
            },
        },
    }
