"""The benches of indexes and memories, with the real embedder and the real engine."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.agent_memory import AgentMemoryPlan, run_agent_memory
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.memory_arms import MemoryArm
from pancake_langgraph.bench.options import BenchOptions, chosen_arms
from pancake_langgraph.bench.retrieval import RetrievalPlan, run_retrieval
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import OpenEngine, SearchArm
from pancake_langgraph.retrieval.base import VectorEngine

#: Written into indexes of benches; no embedder is ever compared with it.
_FINGERPRINT: Final = None


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
    return run_retrieval(plan, on_progress, embed=_Embedder(), open_engine=_opener("group"))


def agent_memory(options: BenchOptions, on_progress: Progress) -> BenchResult:
    """Run `agent-memory`.

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
    return run_agent_memory(plan, on_progress, embed=_Embedder(), open_engine=_opener)


def _opener(ack: str) -> OpenEngine:
    """Return what opens an empty index with one way of acknowledging."""

    def open_engine(path: Path, dim: int) -> VectorEngine:
        module: Any = importlib.import_module("pancake_langgraph.retrieval.disk_engine")
        return module.DiskVectorEngine(path, dim=dim, fingerprint=_FINGERPRINT, ack=ack)  # type: ignore[no-any-return]

    return open_engine


class _Embedder:
    """all-MiniLM-L6-v2, loaded when the first text has to be embedded: mostly everything is in the cache."""

    def __init__(self) -> None:
        self._model: Any = None

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self._model is None:
            try:
                from pancake_langgraph.retrieval.minilm import MiniLMEmbeddings

                self._model = MiniLMEmbeddings()
            except ImportError as exc:
                raise ConfigError(
                    f"the embedder needs the package {exc.name}, which is not installed; pip install torch transformers"
                ) from exc
        return self._model.encode(texts)  # type: ignore[no-any-return] # loaded above
