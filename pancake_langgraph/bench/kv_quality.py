"""Bench `kv-quality`: what a model says on KV that was stored in fewer bits, next to what it says on KV as it is.

No engine is started: the model runs in this process, so that the chances of all tokens are seen and not the largest
few.  KV is packed by the very functions that the adapters of the cache server use, see `_kv_model`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pancake_langgraph.bench.machine import read_machine
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.servers import Progress
from pancake_langgraph.bench.statistics import compare_arms, describe_arms, percentile
from pancake_langgraph.bench.text import passages

ANSWER_TOKENS: Final = 32
_TEXT_SEED: Final = 7_000
#: Prompts of texts are this long in words, in turn.
_TEXT_WORDS: Final = (150, 300, 600)


class KvMode(StrEnum):
    """How KV is stored, in the order in which arms are printed."""

    EXACT = "exact"
    INT8 = "int8"
    INT4 = "int4"
    LMCACHE_FP8 = "lmcache-fp8"


KV_MODE_TEXT: Final[Mapping[KvMode, str]] = {
    KvMode.EXACT: "stored and read back as it is; what differs is rounding of sums in a batch",
    KvMode.INT8: "8 bits, pancake_kernels.kv_codec",
    KvMode.INT4: "4 bits, pancake_kernels.kv_codec",
    KvMode.LMCACHE_FP8: "LMCache's own serde `fp8` (e4m3)",
}
PAIRS: Final = (
    (KvMode.LMCACHE_FP8, KvMode.INT8),
    (KvMode.LMCACHE_FP8, KvMode.INT4),
    (KvMode.INT4, KvMode.INT8),
)
#: What is asked about a text, in turn.
TASKS: Final = (
    "Say in one sentence what this text is about.",
    "What is the first thing that this text says?",
    "Name three words that matter in this text, and say why.",
    "Write the next sentence of this text.",
)
#: Asked without a text; in front of each stands the same introduction, so that it fills a chunk.
QUESTIONS: Final = (
    "What is the capital of France, and which river runs through it?",
    "Why is the sky blue in the daytime and red at sunset?",
    "How many legs do two spiders and three ants have together?",
    "Explain to a child why the moon changes its shape.",
    "Write a Python function that says whether a word is a palindrome.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron?",
    "Name four kinds of trees and say where each of them grows.",
    "What happens to water when it freezes?",
    "Translate into French: the train to the coast leaves at noon.",
    "Tell a short story about a lighthouse keeper and a storm.",
    "List the steps for making a pancake.",
    "What is the difference between a list and a tuple in Python?",
)
_INTRODUCTION: Final = (
    "You help people who ask questions of all kinds. Answer in plain words and in whole sentences. If you do not know "
    "something, say so and say what would have to be found out. Do not repeat the question. Begin with the answer "
    "itself and give the reason after it. Keep to what was asked, even where something else would be interesting, and "
    "stop when the question is answered. Here is the question."
)


@dataclass(frozen=True, slots=True)
class PromptDistance:
    """How far one mode is from KV as it is, over the answer to one prompt.

    `kl_nats` has one value per token, where both read the same words.  `equal_tokens` of the own greedy answers are
    equal, place by place; `equal_until` stand before the first that differs.  `same_choices` are the likeliest tokens
    that agree where both read the same words.
    """

    kl_nats: tuple[float, ...]
    equal_tokens: int
    equal_until: int
    same_choices: int


@dataclass(frozen=True, slots=True)
class KvQualityPlan:
    """The model, how many prompts, and which modes."""

    model_dir: Path
    num_prompts: int
    modes: tuple[KvMode, ...]
    dtype: str
    chunk_tokens: int
    num_threads: int


def quality_prompts(num_prompts: int) -> tuple[str, ...]:
    """Return the first prompts of the fixed set: of every four, three on a passage of text and one plain question.

    The passages come from this package's own documentation strings, so that one version of it gives one set.
    """
    prompts: list[str] = []
    for number in range(num_prompts):
        if number % 4 == 3:
            turn, which = divmod(number // 4, len(QUESTIONS))
            again = f" This is question {turn + 1}." if turn else ""
            prompts.append(f"{_INTRODUCTION}{again} {QUESTIONS[which]}")
        else:
            words = _TEXT_WORDS[number % len(_TEXT_WORDS)]
            task = TASKS[number % len(TASKS)] if number % 8 < 4 else TASKS[-1 - number % len(TASKS)]
            prompts.append(f"{passages(words, seed=_TEXT_SEED + number)}\n\n{task}")
    return tuple(prompts)


def run_kv_quality(plan: KvQualityPlan, on_progress: Progress) -> BenchResult:
    """Run all prompts in all modes.

    Raises:
        ConfigError: if a prompt has no whole chunk.
    """
    from pancake_langgraph.bench._kv_model import distances

    done: list[Mapping[KvMode, PromptDistance]] = []
    for found in distances(
        plan.model_dir,
        quality_prompts(plan.num_prompts),
        plan.modes,
        dtype=plan.dtype,
        chunk_tokens=plan.chunk_tokens,
        answer_tokens=ANSWER_TOKENS,
        num_threads=plan.num_threads,
    ):
        done.append(found)
        on_progress(f"kv-quality: prompt {len(done)} of {plan.num_prompts}")
    return kv_quality_result(plan, done)


def kv_quality_result(plan: KvQualityPlan, done: Sequence[Mapping[KvMode, PromptDistance]]) -> BenchResult:
    """Compose the documented result.  Pure but for the facts on the machine and the date."""
    samples = quality_samples(done)
    pairs = [pair for pair in PAIRS if set(pair) <= set(samples)]
    comparison = compare_arms(samples, pairs=pairs, percentile_names=("p50", "p99"))
    return BenchResult(
        workload="kv-quality",
        version=metadata.version("pancake-langgraph"),
        machine=read_machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        repeats=1,
        arms=describe_arms(samples),
        ratios=comparison.ratios,
        outcomes={},
        notes=(
            *(f"{mode}: {KV_MODE_TEXT[KvMode(mode)]}." for mode in samples),
            (
                f"{len(done)} prompts, {ANSWER_TOKENS} greedy tokens each, {plan.dtype}; KV of whole chunks of "
                f"{plan.chunk_tokens} tokens is packed, the end of a prompt is computed from it."
            ),
            "kl_nats compares where both read the words that KV as it is leads to, over the chances of all tokens.",
            *comparison.notes,
        ),
        summary=quality_summary(done),
    )


def quality_samples(done: Sequence[Mapping[KvMode, PromptDistance]]) -> dict[str, dict[str, list[list[float]]]]:
    """Return `arm -> metric -> values` as one repeat: a value per token, and a value per prompt."""
    return {
        str(mode): {
            "kl_nats": [[value for each in done for value in each[mode].kl_nats]],
            "equal_share": [[each[mode].equal_tokens / len(each[mode].kl_nats) for each in done]],
        }
        for mode in (KvMode if done else ())
        if mode in done[0]
    }


def quality_summary(done: Sequence[Mapping[KvMode, PromptDistance]]) -> dict[str, Any]:
    """Return the figures per mode, and whether 8 bits are at least as close as LMCache's fp8."""
    modes = {str(mode): _mode_figures([each[mode] for each in done]) for mode in KvMode if mode in done[0]}
    summary: dict[str, Any] = {"prompts": len(done), "modes": modes}
    if {KvMode.INT8, KvMode.LMCACHE_FP8} <= set(modes):
        ours, theirs = modes[KvMode.INT8], modes[KvMode.LMCACHE_FP8]
        summary["int8_at_least_as_close_as_fp8"] = {
            "kl_mean": ours["kl_mean_nats"] <= theirs["kl_mean_nats"],
            "kl_p99": ours["kl_p99_nats"] <= theirs["kl_p99_nats"],
            "greedy_equal": ours["greedy_equal_ratio"] >= theirs["greedy_equal_ratio"],
        }
    return summary


def _mode_figures(of: Sequence[PromptDistance]) -> dict[str, float]:
    kl_nats = [value for each in of for value in each.kl_nats]
    tokens = len(kl_nats)
    return {
        "kl_mean_nats": sum(kl_nats) / tokens,
        "kl_p99_nats": percentile(kl_nats, 99.0),
        "greedy_equal_ratio": sum(each.equal_tokens for each in of) / tokens,
        "greedy_equal_until_first_difference_ratio": sum(each.equal_until for each in of) / tokens,
        "same_choice_ratio": sum(each.same_choices for each in of) / tokens,
        "answers_equal_ratio": sum(each.equal_until == len(each.kl_nats) for each in of) / len(of),
    }
