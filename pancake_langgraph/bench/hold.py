"""Workload `hold`: agents come back after pauses of 1 to 20 s while others press on the engine's own pool.

The agents and pressing threads are those of `tool-pause`.  What counts is what a pause costs (tokens of the agent's
context that the engine has to compute again, or that have to be copied back from the tier) and what holding costs the
others: their time to first token.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx

from pancake_langgraph.bench.arms import Arm, ArmRun
from pancake_langgraph.bench.options import BLOCK_SIZE_TOKENS, HOLD_ARMS, BenchOptions, chosen_arms
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.runner import (
    Repeats,
    achieved_concurrency,
    arm_notes,
    build_result,
    differing_answers,
    outcomes_of,
    run_arms,
    samples_of,
)
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Progress, Servers
from pancake_langgraph.bench.statistics import percentile
from pancake_langgraph.bench.tool_pause import ToolPausePlan, ToolPauseRun, run_tool_pause
from pancake_langgraph.engines._compat import METRIC_TIER_HITS, METRICS_ROUTE, gauge
from pancake_langgraph.ledger import ActionRecorded, ActionState, HintAnswered

#: Prompts of pressing threads are a fifth of the pool: these press with about 0.8, 1 and 1.25 of it.
SWEEP_PRESSING: Final = (4, 6)
MAIN_PRESSING: Final = 5

Samples = dict[str, dict[str, list[list[float]]]]


@dataclass(frozen=True, slots=True)
class HoldRun:
    """What one arm did once; `restored_tokens` were copied from the tier into the pool, for whomever."""

    done: ToolPauseRun
    restored_tokens: float

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """All model calls."""
        return self.done.calls

    @property
    def program_s(self) -> tuple[float, ...]:
        """Wall time of each agent's loop."""
        return self.done.program_s

    @property
    def wall_s(self) -> float:
        """Wall time of the whole arm run."""
        return self.done.wall_s


async def hold(servers: Servers, options: BenchOptions, on_progress: Progress, *, pool_tokens: int) -> BenchResult:
    """Run `hold`: the main point, then the sweep of pressure."""
    plan = ToolPausePlan(num_pressing=MAIN_PRESSING, pause_s=(1.0, 20.0))
    arms = chosen_arms(HOLD_ARMS, options.arms)
    main = await _point(servers, plan, arms, options.repeats, on_progress)
    sweep = [_row(plan, main, pool_tokens)]
    for num_pressing in SWEEP_PRESSING if options.sweep_repeats else ():
        point = replace(plan, num_pressing=num_pressing)
        done = await _point(servers, point, arms, options.sweep_repeats, on_progress)
        sweep.append(_row(point, done, pool_tokens))
    return build_result(
        "hold",
        main,
        hold_samples(main),
        notes=(
            *arm_notes(arms),
            (
                f"{plan.num_agents} agents with tools of {plan.pause_s[0]:g}-{plan.pause_s[1]:g} s, "
                f"{plan.num_pressing} pressing threads, pool of {pool_tokens:,} tokens."
            ),
            "ttft_s counts all calls after a pause, others_ttft_s the calls of pressing threads.",
            "reprefilled_tokens: of what a call had read before its pause, what the engine computed again.",
        ),
        summary={
            **hold_figures(main),
            "calls_with_other_words_than_plain": differing_answers(main),
            **achieved_concurrency(main),
        },
        sweep=sorted(sweep, key=lambda row: row["pressing_threads"]),
    )


async def _point(
    servers: Servers, plan: ToolPausePlan, arms: Sequence[Arm], repeats: int, on_progress: Progress
) -> Repeats:
    async def workload(run: ArmRun, repeat: int) -> HoldRun:
        before = await _restored_tokens(run)
        done = await run_tool_pause(plan, run, repeat=repeat)
        return HoldRun(done, await _restored_tokens(run) - before)

    return await run_arms(
        servers, workload, arms=arms, repeats=repeats, point=f"hold-{plan.num_pressing}", on_progress=on_progress
    )


async def _restored_tokens(run: ArmRun) -> float:
    def read() -> str:
        root = run.engine.base_url.removesuffix("/v1")
        return httpx.get(root + METRICS_ROUTE, timeout=10.0, trust_env=False).text

    return gauge(await asyncio.to_thread(read), METRIC_TIER_HITS) or 0.0


