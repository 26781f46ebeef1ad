"""A made-up corpus for the benches of indexes, and an engine of partitions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pancake_langgraph.bench import retrieval
from pancake_langgraph.bench.corpus import Corpus
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.partitions import Partition, PartitionId
from tests.plain_vectors import DIM, PlainEngine

WORDS = [f"word{number}" for number in range(300)]


def a_corpus(*, documents: int = 60, chunks: int = 12) -> Corpus:
    """Return documents that have words of their own."""
    rng = np.random.default_rng(0)
    texts, numbers = [], []
    for document in range(documents):
        own = rng.choice(WORDS, 12)
        for chunk in range(chunks):
            texts.append(" ".join([*rng.choice(own, 40), f"chunk{document}-{chunk}"]))
            numbers.append(document)
    return Corpus(tuple(texts), tuple(numbers), "made-up words")


def make_small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let benches take the made-up corpus, and keep files below the test's folder."""
    monkeypatch.setenv("PANCAKE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(retrieval, "load_corpus", lambda chunks, say, folder: a_corpus())


def kept_engines(kind: type[PlainEngine] = PlainEngine) -> Callable[[Path, int], PlainEngine]:
    """Return what opens an engine for a folder, the same one again for the same folder."""
    engines: dict[Path, PlainEngine] = {}
    return lambda path, dim: engines.setdefault(path, kind(dim))


class ShelvedEngine(PlainEngine):
    """Has 1,024 partitions of 10 to 12 bytes, around centers of its own."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim)
        centers = np.random.default_rng(5).standard_normal((1_024, dim))
        self.centers = (centers / np.linalg.norm(centers, axis=1, keepdims=True)).astype(np.float32)

    def partitions(self, vector: Vector, n: int) -> list[Partition]:
        """Return the nearest partitions."""
        order = np.argsort(-(self.centers @ vector), kind="stable")[:n]
        return [Partition(("s", int(number)), 10 + int(number) % 3) for number in order]

    def warm(self, ids: Sequence[PartitionId]) -> int:
        """Refuse: nothing is read where searches are only counted."""
        raise AssertionError("a replay reads nothing")

    def cool(self, ids: Sequence[PartitionId]) -> None:
        """Do nothing."""

    def is_warm(self, ids: Sequence[PartitionId]) -> list[bool]:
        """Say no."""
        return [False for _ in ids]
