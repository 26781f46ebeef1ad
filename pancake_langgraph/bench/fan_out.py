"""Workload `fan-out`: a planner sends parts of a job to one to eight workers that share one long context.

Planner, workers and the agent that gathers have a context each; the pool does not hold all three.  While the planner
writes, the context that all workers begin with can be brought back once for all of them.  Two workers have worked a few
times before the clock starts, in other threads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send

from pancake_langgraph.bench.arms import ArmRun
from pancake_langgraph.bench.recorder import CallRecord, CallRecorder
from pancake_langgraph.bench.text import passages
from pancake_langgraph.runtime import attach


@dataclass(frozen=True, slots=True)
class FanOutPlan:
    """Size of the workload: one program per entry of `widths`, its number of workers.

    `prompt_words` words make one system prompt (about 1.5 tokens each); the planner answers with `plan_tokens`, the
    others with `answer_tokens`.  A job with two workers is done `practice` times before the clock starts.
    """

    widths: tuple[int, ...] = (1, 3, 8)
    prompt_words: int = 720
    plan_tokens: int = 12
    answer_tokens: int = 2
    practice: int = 3


@dataclass(frozen=True, slots=True)
class FanOutRun:
    """What one arm did once."""

    calls: tuple[CallRecord, ...]
    program_s: tuple[float, ...]
    wall_s: float


class JobState(TypedDict):
    """State of a job's thread."""

    messages: Annotated[list[AnyMessage], add_messages]
    width: int


async def run_fan_out(plan: FanOutPlan, run: ArmRun, *, repeat: int) -> FanOutRun:
    """Run jobs unrecorded, then one per width on the clock."""
    graph = build_job(plan, run)
    if run.runtime is not None:
        graph = attach(graph, runtime=run.runtime)
    recorder = CallRecorder()
    for number in range(plan.practice):
        await _work(graph, f"before-{repeat}-{number}", f"Job {repeat}: plan letters {number}.", 2, [])
    started_s = time.perf_counter()
    program_s = []
    for width in plan.widths:
        program_started_s = time.perf_counter()
        await _work(graph, f"width-{width}", f"Job {repeat}: plan {width} letters.", width, [recorder])
        program_s.append(time.perf_counter() - program_started_s)
    return FanOutRun(tuple(recorder.records), tuple(program_s), time.perf_counter() - started_s)


async def _work(graph: Any, thread_id: str, text: str, width: int, callbacks: list[Any]) -> None:
    config = RunnableConfig(configurable={"thread_id": thread_id}, callbacks=callbacks)
    await graph.ainvoke({"messages": [("user", text)], "width": width}, config)


def build_job(plan: FanOutPlan, run: ArmRun) -> Any:
    """Build the graph: planner, workers, the one that gathers."""
    builder = StateGraph(JobState)
    for number, (agent, max_tokens) in enumerate(
        (("planner", plan.plan_tokens), ("worker", plan.answer_tokens), ("gatherer", plan.answer_tokens))
    ):
        builder.add_node(agent, _agent(plan, run, agent, seed=4000 + number, max_tokens=max_tokens))
    builder.add_edge(START, "planner")
    builder.add_conditional_edges("planner", _parts, ["worker"])
    builder.add_edge("worker", "gatherer")
    builder.add_edge("gatherer", END)
    return builder.compile(checkpointer=InMemorySaver())


def _agent(plan: FanOutPlan, run: ArmRun, agent: str, *, seed: int, max_tokens: int) -> Any:
    model = run.model(max_tokens=max_tokens)
    system = SystemMessage(f"You are the {agent} of a job. {passages(plan.prompt_words, seed=seed)}")

    async def work(state: JobState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([system, *state["messages"]], config)]}

    return work


def _parts(state: JobState) -> list[Send]:
    return [
        Send("worker", {"messages": [*state["messages"], ("user", f"Write letter {number}.")], "width": 0})
        for number in range(state["width"])
    ]