def reprefilled_tokens(calls: Sequence[CallRecord]) -> list[int]:
    """Return for each agent's call after a pause how much of what it had read before was computed again."""
    threads: dict[str, dict[int, CallRecord]] = defaultdict(dict)
    for call in calls:
        thread, _, number = call.label.rpartition("/")
        if thread.startswith("agent-"):
            threads[thread][int(number)] = call
    found: list[int] = []
    for turns in threads.values():
        for turn, call in sorted(turns.items()):
            if (before := turns.get(turn - 1)) is not None:
                known = before.prompt_tokens // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
                found.append(max(known - (call.cached_tokens or 0), 0))
    return found


def _resumed(calls: Sequence[CallRecord]) -> list[CallRecord]:
    return [call for call in calls if call.label.startswith("agent-") and not call.label.endswith("/0")]


def _others(calls: Sequence[CallRecord]) -> list[CallRecord]:
    return [call for call in calls if call.label.startswith("press-")]


def hold_samples(repeats: Repeats) -> Samples:
    """Return `arm -> metric -> values per repeat`."""
    samples = samples_of(repeats, chosen=lambda results, arm: _resumed(results[arm].run.calls))
    for results in repeats:
        for arm, result in results.items():
            rows = samples[str(arm)]
            calls = result.run.calls
            rows.setdefault("reprefilled_tokens", []).append([float(n) for n in reprefilled_tokens(calls)])
            rows.setdefault("others_ttft_s", []).append([call.ttft_s for call in _others(calls)])
    return samples


def hold_figures(repeats: Repeats) -> dict[str, Any]:
    """Return per arm what pauses and holding have cost, and ours against the others'."""
    figures: dict[str, dict[str, Any]] = {}
    for arm in repeats[0]:
        results = [each[arm] for each in repeats]
        others_s = [call.ttft_s for result in results for call in _others(result.run.calls)]
        figures[str(arm)] = {
            "reprefilled_tokens": sum(sum(reprefilled_tokens(result.run.calls)) for result in results),
            "restored_tokens": round(sum(getattr(result.run, "restored_tokens", 0.0) for result in results)),
            "requests_sent_to_hold": sum(result.submitted_actions for result in results),
            "hint_answers": _answers(event for result in results for event in result.events),
            "others_ttft_p50_s": round(percentile(others_s, 50.0), 4) if others_s else None,
            "others_ttft_p99_s": round(percentile(others_s, 99.0), 4) if others_s else None,
        }
    return {"per_arm": figures, **_against(figures)}


def _answers(events: Any) -> Mapping[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        if isinstance(event, HintAnswered):
            counts[f"{event.verb} {event.state}"] += 1
        elif isinstance(event, ActionRecorded) and event.state is ActionState.SUBMITTED:
            counts[f"sent {event.kind}"] += 1
    return dict(sorted(counts.items()))


def _against(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return our figures over those of each other arm; `None` where that one's are 0."""
    ours = figures.get(Arm.PANCAKE)
    found: dict[str, Any] = {}
    for arm, theirs in figures.items():
        if ours is None or arm == Arm.PANCAKE:
            continue
        for key, name in (("reprefilled_tokens", "reprefilled"), ("others_ttft_p99_s", "others_ttft_p99")):
            found[f"{name}_pancake_over_{arm}"] = round(ours[key] / theirs[key], 3) if theirs[key] else None
    return found


def _row(plan: ToolPausePlan, repeats: Repeats, pool_tokens: int) -> dict[str, Any]:
    """Return one row of the sweep."""
    others = [c for results in repeats for c in _others(next(iter(results.values())).run.calls)]
    mean_tokens = sum(call.prompt_tokens for call in others) / len(others) if others else 0.0
    row: dict[str, Any] = {
        "pressing_threads": plan.num_pressing,
        "others_over_pool": round(mean_tokens * plan.num_pressing / pool_tokens, 2),
        "repeats": len(repeats),
        **hold_figures(repeats),
        "outcomes": outcomes_of(repeats),
    }
    for arm in repeats[0]:
        ttft_s = [call.ttft_s for results in repeats for call in _resumed(results[arm].run.calls)]
        row[f"{arm}_ttft_p50_s"] = round(percentile(ttft_s, 50.0), 4)
        row[f"{arm}_ttft_p99_s"] = round(percentile(ttft_s, 99.0), 4)
    return row
