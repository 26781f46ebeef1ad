"""One suite over every vector engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pancake_langgraph.retrieval.base import VectorEngine
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine
from tests.vector_suite import Opener, VectorEngineContract


class MemoryOpener(Opener):
    def make(self, dim: int, clock: Callable[[], float]) -> VectorEngine:
        return MemoryVectorEngine(dim, clock=clock)


class TestMemoryEngine(VectorEngineContract):
    @pytest.fixture
    def opener(self) -> Iterator[Opener]:
        opener = MemoryOpener()
        yield opener
        opener.close()


class DiskOpener(Opener):
    """Engines in folders of their own, with segments so small that a few items make several."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root, self._numbers = root, itertools.count()
        self._made: dict[VectorEngine, tuple[Path, Callable[[], float]]] = {}

    def make(self, dim: int, clock: Callable[[], float]) -> VectorEngine:
        return self._engine(self._root / str(next(self._numbers)), dim, clock)

    def _engine(self, path: Path, dim: int | None, clock: Callable[[], float]) -> VectorEngine:
        engine = DiskVectorEngine(
            path, dim=dim, ack="none", merge="manual", flush_rows=5, coded_rows=12, codes="sq8", clock=clock
        )
        self._made[engine] = path, clock
        return engine

    def reopen(self, engine: VectorEngine) -> VectorEngine:
        engine.close()
        self.opened.append(self._engine(self._made[engine][0], None, self._made[engine][1]))
        return self.opened[-1]

    def stir(self, engine: VectorEngine) -> None:
        assert isinstance(engine, DiskVectorEngine)
        engine.settle()


class TestDiskEngine(VectorEngineContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Opener]:
        opener = DiskOpener(tmp_path)
        yield opener
        opener.close()
