"""What the bench `hold` makes of its runs; the runs themselves are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pancake_langgraph._types import HintState, HintVerb
from pancake_langgraph.bench import hold as bench
from pancake_langgraph.bench.arms import Arm
from pancake_langgraph.bench.hold import HoldRun, hold_figures, reprefilled_tokens
from pancake_langgraph.bench.options import HOLD_ARMS, BenchOptions
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.runner import ArmResult, Repeats
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Servers
from pancake_langgraph.bench.tool_pause import ToolPauseRun
from pancake_langgraph.bench.workloads import BENCHES, run_bench
from pancake_langgraph.ledger import HintAnswered

CACHED = {Arm.PLAIN: 0, Arm.REACTIVE: 800, Arm.PANCAKE: 1_000, Arm.NO_HINTS: 900}


def call(label: str, *, prompt_tokens: int, cached_tokens: int | None, ttft_s: float = 0.5) -> CallRecord:
    return CallRecord(
        label=label,
        started_s=0.0,
        ttft_s=ttft_s,
        ended_s=ttft_s + 1.0,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=8,
        text="so",
    )


def run_of(arm: Arm) -> HoldRun:
    calls = (
        call("agent-0/0", prompt_tokens=1_000, cached_tokens=0),
        call("press-0/0", prompt_tokens=2_000, cached_tokens=0, ttft_s=2.0),
        call("press-0/1", prompt_tokens=2_000, cached_tokens=0, ttft_s=4.0 if arm is Arm.PLAIN else 2.0),
        call("agent-0/1", prompt_tokens=1_040, cached_tokens=CACHED[arm]),
    )
    return HoldRun(ToolPauseRun(calls, (3.0,), 3.0), 500.0)


def one_repeat(arms: Sequence[Arm]) -> dict[Arm, ArmResult]:
    return {arm: ArmResult(run_of(arm), (HintAnswered(0.0, "x", HintVerb.HOLD, HintState.CLIPPED, 9),)) for arm in arms}


def test_only_what_was_read_before_the_pause_counts_as_computed_again_in_whole_blocks() -> None:
    calls = [
        call("agent-0/1", prompt_tokens=200, cached_tokens=64),
        call("agent-0/0", prompt_tokens=100, cached_tokens=0),
        call("agent-0/2", prompt_tokens=300, cached_tokens=None),
        call("agent-1/1", prompt_tokens=900, cached_tokens=0),
        call("press-0/0", prompt_tokens=900, cached_tokens=0),
        call("press-0/1", prompt_tokens=900, cached_tokens=0),
    ]
    assert reprefilled_tokens(calls) == [96 - 64, 192]


def test_figures_compare_ours_with_every_other_arm() -> None:
    figures = hold_figures([one_repeat(HOLD_ARMS), one_repeat(HOLD_ARMS)])
    plain, ours = figures["per_arm"]["plain"], figures["per_arm"]["pancake"]
    assert (plain["reprefilled_tokens"], ours["reprefilled_tokens"]) == (2 * 992, 0)
    assert ours["hint_answers"] == {"hold clipped": 2}
    assert ours["restored_tokens"] == 1_000
    assert figures["reprefilled_pancake_over_plain"] == 0.0
    assert figures["others_ttft_p99_pancake_over_plain"] == pytest.approx(0.503, abs=0.01)
    assert figures["others_ttft_p99_pancake_over_reactive"] == 1.0


@pytest.mark.parametrize("arms", [(), ("reactive",), ("pancake", "pancake-no-hints")])
def test_any_choice_of_arms_gives_a_documented_result(arms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_arms(servers: Servers, workload: Any, *, arms: Sequence[Arm], repeats: int, **kwargs: Any) -> Repeats:
        return [one_repeat(arms) for _ in range(repeats)]

    monkeypatch.setattr(bench, "run_arms", run_arms)
    options = BenchOptions(repeats=2, sweep_repeats=1, arms=arms)
    result = asyncio.run(BENCHES["hold"](cast("Servers", None), options, lambda text: None))
    assert BenchResult.from_json(result.to_json()) == result
    assert sorted(result.arms) == sorted(arms or HOLD_ARMS)
    assert [row["pressing_threads"] for row in result.sweep or ()] == [4, 5, 6]
    assert {"reprefilled_tokens", "others_ttft_s"} <= set(next(iter(result.arms.values())))


def test_the_oracle_is_no_arm_of_it() -> None:
    with pytest.raises(Exception, match="got oracle, allowed for this workload are plain, reactive, pancake"):
        run_bench("hold", BenchOptions(arms=("oracle",)), pytest.fail)
