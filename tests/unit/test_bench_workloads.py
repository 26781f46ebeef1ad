"""What the engine benches make of their runs; the runs themselves are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench import workloads
from pancake_langgraph.bench.arms import Arm
from pancake_langgraph.bench.no_pressure import NoPressureRun
from pancake_langgraph.bench.options import LiveModel
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.runner import ArmResult, Repeats
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Servers
from pancake_langgraph.bench.workloads import ARMS, BenchOptions, chosen_arms, lost_calls, run_bench
from pancake_langgraph.launch.plans import StackPlan

TTFT_S = {Arm.PLAIN: 8.0, Arm.REACTIVE: 0.4, Arm.PANCAKE: 0.2, Arm.ORACLE: 0.1}


def call(label: str, *, ttft_s: float, cached_tokens: int) -> CallRecord:
    return CallRecord(
        label=label,
        started_s=0.0,
        ttft_s=ttft_s,
        ended_s=ttft_s + 1.0,
        prompt_tokens=1_000,
        cached_tokens=cached_tokens,
        output_tokens=8,
        text="so",
    )


def one_repeat(arms: Sequence[Arm]) -> dict[Arm, ArmResult]:
    results = {}
    for arm in arms:
        calls = (
            call("agent-0/0", ttft_s=9.0, cached_tokens=0),
            call("agent-0/1", ttft_s=TTFT_S[arm], cached_tokens=0 if arm is Arm.PLAIN else 960),
            call("agent-1/1", ttft_s=0.05, cached_tokens=960),
        )
        results[arm] = ArmResult(NoPressureRun(calls, (3.0,), 3.0))
    return results


@pytest.fixture
def given_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_arms(servers: Servers, workload: Any, *, arms: Sequence[Arm], repeats: int, **kwargs: Any) -> Repeats:
        return [one_repeat(arms) for _ in range(repeats)]

    async def cold_versus_hit(servers: Servers, **kwargs: Any) -> dict[str, int]:
        return {"prompts": 6, "differing": 3}

    monkeypatch.setattr(workloads, "run_arms", run_arms)
    monkeypatch.setattr(workloads, "cold_versus_hit", cold_versus_hit)


def result_of(workload: Any, *arms: str, sweep_repeats: int = 1) -> BenchResult:
    options = BenchOptions(repeats=2, sweep_repeats=sweep_repeats, arms=arms)
    result = asyncio.run(workload(cast("Servers", None), options, lambda text: None))
    return BenchResult.from_json(result.to_json())


@pytest.mark.usefixtures("given_runs")
def test_tool_pause_counts_the_calls_that_the_plain_arm_lost() -> None:
    result = result_of(workloads.tool_pause)
    assert list(result.arms) == list(ARMS)
    assert result.arms["pancake"]["ttft_s"].n == 2
    assert result.ratios["ttft_s.p50 plain/pancake"].median == pytest.approx(40.0)
    assert result.summary["calls_lost_by_plain"] == [1, 1]
    assert result.summary["gap_closed_ratio"] == pytest.approx(2 / 3)
    assert result.summary["plain_other_words_cold_than_hit"] == {"prompts": 6, "differing": 3}
    assert len(result.sweep or ()) == 5


@pytest.mark.usefixtures("given_runs")
@pytest.mark.parametrize("arms", [("reactive",), ("oracle", "pancake"), ("plain", "reactive"), ("pancake", "reactive")])
def test_any_choice_of_arms_gives_a_result_without_figures_on_the_others(arms: tuple[str, ...]) -> None:
    for workload in (workloads.tool_pause, workloads.no_pressure):
        result = result_of(workload, *arms)
        assert sorted(result.arms) == sorted(arms)
        assert all(set(name.split(" ")[1].split("/")) <= set(arms) for name in result.ratios)
        left_out = {str(arm) for arm in ARMS} - set(arms)
        assert not [note for note in result.notes if note.split(":")[0] in left_out]


@pytest.mark.usefixtures("given_runs")
def test_without_the_plain_arm_all_calls_after_a_pause_count_and_the_notes_say_so() -> None:
    result = result_of(workloads.tool_pause, "reactive")
    assert result.arms["reactive"]["ttft_s"].n == 4
    assert result.summary["calls_lost_by_plain"] == []
    assert any("without the plain arm" in note for note in result.notes)


def test_a_call_is_lost_if_the_plain_arm_found_less_than_half_of_its_prompt() -> None:
    results = one_repeat(ARMS)
    assert [each.label for each in lost_calls(results, Arm.PANCAKE)] == ["agent-0/1"]
    del results[Arm.PLAIN]
    assert [each.label for each in lost_calls(results, Arm.PANCAKE)] == ["agent-0/1", "agent-1/1"]


def test_an_unknown_arm_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="got lmcache, allowed for this workload are plain, reactive"):
        run_bench("tool-pause", BenchOptions(arms=("lmcache", "plain")), pytest.fail)
    with pytest.raises(ConfigError, match="got plain, allowed for this workload are pancake-sqlite"):
        run_bench("saver", BenchOptions(arms=("plain",)), pytest.fail)


@pytest.mark.parametrize(("model", "folder"), [("tiny", "tiny-llama"), ("small", "smollm")])
def test_agents_call_the_model_that_was_chosen(
    model: LiveModel, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    def start(plan: StackPlan, *, name: str) -> None:
        raise ConfigError(f"{name} serves {plan.model_dir.name}")

    monkeypatch.setattr(workloads, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(workloads, "build_tiny_llama", made)
    monkeypatch.setattr(workloads, "prepare_smollm", lambda: made(tmp_path / "smollm"))
    monkeypatch.setattr(workloads, "EngineProcess", start)
    with pytest.raises(ConfigError, match=f"^agent-memory engine serves {folder}$"):
        run_bench("agent-memory", BenchOptions(live_s=1.0, live_model=model), lambda text: None)
    with pytest.raises(ConfigError, match="live_model: got 'huge', allowed are small, tiny"):
        BenchOptions(live_model=cast("LiveModel", "huge"))


def test_arms_are_run_in_their_own_order_whatever_the_order_of_their_names() -> None:
    assert chosen_arms(ARMS, ("oracle", "plain")) == (Arm.PLAIN, Arm.ORACLE)
    assert chosen_arms(ARMS, ()) == ARMS
