"""Percentiles, paired ratios and their spread.

Percentiles interpolate linearly between the two nearest values (rank `p / 100 * (n - 1)`, counted from 0), as numpy
does by default.  With few values p99 is therefore close to the largest one, never beyond it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pancake_langgraph.bench.metrics import METRICS, PERCENTILES, Direction
from pancake_langgraph.bench.schema import MetricStatistics, RatioStatistics

#: Values of one metric in one arm: one sequence per repeat, in the order of the repeats.
Repeats = Sequence[Sequence[float]]


def percentile(values: Sequence[float], rank: float) -> float:
    """Return the `rank`-th percentile, 0 to 100, of `values` in any order.

    Raises:
        ValueError: if `values` is empty or `rank` is out of range.
    """
    if not values:
        raise ValueError("percentile of no values; allowed: at least one")
    if not 0 <= rank <= 100:
        raise ValueError(f"percentile rank: got {rank}, allowed: 0 to 100")
    ordered = sorted(values)
    position = rank / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    if ordered[below] == ordered[above]:
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones.

    Raises:
        ValueError: if `values` is empty.
    """
    return percentile(values, 50.0)


def describe(values: Sequence[float]) -> MetricStatistics:
    """Return the percentiles that a result holds.

    Raises:
        ValueError: if `values` is empty.
    """
    return MetricStatistics(
        p50=percentile(values, PERCENTILES["p50"]),
        p90=percentile(values, PERCENTILES["p90"]),
        p99=percentile(values, PERCENTILES["p99"]),
        n=len(values),
    )


def describe_arms(samples: Mapping[str, Mapping[str, Repeats]]) -> dict[str, dict[str, MetricStatistics]]:
    """Return the `arms` of a result from `arm -> metric -> values per repeat`; metrics without values are left out."""
    return {
        arm: {
            metric: describe([value for repeat in repeats for value in repeat])
            for metric, repeats in metrics.items()
            if any(repeats)
        }
        for arm, metrics in samples.items()
    }


@dataclass(frozen=True, slots=True)
class PairedRatios:
    """One ratio per repeat that allows one, and how many repeats did not.

    A repeat is skipped when an arm has no value in it or when the divisor is 0.
    """

    ratios: tuple[float, ...]
    skipped: int


def paired_ratios(first: Repeats, second: Repeats, *, metric: str, percentile_name: str = "p50") -> PairedRatios:
    """Compare two arms repeat by repeat, so that drift of the machine between repeats cancels out.

    Above 1 the second arm is better: first / second where less is better, second / first where more is.

    Raises:
        ValueError: if the arms differ in their number of repeats.
        KeyError: if the metric or percentile is not known.
    """
    better, rank = METRICS[metric].better, PERCENTILES[percentile_name]
    ratios: list[float] = []
    skipped = 0
    for one, other in zip(first, second, strict=True):
        if not one or not other:
            skipped += 1
            continue
        above, below = percentile(one, rank), percentile(other, rank)
        if better is Direction.HIGHER:
            above, below = below, above
        if below == 0:
            skipped += 1
        else:
            ratios.append(above / below)
    return PairedRatios(tuple(ratios), skipped)


def describe_ratios(ratios: Sequence[float]) -> RatioStatistics:
    """Return median and extremes.

    Raises:
        ValueError: if `ratios` is empty.
    """
    return RatioStatistics(median=median(ratios), min=min(ratios), max=max(ratios))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The `ratios` of a result, and a note for each one that could not be formed for every repeat."""

    ratios: dict[str, RatioStatistics]
    notes: tuple[str, ...]


def compare_arms(
    samples: Mapping[str, Mapping[str, Repeats]], *, pairs: Sequence[tuple[str, str]], percentile_names: Sequence[str]
) -> Comparison:
    """Form every ratio of the arm `pairs` (first, second) over the metrics that both have.

    Raises:
        KeyError: if an arm, metric or percentile is not known.
        ValueError: if two arms differ in their number of repeats.
    """
    ratios: dict[str, RatioStatistics] = {}
    notes: list[str] = []
    for first, second in pairs:
        for metric in (name for name in METRICS if name in samples[first] and name in samples[second]):
            for name in percentile_names:
                paired = paired_ratios(
                    samples[first][metric], samples[second][metric], metric=metric, percentile_name=name
                )
                key = f"{metric}.{name} {first}/{second}"
                if paired.ratios:
                    ratios[key] = describe_ratios(paired.ratios)
                if paired.skipped:
                    notes.append(f"{key}: {paired.skipped} repeats gave no ratio (no values, or division by zero)")
    return Comparison(ratios, tuple(notes))


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval: `low` and `high` bound `level` of the resampled statistic."""

    low: float
    high: float
    level: float


def bootstrap_interval(
    values: Sequence[float],
    *,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
    statistic: Callable[[Sequence[float]], float] = median,
) -> Interval:
    """Return the percentile bootstrap interval of `statistic`; the same seed gives the same interval.

    Raises:
        ValueError: if `values` is empty, `resamples` not positive, or `level` not between 0 and 1.
    """
    if not values:
        raise ValueError("bootstrap of no values; allowed: at least one")
    if resamples <= 0 or not 0 < level < 1:
        raise ValueError(f"bootstrap: got resamples {resamples} and level {level}, allowed: above 0, between 0 and 1")
    generator = random.Random(seed)
    drawn = [statistic(generator.choices(values, k=len(values))) for _ in range(resamples)]
    tail = (1 - level) / 2 * 100
    return Interval(percentile(drawn, tail), percentile(drawn, 100 - tail), level)
