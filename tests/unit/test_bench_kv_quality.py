"""What `pancake bench kv-quality` asks, and what it makes of the distances; the distances are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.kv_quality import (
    KV_MODE_TEXT,
    QUESTIONS,
    KvMode,
    KvQualityPlan,
    PromptDistance,
    kv_quality_result,
    quality_prompts,
    quality_summary,
)
from pancake_langgraph.bench.options import BenchOptions
from pancake_langgraph.bench.readme import render_block
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.workloads import run_bench

NEAR = PromptDistance(kl_nats=(0.0, 0.001, 0.002, 0.001), equal_tokens=4, equal_until=4, same_choices=4)
FAR = PromptDistance(kl_nats=(0.01, 0.02, 0.03, 0.04), equal_tokens=2, equal_until=1, same_choices=3)


def plan_of(folder: Path) -> KvQualityPlan:
    return KvQualityPlan(folder, 2, tuple(KvMode), "bfloat16", 32, 1)


def test_the_set_of_prompts_is_fixed_and_grows_at_its_end() -> None:
    prompts = quality_prompts(60)
    assert prompts == quality_prompts(60)
    assert prompts[:10] == quality_prompts(10)
    assert len(set(prompts)) == 60


def test_texts_and_plain_questions_are_both_asked() -> None:
    prompts = quality_prompts(60)
    questions = [prompt for prompt in prompts if any(question in prompt for question in QUESTIONS)]
    assert len(questions) == 15
    assert {question for question in QUESTIONS if any(question in prompt for prompt in prompts)} == set(QUESTIONS)
    assert min(len(prompt.split()) for prompt in prompts) > 64


def test_eight_bits_are_compared_with_lmcache() -> None:
    done = [{KvMode.INT8: NEAR, KvMode.LMCACHE_FP8: FAR}] * 2
    summary = quality_summary(done)
    assert summary["int8_at_least_as_close_as_fp8"] == {"kl_mean": True, "kl_p99": True, "greedy_equal": True}
    assert summary["modes"]["lmcache-fp8"]["kl_mean_nats"] == pytest.approx(0.025)
    assert summary["modes"]["lmcache-fp8"]["greedy_equal_ratio"] == pytest.approx(0.5)
    assert summary["modes"]["lmcache-fp8"]["greedy_equal_until_first_difference_ratio"] == pytest.approx(0.25)
    assert summary["modes"]["lmcache-fp8"]["same_choice_ratio"] == pytest.approx(0.75)
    assert (
        summary["modes"]["int8"]["answers_equal_ratio"],
        summary["modes"]["lmcache-fp8"]["answers_equal_ratio"],
    ) == (
        1.0,
        0.0,
    )
    worse = quality_summary([{KvMode.INT8: FAR, KvMode.LMCACHE_FP8: NEAR}])
    assert not any(worse["int8_at_least_as_close_as_fp8"].values())


def test_the_result_follows_the_schema_and_fills_a_page(tmp_path: Path) -> None:
    made = kv_quality_result(plan_of(tmp_path), [{KvMode.INT8: NEAR, KvMode.LMCACHE_FP8: FAR}] * 2)
    result = BenchResult.from_json(made.to_json())
    assert list(result.arms) == ["int8", "lmcache-fp8"]
    assert (result.arms["int8"]["kl_nats"].n, result.arms["int8"]["equal_share"].n) == (8, 2)
    assert result.ratios["kl_nats.p50 lmcache-fp8/int8"].median == pytest.approx(25.0)
    assert result.ratios["equal_share.p50 lmcache-fp8/int8"].median == pytest.approx(2.0)
    block = render_block([result])
    assert f"| `lmcache-fp8` | {KV_MODE_TEXT[KvMode.LMCACHE_FP8]} | 50.0% | 25.0% | 75.0% | 0.025 | 0.040 |" in block
    assert "repeats" not in block


def test_a_wrong_mode_or_number_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lmcache-fp8"):
        run_bench("kv-quality", BenchOptions(arms=("int2",), model_dir=tmp_path), lambda text: None)
    with pytest.raises(ConfigError, match="prompts"):
        BenchOptions(prompts=0)
