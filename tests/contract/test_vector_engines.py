"""One suite over every vector engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pancake_langgraph.retrieval.base import VectorEngine
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
