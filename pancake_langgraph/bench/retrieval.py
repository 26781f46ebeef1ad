"""Bench `retrieval`: one search after the other on one core, by what people use today and by our engine.

It starts no model server.  Queries are embedded before the clock starts.
"""

from __future__ import annotations

import datetime
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.corpus import Progress, load_corpus
from pancake_langgraph.bench.machine import Machine, read_machine
from pancake_langgraph.bench.pinning import one_core
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import (
    LARGE_ARMS,
    ONLY_LARGE_ARMS,
    SEARCH_ARM_TEXT,
    TARGET_RECALL,
    K,
    OpenedArm,
    OpenEngine,
    SearchArm,
    SearchArms,
    missing_for,
    recall,
)
from pancake_langgraph.bench.statistics import compare_arms, describe_arms
from pancake_langgraph.bench.vector_sets import Embed, VectorSet, by_turns, clustered_set, nearest, real_set
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.retrieval.base import VectorEngine

#: Distributions whose versions belong next to the figures.
PACKAGES: Final = ("faiss-cpu", "numpy", "hnswlib", "chromadb", "langchain-community", "langgraph-checkpoint")
#: What is added to an arm's name on the large set.
LARGE: Final = "-clustered"
_AGENTS: Final = 16
#: Slow arms do at least so many searches, whatever the time.
_MIN_SEARCHES: Final = 3

Samples = dict[str, dict[str, list[list[float]]]]


@dataclass(frozen=True, slots=True)
class RetrievalPlan:
    """What to run.

    `chunks` of text are embedded; the large set has `large_rows` vectors, 0 leaves it out.  In a repeat an arm does
    `searches`, or fewer if they take more than `arm_s` seconds.  Arms whose package is not installed are left out, and
    a note says so.
    """

    chunks: int = 100_000
    large_rows: int = 1_000_000
    repeats: int = 5
    searches: int = 1_000
    arm_s: float = 20.0
    arms: tuple[SearchArm, ...] = tuple(SearchArm)
    corpus: Path | None = None
    folder: Path | None = field(default=None)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if self.chunks < 500 or (self.large_rows and self.large_rows < self.chunks):
            raise ConfigError(
                f"got {self.chunks} chunks and {self.large_rows} rows of the large set, allowed are 500 chunks or more "
                "and at least as many rows as chunks (or 0)"
            )
        if self.repeats < 1 or self.searches < 1 or not self.arms:
            raise ConfigError(
                f"got {self.repeats} repeats of {self.searches} searches with {len(self.arms)} arms, allowed is 1 or "
                "more of each"
            )


def run_retrieval(plan: RetrievalPlan, on_progress: Progress, *, embed: Embed, open_engine: OpenEngine) -> BenchResult:
    """Run all arms on both sets.

    Args:
        plan: What to run.
        on_progress: Told what happens, at least when something takes long.
        embed: The embedder of text.
        open_engine: Opens our engine in a folder, for vectors of a length; it keeps what is put in when it is closed.

    Raises:
        ConfigError: if there is too little text.
        RetrievalError: if our engine fails.
    """
    real = prepared_set(plan.chunks, plan.corpus, embed, on_progress)
    missing = {arm: package for arm in plan.arms if (package := missing_for(arm)) is not None}
    arms = [arm for arm in plan.arms if arm not in missing]
    samples: Samples = {}
    summary: dict[str, Any] = {}
    with one_core() as core:
        for vectors, suffix, chosen in _sets(plan, real, arms, on_progress):
            found, facts = _run_set(plan, vectors, chosen, on_progress, open_engine)
            samples |= {f"{arm}{suffix}": values for arm, values in found.items()}
            summary[vectors.name] = facts
    return vector_result(
        "retrieval",
        plan.repeats,
        samples,
        pairs=_pairs(samples),
        notes=(*_notes(plan, real, arms, core), *missing_notes(missing)),
        summary=summary,
    )


