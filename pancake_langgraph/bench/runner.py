"""Runs a workload: arms interleaved repeat by repeat, each from an empty pool, then one result."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

from pancake_langgraph._types import Outcome
from pancake_langgraph.bench.arms import ARM_TEXT, Arm, arm_run
from pancake_langgraph.bench.arms import ArmRun as ReadyArm
from pancake_langgraph.bench.machine import read_machine
from pancake_langgraph.bench.recorder import CallRecord, concurrency
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Progress, ServesArms
from pancake_langgraph.bench.statistics import compare_arms, describe_arms, percentile
from pancake_langgraph.ledger import ActionRecorded, ActionState, Event

logger = logging.getLogger(__name__)

PAIRS: tuple[tuple[str, str], ...] = (
    (Arm.PLAIN, Arm.PANCAKE),
    (Arm.REACTIVE, Arm.PANCAKE),
    (Arm.PLAIN, Arm.REACTIVE),
    (Arm.PANCAKE, Arm.ORACLE),
    (Arm.NO_HINTS, Arm.PANCAKE),
)


class Measured(Protocol):
    """What a workload gives back for one arm run."""

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """All model calls."""
        ...

    @property
    def program_s(self) -> tuple[float, ...]:
        """Wall time of each program."""
        ...

    @property
    def wall_s(self) -> float:
        """Wall time of the whole arm run."""
        ...


@dataclass(slots=True)
class ArmResult:
    """One arm run with what the runtime recorded beside it."""

    run: Measured
    events: tuple[Event, ...] = ()
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)

    @property
    def warm_tokens(self) -> int:
        """Tokens that warm-ups made the engine compute for the threads whose calls are counted."""
        counted = {call.label.rpartition("/")[0] for call in self.run.calls}
        return sum(
            event.computed_tokens or 0
            for event in self.events
            if isinstance(event, ActionRecorded) and event.state is ActionState.SETTLED and event.thread_id in counted
        )

    @property
    def submitted_actions(self) -> int:
        """Actions that were sent to the engine."""
        return sum(isinstance(event, ActionRecorded) and event.state is ActionState.SUBMITTED for event in self.events)


#: All arm runs of one point: one mapping per repeat.
Repeats = list[dict[Arm, ArmResult]]


async def run_arms(
    servers: ServesArms,
    workload: Callable[[ReadyArm, int], Awaitable[Measured]],
    *,
    arms: Sequence[Arm],
    repeats: int,
    point: str,
    on_progress: Progress,
) -> Repeats:
    """Run every arm once per repeat, in an order that rotates, so that drift of the machine hits all arms alike.

    Each arm keeps one cache salt over its repeats: what its threads always read (their system prompts) may come from
    the tier in later repeats, as in a running service; what is new in a repeat is new in its prompts.
    """
    done: Repeats = []
    for repeat in range(repeats):
        results: dict[Arm, ArmResult] = {}
        shift = repeat % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            on_progress(f"{point}: repeat {repeat + 1} of {repeats}, {arm}")
            await asyncio.to_thread(servers.reset, arm)
            results[arm] = await _run_arm(servers, workload, arm, repeat, salt=f"{point}-{arm}")
        done.append(results)
    return done


async def _run_arm(
    servers: ServesArms, workload: Callable[[ReadyArm, int], Awaitable[Measured]], arm: Arm, repeat: int, *, salt: str
) -> ArmResult:
    ready = await asyncio.to_thread(arm_run, arm, servers, cache_salt=salt)
    runtime = ready.runtime
    try:
        run = await workload(ready, repeat)
        if runtime is None:
            return ArmResult(run)
        if not await asyncio.to_thread(runtime.wait_idle):
            logger.warning("the runtime was still at work when its arm ended; what it does now is not counted")
    finally:
        if runtime is not None:
            await asyncio.to_thread(runtime.close)
    runtime.check_integrity()
    return ArmResult(run, runtime.ledger.events(), runtime.ledger.statistics().outcomes)


def samples_of(
    repeats: Repeats, *, chosen: Callable[[dict[Arm, ArmResult], Arm], Sequence[CallRecord]]
) -> dict[str, dict[str, list[list[float]]]]:
    """Return `arm -> metric -> values per repeat`; `chosen` picks the calls whose times count."""
    samples: dict[str, dict[str, list[list[float]]]] = {}
    for arm in repeats[0]:
        rows: dict[str, list[list[float]]] = {}
        for results in repeats:
            result = results[arm]
            calls = chosen(results, arm)
            run = result.run
            values: dict[str, list[float]] = {
                "ttft_s": [call.ttft_s for call in calls],
                "tpot_s": [tpot for call in calls if (tpot := call.tpot_s) is not None],
                "program_s": list(run.program_s),
                "prefilled_tokens": [float(sum(c.prefilled_tokens for c in run.calls) + result.warm_tokens)],
                "output_tokens_per_s": [sum(c.output_tokens for c in run.calls) / run.wall_s],
                "programs_per_min": [60.0 * len(run.program_s) / run.wall_s],
            }
            for metric, row in values.items():
                rows.setdefault(metric, []).append(row)
        samples[str(arm)] = rows
    return samples


def outcomes_of(repeats: Repeats) -> dict[str, int]:
    """Return how all actions of the pancake arm ended."""
    total: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
    for results in repeats:
        if (result := results.get(Arm.PANCAKE)) is not None:
            total.update({outcome.value: count for outcome, count in result.outcomes.items()})
    return dict(total)


def build_result(
    workload: str,
    repeats: Repeats,
    samples: dict[str, dict[str, list[list[float]]]],
    *,
    notes: Sequence[str],
    summary: Mapping[str, Any],
    sweep: Sequence[Mapping[str, Any]] | None = None,
) -> BenchResult:
    """Compose the documented result."""
    pairs = [pair for pair in PAIRS if set(pair) <= set(samples)]
    comparison = compare_arms(samples, pairs=pairs, percentile_names=("p50", "p99"))
    return BenchResult(
        workload=workload,
        version=metadata.version("pancake-langgraph"),
        machine=read_machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        repeats=len(repeats),
        arms=describe_arms(samples),
        ratios=comparison.ratios,
        outcomes=outcomes_of(repeats),
        notes=(*notes, *comparison.notes),
        summary=summary,
        sweep=None if sweep is None else tuple(sweep),
    )


def differing_answers(repeats: Repeats) -> dict[str, int]:
    """Count calls whose answer differs from the plain arm's at the same label, per arm; labels both arms have."""
    differing: Counter[str] = Counter()
    for results in repeats:
        if Arm.PLAIN not in results:
            continue
        expected = {call.label: call.text for call in results[Arm.PLAIN].run.calls}
        for arm, result in results.items():
            differing[str(arm)] += sum(
                call.label in expected and expected[call.label] != call.text for call in result.run.calls
            )
    return dict(differing)


def gap_closed(
    samples: dict[str, dict[str, list[list[float]]]], metric: str, *, base: Arm = Arm.REACTIVE
) -> dict[str, Any]:
    """Return how much of the way from an arm to the oracle is gone at the median, if those arms ran."""
    if not {base, Arm.PANCAKE, Arm.ORACLE} <= set(samples):
        return {}

    def pooled(arm: Arm) -> float:
        return percentile([value for row in samples[arm][metric] for value in row], 50.0)

    gap = pooled(base) - pooled(Arm.ORACLE)
    return {"gap_closed_ratio": (pooled(base) - pooled(Arm.PANCAKE)) / gap if gap > 0 else None}


def achieved_concurrency(repeats: Repeats) -> dict[str, Any]:
    """Return the mean number of calls under way, per arm, as an entry of a summary."""
    return {
        "achieved_concurrency": {
            str(arm): round(sum(concurrency(list(r[arm].run.calls)) for r in repeats) / len(repeats), 2)
            for arm in repeats[0]
        }
    }


def arm_notes(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Return a note per arm that says what it is."""
    return tuple(f"{arm}: {ARM_TEXT[arm]}." for arm in arms)
