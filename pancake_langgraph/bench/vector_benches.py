"""The benches of indexes and memories, with the real embedder and the real engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.agent_live import LIVE_ARM_TEXT, LiveArm, LivePlan, model_at, run_live
from pancake_langgraph.bench.agent_live import missing_for as live_missing_for
from pancake_langgraph.bench.agent_memory import AGENTS, AgentMemoryPlan, run_agent_memory
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.drafts import DraftArm, DraftPlan, run_drafts
from pancake_langgraph.bench.memory_arms import MemoryArm
from pancake_langgraph.bench.options import BenchOptions, chosen_arms
from pancake_langgraph.bench.pinning import one_core
from pancake_langgraph.bench.retrieval import (
    RetrievalPlan,
    mean_recall,
    missing_notes,
    prepared_set,
    run_retrieval,
    scratch_folder,
)
from pancake_langgraph.bench.retrieval_load import LoadArm, LoadPlan, run_retrieval_load
from pancake_langgraph.bench.retrieval_node import NODE_ARMS, NodePlan, StartEngine, run_retrieval_node
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import OpenEngine, SearchArm
from pancake_langgraph.bench.statistics import compare_arms, describe_arms
from pancake_langgraph.bench.vector_sets import VectorSet, clustered_set
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.retrieval.base import VectorEngine
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.log import Ack

_ANSWER_TOKENS: Final = 16
_LIVE_MODEL_TEXT: Final = {"small": "SmolLM2-135M", "tiny": "a random model of 6 M weights"}


def run(name: str, options: BenchOptions, on_progress: Progress, start_engine: StartEngine) -> BenchResult:
    """Run the bench called `name`; `start_engine` gives a model server, for those that need one.

    Raises:
        ConfigError: if a package is missing, or there is too little text.
        LaunchError: if the model server does not start.
        ModelFilesError: if the embedder's files are not there.
        RetrievalError: if our engine fails.
    """
    if name == "retrieval-node":
        return retrieval_node(options, on_progress, start_engine)
    if name == "agent-memory" and options.live_s:
        with start_engine() as engine:
            model = (engine.base_url, engine.plan.served_model_name)
            return agent_memory(options, on_progress, model=model)
    return _WITHOUT_ENGINE[name](options, on_progress)


def retrieval(options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `retrieval`.

    Raises:
        ConfigError: if a package is missing, or there is too little text.
        ModelFilesError: if the embedder's files are not there.
        RetrievalError: if our engine fails.
    """
    plan = RetrievalPlan(
        chunks=options.chunks,
        large_rows=options.large_rows,
        repeats=options.repeats,
        searches=options.searches,
        arms=chosen_arms(tuple(SearchArm), options.arms),
        corpus=options.corpus,
    )
    return run_retrieval(plan, on_progress, embed=_embedder(options), open_engine=_opener("none", "manual"))


def agent_memory(options: BenchOptions, on_progress: Progress, *, model: tuple[str, str] | None = None) -> BenchResult:
    """Run `agent-memory`; with a `model` (base URL and name) also agents that work with it, on the large set.

    Raises:
        ConfigError: if a package is missing, or there is too little text.
        ModelFilesError: if the embedder's files are not there.
        RetrievalError: if our engine fails.
    """
    plan = AgentMemoryPlan(
        chunks=options.chunks,
        repeats=options.repeats,
        steps=options.searches,
        arms=chosen_arms(tuple(MemoryArm), options.arms),
        corpus=options.corpus,
    )
    found = run_agent_memory(plan, on_progress, embed=_embedder(options), open_engine=_opener)
    return found if model is None else _with_model(found, options, on_progress, model)


