"""The results of `tiers` and `kv-quality` as Markdown tables, a row per arm.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pancake_langgraph.bench.kv_quality import KV_MODE_TEXT, KvMode
from pancake_langgraph.bench.render import format_figure
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.tier_arms import TIER_ARM_TEXT, TierArm


def tiers_rows(result: BenchResult) -> list[str]:
    """Return the lines of a table: time, gain over cold, and size, by where KV is."""
    summary = result.summary or {}
    lines = [
        "| arm | where the prompt's KV is | TTFT p50, s | times sooner than cold | bytes per token | of bf16 |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for arm, metrics in result.arms.items():
        ratio = result.ratios.get(f"ttft_s.p50 cold/{arm}")
        gain = (
            f"**{format_figure(ratio.median)}** ({format_figure(ratio.min)} to {format_figure(ratio.max)})"
            if ratio
            else ""
        )
        size, share = (_figure(summary.get(key), arm) for key in ("bytes_per_token", "bytes_ratio_to_bf16"))
        text = TIER_ARM_TEXT[TierArm(arm)]
        lines.append(f"| `{arm}` | {text} | {format_figure(metrics['ttft_s'].p50)} | {gain} | {size} | {share} |")
    losing = ", ".join(f"`{arm}`" for arm in summary.get("loses_time", ())) or "none"
    slower = ", ".join(f"`{arm}`" for arm in summary.get("slower_than_exact", ())) or "none"
    missed = ", ".join(f"`{arm}` {count}" for arm, count in summary.get("misses", {}).items()) or "none"
    remarks = (
        f"Slower than computing the prompt anew: {losing}.",
        f"Packed, and slower than the same place where KV is as it is: {slower}.",
        f"Prompts whose KV did not come from there: {missed}.",
    )
    return [*lines, "", " ".join(remarks)]


def kv_quality_rows(result: BenchResult) -> list[str]:
    """Return the lines of a table: closeness to KV as it is, by how it is stored."""
    titles = (
        "mode",
        "KV is stored",
        "greedy tokens equal",
        "before the first other one",
        "likeliest token equal",
        "KL mean, nats",
        "KL p99, nats",
    )
    lines = [f"| {' | '.join(titles)} |", f"| --- | --- |{' ---: |' * 5}"]
    for mode, figures in ((result.summary or {}).get("modes") or {}).items():
        shares = [
            f"{figures[key]:.1%}"
            for key in ("greedy_equal_ratio", "greedy_equal_until_first_difference_ratio", "same_choice_ratio")
        ]
        distances = [format_figure(figures[key]) for key in ("kl_mean_nats", "kl_p99_nats")]
        lines.append(f"| `{mode}` | {KV_MODE_TEXT[KvMode(mode)]} | {' | '.join([*shares, *distances])} |")
    return lines


def _figure(of: Mapping[str, Any] | None, arm: str) -> str:
    value = (of or {}).get(arm)
    return format_figure(value) if value is not None else ""
