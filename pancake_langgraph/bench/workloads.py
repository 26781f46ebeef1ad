"""The benches by name: what to start, which points to run, and how to read the result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.arms import Arm
from pancake_langgraph.bench.floor import cold_versus_hit
from pancake_langgraph.bench.forecast import FORECAST_ARMS, ForecastPlan, run_forecast
from pancake_langgraph.bench.hold import hold
from pancake_langgraph.bench.kv_quality import KvMode, KvQualityPlan, run_kv_quality
from pancake_langgraph.bench.no_pressure import run_no_pressure
from pancake_langgraph.bench.options import (
    ARMS,
    BLOCK_SIZE_TOKENS,
    HOLD_ARMS,
    KV_TOKEN_BYTES,
    BenchOptions,
    chosen_arms,
)
from pancake_langgraph.bench.pinning import limit_threads
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.runner import (
    ArmResult,
    Repeats,
    achieved_concurrency,
    arm_notes,
    build_result,
    differing_answers,
    gap_closed,
    outcomes_of,
    run_arms,
    samples_of,
)
from pancake_langgraph.bench.saver import SaverBenchPlan, run_saver_bench
from pancake_langgraph.bench.saver_arms import SaverArm
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Progress, Servers, ServersPlan
from pancake_langgraph.bench.statistics import percentile
from pancake_langgraph.bench.teams import SMALL_POOL_TOKENS, fan_out, handoff
from pancake_langgraph.bench.tier_arms import TierArm
from pancake_langgraph.bench.tiers import TiersPlan, run_tiers
from pancake_langgraph.bench.tool_pause import ToolPausePlan, run_tool_pause
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.launch.stack import EngineProcess
from pancake_langgraph.weights.smollm import prepare_smollm
from pancake_langgraph.weights.tiny import build_tiny_llama

__all__ = ["ARMS", "BENCHES", "FORECAST_BENCH", "SAVER_BENCH", "BenchOptions", "chosen_arms", "run_bench"]

POOL_TOKENS: Final = 10_500
SMALL_WINDOW_TOKENS: Final = 2_048
#: Share of its prompt under which a call counts as having lost its context.
LOST_RATIO: Final = 0.5
#: Pauses per agent: a repeat of the main point has enough lost calls for a median of its own; a point of the sweep, of
#: which there is mostly one repeat, only places itself.
MAIN_PAUSES, SWEEP_PAUSES = 4, 2
#: Points of the sweep beside the main one: from no pressure at all to a live set of twice the pool.
SWEEP_PRESSING: Final = (0, 1, 4, 6)


def servers_plan(options: BenchOptions, name: str = "tool-pause") -> ServersPlan:
    """Return what to start for a bench; the tier's settings and why: docs/benchmarks.md."""
    small = SMALL_POOL_TOKENS.get(name)
    return ServersPlan(
        model_dir=options.model_dir or prepare_smollm(),
        pool_tokens=small or POOL_TOKENS,
        max_model_len_tokens=SMALL_WINDOW_TOKENS if small else 4_096,
        resident_pool_tokens=4 * POOL_TOKENS,
        kv_token_bytes=KV_TOKEN_BYTES[options.dtype],
        dtype=options.dtype,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        chunk_tokens=options.chunk_tokens,
        num_threads=options.num_threads,
        l1_bytes=2_000_000_000,
        chat_template=Path(__file__).resolve().parent.parent / "weights" / "chat_template_tools.jinja",
    )


