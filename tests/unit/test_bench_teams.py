"""What the benches of small teams make of their runs; the runs themselves are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pancake_langgraph._types import ActionId, ActionKind, Outcome, ThreadId
from pancake_langgraph.bench import teams
from pancake_langgraph.bench.arms import Arm
from pancake_langgraph.bench.fan_out import FanOutRun
from pancake_langgraph.bench.options import ARMS, BenchOptions
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.runner import ArmResult, Repeats
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Servers
from pancake_langgraph.bench.workloads import servers_plan
from pancake_langgraph.ledger import ActionRecorded, ActionState

TTFT_S = {Arm.PLAIN: 4.0, Arm.REACTIVE: 0.5, Arm.PANCAKE: 0.2, Arm.ORACLE: 0.1}


def call(label: str, ttft_s: float) -> CallRecord:
    return CallRecord(label, 0.0, ttft_s, ttft_s + 1.0, 1_100, 0, 4, "so")


@pytest.fixture
def given_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_arms(servers: Servers, workload: Any, *, arms: Sequence[Arm], repeats: int, **kwargs: Any) -> Repeats:
        return [
            {arm: ArmResult(FanOutRun((call("t/0", 9.0), call("t/1", TTFT_S[arm])), (2.0,), 2.0)) for arm in arms}
            for _ in range(repeats)
        ]

    monkeypatch.setattr(teams, "run_arms", run_arms)


@pytest.mark.usefixtures("given_runs")
@pytest.mark.parametrize("workload", [teams.handoff, teams.fan_out])
def test_the_first_call_of_a_program_does_not_count(workload: Any) -> None:
    made = asyncio.run(workload(cast("Servers", None), BenchOptions(repeats=2), lambda text: None))
    result = BenchResult.from_json(made.to_json())
    assert list(result.arms) == list(ARMS)
    assert {arm: stats["ttft_s"].p50 for arm, stats in result.arms.items()} == pytest.approx(TTFT_S)
    assert result.arms["pancake"]["program_s"].n == 2
    assert result.summary is not None
    assert result.summary["gap_closed_ratio"] == pytest.approx(0.75)


@pytest.mark.usefixtures("given_runs")
def test_one_arm_alone_gives_no_ratio_and_no_gap() -> None:
    options = BenchOptions(repeats=1, arms=("pancake",))
    result = asyncio.run(teams.handoff(cast("Servers", None), options, lambda text: None))
    assert list(result.arms) == ["pancake"]
    assert not result.ratios
    assert "gap_closed_ratio" not in (result.summary or {})


def test_tokens_computed_in_practice_count_in_no_arm() -> None:
    def settled(number: int, thread_id: str) -> ActionRecorded:
        return ActionRecorded(
            at_s=0.0,
            action_id=ActionId(f"a{number}"),
            state=ActionState.SETTLED,
            kind=ActionKind.WARM,
            agent="finder",
            thread_id=ThreadId(thread_id),
            num_tokens=960,
            reason="960 tokens were read from cache",
            computed_tokens=97,
            outcome=Outcome.USED,
        )

    run = FanOutRun((call("team/0", 9.0), call("team/1", 1.0)), (2.0,), 2.0)
    assert ArmResult(run, (settled(1, "before-0-1"), settled(2, "team"))).warm_tokens == 97


def test_the_pools_of_teams_hold_less_than_their_contexts(tmp_path: Any) -> None:
    options = BenchOptions(model_dir=tmp_path)
    assert servers_plan(options, "handoff").pool_tokens < 5 * 1_000
    assert servers_plan(options, "fan-out").pool_tokens < 3 * 1_000
    assert servers_plan(options, "tool-pause").pool_tokens > 10_000
    assert all(servers_plan(options, name).resident_pool_tokens > 20_000 for name in ("handoff", "fan-out"))
