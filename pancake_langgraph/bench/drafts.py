"""Bench `drafts`: how much of what a search reads a draft of its query has brought up, within a few percent of memory.

It starts no model server, and takes no times: searches of agents over a real index are replayed and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.agent_memory import AGENTS
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.draft_replay import Replayed, Step, replay, replay_lru
from pancake_langgraph.bench.retrieval import Samples, engine_facts, prepared_set, scratch_folder, vector_result
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import ALL_PARTITIONS, OpenEngine, fill_engine
from pancake_langgraph.bench.vector_sets import QUERY_WORDS, Embed, VectorSet, by_turns, embedded, first_words
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.retrieval.base import Vector, VectorEngine
from pancake_langgraph.retrieval.draft import DraftSettings, Locate
from pancake_langgraph.retrieval.partitions import Partition, PrefetchesPartitions

#: Points of the sweep: shares of the partitions' bytes, and searches of others between a draft and its own.
_SWEEP_BUDGETS: Final = (0.02, 0.05, 0.1, 0.2)
_SWEEP_AHEAD: Final = (0, AGENTS - 1)


class DraftArm(StrEnum):
    """Names of the arms, in the order they are printed."""

    LRU = "lru"
    LAST_QUERIES = "last-queries"
    WORDS_4 = "draft-4"
    WORDS_8 = "draft-8"
    WORDS_13 = "draft-13"


#: The words of a query that its draft has.
DRAFT_WORDS: Final[Mapping[DraftArm, int]] = {DraftArm.WORDS_4: 4, DraftArm.WORDS_8: 8, DraftArm.WORDS_13: 13}
DRAFT_ARM_TEXT: Final[Mapping[DraftArm, str]] = {
    DraftArm.LRU: "no drafts, the partitions that were used last stay in memory",
    DraftArm.LAST_QUERIES: "no drafts, the partitions near what the agent asked before, the last query counting half",
    **{arm: f"the first {words} of a query's {QUERY_WORDS} words are its draft" for arm, words in DRAFT_WORDS.items()},
}


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to run.

    In a repeat an arm replays `searches` of 16 agents.  Memory holds `budget` of the bytes of all partitions; with
    `with_sweep` other budgets are counted in the first repeat, and drafts that come before the searches of all others.
    """

    chunks: int = 100_000
    repeats: int = 5
    searches: int = 1_000
    budget: float = 0.05
    arms: tuple[DraftArm, ...] = tuple(DraftArm)
    with_sweep: bool = True
    corpus: Path | None = None
    folder: Path | None = field(default=None)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if self.chunks < 500 or self.repeats < 1 or self.searches < AGENTS or not self.arms:
            raise ConfigError(
                f"got {self.chunks} chunks, {self.repeats} repeats of {self.searches} searches with {len(self.arms)} "
                f"arms, allowed are 500 chunks or more, {AGENTS} searches or more, and 1 or more of the others"
            )
        if not 0 < self.budget <= 1:
            raise ConfigError(f"budget: got {self.budget}, allowed is over 0 and up to 1")