async def tool_pause(servers: Servers, options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `tool-pause`: the main point, then the sweep of pressure."""
    plan = ToolPausePlan(num_pauses=MAIN_PAUSES)
    arms = chosen_arms(ARMS, options.arms)
    main = await _tool_pause_point(servers, plan, arms, options.repeats, on_progress)
    sweep = [_point_row(plan, main)]
    for num_pressing in SWEEP_PRESSING if options.sweep_repeats else ():
        point = replace(plan, num_pressing=num_pressing, num_pauses=SWEEP_PAUSES)
        done = await _tool_pause_point(servers, point, arms, options.sweep_repeats, on_progress)
        sweep.append(_point_row(point, done))
    samples = samples_of(main, chosen=lost_calls)
    return build_result(
        "tool-pause",
        main,
        samples,
        notes=(*arm_notes(arms), *_tool_pause_notes(plan, main)),
        summary={
            **_tool_pause_summary(main, samples),
            **await _floor(servers, plan, arms, options.repeats, on_progress),
        },
        sweep=sorted(sweep, key=lambda row: row["pressing_threads"]),
    )


async def no_pressure(servers: Servers, options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `no-pressure`."""
    plan = ToolPausePlan(num_pauses=6)
    arms = chosen_arms(ARMS, options.arms)
    repeats = await run_arms(
        servers,
        lambda run, repeat: run_no_pressure(plan, run, repeat=repeat),
        arms=arms,
        repeats=options.repeats,
        point="no-pressure",
        on_progress=on_progress,
    )
    samples = samples_of(repeats, chosen=lambda results, arm: results[arm].run.calls)
    ours = [results[Arm.PANCAKE] for results in repeats if Arm.PANCAKE in results]
    calls = sum(len(result.run.calls) for result in ours)
    return build_result(
        "no-pressure",
        repeats,
        samples,
        notes=(*arm_notes(arms), "One thread, instant tools, a pool far larger than its context: nothing can be won."),
        summary={
            "warm_ups_per_call": sum(result.submitted_actions for result in ours) / calls if calls else None,
            "calls_with_other_words_than_plain": differing_answers(repeats),
            **achieved_concurrency(repeats),
        },
    )


Workload = Callable[[Servers, BenchOptions, Progress], Awaitable[BenchResult]]

BENCHES: Final[Mapping[str, Workload]] = {
    "fan-out": fan_out,
    "handoff": handoff,
    "hold": partial(hold, pool_tokens=POOL_TOKENS),
    "no-pressure": no_pressure,
    "tool-pause": tool_pause,
}
HOLD_BENCH: Final = "hold"
#: The benches that need no engine.
SAVER_BENCH: Final = "saver"
FORECAST_BENCH: Final = "forecast"
KV_QUALITY_BENCH: Final = "kv-quality"
#: It starts its own engines, one for each cache server.
TIERS_BENCH: Final = "tiers"
#: They compare indexes and stores in this process, and need numpy.
VECTOR_BENCHES: Final = ("agent-memory", "drafts", "retrieval", "retrieval-load", "retrieval-node")
OTHER_BENCHES: Final = (FORECAST_BENCH, KV_QUALITY_BENCH, SAVER_BENCH, TIERS_BENCH, *VECTOR_BENCHES)


def run_bench(name: str, options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Start the servers that a workload needs, run it, stop the servers.

    Raises:
        ConfigError: if the name is unknown, or a package that an arm needs is not installed.
        LaunchError: if a server does not start.
    """
    if name == SAVER_BENCH:
        saver_arms = chosen_arms(tuple(SaverArm), options.arms)
        return run_saver_bench(SaverBenchPlan(options.turns, options.repeats, saver_arms), on_progress)
    if name == FORECAST_BENCH:
        return _forecast(options, on_progress)
    if name == TIERS_BENCH:
        tier_arms = chosen_arms(tuple(TierArm), options.arms)
        plan = TiersPlan(servers_plan(options, name), options.repeats, tier_arms, KV_TOKEN_BYTES["bfloat16"])
        return run_tiers(plan, on_progress)
    if name in VECTOR_BENCHES:
        return _vector_bench(name, options, on_progress)
    if name == KV_QUALITY_BENCH:
        return _kv_quality(options, on_progress)
    if name not in BENCHES:
        names = sorted([*BENCHES, *OTHER_BENCHES])
        raise ConfigError(f"unknown workload {name!r}; allowed are {', '.join(names)}")

    chosen_arms(
        HOLD_ARMS if name == HOLD_BENCH else ARMS, options.arms
    )  # a wrong name is said before minutes of starting servers

    async def run(servers: Servers) -> BenchResult:
        return await BENCHES[name](servers, options, on_progress)

    with Servers(servers_plan(options, name), on_progress=on_progress) as servers:
        return asyncio.run(run(servers))


def _vector_bench(name: str, options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run a bench of indexes, with an engine only if it asks for one."""
    limit_threads()  # before numpy and Faiss are imported
    try:
        from pancake_langgraph.bench import vector_benches
    except ImportError as exc:
        raise ConfigError(
            f"{name} needs the package {exc.name}, which is not installed; pip install {exc.name}"
        ) from exc

    def start_engine() -> EngineProcess:
        chosen = options
        if name == "agent-memory" and options.live_model == "tiny":
            chosen = replace(options, model_dir=build_tiny_llama(cache_dir() / "models" / "tiny-llama"))
        engine_plan = servers_plan(chosen).engine(pool_tokens=POOL_TOKENS, tier=None)
        on_progress("starting an engine")
        return EngineProcess(engine_plan, name=f"{name} engine")

    return vector_benches.run(name, options, on_progress, start_engine)


def _kv_quality(options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `kv-quality`, without an engine."""
    plan = KvQualityPlan(
        model_dir=options.model_dir or prepare_smollm(),
        num_prompts=options.prompts,
        modes=chosen_arms(tuple(KvMode), options.arms),
        dtype=options.dtype,
        chunk_tokens=options.chunk_tokens,
        num_threads=options.num_threads,
    )
    return run_kv_quality(plan, on_progress)


def _forecast(options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `forecast`, with an engine only if real models shall route."""
    chosen_arms(FORECAST_ARMS, options.arms)
    plan = ForecastPlan(options.runs, options.repeats, options.cost_runs)
    if not options.real_routers:
        return run_forecast(plan, on_progress)
    engine_plan = servers_plan(options).engine(pool_tokens=POOL_TOKENS, tier=None)
    on_progress("starting an engine")
    with EngineProcess(engine_plan, name="forecast engine") as engine:
        return run_forecast(plan, on_progress, real=(engine.base_url, engine.plan.served_model_name))


def lost_calls(results: dict[Arm, ArmResult], arm: Arm) -> Sequence[CallRecord]:
    """Return an arm's calls after a pause whose context the plain arm had lost in the same repeat.

    Without a plain arm nobody knows which were lost, and all calls after a pause are returned.
    """
    if Arm.PLAIN not in results:
        return list(_resumed(results[arm]).values())
    lost = {
        label
        for label, call in _resumed(results[Arm.PLAIN]).items()
        if (call.cached_tokens or 0) < LOST_RATIO * call.prompt_tokens
    }
    return [call for label, call in _resumed(results[arm]).items() if label in lost]


def _resumed(result: ArmResult) -> dict[str, CallRecord]:
    return {c.label: c for c in result.run.calls if c.label.startswith("agent-") and not c.label.endswith("/0")}


async def _floor(
    servers: Servers, plan: ToolPausePlan, arms: Sequence[Arm], repeat: int, on_progress: Progress
) -> dict[str, Any]:
    """Return how often the plain engine differs from itself, if the plain arm runs."""
    if Arm.PLAIN not in arms:
        return {}
    on_progress("the plain engine against itself: cold prompt and cache hit")
    floor = await cold_versus_hit(servers, prompt_words=plan.prompt_words, repeat=repeat)
    return {"plain_other_words_cold_than_hit": floor}


async def _tool_pause_point(
    servers: Servers, plan: ToolPausePlan, arms: Sequence[Arm], repeats: int, on_progress: Progress
) -> Repeats:
    return await run_arms(
        servers,
        lambda run, repeat: run_tool_pause(plan, run, repeat=repeat),
        arms=arms,
        repeats=repeats,
        point=f"pressing-{plan.num_pressing}",
        on_progress=on_progress,
    )


def _live_tokens(plan: ToolPausePlan, repeats: Repeats) -> int:
    calls = [call for results in repeats for call in next(iter(results.values())).run.calls]
    mean_tokens = sum(call.prompt_tokens for call in calls) / len(calls)
    return round(mean_tokens * (plan.num_agents + plan.num_pressing))


def _point_row(plan: ToolPausePlan, repeats: Repeats) -> dict[str, Any]:
    """Return one row of the sweep: all calls after a pause, lost or not, so that the region of no gain shows."""
    row: dict[str, Any] = {
        "pressing_threads": plan.num_pressing,
        "pool_over_live": round(POOL_TOKENS / _live_tokens(plan, repeats), 2),
        "repeats": len(repeats),
        "lost_by_plain": sum(_lost_counts(repeats)),
        "calls_after_pause": sum(len(_resumed(next(iter(results.values())))) for results in repeats),
    }
    for arm in repeats[0]:
        ttft_s = [call.ttft_s for results in repeats for call in _resumed(results[arm]).values()]
        row[f"{arm}_ttft_p50_s"] = round(percentile(ttft_s, 50.0), 4)
        row[f"{arm}_ttft_p99_s"] = round(percentile(ttft_s, 99.0), 4)
    row["outcomes"] = outcomes_of(repeats)
    return row


def _lost_counts(repeats: Repeats) -> list[int]:
    """Return how many calls the plain arm lost in each repeat; nothing if it did not run."""
    return [len(lost_calls(results, Arm.PLAIN)) for results in repeats if Arm.PLAIN in results]


def _tool_pause_summary(repeats: Repeats, samples: dict[str, dict[str, list[list[float]]]]) -> dict[str, Any]:
    def prefilled(arm: Arm) -> float:
        return sum(value for row in samples[arm]["prefilled_tokens"] for value in row)

    counts = _lost_counts(repeats)
    summary: dict[str, Any] = {
        "calls_lost_by_plain": counts,
        "calls_with_other_words_than_plain": differing_answers(repeats),
        **achieved_concurrency(repeats),
    }
    if {Arm.PLAIN, Arm.PANCAKE} <= set(samples):
        summary["prefilled_tokens_pancake_over_plain"] = prefilled(Arm.PANCAKE) / prefilled(Arm.PLAIN)
    if sum(counts):
        summary |= gap_closed(samples, "ttft_s")
    return summary


def _tool_pause_notes(plan: ToolPausePlan, repeats: Repeats) -> tuple[str, ...]:
    live_tokens = _live_tokens(plan, repeats)
    return (
        (
            f"{plan.num_agents} agents with tools of {plan.pause_s[0]:g}-{plan.pause_s[1]:g} s, "
            f"{plan.num_pressing} pressing threads, pool {POOL_TOKENS:,} of {live_tokens:,} live tokens."
        ),
        (
            "ttft_s counts calls after a pause whose context the plain arm had lost in the same repeat."
            if Arm.PLAIN in repeats[0]
            else "ttft_s counts all calls after a pause: without the plain arm nobody knows which were lost."
        ),
        "program_s is one agent's whole loop, its tools' time included.",
    )