def retrieval_load(options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `retrieval-load`; raises as `run`."""
    plan = LoadPlan(
        chunks=options.chunks,
        repeats=options.repeats,
        searches=options.searches,
        arms=chosen_arms(tuple(LoadArm), options.arms),
        corpus=options.corpus,
    )
    return run_retrieval_load(plan, on_progress, embed=_embedder(options), open_engine=_opener("none", "manual"))


def drafts(options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `drafts`; raises as `run`."""
    plan = DraftPlan(
        chunks=options.chunks,
        repeats=options.repeats,
        searches=options.searches,
        arms=chosen_arms(tuple(DraftArm), options.arms),
        with_sweep=options.sweep_repeats > 0,
        corpus=options.corpus,
    )
    return run_drafts(plan, on_progress, embed=_embedder(options), open_engine=_opener("none", "manual"))


def retrieval_node(options: BenchOptions, on_progress: Progress, start_engine: StartEngine) -> BenchResult:
    """Run `retrieval-node`; raises as `run`."""
    plan = NodePlan(
        chunks=options.chunks,
        large_rows=options.large_rows,
        repeats=options.repeats,
        sweep_repeats=options.sweep_repeats,
        reads_per_s=options.reads_per_s,
        programs=options.runs,
        arms=chosen_arms(NODE_ARMS, options.arms),
        corpus=options.corpus,
    )
    return run_retrieval_node(
        plan,
        on_progress,
        embed=_embedder(options),
        open_engine=_opener("none", "manual"),
        start_engine=start_engine,
    )


_WITHOUT_ENGINE: Final[Mapping[str, Callable[[BenchOptions, Progress], BenchResult]]] = {
    "agent-memory": agent_memory,
    "drafts": drafts,
    "retrieval": retrieval,
    "retrieval-load": retrieval_load,
}


def _with_model(
    found: BenchResult, options: BenchOptions, on_progress: Progress, model: tuple[str, str]
) -> BenchResult:
    """Add the arms with a model to a result."""
    real = prepared_set(options.chunks, options.corpus, _embedder(options), on_progress)
    vectors = clustered_set(real, options.large_rows, on_progress, folder=cache_dir() / "bench")
    missing = {arm: package for arm in LiveArm if (package := live_missing_for(arm)) is not None}
    arms = [arm for arm in LiveArm if arm not in missing]
    with one_core(), scratch_folder(None) as folder:
        samples = run_live(
            LivePlan(options.repeats, options.live_s),
            vectors,
            arms,
            on_progress,
            embedder=_Embedder(1, options.dtype).model,
            call_model=model_at(*model, max_tokens=_ANSWER_TOKENS),
            open_engine=_opener("group"),
            folder=folder,
        )
    pairs = [(LiveArm.LANGCHAIN_FAISS, LiveArm.PANCAKE)] if len(arms) == len(LiveArm) else []
    comparison = compare_arms(samples, pairs=pairs, percentile_names=("p50", "p99"))
    live = _live_notes(arms, vectors, _LIVE_MODEL_TEXT[options.live_model])
    summary = found.summary or {}
    return replace(
        found,
        arms={**found.arms, **describe_arms(samples)},
        ratios={**found.ratios, **comparison.ratios},
        notes=(*found.notes, *live, *missing_notes(missing), *comparison.notes),
        summary={**summary, "mean_recall": {**summary.get("mean_recall", {}), **mean_recall(samples)}},
    )


def _live_notes(arms: Sequence[LiveArm], vectors: VectorSet, model: str) -> tuple[str, ...]:
    return (
        *(f"{arm}: {LIVE_ARM_TEXT[arm]}." for arm in arms),
        (
            f"Arms named -live: {AGENTS} agents at once over {len(vectors.base):,} vectors ({vectors.source}); a step "
            f"embeds a question, searches, calls {model} for {_ANSWER_TOKENS} tokens, embeds a note and inserts it."
        ),
        "In arms named -live, search_s begins with a question's text; the engine is a process of its own on any core.",
    )


def _opener(ack: Ack, merge: Literal["background", "manual"] = "background") -> OpenEngine:
    """Return what opens an empty index with one way of acknowledging."""

    def open_engine(path: Path, dim: int) -> VectorEngine:
        return DiskVectorEngine(path, dim=dim, ack=ack, merge=merge)

    return open_engine


def _embedder(options: BenchOptions) -> _Embedder:
    return _Embedder(_cores(), options.dtype)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Embedder:
    """all-MiniLM-L6-v2, loaded when the first text has to be embedded: mostly everything is in the cache."""

    def __init__(self, num_threads: int, dtype: str) -> None:
        self._num_threads = num_threads
        self._dtype: Any = dtype  # checked by `BenchOptions`
        self._model: Any = None

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self.model.encode(texts)  # type: ignore[no-any-return] # loaded by name

    @property
    def name(self) -> str:
        """See `vector_sets.name_of`."""
        return "all-MiniLM-L6-v2" if self._dtype == "float32" else f"all-MiniLM-L6-v2-{self._dtype}"

    @property
    def model(self) -> Any:
        """The model."""
        if self._model is None:
            try:
                from pancake_langgraph.retrieval.minilm import MiniLMEmbeddings

                self._model = MiniLMEmbeddings(num_threads=self._num_threads, dtype=self._dtype)
            except ImportError as exc:
                raise ConfigError(
                    f"the embedder needs the package {exc.name}, which is not installed; pip install torch transformers"
                ) from exc
        return self._model