def prepared_set(chunks: int, corpus: Path | None, embed: Embed, on_progress: Progress) -> VectorSet:
    """Return the real set, embedded now or before."""
    text = load_corpus(chunks, on_progress, folder=corpus)
    on_progress(f"corpus: {chunks:,} chunks of {text.source}")
    return real_set(text, embed, on_progress, folder=cache_dir() / "bench")


def _sets(
    plan: RetrievalPlan, real: VectorSet, arms: Sequence[SearchArm], on_progress: Progress
) -> list[tuple[VectorSet, str, list[SearchArm]]]:
    sets = [(real, "", [arm for arm in arms if arm not in ONLY_LARGE_ARMS])]
    large_arms = [arm for arm in arms if arm in LARGE_ARMS]
    if plan.large_rows and large_arms:
        large = clustered_set(real, plan.large_rows, on_progress, folder=cache_dir() / "bench")
        sets.append((large, LARGE, large_arms))
    return [entry for entry in sets if entry[2]]


def _run_set(
    plan: RetrievalPlan,
    vectors: VectorSet,
    chosen: Sequence[SearchArm],
    on_progress: Progress,
    open_engine: OpenEngine,
) -> tuple[Samples, dict[str, Any]]:
    trace = _trace(vectors, plan)
    truth = nearest(vectors.base, vectors.queries[trace], K, on_progress)
    samples: Samples = {arm: {} for arm in chosen}
    keep = cache_dir() / "bench" / "indexes"
    with (
        scratch_folder(plan.folder) as folder,
        closing(SearchArms(vectors, folder, keep, on_progress, open_engine)) as arms,
    ):
        # Ours first: what others share with it must not be counted as theirs, nor the other way round.
        opened = {arm: arms.open(arm) for arm in sorted(chosen, key=lambda arm: arm is not SearchArm.PANCAKE)}
        for repeat in range(plan.repeats):
            shift = repeat % len(chosen)
            first = repeat * plan.searches
            for arm in [*chosen[shift:], *chosen[:shift]]:
                on_progress(f"{vectors.name}: repeat {repeat + 1} of {plan.repeats}, {arm}")
                figures = _search(opened[arm], trace, truth, range(first, first + plan.searches), plan.arm_s)
                figures["memory_bytes"] = [float(opened[arm].memory_bytes)]
                for metric, values in figures.items():
                    samples[arm].setdefault(metric, []).append(values)
        ours = set(chosen) & {SearchArm.PANCAKE, SearchArm.PANCAKE_COLD}
        facts = {
            "vectors": len(vectors.base),
            "raw_bytes": int(vectors.base.nbytes),
            "source": vectors.source,
            "mean_recall": mean_recall(samples),
            "settings": {str(arm): opened[arm].setting for arm in chosen if opened[arm].setting},
            "pancake_stats": engine_facts(arms.engine) if ours else None,
        }
    return samples, facts


def _search(arm: OpenedArm, trace: Sequence[int], truth: Any, places: range, max_s: float) -> dict[str, list[float]]:
    """Search for the places of the trace, one after the other."""
    search_s: list[float] = []
    recalls: list[float] = []
    if arm.begin is not None:
        arm.begin()
    begun_s = time.perf_counter()
    for place in places:
        place %= len(trace)
        if arm.prepare is not None:
            arm.prepare()
        started_s = time.perf_counter()
        found = arm.search(trace[place])
        search_s.append(time.perf_counter() - started_s)
        recalls.append(recall(found, truth[place]))
        if time.perf_counter() - begun_s > max_s and len(search_s) >= _MIN_SEARCHES:
            break
    return {"search_s": search_s, "recall": recalls, "searches_per_s": [len(search_s) / sum(search_s)]}