def run_drafts(plan: DraftPlan, on_progress: Progress, *, embed: Embed, open_engine: OpenEngine) -> BenchResult:
    """Replay all arms over the partitions of one index.

    Args:
        plan: What to run.
        on_progress: Told what happens, at least when something takes long.
        embed: The embedder of text.
        open_engine: Opens our engine in an empty folder, for vectors of a length.

    Raises:
        ConfigError: if there is too little text for an index with partitions.
        RetrievalError: if our engine fails.
    """
    vectors = prepared_set(plan.chunks, plan.corpus, embed, on_progress)
    turns = -(-plan.searches // AGENTS)
    trace = by_turns(vectors, AGENTS, turns * plan.repeats, seed=6)
    parts = [trace[at * turns * AGENTS :][: plan.searches] for at in range(plan.repeats)]
    steps = {arm: _steps(arm, vectors, parts, embed, on_progress) for arm in plan.arms}
    with (
        scratch_folder(plan.folder) as folder,
        closing(open_engine(folder / "pancake", vectors.dim)) as engine,
    ):
        fill_engine(engine, vectors, on_progress)
        locate, every = _partitions(engine, vectors)
        total_bytes = sum(partition.num_bytes for partition in every)
        samples: Samples = {arm: {} for arm in plan.arms}
        for repeat in range(plan.repeats):
            on_progress(f"drafts: repeat {repeat + 1} of {plan.repeats}")
            for arm in plan.arms:
                found = _replay(arm, steps[arm][repeat], locate, _settings(plan.budget, total_bytes))
                for metric, values in _figures(arm, found).items():
                    samples[arm].setdefault(metric, []).append(values)
        sweep = _sweep(steps, locate, total_bytes, on_progress) if plan.with_sweep else None
        facts = engine_facts(engine)
        settings = _settings(plan.budget, total_bytes)
        needed_bytes = mean(
            sum(partition.num_bytes for partition in locate(vectors.queries[query], settings.per_query))
            for query in trace[:AGENTS]
        )
    return vector_result(
        "drafts",
        plan.repeats,
        samples,
        pairs=[(DraftArm.LRU, arm) for arm in plan.arms if DraftArm.LRU in plan.arms and arm is not DraftArm.LRU],
        notes=_notes(plan, vectors, settings),
        summary={
            "partitions": len(every),
            "partition_bytes": total_bytes,
            "budget_bytes": settings.budget_bytes,
            "partitions_per_query": settings.per_query,
            "needed_bytes_per_search": needed_bytes,
            "hit_rate_limit": min(1.0, settings.budget_bytes / needed_bytes),
            "pancake_stats": facts,
            "source": vectors.source,
        },
        sweep=sweep,
        percentile_names=("p50",),
    )


def _steps(
    arm: DraftArm, vectors: VectorSet, parts: Sequence[Sequence[int]], embed: Embed, on_progress: Progress
) -> list[list[Step]]:
    """Return for each repeat what its agents ask by turns, with the drafts of an arm."""
    drafts: dict[int, Vector] = {}
    if arm in DRAFT_WORDS:
        asked = sorted({query for part in parts for query in part})
        texts = [first_words(vectors.query_texts[query], DRAFT_WORDS[arm]) for query in asked]
        found = embedded(texts, embed, on_progress, folder=cache_dir() / "bench")
        drafts = dict(zip(asked, found, strict=True))
    return [
        [Step(f"agent {place % AGENTS}", drafts.get(query), vectors.queries[query]) for place, query in enumerate(part)]
        for part in parts
    ]


def _partitions(engine: VectorEngine, vectors: VectorSet) -> tuple[Locate, Sequence[Partition]]:
    """Return what finds an engine's partitions, and all of them.

    Raises:
        ConfigError: if it has none.
    """
    every = engine.partitions(vectors.queries[0], ALL_PARTITIONS) if isinstance(engine, PrefetchesPartitions) else []
    if not every or not isinstance(engine, PrefetchesPartitions):
        raise ConfigError(
            f"an index of {len(vectors.base):,} vectors has no partitions, it is searched whole; ask for more text "
            "with --chunks: 25000 are enough"
        )
    return engine.partitions, every


def _settings(budget: float, total_bytes: int) -> DraftSettings:
    return DraftSettings(budget_bytes=max(1, int(budget * total_bytes)))


def _replay(
    arm: DraftArm, steps: Sequence[Step], locate: Locate, settings: DraftSettings, *, ahead: int = 0
) -> Replayed:
    return replay_lru(steps, locate, settings) if arm is DraftArm.LRU else replay(steps, locate, settings, ahead=ahead)


def _figures(arm: DraftArm, found: Replayed) -> dict[str, list[float]]:
    figures = {"hit_rate": [found.hit_rate], "read_bytes": [found.read_bytes]}
    return figures if arm is DraftArm.LRU else {**figures, "precision": [found.precision]}


def _sweep(
    steps: Mapping[DraftArm, Sequence[Sequence[Step]]], locate: Locate, total_bytes: int, on_progress: Progress
) -> list[dict[str, Any]]:
    """Return hit rates at other budgets, of the first repeat."""
    rows: list[dict[str, Any]] = []
    for ahead in _SWEEP_AHEAD:
        for budget in _SWEEP_BUDGETS:
            on_progress(f"drafts: a budget of {budget:g}, {ahead} other searches between a draft and its own")
            settings = _settings(budget, total_bytes)
            rates = {
                f"{arm}_hit_rate": round(_replay(arm, of[0], locate, settings, ahead=ahead).hit_rate, 3)
                for arm, of in steps.items()
            }
            rows.append({"budget": budget, "searches_between": ahead, **rates})
    return rows


def _notes(plan: DraftPlan, vectors: VectorSet, settings: DraftSettings) -> tuple[str, ...]:
    return (
        *(f"{arm}: {DRAFT_ARM_TEXT[arm]}." for arm in plan.arms),
        (
            f"{AGENTS} agents by turns over {vectors.source}; a search needs the "
            f"{settings.per_query} nearest partitions."
        ),
        (
            f"Memory holds {settings.budget_bytes:,} bytes of partitions, {plan.budget:g} of all, in every arm; it is "
            "empty when a repeat begins."
        ),
        "Arms with drafts fall back on what the agent asked before, and on what is used often, as the store does.",
        "A draft comes right before its search, and all of it is there in time; the sweep also has other orders.",
        "Counted, not timed: the same text gives the same figures.",
    )
