"""Workload `no-pressure`: one thread, a pool far larger than needed, tools that return at once.

There is nothing to win here.  The question is what the runtime costs when it is useless.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pancake_langgraph.bench.arms import ArmRun
from pancake_langgraph.bench.recorder import CallRecord, CallRecorder
from pancake_langgraph.bench.tool_pause import ToolPausePlan, build_agent
from pancake_langgraph.runtime import attach


@dataclass(frozen=True, slots=True)
class NoPressureRun:
    """What one arm did once."""

    calls: tuple[CallRecord, ...]
    program_s: tuple[float, ...]
    wall_s: float


async def run_no_pressure(plan: ToolPausePlan, run: ArmRun, *, repeat: int) -> NoPressureRun:
    """Run one agent with instant tools, `plan.num_pauses` times around the loop; its prompt has been read before."""
    recorder = CallRecorder()
    graph = build_agent(plan, run, number=repeat % 7, pauses_s=[0.0] * plan.num_pauses)
    if run.runtime is not None:
        graph = attach(graph, runtime=run.runtime)
    await graph.ainvoke(
        {"messages": [("user", "You will get a job.")], "turns": plan.num_pauses},
        {"configurable": {"thread_id": "agent-0-before"}},
    )
    started_s = time.perf_counter()
    await graph.ainvoke(
        {"messages": [("user", f"Job {repeat}: look at it and say what you found.")], "turns": 0},
        {"configurable": {"thread_id": "agent-0"}, "callbacks": [recorder], "recursion_limit": 100},
    )
    elapsed_s = time.perf_counter() - started_s
    return NoPressureRun(tuple(recorder.records), (elapsed_s,), elapsed_s)
