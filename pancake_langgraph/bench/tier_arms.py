"""What `pancake bench tiers` compares: places that KV can come from, and what is made of the times.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

from pancake_langgraph.bench.schema import RatioStatistics
from pancake_langgraph.bench.statistics import compare_arms, percentile


class TierArm(StrEnum):
    """Where a prompt's KV is when the prompt comes, in the order in which arms are printed."""

    COLD = "cold"
    L0 = "l0"
    L1 = "l1"
    L2_EXACT = "l2-exact"
    L2_INT8 = "l2-int8"
    L2_INT4 = "l2-int4"
    L2_LMCACHE_FS = "l2-lmcache-fs"
    L2_LMCACHE_FP8 = "l2-lmcache-fp8"
    L3_EXACT = "l3-exact"
    L3_INT8 = "l3-int8"
    L3_INT4 = "l3-int4"
    L3_LMCACHE_RESP = "l3-lmcache-resp"


TIER_ARM_TEXT: Final[Mapping[TierArm, str]] = {
    TierArm.COLD: "nowhere; the engine computes the whole prompt",
    TierArm.L0: "in the engine's own pool",
    TierArm.L1: "in the cache server's main memory",
    TierArm.L2_EXACT: "on disk, VerifiedDiskAdapter, as it is",
    TierArm.L2_INT8: "on disk, VerifiedDiskAdapter, in 8 bits",
    TierArm.L2_INT4: "on disk, VerifiedDiskAdapter, in 4 bits",
    TierArm.L2_LMCACHE_FS: "on disk, LMCache's own adapter `fs`, no checks",
    TierArm.L2_LMCACHE_FP8: "on disk, LMCache's own adapter `fs` with its serde `fp8` (e4m3), no checks",
    TierArm.L3_EXACT: "in Valkey, VerifiedRedisAdapter, as it is",
    TierArm.L3_INT8: "in Valkey, VerifiedRedisAdapter, in 8 bits",
    TierArm.L3_INT4: "in Valkey, VerifiedRedisAdapter, in 4 bits",
    TierArm.L3_LMCACHE_RESP: "in Valkey, LMCache's own adapter `resp`, no checks",
}


@dataclass(frozen=True, slots=True)
class TierGroup:
    """One cache server: the arm of the store below its main memory, where that is, and how KV is written there.

    `codec` is ours; `None` is LMCache's own adapter, with its `serde` if one is named.
    """

    lower: TierArm
    place: Literal["disk", "valkey"]
    codec: Literal["exact", "int8", "int4"] | None
    serde: Literal["fp8"] | None = None

    @property
    def arms(self) -> tuple[TierArm, ...]:
        """The arms that are measured with this server: its own, and those that every server has."""
        return (TierArm.COLD, TierArm.L0, TierArm.L1, self.lower)


#: Every cache server that is started, one after the other.
GROUPS: Final = (
    TierGroup(TierArm.L2_EXACT, "disk", "exact"),
    TierGroup(TierArm.L2_INT8, "disk", "int8"),
    TierGroup(TierArm.L2_INT4, "disk", "int4"),
    TierGroup(TierArm.L2_LMCACHE_FS, "disk", None),
    TierGroup(TierArm.L2_LMCACHE_FP8, "disk", None, serde="fp8"),
    TierGroup(TierArm.L3_EXACT, "valkey", "exact"),
    TierGroup(TierArm.L3_INT8, "valkey", "int8"),
    TierGroup(TierArm.L3_INT4, "valkey", "int4"),
    TierGroup(TierArm.L3_LMCACHE_RESP, "valkey", None),
)

_A = TypeVar("_A")


def chosen_groups(arms: Sequence[TierArm]) -> tuple[TierGroup, ...]:
    """Return the servers that some arms need; for `cold`, `l0` and `l1` alone the first one."""
    return tuple(group for group in GROUPS if group.lower in arms) or GROUPS[:1]


def rotated(items: Sequence[_A], shift: int) -> tuple[_A, ...]:
    """Return `items` in their order, beginning `shift` places later."""
    start = shift % len(items)
    return (*items[start:], *items[:start])


