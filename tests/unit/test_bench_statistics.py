from __future__ import annotations

import statistics as stdlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.bench.schema import RatioStatistics
from pancake_langgraph.bench.statistics import (
    bootstrap_interval,
    compare_arms,
    describe,
    describe_arms,
    describe_ratios,
    median,
    paired_ratios,
    percentile,
)

FLOATS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=50)


def test_percentiles_interpolate_linearly():
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 100) == 4.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 90) == pytest.approx(3.7)


@given(FLOATS)
def test_percentiles_stay_in_range_and_in_order(values: list[float]):
    stats = describe(values)
    assert min(values) <= stats.p50 <= stats.p90 <= stats.p99 <= max(values)
    assert stats.n == len(values)


@given(FLOATS)
def test_the_median_agrees_with_the_standard_library(values: list[float]):
    assert median(values) == pytest.approx(stdlib.median(values))


@pytest.mark.parametrize(("values", "rank"), [([], 50.0), ([1.0], -1.0), ([1.0], 101.0)])
def test_impossible_percentiles_are_refused(values: list[float], rank: float):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, rank)


def test_a_ratio_above_one_means_that_the_second_arm_is_better():
    faster = paired_ratios([[2.0], [4.0]], [[1.0], [1.0]], metric="ttft_s")
    assert faster.ratios == (2.0, 4.0)
    more = paired_ratios([[10.0]], [[30.0]], metric="output_tokens_per_s")
    assert more.ratios == (3.0,)


def test_repeats_are_paired_not_pooled():
    drifting = paired_ratios([[1.0], [10.0], [100.0]], [[0.5], [5.0], [50.0]], metric="program_s")
    assert describe_ratios(drifting.ratios) == RatioStatistics(median=2.0, min=2.0, max=2.0)


def test_a_repeat_without_values_or_with_a_zero_divisor_is_skipped_and_counted():
    paired = paired_ratios([[5.0], [5.0], []], [[0.0], [5.0], [1.0]], metric="prefilled_tokens")
    assert paired.ratios == (1.0,)
    assert paired.skipped == 2


def test_arms_with_different_numbers_of_repeats_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios([[1.0], [1.0]], [[1.0]], metric="ttft_s")


def test_all_ratios_of_a_result_are_formed_in_one_go():
    samples = {
        "plain": {"ttft_s": [[1.0, 3.0], [2.0]], "prefilled_tokens": [[100.0], [100.0]], "tpot_s": [[], []]},
        "pancake": {"ttft_s": [[0.5, 1.5], [1.0]], "prefilled_tokens": [[0.0], [50.0]]},
    }
    comparison = compare_arms(samples, pairs=[("plain", "pancake")], percentile_names=["p50", "p99"])
    assert comparison.ratios["ttft_s.p50 plain/pancake"].median == 2.0
    assert comparison.ratios["prefilled_tokens.p50 plain/pancake"].median == 2.0
    assert len(comparison.notes) == 2
    arms = describe_arms(samples)
    assert arms["plain"]["ttft_s"].n == 3
    assert "tpot_s" not in arms["plain"]


def test_the_bootstrap_is_seeded_and_brackets_the_statistic():
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    first = bootstrap_interval(values, seed=7, resamples=300)
    assert first == bootstrap_interval(values, seed=7, resamples=300)
    assert first.low <= median(values) <= first.high
    constant = bootstrap_interval([2.0, 2.0], seed=1, resamples=50)
    assert (constant.low, constant.high) == (2.0, 2.0)


@pytest.mark.parametrize("change", [{"values": []}, {"resamples": 0}, {"level": 1.0}])
def test_impossible_bootstraps_are_refused(change: dict):
    with pytest.raises(ValueError, match="bootstrap"):
        bootstrap_interval(**({"values": [1.0], "seed": 1} | change))
