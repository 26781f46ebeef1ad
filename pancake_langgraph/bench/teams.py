"""The benches `handoff` and `fan-out`: a few agents whose contexts do not fit into the pool together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from pancake_langgraph.bench.arms import ArmRun
from pancake_langgraph.bench.fan_out import FanOutPlan, run_fan_out
from pancake_langgraph.bench.handoff import HandoffPlan, run_handoff
from pancake_langgraph.bench.options import ARMS, BenchOptions, chosen_arms
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.runner import (
    ArmResult,
    Measured,
    achieved_concurrency,
    arm_notes,
    build_result,
    differing_answers,
    gap_closed,
    run_arms,
    samples_of,
)
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Progress, Servers

#: Pools of workloads whose agents are few: smaller than their contexts together, larger than any two.
SMALL_POOL_TOKENS: Final[Mapping[str, int]] = {"handoff": 3_840, "fan-out": 2_560}


async def handoff(servers: Servers, options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `handoff`."""
    plan = HandoffPlan()
    return await _multi_agent(
        "handoff",
        servers,
        options,
        on_progress,
        workload=lambda run, repeat: run_handoff(plan, run, repeat=repeat),
        num_contexts=1 + len(plan.agents),
        note=f"A supervisor hands over to {len(plan.agents)} agents in turn; ttft_s counts all calls but the first.",
    )


async def fan_out(servers: Servers, options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `fan-out`."""
    plan = FanOutPlan()
    return await _multi_agent(
        "fan-out",
        servers,
        options,
        on_progress,
        workload=lambda run, repeat: run_fan_out(plan, run, repeat=repeat),
        num_contexts=3,
        note=(
            f"A planner sends to {', '.join(map(str, plan.widths))} workers over one shared context; "
            "ttft_s counts all calls but the first of each program."
        ),
    )


async def _multi_agent(
    name: str,
    servers: Servers,
    options: BenchOptions,
    on_progress: Progress,
    *,
    workload: Callable[[ArmRun, int], Awaitable[Measured]],
    num_contexts: int,
    note: str,
) -> BenchResult:
    """Run a workload of a few agents that do not fit into the pool together."""
    arms = chosen_arms(ARMS, options.arms)
    repeats = await run_arms(servers, workload, arms=arms, repeats=options.repeats, point=name, on_progress=on_progress)
    samples = samples_of(repeats, chosen=lambda results, arm: later_calls(results[arm]))
    calls = [call for results in repeats for call in next(iter(results.values())).run.calls]
    mean_tokens = sum(call.prompt_tokens for call in calls) / len(calls)
    pool = f"Pool of {SMALL_POOL_TOKENS[name]:,} tokens; {num_contexts} contexts of {mean_tokens:,.0f} on average."
    return build_result(
        name,
        repeats,
        samples,
        notes=(*arm_notes(arms), note, pool, "program_s is one run of the graph from START to END."),
        summary={
            **gap_closed(samples, "ttft_s"),
            "calls_with_other_words_than_plain": differing_answers(repeats),
            **achieved_concurrency(repeats),
        },
    )


def later_calls(result: ArmResult) -> list[CallRecord]:
    """Return the calls of all programs but the first of each."""
    return [call for call in result.run.calls if not call.label.endswith("/0")]