@dataclass(frozen=True, slots=True)
class TierSample:
    """One measured prompt.

    `cached_tokens` are those that the engine did not compute, as it says; `words` the first ones of its answer.
    """

    ttft_s: float
    cached_tokens: int
    words: str


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What one server gave: a sample per arm in each repeat, and what its lower store took per token.

    `stored_tokens` are those of a prompt's whole chunks: all that a cache can give back.
    """

    group: TierGroup
    repeats: Sequence[Mapping[TierArm, TierSample]]
    bytes_per_token: float
    stored_tokens: int


def tier_samples(results: Sequence[GroupResult]) -> dict[str, dict[str, list[list[float]]]]:
    """Return `arm -> metric -> values per repeat`; arms that every server has, have the repeats of all servers."""
    samples: dict[str, dict[str, list[list[float]]]] = {}
    for arm in TierArm:
        rows = [[repeat[arm].ttft_s] for result in results for repeat in result.repeats if arm in repeat]
        if rows:
            samples[str(arm)] = {"ttft_s": rows}
    return samples


def tier_ratios(results: Sequence[GroupResult]) -> dict[str, RatioStatistics]:
    """Return how many times sooner than cold each place is, by the cold prompt of its own server and repeat."""
    ratios: dict[str, RatioStatistics] = {}
    for arm in TierArm:
        if arm is TierArm.COLD:
            continue
        with_arm = [result for result in results if all(arm in repeat for repeat in result.repeats)]
        if not with_arm:
            continue
        samples = tier_samples(with_arm)
        ratios |= compare_arms(samples, pairs=[(TierArm.COLD, arm)], percentile_names=("p50",)).ratios
    return ratios


def tier_summary(results: Sequence[GroupResult], *, bf16_token_bytes: int) -> dict[str, Any]:
    """Return bytes, hits, words and losses per arm.

    A sample misses if the engine computed more than the prompt's end, which lies in no whole chunk.
    """
    samples, ratios = tier_samples(results), tier_ratios(results)
    p50_s = {arm: percentile([value for row in of["ttft_s"] for value in row], 50.0) for arm, of in samples.items()}
    gains = {arm: ratio.median for arm in p50_s if (ratio := ratios.get(f"ttft_s.p50 cold/{arm}")) is not None}
    stored = {str(result.group.lower): result.bytes_per_token for result in results}
    return {
        "bf16_bytes_per_token": bf16_token_bytes,
        "bytes_per_token": {arm: round(size, 1) for arm, size in stored.items()},
        "bytes_ratio_to_bf16": {arm: round(size / bf16_token_bytes, 4) for arm, size in stored.items()},
        "cached_tokens_p50": _cached_tokens(results),
        "misses": _misses(results),
        "answers_as_from_l0": _as_from_pool(results),
        "loses_time": [arm for arm, gain in gains.items() if gain < 1],
        "slower_than_exact": _slower_than_exact(p50_s),
        "over_l1_s": {
            arm: round(value - p50_s[TierArm.L1], 4) for arm, value in p50_s.items() if arm.startswith(("l2", "l3"))
        },
    }


def _each(results: Sequence[GroupResult], arm: str) -> list[tuple[GroupResult, Mapping[TierArm, TierSample]]]:
    return [(result, repeat) for result in results for repeat in result.repeats if TierArm(arm) in repeat]


def _cached_tokens(results: Sequence[GroupResult]) -> dict[str, float]:
    return {
        str(arm): percentile([float(repeat[arm].cached_tokens) for _, repeat in found], 50.0)
        for arm in TierArm
        if (found := _each(results, arm))
    }


def _misses(results: Sequence[GroupResult]) -> dict[str, int]:
    """Count the samples whose KV did not come from where it was to come from; for cold: those that hit something."""
    missed: dict[str, int] = {}
    for arm in TierArm:
        found = _each(results, arm)
        wrong = [
            repeat[arm].cached_tokens > 0 if arm is TierArm.COLD else repeat[arm].cached_tokens < result.stored_tokens
            for result, repeat in found
        ]
        if any(wrong):
            missed[str(arm)] = sum(wrong)
    return missed


def _as_from_pool(results: Sequence[GroupResult]) -> dict[str, str]:
    """Say how often an arm's answer began with the words of the answer from the pool in the same repeat.

    Main memory is left out: in a server that packs, it has been filled from the store below.
    """
    said: dict[str, str] = {}
    for arm in TierArm:
        pairs = [repeat for _, repeat in _each(results, arm) if TierArm.L0 in repeat]
        if pairs and arm not in (TierArm.L0, TierArm.L1):
            said[str(arm)] = f"{sum(one[arm].words == one[TierArm.L0].words for one in pairs)} of {len(pairs)}"
    return said


def _slower_than_exact(p50_s: Mapping[str, float]) -> list[str]:
    """Return the arms that pack KV and are slower than the same place where KV is as it is."""
    plain = {"l2-int8": "l2-exact", "l2-int4": "l2-exact", "l3-int8": "l3-exact", "l3-int4": "l3-exact"}
    plain[TierArm.L2_LMCACHE_FP8] = TierArm.L2_LMCACHE_FS
    return [arm for arm, base in plain.items() if arm in p50_s and base in p50_s and p50_s[arm] > p50_s[base]]
