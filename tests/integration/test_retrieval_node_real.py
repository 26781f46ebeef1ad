"""`pancake bench retrieval-node` on the real engine, over a small index on a real disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from pancake_langgraph.bench.retrieval_node import NODE_ARMS, NodePlan, run_retrieval_node
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.launch import Stack
from pancake_langgraph.launch.stack import EngineProcess
from pancake_langgraph.retrieval.base import VectorEngine
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from tests.plain_vectors import hashed
from tests.unit.bench_kit import make_small_world

pytestmark = pytest.mark.real


def open_engine(path: Path, dim: int) -> VectorEngine:
    """Return an index that has partitions from a few hundred vectors on."""
    return DiskVectorEngine(path, dim=dim, ack="none", codes="sq8", coded_rows=256, exact_rows=64, merge="manual")


class ByAnotherName:
    """An engine process under another URL: ChatOpenAI keeps connections by URL, also those of loops that are gone."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.base_url = engine.base_url.replace("127.0.0.1", "localhost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_a_graph_on_the_real_engine_waits_for_an_index_that_is_cold_or_told(
    smol_stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_small_world(monkeypatch, tmp_path)
    engine = smol_stack.engine_process
    assert engine is not None
    assert "127.0.0.1" in engine.base_url
    found = run_retrieval_node(
        NodePlan(chunks=720, repeats=1, sweep_repeats=1, programs=3, folder=tmp_path),
        lambda _: None,
        embed=hashed,
        open_engine=open_engine,
        start_engine=lambda: nullcontext(cast("EngineProcess", ByAnotherName(engine))),
    )
    assert BenchResult.from_json(found.to_json()) == found
    assert list(found.arms) == [str(arm) for arm in NODE_ARMS]
    for metrics in found.arms.values():
        assert metrics["retrieval_wait_s"].n == metrics["program_s"].n == 3
    summary: Mapping[str, Any] = found.summary or {}
    assert set(summary["searches_with_other_hits"].values()) == {0}
    assert summary["drafts"]["hit_rate"] > 0  # the model writes for longer than a draft takes
    assert summary["drafts"]["failures"] == 0
    assert [row["words_written"] for row in found.sweep or ()] == [8, 13, 26]