def _trace(vectors: VectorSet, plan: RetrievalPlan) -> list[int]:
    """Return the queries of all agents, by turns."""
    return by_turns(vectors, _AGENTS, -(-plan.searches * plan.repeats // _AGENTS), seed=3)


def _pairs(samples: Mapping[str, object]) -> list[tuple[str, str]]:
    """Pair what others do with what we do, on each set, and the LRU cache with our engine without cached pages."""
    pairs: list[tuple[str, str]] = []
    for suffix in ("", LARGE):
        ours, cold = f"{SearchArm.PANCAKE}{suffix}", f"{SearchArm.PANCAKE_COLD}{suffix}"
        for arm in SearchArm:
            other = f"{arm}{suffix}"
            against = cold if arm is SearchArm.LRU else ours
            if other != against and {other, against} <= set(samples):
                pairs.append((other, against))
    return pairs


def _notes(plan: RetrievalPlan, real: VectorSet, arms: Sequence[SearchArm], core: int | None) -> tuple[str, ...]:
    pinned = "on one core that all threads were held on" if core is not None else "with one thread per library"
    return (
        *(f"{arm}: {SEARCH_ARM_TEXT[arm]}." for arm in arms),
        f"Real set: {real.source}; queries are {len(real.queries):,} held-out places.",
        f"Arms named {LARGE} ran on {plan.large_rows:,} vectors: the real ones, and mixes of neighbors with noise.",
        f"One search after the other, {pinned}; {_AGENTS} agents by turns, each walking through documents.",
        f"recall counts the true {K} nearest; arms with a knob were set to {TARGET_RECALL} on other queries.",
        (
            f"An arm did at most {plan.searches:,} searches a repeat and ended after {plan.arm_s:g} s, so slow arms "
            "have fewer values."
        ),
        "memory_bytes is what the process grew by; for lru-partitions and pancake-cold what our engine says.",
    )


# -- shared with the other benches of indexes -----------------------------------------------------------------------


def vector_result(
    workload: str,
    repeats: int,
    samples: Samples,
    *,
    pairs: Sequence[tuple[str, str]],
    notes: Sequence[str],
    summary: Mapping[str, Any],
    sweep: Sequence[Mapping[str, Any]] | None = None,
    percentile_names: Sequence[str] = ("p50", "p99"),
) -> BenchResult:
    """Compose the documented result of a bench without an engine."""
    comparison = compare_arms(samples, pairs=pairs, percentile_names=percentile_names)
    return BenchResult(
        workload=workload,
        version=metadata.version("pancake-langgraph"),
        machine=machine_with(PACKAGES),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        repeats=repeats,
        arms=describe_arms(samples),
        ratios=comparison.ratios,
        outcomes={},
        notes=(*notes, *comparison.notes),
        summary=summary,
        sweep=None if sweep is None else tuple(sweep),
    )


def mean_recall(samples: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, float]:
    """Return for each arm the mean recall of all its searches: most have 1, so that percentiles say little."""
    every = {
        arm: [share for repeat in metrics.get("recall", ()) for share in repeat] for arm, metrics in samples.items()
    }
    return {str(arm): round(sum(shares) / len(shares), 4) for arm, shares in every.items() if shares}


def missing_notes(missing: Mapping[Any, str]) -> tuple[str, ...]:
    """Return a note for each arm that was left out."""
    return tuple(
        f"{arm} was left out: its package {package} is not installed (pip install {package})."
        for arm, package in missing.items()
    )


def machine_with(packages: Sequence[str]) -> Machine:
    """Return the machine with the versions of more packages."""
    machine = read_machine()
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return replace(
        machine, packages={**machine.packages, **{name: installed[name] for name in packages if name in installed}}
    )


def engine_facts(engine: VectorEngine) -> dict[str, int]:
    """Return sizes of our engine for a summary."""
    stats = engine.stats()
    return {
        "num_vectors": stats.num_vectors,
        "delta_vectors": stats.delta_vectors,
        "memory_bytes": stats.memory_bytes,
        "disk_bytes": stats.disk_bytes,
    }


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder below `parent`, or where temporary files go; it is gone when the block ends."""
    path = Path(tempfile.mkdtemp(prefix="pancake-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # some library may still hold a file open
