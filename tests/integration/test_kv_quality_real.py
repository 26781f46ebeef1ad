"""`pancake bench kv-quality` on a real, tiny model in float32, where nothing but packing can make a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.kv_quality import KvMode, KvQualityPlan, quality_prompts, run_kv_quality
from pancake_langgraph.weights.tiny import build_tiny_llama

# LMCache's own functions are called, and its logger uses what another package is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_kv_as_it_is_changes_nothing_and_fewer_bits_change_more(tiny_model: Path) -> None:
    plan = KvQualityPlan(tiny_model, 2, tuple(KvMode), "float32", 32, 1)
    told: list[str] = []
    result = run_kv_quality(plan, told.append)
    modes = (result.summary or {})["modes"]
    assert told == ["kv-quality: prompt 1 of 2", "kv-quality: prompt 2 of 2"]
    assert result.arms["int8"]["kl_nats"].n == 64
    assert modes["exact"]["kl_mean_nats"] < 1e-9
    assert modes["exact"]["greedy_equal_ratio"] == 1.0
    assert modes["exact"]["kl_mean_nats"] < modes["int8"]["kl_mean_nats"] < modes["int4"]["kl_mean_nats"]
    assert modes["int8"]["kl_mean_nats"] < modes["lmcache-fp8"]["kl_mean_nats"]


def test_a_prompt_without_a_whole_chunk_is_refused(tiny_model: Path) -> None:
    tokens = 100 * max(len(prompt.split()) for prompt in quality_prompts(1))
    plan = KvQualityPlan(tiny_model, 1, (KvMode.INT8,), "float32", tokens, 1)
    with pytest.raises(ConfigError, match="more than one chunk"):
        run_kv_quality(plan, lambda text: None)
